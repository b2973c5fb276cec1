"""What every wrapper owes to every model, checked against plain models whose tensors are set by hand.

A reference never runs the wrapped object: it builds the plain model anew for each branch, copies the branch's tensors into
it by their names in the `state_dict` (`fc.weight@vote` has one row for each voter, `fc.weight@sculpt` belongs to the risk
head, ...), calls it, and does the arithmetic of risks itself.

Example:
    >>> from zoo import CASES
    >>> check_wrapper(CASES["mlp"], WRAPPERS["vote"])
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import io
import itertools
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import zoo
from torch import Tensor, nn
from zoo import Case, leaves

from workbench import Risk, WorkbenchWarning, Wrapped, compose, is_wrapped, neo, sample, sculpt, vote
from workbench.engine.run import OutputShapeError
from workbench.engine.tree import flatten, tree_map

VOTERS, SAMPLES, ROWS, NOISE = 3, 3, 6, 0.3
Tree = dict[str, Any]  # path of a leaf -> leaf


@dataclasses.dataclass(frozen=True)
class Wrapping:
    """A column of the table: a wrapper and what it does to a model.

    Args:
        name: Key in `WRAPPERS`.
        make: `make(strategy, noise)` gives the wrapper; `noise` is the amount of it where it samples.
        kinds: The risks that it measures.
        voters: Number of voters.
        where: Where it puts noise, "" for no noise.
    """

    name: str
    make: Callable[[str, float], Any]
    kinds: tuple[str, ...]
    voters: int = 1
    where: str = ""

    def wrap(self, model: Any, strategy: str = "auto", noise: float = 0.0, seed: int = 1) -> Any:
        """The wrapped model; with another seed the voters and heads have other start values."""
        with seeded(seed):
            return self.make(strategy, noise)(model)

    @property
    def samples(self) -> int:
        return SAMPLES if self.where else 1

    @property
    def variances(self) -> tuple[str, ...]:
        """The risks that are standard deviations."""
        kinds = tuple(kind for kind in self.kinds if kind != "vacuitic")
        return (*kinds, "total") if len(kinds) > 1 else kinds

    @property
    def single(self) -> str:
        """The one risk that is returned as such, without a `Risk` around it; "" where there are several."""
        return self.kinds[0] if len(self.kinds) == 1 else ""


def _voting(strategy: str, noise: float, share: Any = None) -> Any:
    return vote.Wrapper(VOTERS, share=share, strategy=strategy)


def _sampling(where: str, strategy: str, noise: float) -> Any:
    distribution = sample.Bernoulli(noise) if where == "activations" else sample.Normal(noise)
    return sample.Wrapper(SAMPLES, distribution, where=where, strategy=strategy)


def _sculpting(strategy: str, noise: float) -> Any:
    return sculpt.Wrapper(strategy=strategy)


EPISTEMIC, ALEATORIC = ("epistemic",), ("aleatoric",)
WRAPPERS = {
    wrapping.name: wrapping
    for wrapping in [
        Wrapping("vote", _voting, EPISTEMIC, VOTERS),
        Wrapping("vote_rank1", lambda s, n: _voting(s, n, "rank1"), EPISTEMIC, VOTERS),
        Wrapping("vote_share1", lambda s, n: _voting(s, n, 1), EPISTEMIC, VOTERS),
        Wrapping("vote_share2", lambda s, n: _voting(s, n, 2), EPISTEMIC, VOTERS),
        Wrapping("sculpt", _sculpting, ALEATORIC),
        Wrapping("sample_activations", lambda s, n: _sampling("activations", s, n), EPISTEMIC, where="activations"),
        Wrapping("sample_weights", lambda s, n: _sampling("weights", s, n), EPISTEMIC, where="weights"),
        Wrapping("sample_inputs", lambda s, n: _sampling("inputs", s, n), EPISTEMIC, where="inputs"),
        Wrapping("neo", lambda s, n: neo.Wrapper(strategy=s), ("vacuitic",)),
        Wrapping(
            "vote_sculpt",
            lambda s, n: compose(_sculpting(s, n), _voting(s, n)),
            ALEATORIC + EPISTEMIC,
            VOTERS,
        ),
        Wrapping(
            "sample_sculpt",
            lambda s, n: compose(_sampling("activations", s, n), _sculpting(s, n)),
            ALEATORIC + EPISTEMIC,
            where="activations",
        ),
        Wrapping(
            "vote1_sculpt_neo",
            lambda s, n: compose(_voting(s, n, 1), neo.Wrapper(strategy=s), _sculpting(s, n)),
            (*ALEATORIC, *EPISTEMIC, "vacuitic"),
            VOTERS,
        ),
    ]
}


class Refusal(NamedTuple):
    """An error that a model must get from a wrapper: its type, and words that its message has."""

    error: type[Exception]
    words: str


EXPECTED_REFUSALS: dict[tuple[str, str], Refusal] = {
    **{("scripted", name): Refusal(TypeError, "wrap the model before scripting it") for name in WRAPPERS},
    ("bilinear", "vote_share2"): Refusal(ValueError, "share=2, but Bilinear has 1 layers with weights"),
    **{
        ("scalar_output", name): Refusal(ValueError, "the model's output has no rows")
        for name, wrapping in WRAPPERS.items()
        if "vacuitic" in wrapping.kinds
    },
    ("nonzero_shape", "sample_inputs"): Refusal(OutputShapeError, "other shapes in other branches"),
}

VMAP_REFUSES = {  # words of the message by case; wrappers that meet the obstacle in a shared trunk only are not refused
    "autograd_in_forward": "requires_grad_",
    "bool_mask": "dynamic shape",
    "custom_autograd": "setup_context",
    "custom_autograd_weight": "setup_context",
    "data_if": "data-dependent control flow",
    "fill_zeros": "inplace arithmetic",
    "gnn_scatter": "index_add_",
    "input_mutation": "writes into its inputs",
    "item_loop": ".item()",
    "lstm": "lstm",
    "moe_topk": "dynamic shape",
    "numpy_print": "data pointer",
    "out_kwarg": "add.out",
    "packed_seq": "",  # lstm or .item(), whichever comes first
}


# ---- models and inputs ----------------------------------------------------------------------------------------------


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Seed torch and numpy, and put the states of both back afterwards."""
    state = np.random.get_state()  # noqa: NPY002 - one case draws from the global state
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        try:
            yield
        finally:
            np.random.set_state(state)  # noqa: NPY002


