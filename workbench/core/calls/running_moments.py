"""Running means and variances of large outputs, in which no branch's map is kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...engine.effects.random import values_unavailable
from ...engine.results import Running
from ...engine.tree import names
from ..crossfit import Committee
from ..method import Method, sqrt
from ..outputs.class_scores import Classes, Logits, Probs, at_least_float32, log_of
from ..outputs.meanings import Meaning, Values
from ..outputs.resolution import check_numbers, resolve
from ..outputs.said_distributions import distributions_in
from ..outputs.slips import tell_doubts, tell_whole_numbers
from ..ownership import extra

PIECE = 2**20  # scores of all branches, up to which entropies of all are computed at once
# scores of one branch whose entropies are computed at once, so that what is between stays in a cache
OF_BRANCH = {"cpu": 2**17}
ELSEWHERE = 2**24  # the same where each piece costs launches
SEEN = 4096  # numbers of a map, spread over it, of which it is seen whether they are whole


class RunningClasses(Running):
    """Means over the branches of probabilities and entropies, some positions at a time.

    Positions have nothing to do with each other, and branches come in their order, so that the numbers do not depend on how many are added at
    once; they are those of `entropy` up to rounding (1e-5 nats in float32).

    Args:
        meaning: of the scores; its dimension is counted from behind.
        like: scores of branches, [branches, ...].
        return_risk: whether entropies are wanted.
    """

    def __init__(self, meaning: Classes, like: Tensor, return_risk: bool) -> None:
        super().__init__(like)
        self._meaning, self._return_risk, self._weight = meaning, return_risk, 0.0
        self._dim, self._length = piece_of(meaning, like)
        numbers = at_least_float32(like[:0])
        if isinstance(meaning, Logits | Probs):
            self._numbers = numbers.new_empty(self.shape)  # laid out like scores
            self._sum = meaning.classes_last(self._numbers)
        else:
            self._numbers = self._sum = numbers.new_empty((*self.shape, 2))
        self._entropies = numbers.new_empty(self._sum.shape[:-1]) if return_risk else None
        of_classes = meaning.class_dim
        # where the dimension of pieces stands among those of the entropies, which have no classes
        self._place = self._dim + 1 if of_classes is not None and self._dim < of_classes else self._dim

    def add(self, scores: Tensor, weights: Sequence[float] | None = None) -> None:
        self.check(scores)
        weights = [1.0] * len(scores) if weights is None else weights
        for start, length in self._pieces():
            total = self._sum.narrow(self._place - 1, start, length)
            sums = None if self._entropies is None else self._entropies.narrow(self._place, start, length)
            for k, (branch, weight) in enumerate(zip(scores, weights, strict=True)):
                exponentials, normalizer, entropies = _summands(
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
        """The prediction and its risks; nothing may be added any more."""
        totals = torch.empty_like(self._entropies) if self._entropies is not None else None
        is_logits = isinstance(self._meaning, Logits)
        for start, length in self._pieces():
            mean = self._sum.narrow(self._place - 1, start, length).div_(self._weight)
            if totals is None and not is_logits:
                continue
            logs = log_of(mean)
            if totals is not None:
                torch.sum(mean * logs, -1, out=totals.narrow(self._place, start, length)).neg_()
            if is_logits:
                mean.copy_(logs)
        in_form = isinstance(self._meaning, Logits | Probs)
        y = self._numbers.to(self.dtype) if in_form else self._meaning.form(self._sum, self.stand_in)
        if totals is None or self._entropies is None:
            return y, {}
        aleatoric = self._entropies.div_(self._weight)
        return y, {"aleatoric": aleatoric, "total": totals, "epistemic": (totals - aleatoric).clamp_min_(0)}

    def _pieces(self) -> list[tuple[int, int]]:
        size = self.shape[self._dim]
        return [(start, min(self._length, size - start)) for start in range(0, size, self._length)]


class RunningValues(Running):
    """Mean and variance of values over the branches, by sums of differences from the first branch.

    Args:
        like: values of branches, [branches, ...].
        see: is shown some numbers of the first two branches, [2, n].
    """

    def __init__(self, like: Tensor, see: Callable[[Tensor], None]) -> None:
        super().__init__(like)
        self._first: Tensor | None = None
        self._see, self._count = see, 0

    def add(self, values: Tensor) -> None:
        self.check(values)
        for value in values:
            self._count += 1
            if self._first is None:
                self._first = at_least_float32(value).clone()
                self._sum, self._squares = torch.zeros_like(self._first), torch.zeros_like(self._first)
                continue
            if self._count == 2:
                every = max(1, value.numel() // SEEN)
                self._see(torch.stack([self._first.flatten()[::every].to(self.dtype), value.flatten()[::every]]))
            difference = value - self._first
            self._sum.add_(difference)
            self._squares.addcmul_(difference, difference)

    def result(self, return_risk: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean and the standard deviation over the branches; nothing may be added any more."""
        assert self._first is not None  # there is at least one branch
        shift = self._sum.div_(self._count)
        if not return_risk:
            return shift.add_(self._first).to(self.dtype), {}
        risk = sqrt(self._squares.div_(self._count).addcmul_(shift, shift, value=-1))
        return shift.add_(self._first).to(self.dtype), {"epistemic": risk, "total": risk}


