"""Checks that the branches of a wrapped model equal plain models: in both modes, every precision and every strategy."""

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

EXACT, LOW = 1e-9, 0.02  # relative and absolute tolerances for float64 and for lower precision; bfloat16 has eight bits


def check_branches(
    trial: Trial, strategy: str = "loop", dtype: torch.dtype = torch.float64, autocast: bool = False
) -> None:
    """Check that in evaluation mode each branch equals a plain model with the tensors that the rules give it."""
    wrapped = _wrapped(trial, dtype, training=False)
    reference, plan = trial.reference(wrapped, dtype), plan_for(wrapped, training=False)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        branched = run_engine(wrapped, plan, inputs(trial.case, dtype), strategy)
        branches = referred(reference, wrapped, training=False)
    tolerance = EXACT if dtype is torch.float64 else LOW
    if autocast:
        with torch.no_grad():
            tolerance += _autocast_tolerance(branches, referred(reference, wrapped, training=False))
    assert_branches(branched, branches, tolerance, strategy == "loop" or not trial.random)


def _autocast_tolerance(low: list[Branch], full: list[Branch]) -> float:
    """How far outputs may differ from those of plain models under autocast: four times as far as these differ from their own in float32."""
    pairs = [
        (leaf, other)
        for a, b in zip(low, full, strict=True)
        for (_, leaf), (_, other) in zip(float_leaves(a.output), float_leaves(b.output), strict=True)
    ]
    differences = [(a.detach().double() - b.detach().double()).abs().nan_to_num() for a, b in pairs if a.numel()]
    return 4 * max((float(difference.max()) for difference in differences), default=0.0)


def _wrapped(trial: Trial, dtype: torch.dtype, training: bool) -> Any:
    """The wrapped model; for bfloat16 it is cast after wrapping, as users do."""
    wrapped = trial.wrap(build(trial.case, torch.float32 if dtype is torch.bfloat16 else dtype, training))
    if dtype is torch.bfloat16:
        wrapped = wrapped.bfloat16()
    # in lower precision, factors applied one by one round differently from their product
    if dtype is not torch.float64:
        engine_of(wrapped).clones.dense_slots.update(wrapped._workbench.rules)
    return wrapped


def check_training(
    trial: Trial, strategy: str = "loop", dtype: torch.dtype = torch.float64, autocast: bool = False
) -> None:
    """Check that in training mode gradients, buffers, attributes and inputs end as those of plain models that were called once."""
    case = trial.case
    wrapped = _wrapped(trial, dtype, training=True)
    reference, arguments = trial.reference(wrapped, dtype), inputs(case, dtype)
    exact = "stochastic_train" not in case.tags and (strategy == "loop" or not trial.random)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        branched = run_engine(wrapped, plan_for(wrapped, training=True), arguments, strategy)
        branches = referred(reference, wrapped, training=True)
    tolerance = EXACT if dtype is torch.float64 else LOW
    full = referred(reference, wrapped, training=True) if autocast else []
    tolerance += _autocast_tolerance(branches, full) if autocast else 0.0
    assert_branches(branched, branches, tolerance, exact)
    if not exact or not any(is_float(leaf) for leaf in branched.leaves):
        return
    gradients, grad_tolerance = _gradients(reference, branches, wrapped), max(tolerance, 1e-7)
    if autocast:
        full_gradients = _gradients(reference, full, wrapped)
        pairs = [(grad.double(), full_gradients[name].double()) for name, grad in gradients.items() if grad.numel()]
        grad_tolerance += 4 * max(float((a - b).abs().max() / b.abs().max().clamp(min=1.0)) for a, b in pairs)
    total(branched.leaves).backward()
    for name, parameter in nn.Module.named_parameters(wrapped):
        if name in gradients and parameter.requires_grad:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            scale = max(1.0, float(gradients[name].abs().max())) if gradients[name].numel() else 1.0
            close(grad / scale, gradients[name] / scale, f"gradient of {name}", grad_tolerance)
    after = dict(nn.Module.named_buffers(wrapped))
    for name, value in reference.moved(branches).items():
        close(after[name], value, f"buffer {name}", tolerance)
    for leaf, other in zip(flatten(arguments)[0], flatten(branches[0].inputs)[0], strict=True):
        if isinstance(leaf, Tensor):
            close(leaf, other, "an input that the model writes into", tolerance)
    if isinstance(branches[0].model, nn.Module):
        assert_attributes(wrapped, parts(branches[0].model)[""], tolerance)


