"""Standardisation between the user's units and the model's."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..engine.tree import is_float, tensors, tree_map
from .batches.arrays import is_frame

Key = int | str | None  # an input: the first argument (None), or one of several by position or name
Moments = Tensor | tuple[Tensor | None, ...] | Mapping[str, Tensor | None] | None
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Scaling(nn.Module):
    """Standardises inputs and undoes it for predictions and risks.

    Args:
        x_mean, x_scale: what is subtracted from the first argument, and what it is divided by; of several inputs a tuple by position or a dict
            by name (of keyword arguments, or of the items of one dict), in which None leaves one alone. None leaves all inputs alone.
        y_mean, y_scale: the same for targets; None leaves outputs alone.
        x_dtype: like `x_mean`, of inputs that are bytes or truth values, and that the model is given as floating-point numbers: torch.uint8 or
            torch.bool.
        names: of the positional parameters of the model, by which they may be given as well.
    """

    NAMES = ("x_mean", "x_scale", "y_mean", "y_scale")
    names: tuple[str, ...] = ()
    y_mean: Any
    y_scale: Any

    def __init__(
        self,
        x_mean: Moments = None,
        x_scale: Moments = None,
        y_mean: Tensor | None = None,
        y_scale: Tensor | None = None,
        *,
        x_dtype: Any = None,
        names: Iterable[str] = (),
    ) -> None:
        super().__init__()
        self.names = tuple(names)
        for name, value in zip(self.NAMES, (x_mean, x_scale, y_mean, y_scale), strict=True):
            self.register_buffer(name, None)
            for key, tensor in items_of(value):
                if tensor is not None:
                    self.register_buffer(_buffer(name, key), torch.as_tensor(tensor).detach().clone())
        for key, dtype in items_of(x_dtype):
            if dtype is not None:  # an empty tensor keeps its dtype in a file, and where the model is cast
                self.register_buffer(_buffer("x_like", key), torch.empty(0, dtype=dtype))
        self._check()
        self._note_keys()

    @classmethod
    def of_state(cls, stored: Mapping[str, Tensor], names: Iterable[str] = ()) -> Scaling:
        """One with the buffers of a state."""
        new = cls(names=names)
        for name, value in stored.items():
            new.register_buffer(name, value.detach().clone())
        new._check()
        new._note_keys()
        return new

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._note_keys()  # pickles of the version before have none

    def _check(self) -> None:
        buffers = {name: value for name, value in self._buffers.items() if value is not None}
        for name, scale in buffers.items():
            kind = name[:7]
            if kind in ("x_scale", "y_scale") and not bool((scale > 0).all()):
                raise ValueError(f"{name} must be positive everywhere, its smallest value is {scale.min().item():g}")
        for one, other in (("mean", "scale"), ("scale", "mean"), ("like", "mean")):
            for name in buffers:
                if name[2:].startswith(one) and name.replace(one, other, 1) not in buffers:
                    raise ValueError(f"{name[0]}_mean and {name[0]}_scale go together: give both or neither")

    def _note_keys(self) -> None:
        """Note which inputs are standardised, and the names of the buffers of each."""
        keys = [_key(name) for name, value in self._buffers.items() if name.startswith("x_mean") and value is not None]
        self._named_buffers = {key: [_buffer(name, key) for name in ("x_mean", "x_scale", "x_like")] for key in keys}

    # ---- inputs
    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], exact: bool = True) -> Arguments:
        """Positional and keyword inputs in standardised units.

        Args:
            args, kwargs: as the model is called.
            exact: whether inputs must be of the kind that the moments were taken of; else bytes may be floating-point numbers by now.

        Raises:
            TypeError: if an input is of another kind (bytes instead of floating-point numbers) than the moments were taken of.
        """
        buffers: dict[str, Any] = self._buffers

        def standardized(key: Key, leaf: Any) -> Any:
            if isinstance(leaf, np.ndarray) or is_frame(leaf):
                raise TypeError(
                    f"{self._named(key)} is {type(leaf).__name__}, and a model takes tensors: "
                    "torch.tensor(numpy.asarray(x), dtype=torch.float32)"
                )
            if not isinstance(leaf, Tensor):
                return leaf
            kept: list[Any] = [buffers.get(name) for name in self._named_buffers[key]]
            mean, scale, like = kept
            if not is_float(leaf) if like is None else leaf.dtype != like.dtype and (exact or not is_float(leaf)):
                known = "floating-point numbers" if like is None else str(like.dtype)
                raise TypeError(
                    f"{self._named(key)} is {leaf.dtype}, but the model was trained on {known} there, whose mean and scale are not those of "
                    f"other numbers: give {known}, or train with these (workbench.fit), or call wrapped.unscale()"
                )
            return ((leaf if is_float(leaf) else leaf.to(mean.dtype)) - mean) / scale

        return self._changed(args, kwargs, standardized)

    def original(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """What `inputs` was given; bytes and truth values as floating-point numbers."""
        buffers: dict[str, Any] = self._buffers

        def restored(key: Key, leaf: Any) -> Any:
            mean, scale = map(buffers.get, self._named_buffers[key][:2])
            return leaf * scale + mean if is_float(leaf) else leaf

        return self._changed(args, kwargs, restored)

    def _changed(self, args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Key, Any], Any]) -> Arguments:
        positional, named = list(args), dict(kwargs)
        items: Any = None
        for key in self._named_buffers:
            at = self.names.index(key) if isinstance(key, str) and key in self.names else key or 0
            name = self.names[at] if isinstance(at, int) and at < len(self.names) else key
            if name in named:
                named[name] = change(key, named[name])
            elif isinstance(key, str) and args and isinstance(args[0], Mapping) and key in args[0]:
                items = copy.copy(args[0]) if items is None else items
                items[key] = change(key, args[0][key])
                positional[0] = items
            elif isinstance(at, int) and at < len(args):
                positional[at] = change(key, args[at])
        return tuple(positional), named

    def _named(self, key: Key) -> str:
        return "the input" if key is None else f"the input {key!r}"

    # ---- targets
    def targets(self, y: Any) -> Any:
        """Targets in standardised units."""
        return (
            y if self.y_mean is None else tree_map(lambda t: (t - self.y_mean) / self.y_scale if is_float(t) else t, y)
        )

    def prediction(self, y: Any) -> Any:
        """Predictions in original units."""
        return self._rescaled(y, lambda t: t * self.y_scale + self.y_mean)

    def risk(self, risk: Any) -> Any:
        """Standard deviations in original units."""
        return self._rescaled(risk, lambda t: t * self.y_scale)

    def _rescaled(self, output: Any, change: Callable[[Tensor], Tensor]) -> Any:
        """The values of an output changed: of several leaves those that have the shape of targets, not a loss or hidden states beside them."""
        if self.y_mean is None:
            return output
        alone = sum(map(is_float, tensors(output))) == 1
        return tree_map(
            lambda leaf: change(leaf) if is_float(leaf) and (alone or self.are_targets(leaf)) else leaf, output
        )

    def are_targets(self, leaf: Tensor) -> bool:
        """Whether one of several outputs has the shape of targets, so that it is in their units."""
        mean = self.y_mean
        return mean is None or (leaf.dim() > mean.dim() and leaf.shape[leaf.dim() - mean.dim() :] == mean.shape)


def items_of(inputs: Any) -> Iterator[tuple[Key, Any]]:
    """Each of several inputs (or what is said of each) with its key; of a single one None."""
    if isinstance(inputs, Mapping):
        yield from inputs.items()
    elif isinstance(inputs, tuple):
        yield from enumerate(inputs)
    elif inputs is not None:
        yield None, inputs


def _buffer(name: str, key: Key) -> str:
    """The name of a buffer, such as x_mean, x_mean[0] or x_mean['age']; torch allows no dot in it."""
    return name if key is None else f"{name}[{key!r}]".replace("%", "%25").replace(".", "%2E")


def _key(buffer: str) -> Key:
    _, bracket, rest = buffer.replace("%2E", ".").replace("%25", "%").partition("[")
    return ast.literal_eval(rest[:-1]) if bracket else None


__all__ = ["Arguments", "Key", "Moments", "Scaling", "items_of"]
