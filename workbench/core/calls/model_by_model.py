"""Loss and gradients of one model after another, so that only the activations of a single model are in memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...engine.combine import Branched
from ...engine.dependence import is_reentrant_checkpoint, next_node_number, nodes_behind
from ...engine.effects.random import RandomSources, values_unavailable, were_drawn
from ...engine.plan import Plan
from ...engine.tree import tensors
from ..additions import extra
from ..batches.call_arguments import as_arguments
from ..method import Call
from ..ownership import engine_of, table_of
from ..parameters import stacked_names
from .frozen import call_guarded
from .predict import complete, plan_of, run
from .surrounding import apply_pre_hooks
from .training_losses import check_criterion, loss_of_branches, losses_of_models

# seconds of a model's forward pass on a CPU from which a backward pass of its own costs next to nothing
LONG_PASS = 0.003
Check = Callable[[Tensor], None]
DETACHED = "the loss depends on no trainable parameter; is the model or the criterion detached?"


def backward(
    wrapped: Any, criterion: Callable[[Any, Any], Tensor] | None, x: Any, y: Any, check: Check | None = None
) -> Tensor:
    """Do what `wrapped.loss(criterion, x, y).backward()` does, for one model after another where the models share nothing trained.

    Gradients are the same to the last bit: those of each model come from its own part of the mean over the models.

    Args:
        wrapped: the wrapped object.
        criterion, x, y: as for `Wrapped.loss`.
        check: called with each loss before its backward pass; it raises if there should be none.

    Returns:
        The detached loss [].

    Raises:
        ValueError: if the loss depends on no trainable parameter.
    """
    return call_guarded(_backward, wrapped, criterion, *apply_pre_hooks(wrapped, *as_arguments(wrapped, x)), y, check)


def _backward(wrapped: Any, criterion: Any, args: tuple, kwargs: dict[str, Any], y: Any, check: Check | None) -> Tensor:
    check_criterion(criterion)
    if (scaling := extra(wrapped, "scaling")) is not None:
        (args, kwargs), y = scaling.inputs(args, kwargs), scaling.targets(y)
    plan = plan_of(wrapped, Call(wrapped.training, True, loss=True))
    turns: list[_Turns] = []

    def begin() -> _Turns:
        turns[:] = [_Turns(wrapped, plan, (criterion, args, kwargs, y), check)]
        return turns[0]

    branched, _ = run(wrapped, plan, args, kwargs, begin if _separable(wrapped, plan, (args, kwargs, y)) else None)
    if turns and turns[0].complete:
        return turns[0].end()
    loss = loss_of_branches(wrapped, branched, criterion, args, kwargs, y)
    if not loss.requires_grad:
        raise ValueError(DETACHED)
    if check is not None:
        check(loss)
    loss.backward()
    return loss.detach()


def _separable(wrapped: Any, plan: Plan, batch: tuple[Any, Any, Any]) -> bool:
    """Return whether nothing that is trained is shared by the models along the outermost axis."""
    record, table = wrapped._workbench, table_of(wrapped)
    if values_unavailable() or not torch.is_grad_enabled() or not plan.axes or plan.axes[0].own_first:
        return False
    registered = {name for rule in plan.rules.values() for name in rule.registered()}
    trained = {name for name in registered if table.get(name).requires_grad}
    return (
        trained.issubset(stacked_names(plan.rules.values(), plan.axes[0].name))
        and not plan.interventions
        and plan.ragged is None
        and not record.state
        and all(method.regularizer(table, record.rows) is None for method in record.methods)
        and not any(tensor.requires_grad for tensor in tensors(batch))
    )


class _Turns:
    """Computes losses and gradients of each model as soon as its branches have run: see `Request.receiver`.

    Nothing is kept of a model but its outputs. If the first model runs faster than `LONG_PASS`, the others are not waited for.

    Args:
        wrapped: the wrapped object.
        plan: the plan of the call.
        batch: criterion, positional and keyword inputs, and targets.
        check: as for `backward`.
    """

    def __init__(
        self, wrapped: Any, plan: Plan, batch: tuple[Any, tuple, dict[str, Any], Any], check: Check | None
    ) -> None:
        self._wrapped, self._bank, self._batch, self._check = wrapped, plan.bank, batch, check
        self._axes = tuple(axis.name for axis in plan.axes)
        self._sizes = tuple(axis.size for axis in plan.axes)
        self._n_models = math.prod(axis.size for axis in plan.axes if not axis.own_first)
        self._start, self._first_node = time.perf_counter(), next_node_number()
        self._off = self._reached = False  # whether models run too fast; whether some loss has a gradient
        self._waiting: list[list[Any]] = []  # leaves of branches whose model is not complete
        self._done = 0  # positions along the outermost axis that had their turn
        self._losses: list[Tensor] = []
        self._of_rows: dict[str, _Rows] = {}  # gradients of stacked tensors
        self._of_others: dict[int, tuple[Tensor, Tensor]] = {}  # other leaf tensors of the graph, and their gradients

    @property
    def complete(self) -> bool:
        """Whether all models had their turn."""
        return self._done == self._sizes[0]

    def __call__(self, leaves: list[Any], rebuild: Callable[[list[Any]], Any]) -> None:
        """Take the leaves of some branches, with the axes in front."""
        if self._off:
            return
        self._waiting.append(leaves)
        branched = self._models(rebuild)
        if branched is None:
            return
        self._waiting = []
        first_turn = not self._done
        if first_turn and not self._pays(time.perf_counter() - self._start, leaves):
            self._off = True
            return
        complete(self._wrapped, branched)
        sources = RandomSources(leaves, [])
        before = sources.all() if first_turn else None
        losses = losses_of_models(self._wrapped, branched, *self._batch, first=self._done)
        if before is not None and were_drawn([*before], [*sources.all()]):
            # between the models, a criterion that draws would change what they draw
            sources.restore(before)
            self._off = True
            return
        count = branched.sizes()[0]
        self._losses.append(losses.detach())
        if losses.requires_grad:
            self._reached = True
            if self._check is not None:
                self._check(losses)
            self._differentiate(losses, range(self._done, self._done + count))
        self._done += count

    def _models(self, rebuild: Callable[[list[Any]], Any]) -> Branched | None:
        """Return the outputs that wait, None as long as branches of the last model are missing."""
        depth, inner = len(self._axes), self._sizes[1:]
        if len({tuple(map(_form, leaves)) for leaves in self._waiting}) > 1 or not any(map(_form, self._waiting[0])):
            self._off = True  # `combine` says what is wrong
            return None
        columns = list(zip(*self._waiting, strict=True))
        flat = [[leaf.flatten(0, depth - 1) for leaf in column] if _form(column[0]) else column for column in columns]
        n_branches = next(sum(map(len, column)) for column in flat if _form(column[0]))
        if n_branches % math.prod(inner):
            return None
        joined = [torch.cat(column).unflatten(0, (-1, *inner)) if _form(column[0]) else column[0] for column in flat]
        return Branched(self._axes, joined, rebuild)

    def _pays(self, seconds: float, leaves: list[Any]) -> bool:
        """Return whether models are worth a turn each, given the seconds of the first one and its outputs."""
        _, args, kwargs, _ = self._batch
        if engine_of(self._wrapped).dispatcher.is_little(tensors((args, kwargs))):
            return False
        return seconds >= LONG_PASS or not all(leaf.is_cpu for leaf in tensors(leaves))

    def _differentiate(self, losses: Tensor, numbers: range) -> None:
        """Add the gradients of the losses of models, given their positions along the outermost axis."""
        share = torch.ones_like(losses) / self._n_models
        rows = {
            (name, i): stacked[i]
            for name, stacked in self._bank.separated().items()
            for i in numbers
            if stacked[i].requires_grad
        }
        ends = {row.grad_fn for row in rows.values()}
        others, nodes = nodes_behind([losses], ends.__contains__)
        # such a part of the graph has no gradients but those of leaf tensors
        if any(map(is_reentrant_checkpoint, nodes)):
            losses.backward(share)
            return
        whole = {id(tensor): tensor for tensor in (self._bank.get(name) for name, _ in rows)}
        # as in a criterion that penalizes the wrapped object's parameters
        otherwise_reached = not whole.keys().isdisjoint(map(id, others))
        if otherwise_reached:
            others, rows = list({**whole, **{id(tensor): tensor for tensor in others}}.values()), {}
        # a part of the graph that was there before, such as features in a criterion, is behind the losses of all models
        has_common_part = any(node not in ends and node._sequence_nr() < self._first_node for node in nodes)
        gradients = torch.autograd.grad(
            losses, [*rows.values(), *others], share, retain_graph=has_common_part, allow_unused=True
        )
        for (name, i), gradient in zip(rows, gradients, strict=False):
            if gradient is not None:
                if name not in self._of_rows:
                    self._of_rows[name] = _Rows(self._bank.get(name))
                self._of_rows[name].set(i, gradient)
        for tensor, gradient in zip(others, gradients[len(rows) :], strict=True):
            if gradient is not None:
                _, before = self._of_others.get(id(tensor), (tensor, None))
                self._of_others[id(tensor)] = tensor, gradient if before is None else before + gradient

    def end(self) -> Tensor:
        """Accumulate the gradients in the leaf tensors, and return the detached loss []."""
        if not self._reached:
            raise ValueError(DETACHED)
        pairs = [(self._bank.get(name), rows.stacked()) for name, rows in self._of_rows.items()]
        pairs += self._of_others.values()
        self._of_rows, self._of_others = {}, {}
        if pairs:
            leaves, gradients = map(list, zip(*pairs, strict=True))
            del pairs
            _GivenGradients.apply(gradients, *leaves).backward(retain_graph=True)
        return torch.cat(self._losses).mean()


class _Rows:
    """Gradient of a stacked tensor, which comes row by row.

    Each row is copied to its place at once. If it stayed where the backward pass put it, the activations of the next models would not fit
    between such rows, and would take new pages of memory in every step.
    """

    def __init__(self, stacked: Tensor) -> None:
        self._whole = torch.empty_like(stacked)
        self._rows: list[Tensor | None] = [None] * len(stacked)
        self._apart = False  # whether rows lie elsewhere: those of sparse and sharded tensors are no views

    def set(self, i: int, gradient: Tensor) -> None:
        """Set the gradient of a row."""
        if type(gradient) is Tensor and gradient.layout is torch.strided:
            gradient = self._whole[i].copy_(gradient)
        else:
            self._apart = True
        self._rows[i] = gradient

    def stacked(self) -> Tensor:
        """Return the gradient of the stacked tensor, 0 in rows without one."""
        rows = [self._whole[i].zero_() if row is None else row for i, row in enumerate(self._rows)]
        return torch.stack(rows) if self._apart else self._whole


class _GivenGradients(torch.autograd.Function):
    """A number that depends on tensors, and whose backward pass gives each of them a gradient, without keeping any: `.grad` need not copy it."""

    @staticmethod
    def forward(context: Any, gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        context.gradients = gradients
        return torch.zeros((), device=gradients[0].device)

    @staticmethod
    def backward(context: Any, *_: Tensor) -> tuple[Any, ...]:
        gradients = tuple(context.gradients)
        context.gradients.clear()  # the caller holds this list as well
        return None, *gradients


def _form(leaf: Any) -> tuple[int, ...]:
    """Return the shape of a tensor with axes in front, () for another leaf."""
    return tuple(leaf.shape) if isinstance(leaf, Tensor) and not leaf.is_nested else ()


__all__ = ["DETACHED", "LONG_PASS", "backward"]
