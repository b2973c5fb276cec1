"""Saving and loading of wrapped Keras models, and refusal of methods and changes that wrappers rule out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import torch

from .compiled import build_optimizer
from .files import load_from, seeds_of, write_into
from .plain import is_built


class KerasFiles:
    """Mix-in of `WrappedKeras` for saving and loading."""

    _workbench_plain: Any
    _workbench_torch: Any
    _made: Any
    _workbench_module: Any
    parameters: Any
    trainable_variables: Any
    compiled: bool
    optimizer: Any

    def _obj_type(self) -> str:
        """Hook called by Keras before it visits a model to save or load it: the next `dir()` returns only the attributes to save."""
        self.__dict__.setdefault("_workbench_walk", ("optimizer",))
        return "Layer"

    def __dir__(self) -> list[str]:
        names = self.__dict__.pop("_workbench_walk", None)
        return list(super().__dir__() if names is None else names)

    def save_weights(self, *args: Any, **kwargs: Any) -> Any:
        self._made()
        self._build_optimizer()
        return super().save_weights(*args, **kwargs)  # type: ignore[misc]

    def load_weights(self, filepath: Any, skip_mismatch: bool = False, **kwargs: Any) -> Any:
        if self._workbench_torch is None and not is_built(self._workbench_plain):
            raise RuntimeError("call the wrapped model on inputs before loading weights: it has no variables yet")
        self._made()
        if skip_mismatch:
            raise ValueError(
                "skip_mismatch=True is not supported: the weights of a wrapped model are loaded all or none"
            )
        self._build_optimizer()
        return super().load_weights(filepath, **kwargs)  # type: ignore[misc]

    def _build_optimizer(self) -> None:
        """Create the variables of the optimizer, which Keras saves with the weights."""
        if self.compiled:
            build_optimizer(self)

    def save_own_variables(self, store: Any) -> None:
        write_into(store, self._made(), seeds_of(self._workbench_plain))

    def load_own_variables(self, store: Any) -> None:
        load_from(store, self._made(), seeds_of(self._workbench_plain))

    def save(self, filepath: Any, overwrite: bool = True, zipped: bool | None = None, **kwargs: Any) -> None:
        """Save all weights, the wrappers and the compile config to a `.keras` file; see `workbench.load`.

        Args:
            filepath: path that ends in .keras.
            overwrite: whether to replace an existing file.
            zipped: must not be False, since a wrapped model is a single file.
            kwargs: not supported.

        Raises:
            FileExistsError: if the file exists and `overwrite` is False.
            ValueError: if the path does not end in .keras, or other options are given.
        """
        path = Path(filepath)
        if path.suffix != ".keras" or zipped is False or kwargs:
            raise ValueError(
                f"save of a wrapped Keras model takes the path of one .keras file, not {', '.join([str(path), *kwargs])}; save_weights "
                "writes only the weights"
            )
        if path.exists() and not overwrite:
            raise FileExistsError(f"{path} already exists: save(path, overwrite=True) replaces it")
        self._write(path)

    def _write(self, path: Path, outer: Sequence[Any] = ()) -> None:
        """Save like `save`, including the modules around the model, outermost first."""
        self._made()
        self._build_optimizer()
        # looked up, since the module of WrappedModel imports this one
        keras.saving.get_registered_object("workbench>WrappedModel")(self).write(path, outer)

    def export(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse_config("export", 'torch.export.export(model.as_torch(), (x,), {"return_risk": True})')

    def get_config(self) -> Any:
        self._refuse_config(
            "get_config",
            "model.save(path) saves everything; model.voters() and model.unwrap() are plain Keras models, and can be copied and saved",
        )

    def add(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse_other_layers("add")

    def pop(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse_other_layers("pop")

    def _refuse_other_layers(self, what: str) -> None:
        raise NotImplementedError(
            f"{what} of a wrapped Keras model is not supported: its voters and heads belong to its original layers. Change the plain model, "
            "and wrap that"
        )

    def quantize(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse_config("quantize", "quantize a plain model of model.voters()")

    def _refuse_changes(self) -> None:
        """Raise RuntimeError if layers have new variables since the model was wrapped."""
        known = {id(place.variable) for place in self._workbench_module.places}
        new = [v.path for v in self._workbench_plain.weights if id(v) not in known]
        if new:
            raise RuntimeError(
                f"{type(self).__name__} has new weights since it was wrapped ({new[0]}), which its voters and heads do not have: change the "
                "layers first (enable_lora, quantize, add), then wrap the model"
            )

    def _refuse_config(self, what: str, remedy: str) -> None:
        raise NotImplementedError(
            f"{what} of a wrapped Keras model is not supported: its voters and noise are not part of the config from which Keras would build "
            f"the {type(self).__name__}. Instead: {remedy}"
        )

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"the class of a wrapped {cls.__name__} builds no models, as clone_model and from_config would: clone the plain model, "
            "model.unwrap_shared(), and wrap the clone"
        )

    def stateless_call(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            "stateless_call of a wrapped Keras model is not supported: its branches use their own tensors, not those handed over. Instead: "
            "torch.func.functional_call(model.as_torch(), {name: tensor}, x)"
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Refuse to cast or move the weights, which torch would do to the layers of the given model."""
        for parameter in self.parameters():
            empty = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            if fn(empty).dtype != empty.dtype or fn(empty).device != empty.device:
                raise NotImplementedError(
                    "the weights of a wrapped Keras model are neither cast nor moved: set the dtype (keras.config.set_dtype_policy) or device "
                    "(keras.device) before the model is built, then wrap it"
                )
        return self

    def __reduce__(self) -> Any:
        self._refuse_config("a copy or pickle", "model.save(path) and workbench.load(path)")

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce__()


__all__ = ["KerasFiles"]
