"""Outputs that are scores of classes or labels: which dimension, which numbers, and what they make of targets."""

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
        """The dimension of scores along which classes stand, None if each element is a yes or no."""
        return None

    def probabilities(self, scores: Tensor) -> Tensor:
        """Probabilities [..., classes] in float32 at least, the classes last, of scores as the model gives them."""
        raise NotImplementedError

    def log_scores(self, scores: Tensor) -> Tensor:
        """Log-scores [..., classes] in float32 at least, the classes last, up to a constant for each row."""
        raise NotImplementedError

    def noise(self, risk: Tensor) -> Tensor:
        """The standard deviations of `log_scores` [..., classes], of those that stand beside the scores."""
        return risk

    def labels(self, target: Tensor, scores: Tensor) -> Tensor:
        """Class numbers [...] of targets, or of soft ones their probabilities [..., classes], for scores as the model gives them."""
        raise NotImplementedError

    def form(self, probs: Tensor, like: Tensor) -> Tensor:
        """Probabilities [..., classes] in the form, the places and the dtype in which the model gives scores."""
        raise NotImplementedError

    def at_end(self, n_dims: int) -> Self:
        """The same with dimensions counted from behind, for scores of so many dimensions that others may stand in front of."""
        return self

    def check_shape(self, shape: Sequence[int], write: Callable[[str], str]) -> None:
        """Raise if scores of this shape have no classes, or none that can be told."""

    def problem(self, scores: Tensor) -> str:
        """What is wrong with the numbers, or ""; this looks at them, and makes a program wait for its device."""
        return ""

    def doubt(self, scores: Tensor) -> str:
        """What the numbers look like if they are not what they are said to be, or ""; as `problem`."""
        return ""


@dataclass(frozen=True)
class _AlongDimension(Classes):
    """Scores of classes along one dimension.

    Args:
        dim: of the classes; 1 for maps [n, classes, ...] as torch's cross entropy takes them, -1 for tokens [n, t, classes]. None is the
            last of [n, classes], and is refused where there are more dimensions.
    """

    dim: int | None = None

    def __post_init__(self) -> None:
        if self.dim is not None and (isinstance(self.dim, bool) or not isinstance(self.dim, int)):
            raise ValueError(f"dim is the dimension of the classes, a whole number, not {self.dim!r}")

    def log_scores(self, scores: Tensor) -> Tensor:
        # counted from behind: branches may stand in front
        return at_least_float32(self.classes_last(scores))

    def noise(self, risk: Tensor) -> Tensor:
        return self.classes_last(risk)

    def labels(self, target: Tensor, scores: Tensor) -> Tensor:
        shape = self.classes_last(scores).shape
        if not target.is_floating_point():
            if target.shape != shape[:-1]:
                raise ValueError(
                    f"class numbers have shape {list(target.shape)}, but scores {list(scores.shape)} of output={self!r} want {list(shape[:-1])}"
                )
            return target
        shares = self.classes_last(target) if target.shape == scores.shape else None
        if shares is None or not _are_shares(shares):
            raise ValueError(
                f'the output is class scores (output="{self.short}") {list(scores.shape)}, and the targets are floats '
                f'{list(target.shape)}: give class numbers, or probabilities of the same shape that sum to one; for values say output="values"'
            )
        return shares

    @property
    def class_dim(self) -> int:
        return -1 if self.dim is None else self.dim

    def classes_last(self, scores: Tensor) -> Tensor:
        """The same memory with the class dimension as the last one."""
        return scores if self.class_dim == -1 else scores.movedim(self.class_dim, -1)

    def _back(self, scores: Tensor) -> Tensor:
        return scores if self.class_dim == -1 else scores.movedim(-1, self.class_dim)

    def at_end(self, n_dims: int) -> Self:
        return self if self.dim is None or self.dim < 0 else type(self)(self.dim - n_dims)

    def check_shape(self, shape: Sequence[int], write: Callable[[str], str]) -> None:
        name, n_dims = type(self).__name__, len(shape)
        if self.dim is None and n_dims > 2:
            raise ValueError(
                f'output="{self.short}" can\'t tell which dimension of {list(shape)} is that of the classes. Write\n'
                f"    output={write(f'{name}(dim=1)')}   # maps [n, classes, ...], as torch's cross entropy takes them: {shape[1]} classes\n"
                f"    output={write(f'{name}(dim=-1)')}  # tokens [n, ..., classes]: {shape[-1]} classes\n"
                f"with from workbench.outputs import {name}"
            )
        if self.dim is None and n_dims < 2:
            raise ValueError(
                f'output="{self.short}" wants scores [n, classes], and this output has shape {list(shape)}. Write\n'
                f"    output={write(BINARY_LINES[self.short])}  # one score a row: a yes or no\n"
                f"    output={write(f'{name}(dim=-1)')}  # the scores of a single row\n"
                f"    output={write('Values()')}  # numbers, with a standard deviation\n"
                "with from workbench.outputs import Binary, Logits, Probs, Values"
            )
        if self.dim is not None and not -n_dims <= self.dim < n_dims:
            raise ValueError(f"{name}(dim={self.dim}): the output has {n_dims} dimensions, {list(shape)}")
        if shape[-1 if self.dim is None else self.dim] == 1:
            raise ValueError(
                f"{name} of one class has probability 1 whatever the model says, and this output has shape {list(shape)}. Write\n"
                f"    output={write(BINARY_LINES[self.short])}  # one score a row: a yes or no\n"
                "with from workbench.outputs import Binary"
            )


