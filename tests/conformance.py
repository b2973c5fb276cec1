"""Conformance checks of the built-in wrappers: those of every wrapper (`workbench.testing`), and those of the built-in ones.

The latter compare predictions, risks, gradients and buffers with a loop over plain models; the top of `helpers/conformance_reference.py` says
what in that reference is independent of the code under test.

- To add a wrapper, add a row to `WRAPPERS` in `helpers/conformance_table.py`: how it is made, which risks it measures, how many voters and
  heads it has, and where it puts noise. A risk that is not a variance over voters, samples or heads needs its formula in `Reference.reduced`.
- To add a model, write a function with `@case(...)` in `workbench/testing/zoo/`; `tests/testing/test_zoo.py` checks its tags.
- The default suite runs all checks of each model under one wrapper, which rotates over the models. In the other cells, which are slow, the
  checks in `IN_TURN` alternate from cell to cell, so that each cell has one. Every other check rotates over one in `EVERY` of the cells to
  which it applies. So each check covers every model under some wrappers and every wrapper on some models. `WORKBENCH_EXHAUSTIVE=1` runs all
  checks everywhere.
- `WORKBENCH_TEST_DEVICE=cuda` puts models and inputs on that device; a sixth of the cells is then not slow.
- Intended refusals are rows of `EXPECTED_REFUSALS` (by model and wrapper) or `REFUSED_BY` (by check and model).

Example:
    >>> from helpers.conformance_table import WRAPPERS
    >>> from helpers.zoo import CASES
    >>> check_builtin(CASES["mlp"], WRAPPERS["vote"])
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from helpers import zoo
from helpers.conformance_reference import Reference, assert_answers
from helpers.conformance_table import (
    EXPECTED_REFUSALS,
    NOISE,
    REFUSED_BY,
    REFUSED_ON_GPU,
    ROWS,
    RUN_BY,
    VOTERS,
    WRAPPERS,
    Wrapping,
    is_due,
)
from helpers.zoo import Case, leaves
from torch import Tensor, nn

from workbench import WorkbenchWarning, Wrapped, is_wrapped
from workbench.engine.tree import flatten, is_float, tree_map
from workbench.testing.branches import assert_attributes
from workbench.testing.check import checks_of
from workbench.testing.checks import COMPOSED_ON
from workbench.testing.models import (
    assert_tree,
    buffers,
    build,
    call,
    close,
    exactly,
    inputs,
    parameters,
    parts,
    seeded,
    state,
    total,
)
from workbench.testing.trial import ask

DEVICE = os.environ.get("WORKBENCH_TEST_DEVICE", "")


def placed(case: Case) -> Case:
    """Return the case with its model and inputs on the device that `WORKBENCH_TEST_DEVICE` names, if it is set."""
    if not DEVICE:
        return case

    def build_there() -> Any:
        model = case.build()
        for module in zoo.modules(model):
            module.to(DEVICE)
        return model

    def inputs_there(seed: int = 0, rows: int = ROWS) -> Any:
        return tree_map(lambda leaf: leaf.to(DEVICE) if hasattr(leaf, "to") else leaf, case.inputs(seed, rows))

    return replace(case, build=build_there, inputs=inputs_there)


def check_prediction(case: Case, wrapping: Wrapping, strategy: str = "auto") -> None:
    """Check that prediction and risks in evaluation mode equal those of plain models with the branches' tensors."""
    wrapped = wrapping.wrap(build(case), strategy)
    reference = Reference(case, wrapping, wrapped)
    branches = reference.answers()
    wrapping.trial(case).fitted(wrapped)
    with torch.no_grad():
        y, risks = ask(wrapped, inputs(case))
    assert_answers(reference, branches, y, risks)
    assert set(risks) == {*wrapping.variances, *wrapping.kinds}
    if "vacuitic" in risks:
        # the output of "ragged_out" is a list of one tensor per row
        rows = len(y) if case.name == "ragged_out" else max(leaf.shape[0] for _, leaf in zoo.float_leaves(y))
        assert risks["vacuitic"].shape == (rows,)
        assert risks["vacuitic"].isfinite().all()
    if not {"captures_self", "mutates_attribute"} & case.tags:
        prediction, _ = reference.reduced(branches)
        assert_tree(call(wrapped, inputs(case)), branches[0].output, prediction, "without risk")


