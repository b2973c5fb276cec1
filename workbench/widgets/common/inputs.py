"""What `Comparison` is given: a model or what makes one, and data in one of several forms."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workbench.core.method import evaluating
from workbench.core.wrapped import is_wrapped
from workbench.data import Card, Column, Data, Split, load
from workbench.data.core import partition
from workbench.engine.effects.private_random import own_random

HELD_OUT = 0.2  # share of the rows of a pair (x, y) that becomes the test rows


def data_of(data: Any, split: int = 0) -> Data:
    """A Data of what the user has: one, the name of one, or a pair (x, y), a fifth of whose rows become test rows.

    Args:
        data: a Data, a name that `data.load` takes, or a pair of x [n, ...] and y, class numbers [n] or values [n] or [n, 1].
        split: which split, for a name or a pair.

    Raises:
        TypeError, ValueError: it is something else, or has too few rows.

    Example:
        >>> found = data_of((torch.rand(50, 2), torch.arange(50) % 2))
        >>> found.task, len(found.train), len(found.test)
        ('classification', 40, 10)
    """
    if isinstance(data, str):
        return load(data, split=split)
    if isinstance(data, Data):
        if len(data.train) < 20 or not len(data.test):
            raise ValueError(
                f"data: {data.name} has {len(data.train)} training and {len(data.test)} test rows; at least 20 and 1 are needed"
            )
        return data
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise TypeError(
            f"data: found {type(data).__name__}; give a workbench Data, the name of a data set, or a pair (x, y)"
        )
    x, y = _tensor(data[0], "x"), _tensor(data[1], "y")
    x = x.float() if x.ndim > 1 else x.float()[:, None] if x.ndim else x
    if x.ndim == 0 or y.ndim == 0 or len(x) != len(y):
        raise ValueError(f"data: x is {list(x.shape)} and y is {list(y.shape)}; both need the same number of rows")
    if len(x) < 25:
        raise ValueError(f"data: found {len(x)} rows; at least 25 are needed, of which a fifth is held out")
    classes = not y.is_floating_point()
    y = y.reshape(len(y), -1)
    if y.shape[1] != 1:
        raise ValueError(f"data: y has {y.shape[1]} columns; one target at a time can be compared, such as y[:, :1]")
    y = y[:, 0].long() if classes else y.float()
    if classes and int(y.min()) < 0:
        raise ValueError(f"data: class numbers start at 0; found {int(y.min())}")
    try:
        train, test = partition(len(x), HELD_OUT, split, y if classes else None)
    except ValueError as error:
        raise ValueError(f"data: the rows can't be cut into training and test rows: {error}") from error
    return Data(
        "your data",
        "classification" if classes else "regression",
        Split(x[train], y[train]),
        Split(x[test], y[test]),
        tuple(Column(f"x{i + 1}" if x.shape[1] > 1 else "x") for i in range(x.shape[1])),
        Column("class" if classes else "y"),
        Card(f"{len(x):,} rows, given as tensors", "", "", "", (f"test rows: {len(test):,}, drawn at random",)),
        tuple(map(str, range(int(y.max()) + 1))) if classes else None,
        split,
    )


def _tensor(value: Any, name: str) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    try:
        return torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError) as error:
        raise TypeError(f"data: {name} is a {type(value).__name__}; give a tensor or an array of numbers") from error


@dataclass
class Model:
    """The model to wrap: an object, which is never changed, or what makes one.

    Args:
        given: an nn.Module, or a function or class that returns one when it is called without arguments.

    Raises:
        TypeError: it is neither, or it is wrapped already.
    """

    given: Any

    def __post_init__(self) -> None:
        if isinstance(self.given, nn.Module):
            if any(is_wrapped(part) for part in self.given.modules()):
                raise TypeError("model: it is wrapped already; give the plain model, such as workbench.unwrap(wrapped)")
        elif not callable(self.given):
            what = "..." if self.given is ... else type(self.given).__name__
            raise TypeError(f"model: found {what}; give an nn.Module, or a function that returns one")

    @property
    def makes(self) -> Callable[[], Any] | None:
        """The function or class, if that was given."""
        return None if isinstance(self.given, nn.Module) else self.given

    def new(self, seed: int) -> nn.Module:
        """A model of its own: of what makes one a new one, drawn with this seed; else a copy."""
        if self.makes is None:
            return copy.deepcopy(self.given)
        with own_random(seed, torch.device("cpu")):
            model = self.makes()
        if not isinstance(model, nn.Module) or is_wrapped(model):
            what = "a wrapped model" if isinstance(model, nn.Module) else type(model).__name__
            raise TypeError(f"model: {_name(self.makes)} returned {what}; it must return a plain nn.Module")
        return model

    def __str__(self) -> str:
        return type(self.given).__name__ if self.makes is None else f"{_name(self.makes)}()"


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def check_fits(model: nn.Module, data: Data) -> str:
    """See that a model answers rows of the data, and say what it gives: "values", "logits" or "probs".

    Args:
        model: one of its own; what is lazy in it is made by this.
        data: two of its rows are asked for.

    Raises:
        ValueError: the model fails, or gives something else than one value (or a score for each class) for each row.
    """
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    x = data.train.x[:2].to(like.device, like.dtype)
    with torch.no_grad(), evaluating(model, whole=True), own_random(0, like.device):
        try:
            y = model(x)
        except Exception as error:
            raise ValueError(
                f"model: {type(model).__name__} fails on rows {['n', *data.input_shape]} of {data.name}: "
                f"{type(error).__name__}: {error}"
            ) from error
    expected = [len(x), data.n_outputs]
    if not isinstance(y, Tensor) or list(y.shape) != expected:
        found = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
        what = "one score for each class" if data.classes else "one value"
        raise ValueError(
            f"model: {type(model).__name__} gives {found} for {len(x)} rows of {data.name}; needed is {expected}, {what} a row"
        )
    if data.classes is None:
        return "values"
    probs = bool((y >= 0).all() and torch.allclose(y.sum(-1), torch.ones(()).to(y), atol=1e-4))
    return "probs" if probs else "logits"
