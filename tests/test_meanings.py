"""Every meaning of an output under every wrapper: predictions and risks compared with plain models, in every kind of use."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from helpers.conformance_reference import Reference
from helpers.conformance_table import EXHAUSTIVE, NOISE, WRAPPERS, Wrapping
from helpers.detection_reference import DETECTOR, expected_detections
from helpers.laplace_reference import laplace_answers
from helpers.meaning_models import MEANT, Meant, expected
from helpers.zoo import leaves
from torch import Tensor
from torch.nn import functional as F

from workbench import fit, load, save, vote
from workbench.engine.tree import is_float, tree_map
from workbench.outputs import Detections
from workbench.testing.models import build, call, inputs, seeded, total
from workbench.testing.trial import ask

_SCORES = [name for name, model in MEANT.items() if model.leaves != {"": "values"}]
_PROBABILITIES = [name for name in MEANT if "prob" in name]
_CLASSES = "class outputs need sculpt.Wrapper(LogitNormal)"
_CONVOLUTION = "laplace needs a last layer that is an nn.Linear"
REFUSED: dict[tuple[str, str], str] = {  # by model and wrapper: words of the message
    **{(name, wrapper): _CLASSES for name in _SCORES for wrapper in ("sculpt_evidential", "vote_sculpt_quantiles")},
    **{(name, "laplace"): _CONVOLUTION for name in ("maps", "map_probs", "volumes", "nested")},
    ("heads", "laplace"): "the outputs of 'box' are values, but other outputs are class scores",
    **{(name, "vote_prior"): "holds probabilities" for name in _PROBABILITIES},
    ("by_name", "vote_prior"): "prior: output 'loss' is a number without dimensions",
    ("named", "laplace"): "the outputs of 'amount' are values, but other outputs are class scores",
}
PRECISIONS = {"autocast": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def noise_of(wrapping: Wrapping) -> float:
    return NOISE if wrapping.where in ("weights", "inputs", "transforms") else 0.0


def wrapped_as(
    model: Meant,
    wrapping: Wrapping,
    training: bool = False,
    dtype: torch.dtype = torch.float64,
    strategy: str = "auto",
) -> Any:
    """The wrapped model, cast to less than float32 after wrapping; in evaluation mode it is fitted where it has to be."""
    exact = torch.float32 if dtype.itemsize < 4 else dtype
    plain = build(model.case, exact, training=training)
    args, _ = inputs(model.case, exact)
    wrapper = wrapping.make(strategy, noise_of(wrapping)).with_options(output=model.output)
    wrapper = wrapper.with_options(example=args)  # which shows the last layers of each output
    with seeded(1):
        wrapped = wrapper(plain).to(dtype).train(training)
    return wrapped if training else wrapping.trial(model.case).fitted(wrapped, dtype)


def assert_same(actual: Any, wanted: dict[str, Tensor], what: str, tolerance: float = 1e-9) -> None:
    for path, leaf in leaves(actual):
        if path not in wanted:
            assert leaf is None, f"{what} of {path}"
            continue
        where = f"{what} {path}"
        torch.testing.assert_close(leaf, wanted[path], rtol=tolerance, atol=tolerance, msg=where.__add__)


class Expectation:
    """What plain models give for a wrapped one.

    Args:
        model, wrapping: of the tables.
        wrapped: its tensors are read now.
        dtype: of the call.
        training: the mode.
    """

    def __init__(
        self,
        model: Meant,
        wrapping: Wrapping,
        wrapped: Any,
        dtype: torch.dtype = torch.float64,
        training: bool = False,
    ) -> None:
        means = [path for path, kind in model.leaves.items() if kind == "mean"]
        self.reference = Reference(model.case, wrapping, wrapped, dtype, means)
        if wrapping.name == "laplace":
            self.branches = laplace_answers(model, wrapped.state_dict(), dtype)
        else:
            self.branches = self.reference.answers(training, noise_of(wrapping))
        if dtype.itemsize < 8:
            for branch in self.branches:
                branch.output = tree_map(lambda t: t.double() if is_float(t) else t, branch.output)
        self.prediction, risks = expected(model.leaves, self.branches)
        names = {name for risk in risks.values() for name in risk}
        if wrapping.kinds == ("aleatoric",):
            names -= {"epistemic"}
        measured = {name for name in names if wrapping.kinds != ("vacuitic",)}
        if wrapping.single and set(model.leaves.values()) == {"values"}:
            measured = {wrapping.single} & names
        self.risks = {
            name: {path: risk[name] for path, risk in risks.items() if name in risk} for name in sorted(measured)
        }
        # without risk the heads and the noise of a training are not asked
        self.plain = expected(model.leaves, [b for b in self.branches if not b.place["sculpt"]])[0]


# ---- the checks of a cell
def check_eval(model: Meant, wrapping: Wrapping) -> None:
    """Predictions with and without risks, and the risks."""
    wrapped = wrapped_as(model, wrapping)
    _assert_answers(Expectation(model, wrapping, wrapped), wrapped, wrapped, model)


def _assert_answers(expectation: Expectation, wrapped: Any, callee: Any, model: Meant) -> None:
    """What is called may be a compiled form of the wrapped model."""
    args, kwargs = inputs(model.case)
    with torch.no_grad():
        with seeded():
            y, risk = callee(*args, **kwargs, return_risk=True)
        risks = _by_name(wrapped, risk)
        assert_same(y, expectation.prediction, "prediction")
        assert {name for name in risks if name != "vacuitic"} == set(expectation.risks)
        for name, wanted in expectation.risks.items():
            assert_same(risks[name], wanted, name, 1e-7)
        if "vacuitic" in risks:
            assert_vacuitic(model, risks["vacuitic"], y)
        assert_same(call(callee, inputs(model.case)), expectation.plain, "without risk")


def assert_vacuitic(model: Meant, risk: Any, y: Any) -> None:
    """One number for each position of class scores that have some, or one for each row; it has no reference here but its shape."""
    assert all(leaf is None or leaf.isfinite().all() for _, leaf in leaves(risk))
    positions = {
        path: leaf.movedim(model.leaves[path][1], 0)[0].shape
        for path, leaf in leaves(y)
        if isinstance(model.leaves[path], tuple) and leaf.dim() > 2
    }
    if not positions:
        assert risk.shape == (len(next(leaf for _, leaf in leaves(y) if leaf.dim())),)
        return
    shapes = {path: leaf.shape for path, leaf in leaves(risk) if leaf is not None}
    assert positions == {path: shape for path, shape in shapes.items() if path in positions}
    assert all(shape == dict(leaves(y))[path].shape for path, shape in shapes.items() if path not in positions)


def _by_name(wrapped: Any, risk: Any) -> dict[str, Any]:
    if type(risk).__name__ == "Risk":
        return {name: risk[name] for name in risk.names()}
    return {wrapped._workbench.methods[0].kind: risk}


def check_train(model: Meant, wrapping: Wrapping) -> None:
    """One step with risks: the gradients of plain models."""
    if wrapping.kept or wrapping.name in ("laplace", "neo"):
        return  # what they measure is gathered beside the training
    wrapped = wrapped_as(model, wrapping, training=True, strategy="loop")
    if "vacuitic" in wrapping.kinds:  # of positions it is not learned by gradient
        wrapping.trial(model.case).fitted(wrapped.eval(), torch.float64).train()
    expectation = Expectation(model, wrapping, wrapped, training=True)
    y, risks = ask(wrapped, inputs(model.case))
    assert_same(y, expectation.prediction, "prediction")
    for name, wanted in expectation.risks.items():
        assert_same(risks[name], wanted, name, 1e-7)
    total(y, *(risks[name] for name in expectation.risks)).backward()
    objective = total(expectation.prediction, *expectation.risks.values())
    gradients = expectation.reference.gradients(expectation.branches, objective)
    for name, parameter in wrapped.named_parameters():
        if name in gradients:
            gradient, wanted = (
                torch.zeros_like(parameter) if g is None else g for g in (parameter.grad, gradients[name])
            )
            torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-8, msg=f"gradient of {name} ".__add__)


def check_copies(model: Meant, wrapping: Wrapping) -> None:
    """Copies, pickles, states and files of it."""
    wrapped = wrapped_as(model, wrapping)
    expectation = Expectation(model, wrapping, wrapped)
    fresh = wrapped_as(model, wrapping)
    fresh.load_state_dict(wrapped.state_dict())
    twins = [copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped)), fresh]
    if not wrapping.kept and wrapping.where != "transforms":  # the table's are of classes that no file knows
        with TemporaryDirectory() as folder:
            save(wrapped, Path(folder) / "model")
            twins.append(load(Path(folder) / "model", build(model.case)).eval())
    for twin in twins:
        assert repr(twin._workbench.output) == repr(wrapped._workbench.output)
        _assert_answers(expectation, twin, twin, model)


def check_compile(model: Meant, wrapping: Wrapping) -> None:
    torch.compiler.reset()
    wrapped = wrapped_as(model, wrapping)
    expectation = Expectation(model, wrapping, wrapped)
    _assert_answers(expectation, wrapped, torch.compile(wrapped, backend="eager"), model)


def check_export(model: Meant, wrapping: Wrapping) -> None:
    wrapped = wrapped_as(model, wrapping)
    expectation = Expectation(model, wrapping, wrapped)
    args, _ = inputs(model.case)
    if model.case.name == "by_name":  # torch exports no dataclass that it was not told of, wrapped or not
        with torch.no_grad(), pytest.raises(RuntimeError, match="need to register a pytree"):
            torch.export.export(wrapped, args, {"return_risk": True})
        return
    with torch.no_grad():
        exported = torch.export.export(wrapped, args, {"return_risk": True}).module()
        with seeded():
            y, risk = exported(*args, return_risk=True)
    assert_same(y, expectation.prediction, "prediction")
    risks = _by_name(wrapped, risk)
    for name, wanted in expectation.risks.items():
        assert_same(risks[name], wanted, name, 1e-7)


def check_precision(model: Meant, wrapping: Wrapping, precision: str) -> None:
    """Risks in half precision are those of the rounded outputs of plain models, in float64."""
    dtype = PRECISIONS[precision]
    wrapped = wrapped_as(model, wrapping, dtype=dtype, strategy="loop")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        expectation = Expectation(model, wrapping, wrapped, dtype)
        y, risks = ask(wrapped, inputs(model.case, dtype))
        plain = call(build(model.case, torch.float32).to(dtype), inputs(model.case, dtype))
    for (path, leaf), (_, like) in zip(leaves(y), leaves(plain), strict=True):
        assert leaf.dtype == like.dtype, f"prediction {path}: {leaf.dtype}, not {like.dtype}"
        wanted = expectation.prediction[path].to(leaf.dtype)
        eps = torch.finfo(leaf.dtype).eps
        torch.testing.assert_close(leaf, wanted, rtol=2 * eps, atol=2 * eps, msg=f"prediction {path} ".__add__)
    for name, wanted in expectation.risks.items():
        for path, leaf in leaves(risks[name]):
            if path in wanted:
                assert leaf.dtype is torch.float32, f"{name} {path}: {leaf.dtype}"
                torch.testing.assert_close(
                    leaf.double(), wanted[path], rtol=1e-4, atol=2e-6, msg=f"{name} {path} ".__add__
                )
    if "vacuitic" in risks:
        assert_vacuitic(model, risks["vacuitic"], y)
        assert {leaf.dtype for _, leaf in leaves(risks["vacuitic"]) if leaf is not None} == {torch.float32}


CHECKS: dict[str, Callable[[Meant, Wrapping], None]] = {
    "eval": check_eval,
    "train": check_train,
    "copies": check_copies,
    **{precision: partial(check_precision, precision=precision) for precision in PRECISIONS},
    "compile": check_compile,
    "export": check_export,
}
SLOW = ("compile", "export")


def cells() -> list[Any]:
    """Every model under every wrapper in every check, each in its turn: all of them in an exhaustive run."""
    rows = []
    for i, name in enumerate(MEANT):
        for j, wrapper in enumerate(WRAPPERS):
            for k, check in enumerate(CHECKS):
                turn = i + j + 5 * k
                if EXHAUSTIVE or turn % (18 if check in SLOW else 3) == 0:
                    marks = [pytest.mark.slow] * (turn % 15 > 0 or check in SLOW)
                    rows.append(pytest.param(name, wrapper, check, id=f"{name}-{wrapper}-{check}", marks=marks))
    return rows


@pytest.mark.parametrize(("name", "wrapper", "check"), cells())
def test_a_meaning_under_a_wrapper(name: str, wrapper: str, check: str) -> None:
    if (name, wrapper) not in REFUSED:
        CHECKS[check](MEANT[name], WRAPPERS[wrapper])
        return
    with pytest.raises(ValueError, match=re.escape(REFUSED[name, wrapper])):
        ask(wrapped_as(MEANT[name], WRAPPERS[wrapper]), inputs(MEANT[name].case))


@pytest.mark.parametrize("name", MEANT)
def test_fit_trains_each_output_with_its_loss(name: str) -> None:
    model = MEANT[name]
    wrapped = wrapped_as(model, WRAPPERS["vote"], True)
    (x,), _ = inputs(model.case, rows=16)
    y = model.target(16)
    first = copy.deepcopy(wrapped.voters())
    history = fit(wrapped, (x, y), epochs=1, batch_size=16, validation=0, standardize=False, progress=False, seed=0)
    losses = [loss_by_hand(model, voter(x), y) for voter in first]
    torch.testing.assert_close(
        torch.tensor(history.records[0][1], dtype=torch.float64),
        torch.stack(losses).mean().detach(),
        rtol=1e-5,
        atol=1e-6,
    )
    moved = [
        not torch.equal(a, b) for a, b in zip(first[0].parameters(), wrapped.voters()[0].parameters(), strict=True)
    ]
    assert any(moved)


def loss_by_hand(model: Meant, output: Any, y: Any) -> Tensor:
    """torch's own losses, each output by what it is."""
    targets = (
        dict(leaves(y))
        if isinstance(y, dict)
        else {next(path for path, kind in model.leaves.items() if kind != "mean"): y}
    )
    losses = []
    for path, leaf in leaves(output):
        kind, target = model.leaves[path], targets.get(path)
        if target is None:
            continue
        if kind == "values":
            losses.append(F.mse_loss(leaf, target))
        elif kind == "binary":
            losses.append(F.binary_cross_entropy_with_logits(leaf, target))
        elif kind == "binary probs":
            losses.append(F.binary_cross_entropy(leaf, target))
        else:
            scores = leaf if kind[0] == "logits" else leaf.log()
            losses.append(F.nll_loss(scores.movedim(kind[1], 1).log_softmax(1), target))
    return torch.stack(losses).sum()


