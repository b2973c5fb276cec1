"""What every wrapper owes to every model, each check held against plain models whose tensors are set by hand.

Example:
    >>> from conformance_table import WRAPPERS
    >>> from zoo import CASES
    >>> check_wrapper(CASES["mlp"], WRAPPERS["vote"])
"""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import zoo
from conformance_reference import (
    Place,
    Reference,
    assert_answers,
    assert_tree,
    buffers,
    build,
    close,
    exactly,
    inputs,
    is_float,
    parameters,
    parts,
    state,
)
from conformance_table import EXPECTED_REFUSALS, NOISE, ROWS, VMAP_REFUSES, VOTERS, Wrapping, seeded
from torch import Tensor, nn
from zoo import Case, leaves

from workbench import Risk, WorkbenchWarning, Wrapped, is_wrapped
from workbench.engine.tree import flatten, tree_map


def ask(wrapped: Any, given: Any, wrapping: Wrapping, seed: int = 0) -> tuple[Any, dict[str, Any]]:
    """The prediction of a wrapped model and its risks by name."""
    args, kwargs = given
    with seeded(seed):
        y, risk = wrapped(*args, **kwargs, return_risk=True)
    if wrapping.single:
        return y, {wrapping.single: risk}
    assert isinstance(risk, Risk)
    return y, {name: risk[name] for name in risk.names()}


def call(model: Any, given: Any, seed: int = 0) -> Any:
    """The answer of a plain or a wrapped model, without gradients."""
    args, kwargs = given
    with seeded(seed), torch.no_grad():
        return model(*args, **kwargs)


def fit(wrapped: Any, wrapping: Wrapping, given: Any) -> Any:
    """Learn the signature, if there is one, in closed form, and go to evaluation mode."""
    wrapped.eval()
    if "vacuitic" in wrapping.kinds:
        args, kwargs = given
        batch: Any = args
        if kwargs:
            bound: Any = inspect.signature(wrapped.forward).bind(*args, **kwargs).arguments
            batch = {**bound, **bound.pop("kwargs", {})}
        Wrapped.fit(wrapped, [(batch, None)])
    return wrapped


def rng_states() -> tuple[Any, ...]:
    """The states of all global generators."""
    theirs: Any = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().numpy().tobytes(), theirs[1].tobytes(), theirs[2:], random.getstate()


def check_wrapping(case: Case, wrapping: Wrapping) -> None:
    """The given model stays as it was and usable, the global random state as well; the wrapped one is of its class."""
    model, plain = build(case, training=True), build(case)
    expected = copy.deepcopy(dict(state(model)))
    states = rng_states()
    wrapped = wrapping.make("auto", NOISE)(model)
    assert rng_states() == states
    if isinstance(model, nn.Module):
        assert isinstance(wrapped, type(parts(model)[""]))
    assert wrapped.training
    assert all(module.training for module in zoo.modules(model))
    with torch.no_grad():
        for name, tensor in [*wrapped.named_parameters(), *wrapped.named_buffers()]:
            if "@" in name and tensor.is_floating_point():
                tensor.zero_()
    after = state(model)
    assert list(after) == list(expected)
    assert all(torch.equal(after[name], expected[name]) for name in expected)
    for module in zoo.modules(model):
        module.eval()
    output = call(plain, inputs(case))
    assert_tree(call(model, inputs(case)), output, exactly(output), "given")


def check_prediction(case: Case, wrapping: Wrapping, strategy: str = "auto") -> None:
    """In evaluation mode, prediction and risks are those of plain models with the branches' tensors."""
    wrapped = wrapping.wrap(build(case), strategy)
    reference = Reference(case, wrapping, wrapped)
    branches = reference.run()
    fit(wrapped, wrapping, inputs(case, rows=40, seed=3))
    with torch.no_grad():
        y, risks = ask(wrapped, inputs(case), wrapping)
    assert_answers(reference, branches, y, risks)
    assert set(risks) == {*wrapping.variances, *wrapping.kinds}
    if "vacuitic" in risks:
        rows = max(leaf.shape[0] for _, leaf in zoo.float_leaves(y))
        assert risks["vacuitic"].shape == (rows,)
        assert risks["vacuitic"].isfinite().all()
    if not {"captures_self", "mutates_attribute"} & case.tags:
        prediction, _ = reference.reduced(branches)
        assert_tree(call(wrapped, inputs(case)), branches[0].output, prediction, "without risk")