BINARY_LINES = {"logits": "Binary()", "probs": "Binary(logits=False)"}


@dataclass(frozen=True)
class Logits(_AlongDimension):
    """Scores of classes of which softmax makes probabilities; prediction is the logarithm of the mean probability.

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
        return self._back(log_of(probs)).to(like.dtype)

    def problem(self, scores: Tensor) -> str:
        rows, slack = self.log_scores(scores), max(1e-4, torch.finfo(scores.dtype).eps)
        sum_to_one = bool((rows >= 0).all()) and bool(((rows.sum(-1) - 1).abs() <= slack).all())
        if sum_to_one and not bool(((rows == 0) | (rows == 1)).all()):
            return 'the model gives probabilities (rows that sum to 1), of which softmax would be taken again: use output="probs"'
        return ""


@dataclass(frozen=True)
class Probs(_AlongDimension):
    """Probabilities of classes that sum to one; prediction is their mean.

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
        return self._back(probs).to(like.dtype)

    def problem(self, scores: Tensor) -> str:
        probs = self.probabilities(scores)
        if outside := _outside(probs):
            return f'output="probs", but the model gives {outside}; use output="logits"'
        sums, slack = probs.sum(-1), max(1e-3, 4 * torch.finfo(scores.dtype).eps)
        if bool(((sums - 1).abs() > slack).any()):
            return (
                f'output="probs", but the probabilities of a row sum to {sums.min().item():.3g} to {sums.max().item():.3g}, not to 1: labels '
                "that don't exclude each other are output=Binary(logits=False), from workbench.outputs import Binary"
            )
        return ""


