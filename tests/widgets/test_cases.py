"""Cases as HTML, nearest training cases and edited images: compared with closed forms, brute force and scipy."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from helpers.calibration_models import inputs, known, rng
from helpers.widget_cases import Outline, beams, pictures, voters
from scipy import ndimage
from torch import Tensor, nn

from workbench import compose, data, neo, sculpt, top_uncertain, vote
from workbench.plots import COLOURS
from workbench.widgets.common.cases import card, cases, format_number, grid, shares, split_bar, with_spread
from workbench.widgets.common.predictions import per_row, predict_cases, rankings
from workbench.widgets.explorer.editing import PICTURE_KNOBS, altered, nice_step
from workbench.widgets.explorer.neighbours import NeighbourSearch


# ---- what is said of a row
def test_a_case_says_prediction_risk_and_truth_with_units() -> None:
    d = beams()
    x = inputs(torch.tensor([[34.1234]]), torch.tensor([[4.126]])).float()
    (case,) = cases(d, x, predict_cases(known(), d, x), ["row 7"], torch.tensor([[31.0]]))
    assert (case.name, case.prediction, case.truth) == ("row 7", "34.1 ± 4.1 MPa", "31 MPa")
    assert dict(case.risks) == {"aleatoric": "4.13 MPa", "total": "4.13 MPa"}
    assert case.inputs[0] == ("load (N)", "34.1234")
    assert case.shares == {"aleatoric": 1.0}


@pytest.mark.parametrize(
    ("value", "spread", "text"),
    [
        (34.1234, 4.126, "34.1 ± 4.1"),
        (1234.5, 320.0, "1234 ± 320"),
        (0.5, 0.00123, "0.5000 ± 0.0012"),
        (2.0, 0.0, "2"),
        (2.5, math.inf, "2.5"),
    ],
)
def test_values_have_the_digits_that_their_risk_leaves_sure(value: float, spread: float, text: str) -> None:
    assert with_spread(value, spread) == text


def test_shares_are_those_of_variances_or_entropies() -> None:
    assert shares({"aleatoric": 3.0, "epistemic": 4.0, "vacuitic": 9.0}, "values") == {
        "aleatoric": 0.36,
        "epistemic": 0.64,
    }
    assert shares({"aleatoric": 0.75, "epistemic": 0.25, "total": 1.0}, "logits") == {
        "aleatoric": 0.75,
        "epistemic": 0.25,
    }
    assert shares({"aleatoric": 0.0, "epistemic": 0.0}, "values") == {}
    assert format_number(123456.7) == "123457"


def test_the_bar_is_as_wide_as_the_shares_and_has_vacuitic_risk_apart() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        wrapped = compose(vote.Wrapper(3), sculpt.Wrapper(), neo.Wrapper())(nn.Linear(2, 1)).eval()
    d = beams()
    wrapped.fit(d.train.x)
    x = d.test.x[:5]
    risk = wrapped(x, return_risk=True)[1]
    for i, case in enumerate(cases(d, x, predict_cases(wrapped, d, x), [f"row {i}" for i in range(5)])):
        strips = re.findall(r"width:([\d.]+)%;background-color:(#\w+)", split_bar(case))
        wanted = {
            COLOURS["aleatoric"]: 100 * (risk.aleatoric[i] / risk.total[i]) ** 2,
            COLOURS["epistemic"]: 100 * (risk.epistemic[i] / risk.total[i]) ** 2,
            COLOURS["vacuitic"]: 100 * (risk.vacuitic[i] / 4).clamp(0, 1),
        }
        assert {colour: float(width) for width, colour in strips} == pytest.approx(
            {colour: share.item() for colour, share in wanted.items()}, abs=0.06
        )


def test_classes_are_said_with_probabilities_and_mistakes_are_marked() -> None:
    d, wrapped = pictures(), voters().eval()
    x, y = d.test.x[:6], d.test.y[:6]
    probs = wrapped(x).softmax(-1)
    described = cases(d, x, predict_cases(wrapped, d, x), [str(i) for i in range(6)], y, "logits")
    assert d.classes is not None
    for i, case in enumerate(described):
        best = int(probs[i].argmax())
        assert case.prediction == f"{d.classes[best]}, {100 * probs[i, best]:.0f} %"
        assert case.wrong == (best != int(y[i]))
        assert ("wb-wrong" in card(case)) == case.wrong
    assert any(case.wrong for case in described)
    assert not all(case.wrong for case in described)


def test_a_classifier_wrapped_for_values_is_still_one() -> None:
    d = pictures()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        wrapped = vote.Wrapper(4)(nn.Sequential(nn.Flatten(), nn.Linear(36, 3))).eval()
    answers = predict_cases(wrapped, d, d.test.x)
    y, risk = wrapped(d.test.x, return_risk=True)
    assert torch.equal(answers.y, y.argmax(-1))
    torch.testing.assert_close(answers.risk["epistemic"], risk.square().mean(1).sqrt())


# ---- ranking
@pytest.mark.parametrize("by", ["aleatoric", "epistemic", "total", "confidence"])
def test_the_order_is_that_of_top_uncertain(by: str) -> None:
    d, wrapped = pictures(), voters()
    value = per_row(predict_cases(wrapped, d, d.test.x), by, d.test.y)
    wanted = top_uncertain(wrapped, d.test.x, k=30, by=by)
    torch.testing.assert_close(value[wanted.indices], wanted.values)


def test_errors_are_absolute_for_values_and_log_losses_for_classes() -> None:
    d = beams()
    error = per_row(predict_cases(known(), d, d.test.x), "error", d.test.y)
    torch.testing.assert_close(error.float(), torch.ones(30))
    d, wrapped = pictures(), voters().eval()
    wanted = nn.functional.cross_entropy(wrapped(d.test.x), d.test.y, reduction="none")
    torch.testing.assert_close(per_row(predict_cases(wrapped, d, d.test.x), "error", d.test.y), wanted.detach())


def test_a_risk_that_is_not_measured_is_refused_by_name() -> None:
    d = beams()
    answers = predict_cases(known(), d, d.test.x)
    assert rankings(answers) == ("aleatoric", "total", "error")
    with pytest.raises(
        ValueError, match="by='epistemic': the model measures no such risk; choose one of aleatoric, total, error"
    ):
        per_row(answers, "epistemic", d.test.y)


def test_models_of_several_outputs_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"the model gives values \[30, 2\] for 30 rows of beams; cases need \[30, 1\]"
    ):
        predict_cases(vote.Wrapper(2)(nn.Linear(2, 2)), beams(), beams().test.x)


# ---- pages
def test_a_grid_of_a_table_is_a_table_of_the_highest_risks() -> None:
    d, wrapped = beams(), known()
    page = grid(wrapped, d, by="aleatoric", k=4, caption="a < b")
    outline = Outline(page)
    rows = top_uncertain(wrapped, d.test.x, k=4, by="aleatoric").indices.tolist()
    assert [word for word in outline.words if word.startswith("row ")] == [f"row {row}" for row in rows]
    assert {"a < b", "load (N)", "raw <1>", "prediction", "true", "risk by cause"} <= set(outline.words)
    assert not {tag for tag, _ in outline.tags} & {"script", "link", "iframe"}
    assert not [value for _, attrs in outline.tags for value in attrs.values() if value and "http" in value]


def test_a_grid_of_pictures_has_one_picture_for_each_row_with_words_for_it() -> None:
    import base64
    import io

    from PIL import Image

    d = pictures()
    outline = Outline(grid(voters(), d, [4, 7, 1]))
    images = [attrs for tag, attrs in outline.tags if tag == "img"]
    assert [attrs["alt"] for attrs in images] == ["row 4", "row 7", "row 1"]
    source = images[1]["src"]
    assert source is not None
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(source.split(",")[1]))), dtype=float)
    low, high = d.train.x.min(), d.train.x.max()
    wanted = ((d.test.x[7, 0] - low) / (high - low)).clamp(0, 1) * 255
    np.testing.assert_allclose(pixels, wanted, atol=0.51)
    bars = [attrs["aria-label"] or "" for _, attrs in outline.tags if attrs.get("role") == "img"]
    assert len(bars) == 3
    assert all(label.startswith("share of the entropy: aleatoric") for label in bars)


def test_the_plain_baseline_has_no_bar() -> None:
    page = grid(compose()(nn.Linear(2, 1)), beams(), [0, 1])
    assert "risk by cause" not in page
    Outline(page)


# ---- neighbours
def test_neighbours_in_inputs_are_those_of_brute_force() -> None:
    d = data.load("diabetes")
    search = NeighbourSearch(vote.Wrapper(2)(nn.Linear(10, 1)), d.train.x, d.train.y)
    scale = d.train.x.double().std(0, correction=0)
    for row in (0, 5):
        neighbours = search.of(d.test.x[row], 4)
        distance = ((d.train.x - d.test.x[row]) / scale).norm(dim=1)
        wanted = distance.sort()
        assert neighbours.indices.tolist() == wanted.indices[:4].tolist()
        torch.testing.assert_close(neighbours.distances, wanted.values[:4])
        assert torch.equal(neighbours.targets, d.train.y[neighbours.indices])


def test_neighbours_in_features_are_near_before_the_last_layer() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))
    d, wrapped = beams(), sculpt.Wrapper(n_layers=1)(model)
    wrapped.scale(x_mean=torch.ones(2), x_scale=torch.full((2,), 3.0), y_mean=None, y_scale=None)
    hidden = model[1](model[0]((d.train.x - 1) / 3)).detach().double()
    scale, mean = hidden.std(0, correction=0), hidden.mean(0)
    case = model[1](model[0]((d.test.x[:1] - 1) / 3)).detach().double()
    wanted = ((hidden - mean) / scale - (case - mean) / scale).norm(dim=1).sort()
    hooks = [len(module._forward_pre_hooks) for module in wrapped.modules()]
    neighbours = NeighbourSearch(wrapped, d.train.x, d.train.y, "features").of(d.test.x[0], 3)
    assert neighbours.indices.tolist() == wanted.indices[:3].tolist()
    torch.testing.assert_close(neighbours.distances, wanted.values[:3], rtol=1e-4, atol=1e-6)
    assert [len(module._forward_pre_hooks) for module in wrapped.modules()] == hooks


def test_a_model_without_linear_layers_has_no_features() -> None:
    d = pictures()
    model = sculpt.Wrapper(n_layers=1)(nn.Sequential(nn.Conv2d(1, 3, 6), nn.Flatten()))
    with pytest.raises(ValueError, match="needs a linear layer, and Sequential has none"):
        NeighbourSearch(model, d.train.x, d.train.y, "features")
    with pytest.raises(ValueError, match="'inputs' or 'features'; found 'pixels'"):
        NeighbourSearch(model, d.train.x, d.train.y, "pixels")


# ---- pictures
def picture() -> Tensor:
    return torch.rand(2, 9, 12, generator=rng(5))


def test_no_change_changes_nothing() -> None:
    neutral: dict[str, Any] = {name: knob.neutral for name, knob in PICTURE_KNOBS.items()}
    assert torch.equal(altered(picture(), (0.0, 1.0), neutral), picture())


def test_blur_is_that_of_scipy() -> None:
    blurred = altered(picture(), (0.0, 1.0), {"blur": 1.3})
    wanted = ndimage.gaussian_filter(picture().double().numpy(), (0, 1.3, 1.3), mode="nearest", radius=(0, 4, 4))
    np.testing.assert_allclose(blurred, wanted, atol=1e-5)


@pytest.mark.parametrize("angle", [90, 30, -120])
def test_turning_is_that_of_scipy_where_nothing_comes_from_outside(angle: float) -> None:
    y, x = np.mgrid[:41, :41] - 20.0
    smooth = np.exp(-((x - 4) ** 2 + (y + 6) ** 2) / 30)
    turned = altered(torch.tensor(smooth)[None], (0.0, 1.0), {"rotation": angle})[0]
    wanted = ndimage.rotate(smooth, angle, reshape=False, order=3)
    np.testing.assert_allclose(turned, wanted, atol=0.02)


def test_turning_keeps_the_angle_in_pictures_that_are_not_square() -> None:
    wide = torch.zeros(1, 21, 41)
    wide[0, 10, 15:26] = 1.0
    turned = altered(wide, (0.0, 1.0), {"rotation": 90})
    assert turned[0, 6:15, 20].min() > 0.9
    assert turned.sum() == pytest.approx(11, abs=0.5)


def test_light_contrast_noise_and_erasing() -> None:
    x, limits = picture(), (0.0, 1.0)
    torch.testing.assert_close(altered(x, limits, {"brightness": 0.3}), (x + 0.3).clamp(0, 1))
    torch.testing.assert_close(altered(x, limits, {"contrast": 0.5}), x.mean() + 0.5 * (x - x.mean()))
    once, twice = (altered(x, (-9.0, 9.0), {"noise": share}) - x for share in (0.01, 0.02))
    torch.testing.assert_close(2 * once, twice, rtol=1e-3, atol=1e-5)
    assert once.std().item() == pytest.approx(0.01 * 18, rel=0.15)
    erased = altered(x, limits, {"erase": 0.5, "across": 0.0, "down": 1.0})
    changed = erased != x
    assert changed[:, 7:, :2].all()
    assert not changed[:, :7].any()
    assert not changed[:, :, 2:].any()


@pytest.mark.parametrize(("width", "step"), [(0.034, 0.02), (1.0, 1.0), (0.5, 0.5), (730.0, 500.0), (9e-8, 5e-8)])
def test_steps_are_round(width: float, step: float) -> None:
    assert nice_step(width) == step