def check_vmap(case: Case, wrapping: Wrapping) -> None:
    """One pass under vmap gives what the passes of a loop give, and what it refuses is listed."""
    with listed(case):
        check_prediction(case, wrapping, "vmap")


def check_training_vmap(case: Case, wrapping: Wrapping) -> None:
    """The same for gradients and buffers."""
    with listed(case):
        check_training(case, wrapping, "vmap")


@contextmanager
def listed(case: Case) -> Iterator[None]:
    """Let those errors of vmap pass that are expected."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if case.name not in VMAP_REFUSES or VMAP_REFUSES[case.name] not in str(error):
            raise


def check_parts(case: Case, wrapping: Wrapping) -> None:
    """`voters()` and `unwrap()` give plain models with the branches' tensors."""
    wrapped = wrapping.wrap(build(case)).eval()
    branches = [b for b in Reference(case, wrapping, wrapped).run() if b.place.sample == b.place.head == 0]
    voters, plain = Wrapped.voters(wrapped), Wrapped.unwrap(wrapped)
    assert len(voters) == wrapping.voters
    for model, branch in zip([*voters, plain], [*branches, branches[0]], strict=True):
        assert not is_wrapped(model)
        assert_tree(call(model, inputs(case)), branch.output, exactly(branch.output), f"voter {branch.place.voter}")


def check_training(case: Case, wrapping: Wrapping, strategy: str = "auto") -> None:
    """In training mode, one call with risks gives the gradients, buffers, attributes and inputs of the plain models."""
    stochastic = "stochastic_train" in case.tags
    noise = NOISE if wrapping.where in ("weights", "inputs") and strategy == "loop" else 0.0
    wrapped = wrapping.wrap(build(case, training=True), strategy, noise)
    reference = Reference(case, wrapping, wrapped)
    zoo.LAST_HIDDEN = None
    branches = reference.run(training=True, noise=noise)
    given = inputs(case)
    y, risks = ask(wrapped, given, wrapping)
    if stochastic:
        prediction, _ = reference.reduced(branches)
        for path, leaf in zoo.float_leaves(y):
            assert leaf.shape == prediction[path].shape
            assert leaf.isfinite().all()
    else:
        assert_answers(reference, branches, y, risks)
        found = total(y, *(risk for name, risk in risks.items() if name != "vacuitic"))
        expected = reference.gradients(branches, total(reference.reduced(branches)))
        found.backward()
        for name, parameter in wrapped.named_parameters():
            if name in expected:
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                like = expected[name]
                close(grad, torch.zeros_like(parameter) if like is None else like, f"gradient of {name}", 1e-7)
        moved = reference.moved(branches)
        after = wrapped.state_dict()
        for name, value in moved.items():
            close(after[name], value, f"buffer {name}")
    first = branches[0]
    # noise on inputs makes copies, and it is these that the model writes into
    untouched = inputs(case) if wrapping.where == "inputs" else first.given
    for leaf, expected_leaf in zip(flatten(given)[0], flatten(untouched)[0], strict=True):
        if isinstance(leaf, Tensor):
            close(leaf, expected_leaf, "input")
    if isinstance(first.model, nn.Module):
        assert_attributes(wrapped, parts(first.model)[""])
    if "writes_global" in case.tags:
        hidden = [branch.model.trunk(branch.given[0][0]) for branch in branches]
        left: Any = zoo.LAST_HIDDEN
        last = torch.tensor(left.tolist(), dtype=torch.float64)  # it can be read: it is not one of a dead vmap
        assert any(torch.allclose(last, h) for h in hidden), "the global holds no branch's value"


