"""Detection of training mistakes at optimizer steps.

Checked are optimizers made before wrapping, before parameters were replaced, or of a part of the model, voters that stay equal, risk heads that
are in no loss, weight decay of stacked biases, and optimizers whose steps depend on whole tensors.
"""

from __future__ import annotations

import gc
import re
import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ..errors import OptimizerMismatchError, WorkbenchWarning
from ..introspect.source_lines import some_of, user_stacklevel
from .batches.row_weights import rows_equal
from .calls.frozen import refuse_step
from .crossfit import members_axis
from .method import Call
from .parameters import split_for_decay, stacked_names
from .single_warnings import warn_once

_wrapped: dict[int, weakref.ref[nn.Module]] = {}  # id -> living wrapped objects
_histories: dict[int, _History] = {}  # id -> living optimizers that have stepped
_stepped: dict[int, weakref.ref[Tensor]] = {}  # id -> parameters held by an optimizer that has stepped
_reached: dict[int, weakref.ref[Tensor]] = {}  # id -> risk heads that had a gradient at some inspection
# wrapped objects -> parameters that load_state_dict(assign=True) has replaced, with their names
_assigned: weakref.WeakKeyDictionary[nn.Module, list[tuple[str, weakref.ref[Any]]]] = weakref.WeakKeyDictionary()
MIN_STEPS = 8  # steps without a gradient before a warning about risk heads, which may enter the loss late
# class names of optimizers whose steps are not elementwise
_BY_TENSOR = re.compile("adafactor|shampoo|muon|novograd|prodigy|dadapt|^(lamb|lars|soap|came|sm3|adamp|sgdp)$")
_changes = 0  # number of objects wrapped so far; whenever it changes, every optimizer is inspected again


