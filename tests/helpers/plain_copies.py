"""Expected answers of a wrapped model in evaluation and in one training step, from plain copies whose tensors are set by hand.

For third-party models; `conformance` checks more, but on models written for it.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from helpers.conformance_reference import Reference, assert_answers, size
from helpers.conformance_table import NOISE, Wrapping
from helpers.zoo import Case, leaves
from workbench import WorkbenchWarning
from workbench.engine.tree import is_float
from workbench.testing.models import build, call, close, inputs, seeded
from workbench.testing.trial import ask

TOLERANCES = {"float32": 1e-4, "float32_inside": 1e-5}  # by tag: all in float32, or float64 with parts in float32


def dtype_of(case: Case) -> torch.dtype:
    return torch.float32 if "float32" in case.tags else torch.float64


def tolerance_of(case: Case) -> float:
    return max((TOLERANCES.get(tag, 0.0) for tag in case.tags), default=0.0) or 1e-9


def reference_of(case: Case, wrapping: Wrapping, wrapped: Any) -> Reference:
    """Return plain copies of a model in the precision of its case."""
    return Reference(case, wrapping, wrapped, dtype_of(case))


def check_evaluation(case: Case, wrapping: Wrapping, strategy: str = "auto") -> None:
    """Check prediction and risks in evaluation mode, then the prediction alone, since a first call may leave state in the model."""
    wrapped = wrapping.wrap(build(case, dtype_of(case)), strategy)
    reference = reference_of(case, wrapping, wrapped)
    branches = reference.answers()
    wrapping.trial(case).fitted(wrapped, dtype_of(case))
    with torch.no_grad():
        answer = ask(wrapped, inputs(case, dtype_of(case)))
        assert_answers(reference, branches, *answer, tolerance_of(case))
        y = call(wrapped, inputs(case, dtype_of(case)))
    prediction, _ = reference.reduced(branches)
    for path, leaf in leaves(y):
        if is_float(leaf):
            close(leaf, prediction[path], f"without risk: {path}", tolerance_of(case))


def check_training(case: Case, wrapping: Wrapping, strategy: str = "auto") -> None:
    """Check prediction, risks, all gradients and all buffers of one training step."""
    wrapped = wrapping.wrap(build(case, dtype_of(case), training=True), strategy)
    reference = reference_of(case, wrapping, wrapped)
    branches = reference.answers(training=True)
    y, risks = ask(wrapped, inputs(case, dtype_of(case)))
    assert_answers(reference, branches, y, risks, tolerance_of(case))
    # without noise all samples agree, and then their standard deviation has no gradient to compare
    learned = [name for name in wrapping.variances if not wrapping.where or name == "aleatoric"]
    prediction, spread = reference.reduced(branches)
    expected = reference.gradients(branches, objective(prediction, *(spread[name] for name in learned)))
    objective(y, *(risks[name] for name in learned)).backward()
    largest = max(size(grad) for grad in expected.values() if grad is not None) or 1.0
    for name, parameter in wrapped.named_parameters():
        if name in expected:
            zero = torch.zeros_like(parameter)
            grad, like = (zero if g is None else g for g in (parameter.grad, expected[name]))
            close(grad / largest, like / largest, f"gradient of {name}", max(tolerance_of(case), 1e-6))
    after = {**dict(wrapped.named_buffers()), **wrapped.state_dict()}
    for name, value in reference.moved(branches).items():
        close(after[name], value, f"buffer {name}", tolerance_of(case))


def objective(*trees: Any) -> Tensor:
    """Return a sum with different weights for all numbers, so that nothing cancels (as outputs of a softmax or norm would)."""
    tensors = [leaf.flatten() for tree in trees for _, leaf in leaves(tree) if is_float(leaf) and leaf.requires_grad]
    return torch.stack([leaf @ torch.linspace(0.5, 1.5, len(leaf), dtype=leaf.dtype) for leaf in tensors]).sum()


def check_signature(case: Case, wrapping: Wrapping) -> None:
    """Check that the gradients of neo's signature leave the model and its statistics alone."""
    wrapped = wrapping.wrap(build(case, dtype_of(case), training=True))
    before = {name: tensor.clone() for name, tensor in wrapped.state_dict().items() if "@workbench" not in name}
    _, risks = ask(wrapped, inputs(case, dtype_of(case)))
    assert risks["vacuitic"].isfinite().all()
    risks["vacuitic"].mean().backward()
    trained = [name for name, parameter in wrapped.named_parameters() if parameter.grad is not None]
    assert trained
    assert all("@workbench" in name for name in trained), trained
    after = wrapped.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def check_noise(case: Case, wrapping: Wrapping) -> None:
    """Check that samples with noise are finite and differ, and that variances still add up."""
    wrapped = wrapping.wrap(build(case, dtype_of(case)), "loop", NOISE).eval()
    with torch.no_grad():
        _, risks = ask(wrapped, inputs(case, dtype_of(case)))
    trees = {name: {path: leaf for path, leaf in leaves(risk) if is_float(leaf)} for name, risk in risks.items()}
    assert all(leaf.isfinite().all() for tree in trees.values() for leaf in tree.values())
    assert any((leaf > 0).any() for leaf in trees["epistemic"].values())
    for path, leaf in trees.get("total", {}).items():
        sides = (trees[name][path].square() for name in ("aleatoric", "epistemic"))
        close(leaf.square(), sum(sides), f"total {path}", tolerance_of(case))


def check_dealing(case: Case, wrapping: Wrapping) -> None:
    """Check that each training row is answered by one voter, or by all, with one warning, if rows depend on each other."""
    plain, (args, kwargs) = build(case, dtype_of(case)), inputs(case, dtype_of(case))
    independent = _rows_are_independent(plain, args, kwargs)
    wrapped = wrapping.wrap(build(case, dtype_of(case), training=True))
    branches = reference_of(case, wrapping, wrapped).answers(training=True)
    with warnings.catch_warnings(record=True) as caught, seeded():
        warnings.simplefilter("always")
        y = wrapped(*args, **kwargs)
    dealing_warnings = [str(w.message) for w in caught if issubclass(w.category, WorkbenchWarning)]
    assert len(dealing_warnings) == (not independent), dealing_warnings
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in plain.modules()):
        return  # the answers of a voter depend on the rows that it was dealt
    answers = [dict(leaves(branch.output)) for branch in branches]
    for path, leaf in leaves(y):
        if not is_float(leaf):
            continue
        stack = torch.stack([answer[path] for answer in answers])
        if independent:
            same = torch.isclose(stack, leaf, rtol=1e-6, atol=1e-6).flatten(2).all(2)
            assert same.any(0).all(), f"{path}: a row equals no voter's answer"
        else:
            close(leaf, stack.mean(0), path, tolerance_of(case))


def _rows_are_independent(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the model answers the first three rows alone as among all; lists of rows are never divided among voters."""
    if any(isinstance(value, list) for value in kwargs.values()):
        return False
    some = {name: value[:3] for name, value in kwargs.items()}
    with torch.no_grad():
        whole, part = (dict(leaves(model(*args, **arguments))) for arguments in (kwargs, some))
    pairs = [(whole[path], leaf) for path, leaf in part.items() if is_float(leaf)]
    return all(a.dim() and a[:3].shape == b.shape and torch.allclose(a[:3], b, atol=1e-4, rtol=1e-4) for a, b in pairs)
