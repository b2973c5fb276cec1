"""Optimizers that do not train what they seem to: made before wrapping, or from parts of a wrapped model."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ..errors import OptimizerMismatchError, WorkbenchWarning

_wrapped: dict[int, weakref.ref[nn.Module]] = {}  # id -> every wrapped object that lives
_known: dict[int, _Known] = {}  # id -> every optimizer that has stepped and lives
_served: dict[int, weakref.ref[Tensor]] = {}  # id -> every parameter that an optimizer held while it stepped
_changes = 0  # how many objects were wrapped: after each, every optimizer is looked at again


class _Known:
    """What is remembered of an optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        key = id(optimizer)
        self.ref = weakref.ref(optimizer, lambda _: _known.pop(key, None))
        self.stage = (-1, 0)  # of the whole process and of this optimizer, when counting began
        self.steps = self.next = 0
        self.told = False
        self.sums: dict[int, Any] = {}  # of the last look: the gradients that may be left over from another training

    def due(self, groups: int) -> bool:
        """Whether to look, at the first, second, fourth, eighth ... step: risk may enter a loss late."""
        if self.stage != (_changes, groups):
            self.stage, self.steps, self.next = (_changes, groups), 0, 1
        self.steps += 1
        if self.steps < self.next:
            return False
        self.next = 2 * self.steps
        return True


def watch(wrapped: nn.Module) -> None:
    """From now on look at every optimizer that steps: does it train this object, or does it only seem to?

    A step raises `OptimizerMismatchError` if its optimizer was made from the given model, whose parameters the wrapped one has replaced. It
    warns once if it trains a part of the wrapped model while other parameters have gradients and no optimizer.
    """
    global _changes
    key = id(wrapped)
    if key not in _wrapped or _wrapped[key]() is not wrapped:
        if not _changes:
            register_optimizer_step_pre_hook(_before_step)
        _changes += 1
        _wrapped[key] = weakref.ref(wrapped, lambda _: _wrapped.pop(key, None))


def _before_step(optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    known = _known.get(id(optimizer))
    if known is None:
        known = _known[id(optimizer)] = _Known(optimizer)
    if not known.due(len(optimizer.param_groups)):
        return None
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        _look(optimizer, known, depth=7)
        return None
    first = True

    def looking() -> Any:
        """The gradients are there after the first call of the closure, and nothing is changed yet."""
        nonlocal first
        loss = closure()
        if first:
            first = False
            _look(optimizer, known, depth=9)
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": looking}
    return (args[0], looking, *args[2:]), kwargs


@_disable_dynamo  # a compiled step would depend on which objects were collected while it was traced
def _look(optimizer: Optimizer, known: _Known, depth: int) -> None:
    held = {id(p): p for p in _parameters(optimizer)}
    for wrapped in [ref() for ref in list(_wrapped.values())]:
        if wrapped is None:
            continue
        own = dict(nn.Module.named_parameters(wrapped))
        missed = {n: p for n, p in own.items() if p.requires_grad and p.grad is not None and id(p) not in held}
        # what this optimizer holds, and the wrapped object has replaced by something that it misses
        stale = [
            name
            for name, given, instead in (wrapped.__dict__["_engine"].table.replaced() if missed else ())
            if given.requires_grad
            and given.grad is None
            and id(given) in held
            and not missed.keys().isdisjoint(instead)
        ]
        part = not known.told and any(id(p) in held for p in own.values())
        if not missed or not (stale or part):
            continue
        # an optimizer that has not stepped yet may hold the rest; to find it is slow, but it is seldom looked for
        others = [o for o in gc.get_objects() if issubclass(type(o), Optimizer) and "param_groups" in o.__dict__]
        elsewhere = {id(p) for other in others for p in _parameters(other)}
        missed = {n: p for n, p in missed.items() if id(p) not in elsewhere and _fresh(p, known)}
        if missed:
            _report(optimizer, wrapped, list(missed), stale, known, depth + 1)
    for key, parameter in held.items():
        _served[key] = weakref.ref(parameter, lambda _, key=key: _served.pop(key, None))  # type: ignore[misc]


def _parameters(optimizer: Optimizer) -> Iterable[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _fresh(parameter: Tensor, known: _Known) -> bool:
    """Whether a gradient is of the training that goes on: one of a parameter that was trained before must change between two looks."""
    if id(parameter) not in _served:
        return True
    gradient: Any = parameter.grad
    before, now = known.sums.get(id(parameter)), gradient.sum().item()
    known.sums[id(parameter)] = now
    return before is not None and before != now


def _report(
    optimizer: Optimizer, wrapped: nn.Module, missed: list[str], stale: list[str], known: _Known, depth: int
) -> None:
    name, model = type(optimizer).__name__, wrapped._get_name()
    if stale:
        known.next = 0  # to refuse the next step as well
        raise OptimizerMismatchError(
            f"this {name} was made from the parameters of a model before it was wrapped: {_some(stale)} have no gradient, because {model} uses "
            f"{_some(missed)} in their place, which no optimizer holds. Make it of the wrapped model: {name}(wrapped.parameters())"
        )
    known.told = True
    warnings.warn(
        f"this {name} trains a part of {model} only: {_some(missed)} have gradients and no optimizer. Make it of the whole, "
        f"{name}(wrapped.parameters()), or freeze them with requires_grad_(False)",
        WorkbenchWarning,
        stacklevel=depth,
    )


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"


__all__ = ["watch"]