def parts(model: Any) -> dict[str, nn.Module]:
    """The modules of a case by the prefix that their tensors have in a wrapped one."""
    if isinstance(model, nn.Module):
        return {"": getattr(model, "_orig_mod", model) if isinstance(model, torch._dynamo.OptimizedModule) else model}
    held = inspect.getclosurevars(model).nonlocals
    return {f"{name}.": module for name, module in held.items() if isinstance(module, nn.Module)}


def parameters(model: Any) -> dict[str, nn.Parameter]:
    return {prefix + name: p for prefix, module in parts(model).items() for name, p in module.named_parameters()}


def buffers(model: Any) -> dict[str, Tensor]:
    return {prefix + name: b for prefix, module in parts(model).items() for name, b in module.named_buffers()}


def state(model: Any) -> dict[str, Tensor]:
    """The state_dict of a case, as it is to be loaded into a wrapped one."""
    if isinstance(model, nn.Module):
        return model.state_dict()
    return {prefix + name: t for prefix, module in parts(model).items() for name, t in module.state_dict().items()}


def build(case: Case, dtype: torch.dtype = torch.float64, training: bool = False) -> Any:
    """The plain model of a case in another precision and mode."""
    model = case.build()
    for module in parts(model).values():
        if dtype not in {p.dtype for p in module.parameters()}:
            module.to(dtype)
    for module in zoo.modules(model):
        module.train(training)
    return model


def inputs(case: Case, dtype: torch.dtype = torch.float64, rows: int = ROWS, seed: int = 0) -> Any:
    """Inputs (args, kwargs) in another precision, tensors of their own at every call."""
    return tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf,
        case.inputs(seed, rows),
    )


def is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def ask(wrapped: Any, given: Any, wrapping: Wrapping, seed: int = 0) -> tuple[Any, dict[str, Any]]:
    """The prediction of a wrapped model and its risks by name."""
    args, kwargs = given
    with seeded(seed):
        y, risk = wrapped(*args, **kwargs, return_risk=True)
    if wrapping.single:
        return y, {wrapping.single: risk}
    assert isinstance(risk, Risk)
    return y, {name: risk[name] for name in risk.names()}