@pytest.mark.parametrize("name", MEANT)
def test_without_a_word_it_is_values_or_refused_never_softmax_of_the_wrong_dimension(name: str) -> None:
    """Scores that are said to be logits without their dimension: refused, if they have more than two dimensions or are one."""
    model = MEANT[name]
    kinds = [kind for kind in model.leaves.values() if kind != "mean"]
    wrapped = vote.Wrapper(2, output="logits")(build(model.case)).eval()
    args, _ = inputs(model.case)
    if name in ("values", "rows", "by_name", "labels", "label_probs"):  # six scores could be those of six classes
        wrapped(*args)
        return
    assert kinds
    with pytest.raises(ValueError, match=r"output="):
        wrapped(*args)


# ---- boxes, whose number is each branch's own
NO_BOXES = ("sculpt", "laplace", "neo", "augment")  # methods that are refused by name
NO_SUM = "prior: a prior function cannot be added to detected boxes"


def assert_detections(wrapped: Any, wrapping: Wrapping, *callees: Any) -> None:
    """Boxes, scores, labels and their risks are those that a plain loop over plain detectors matches; all that are called say so."""
    outputs = [
        branch.output for branch in Reference(DETECTOR, wrapping, wrapped).answers(wrapped.training, noise_of(wrapping))
    ]
    wanted = expected_detections(outputs, 0.5)
    alike = len({tuple(len(image["scores"]) for image in output) for output in outputs}) == 1
    assert alike == (wrapping.where == "activations"), (
        "where there is noise, branches should see different numbers of boxes"
    )
    args, kwargs = inputs(DETECTOR)
    for callee in (wrapped, *callees):
        with torch.no_grad(), seeded():
            y, risk = callee(*args, **kwargs, return_risk=True)
        for i, image in enumerate(wanted):
            detections = {
                **y[i],
                "spread": risk.epistemic[i]["boxes"],
                "seen": risk.epistemic[i]["seen"],
                **{name: risk[name][i]["scores"] for name in ("total", "aleatoric", "epistemic")},
            }
            assert detections.keys() == image.keys()
            for key, value in detections.items():
                like = torch.tensor(image[key], dtype=torch.float64).reshape(value.shape)
                message = f"{key} of image {i} ".__add__
                torch.testing.assert_close(value.double(), like, rtol=1e-6, atol=1e-6, msg=message)


