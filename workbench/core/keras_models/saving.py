"""How a wrapped Keras model is saved and loaded, and what it refuses since no config knows its wrappers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

from .compiled import build_optimizer
from .files import load_from, seeds_of, write_into
from .plain import is_built


class KerasFiles:
    """The files of a wrapped Keras model; a part of `WrappedKeras`."""

    _workbench_plain: Any
    _workbench_torch: Any
    _made: Any
    trainable_variables: Any
    compiled: bool
    optimizer: Any

    def _obj_type(self) -> str:
        """What Keras asks first when it walks over a model to save or load it: the next look at its names gives those that are saved."""
        self.__dict__.setdefault("_workbench_walk", ("optimizer",))
        return "Layer"

    def __dir__(self) -> list[str]:
        walked = self.__dict__.pop("_workbench_walk", None)
        return list(super().__dir__() if walked is None else walked)

    def save_weights(self, *args: Any, **kwargs: Any) -> Any:
        self._made()
        self._build_optimizer()
        return super().save_weights(*args, **kwargs)  # type: ignore[misc]

    def load_weights(self, filepath: Any, skip_mismatch: bool = False, **kwargs: Any) -> Any:
        if self._workbench_torch is None and not is_built(self._workbench_plain):
            raise RuntimeError("call the wrapped model on inputs before loading weights: it has no variables yet")
        self._made()
        if skip_mismatch:
            raise ValueError("skip_mismatch=True: the weights of a wrapped model are loaded all or none")
        self._build_optimizer()
        return super().load_weights(filepath, **kwargs)  # type: ignore[misc]

    def _build_optimizer(self) -> None:
        """Its variables, which Keras saves with the weights."""
        if self.compiled:
            build_optimizer(self)

    def save_own_variables(self, store: Any) -> None:
        write_into(store, self._made(), seeds_of(self._workbench_plain))

    def load_own_variables(self, store: Any) -> None:
        load_from(store, self._made(), seeds_of(self._workbench_plain))

    def save(self, filepath: Any, overwrite: bool = True, zipped: bool | None = None, **kwargs: Any) -> None:
        """Write a `.keras` file with all weights, wrappers and how the model is compiled; see `workbench.load`.

        Args:
            filepath: ends in .keras.
            overwrite: whether a file that is there may be replaced.
            zipped: not False: a wrapped model is one file.
            kwargs: none.

        Raises:
            FileExistsError: if there is a file that may not be replaced.
            ValueError: if the path is no `.keras` file.
        """
        path = Path(filepath)
        if path.suffix != ".keras" or zipped is False or kwargs:
            raise ValueError(
                f"save of a wrapped Keras model takes the path of one .keras file, not {', '.join([str(path), *kwargs])}; save_weights "
                "writes the weights alone"
            )
        if path.exists() and not overwrite:
            raise FileExistsError(f"{path} is there already: save(path, overwrite=True) replaces it")
        self._write(path)

    def _write(self, path: Path, outer: Sequence[Any] = ()) -> None:
        """As `save`, with what stands around the model, the outermost first."""
        self._made()
        self._build_optimizer()
        # whose module imports this one
        keras.saving.get_registered_object("workbench>WrappedModel")(self).write(path, outer)

    def export(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse_config("export", "torch.export.export takes a voter: model.as_torch().voters()[0]")

    def get_config(self) -> Any:
        self._refuse_config(
            "get_config",
            "model.save(path) writes all of it; model.voters() and model.unwrap() are plain Keras models, and can be copied and saved",
        )

    def add(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse_other_layers("add")

    def pop(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse_other_layers("pop")

    def _refuse_other_layers(self, what: str) -> None:
        raise NotImplementedError(
            f"{what} of a wrapped Keras model: its voters and heads belong to the layers that it had. Change the plain model, and wrap that"
        )

    def quantize(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse_config("quantize", "quantize a plain model of model.voters()")

    def _refuse_config(self, what: str, remedy: str) -> None:
        raise NotImplementedError(
            f"{what} of a wrapped Keras model: its voters and noise are in no config of the {type(self).__name__} that Keras could build it "
            f"from. Instead: {remedy}"
        )

    def __reduce__(self) -> Any:
        self._refuse_config("a copy or pickle", "model.save(path) and workbench.load(path)")

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce__()


__all__ = ["KerasFiles"]