def _gradients(reference: Reference, branches: list[Branch], wrapped: Any) -> dict[str, Tensor]:
    """The gradient of the sum of all outputs, by name; interventions read their tensors from the wrapped model itself."""
    model_grads = reference.gradients(branches, total(*(branch.output for branch in branches)))
    intervention_grads = {name: parameter.grad for name, parameter in nn.Module.named_parameters(wrapped)}
    wrapped.zero_grad()
    by_name = {
        name: [g for g in (grad, intervention_grads.get(name)) if g is not None] for name, grad in model_grads.items()
    }
    return {
        name: torch.stack(g).sum(0) if g else torch.zeros_like(reference.state[name]) for name, g in by_name.items()
    }


def assert_attributes(wrapped: Any, called: nn.Module, tolerance: float = EXACT) -> None:
    """Assert that the attributes of a plain model after a call (numbers, strings, tensors, lists, dicts) equal those of the wrapped one."""
    for name, value in vars(called).items():
        if name.startswith("_") or (isinstance(value, list) and any(isinstance(item, nn.Module) for item in value)):
            continue
        kept = getattr(wrapped, name)
        if isinstance(value, Tensor):
            close(kept, value, name, tolerance)
        elif isinstance(value, list) and any(isinstance(item, Tensor) for item in value):
            for i, (kept_item, item) in enumerate(zip(kept, value, strict=True)):
                close(kept_item, item, f"{name}[{i}]", tolerance)
        elif isinstance(value, dict):
            assert list(kept) == list(value), f"{name} holds {list(kept)}, not {list(value)}"
        elif isinstance(value, bool | int | float | str | list):
            assert kept == value, f"{name} is {kept!r}, not {value!r}"


def check_float64(trial: Trial) -> None:
    """Check that a model that is cast to float64 after wrapping computes in float64."""
    wrapped = trial.wrap(build(trial.case, torch.float32)).double()
    with torch.no_grad():
        reference = trial.reference(wrapped.eval())
        branched = run_engine(wrapped, plan_for(wrapped, False), inputs(trial.case), "loop")
        assert_branches(branched, referred(reference, wrapped, training=False), 1e-9)
        y, risks = ask(trial.fitted(wrapped), inputs(trial.case))
    for tree in (y, *risks.values()):
        assert {leaf.dtype for _, leaf in float_leaves(tree)} <= {torch.float64}, "not all is float64"


def check_bfloat16(trial: Trial) -> None:
    """Check that in bfloat16 each branch equals that of a plain loop in both modes, if the plain model runs in bfloat16."""
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
    """Check that under autocast each branch equals that of a plain loop in both modes, if the plain model runs under autocast."""
    if runs_under_autocast(trial.case):
        check_branches(trial, "auto", torch.float32, autocast=True)
        check_training(trial, "auto", torch.float32, autocast=True)


def check_strategy(trial: Trial, strategy: str) -> None:
    """Check that a strategy gives what plain models give, in both modes, or refuses the model."""
    if trial.branches == 1:
        return  # nothing to run together
    check_branches(trial, strategy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WorkbenchWarning)
        check_training(trial, strategy)
        if runs_under_autocast(trial.case):
            check_branches(trial, strategy, torch.float32, autocast=True)
            check_training(trial, strategy, torch.float32, autocast=True)