# ---- the reference --------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """A branch: the voter, the sample and the head (0 predicts, 1 is the risk head)."""

    voter: int
    sample: int
    head: int


@dataclasses.dataclass
class Branch:
    """What a plain model with the tensors of one branch gave."""

    place: Place
    model: Any
    given: Any
    values: dict[str, Tensor]
    output: Any


class Reference:
    """Plain models with the tensors of a wrapped one.

    Args:
        case: How to build them.
        wrapping: How the wrapped model was made.
        wrapped: Its tensors are copied now, so that it can be called and changed afterwards.
        dtype: Precision of models and inputs.
    """

    def __init__(self, case: Case, wrapping: Wrapping, wrapped: Any, dtype: torch.dtype = torch.float64) -> None:
        self.case, self.wrapping, self.dtype = case, wrapping, dtype
        self.state = {
            name: tensor.detach().clone().requires_grad_(tensor.is_floating_point())
            for name, tensor in wrapped.state_dict().items()
            if "@workbench" not in name
        }
        self.learns = {name for name, parameter in wrapped.named_parameters() if parameter.requires_grad}

    def home(self, name: str, place: Place) -> tuple[str, int | None]:
        """Key and row in the state_dict where a branch keeps a tensor of the plain model."""
        heads = {key.removesuffix("@vote") for key in self.state}
        base = f"{name}@sculpt" if place.head and f"{name}@sculpt" in heads else name
        return (f"{base}@vote", place.voter) if f"{base}@vote" in self.state else (base, None)

    def value(self, name: str, place: Place) -> Tensor:
        """The tensor that a branch uses, as a differentiable function of `state`."""
        key, row = self.home(name, place)
        tensor = self.state[key] if row is None else self.state[key][row]
        if (left := self.state.get(f"{key}@vote_out")) is not None:
            shape = (-1, *[1] * (tensor.dim() - 1))
            tensor = tensor * left[place.voter].reshape(shape)
            if (right := self.state.get(f"{key}@vote_in")) is not None:
                tensor = tensor * right[place.voter].reshape(1, -1, *shape[2:])
        return tensor

    def run(self, training: bool = False, noise: float = 0.0, seed: int = 0) -> list[Branch]:
        """All branches, with the noise of sample on weights or inputs where there is some."""
        heads = 2 if "aleatoric" in self.wrapping.kinds else 1
        branches = []
        with seeded(seed):
            for place in map(
                Place._make, itertools.product(range(self.wrapping.voters), range(self.wrapping.samples), range(heads))
            ):
                model = build(self.case, self.dtype, training)
                tensors = {**parameters(model), **buffers(model)}
                values = {name: self.value(name, place) for name in tensors}
                if noise and self.wrapping.where == "weights":
                    values.update(
                        {
                            name: value * (1 + noise * torch.randn_like(value))
                            for name, value in values.items()
                            if name in parameters(model) and value.dim() >= 2
                        }
                    )
                given = inputs(self.case, self.dtype)
                if noise and self.wrapping.where == "inputs":
                    given = tree_map(lambda x: x + noise * torch.randn_like(x) if is_float(x) else x, given)
                with torch.no_grad():
                    for name, tensor in tensors.items():
                        tensor.copy_(values[name])
                for name, parameter in parameters(model).items():
                    parameter.requires_grad_(self.home(name, place)[0] in self.learns)
                args, kwargs = given
                branches.append(Branch(place, model, given, values, model(*args, **kwargs)))
        return branches

    def reduced(self, branches: list[Branch]) -> tuple[Tree, dict[str, Tree]]:
        """Prediction and risks by the law of total variance, by path; leaves that are not floating: of all answers."""
        prediction: Tree = {}
        risks: dict[str, Tree] = {kind: {} for kind in self.wrapping.variances}
        outputs = [(b.place, dict(leaves(b.output))) for b in branches]
        for path, first in outputs[0][1].items():
            answers = [output[path] for place, output in outputs if place.head == 0]
            if not is_float(first):
                prediction[path] = answers
                continue
            stack = torch.stack(answers)
            mean = stack.sum(0) / len(answers)
            prediction[path] = mean if len(answers) > 1 else stack[0]
            variances = {"epistemic": (stack - mean).square().sum(0) / len(answers)}
            raw = [output[path] for place, output in outputs if place.head == 1]
            if raw:
                variances["aleatoric"] = torch.stack([(F.softplus(r) + 1e-9) ** 2 for r in raw]).sum(0) / len(raw)
            if len(self.wrapping.kinds) > 1:
                variances["total"] = variances["aleatoric"] + variances["epistemic"]
            for kind, risk in risks.items():
                risk[path] = root(variances[kind])
        return prediction, risks

    def gradients(self, branches: list[Branch], objective: Tensor) -> dict[str, Tensor | None]:
        """The gradient of an objective on the branches' outputs, by key of the wrapped state_dict."""
        objective.backward()
        pairs = [
            (b.values[name], p.grad)
            for b in branches
            for name, p in parameters(b.model).items()
            if p.grad is not None and p.requires_grad
        ]
        torch.autograd.backward([value for value, _ in pairs], [grad for _, grad in pairs])
        return {name: tensor.grad for name, tensor in self.state.items()}

    def moved(self, branches: list[Branch]) -> dict[str, Tensor]:
        """The buffers after the run, by key: own rows each, shared ones the mean over the branches that share them."""
        found: dict[tuple[str, int | None], list[Tensor]] = {}
        for branch in branches:
            for name, value in buffers(branch.model).items():
                found.setdefault(self.home(name, branch.place), []).append(value)
        expected = {name: self.state[name].detach().clone() for name, _ in found}
        for (name, row), values in found.items():
            mean = torch.stack(values).sum(0) / len(values) if values[0].is_floating_point() else values[0]
            if row is None:
                expected[name] = mean.detach()
            else:
                expected[name][row] = mean.detach()
        return expected