def total(*trees: Any) -> Tensor:
    """The sum of all floating leaves."""
    found = [leaf for tree in trees for leaf in flatten(tree)[0] if is_float(leaf)]
    return torch.stack([leaf.sum() for leaf in found]).sum()


def assert_attributes(wrapped: Any, called: nn.Module) -> None:
    """Assert that what a plain model holds after a call, numbers and tensors in lists and attributes, is in the wrapped one."""
    for name, value in vars(called).items():
        if name.startswith("_") or (isinstance(value, list) and any(isinstance(item, nn.Module) for item in value)):
            continue
        if isinstance(value, Tensor):
            close(getattr(wrapped, name), value, name)
        elif isinstance(value, bool | int | float | str | list):
            assert getattr(wrapped, name) == value, f"{name} is {getattr(wrapped, name)!r}, not {value!r}"


def check_dealing(case: Case, wrapping: Wrapping) -> None:
    """In training mode without risks each row is answered by one voter, as many by each; or by all, with one warning."""
    wrapped = wrapping.wrap(build(case, training=True))
    reference = Reference(case, wrapping, wrapped)
    args, kwargs = inputs(case)
    with warnings.catch_warnings(record=True) as caught, seeded():
        warnings.simplefilter("always")
        y = wrapped(*args, **kwargs)
    told = [w for w in caught if issubclass(w.category, WorkbenchWarning)]
    if "batch_mixing" not in case.tags or "not_dealable" in case.tags:  # mixing may, but need not, show in these rows
        assert len(told) == ("not_dealable" in case.tags), [str(w.message) for w in told]
    if told:
        prediction, _ = reference.reduced(reference.run(training=True))
        assert_tree(y, reference.run()[0].output, prediction, "prediction")
        return
    for path, leaf in zoo.float_leaves(y):
        assert leaf.shape == dict(zoo.float_leaves(build(case)(*inputs(case)[0], **inputs(case)[1])))[path].shape
        assert leaf.isfinite().all()
    if case.tags & {"batch_mixing", "batch_mixing_train", "stochastic_train", "buffers", "mutates_attribute"}:
        return  # what a voter answers depends on the rows that it was dealt
    answers = [b for b in reference.run(training=True) if b.place.head == 0]
    for path, leaf in zoo.float_leaves(y):
        stack = torch.stack([dict(leaves(b.output))[path] for b in answers])
        same = torch.isclose(stack, leaf, rtol=1e-9, atol=1e-9).flatten(2).all(2)
        assert same.any(0).all(), f"{path}: a row is no voter's"
        if not torch.isclose(stack[0], stack[1]).flatten(1).all(1).any():
            assert same.sum(1).tolist() == [ROWS // VOTERS] * VOTERS, f"{path}: dealt {same.int().tolist()}"


def check_state(case: Case, wrapping: Wrapping) -> None:
    """States and copies: what is saved, copied or pickled predicts the same, and stands alone."""
    wrapped = fit(wrapping.wrap(build(case)), wrapping, inputs(case, rows=40, seed=3))
    before = {name: tensor.clone() for name, tensor in wrapped.state_dict().items()}
    file = io.BytesIO()
    torch.save(wrapped.state_dict(), file)
    file.seek(0)
    alone = {"load_state_dict": wrapping.wrap(build(case), seed=2).eval()}
    alone["load_state_dict"].load_state_dict(torch.load(file, weights_only=True))
    shallow = copy.copy(wrapped)
    alone.update({name: COPIES[name](shallow) for name in ("deepcopy", "pickle") if name in copyable(case.name)})
    with torch.no_grad():
        expected, risks = ask(wrapped, inputs(case), wrapping)
        for name, other in alone.items():
            assert type(other) is type(wrapped), name
            y, found = ask(other, inputs(case), wrapping)
            for tree, like in zip([y, *found.values()], [expected, *risks.values()], strict=True):
                assert_tree(tree, like, exactly(like), name, 1e-12)
        if "mutates_attribute" not in case.tags:  # made before the call that it is compared with
            assert_tree(call(shallow, inputs(case)), expected, exactly(call(wrapped, inputs(case))), "copy.copy")
        for other in alone.values():
            for tensor in [*other.parameters(), *other.buffers()]:
                tensor.zero_()
    after = wrapped.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before), "a copy shares tensors"
    assert all(p is q for p, q in zip(shallow.parameters(), wrapped.parameters(), strict=True)), "copy.copy has its own"


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "bfloat16": lambda model: model.bfloat16(),
}


