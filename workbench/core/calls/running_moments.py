"""Running means and variances of large outputs over the branches, computed without keeping the output of each branch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...engine.effects.random import values_unavailable
from ...engine.results import Running
from ...engine.tree import names
from ..additions import extra
from ..crossfit import Committee
from ..method import Method, sqrt
from ..outputs.class_scores import Classes, Logits, Probs, at_least_float32, log_of
from ..outputs.meanings import Meaning, Values
from ..outputs.resolution import check_numbers, resolve
from ..outputs.returned_distributions import distributions_in
from ..outputs.slips import warn_of_doubts, warn_of_whole_numbers

PIECE_SIZE = 2**20  # number of scores of all branches up to which their entropies are computed in one piece
# number of scores of one branch per piece, by device type; small enough on the CPU that intermediates stay in its cache
BRANCH_PIECE_SIZES = {"cpu": 2**17}
DEVICE_PIECE_SIZE = 2**24  # the same on other devices, where each piece costs kernel launches
N_CHECKED = 4096  # number of values of an output, evenly spaced, that are checked for being whole numbers


class RunningClasses(Running):
    """Means of probabilities and entropies over the branches, computed some positions at a time.

    Positions are independent and branches are added in order, so the result does not depend on how many branches are added at once. It agrees
    with `entropy` up to rounding (1e-5 nats in float32).

    Args:
        meaning: meaning of the scores, with a negative class dimension.
        like: scores of some branches, [branches, ...].
        return_risk: whether entropies are computed.
    """

    def __init__(self, meaning: Classes, like: Tensor, return_risk: bool) -> None:
        super().__init__(like)
        self._meaning, self._return_risk, self._weight = meaning, return_risk, 0.0
        self._dim, self._length = piece_of(meaning, like)
        self._ruled_out: Tensor | None = None
        numbers = at_least_float32(like[:0])
        if isinstance(meaning, Logits | Probs):
            self._numbers = numbers.new_empty(self.shape)  # same dimension order as the scores
            self._sum = meaning.classes_last(self._numbers)
        else:
            self._numbers = self._sum = numbers.new_empty((*self.shape, 2))
        self._entropies = numbers.new_empty(self._sum.shape[:-1]) if return_risk else None
        class_dim = meaning.class_dim
        # the dimension of the pieces in the entropies, which have no class dimension
        self._entropy_dim = self._dim + 1 if class_dim is not None and self._dim < class_dim else self._dim

    def add(self, scores: Tensor, weights: Sequence[float] | None = None) -> None:
        """Add scores [branches, ...], with one weight per branch (1 by default)."""
        self.check(scores)
        weights = [1.0] * len(scores) if weights is None else weights
        self._note_ruled_out(scores)
        for start, length in self._pieces():
            total = self._sum.narrow(self._entropy_dim - 1, start, length)
            sums = None if self._entropies is None else self._entropies.narrow(self._entropy_dim, start, length)
            for k, (branch, weight) in enumerate(zip(scores, weights, strict=True)):
                exponentials, normalizer, entropies = _probability_terms(
                    self._meaning, branch.narrow(self._dim, start, length), self._return_risk
                )
                if not self._weight and not k:
                    torch.div(exponentials, normalizer / weight, out=total)
                    if sums is not None:
                        torch.mul(entropies, weight, out=sums)
                    continue
                total.addcdiv_(exponentials, normalizer, value=weight)
                if sums is not None:
                    sums.add_(entropies, alpha=weight)
        self._weight += len(scores)

    def result(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the prediction and its risks. Works in place, so nothing may be added afterwards."""
        totals = torch.empty_like(self._entropies) if self._entropies is not None else None
        is_logits = isinstance(self._meaning, Logits)
        for start, length in self._pieces():
            mean = self._sum.narrow(self._entropy_dim - 1, start, length).div_(self._weight)
            if totals is None and not is_logits:
                continue
            logs = log_of(mean)
            if totals is not None:
                torch.sum(mean * logs, -1, out=totals.narrow(self._entropy_dim, start, length)).neg_()
            if is_logits:
                mean.copy_(logs)
        if self._ruled_out is not None:
            self._numbers.masked_fill_(self._ruled_out, -torch.inf)
        in_form = isinstance(self._meaning, Logits | Probs)
        y = self._numbers.to(self.dtype) if in_form else self._meaning.form(self._sum, self.stand_in)
        if totals is None or self._entropies is None:
            return y, {}
        aleatoric = self._entropies.div_(self._weight)
        return y, {"aleatoric": aleatoric, "total": totals, "epistemic": (totals - aleatoric).clamp_min_(0)}

    def _note_ruled_out(self, scores: Tensor) -> None:
        """Keep which logits are -inf in all branches, nothing if the first has none; on a GPU always, since to look at it would wait."""
        if not isinstance(self._meaning, Logits):
            return
        if not self._weight and (scores.device.type != "cpu" or scores[0].amin() == -torch.inf):
            self._ruled_out = torch.ones_like(scores[0], dtype=torch.bool)
        if self._ruled_out is not None:
            for branch in scores:
                self._ruled_out &= branch == -torch.inf

    def _pieces(self) -> list[tuple[int, int]]:
        size = self.shape[self._dim]
        return [(start, min(self._length, size - start)) for start in range(0, size, self._length)]


