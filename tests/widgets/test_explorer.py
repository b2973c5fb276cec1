"""`Explorer` without a browser: ranking, cases, edits, neighbours, abstention and bad input."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.calibration_models import known
from helpers.widget_cases import beams, pictures, voters
from torch import nn

from workbench import compose, data, neo, sample, sculpt, selective, top_uncertain, vote
from workbench.data import Split
from workbench.errors import NotFittedError
from workbench.widgets import Explorer
from workbench.widgets.common.pictures import new_figure, paint
from workbench.widgets.common.predictions import Predictions
from workbench.widgets.explorer.editing import Knob
from workbench.widgets.explorer.landscape import POINTS, draw_along, line
from workbench.widgets.explorer.scene import SavedPage, draw_edit


def ensemble(inputs: int = 2) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return compose(vote.Wrapper(3), sculpt.Wrapper())(
            nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, 1))
        )


@pytest.fixture
def explorer() -> Explorer:
    return Explorer(ensemble(), beams())


# ---- ranking
def test_it_begins_with_the_case_of_highest_epistemic_risk(explorer: Explorer) -> None:
    wanted = top_uncertain(explorer.wrapped, explorer.data.test.x, k=30, by="epistemic")
    assert explorer.by == "epistemic"
    assert torch.equal(explorer.ranked, wanted.indices)
    torch.testing.assert_close(explorer.values, wanted.values)
    assert explorer.row == int(wanted.indices[0])
    assert explorer.select(explorer.ranked[3]).row == int(wanted.indices[3])
    explorer.select(wanted.indices[0])


def test_cases_are_ranked_by_any_risk_and_by_the_error(explorer: Explorer) -> None:
    assert explorer.rankings == ("aleatoric", "epistemic", "total", "error")
    test = explorer.data.test
    for by in ("aleatoric", "total"):
        explorer.by = by
        assert torch.equal(explorer.ranked, top_uncertain(explorer.wrapped, test.x, k=30, by=by).indices)
    explorer.by = "error"
    error = (explorer.wrapped.eval()(test.x) - test.y).abs()[:, 0]
    assert torch.equal(explorer.ranked, error.sort(descending=True, stable=True).indices)


def test_steps_go_along_the_ranking_and_stop_at_its_ends(explorer: Explorer) -> None:
    ranked = explorer.ranked.tolist()
    assert [explorer.step().row for _ in range(3)] == ranked[1:4]
    assert explorer.step(-1).row == ranked[2]
    assert explorer.select(ranked[-1]).step().row == ranked[-1]
    assert explorer.step(-100).row == ranked[0]


def test_more_rows_than_are_asked_for_are_drawn_always_the_same() -> None:
    few = Explorer(ensemble(), beams(), max_rows=10)
    assert len(few.ranked) == len(set(few.ranked.tolist())) == 10
    assert torch.equal(few.rows, Explorer(ensemble(), beams(), max_rows=10).rows)
    risk = ensemble().eval()(beams().test.x[few.rows], return_risk=True)[1].epistemic[:, 0]
    assert torch.equal(few.ranked, few.rows[risk.argsort(descending=True)])
    other = next(row for row in range(30) if row not in few.rows.tolist())
    assert few.select(other).row == other
    assert few.step().row == int(few.ranked[0])


# ---- one case
def test_prediction_and_risk_are_those_of_the_model(explorer: Explorer) -> None:
    explorer.select(4)
    y, risk = explorer.wrapped.eval()(explorer.data.test.x[4:5], return_risk=True)
    torch.testing.assert_close(explorer.prediction, y[0])
    assert {name: explorer.risk[name] for name in explorer.risk} == pytest.approx({n: risk[n].item() for n in risk})
    assert torch.equal(explorer.target, explorer.data.test.y[4])


def test_an_edit_asks_the_model_again_and_reset_undoes_it(explorer: Explorer) -> None:
    before = explorer.select(4).prediction
    row = explorer.data.test.x[4].clone()
    explorer.edit(load=2.5).edit({1: -1.0})
    x = torch.tensor([[2.5, -1.0]])
    assert torch.equal(explorer.x, x[0])
    assert explorer.edits == {"load": 2.5, "raw <1>": -1.0}
    y, risk = explorer.wrapped.eval()(x, return_risk=True)
    torch.testing.assert_close(explorer.prediction, y[0])
    assert explorer.risk.epistemic == pytest.approx(risk.epistemic.item())
    assert torch.equal(explorer.data.test.x[4], row)
    assert torch.equal(explorer.reset().prediction, before)
    assert explorer.edits == {}


def test_an_edit_back_to_the_value_of_the_case_is_none(explorer: Explorer) -> None:
    explorer.edit(load=2.5).edit(load=explorer.data.test.x[explorer.row, 0].item())
    assert explorer.edits == {}
    assert explorer.case().prediction == explorer.case(edited=True).prediction


def test_pictures_are_edited_and_classes_are_probabilities() -> None:
    wrapped = voters()
    explorer = Explorer(wrapped, pictures()).edit(erase=1.0)
    x = explorer.data.train.x
    grey = torch.full((1, 1, 6, 6), ((x.min() + x.max()) / 2).item())
    assert torch.equal(explorer.x, grey[0])
    torch.testing.assert_close(explorer.prediction, wrapped.eval()(grey).softmax(-1)[0])
    assert explorer.space == "features"


def test_the_same_noise_answers_a_case_and_its_edits() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        wrapped = sample.Wrapper()(nn.Sequential(nn.Linear(2, 30), nn.ReLU(), nn.Linear(30, 1)))
    explorer = Explorer(wrapped, beams()).select(2)
    before = explorer.prediction
    explorer.edit(load=9.0)
    assert not torch.equal(explorer.prediction, before)
    explorer.edit(load=explorer.data.test.x[2, 0].item() + 1e-6)
    torch.testing.assert_close(explorer.prediction, before, rtol=1e-4, atol=1e-4)


def test_neighbours_follow_the_edits(explorer: Explorer) -> None:
    target = explorer.data.train.x[7]
    explorer.edit({0: target[0].item(), 1: target[1].item()})
    assert explorer.neighbours.indices[0] == 7
    assert explorer.neighbours.distances[0] == pytest.approx(0, abs=1e-6)
    explorer.space = "features"
    assert explorer.neighbours.indices[0] == 7
    assert len(explorer.neighbours.targets) == 5


# ---- abstaining
@pytest.mark.parametrize("by", ["epistemic", "total"])
def test_abstaining_is_that_of_selective(by: str) -> None:
    explorer = Explorer(ensemble(), beams(), by=by, coverage=0.5)
    chosen = selective(explorer.wrapped, explorer.data.test, by)
    assert explorer.threshold == pytest.approx(chosen.threshold(coverage=0.5))
    _, kept, risk = chosen.predictor(coverage=0.5)(explorer.data.test.x)
    assert set(explorer.abstained.tolist()) == set((~kept).nonzero()[:, 0].tolist())
    assert torch.equal(explorer.abstained, explorer.ranked[:15])
    error = (explorer.wrapped.eval()(explorer.data.test.x) - explorer.data.test.y).abs()[:, 0]
    assert explorer.error == pytest.approx((error[kept].mean().item(), error.mean().item()))
    assert risk.dim() == 1
    explorer.coverage = 1
    assert len(explorer.abstained) == 0
    assert explorer.error[0] == explorer.error[1]


def test_for_classes_the_error_is_the_share_of_wrong_ones() -> None:
    explorer = Explorer(voters(), pictures(), by="confidence", coverage=0.7)
    wrong = explorer.wrapped.eval()(explorer.data.test.x).argmax(-1) != explorer.data.test.y
    kept = torch.ones(30, dtype=torch.bool)
    kept[explorer.abstained] = False
    assert int(kept.sum()) == 21
    assert explorer.error == pytest.approx((wrong[kept].float().mean().item(), wrong.float().mean().item()))
    assert explorer.summary().startswith("answers 21 of 30 cases (70 %)")


# ---- nothing is changed
def test_model_data_and_random_state_stay_as_they_are(explorer: Explorer) -> None:
    wrapped, d = ensemble().train(), beams()
    wrapped[0].eval()
    modes = [module.training for module in wrapped.modules()]
    state, checksum = copy.deepcopy(wrapped.state_dict()), d.checksum
    random = torch.get_rng_state()
    fresh = Explorer(wrapped, d)
    fresh.select(3).edit(load=1.0)
    fresh.by, fresh.coverage = "total", 0.3
    assert fresh.abstained.numel()
    assert fresh.neighbours.indices.numel()
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in wrapped.modules()] == modes
    assert replace(d, split=1).checksum == checksum
    for name, value in wrapped.state_dict().items():
        assert name in state
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, state[name])


# ---- bad input
def test_models_that_cannot_be_explored_are_refused() -> None:
    with pytest.raises(TypeError, match="Linear is not wrapped"):
        Explorer(nn.Linear(2, 1), beams())
    with pytest.raises(NotFittedError, match="neo has seen no training data yet"):
        Explorer(neo.Wrapper()(nn.Linear(2, 1)).eval(), beams())
    with pytest.raises(ValueError, match=r"the model gives values \[30, 2\] for 30 rows of beams"):
        Explorer(vote.Wrapper(2)(nn.Linear(2, 2)), beams())

    class Pair(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x)
            return {"y": y, "z": y}

    with pytest.raises(TypeError, match="the model gives a dict"):
        Explorer(vote.Wrapper(2)(Pair(2, 1)), beams())


def test_data_that_cannot_be_explored_are_refused() -> None:
    d = beams()
    broken = d.test.x.clone()
    broken[[3, 8], 1] = float("nan")
    with pytest.raises(ValueError, match="x of 2 of 30 test rows is NaN or infinite, first in row 3"):
        Explorer(known(), replace(d, test=Split(broken, d.test.y)))
    with pytest.raises(ValueError, match="test rows"):
        Explorer(known(), replace(d, test=d.test.take(torch.arange(0))))
    with pytest.raises(TypeError, match="found int"):
        Explorer(known(), 3)
    x = torch.rand(60, 1, 2, 2, 2)
    with pytest.raises(ValueError, match="cases must be table rows or pictures"):
        Explorer(known(), (x, torch.arange(60) % 2))


def test_arguments_out_of_range_are_refused_and_change_nothing(explorer: Explorer) -> None:
    row, prediction = explorer.row, explorer.prediction
    for act, kind, message in (
        (lambda: Explorer(known(), beams(), by="epistemic"), ValueError, "ranked by aleatoric, total, error"),
        (lambda: Explorer(known(), beams(), coverage=0), ValueError, "above 0 and at most 1"),
        (lambda: Explorer(known(), beams(), space="pixels"), ValueError, "'inputs' or 'features'"),
        (lambda: Explorer(known(), beams(), k=0), ValueError, "k must be a whole number"),
        (lambda: explorer.select(30), ValueError, "from 0 to 29; found 30"),
        (lambda: explorer.edit(weight=1.0), KeyError, "there is no 'weight' to edit; there are load, raw <1>"),
        (lambda: explorer.edit(load=float("nan")), ValueError, "load: found nan"),
        (lambda: explorer.edit(load="heavy"), ValueError, "load: found 'heavy'; give a finite number"),
        (lambda: explorer.edit({1: 2.0, "weight": 1.0}), KeyError, "weight"),
        (lambda: setattr(explorer, "by", "vacuitic"), ValueError, "by='vacuitic'"),
        (lambda: setattr(explorer, "coverage", 1.5), ValueError, "found 1.5"),
    ):
        with pytest.raises(kind, match=message.replace("(", r"\(").replace("?", r"\?")):
            act()
    assert (explorer.row, explorer.by, explorer.coverage, explorer.edits) == (row, "epistemic", 0.8, {})
    assert torch.equal(explorer.prediction, prediction)


@pytest.mark.filterwarnings("ignore:the risk is NaN")
def test_an_edit_that_the_model_does_not_survive_is_undone() -> None:
    class Root(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + x[:, :1].clamp_min(-20) ** 3 / (x[:, :1] < 1e4)

    explorer = Explorer(vote.Wrapper(2)(Root(2, 1)), beams()).edit(load=2.0)
    with pytest.raises(ValueError, match="NaN or infinite in 1 of 1 rows"):
        explorer.edit(load=1e6)
    assert explorer.edits == {"load": 2.0}


def test_the_plain_baseline_is_ranked_by_its_error_and_cannot_abstain() -> None:
    explorer = Explorer(compose()(nn.Linear(2, 1)), beams())
    assert explorer.rankings == ("error",)
    assert explorer.risk.names() == ()
    with pytest.raises(ValueError, match="the plain baseline measures no risk"):
        _ = explorer.abstained


def test_names_and_pairs_are_data_too() -> None:
    explorer = Explorer(ensemble(10), "diabetes")
    assert len(explorer.ranked) == len(data.load("diabetes").test)
    x = torch.linspace(-1, 1, 50)[:, None] * torch.ones(2)
    assert Explorer(ensemble(), (x, x[:, 0])).edit(x1=0.5).edits == {"x1": 0.5}


@pytest.mark.parametrize("size", [(5.4, 3.4), (15 / 3, 3.6)], ids=["tab", "snapshot"])
@pytest.mark.parametrize(
    "names", [("aleatoric", "epistemic", "total", "vacuitic"), ("epistemic", "vacuitic"), ("total",)]
)
def test_names_of_classes_stand_between_the_curves_and_the_strip(size: tuple[float, float], names: Any) -> None:
    values = torch.linspace(0, 1, POINTS)
    risk = {name: torch.exp(-((values - 0.5) ** 2) / 0.01) for name in names}
    answers = Predictions((values > 0.5).long(), risk, torch.ones(POINTS, 3) / 3)
    figure = new_figure(*size)
    ax = paint(figure.subplots())
    draw_along(ax, pictures(), "logits", Knob("brightness", "brightness", 0, 1, 0.1, ""), values, answers)
    figure.draw_without_rendering()
    assert [text.get_text() for text in ax.texts] == ["top", "middle"]
    boxes = [text.get_window_extent() for text in ax.texts]
    zero, strip = (float(at.transform((0, where))[1]) for at, where in ((ax.transData, 0), (ax.transAxes, 0.04)))
    assert max(box.y1 for box in boxes) < zero - 1  # a line is 1.8 points wide
    assert min(box.y0 for box in boxes) > (strip if "vacuitic" in names else ax.get_window_extent().y0)


def test_the_plane_of_two_inputs_names_the_classes() -> None:
    moons = data.toy.moons(n_train=100, n_test=50)
    ax = paint(new_figure(5.4, 3.4).subplots())
    draw_edit(ax, Explorer(vote.Wrapper(2, output="logits")(nn.Linear(2, 2)), moons))
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["outer", "inner"]


@pytest.mark.slow
def test_what_a_saved_notebook_shows_names_the_ranking_as_the_axes_do(explorer: Explorer) -> None:
    for by, label in (("epistemic", "epistemic risk (MPa)"), ("error", "error |prediction − true| (MPa)")):
        explorer.by = by
        assert f"of highest {label}" in SavedPage(explorer)()


def test_the_line_at_the_case_ends_below_the_legend() -> None:
    ax = new_figure(4, 3).subplots()
    ax.plot([0, 1], [0, 1], label="prediction")

    def ends(x: float) -> tuple[float, float]:
        """The upper and the lower end in shares of the height of the figure, from its bottom."""
        top, height = re.findall(r"(?:top|height):([\d.]+)%", line(ax, x))
        return 1 - float(top) / 100, 1 - (float(top) + float(height)) / 100

    box = ax.get_position()
    assert ends(0.1) == pytest.approx((box.y1, box.y0), abs=1e-3)
    legend = ax.legend(loc="upper left").get_window_extent().transformed(ax.figure.transFigure.inverted())
    assert ends(0.1) == pytest.approx((legend.y0, box.y0), abs=1e-3)
    assert ends(0.95) == pytest.approx((box.y1, box.y0), abs=1e-3)