class _History:
    """Past inspections of an optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        key = id(optimizer)
        self.ref = weakref.ref(optimizer, lambda _: _histories.pop(key, None))
        self.stage = (-1, 0)  # number of wrapped objects and of parameter groups when counting of steps began
        self.steps = self.next = 0
        self.warned = False
        # wrapped objects whose voters have been found to differ
        self.differing: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        # versions of risk heads at the first inspection; steps that train them change these
        self.versions: dict[int, int] = {}
        # sums of gradients at the last inspection, to detect gradients left over from an earlier training
        self.sums: dict[int, Any] = {}

    def due(self, groups: int) -> bool:
        """Return whether to inspect at this step: at steps 1, 2, 4, 8, ..., since risk may enter the loss late."""
        if self.stage != (_changes, groups):
            self.stage, self.steps, self.next = (_changes, groups), 0, 1
        self.steps += 1
        if self.steps < self.next:
            return False
        self.next = 2 * self.steps
        return True


def watch(wrapped: nn.Module) -> None:
    """Check from now on whether optimizers that step really train this wrapped object.

    A step raises `OptimizerMismatchError` if its optimizer holds parameters of the given model that the wrapped one has replaced. It warns once
    if the optimizer trains only a part of the wrapped model while other parameters have gradients but no optimizer.
    """
    global _changes
    key = id(wrapped)
    if key not in _wrapped or _wrapped[key]() is not wrapped:
        if not _changes:
            register_optimizer_step_pre_hook(_before_step)
        _changes += 1
        _wrapped[key] = weakref.ref(wrapped, lambda _: _wrapped.pop(key, None))


def note_assignment(wrapped: nn.Module) -> None:
    """Remember the parameters of a wrapped object that `load_state_dict(assign=True)` is about to replace."""
    global _changes
    _changes += 1
    earlier = [(name, ref) for name, ref in _assigned.get(wrapped, ()) if ref() is not None]
    _assigned[wrapped] = [*earlier, *((name, weakref.ref(p)) for name, p in nn.Module.named_parameters(wrapped))]


def _before_step(optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    refuse_step(optimizer)
    history = _histories.get(id(optimizer))
    if history is None:
        history = _histories[id(optimizer)] = _History(optimizer)
    if not history.due(len(optimizer.param_groups)):
        return None
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        _inspect(optimizer, history)
        return None
    first = True

    def inspected_closure() -> Any:
        """Inspect after the first call of the closure, when gradients exist and no parameter has changed yet."""
        nonlocal first
        loss = closure()
        if first:
            first = False
            _inspect(optimizer, history)
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": inspected_closure}
    return (args[0], inspected_closure, *args[2:]), kwargs


@_disable_dynamo  # a compiled step would depend on which objects existed when it was traced
def _inspect(optimizer: Optimizer, history: _History) -> None:
    """Report mistakes in training living wrapped objects with this optimizer, such as parameters with gradients but no optimizer."""
    trained = {id(p): p for p in _parameters(optimizer)}
    for wrapped in [ref() for ref in list(_wrapped.values())]:
        if wrapped is None:
            continue
        parameters = dict(nn.Module.named_parameters(wrapped))
        trains_some = any(id(p) in trained for p in parameters.values())
        if trains_some:
            _report_decay(optimizer, wrapped)
            _report_alike(wrapped, trained, history)
            _report_heads(wrapped, trained, history)
            _report_sizes(optimizer, wrapped, trained)
        missed = {name: p for name, p in parameters.items() if _has_gradient(p) and id(p) not in trained}
        if not missed:
            continue
        stale = _stale(wrapped, trained, missed)
        assigned = [name for name, ref in _assigned.get(wrapped, ()) if name in missed and id(ref()) in trained]
        if not (stale or assigned or (trains_some and not history.warned)):
            continue
        elsewhere = _held_by_any_optimizer()
        missed = {name: p for name, p in missed.items() if id(p) not in elsewhere and _is_fresh(p, history)}
        if missed:
            _report(optimizer, wrapped, list(missed), stale, assigned, history)
    for key, parameter in trained.items():
        _stepped[key] = weakref.ref(parameter, lambda _, key=key: _stepped.pop(key, None))  # type: ignore[misc]


def _has_gradient(parameter: Tensor) -> bool:
    return parameter.requires_grad and parameter.grad is not None


def _stale(wrapped: nn.Module, trained: dict[int, Tensor], missed: Mapping[str, Tensor]) -> list[str]:
    """Return the names of parameters in the optimizer that the wrapped object has replaced by some of the missed parameters."""
    return [
        name
        for name, original, replacements in wrapped.__dict__["_engine"].table.replaced()
        if original.requires_grad
        and original.grad is None
        and id(original) in trained
        and not missed.keys().isdisjoint(replacements)
    ]


def _held_by_any_optimizer() -> set[int]:
    """Return the ids of the parameters of all living optimizers, found by a slow search of all objects that is rarely needed."""
    optimizers = [o for o in gc.get_objects() if issubclass(type(o), Optimizer) and "param_groups" in o.__dict__]
    return {id(p) for optimizer in optimizers for p in _parameters(optimizer)}


def _parameters(optimizer: Optimizer) -> Iterable[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _is_fresh(parameter: Tensor, history: _History) -> bool:
    """Return whether a gradient belongs to the current training; for a parameter trained before, it must change between two inspections."""
    if id(parameter) not in _stepped:
        return True
    gradient: Any = parameter.grad
    previous_sum, current_sum = history.sums.get(id(parameter)), gradient.sum().item()
    history.sums[id(parameter)] = current_sum
    return previous_sum is not None and previous_sum != current_sum


def _report(
    optimizer: Optimizer, wrapped: Any, missed: list[str], stale: list[str], assigned: list[str], history: _History
) -> None:
    name, model = type(optimizer).__name__, wrapped._workbench_name()
    if assigned:
        history.next = 0  # refuse the next step as well
        raise OptimizerMismatchError(
            f"load_state_dict(assign=True) has replaced {some_of(assigned)} of {model} after this {name} was made, which would go on to train "
            f"the old ones: create it after loading, {name}(wrapped.parameters()), or load without assign=True"
        )
    if stale:
        history.next = 0  # refuse the next step as well
        raise OptimizerMismatchError(
            f"this {name} was made from the parameters of a model before it was wrapped: {some_of(stale)} have no gradient, because {model} "
            f"uses {some_of(missed)} in their place, which no optimizer holds. Create it from the wrapped model: {name}(wrapped.parameters())"
        )
    history.warned = True
    warnings.warn(
        f"this {name} trains a part of {model} only: {some_of(missed)} have gradients and no optimizer. Create it from all parameters, "
        f"{name}(wrapped.parameters()), or freeze them with requires_grad_(False)",
        WorkbenchWarning,
        stacklevel=user_stacklevel(),
    )


def _report_decay(optimizer: Optimizer, wrapped: Any) -> None:
    """Warn once if parameter groups exempt biases and norms from weight decay but miss those of voters, which have one dimension more."""
    groups = [
        (bool(group.get("weight_decay", 0) > 0), {id(p) for p in group["params"]}) for group in optimizer.param_groups
    ]
    if {decays for decays, _ in groups} != {True, False}:
        return  # none or all parameters are decayed, which is deliberate
    decayed, spared = ({key for decays, keys in groups if decays is which for key in keys} for which in (True, False))
    weights, others = split_for_decay(wrapped)
    wrong = [name for name, p in others.items() if id(p) in decayed and p.dim() > 1]
    if wrong and not any(id(p) in spared for p in weights.values()):
        warn_once(
            wrapped,
            "decay",
            f"this {type(optimizer).__name__} spares some parameters weight decay, but not {some_of(wrong)}: these are biases, norms or factors "
            "of voters, with one dimension more than in the plain model, and usually have no weight decay. Create it from "
            "wrapped.parameter_groups(weight_decay)",
        )


def _report_sizes(optimizer: Optimizer, wrapped: Any, trained: Mapping[int, Tensor]) -> None:
    """Warn once if steps depend on whole tensors (their norm, rows or columns), which hold the weights of all voters."""
    if not _BY_TENSOR.search(type(optimizer).__name__.lower()):
        return
    parameters = dict(nn.Module.named_parameters(wrapped))
    stacks = [name for name in stacked_names(wrapped._workbench.rules.values()) if name in parameters]
    if shared := [name for name in stacks if id(parameters[name]) in trained and len(parameters[name]) > 1]:
        warn_once(
            wrapped,
            "sizes",
            f"a step of {type(optimizer).__name__} depends on the size or the rows and columns of a whole tensor; here one holds the weights "
            f"of all voters ({some_of(shared)}), so voters do not train like plain models that each have their own optimizer. Use an "
            "elementwise optimizer, such as AdamW, Lion or SGD",
        )


@torch.no_grad()
def _report_alike(wrapped: Any, trained: Mapping[int, Tensor], history: _History) -> None:
    """Warn once if voters with equal weights have equal gradients, so that they stay equal.

    On a GPU, where each look waits for it, those that have differed are not looked at again.
    """
    axis = members_axis(wrapped._workbench.methods)
    if not axis or "alike" in wrapped._workbench.warned or wrapped in history.differing:
        return
    names = stacked_names(wrapped._workbench.rules.values(), axis)
    present = dict(nn.Module.named_parameters(wrapped))  # a layer may have been replaced
    stacks = [present[n] for n in names if n in present and id(present[n]) in trained and present[n].requires_grad]
    gradients = [p.grad for p in stacks if p.grad is not None and p.grad.layout is torch.strided]
    if not gradients:
        return
    if not all(map(rows_equal, stacks)):
        if not stacks[0].is_cpu:
            history.differing.add(wrapped)
        return
    if all(map(_same_for_all, gradients)) and any(g.any() for g in gradients):
        warn_once(
            wrapped,
            "alike",
            f"{axis}: all voters have the same weights and the same gradient, so they stay alike and the epistemic risk stays 0: the loss is "
            "that of their mean. Train with workbench.fit or wrapped.loss(criterion, x, y), in which each voter weighs the rows differently (in "
            "a trainer that calls the model itself, where it computes the loss: compute_loss, training_step)",
        )


def _report_heads(wrapped: Any, trained: Mapping[int, Tensor], history: _History) -> None:
    """Warn once if risk heads never had a gradient while the model is trained, so that they keep their initial values.

    Heads that are trained only in some steps, or by another optimizer, have changed since the first inspection and do not count.
    """
    axes = (method.axis(Call(training=True, return_risk=True)) for method in wrapped._workbench.methods)
    axis = next((axis for axis in axes if axis is not None and axis.own_first), None)
    if axis is None or "heads" in wrapped._workbench.warned:
        return
    rules = wrapped._workbench.rules
    present = {name: p for name, p in nn.Module.named_parameters(wrapped) if p.requires_grad}
    models = {name for rule in rules.values() for name in rule.names({})}
    forgotten, heads = [], set()
    for slot, rule in rules.items():
        of_rule = {name for i in range(1, axis.size) for name in rule.names({axis.name: i})} - models
        heads |= of_rule
        # if the layer's own parameters have no gradient either, the loss does not use this layer at all
        used = any(_has_gradient(present[name]) for name in (slot, *rule.names({})) if name in present)
        idle = [name for name in of_rule & present.keys() if not _is_reached(present[name], history)]
        forgotten += [name for name in idle if used and id(present[name]) in _stepped]
    if history.steps < MIN_STEPS or not forgotten:
        return
    if any(_has_gradient(p) and id(p) in trained for name, p in present.items() if name not in heads):
        warn_once(
            wrapped,
            "heads",
            f"{axis.name}: the loss does not reach the risk heads ({some_of(sorted(forgotten))} have no gradient), so they stay as they were "
            "drawn and their risk means nothing. Train with workbench.fit or wrapped.loss(criterion, x, y), which adds their likelihood, or use "
            "the risk of wrapped(x, return_risk=True) in your loss; if you train them later, call requires_grad_(False) on them until then",
        )


def _is_reached(head: Tensor, history: _History) -> bool:
    """Return whether a head had a gradient at any inspection, or has changed since the optimizer's first inspection."""
    key = id(head)
    if head.grad is not None:
        _reached[key] = weakref.ref(head, lambda _: _reached.pop(key, None))
    if head.is_inference():
        return True  # inference tensors are never trained and have no version counter
    return key in _reached or history.versions.setdefault(key, head._version) != head._version


def _same_for_all(gradient: Tensor) -> bool:
    """Return whether the rows are equal up to rounding errors."""
    return bool((gradient - gradient[:1]).abs().max() <= 1e-4 * gradient.abs().max())


__all__ = ["watch"]
