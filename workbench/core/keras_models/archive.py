"""`.keras` files of wrapped models: the plain model as Keras keeps it, what it was wrapped with, and all weights."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import keras

from ...atomic import replacing
from ...engine.execution import Execution
from ..ownership import MARK
from ..saving.file_format import write
from ..saving.outer import around_of
from ..saving.save_pretrained import AROUND
from ..saving.wrapper_json import built, described, options_of, recall_data, unknown_methods
from .files import seeds_of, write_into
from .model import SAVED, WrappedKeras, wrapped_twin
from .plain import new_like, rebuilt
from .tensors import KerasModule

_HOW = "workbench.load(path) reads this file, as keras.saving.load_model does once workbench has wrapped or loaded a Keras model"


@keras.saving.register_keras_serializable(package="workbench")
class WrappedModel(keras.layers.Layer):
    """What Keras writes in place of a wrapped model, and makes one of again; the walk of Keras over a file finds what is named here.

    Args:
        model: the wrapped model.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        # not by setattr, which would take over the model's layers
        self.__dict__.update(built=True, _workbench_model=model, _workbench_plain=model.unwrap_shared())
        self.__dict__["optimizer"] = model.optimizer

    def __dir__(self) -> list[str]:
        return [*SAVED]

    @property
    def variables(self) -> list[Any]:
        return [*self._workbench_model.variables, *self._workbench_plain.variables]

    def get_config(self) -> dict[str, Any]:
        plain = {**keras.saving.serialize_keras_object(self._workbench_plain), "compile_config": None}
        wrapped = self._workbench_model._made()
        trainable = [layer.trainable for layer in self._workbench_plain._flatten_layers()]
        order = [*dict(wrapped.named_parameters()), *dict(wrapped.named_buffers())]
        return {
            "how": _HOW,
            "model": plain,
            "trainable": trainable,
            "wrappers": json.dumps(described(wrapped)),
            "order": order,
        }

    def get_compile_config(self) -> dict[str, Any]:
        return self._workbench_model.get_compile_config()

    def write(self, path: Path, outer: Sequence[Any] = ()) -> None:
        """Write the file, whole or not at all.

        Args:
            path: ends in .keras.
            outer: what stands around the model, such as a calibration, the outermost first.

        Raises:
            ValueError: if the model has wrappers of no name, or what stands around it was made with functions.
            RuntimeError: if another model of its class cannot be built from its config.
        """
        if foreign := unknown_methods(described(self._workbench_model._made())):
            raise ValueError(
                f"{', '.join(foreign)} has no name that a file could keep: register it (workbench.register), or save the weights alone by "
                "save_weights"
            )
        around, tensors = around_of([*outer])
        for entry in around:
            if entry["functions"]:
                raise ValueError(
                    f"{entry['class']} was made with functions ({', '.join(entry['functions'])}=), which no .keras file could give back: save "
                    "it to a path that ends otherwise, and load that into one that is made alike"
                )
        new_like(self._workbench_plain)  # a file that nobody could load is none
        with (
            replacing(path) as unfinished,
            TemporaryDirectory(dir=path.parent, prefix=".workbench-") as folder,
        ):
            keras.saving.save_model(self, file := Path(folder, "model.keras"))
            if outer:
                text = {"model": "keras", "parts": {"": described(self._workbench_model._made())}, "complex": []}
                write(around_file := Path(folder, AROUND), {**text, "around": around}, tensors)
                with zipfile.ZipFile(file, "a") as archive:
                    archive.write(around_file, AROUND)
            file.replace(unfinished)

    def save_own_variables(self, store: Any) -> None:
        write_into(store, self._workbench_model._made(), seeds_of(self._workbench_plain))

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """The wrapped model, without its weights."""
        model = _plain(config["model"])
        for layer, trains in zip(model._flatten_layers(), config["trainable"], strict=True):
            layer.trainable = trains
        part = json.loads(config["wrappers"])
        if foreign := unknown_methods(part):
            raise ValueError(
                f"the file was saved with {', '.join(foreign)}, which workbench does not know: register it before (workbench.register)"
            )
        options = options_of(part)
        if "order" in part:
            outputs, names = part["order"]
            options["example"] = Execution(tuple(map(tuple, outputs)), tuple(names))
        wrappers = [
            built(name, kept.get("arguments", {}), set()).with_options(**options)
            for name, kept in part["methods"].items()
        ]
        with _as_taken(model, config["order"]):
            wrapped = wrapped_twin(model, tuple(wrappers), decorated=True)
            recall_data(wrapped._made()._workbench, part)
        wrapped.__dict__.update(
            _workbench_walk=SAVED, _workbench_order={name: i for i, name in enumerate(config["order"])}
        )
        return wrapped


def _plain(config: dict[str, Any]) -> Any:
    """The plain model of a config, which is not that of a wrapped class."""
    cls = keras.saving.get_registered_object(config.get("registered_name") or "")
    if (
        cls is None
        or not issubclass(cls, keras.Model)
        or cls.from_config.__func__ is not keras.Model.from_config.__func__
    ):
        model = keras.saving.deserialize_keras_object(config)
        return model.unwrap_shared() if isinstance(model, WrappedKeras) else model
    return rebuilt(cls, config["config"], config.get("build_config"))


@contextmanager
def _as_taken(model: Any, names: list[str]) -> Iterator[None]:
    """While a model is wrapped, what members had taken over learns, whatever is frozen now, and nothing else does."""
    taken = {name.partition(MARK)[0] for name in names if MARK in name}
    tensors = {
        f"{p.path}.{p.name}" if p.path else p.name: p.variable._value
        for p in KerasModule([model]).places
        if not p.buffer
    }
    flags = {name: tensor.requires_grad for name, tensor in tensors.items()}
    try:
        for name, tensor in tensors.items() if taken & tensors.keys() else ():
            tensor.requires_grad_(name in taken)
        yield
    finally:
        for name, tensor in tensors.items():
            tensor.requires_grad_(flags[name])


__all__ = ["WrappedModel"]
