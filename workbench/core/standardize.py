"""Standardization between the user's units and the model's units."""

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

Key = int | str | None  # identifies an input: the first argument (None), or one of several by position or name
Moments = Tensor | tuple[Tensor | None, ...] | Mapping[str, Tensor | None] | None
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Scaling(nn.Module):
    """Module that standardizes inputs, (x - x_mean) / x_scale, and converts predictions and risks back to original units.

    Args:
        x_mean, x_scale: mean and standard deviation of the first argument. For several inputs a tuple by position or a dict by name (of keyword
            arguments, or of the items of a single dict), in which None leaves an input unchanged. None leaves all inputs unchanged.
        y_mean, y_scale: the same for targets; None leaves outputs unchanged.
        x_dtype: like `x_mean`, torch.uint8 or torch.bool for inputs of these dtypes, which are converted to floating point for the model.
        names: names of the model's positional parameters, so that inputs given by position can also be passed by keyword.
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
            if dtype is not None:  # an empty tensor stores the dtype, in files as well as when the model is cast
                self.register_buffer(_buffer("x_like", key), torch.empty(0, dtype=dtype))
        self._check()
        self._note_keys()

    @classmethod
    def of_state(cls, stored: Mapping[str, Tensor], names: Iterable[str]) -> Scaling:
        """Create a scaling from the buffers of a state."""
        new = cls(names=names)
        for name, value in stored.items():
            new.register_buffer(name, value.detach().clone())
        new._check()
        new._note_keys()
        return new

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._note_keys()  # pickles of the previous version do not contain them

    def _check(self) -> None:
        buffers = {name: value for name, value in self._buffers.items() if value is not None}
        for name, scale in buffers.items():
            kind = name[:7]
            if kind in ("x_scale", "y_scale") and not bool((scale > 0).all()):
                raise ValueError(f"{name} must be positive everywhere, its smallest value is {scale.min().item():g}")
            if kind in self.NAMES and not bool(scale.isfinite().all()):
                raise ValueError(f"{name} must be finite, and holds NaN or infinity")
        for one, other in (("mean", "scale"), ("scale", "mean"), ("like", "mean")):
            for name in buffers:
                if name[2:].startswith(one) and name.replace(one, other, 1) not in buffers:
                    raise ValueError(f"{name[0]}_mean and {name[0]}_scale go together: give both or neither")

    def _note_keys(self) -> None:
        """Store which inputs are standardized, with the names of the buffers of each."""
        keys = [_key(name) for name, value in self._buffers.items() if name.startswith("x_mean") and value is not None]
        self._named_buffers = {key: [_buffer(name, key) for name in ("x_mean", "x_scale", "x_like")] for key in keys}

    # ---- inputs
    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], exact: bool = True) -> Arguments:
        """Return positional and keyword inputs in standardized units.

        Args:
            args, kwargs: arguments of the model.
            exact: whether inputs must have the kind of dtype of the training data; otherwise bytes may already be floating-point numbers.

        Raises:
            TypeError: if the kind of dtype of an input (such as bytes instead of floating point) differs from that of the training data.
        """
        buffers: dict[str, Any] = self._buffers

        def standardized(key: Key, leaf: Any) -> Any:
            if isinstance(leaf, np.ndarray) or is_frame(leaf):
                raise TypeError(
                    f"{self._describe(key)} is {type(leaf).__name__}, and a model takes tensors: "
                    "torch.tensor(numpy.asarray(x), dtype=torch.float32)"
                )
            if not isinstance(leaf, Tensor):
                return leaf
            moments: list[Any] = [buffers.get(name) for name in self._named_buffers[key]]
            mean, scale, like = moments
            if not is_float(leaf) if like is None else leaf.dtype != like.dtype and (exact or not is_float(leaf)):
                expected = "floating-point numbers" if like is None else str(like.dtype)
                raise TypeError(
                    f"{self._describe(key)} is {leaf.dtype}, but the model was trained on {expected} there, whose mean and scale do not apply: "
                    f"give {expected}, or train with {leaf.dtype} (workbench.fit), or call wrapped.unscale()"
                )
            _check_shape(self._describe(key), leaf, "x_mean and x_scale", mean)
            return ((leaf if is_float(leaf) else leaf.to(mean.dtype)) - mean) / scale

        return self._changed(args, kwargs, standardized)

    def original(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Invert `inputs`; bytes and booleans stay floating-point numbers."""
        buffers: dict[str, Any] = self._buffers

        def restored(key: Key, leaf: Any) -> Any:
            mean, scale = map(buffers.get, self._named_buffers[key][:2])
            return leaf * scale + mean if is_float(leaf) else leaf

        return self._changed(args, kwargs, restored)

    def _changed(self, args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Key, Any], Any]) -> Arguments:
        positional, named = list(args), dict(kwargs)
        items: Any = None
        for key in self._named_buffers:
            position = self.names.index(key) if isinstance(key, str) and key in self.names else key or 0
            name = self.names[position] if isinstance(position, int) and position < len(self.names) else key
            if name in named:
                named[name] = change(key, named[name])
            elif isinstance(key, str) and args and isinstance(args[0], Mapping) and key in args[0]:
                items = copy.copy(args[0]) if items is None else items
                items[key] = change(key, args[0][key])
                positional[0] = items
            elif isinstance(position, int) and position < len(args):
                positional[position] = change(key, args[position])
        return tuple(positional), named

    def _describe(self, key: Key) -> str:
        return "the input" if key is None else f"the input {key!r}"

    # ---- targets
    def targets(self, y: Any) -> Any:
        """Convert targets to standardized units."""
        if self.y_mean is None:
            return y

        def standardized(target: Any) -> Any:
            if not is_float(target):
                return target
            _check_shape("the target", target, "y_mean and y_scale", self.y_mean)
            return (target - self.y_mean) / self.y_scale

        return tree_map(standardized, y)

    def prediction(self, y: Any) -> Any:
        """Convert predictions to original units."""
        return self._rescaled(y, lambda t: t * self.y_scale + self.y_mean)

    def risk(self, risk: Any) -> Any:
        """Convert standard deviations to original units."""
        return self._rescaled(risk, lambda t: t * self.y_scale)

    def _rescaled(self, output: Any, change: Callable[[Tensor], Tensor]) -> Any:
        """Apply `change` to an output; of several leaves only to those with the shape of targets, not to a loss or hidden states."""
        if self.y_mean is None:
            return output
        single = sum(map(is_float, tensors(output))) == 1

        def changed(leaf: Any) -> Any:
            if not is_float(leaf) or not (single or self.are_targets(leaf)):
                return leaf
            _check_shape("the output", leaf, "y_mean and y_scale", self.y_mean)
            # under autocast: moments without dimensions do not promote, and half precision has steps of thousands at a million
            return change(leaf.to(self.y_scale.dtype) if leaf.dtype in (torch.float16, torch.bfloat16) else leaf)

        return tree_map(changed, output)

    def are_targets(self, leaf: Tensor) -> bool:
        """Return whether one of several outputs has the shape of targets, and so is in their units."""
        mean = self.y_mean
        return mean is None or (leaf.dim() > mean.dim() and leaf.shape[leaf.dim() - mean.dim() :] == mean.shape)