class RunningValues(Running):
    """Mean and variance of values over the branches, from sums of differences to the first branch.

    Args:
        like: values of some branches, [branches, ...].
        check_values: called once with values of the first two branches, [2, n].
    """

    def __init__(self, like: Tensor, check_values: Callable[[Tensor], None]) -> None:
        super().__init__(like)
        self._first: Tensor | None = None
        self._check, self._count = check_values, 0

    def add(self, values: Tensor) -> None:
        self.check(values)
        for value in values:
            self._count += 1
            if self._first is None:
                self._first = at_least_float32(value).clone()
                self._sum, self._squares = torch.zeros_like(self._first), torch.zeros_like(self._first)
                continue
            if self._count == 2:
                step = max(1, value.numel() // N_CHECKED)
                self._check(torch.stack([self._first.flatten()[::step].to(self.dtype), value.flatten()[::step]]))
            difference = value - self._first
            self._sum.add_(difference)
            self._squares.addcmul_(difference, difference)

    def result(self, return_risk: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean and the standard deviation over the branches. Works in place, so nothing may be added afterwards."""
        assert self._first is not None  # there is at least one branch
        shift = self._sum.div_(self._count)
        if not return_risk:
            return shift.add_(self._first).to(self.dtype), {}
        risk = sqrt(self._squares.div_(self._count).addcmul_(shift, shift, value=-1))
        return shift.add_(self._first).to(self.dtype), {"epistemic": risk, "total": risk}


class Folding:
    """Replaces large outputs by running means as the branches are computed: see `Plan.folding`.

    Args:
        wrapped: the wrapped object.
        axes: names of the branches' axes.
        n_branches: total number of branches.
        return_risk: whether risks are computed.
    """

    def __init__(self, wrapped: Any, axes: tuple[str, ...], n_branches: int, return_risk: bool) -> None:
        self._wrapped, self._axes, self._n_branches, self._return_risk = wrapped, axes, n_branches, return_risk
        self._running: dict[int, Running] = {}

    def __call__(self, leaves: list[Any], rebuild: Callable[[list[Any]], Any]) -> list[Any]:
        """Add leaves of some branches to the running statistics, and return the leaves with these in place of large tensors.

        Args:
            leaves: leaves of some branches; tensors have the axes in front.
            rebuild: function from equally many leaves to an output of the model's structure.
        """
        depth = len(self._axes)
        if not any(isinstance(leaf, Tensor) and self._is_large(leaf) for leaf in leaves):
            return leaves
        tree = rebuild(leaves)
        if distributions_in(tree):
            return leaves
        meanings = resolve(self._wrapped._workbench.output, lambda: names(tree), leaves, depth)
        return [
            self._folded(i, leaf.flatten(0, depth - 1), meaning)
            if isinstance(leaf, Tensor) and self._is_large(leaf) and isinstance(meaning, Classes | Values)
            else leaf
            for i, (leaf, meaning) in enumerate(zip(leaves, meanings, strict=True))
        ]

    def _is_large(self, leaf: Tensor) -> bool:
        branch_size = leaf.shape[len(self._axes) :].numel()
        return leaf.is_floating_point() and branch_size * self._n_branches > PIECE_SIZE and leaf.layout is torch.strided

    def _folded(self, i: int, branches: Tensor, meaning: Meaning) -> Any:
        running = self._running.get(i)
        if isinstance(meaning, Classes):
            check_numbers(meaning, branches, self._wrapped._workbench.warned)
            warn_of_doubts(self._wrapped, meaning, branches, 1)
        if running is None and isinstance(meaning, Classes):
            running = RunningClasses(meaning, branches, self._return_risk)
        elif running is None:
            running = RunningValues(branches, lambda pair: warn_of_whole_numbers(self._wrapped, pair, 1))
        self._running[i] = running
        running.add(branches)
        return running


def folding_of(
    wrapped: Any, axes: Sequence[Any], committee: Committee | None, return_risk: bool
) -> Callable[[], Folding] | None:
    """Return the factory of a call's running means, None if all branches must be kept.

    Running means are used if `chunk` is set, gradients are off, and all branches are equally weighted models.
    """
    record = wrapped._workbench
    if record.chunk is None or not axes:
        return None
    methods = [method for method in record.methods if any(axis.name == method.name for axis in axes)]
    if (
        committee is not None
        or record.state
        or extra(wrapped, "prior") is not None
        or values_unavailable()
        or torch.is_grad_enabled()
        or any(axis.own_first for axis in axes)
        or any(type(m).reduce is not Method.reduce or type(m).average is not Method.average for m in methods)
    ):
        return None
    order, n_branches = tuple(axis.name for axis in axes), math.prod(axis.size for axis in axes)
    return lambda: Folding(wrapped, order, n_branches, return_risk)


def piece_of(meaning: Classes, scores: Tensor) -> tuple[int, int]:
    """Return the negative dimension along which scores [branches, ...] are split into pieces, and the length of a piece; (0, 0) for none.

    It is the outermost dimension whose single positions are small enough, so that a piece is contiguous in memory.
    """
    shape, limit = scores.shape[1:], BRANCH_PIECE_SIZES.get(scores.device.type, DEVICE_PIECE_SIZE)
    sizes = {i - len(shape): size for i, size in enumerate(shape) if i - len(shape) != meaning.class_dim}
    if not sizes or not shape.numel():
        return 0, 0
    largest = max(sizes, key=lambda i: sizes[i])
    dim = next((i for i, size in sizes.items() if shape.numel() // size <= limit), largest)
    return dim, max(1, limit * sizes[dim] // shape.numel())


def entropy(probs: Tensor) -> Tensor:
    """Return the entropy in nats over the last dimension; the gradient at a probability of zero is zero, not infinite."""
    return torch.special.entr(probs.clamp_min(torch.finfo(probs.dtype).tiny)).sum(-1)


def _probability_terms(meaning: Classes, scores: Tensor, return_risk: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for one branch, numerators [..., classes] and denominator [..., 1] of its probabilities, and its entropies [...].

    Works without gradients. If `return_risk` is False the third tensor is a placeholder.
    """
    if not isinstance(meaning, Logits):
        probs = meaning.probabilities(scores)
        return probs, probs.new_ones(()), entropy(probs) if return_risk else probs
    # H = log Z - sum(exp(z) z) / Z, computed in place, which takes a quarter of the time of softmax and entr
    logs = meaning.log_scores(scores)
    logs = logs - logs.amax(-1, keepdim=True)
    exponentials = logs.exp()
    normalizer = exponentials.sum(-1, keepdim=True)
    if not return_risk:
        return exponentials, normalizer, exponentials
    # a class with score -inf contributes nothing, instead of the NaN of 0 * inf
    sums = logs.clamp_(min=torch.finfo(logs.dtype).min).mul_(exponentials).sum(-1)
    partition = normalizer.squeeze(-1)
    return exponentials, normalizer, partition.log().addcdiv_(sums, partition, value=-1)


__all__ = ["Folding", "RunningClasses", "RunningValues", "entropy", "folding_of", "piece_of"]
