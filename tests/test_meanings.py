"""Every meaning of an output under every wrapper: predictions and risks against plain models, in every way a model is used."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.conformance_reference import Reference
from helpers.conformance_table import NOISE, WRAPPERS, Wrapping, pairs
from helpers.meaning_models import MEANT, Meant, expected
from helpers.zoo import leaves
from torch import Tensor
from torch.nn import functional as F

from workbench import fit, load, save, vote
from workbench.testing.models import build, call, inputs
from workbench.testing.trial import ask

# quantiles and evidence are those of values; laplace has tests of its own
COLUMNS = [name for name in WRAPPERS if name not in ("sculpt_evidential", "vote_sculpt_quantiles", "laplace")]


def noise_of(wrapping: Wrapping) -> float:
    return NOISE if wrapping.where in ("weights", "inputs", "transforms") else 0.0


def wrapped_as(model: Meant, wrapping: Wrapping, training: bool = False) -> Any:
    plain = build(model.case, training=training)
    args, kwargs = inputs(model.case)
    wrapper = wrapping.make("auto", noise_of(wrapping)).with_options(output=model.output)
    if not kwargs:  # which shows the last layers of each output
        wrapper = wrapper.with_options(example=args)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        return wrapper(plain).train(training)


def assert_same(found: Any, wanted: dict[str, Tensor], what: str, tolerance: float = 1e-9) -> None:
    for path, leaf in leaves(found):
        if path not in wanted:
            assert leaf is None, f"{what} of {path}"
            continue
        where = f"{what} {path}"
        torch.testing.assert_close(leaf, wanted[path], rtol=tolerance, atol=tolerance, msg=where.__add__)


def assert_as_reference(model: Meant, wrapping: Wrapping, wrapped: Any, training: bool = False) -> None:
    reference = Reference(model.case, wrapping, wrapped)
    y, risks = ask(wrapped, inputs(model.case))
    # torch.cross_entropy and others under vmap round otherwise than one by one
    prediction, wanted = expected(model.leaves, reference.answers(training, noise_of(wrapping)))
    assert_same(y, prediction, "prediction")
    names = {name for risk in wanted.values() for name in risk} if risks else set()
    for name in names - ({"epistemic"} if wrapping.kinds == ("aleatoric",) else set()):
        assert_same(risks[name], {path: risk[name] for path, risk in wanted.items() if name in risk}, name, 1e-7)


@pytest.mark.parametrize(("name", "wrapper"), pairs(MEANT, COLUMNS, 4))
def test_branches_are_reduced_by_what_an_output_means(name: str, wrapper: str) -> None:
    model, wrapping = MEANT[name], WRAPPERS[wrapper]
    wrapped = wrapped_as(model, wrapping)
    with torch.no_grad():
        if "vacuitic" in wrapping.kinds:
            y = call(wrapped, inputs(model.case))
            assert_same(y, expected(model.leaves, _answers(model, wrapping, wrapped, predicting=True))[0], "prediction")
            return
        assert_as_reference(model, wrapping, wrapped)
        y, _ = ask(wrapped, inputs(model.case))
        assert_same(
            call(wrapped, inputs(model.case)),
            dict(_tensors(_plain_prediction(model, wrapping, wrapped, y))),
            "without risk",
            1e-6,
        )


def _answers(model: Meant, wrapping: Wrapping, wrapped: Any, predicting: bool) -> Any:
    """The branches of a call without risk: risk heads are not asked."""
    branches = Reference(model.case, wrapping, wrapped).answers(noise=noise_of(wrapping))
    return [branch for branch in branches if not (predicting and branch.place["sculpt"])]


def _plain_prediction(model: Meant, wrapping: Wrapping, wrapped: Any, y: Any) -> Any:
    if noise_of(wrapping) and wrapping.where != "transforms":  # other draws at another call
        torch.default_generator.manual_seed(0)
        return call(wrapped, inputs(model.case))
    prediction, _ = expected(model.leaves, _answers(model, wrapping, wrapped, predicting=True))
    return prediction


def _tensors(tree: Any) -> list[tuple[str, Any]]:
    return (
        list(tree.items())
        if isinstance(tree, dict) and all(isinstance(v, Tensor) for v in tree.values())
        else leaves(tree)
    )


@pytest.mark.parametrize(("name", "wrapper"), pairs(MEANT, ["vote", "sculpt", "vote_sculpt"], 3))
def test_in_training_mode_as_well(name: str, wrapper: str) -> None:
    assert_as_reference(MEANT[name], WRAPPERS[wrapper], wrapped_as(MEANT[name], WRAPPERS[wrapper], True), True)


@pytest.mark.parametrize(("name", "wrapper"), pairs(MEANT, ["vote", "vote_sculpt", "swag", "sample_weights"], 4))
def test_copies_and_files_keep_the_meaning(name: str, wrapper: str, tmp_path: Path) -> None:
    model = MEANT[name]
    wrapped = wrapped_as(model, WRAPPERS[wrapper])
    twins = [copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))]
    if wrapper in ("vote", "vote_sculpt"):
        save(wrapped, tmp_path / "model")
        twins.append(load(tmp_path / "model", build(model.case)).eval())
        assert repr(twins[-1]._workbench.output) == repr(wrapped._workbench.output)
    with torch.no_grad():
        y, risks = ask(wrapped, inputs(model.case))
        for twin in twins:
            z, others = ask(twin, inputs(model.case))
            assert_same(z, dict(leaves(y)), "prediction")
            assert_same(others["total"], dict(leaves(risks["total"])), "total")


@pytest.mark.slow
@pytest.mark.parametrize("name", MEANT)
def test_compiled_it_answers_as_eager(name: str) -> None:
    model = MEANT[name]
    wrapped = wrapped_as(model, WRAPPERS["vote"])
    args, _ = inputs(model.case)
    with torch.no_grad():
        y, risk = wrapped(*args, return_risk=True)
        z, other = torch.compile(wrapped, backend="eager")(*args, return_risk=True)
    assert_same(z, dict(leaves(y)), "prediction")
    assert_same(other.total, dict(leaves(risk.total)), "total")


@pytest.mark.parametrize("name", [name for name in MEANT if "probs" not in name])
@pytest.mark.parametrize("precision", ["autocast", "bfloat16"])
def test_risks_in_half_precision_are_computed_in_float32(name: str, precision: str) -> None:
    model, wrapping = MEANT[name], WRAPPERS["vote"]
    wrapped = wrapped_as(model, wrapping).float()
    args, _ = inputs(model.case, torch.float32)
    if precision == "bfloat16":
        wrapped, args = wrapped.bfloat16(), tuple(x.bfloat16() for x in args)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        _, risk = wrapped(*args, return_risk=True)
        answers = [dict(leaves(voter(*args))) for voter in wrapped.voters()]
    for path, leaf in leaves(risk.epistemic):
        kind = model.leaves[path]
        if isinstance(kind, str):
            continue
        probs = torch.stack([answer[path].float().movedim(kind[1], -1).softmax(-1) for answer in answers])
        entropy = torch.special.entr(probs).sum(-1)
        wanted = torch.special.entr(probs.mean(0)).sum(-1) - entropy.mean(0)
        assert leaf.dtype == torch.float32
        torch.testing.assert_close(leaf, wanted.clamp_min(0), rtol=1e-3, atol=1e-6)


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
    if name in ("by_name", "labels", "label_probs"):  # six scores could be those of six classes
        wrapped(*args)
        return
    assert kinds
    with pytest.raises(ValueError, match=r"output="):
        wrapped(*args)