@contextmanager
def listed(case: Case, check: str) -> Iterator[None]:
    """Suppress the refusals that are expected in a check."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        words = [REFUSED_BY[check][case.name]] if case.name in REFUSED_BY.get(check, {}) else []
        if DEVICE.startswith("cuda"):
            words += REFUSED_ON_GPU.get(check, ())
        if not any(word in str(error) for word in words):
            raise


def check_parts(case: Case, wrapping: Wrapping) -> None:
    """Check that `voters()` and `unwrap()` return plain models with the branches' tensors."""
    wrapped = wrapping.wrap(build(case)).eval()
    branches = [
        b for b in Reference(case, wrapping, wrapped).answers() if not b.place["sample"] and not b.place["sculpt"]
    ]
    voters, plain = Wrapped.voters(wrapped), Wrapped.unwrap(wrapped)
    assert len(voters) == wrapping.voters
    for model, branch in zip([*voters, plain], [*branches, branches[0]], strict=True):
        assert is_wrapped(model) is bool(wrapping.prior)  # a voter keeps its prior, and so stays wrapped
        assert_tree(call(model, inputs(case)), branch.output, exactly(branch.output), f"voter {branch.place}")


def check_training(case: Case, wrapping: Wrapping, strategy: str = "auto") -> None:
    """Check that one call with risks in training mode gives the gradients, buffers, attributes and inputs of the plain models."""
    stochastic = "stochastic_train" in case.tags
    noise = NOISE if wrapping.where in ("weights", "inputs", "transforms") and strategy == "loop" else 0.0
    wrapped = wrapping.wrap(build(case, training=True), strategy, noise)
    reference = Reference(case, wrapping, wrapped)
    zoo.side_effects.LAST_HIDDEN = None
    branches = reference.answers(training=True, noise=noise)
    call_inputs = inputs(case)
    y, risks = ask(wrapped, call_inputs)
    if stochastic:
        prediction, _ = reference.reduced(branches)
        for path, leaf in zoo.float_leaves(y):
            assert leaf.shape == prediction[path].shape
            assert leaf.isfinite().all()
    else:
        assert_answers(reference, branches, y, risks)
        loss = total(y, *(risk for name, risk in risks.items() if name != "vacuitic"))
        expected = reference.gradients(branches, total(reference.reduced(branches)))
        loss.backward()
        for name, parameter in wrapped.named_parameters():
            if name in expected:
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                like = expected[name]
                close(grad, torch.zeros_like(parameter) if like is None else like, f"gradient of {name}", 1e-7)
        expected_buffers = reference.moved(branches)
        tensors = {**dict(wrapped.named_parameters()), **dict(wrapped.named_buffers())}
        for name, value in expected_buffers.items():
            close(tensors[name], value, f"buffer {name}")
    first = branches[0]
    # noise on inputs and transforms act on copies, so that the model does not write into the caller's inputs
    untouched = inputs(case) if wrapping.where in ("inputs", "transforms") else first.inputs
    for leaf, expected_leaf in zip(flatten(call_inputs)[0], flatten(untouched)[0], strict=True):
        if isinstance(leaf, Tensor):
            close(leaf, expected_leaf, "input")
    if isinstance(first.model, nn.Module):
        assert_attributes(wrapped, parts(first.model)[""])
    if "writes_global" in case.tags and not wrapping.prior:
        left: Any = zoo.side_effects.LAST_HIDDEN
        # reading it fails if it belongs to a vmap that has ended
        last = torch.tensor(left.tolist(), dtype=torch.float64, device=left.device)
        assert any(torch.allclose(b.model.c(last), b.output) for b in branches), (
            "the global does not hold the value of any branch"
        )


