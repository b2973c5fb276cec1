"""Calibration and selection of maps, tokens and several targets: equal to those of the flat list of labelled positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.calibration_models import rng
from torch import Tensor, nn
from torch.nn import functional as F

from workbench import compose, neo, sculpt, vote
from workbench.calibration import calibrate, selective, top_uncertain
from workbench.calibration.scaling import fit_temperature
from workbench.outputs import Logits, Probs

N, CLASSES = 12, 4


class Tokens(nn.Linear):
    """Scores [n, t, classes]."""


def wrapped(kind: str, *more: Any, form: type = Logits) -> Any:
    """A vote of maps (classes second) or tokens (classes last)."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        scores: nn.Module = nn.Conv2d(2, CLASSES, 1) if kind == "maps" else Tokens(2, CLASSES)
        dim = 1 if kind == "maps" else -1
        scores = scores if form is Logits else nn.Sequential(scores, nn.Softmax(dim))
        return compose(vote.Wrapper(3, output=form(dim)), *more)(scores).eval()


def rows(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, class numbers, and which there are; the last row has none at all."""
    shape = (5, 5) if kind == "maps" else (6,)
    x = 2 * torch.randn(N, 2, *shape, generator=rng(0))
    x = x if kind == "maps" else x.movedim(1, -1)
    y = torch.randint(0, CLASSES, (N, *shape), generator=rng(1))
    known = torch.rand(N, *shape, generator=rng(2)) < 0.7
    known[-1] = False
    return x, y.where(known, -100), known


def of_voters(model: Any, x: Tensor, kind: str) -> Tensor:
    """The mean probability of the voters [n, ..., classes], by a plain loop."""
    with torch.no_grad():
        answers = torch.stack([voter(x) for voter in model.voters()])
    return answers.movedim(2 if kind == "maps" else -1, -1).softmax(-1).mean(0)


KINDS = pytest.mark.parametrize("kind", ["maps", "tokens"])


@KINDS
@pytest.mark.parametrize("form", [Logits, Probs])
def test_the_temperature_is_that_of_the_positions_with_a_class(kind: str, form: type) -> None:
    model, (x, y, known) = wrapped(kind, form=form), rows(kind)
    calibrated: Any = calibrate(model, (x, y), batch_size=5)
    p = of_voters(wrapped(kind), x, kind)
    assert abs(calibrated.temperature.item() - 1) > 0.05
    assert calibrated.temperature.item() == pytest.approx(fit_temperature(p[known].log(), y[known]), rel=1e-4)
    expected = (p.log() / calibrated.temperature).softmax(-1)
    with torch.no_grad():
        scores, risk = calibrated(x, return_risk=True)
    probs = scores.movedim(1 if kind == "maps" else -1, -1)
    assert scores.shape == model(x).shape
    torch.testing.assert_close(probs.softmax(-1) if form is Logits else probs, expected)
    torch.testing.assert_close(risk.total, torch.special.entr(expected).sum(-1))
    torch.testing.assert_close(risk.total, risk.aleatoric + risk.epistemic)
    sets = calibrated.predict_set(x, 0.5)
    assert sets.shape == expected.shape
    assert bool(((expected * sets).sum(-1) >= 0.5 - 1e-5).all())


@KINDS
@pytest.mark.parametrize("by", ["total", "epistemic", "confidence"])
def test_selection_of_positions_is_that_of_a_flat_list_of_those_with_a_class(kind: str, by: str) -> None:
    model, (x, y, known) = wrapped(kind), rows(kind)
    chosen = selective(model, (x, y), by, per="position", batch_size=5)
    p = of_voters(model, x, kind)
    with torch.no_grad():
        risk = 1 - p.amax(-1) if by == "confidence" else model(x, return_risk=True)[1][by]
    wrong = (p.argmax(-1) != y).float()
    order = risk[known].argsort(stable=True)
    torch.testing.assert_close(chosen.risk, risk[known][order])
    assert len(chosen.risk) == int(known.sum())
    assert chosen.error.mean() == pytest.approx(wrong[known].mean().item())
    threshold = chosen.threshold(coverage=0.5)
    decision = chosen.predictor(coverage=0.5)(x)
    assert decision.kept.shape == y.shape
    torch.testing.assert_close(decision.risk, risk)
    assert int((decision.risk[known] <= threshold).sum()) == -(-len(chosen.risk) // 2)
    with pytest.raises(ValueError, match="positions of a row are not"):
        chosen.threshold(risk=0.9, confidence=0.9)


@KINDS
def test_selection_of_rows_counts_the_errors_of_positions_with_a_class(kind: str) -> None:
    model, (x, y, known) = wrapped(kind), rows(kind)
    chosen = selective(model, (x, y))
    with torch.no_grad():
        total = model(x, return_risk=True)[1].total
    p = of_voters(model, x, kind)
    errors = [(p[i].argmax(-1) != y[i])[known[i]].float().mean() for i in range(N - 1)]  # the last row has no class
    risk = total.flatten(1).square().mean(1).sqrt()[: N - 1]
    order = risk.argsort()
    torch.testing.assert_close(chosen.risk, risk[order])
    torch.testing.assert_close(chosen.error, torch.stack(errors)[order])
    assert chosen.predictor(coverage=1.0)(x).kept.shape == (N,)


def test_vacuitic_risk_of_positions_is_no_number_of_a_row() -> None:
    model, (x, y, known) = wrapped("maps", neo.Wrapper()), rows("maps")
    model.fit(x)
    for refused in (
        lambda: selective(model, (x, y), "vacuitic"),
        lambda: top_uncertain(model, x, 3, "vacuitic"),
    ):
        with pytest.raises(ValueError, match=r"one number per position.*\n?.*per='image'"):
            refused()
    chosen = selective(model, (x, y), "vacuitic", per="position")
    with torch.no_grad():
        risk = model(x, return_risk=True)[1].vacuitic
    assert bool((risk < 0).any())
    torch.testing.assert_close(chosen.risk, risk[known].sort().values)

    whole = wrapped("maps", neo.Wrapper(per="image"))
    whole.fit(x)
    with torch.no_grad():
        images = whole(x, return_risk=True)[1].vacuitic
    torch.testing.assert_close(selective(whole, (x, y), "vacuitic").risk, images[: N - 1].sort().values)
    with pytest.raises(ValueError, match=r"risk has shape \[12\], and the targets \[12, 5, 5\]"):
        selective(whole, (x, y), "vacuitic", per="position")


def test_several_targets_are_selected_one_by_one() -> None:
    model = sculpt.Wrapper()(nn.Linear(2, 3)).eval()
    x, y = torch.randn(30, 2, generator=rng(3)), torch.randn(30, 3, generator=rng(4))
    chosen = selective(model, (x, y), per="position")
    with torch.no_grad():
        prediction, risk = model(x, return_risk=True)
    order = risk.flatten().argsort(stable=True)
    torch.testing.assert_close(chosen.error, (prediction - y).abs().flatten()[order])
    torch.testing.assert_close(chosen.predictor(coverage=0.5)(x).risk, risk)


def test_an_error_of_ones_own_has_the_shape_of_what_is_selected() -> None:
    model, (x, y, known) = wrapped("maps"), rows("maps")

    def surprise(scores: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(scores.movedim(-1, 1), target, reduction="none")

    chosen = selective(model, (x, y), per="position", error=surprise)
    log_p = of_voters(model, x, "maps").log()
    expected = -log_p[known].gather(1, y[known][:, None])[:, 0]
    assert chosen.error.sum() == pytest.approx(expected.sum().item(), rel=1e-4)
    with pytest.raises(ValueError, match=r"one number for each position, \[12, 5, 5\]"):
        selective(model, (x, y), per="position", error=lambda scores, target: target[:, 0, 0] * 0.0)
    with pytest.raises(ValueError, match="per must be 'row' or 'position'; found 'pixel'"):
        selective(model, (x, y), per="pixel")  # type: ignore[arg-type]


@KINDS
def test_conformal_sets_of_positions_are_refused_and_rows_without_a_class_left_out(kind: str) -> None:
    x, y, _ = rows(kind)
    with pytest.raises(ValueError, match="rows are exchangeable, but not the pixels, tokens or labels of a row"):
        calibrate(wrapped(kind), (x, y), "conformal")
    model = vote.Wrapper(3, output="logits")(nn.Linear(2, 3)).eval()
    x, y = torch.randn(40, 2, generator=rng(5)), torch.randint(0, 3, (40,), generator=rng(6))
    y[30:] = -100
    some: Any = calibrate(model, (x, y), "conformal", score="lac")
    fewer: Any = calibrate(model, (x[:30], y[:30]), "conformal", score="lac")
    torch.testing.assert_close(some.scores, fewer.scores, rtol=0, atol=0)
    with pytest.raises(ValueError, match="no row, pixel or token has a class"):
        calibrate(model, (x, torch.full((40,), -100)))
