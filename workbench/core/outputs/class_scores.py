"""Outputs that are scores of classes or labels: their class dimension, their conversion to probabilities, and their targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from ...engine.tree import holds
from .meanings import IGNORED, Meaning


@dataclass(frozen=True)
class Classes(Meaning):
    """Scores of classes or labels, whose risks are entropies in nats (Depeweg et al. 2018)."""

    @property
    def class_dim(self) -> int | None:
        """Class dimension of the scores; None if each element is a binary decision."""
        return None

    def probabilities(self, scores: Tensor) -> Tensor:
        """Convert scores as returned by the model to probabilities [..., classes], in float32 or float64, with classes last."""
        raise NotImplementedError

    def log_scores(self, scores: Tensor) -> Tensor:
        """Convert scores to log-scores [..., classes], in float32 or float64, with classes last; defined up to a constant per row."""
        raise NotImplementedError

    def noise(self, risk: Tensor) -> Tensor:
        """Convert standard deviations predicted for the scores to those of `log_scores` [..., classes]."""
        return risk

    def labels(self, target: Tensor, scores: Tensor) -> Tensor:
        """Convert targets to class numbers [...], or soft targets to probabilities [..., classes], for scores as returned by the model."""
        raise NotImplementedError

    def form(self, probs: Tensor, like: Tensor) -> Tensor:
        """Convert mean probabilities [..., classes] back to the form, dimensions and dtype of the models' scores `like` [models, ...]."""
        raise NotImplementedError

    def at_end(self, n_dims: int) -> Self:
        """Return the meaning with a negative class dimension, so that further dimensions may precede the `n_dims` of the scores."""
        return self

    def check_shape(self, shape: Sequence[int], write: Callable[[str], str]) -> None:
        """Raise ValueError if the class dimension of scores of this shape is missing or ambiguous; `write` formats code for the message."""

    def problem(self, scores: Tensor) -> str:
        """Return what is wrong with the values, or ""; reading them synchronizes with the device."""
        return ""

    def doubt(self, scores: Tensor) -> str:
        """Return a warning if the values look like something other than declared, or ""; reading them synchronizes with the device."""
        return ""


@dataclass(frozen=True)
class _AlongDimension(Classes):
    """Scores of classes along one dimension.

    Args:
        dim: class dimension; 1 for maps [n, classes, ...] as in torch's cross entropy, -1 for tokens [n, t, classes]. None means the last of
            [n, classes], and raises an error for more dimensions.
    """

    dim: int | None = None

    def __post_init__(self) -> None:
        if self.dim is not None and (isinstance(self.dim, bool) or not isinstance(self.dim, int)):
            raise ValueError(f"dim must be the dimension of the classes, a whole number, not {self.dim!r}")

    def log_scores(self, scores: Tensor) -> Tensor:
        # the class dimension is negative here, since dimensions of branches may precede
        return at_least_float32(self.classes_last(scores))

    def noise(self, risk: Tensor) -> Tensor:
        return self.classes_last(risk)

    def labels(self, target: Tensor, scores: Tensor) -> Tensor:
        shape = self.classes_last(scores).shape
        if not target.is_floating_point():
            if target.shape != shape[:-1]:
                raise ValueError(
                    f"class numbers have shape {list(target.shape)}, but scores {list(scores.shape)} of output={self!r} need {list(shape[:-1])}"
                )
            return target
        probs = self.classes_last(target) if target.shape == scores.shape else None
        if probs is None or not _sum_to_one(probs):
            raise ValueError(
                f'the output is class scores (output="{self.short}") {list(scores.shape)}, and the targets are floats '
                f'{list(target.shape)}: give class numbers, or probabilities of the same shape that sum to one; for values use output="values"'
            )
        return probs

    @property
    def class_dim(self) -> int:
        return -1 if self.dim is None else self.dim

    def classes_last(self, scores: Tensor) -> Tensor:
        """Return a view with the class dimension last."""
        return scores if self.class_dim == -1 else scores.movedim(self.class_dim, -1)

    def _classes_back(self, scores: Tensor) -> Tensor:
        return scores if self.class_dim == -1 else scores.movedim(-1, self.class_dim)

    def at_end(self, n_dims: int) -> Self:
        return self if self.dim is None or self.dim < 0 else type(self)(self.dim - n_dims)

    def check_shape(self, shape: Sequence[int], write: Callable[[str], str]) -> None:
        name, n_dims = type(self).__name__, len(shape)
        if self.dim is None and n_dims > 2:
            raise ValueError(
                f'output="{self.short}" can\'t tell which dimension of {list(shape)} is that of the classes. Write\n'
                f"    output={write(f'{name}(dim=1)')}   # maps [n, classes, ...], as in torch's cross entropy: {shape[1]} classes\n"
                f"    output={write(f'{name}(dim=-1)')}  # tokens [n, ..., classes]: {shape[-1]} classes\n"
                f"with from workbench.outputs import {name}"
            )
        if self.dim is None and n_dims < 2:
            raise ValueError(
                f'output="{self.short}" needs scores [n, classes], and this output has shape {list(shape)}. Write\n'
                f"    output={write(BINARY_LINES[self.short])}  # one score per row: a yes or no\n"
                f"    output={write(f'{name}(dim=-1)')}  # the scores of a single row\n"
                f"    output={write('Values()')}  # values, with a standard deviation\n"
                "with from workbench.outputs import Binary, Logits, Probs, Values"
            )
        if self.dim is not None and not -n_dims <= self.dim < n_dims:
            raise ValueError(f"{name}(dim={self.dim}): the output has {n_dims} dimensions, {list(shape)}")
        if shape[-1 if self.dim is None else self.dim] == 1:
            raise ValueError(
                f"{name} of a single class always has probability 1, and this output has shape {list(shape)}. Write\n"
                f"    output={write(BINARY_LINES[self.short])}  # one score per row: a yes or no\n"
                "with from workbench.outputs import Binary"
            )