@dataclass(frozen=True)
class Binary(Classes):
    """A yes or no in each element, one for a row [n] or [n, 1], or of several labels at once [n, labels].

    Prediction is the mean of the sigmoids, in the form in which the model gives scores; risks are the entropies of each element.

    Args:
        logits: whether the model gives scores of which sigmoid makes probabilities; False for the probabilities themselves.

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
            raise ValueError(f"Binary(logits=...) is True or False, not {self.logits!r}")

    def probabilities(self, scores: Tensor) -> Tensor:
        scores = at_least_float32(scores)
        if self.logits:
            return torch.stack([(-scores).sigmoid(), scores.sigmoid()], -1)
        return torch.stack([1 - scores, scores], -1)

    def log_scores(self, scores: Tensor) -> Tensor:
        # no against yes: a score of 0 and its own, which alone is uncertain
        scores = at_least_float32(scores)
        if not self.logits:
            scores = log_of(scores) - log_of(1 - scores)
        return torch.stack([torch.zeros_like(scores), scores], -1)

    def noise(self, risk: Tensor) -> Tensor:
        return torch.stack([torch.zeros_like(risk), risk], -1)

    def labels(self, target: Tensor, scores: Tensor) -> Tensor:
        if target.shape != scores.shape and target.squeeze(-1).shape != scores.squeeze(-1).shape:
            raise ValueError(f"yes or no of shape {list(target.shape)}, but the model gives {list(scores.shape)}")
        inside = (target >= 0) & (target <= 1)
        if not holds(inside):
            raise ValueError(
                f"yes or no is 1 or 0, and there is {target.min().item():g} to {target.max().item():g}{_advice_on_void(target[~inside])}"
            )
        yes = target.to(at_least_float32(scores).dtype).where(inside, torch.nan).reshape(scores.shape)
        return torch.stack([1 - yes, yes], -1)

    def form(self, probs: Tensor, like: Tensor) -> Tensor:
        no, yes = probs.unbind(-1)
        return (log_of(yes) - log_of(no) if self.logits else yes).to(like.dtype)

    def problem(self, scores: Tensor) -> str:
        outside = "" if self.logits else _outside(scores)
        return f'output=Binary(logits=False), but the model gives {outside}; use output="binary"' if outside else ""

    def doubt(self, scores: Tensor) -> str:
        if not self.logits or _outside(scores) or scores.min() == scores.max():
            return ""
        return (
            f'output="binary" takes the sigmoid of what the model gives, and all {scores.numel()} numbers lie in [0, 1], from '
            f"{scores.min().item():.3g} to {scores.max().item():.3g}. If these are probabilities already, write output=Binary(logits=False), "
            "from workbench.outputs import Binary"
        )


def cross_entropy(logs: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """Mean or "sum" of -log p, for log-probabilities [..., classes] and what `Classes.labels` gives; those that are `IGNORED` are left out."""
    if labels.is_floating_point():
        losses = -(labels * logs).sum(-1)
        return losses.mean() if reduction == "mean" else losses.sum()
    return F.cross_entropy(logs.flatten(0, -2), labels.flatten(), reduction=reduction)


def _advice_on_void(outside: Tensor) -> str:
    """What to write if one number marks what has no label."""
    void = outside[0].item()
    if not bool((outside == void).all()):
        return ""
    return (
        f". If {void:g} marks what has no label: Binary() has no number for that; train with a criterion that leaves it out, "
        f"lambda scores, y: binary_cross_entropy_with_logits(scores[y != {void:g}], y[y != {void:g}].float()), or give two scores for each yes "
        f"or no along a dimension of their own, output=Logits(dim=1), where {IGNORED} is left out everywhere"
    )


def _are_shares(target: Tensor) -> bool:
    sums = target.sum(-1)
    return not bool((target < 0).any()) and torch.allclose(
        sums, sums.new_ones(()), atol=max(1e-3, 4 * torch.finfo(sums.dtype).eps)
    )


def at_least_float32(tensor: Tensor) -> Tensor:
    """In float32 if its dtype is less precise than that."""
    return (
        tensor
        if tensor.dtype in (torch.float32, torch.float64)
        else tensor.to(torch.promote_types(torch.float32, tensor.dtype))
    )


def log_of(probs: Tensor) -> Tensor:
    """The logarithm, finite at a probability of zero."""
    return probs.clamp_min(torch.finfo(probs.dtype).tiny).log()


def _outside(probs: Tensor) -> str:
    if bool(((probs < 0) | (probs > 1)).any()):
        return f"numbers outside [0, 1], from {probs.min().item():.3g} to {probs.max().item():.3g}"
    return ""