def root(variance: Tensor) -> Tensor:
    """Standard deviation whose gradient is zero where all branches agree."""
    spread = variance > 1e-28
    return torch.where(spread, torch.where(spread, variance, 1.0).sqrt(), 0.0)


def majority(value: Tensor, answers: list[Tensor]) -> None:
    """Assert that each whole number is one of those that most branches gave."""
    stack = torch.stack(answers)
    counts = (stack[:, None] == stack[None]).sum(1)
    said = (stack == value).sum(0)
    assert torch.equal(said, counts.max(0).values), f"{value.tolist()} is not what most say: {stack.tolist()}"


def assert_tree(output: Any, like: Any, expected: Tree, what: str, tolerance: float = 1e-9) -> None:
    """Assert structure and values of a prediction or of a risk; `like` is an output of the plain model."""
    assert type(output) is type(like), f"{what}: {type(output).__name__} instead of {type(like).__name__}"
    found = dict(leaves(output))
    assert list(found) == [path for path, _ in leaves(like)], f"{what}: other leaves"
    for path, leaf in found.items():
        where = f"{what} {path}".strip()
        if path not in expected:
            assert leaf is None, f"{where}: a risk of what is no number"
        elif is_float(leaf):
            assert leaf.shape == expected[path].shape, f"{where}: {tuple(leaf.shape)} for {tuple(expected[path].shape)}"
            close(leaf, expected[path], where, tolerance)
        elif isinstance(leaf, Tensor):
            majority(leaf, expected[path])
        else:
            assert all(leaf == answer for answer in expected[path]), where


def close(found: Tensor, expected: Tensor, what: str, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(
        found, expected, rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}", check_dtype=False
    )


def assert_answers(
    reference: Reference, branches: list[Branch], y: Any, risks: dict[str, Any], tolerance: float = 1e-9
) -> None:
    """Assert that prediction and risks are those of the branches."""
    prediction, expected = reference.reduced(branches)
    like = branches[0].output
    assert_tree(y, like, prediction, "prediction", tolerance)
    named = {name: risk for name, risk in risks.items() if name != "vacuitic"}
    assert not named or set(named) == set(expected)
    for name, risk in named.items():
        assert_tree(risk, like, expected[name], name, tolerance)


# ---- the checks -----------------------------------------------------------------------------------------------------


def call(model: Any, given: Any, seed: int = 0) -> Any:
    """The answer of a plain or a wrapped model, without gradients."""
    args, kwargs = given
    with seeded(seed), torch.no_grad():
        return model(*args, **kwargs)


def exactly(output: Any) -> Tree:
    """What `assert_tree` is to find: this output."""
    return {path: leaf if is_float(leaf) else [leaf] for path, leaf in leaves(output)}