class Folding:
    """Puts running means in the place of large outputs, as the branches come: see `Plan.folding`.

    Args:
        wrapped: the object.
        axes: names of the branches' axes.
        n_branches: how many there are in all.
        return_risk: whether risks are wanted.
    """

    def __init__(self, wrapped: Any, axes: tuple[str, ...], n_branches: int, return_risk: bool) -> None:
        self._wrapped, self._axes, self._n_branches, self._return_risk = wrapped, axes, n_branches, return_risk
        self._running: dict[int, Running] = {}

    def __call__(self, leaves: list[Any], rebuild: Callable[[list[Any]], Any]) -> list[Any]:
        """The leaves of an output, the running statistics in the place of those that they have taken in.

        Args:
            leaves: of some branches; tensors have the axes in front.
            rebuild: puts as many leaves into the shape of the output.
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
        of_branch = leaf.shape[len(self._axes) :].numel()
        return leaf.is_floating_point() and of_branch * self._n_branches > PIECE and leaf.layout is torch.strided

    def _folded(self, i: int, branches: Tensor, meaning: Meaning) -> Any:
        running = self._running.get(i)
        if isinstance(meaning, Classes):
            check_numbers(meaning, branches, self._wrapped._workbench.told)
            tell_doubts(self._wrapped, meaning, branches, 1)
        if running is None and isinstance(meaning, Classes):
            running = RunningClasses(meaning, branches, self._return_risk)
        elif running is None:
            running = RunningValues(branches, lambda pair: tell_whole_numbers(self._wrapped, pair, 1))
        self._running[i] = running
        running.add(branches)
        return running


def folding_of(
    wrapped: Any, axes: Sequence[Any], committee: Committee | None, return_risk: bool
) -> Callable[[], Folding] | None:
    """What makes the running means of a call, None where all branches are wanted at once.

    They are kept where `chunk` is set, no gradient is asked for, and all branches are equally likely models.
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
    """The dimension along which scores [branches, ...] are cut into pieces, counted from behind, and how long a piece is; 0, 0 for none.

    The outermost one whose single positions are small enough, so that pieces lie together in memory.
    """
    shape, limit = scores.shape[1:], OF_BRANCH.get(scores.device.type, ELSEWHERE)
    sizes = {i - len(shape): size for i, size in enumerate(shape) if i - len(shape) != meaning.class_dim}
    if not sizes or not shape.numel():
        return 0, 0
    largest = max(sizes, key=lambda i: sizes[i])
    dim = next((i for i, size in sizes.items() if shape.numel() // size <= limit), largest)
    return dim, max(1, limit * sizes[dim] // shape.numel())


def entropy(probs: Tensor) -> Tensor:
    """In nats over the last dimension; the gradient at a probability of zero is zero, not infinite."""
    return torch.special.entr(probs.clamp_min(torch.finfo(probs.dtype).tiny)).sum(-1)


def _summands(meaning: Classes, scores: Tensor, return_risk: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Of one branch what is divided [..., classes] by what [..., 1] to give its probabilities, and its entropies [...]; without gradients."""
    if not isinstance(meaning, Logits):
        probs = meaning.probabilities(scores)
        return probs, probs.new_ones(()), entropy(probs) if return_risk else probs
    # H = log Z - sum(exp(z) z) / Z, in place: a quarter of the time of softmax and entr
    logs = meaning.log_scores(scores)
    logs = logs - logs.amax(-1, keepdim=True)
    exponentials = logs.exp()
    normalizer = exponentials.sum(-1, keepdim=True)
    if not return_risk:
        return exponentials, normalizer, exponentials
    # a class that is ruled out by a score of -inf adds nothing
    sums = logs.clamp_(min=torch.finfo(logs.dtype).min).mul_(exponentials).sum(-1)
    of_all = normalizer.squeeze(-1)
    return exponentials, normalizer, of_all.log().addcdiv_(sums, of_all, value=-1)


__all__ = ["Folding", "RunningClasses", "RunningValues", "entropy", "folding_of", "piece_of"]