def fits(moments: Tensor, values: Tensor) -> bool:
    """Return whether moments have the last dimensions of values, or size 1 there."""
    missing = max(moments.dim() - values.dim(), 0)
    shape = (*(1 for _ in range(missing)), *values.shape[values.dim() + missing - moments.dim() :])
    # torch's compiler does not compare symbolic sizes by `in`
    return all(n == 1 or n == size for n, size in zip(moments.shape, shape, strict=True))


def _check_shape(what: str, values: Tensor, names: str, moments: Tensor) -> None:
    """Raise ValueError if moments do not fit values, which broadcasting would repeat, as one column for each of three."""
    if not fits(moments, values):
        raise ValueError(
            f"{what} is {list(values.shape)}, but the model was given {names} of shape {list(moments.shape)}, by workbench.fit or "
            "wrapped.scale: give the columns of the training, or call wrapped.unscale()"
        )


def items_of(inputs: Any) -> Iterator[tuple[Key, Any]]:
    """Yield (key, value) for a tuple or dict of values per input; (None, value) for a single value."""
    if isinstance(inputs, Mapping):
        yield from inputs.items()
    elif isinstance(inputs, tuple):
        yield from enumerate(inputs)
    elif inputs is not None:
        yield None, inputs


def _buffer(name: str, key: Key) -> str:
    """Return the name of a buffer, such as x_mean, x_mean[0] or x_mean['age']; dots are escaped, since torch does not allow them."""
    return name if key is None else f"{name}[{key!r}]".replace("%", "%25").replace(".", "%2E")


def _key(buffer: str) -> Key:
    _, bracket, rest = buffer.replace("%2E", ".").replace("%25", "%").partition("[")
    return ast.literal_eval(rest[:-1]) if bracket else None


__all__ = ["Arguments", "Key", "Moments", "Scaling", "fits", "items_of"]