@functools.cache
def copyable(name: str) -> set[str]:
    """What can be done to the plain model of a case: which of `COPIES` run; functions have no copies to compare with."""
    found: set[str] = set()
    if "function" in zoo.CASES[name].tags:
        return {"deepcopy", "bfloat16"}
    for how, make in COPIES.items():
        dtype = torch.bfloat16 if how == "bfloat16" else torch.float64
        try:
            call(make(parts(build(zoo.CASES[name]))[""]), inputs(zoo.CASES[name], dtype))
            found.add(how)
        except (AttributeError, TypeError, ValueError, KeyError, pickle.PicklingError, RuntimeError):
            continue
    return found


def check_plain_state(case: Case, wrapping: Wrapping) -> None:
    """The state of the plain model loads into the wrapped one, whose prediction is the plain model's then."""
    plain, wrapped = build(case), wrapping.wrap(build(case)).eval()
    with torch.no_grad():
        for number, parameter in enumerate(parameters(plain).values()):
            parameter.mul_(1 + 0.1 * number)
    wrapped.load_state_dict(state(plain))
    reference = Reference(case, wrapping, wrapped)
    for name, tensor in {**parameters(plain), **buffers(plain)}.items():
        for voter in range(wrapping.voters):
            key, row = reference.home(name, Place(voter, 0, 0))
            value = wrapped.state_dict()[key]
            assert torch.equal(value if row is None else value[row], tensor), name
    if wrapping.name != "vote_rank1":  # its factors stay
        expected = call(plain, inputs(case))
        assert_tree(call(wrapped, inputs(case)), expected, exactly(expected), "prediction")


def check_dtypes(case: Case, wrapping: Wrapping) -> None:
    """Other precisions: `.double()` computes in float64, bfloat16 runs wherever the plain model does."""
    wrapped = wrapping.wrap(build(case, torch.float32)).double()
    reference = Reference(case, wrapping, wrapped)
    fit(wrapped, wrapping, inputs(case, rows=40, seed=3))
    with torch.no_grad():
        assert_answers(reference, reference.run(), *ask(wrapped, inputs(case), wrapping))
        if "bfloat16" not in copyable(case.name):
            return
        model = wrapping.wrap(build(case, torch.float32)).bfloat16()
        fit(model, wrapping, inputs(case, torch.bfloat16, rows=40, seed=3))
        y, risks = ask(model, inputs(case, torch.bfloat16), wrapping)
    assert {leaf.dtype for _, leaf in zoo.float_leaves(y)} == {torch.bfloat16}
    for tree in (y, *risks.values()):
        assert all(leaf.isfinite().all() for _, leaf in zoo.float_leaves(tree))


def check_noise(case: Case, wrapping: Wrapping) -> None:
    """Samples are passes under noise: exactly those of the plain model where the noise can be drawn again."""
    wrapped = wrapping.wrap(build(case), "loop", NOISE).eval()
    before = {name: buffer.clone() for name, buffer in wrapped.named_buffers()}
    reference = Reference(case, wrapping, wrapped)
    with torch.no_grad():
        y, risks = ask(wrapped, inputs(case), wrapping)
    found = [leaf for _, leaf in zoo.float_leaves(risks["epistemic"])]
    assert all(leaf.isfinite().all() for leaf in found)
    if any(is_float(leaf) for leaf in flatten(inputs(case))[0]) or wrapping.where != "inputs":
        assert any((leaf > 0).any() for leaf in found), "all samples are alike"
    if wrapping.where != "activations":
        assert_answers(reference, reference.run(noise=NOISE), y, risks)
    if "total" in risks:
        trees = (dict(zoo.float_leaves(risks[name])) for name in ("total", "aleatoric", "epistemic"))
        whole, aleatoric, epistemic = trees
        for path, leaf in whole.items():
            close(leaf.square(), aleatoric[path].square() + epistemic[path].square(), f"total {path}")
    for name, buffer in wrapped.named_buffers():
        assert torch.equal(buffer, before[name]), f"noise reached {name}"