def fit(wrapped: Any, wrapping: Wrapping, given: Any) -> Any:
    """Learn the signature, if there is one, in closed form, and go to evaluation mode."""
    wrapped.eval()
    if "vacuitic" in wrapping.kinds:
        args, kwargs = given
        batch = inspect.signature(wrapped.forward).bind(*args, **kwargs).arguments if kwargs else args
        Wrapped.fit(wrapped, [(dict(batch, **batch.pop("kwargs", {})) if kwargs else batch, None)])
    return wrapped


def rng_states() -> tuple[Any, ...]:
    """The states of all global generators."""
    return torch.get_rng_state().numpy().tobytes(), np.random.get_state()[1].tobytes(), random.getstate()  # noqa: NPY002


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
    assert_tree(call(model, inputs(case)), plain_output := call(plain, inputs(case)), exactly(plain_output), "given")


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


def check_strategies(case: Case, wrapping: Wrapping) -> None:
    """One pass under vmap gives what the passes of a loop give, and what it refuses is listed."""
    answers = []
    for strategy in ("loop", "vmap"):
        wrapped = wrapping.wrap(build(case), strategy).eval()
        try:
            with torch.no_grad():
                answers.append(ask(wrapped, inputs(case), wrapping))
        except Exception as error:
            assert strategy == "vmap"
            assert case.name in VMAP_REFUSES, f"vmap refuses: {error}"
            assert VMAP_REFUSES[case.name] in str(error)
            return
    (y, risks), (other, found) = answers
    for tree, like in zip([other, *found.values()], [y, *risks.values()], strict=True):
        assert_tree(tree, like, exactly(like), "vmap")


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
                like = torch.zeros_like(parameter) if expected[name] is None else expected[name]
                close(grad, like, f"gradient of {name}", 1e-7)
        moved = reference.moved(branches)
        after = wrapped.state_dict()
        for name, value in moved.items():
            close(after[name], value, f"buffer {name}")
    first = branches[0]
    untouched = inputs(case) if wrapping.where == "inputs" else first.given  # noise makes copies, which the model writes into
    for leaf, expected_leaf in zip(flatten(given)[0], flatten(untouched)[0], strict=True):
        if isinstance(leaf, Tensor):
            close(leaf, expected_leaf, "input")
    if isinstance(first.model, nn.Module):
        assert_attributes(wrapped, parts(first.model)[""])
    if "writes_global" in case.tags:
        hidden = [branch.model.trunk(branch.given[0][0]) for branch in branches]
        last = torch.tensor(zoo.LAST_HIDDEN.tolist(), dtype=torch.float64)  # a value that can be read, not one of a dead vmap
        assert any(torch.allclose(last, h) for h in hidden), "the global holds no branch's value"


def total(*trees: Any) -> Tensor:
    """The sum of all floating leaves."""
    found = [leaf for tree in trees for leaf in flatten(tree)[0] if is_float(leaf)]
    return torch.stack([leaf.sum() for leaf in found]).sum()


def assert_attributes(wrapped: Any, called: nn.Module) -> None:
    """Assert that what a plain model holds after a call, numbers and tensors in lists and attributes, is in the wrapped one."""
    for name, value in vars(called).items():
        if name.startswith("_") or isinstance(value, list) and any(isinstance(item, nn.Module) for item in value):
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
        for name, other in {"copy": shallow, **alone}.items():
            assert type(other) is type(wrapped), name
            y, found = ask(other, inputs(case), wrapping)
            for tree, like in zip([y, *found.values()], [expected, *risks.values()], strict=True):
                assert_tree(tree, like, exactly(like), name, 1e-12)
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
    if zoo.float_leaves(case.inputs()) and case.name != "packed_seq":  # packed rows are not rows; what is left saturates
        assert far_risk.min() > near_risk.max(), "inputs a hundred times as large are no more unlike the training data"


CHECKS: dict[str, Callable[[Case, Wrapping], None]] = {
    "wrapping": check_wrapping,
    "prediction": check_prediction,
    "strategies": check_strategies,
    "parts": check_parts,
    "training": functools.partial(check_training, strategy="loop"),
    "training_auto": check_training,
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
        "strategies": "vacuitic" not in wrapping.kinds,
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
