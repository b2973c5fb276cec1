"""`.keras` files of wrapped models: the plain model in Keras format, its wrappers, and all weights."""

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
from ..additions import MARK
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
    """Serializable stand-in for a wrapped model, which Keras writes to a file and from which it rebuilds the model.

    `__dir__` returns the attributes that Keras visits when it saves or loads the weights.

    Args:
        model: the wrapped model.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        # bypasses setattr, which would track the model's layers as sub-layers
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
        """Write the file atomically.

        Args:
            path: path that ends in .keras.
            outer: modules around the model, such as a calibration, outermost first.

        Raises:
            ValueError: if the model has unregistered wrappers, or a module around it was made with functions.
            RuntimeError: if the model cannot be rebuilt from its config.
        """
        if foreign := unknown_methods(described(self._workbench_model._made())):
            raise ValueError(
                f"{', '.join(foreign)} has no name that a file could keep: register it (workbench.register), or save only the weights with "
                "save_weights"
            )
        around, tensors = around_of([*outer])
        for entry in around:
            if entry["functions"]:
                raise ValueError(
                    f"{entry['class']} was made with functions ({', '.join(entry['functions'])}=), which a .keras file cannot hold: save it to "
                    "a path with another ending, and load that into one made in the same way"
                )
        new_like(self._workbench_plain)  # raises now rather than when the file is loaded
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
        """Rebuild the wrapped model, without its weights."""
        model = _plain(config["model"])
        for layer, trainable in zip(model._flatten_layers(), config["trainable"], strict=True):
            layer.trainable = trainable
        part = json.loads(config["wrappers"])
        if foreign := unknown_methods(part):
            raise ValueError(
                f"the file was saved with {', '.join(foreign)}, which workbench does not know: register it first (workbench.register)"
            )
        options = options_of(part)
        if "order" in part:
            outputs, names = part["order"]
            options["example"] = Execution(tuple(map(tuple, outputs)), tuple(names))
        wrappers = [
            built(name, method.get("arguments", {}), set()).with_options(**options)
            for name, method in part["methods"].items()
        ]
        with _trainable_as_saved(model, config["order"]):
            wrapped = wrapped_twin(model, tuple(wrappers), decorated=True)
            recall_data(wrapped._made()._workbench, part)
        wrapped.__dict__.update(
            _workbench_walk=SAVED, _workbench_order={name: i for i, name in enumerate(config["order"])}
        )
        return wrapped


def _plain(config: dict[str, Any]) -> Any:
    """Build the plain model of a config, also if its class is decorated, so that Keras would build wrapped models."""
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
def _trainable_as_saved(model: Any, names: list[str]) -> Iterator[None]:
    """Context manager in which exactly the parameters taken over by members in the saved model are trainable, whatever is frozen now."""
    taken_over = {name.partition(MARK)[0] for name in names if MARK in name}
    tensors = {
        f"{p.path}.{p.name}" if p.path else p.name: p.variable._value
        for p in KerasModule([model]).places
        if not p.buffer
    }
    flags = {name: tensor.requires_grad for name, tensor in tensors.items()}
    try:
        for name, tensor in tensors.items() if taken_over & tensors.keys() else ():
            tensor.requires_grad_(name in taken_over)
        yield
    finally:
        for name, tensor in tensors.items():
            tensor.requires_grad_(flags[name])


__all__ = ["WrappedModel"]
