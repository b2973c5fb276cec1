"""Check the models and data given to widgets, and make models from factories."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workbench.calibration.one_output import one_name, pick
from workbench.core.batches.rows import bad_rows, first_weight
from workbench.core.method import evaluating
from workbench.core.wrapped import is_wrapped
from workbench.data import Data
from workbench.engine.effects.private_random import own_random
from workbench.experiments.positions import has_class_positions, has_labels, output_for
from workbench.experiments.specs import check_model, model_of

STOCK = ("tabular", "mlp", "cnn", "linear")  # names of the ready models
LARGEST_BATCH = 2**27  # numbers
READ_ROWS = ("tabular",)  # ready models that are built from training rows, not only from their shape


@dataclass
class Model:
    """The model to wrap: an object, which is never changed, or a factory of models.

    Args:
        source: an nn.Module; a function or class that returns one when called without arguments; or a ready model as text, such as
            "mlp(width=100)".
        data: data that a ready model is made for; see `on` for other splits.

    Raises:
        TypeError: if `source` is none of these, or is wrapped already.
        ValueError: if there is no such ready model.
    """

    source: Any
    data: Data | None = None

    def __post_init__(self) -> None:
        if isinstance(self.source, str):
            if self._name not in STOCK:
                raise ValueError(
                    f"model: there is no ready model {self.source!r} here; there are {', '.join(STOCK)}, such as 'mlp(width=100)'; give another "
                    "model as an nn.Module, or as a function that returns one"
                )
            check_model(self.source)
        elif isinstance(self.source, nn.Module):
            if any(is_wrapped(module) for module in self.source.modules()):
                raise TypeError("model: it is wrapped already; give the plain model, such as workbench.unwrap(wrapped)")
        elif not callable(self.source):
            kind = "..." if self.source is ... else type(self.source).__name__
            raise TypeError(f"model: found {kind}; give an nn.Module, or a function that returns one")

    @property
    def _name(self) -> str:
        return self.source.partition("(")[0].strip() if isinstance(self.source, str) else ""

    @property
    def reads_rows(self) -> bool:
        """Whether the model depends on the training rows, and so differs between splits."""
        return self._name in READ_ROWS

    def on(self, data: Data) -> Model:
        """Return the model for another split of the data; one that reads rows is made anew, as it must not see test rows."""
        return replace(self, data=data) if self.reads_rows else self

    @property
    def makes(self) -> Callable[[], Any] | None:
        """The function or class that makes models; None for a single nn.Module."""
        if isinstance(self.source, str):
            assert self.data is not None  # a text without data is only ever checked
            return partial(model_of, self.source, self.data)
        return None if isinstance(self.source, nn.Module) else self.source

    def new(self, seed: int) -> nn.Module:
        """Make a new model under this seed, or copy a given nn.Module."""
        if self.makes is None:
            return copy.deepcopy(self.source)
        with own_random(seed, torch.device("cpu")):
            model = self.makes()
        if not isinstance(model, nn.Module) or is_wrapped(model):
            kind = "a wrapped model" if isinstance(model, nn.Module) else type(model).__name__
            raise TypeError(f"model: {_name(self.makes)} returned {kind}; it must return a plain nn.Module")
        return model

    def __str__(self) -> str:
        if isinstance(self.source, str):
            return self.source
        return type(self.source).__name__ if self.makes is None else f"{_name(self.makes)}()"


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def inputs_like(x: Tensor, model: nn.Module) -> Tensor:
    """Move inputs to the device and dtype of a model, as `fit` does; integers (tokens) keep their dtype."""
    like = first_weight(model)
    tokens = not x.is_floating_point() and x.dtype not in (torch.uint8, torch.bool)
    return x.to(like.device) if tokens else x.to(like.device, like.dtype)


def sampled_rows(n: int, most: int) -> Tensor:
    """Return the numbers of n rows in order; of more than `most` rows, those of as many drawn with seed 0."""
    if n <= most:
        return torch.arange(n)
    return torch.randperm(n, generator=torch.Generator().manual_seed(0))[:most].sort().values


def rows_at_once(x: Tensor, most: int) -> int:
    """Return how many rows of x [n, ...] a model gets at once: at most `most`, and fewer large images, for the memory that they take."""
    return max(1, min(most, LARGEST_BATCH // max(1, x[:1].numel())))


def refuse_bad_rows(data: Data) -> None:
    """Raise ValueError if an input or target of a row is NaN or infinite."""
    for label, split in (("test", data.test), ("training", data.train)):
        for name, values in (("x", split.x), ("y", split.y)):
            if len(bad := bad_rows(values)):
                raise ValueError(
                    f"data: {name} of {len(bad)} of {len(split)} {label} rows is NaN or infinite, first in row {int(bad[0])}; leave "
                    "those rows out, or fill them in"
                )


def check_fits(model: nn.Module, data: Data) -> Any:
    """Check that a model can predict rows of the data, and return what it gives: "values", "logits", "probs", "binary", or a meaning.

    Args:
        model: copy of the model; its lazy modules are initialized.
        data: data set, of which two rows are predicted.

    Raises:
        ValueError: if the model fails, or gives something else than one value (or a score for each class) for each row.
    """
    x = inputs_like(data.train.x[:2], model)
    with torch.no_grad(), evaluating(model, whole=True), own_random(0, x.device):
        try:
            y = model(x)
        except Exception as error:
            raise ValueError(
                f"model: {type(model).__name__} fails on rows [{', '.join(map(str, ['n', *data.input_shape]))}] of {data.name}: "
                f"{type(error).__name__}: {error}"
                + (
                    ""
                    if x.is_floating_point()
                    else f" ({x.dtype} is taken for tokens: give x.float() if these are values)"
                )
            ) from error
    if has_class_positions(data):
        return output_for(model, data)
    if not isinstance(y, Tensor):
        y = pick(y, one_name(output_for(model, data), y))
    expected = [len(x), *(data.train.y.shape[1:] if data.classes is None else [data.n_outputs])]
    if not isinstance(y, Tensor) or list(y.shape) != expected:
        shape = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
        wanted = (
            "one score for each label per row"
            if has_labels(data)
            else "one score for each class per row"
            if data.classes
            else "one value per row"
            if expected[1:] == [1]
            else "like the targets"
        )
        raise ValueError(
            f"model: {type(model).__name__} gives {shape} for {len(x)} rows of {data.name}; it must return {expected}, {wanted}"
        )
    if has_labels(data):
        return output_for(model, data)
    if data.classes is None:
        return "values"
    probs = bool((y >= 0).all() and torch.allclose(y.sum(-1), torch.ones(()).to(y), atol=1e-4))
    return "probs" if probs else "logits"