def check_signature(case: Case, wrapping: Wrapping) -> None:
    """Neo: standardised on its training data, nothing else moves, and the signature can be trained by gradients."""
    wrapped = wrapping.wrap(build(case, training=True))
    before = {name: t.clone() for name, t in wrapped.state_dict().items() if "extras@" not in name}
    _, risks = ask(wrapped, inputs(case), wrapping)
    if wrapping.name == "neo":
        risks["vacuitic"].mean().backward()
        trained = [name for name, p in wrapped.named_parameters() if p.grad is not None]
        assert all("extras@workbench" in name for name in trained), trained
        assert all(torch.equal(t, before[n]) for n, t in wrapped.state_dict().items() if n in before)
    fit(wrapped, wrapping, inputs(case, rows=40, seed=3))
    far = tree_map(lambda x: 100 * x if is_float(x) else x, inputs(case))
    with torch.no_grad():
        near_risk, far_risk = (ask(wrapped, given, wrapping)[1]["vacuitic"] for given in (inputs(case), far))
    assert near_risk.isfinite().all()
    assert far_risk.isfinite().all()
    if (
        zoo.float_leaves(case.inputs()) and case.name != "packed_seq"
    ):  # packed rows are not rows; what is left saturates
        assert far_risk.min() > near_risk.max(), "inputs a hundred times as large are no more unlike the training data"


TRAINED_UNDER_VMAP = ("vote", "sample_weights", "vote_sculpt", "sample_sculpt")
CHECKS: dict[str, Callable[[Case, Wrapping], None]] = {
    "wrapping": check_wrapping,
    "prediction": check_prediction,
    "vmap": check_vmap,
    "parts": check_parts,
    "training": functools.partial(check_training, strategy="loop"),
    "training_auto": check_training,
    "training_vmap": check_training_vmap,
    "dealing": check_dealing,
    "state": check_state,
    "plain_state": check_plain_state,
    "dtypes": check_dtypes,
    "noise": check_noise,
    "signature": check_signature,
}


def applies(check: str, wrapping: Wrapping) -> bool:
    """Whether a check says anything about a wrapper."""
    return {
        "vmap": "vacuitic" not in wrapping.kinds and wrapping.name not in TRAINED_UNDER_VMAP,
        "training_vmap": wrapping.name in TRAINED_UNDER_VMAP,
        "training": wrapping.name != "neo",
        "training_auto": wrapping.name in ("vote_share1", "vote_share2", "vote1_sculpt_neo"),  # auto is not loop there
        "dealing": wrapping.voters > 1,
        "noise": bool(wrapping.where),
        "signature": "vacuitic" in wrapping.kinds,
    }.get(check, True)


def check_refusal(case: Case, wrapping: Wrapping) -> None:
    """A refusal is the expected error with a message, with and without gradients; the given model stays as it was."""
    error, words = EXPECTED_REFUSALS[case.name, wrapping.name]
    for gradients in (False, True):
        model = build(case)
        before = copy.deepcopy(dict(state(model)))
        found = None
        try:
            with torch.set_grad_enabled(gradients):
                wrapped = wrapping.wrap(model, noise=NOISE)
                ask(fit(wrapped, wrapping, inputs(case, rows=40, seed=3)), inputs(case), wrapping)
        except error as raised:
            found = str(raised)
        assert found is not None, f"not refused, {'with' if gradients else 'without'} gradients"
        assert words in found
        assert all(torch.equal(t, before[name]) for name, t in state(model).items())


def check_wrapper(case: Case, wrapping: Wrapping) -> None:
    """All that applies to one model and one wrapper."""
    if (case.name, wrapping.name) in EXPECTED_REFUSALS:
        check_refusal(case, wrapping)
        return
    for name, check in CHECKS.items():
        if applies(name, wrapping):
            check(case, wrapping)
