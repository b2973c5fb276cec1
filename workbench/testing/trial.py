"""One wrapper on one model: the wrapped models that the checks need, and their outputs."""

from __future__ import annotations

import contextlib
import functools
import inspect
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..core.wrapped import Wrapped
from ..core.wrapper import Wrapper
from ..engine.tree import is_float
from ..risk import Risk
from .models import build, call, inputs, parts, seeded, total
from .reference import Branch, BranchTensors, Reference, plan_for
from .zoo import Case, float_leaves, leaves


@dataclass(frozen=True)
class Trial:
    """One wrapper on one model.

    Args:
        case: the model.
        make: returns the wrapper, a new one at each call or the same.
        tensors: see `check_wrapper`.
    """

    case: Case
    make: Callable[[], Wrapper]
    tensors: BranchTensors | None = None

    def reference(self, wrapped: Any, dtype: torch.dtype = torch.float64) -> Reference:
        """Return plain models with the current tensors of a wrapped one."""
        return Reference(self.case, wrapped, dtype, self.tensors)

    def wrapper(self, strategy: str = "auto") -> Wrapper:
        """Return the wrapper, with a given strategy."""
        wrapper = self.make()
        return wrapper if strategy == "auto" else wrapper.with_options(strategy=strategy)

    def wrap(self, model: Any, strategy: str = "auto", seed: int = 1) -> Any:
        """Return the wrapped model, whose initial values depend on the seed."""
        with seeded(seed):
            return self.wrapper(strategy)(model)

    def fitted(self, wrapped: Any, dtype: torch.dtype = torch.float64) -> Any:
        """Return the wrapped model in evaluation mode, after the fit of all methods that learn in closed form."""
        wrapped.eval()
        if not any(method.needs_fit for method in wrapped._workbench.methods):
            return wrapped
        args, kwargs = inputs(self.case, dtype, rows=40, seed=3)
        batch: Any = args
        if kwargs:  # a batch is either positional or by name; positional arguments get their names here
            bound: Any = inspect.signature(wrapped.forward).bind(*args, **kwargs).arguments
            batch = {**bound, **bound.pop("kwargs", {})}
        if any(method.needs_fit for method in wrapped._workbench.methods):
            Wrapped.fit(wrapped, [(batch, None)])
        return wrapped

    # ---- shared by several checks
    @functools.cached_property
    def pristine(self) -> Any:
        """A fitted model that is never called, so that copies of it can be compared with `answer`."""
        return self.fitted(self.wrap(build(self.case)))

    @functools.cached_property
    def answer(self) -> tuple[Any, dict[str, Any]]:
        """The prediction and risks of a model equal to `pristine`."""
        twin = self.fitted(self.wrap(build(self.case)))
        with torch.no_grad():
            return ask(twin, inputs(self.case))

    @functools.cached_property
    def random(self) -> bool:
        """Whether the branches draw random numbers in evaluation mode."""
        wrapped = self.wrap(build(self.case)).eval()
        reference = self.reference(wrapped)
        with torch.no_grad():
            first, second = ([b.output for b in referred(reference, wrapped, False, seed)] for seed in (0, 1))
        pairs = zip(float_leaves(first), float_leaves(second), strict=True)
        return any(not torch.equal(a, b) for (_, a), (_, b) in pairs)

    @functools.cached_property
    def branches(self) -> int:
        """Number of branches of a call that asks for risks."""
        return plan_for(self.wrap(build(self.case)).eval(), False).size


def ask(wrapped: Any, arguments: Any, seed: int = 0) -> tuple[Any, dict[str, Any]]:
    """Return the prediction of a wrapped model and its risks by name."""
    args, kwargs = arguments
    with seeded(seed):
        y, risk = wrapped(*args, **kwargs, return_risk=True)
    if isinstance(risk, Risk):
        return y, {name: risk[name] for name in risk.names()}
    return y, {wrapped._workbench.methods[0].kind: risk}


def referred(reference: Reference, wrapped: Any, training: bool, seed: int = 0) -> list[Branch]:
    """Run the reference with the plan of a wrapped model."""
    plan = plan_for(wrapped, training, seed)
    with seeded(seed):
        return reference.run(plan, training)


@functools.lru_cache(maxsize=256)
def can_be_pickled(case: Case) -> bool:
    """Return whether the plain model can be pickled; a function can't."""
    model = parts(build(case))[""] if "function" not in case.tags else None
    with contextlib.suppress(Exception):
        call(pickle.loads(pickle.dumps(model)), inputs(case))
        return True
    return False


@functools.lru_cache(maxsize=256)
def runs_in_bfloat16(case: Case) -> bool:
    """Return whether the plain model trains in bfloat16."""
    with contextlib.suppress(AttributeError, TypeError, ValueError, KeyError, RuntimeError):
        _train(case, torch.bfloat16)
        return "function" not in case.tags
    return False


@functools.lru_cache(maxsize=256)
def runs_under_autocast(case: Case) -> bool:
    """Return whether the plain model trains under autocast."""
    with contextlib.suppress(RuntimeError, TypeError):
        with torch.autocast("cpu", torch.bfloat16):
            _train(case, torch.float32)
        return True
    return False


def _train(case: Case, dtype: torch.dtype) -> None:
    """Run a forward pass in both modes, and a backward pass in training mode."""
    call(build(case, dtype), inputs(case, dtype))
    args, kwargs = inputs(case, dtype)
    with seeded():
        output = build(case, dtype, training=True)(*args, **kwargs)
    if any(is_float(leaf) for _, leaf in leaves(output)):
        with torch.autocast("cpu", enabled=False):
            total(output).backward()
