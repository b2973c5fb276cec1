"""The branches of a wrapped model are plain models: in both modes, in every precision, by every strategy."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ..core.ownership import engine_of
from ..engine.tree import flatten, is_float
from ..errors import WorkbenchWarning
from .models import build, close, inputs, parts, total
from .reference import Branch, Reference, assert_branches, plan_for, run_engine
from .trial import Trial, ask, referred, runs_in_bfloat16, runs_under_autocast
from .zoo import float_leaves

EXACT, LOW = 1e-9, 0.02  # relative and absolute; bfloat16 has eight bits


def check_branches(
    trial: Trial, strategy: str = "loop", dtype: torch.dtype = torch.float64, autocast: bool = False
) -> None:
    """In evaluation mode, each branch is a plain model with the tensors that the rules give it."""
    wrapped = _wrapped(trial, dtype, training=False)
    reference, plan = trial.reference(wrapped, dtype), plan_for(wrapped, training=False)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        branched = run_engine(wrapped, plan, inputs(trial.case, dtype), strategy)
        branches = referred(reference, wrapped, training=False)
    tolerance = EXACT if dtype is torch.float64 else LOW
    if autocast:
        with torch.no_grad():
            tolerance += _lost(branches, referred(reference, wrapped, training=False))
    assert_branches(branched, branches, tolerance, strategy == "loop" or not trial.random)


def _lost(low: list[Branch], full: list[Branch]) -> float:
    """How far answers may be from those of plain models under autocast: a few times as far as these are from themselves in float32."""
    pairs = [
        (leaf, other)
        for a, b in zip(low, full, strict=True)
        for (_, leaf), (_, other) in zip(float_leaves(a.output), float_leaves(b.output), strict=True)
    ]
    far = [(a.detach().double() - b.detach().double()).abs().nan_to_num() for a, b in pairs if a.numel()]
    return 4 * max((float(one.max()) for one in far), default=0.0)


def _wrapped(trial: Trial, dtype: torch.dtype, training: bool) -> Any:
    """The wrapped model; to less than float32 it is cast after wrapping, as users do."""
    wrapped = trial.wrap(build(trial.case, torch.float32 if dtype is torch.bfloat16 else dtype, training))
    if dtype is torch.bfloat16:
        wrapped = wrapped.bfloat16()
    if dtype is not torch.float64:  # where every rounding shows, factors give other numbers than their product
        engine_of(wrapped).clones.dense_slots.update(wrapped._workbench.rules)
    return wrapped


def check_training(
    trial: Trial, strategy: str = "loop", dtype: torch.dtype = torch.float64, autocast: bool = False
) -> None:
    """In training mode, gradients, buffers, attributes and inputs end as those of plain models that were called once."""
    case = trial.case
    wrapped = _wrapped(trial, dtype, training=True)
    reference, arguments = trial.reference(wrapped, dtype), inputs(case, dtype)
    exact = "stochastic_train" not in case.tags and (strategy == "loop" or not trial.random)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        branched = run_engine(wrapped, plan_for(wrapped, training=True), arguments, strategy)
        branches = referred(reference, wrapped, training=True)
    tolerance = EXACT if dtype is torch.float64 else LOW
    full = referred(reference, wrapped, training=True) if autocast else []
    tolerance += _lost(branches, full) if autocast else 0.0
    assert_branches(branched, branches, tolerance, exact)
    if not exact or not any(is_float(leaf) for leaf in branched.leaves):
        return
    gradients, loose = _gradients(reference, branches, wrapped), max(tolerance, 1e-7)
    if autocast:
        in_full = _gradients(reference, full, wrapped)
        pairs = [(grad.double(), in_full[name].double()) for name, grad in gradients.items() if grad.numel()]
        loose += 4 * max(float((a - b).abs().max() / b.abs().max().clamp(min=1.0)) for a, b in pairs)
    total(branched.leaves).backward()
    for name, parameter in nn.Module.named_parameters(wrapped):
        if name in gradients and parameter.requires_grad:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            size = max(1.0, float(gradients[name].abs().max())) if gradients[name].numel() else 1.0
            close(grad / size, gradients[name] / size, f"gradient of {name}", loose)
    after = dict(nn.Module.named_buffers(wrapped))
    for name, value in reference.moved(branches).items():
        close(after[name], value, f"buffer {name}", tolerance)
    for leaf, other in zip(flatten(arguments)[0], flatten(branches[0].given)[0], strict=True):
        if isinstance(leaf, Tensor):
            close(leaf, other, "an input that the model writes into", tolerance)
    if isinstance(branches[0].model, nn.Module):
        assert_attributes(wrapped, parts(branches[0].model)[""], tolerance)


def _gradients(reference: Reference, branches: list[Branch], wrapped: Any) -> dict[str, Tensor]:
    """The gradient of the sum of all answers, by name; interventions read their tensors from the wrapped model itself."""
    of_plain_models = reference.gradients(branches, total(*(branch.output for branch in branches)))
    of_interventions = {name: parameter.grad for name, parameter in nn.Module.named_parameters(wrapped)}
    wrapped.zero_grad()
    by_name = {
        name: [g for g in (grad, of_interventions.get(name)) if g is not None] for name, grad in of_plain_models.items()
    }
    return {
        name: torch.stack(g).sum(0) if g else torch.zeros_like(reference.state[name]) for name, g in by_name.items()
    }


def assert_attributes(wrapped: Any, called: nn.Module, tolerance: float = EXACT) -> None:
    """Assert that what a plain model holds after a call, numbers and tensors in lists and attributes, is in the wrapped one."""
    for name, value in vars(called).items():
        if name.startswith("_") or (isinstance(value, list) and any(isinstance(item, nn.Module) for item in value)):
            continue
        kept = getattr(wrapped, name)
        if isinstance(value, Tensor):
            close(kept, value, name, tolerance)
        elif isinstance(value, dict):
            assert list(kept) == list(value), f"{name} holds {list(kept)}, not {list(value)}"
        elif isinstance(value, bool | int | float | str | list):
            assert kept == value, f"{name} is {kept!r}, not {value!r}"


def check_float64(trial: Trial) -> None:
    """A model that is cast to float64 after wrapping computes in it."""
    wrapped = trial.wrap(build(trial.case, torch.float32)).double()
    with torch.no_grad():
        reference = trial.reference(wrapped.eval())
        branched = run_engine(wrapped, plan_for(wrapped, False), inputs(trial.case), "loop")
        assert_branches(branched, referred(reference, wrapped, training=False), 1e-9)
        y, risks = ask(trial.fitted(wrapped), inputs(trial.case))
    for tree in (y, *risks.values()):
        assert {leaf.dtype for _, leaf in float_leaves(tree)} <= {torch.float64}, "not all is float64"


def check_bfloat16(trial: Trial) -> None:
    """In bfloat16, each branch is that of a plain loop in both modes, wherever the plain model runs in it."""
    if not runs_in_bfloat16(trial.case):
        return
    check_branches(trial, "loop", torch.bfloat16)
    check_training(trial, "loop", torch.bfloat16)
    wrapped = trial.fitted(trial.wrap(build(trial.case, torch.float32)).bfloat16(), torch.bfloat16)
    y, risks = ask(wrapped, inputs(trial.case, torch.bfloat16))
    assert {leaf.dtype for _, leaf in float_leaves(y)} == {torch.bfloat16}, "the prediction is not bfloat16"
    for tree in (y, *risks.values()):
        assert all(leaf.isfinite().all() for _, leaf in float_leaves(tree)), "not finite"


def check_autocast(trial: Trial) -> None:
    """Under autocast, each branch is that of a plain loop in both modes, wherever the plain model runs under it."""
    if runs_under_autocast(trial.case):
        check_branches(trial, "auto", torch.float32, autocast=True)
        check_training(trial, "auto", torch.float32, autocast=True)


def check_strategy(trial: Trial, strategy: str) -> None:
    """A strategy gives what plain models give, in both modes, or refuses the model."""
    if trial.branches == 1:
        return  # nothing to run together
    check_branches(trial, strategy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WorkbenchWarning)
        check_training(trial, strategy)
        if runs_under_autocast(trial.case):
            check_branches(trial, strategy, torch.float32, autocast=True)
            check_training(trial, strategy, torch.float32, autocast=True)