BINARY_LINES = {"logits": "Binary()", "probs": "Binary(logits=False)"}


@dataclass(frozen=True)
class Logits(_AlongDimension):
    """Logits of classes, before softmax; the prediction is the logarithm of the mean probability.

    It is -inf where all models' logits are, and finite (-87 in float32) where the probability is zero by rounding.

    Example:
        >>> import torch
        >>> from workbench import vote
        >>> segmenter = vote.Wrapper(3, output=Logits(dim=1))(torch.nn.Conv2d(3, 5, 1)).eval()
        >>> y, risk = segmenter(torch.zeros(2, 3, 8, 8), return_risk=True)
        >>> y.shape, risk.total.shape
        (torch.Size([2, 5, 8, 8]), torch.Size([2, 8, 8]))
    """

    short = "logits"

    def probabilities(self, scores: Tensor) -> Tensor:
        return self.log_scores(scores).softmax(-1)

    def form(self, probs: Tensor, like: Tensor) -> Tensor:
        ruled_out = (self.classes_last(like) == -torch.inf).flatten(0, like.dim() - probs.dim() - 1).all(0)
        return self._classes_back(log_of(probs).masked_fill(ruled_out, -torch.inf)).to(like.dtype)

    def problem(self, scores: Tensor) -> str:
        rows, tolerance = self.log_scores(scores), max(1e-4, torch.finfo(scores.dtype).eps)
        sum_to_one = bool((rows >= 0).all()) and bool(((rows.sum(-1) - 1).abs() <= tolerance).all())
        if sum_to_one and not bool(((rows == 0) | (rows == 1)).all()):
            return 'the model gives probabilities (rows that sum to 1), and softmax would be applied to them again: use output="probs"'
        return ""


@dataclass(frozen=True)
class Probs(_AlongDimension):
    """Class probabilities that sum to one; the prediction is their mean.

    Example:
        >>> import torch
        >>> from workbench import vote
        >>> model = vote.Wrapper(3, output="probs")(torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Softmax(-1))).eval()
        >>> y, risk = model(torch.zeros(5, 2), return_risk=True)
        >>> risk.names(), risk.epistemic.shape
        (('aleatoric', 'epistemic', 'total'), torch.Size([5]))
    """

    short = "probs"

    def probabilities(self, scores: Tensor) -> Tensor:
        return at_least_float32(self.classes_last(scores))

    def log_scores(self, scores: Tensor) -> Tensor:
        return log_of(self.probabilities(scores))

    def form(self, probs: Tensor, like: Tensor) -> Tensor:
        return self._classes_back(probs).to(like.dtype)

    def problem(self, scores: Tensor) -> str:
        probs = self.probabilities(scores)
        if outside := _outside(probs):
            return f'output="probs", but the model gives {outside}; use output="logits"'
        sums, tolerance = probs.sum(-1), max(1e-3, 4 * torch.finfo(scores.dtype).eps)
        if bool(((sums - 1).abs() > tolerance).any()):
            return (
                f'output="probs", but the probabilities of a row sum to {sums.min().item():.3g} to {sums.max().item():.3g}, not to 1: for '
                "labels that don't exclude each other use output=Binary(logits=False), from workbench.outputs import Binary"
            )
        return ""