def check_dealing(case: Case, wrapping: Wrapping) -> None:
    """Check that each row is answered by one voter in training mode without risks, equally many by each; or by all voters, with one warning."""
    wrapped = wrapping.wrap(build(case, training=True))
    reference = Reference(case, wrapping, wrapped)
    args, kwargs = inputs(case)
    with warnings.catch_warnings(record=True) as caught, seeded():
        warnings.simplefilter("always")
        y = wrapped(*args, **kwargs)
    dealing_warnings = [
        w for w in caught if issubclass(w.category, WorkbenchWarning) and "for the last layers of" not in str(w.message)
    ]
    if "batch_mixing" not in case.tags or "not_dealable" in case.tags:  # mixing may or may not show in these rows
        assert len(dealing_warnings) == ("not_dealable" in case.tags), [str(w.message) for w in dealing_warnings]
    if dealing_warnings:
        prediction, _ = reference.reduced(reference.answers(training=True))
        assert_tree(y, reference.answers()[0].output, prediction, "prediction")
        return
    for path, leaf in zoo.float_leaves(y):
        assert leaf.shape == dict(zoo.float_leaves(build(case)(*inputs(case)[0], **inputs(case)[1])))[path].shape
        assert leaf.isfinite().all()
    if case.tags & {"batch_mixing", "batch_mixing_train", "stochastic_train", "buffers", "mutates_attribute"}:
        return  # the answers of a voter depend on the rows that it was dealt
    answers = [b for b in reference.answers(training=True) if not b.place["sculpt"]]
    for path, leaf in zoo.float_leaves(y):
        stack = torch.stack([dict(leaves(b.output))[path] for b in answers])
        same = torch.isclose(stack, leaf, rtol=1e-9, atol=1e-9).flatten(2).all(2)
        assert same.any(0).all(), f"{path}: a row equals no voter's answer"
        if not torch.isclose(stack[0], stack[1]).flatten(1).all(1).any():
            assert same.sum(1).tolist() == [ROWS // VOTERS] * VOTERS, f"{path}: dealt {same.int().tolist()}"


def check_plain_state(case: Case, wrapping: Wrapping) -> None:
    """Check that the state of the plain model loads into the wrapped one, which then gives the plain model's prediction."""
    plain, wrapped = build(case), wrapping.wrap(build(case)).eval()
    with torch.no_grad():
        for number, parameter in enumerate(parameters(plain).values()):
            parameter.mul_(1 + 0.1 * number)
    wrapped.load_state_dict(state(plain))
    reference = Reference(case, wrapping, wrapped)
    tensors = {**dict(wrapped.named_parameters()), **dict(wrapped.named_buffers())}
    for name, tensor in {**parameters(plain), **buffers(plain)}.items():
        for voter in range(wrapping.voters):
            key, row = reference.home(name, {wrapping.members: voter})
            value = tensors[key]
            assert torch.equal(value if row is None else value[row], tensor), name
    if wrapping.name != "vote_rank1" and not wrapping.prior:  # rank-one factors and priors keep their values
        expected = call(plain, inputs(case))
        assert_tree(call(wrapped, inputs(case)), expected, exactly(expected), "prediction")


def check_noise(case: Case, wrapping: Wrapping) -> None:
    """Check that samples are passes under noise, equal to those of the plain model where the reference can redraw the noise."""
    wrapped = wrapping.wrap(build(case), "loop", NOISE).eval()
    before = {name: buffer.clone() for name, buffer in wrapped.named_buffers()}
    reference = Reference(case, wrapping, wrapped)
    with torch.no_grad():
        y, risks = ask(wrapped, inputs(case))
    epistemic_leaves = [leaf for _, leaf in zoo.float_leaves(risks["epistemic"])]
    assert all(leaf.isfinite().all() for leaf in epistemic_leaves)
    if any(is_float(leaf) for leaf in flatten(inputs(case))[0]) or wrapping.where not in ("inputs", "transforms"):
        assert any((leaf > 0).any() for leaf in epistemic_leaves), "all samples are equal"
    if wrapping.where != "activations":
        assert_answers(reference, reference.answers(noise=NOISE), y, risks)
    if "total" in risks:
        trees = (dict(zoo.float_leaves(risks[name])) for name in ("total", "aleatoric", "epistemic"))
        whole, aleatoric, epistemic = trees
        for path, leaf in whole.items():
            close(leaf.square(), aleatoric[path].square() + epistemic[path].square(), f"total {path}")
    for name, buffer in wrapped.named_buffers():
        assert torch.equal(buffer, before[name]), f"noise reached {name}"


def check_signature(case: Case, wrapping: Wrapping) -> None:
    """Check that neo is standardized on its training data, changes nothing else, and has a signature that gradients can train."""
    wrapped = wrapping.wrap(build(case, training=True))
    before = {name: t.clone() for name, t in wrapped.state_dict().items() if "@workbench" not in name}
    _, risks = ask(wrapped, inputs(case))
    if wrapping.name == "neo":
        risks["vacuitic"].mean().backward()
        trained = [name for name, p in wrapped.named_parameters() if p.grad is not None]
        assert all("extras@workbench" in name for name in trained), trained
        assert all(torch.equal(t, before[n]) for n, t in wrapped.state_dict().items() if n in before)
    wrapping.trial(case).fitted(wrapped)
    far = tree_map(lambda x: 100 * x if is_float(x) else x, inputs(case))
    with torch.no_grad():
        near_risk, far_risk = (ask(wrapped, arguments)[1]["vacuitic"] for arguments in (inputs(case), far))
    assert near_risk.isfinite().all()
    assert far_risk.isfinite().all()
    # packed sequences have no row dimension, and their remaining features saturate
    if zoo.float_leaves(case.inputs()) and case.name not in ("packed_seq", "gru_packed"):
        assert far_risk.min() > near_risk.max(), "inputs a hundred times as large are no more unlike the training data"


CHECKS: dict[str, Callable[[Case, Wrapping], None]] = {
    "answers": check_prediction,
    "parts": check_parts,
    "step": partial(check_training, strategy="loop"),
    "step_auto": check_training,
    "dealing": check_dealing,
    "loading": check_plain_state,
    "noise": check_noise,
    "signature": check_signature,
}
IN_TURN = ("answers", "step")  # the values and gradients of voters and heads
EVERY = 12  # the other checks run in one of so many cells


def applies(check: str, wrapping: Wrapping) -> bool:
    """Return whether a check applies to a wrapper."""
    return {
        "step": wrapping.name != "neo" and not wrapping.kept,
        "step_auto": wrapping.name
        in ("vote_share1", "vote_share2", "vote1_sculpt_neo"),  # for these, auto does not choose loop
        "dealing": wrapping.voters > 1 and not wrapping.kept,
        "noise": bool(wrapping.where),
        "signature": "vacuitic" in wrapping.kinds,
    }.get(check, True)


def check_refusal(case: Case, wrapping: Wrapping) -> None:
    """Check that a model is refused with the expected error and message, with and without gradients, and is left unchanged."""
    error, words = EXPECTED_REFUSALS[case.name, wrapping.name]
    for gradients in (False, True):
        model = build(case)
        before = copy.deepcopy(dict(state(model)))
        error_message = None
        try:
            with torch.set_grad_enabled(gradients):
                wrapped = wrapping.wrap(model, noise=NOISE)
                ask(wrapping.trial(case).fitted(wrapped), inputs(case))
        except error as raised:
            error_message = str(raised)
        assert error_message is not None, f"not refused, {'with' if gradients else 'without'} gradients"
        assert words in error_message
        assert all(torch.equal(t, before[name]) for name, t in state(model).items())


def checks_of_cell(case: Case, wrapping: Wrapping) -> dict[str, Callable[[], None]]:
    """Return all checks that apply to one model and one wrapper, by name; none if the model is refused."""
    if (case.name, wrapping.name) in EXPECTED_REFUSALS:
        return {}
    trial = wrapping.trial(case)
    built_in = {name: partial(check, case, wrapping) for name, check in CHECKS.items() if applies(name, wrapping)}
    # a case that was placed on a device counts as a user's own, with which every wrapper is composed
    general = {
        name: partial(check, trial)
        for name, check in checks_of(trial).items()
        if not name.startswith("with ") or case.name in COMPOSED_ON
    }
    return built_in | {name: check for name, check in general.items() if wrapping.name in RUN_BY.get(name, WRAPPERS)}


@functools.cache
def checks_due() -> dict[tuple[str, str], list[str]]:
    """Return the names of the checks to run in each cell, by model and wrapper: one of `IN_TURN`, and those of the others whose turn it is."""
    cells: dict[str, dict[str, list[str]]] = {}  # check -> model -> wrappers to which it applies
    due: dict[tuple[str, str], list[str]] = {}
    for (row, case), (column, wrapping) in itertools.product(
        enumerate(zoo.CASES.values()), enumerate(WRAPPERS.values())
    ):
        checks = checks_of_cell(case, wrapping)
        alternating = [check for check in IN_TURN if check in checks]
        due[case.name, wrapping.name] = [
            check for number, check in enumerate(alternating) if is_due(row + number, column, len(alternating))
        ]
        for check in checks.keys() - alternating:
            cells.setdefault(check, {}).setdefault(case.name, []).append(wrapping.name)
    for check, models in cells.items():
        for row, (model, wrappers) in enumerate(models.items()):
            every = min(EVERY, len(models), len(wrappers))
            for column, wrapper in enumerate(wrappers):
                if is_due(row, column, every):
                    due[model, wrapper].append(check)
    return due


def check_builtin(case: Case, wrapping: Wrapping, whole: bool = True) -> None:
    """Run all checks that apply to one model under one wrapper, or only those that are due if not `whole`."""
    if (case.name, wrapping.name) in EXPECTED_REFUSALS:
        check_refusal(case, wrapping)
        return
    checks = checks_of_cell(case, wrapping)
    for name in checks if whole else checks_due()[case.name, wrapping.name]:
        with listed(case, name), seeded():
            checks[name]()