def wrapped_detector(wrapping: Wrapping, training: bool = False) -> Any:
    args, _ = inputs(DETECTOR)  # an example shows the last layers of each output
    wrapper = wrapping.make("auto", noise_of(wrapping)).with_options(output=Detections(), example=args)
    with seeded(1):
        wrapped = wrapper(build(DETECTOR)).double().train(training)
    return wrapped if training else wrapping.trial(DETECTOR).fitted(wrapped, torch.float64)


@pytest.mark.parametrize("name", WRAPPERS)
def test_detections_are_those_of_plain_detectors_or_refused_by_name(name: str) -> None:
    wrapping = WRAPPERS[name]
    if "aleatoric" in wrapping.kinds or "vacuitic" in wrapping.kinds or name == "laplace" or "augment" in name:
        with pytest.raises(ValueError, match=f"({'|'.join(NO_BOXES)}) with output=Detections"):
            wrapped_detector(wrapping)
        return
    if wrapping.prior:
        with pytest.raises(ValueError, match=NO_SUM):
            wrapped_detector(wrapping)
        return
    wrapped = wrapped_detector(wrapping)
    fresh = wrapped_detector(wrapping)
    fresh.load_state_dict(wrapped.state_dict())
    assert_detections(wrapped, wrapping, copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped)), fresh)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vote", "vote_share1", "sample_weights", "swag"])
def test_detections_in_training_mode_and_compiled(name: str) -> None:
    wrapping = WRAPPERS[name]
    torch.compiler.reset()
    wrapped = wrapped_detector(wrapping)
    assert_detections(wrapped, wrapping, torch.compile(wrapped, backend="eager"))
    if name.startswith("vote"):
        assert_detections(wrapped_detector(wrapping, training=True), wrapping)