@dataclass(frozen=True)
class Binary(Classes):
    """A binary decision per element: one per row, [n] or [n, 1], or one per label, [n, labels].

    The prediction is the mean probability, converted back to a logit if `logits`; risks are the entropies of each element. A logit is infinite
    where all models' logits are, with the same sign, and finite (-87 or 87 in float32) where the probability is 0 or 1 by rounding.

    Args:
        logits: whether the model returns logits, before sigmoid; False for probabilities.

    Example:
        >>> import torch
        >>> from workbench import vote
        >>> model = vote.Wrapper(3, output="binary")(torch.nn.Linear(2, 6)).eval()
        >>> y, risk = model(torch.zeros(5, 2), return_risk=True)
        >>> risk.total.shape
        torch.Size([5, 6])
    """

    short = "binary"
    logits: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.logits, bool):
            raise ValueError(f"Binary(logits=...) must be True or False, not {self.logits!r}")

    def probabilities(self, scores: Tensor) -> Tensor:
        scores = at_least_float32(scores)
        if self.logits:
            return torch.stack([(-scores).sigmoid(), scores.sigmoid()], -1)
        return torch.stack([1 - scores, scores], -1)

    def log_scores(self, scores: Tensor) -> Tensor:
        # as two classes: no has score 0 without noise, yes has the model's score
        scores = at_least_float32(scores)
        if not self.logits:
            scores = log_of(scores) - log_of(1 - scores)
        return torch.stack([torch.zeros_like(scores), scores], -1)

    def noise(self, risk: Tensor) -> Tensor:
        return torch.stack([torch.zeros_like(risk), risk], -1)

    def labels(self, target: Tensor, scores: Tensor) -> Tensor:
        # one decision per row: [n] or [n, 1]
        if target.shape not in (scores.shape, (*scores.shape, 1)) and (*target.shape, 1) != scores.shape:
            raise ValueError(
                f"binary targets have shape {list(target.shape)}, but the model gives {list(scores.shape)}"
            )
        inside = (target >= 0) & (target <= 1)
        if not holds(inside):
            raise ValueError(
                f"binary targets must lie in [0, 1], not from {target.min().item():g} to {target.max().item():g}"
                f"{_advice_on_void(target[~inside])}"
            )
        yes = target.to(at_least_float32(scores).dtype).where(inside, torch.nan).reshape(scores.shape)
        return torch.stack([1 - yes, yes], -1)

    def form(self, probs: Tensor, like: Tensor) -> Tensor:
        no, yes = probs.unbind(-1)
        if not self.logits:
            return yes.to(like.dtype)
        of_models, logits = like.flatten(0, like.dim() - yes.dim() - 1), log_of(yes) - log_of(no)
        for certain in (-torch.inf, torch.inf):
            logits = logits.masked_fill((of_models == certain).all(0), certain)
        return logits.to(like.dtype)

    def problem(self, scores: Tensor) -> str:
        outside = "" if self.logits else _outside(scores)
        return f'output=Binary(logits=False), but the model gives {outside}; use output="binary"' if outside else ""

    def doubt(self, scores: Tensor) -> str:
        if not self.logits or _outside(scores) or scores.min() == scores.max():
            return ""
        return (
            f'output="binary" applies a sigmoid to the scores, and all {scores.numel()} numbers lie in [0, 1], from '
            f"{scores.min().item():.3g} to {scores.max().item():.3g}. If these are probabilities already, use output=Binary(logits=False), "
            "from workbench.outputs import Binary"
        )


def cross_entropy(logs: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """Return the mean or sum of -log p, given log-probabilities [..., classes] and labels from `Classes.labels`; `IGNORED` are left out."""
    if labels.is_floating_point():
        losses = -(labels * logs).sum(-1)
        return losses.mean() if reduction == "mean" else losses.sum()
    return F.cross_entropy(logs.flatten(0, -2), labels.flatten(), reduction=reduction)


def _advice_on_void(outside: Tensor) -> str:
    """Return advice for the case that a single value marks missing labels; "" otherwise."""
    void = outside[0].item()
    if not bool((outside == void).all()):
        return ""
    return (
        f". If {void:g} marks missing labels: Binary() does not support these; train with a criterion that leaves them out, "
        f"lambda scores, y: binary_cross_entropy_with_logits(scores[y != {void:g}], y[y != {void:g}].float()), or return two scores for each "
        f"decision along a separate dimension, output=Logits(dim=1), where {IGNORED} is left out everywhere"
    )


def _sum_to_one(target: Tensor) -> bool:
    sums = target.sum(-1)
    return not bool((target < 0).any()) and torch.allclose(
        sums, sums.new_ones(()), atol=max(1e-3, 4 * torch.finfo(sums.dtype).eps)
    )


def at_least_float32(tensor: Tensor) -> Tensor:
    """Cast to float32 if the dtype is less precise."""
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor
    return tensor.to(torch.promote_types(torch.float32, tensor.dtype))


def log_of(probs: Tensor) -> Tensor:
    """Return the logarithm of probabilities, finite at zero."""
    return probs.clamp_min(torch.finfo(probs.dtype).tiny).log()


def _outside(probs: Tensor) -> str:
    if bool(((probs < 0) | (probs > 1)).any()):
        return f"numbers outside [0, 1], from {probs.min().item():.3g} to {probs.max().item():.3g}"
    return ""
