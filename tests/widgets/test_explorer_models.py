"""Several models in one `Explorer`: what stays when another is selected, and refusals by name."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from helpers.calibration_models import known
from helpers.widget_cases import Outline, beams, pictures, voters
from test_explorer import ensemble
from torch import nn

from workbench import compose, neo, sculpt, vote
from workbench.errors import NotFittedError
from workbench.widgets import Explorer
from workbench.widgets.common.predictions import predict_cases
from workbench.widgets.explorer import models as models_module

pytest.importorskip("ipywidgets")


def pair() -> dict[str, Any]:
    """A model that measures two risks by cause, and one that measures noise alone."""
    return {"both": ensemble(), "noise": known().float()}


@pytest.fixture
def explorer() -> Explorer:
    return Explorer(pair(), beams())


def view(explorer: Explorer) -> Any:
    assert explorer.widget is not None
    return explorer._view


# ---- without widgets
def test_each_model_is_explored_as_it_would_be_alone(explorer: Explorer) -> None:
    models = explorer.models
    assert list(models) == ["both", "noise"]
    assert explorer.model == "both"
    for name, model in models.items():
        explorer.model = name
        explorer.by = "aleatoric"
        alone = Explorer(model, explorer.data, by="aleatoric").select(explorer.row)
        assert alone.model == "model"
        assert explorer.wrapped is model
        assert explorer.rankings == alone.rankings
        assert torch.equal(explorer.ranked, alone.ranked)
        assert torch.equal(explorer.values, alone.values)
        assert torch.equal(explorer.prediction, alone.prediction)
        assert explorer.risk == alone.risk
        assert torch.equal(explorer.abstained, alone.abstained)
        assert explorer.error == alone.error
        assert torch.equal(explorer.importance.mean["error"], alone.importance.mean["error"])
        assert torch.equal(explorer.neighbours.indices, alone.neighbours.indices)


def test_row_edits_selection_and_ranking_stay_with_another_model(explorer: Explorer) -> None:
    explorer.by = "total"
    explorer.select(7).edit(load=1.5)
    explorer.brush(total=(explorer.values[9].item(), float("inf")))
    doubted = explorer.selection
    explorer.selections["doubted by both"] = doubted
    explorer.model = "noise"
    assert (explorer.row, explorer.edits, explorer.by) == (7, {"load": 1.5}, "total")
    assert torch.equal(explorer.selection, doubted)
    assert torch.equal(explorer.selections["doubted by both"], doubted)
    assert torch.equal(explorer.shown, explorer.ranked[torch.isin(explorer.ranked, doubted)])
    y, _ = explorer.wrapped(explorer.x[None], return_risk=True)
    torch.testing.assert_close(explorer.prediction, y[0])  # of the edited row
    assert explorer.prediction.item() == pytest.approx(1.5)
    explorer.model = "both"
    explorer.by = "epistemic"
    explorer.model = "noise"
    assert explorer.by == "aleatoric"  # what it measures itself
    assert "noise" in repr(explorer)


def test_all_models_answer_the_chosen_row_with_its_edits(explorer: Explorer) -> None:
    explorer.edit(load=2.0)
    by_model = explorer.each_model()
    assert list(by_model) == ["both", "noise"]
    for name, answers in by_model.items():
        wanted = predict_cases(explorer.models[name], explorer.data, explorer.x[None])
        assert torch.equal(answers.y, wanted.y)
        assert all(torch.equal(answers.risk[risk], value) for risk, value in wanted.risk.items())
    assert by_model["noise"].y.item() == pytest.approx(2.0)


def test_a_filter_is_of_the_model_that_is_looked_at() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        other = vote.Wrapper(2, output="logits")(nn.Sequential(nn.Flatten(), nn.Linear(36, 3)))
    explorer = Explorer({"a": voters(), "b": other}, pictures()).filter(wrong=True)
    wrong = {}
    for name, model in explorer.models.items():
        explorer.model = name
        taken = model.eval()(explorer.data.test.x).argmax(1)
        wrong[name] = [row for row in explorer.ranked.tolist() if taken[row] != explorer.data.test.y[row]]
        assert explorer.shown.tolist() == wrong[name]
        assert explorer.confusion.diagonal().sum() == 30 - len(wrong[name])
    assert wrong["a"] != wrong["b"]


def test_a_filter_that_the_other_model_lacks_the_risk_for_is_refused_and_nothing_changes() -> None:
    strange = compose(vote.Wrapper(2, output="logits"), neo.Wrapper())(nn.Sequential(nn.Flatten(), nn.Linear(36, 3)))
    strange.fit([(pictures().train.x, pictures().train.y)])
    explorer = Explorer({"strange": strange, "plain": voters()}, pictures()).filter(confident_unseen=True)
    with pytest.raises(ValueError, match=r"model='plain': it measures no vacuitic risk.*explorer.filter\(\)"):
        explorer.model = "plain"
    assert explorer.model == "strange"
    assert explorer.wrapped is strange
    explorer.filter().model = "plain"
    assert explorer.model == "plain"


def test_models_that_do_not_fit_are_refused_by_name() -> None:
    fits = ensemble()
    two = vote.Wrapper(2)(nn.Linear(2, 2))
    scores = vote.Wrapper(2, output="logits")(nn.Linear(2, 3))
    for name, model, error, said in (
        ("plain", nn.Linear(2, 1), TypeError, "Linear is not wrapped"),
        ("two", two, ValueError, "needs? .*one number"),
        ("scores", scores, ValueError, "cases need"),
        ("wide", vote.Wrapper(2)(nn.Linear(5, 1)), ValueError, "mat1 and mat2|shape"),
        ("unfitted", neo.Wrapper()(nn.Linear(2, 1)), NotFittedError, "unfitted"),
    ):
        with pytest.raises(error, match=f"the model '{name}' can't be explored with beams") as caught:
            Explorer({"fits": fits, name: model}, beams())
        assert re.search(said, str(caught.value)), str(caught.value)
    with pytest.raises(ValueError, match="there is no model"):
        Explorer({}, beams())
    with pytest.raises(ValueError, match="a dict of models by name; found the name 3"):
        Explorer({3: fits}, beams())  # type: ignore[dict-item]
    explorer = Explorer({"fits": fits}, beams())
    with pytest.raises(ValueError, match="model='other': there are 'fits'"):
        explorer.model = "other"


# ---- widgets
@pytest.mark.slow
def test_the_list_of_models_changes_what_is_shown(explorer: Explorer) -> None:
    v = view(explorer)
    assert v.model in v.rank.children
    before, panel = v.pair.value, v.panel
    v.by.value = "total"
    explorer.selection = explorer.ranked[:4]
    if panel.plot is not None:
        panel.plot.x, panel.plot.y = "total", "aleatoric"
    v.model.value = "noise"
    assert explorer.model == "noise"
    assert explorer.message == ""
    assert v.pair.value != before
    assert v.by.options == explorer.rankings
    assert v.by.value == explorer.by == "total"
    assert [row for _, row in v.list.options] == explorer.shown.tolist()
    assert v.panel is not panel
    assert v.select_page.children == (v.panel.widget,)
    if v.panel.plot is not None:
        assert [metric["name"] for metric in v.panel.plot.spec["metrics"]] == list(explorer.rankings)
        assert (v.panel.plot.x, v.panel.plot.y) == ("total", "aleatoric")
        v.panel.plot._handle_custom_msg({"kind": "choose", "row": 3}, [])
        assert explorer.row == 3
    for title in v.tabs.titles:
        v.tabs.selected_index = v.tabs.titles.index(title)
        explorer.model = "both"
        assert explorer.message == "", title
        explorer.model = "noise"
        assert explorer.message == "", title
    assert v.model.value == "noise"


def test_all_models_stand_side_by_side_on_one_scale(explorer: Explorer) -> None:
    v = view(explorer)
    explorer.edit({"raw <1>": 3.0})
    page = Outline(v.side.value)
    assert f"row {explorer.row}, edited, by each model" in "".join(page.words)
    widths = [
        float(re.search(r"width:([\d.]+)%", style)[1])
        for _, a in page.tags
        if "width:" in (style := a.get("style") or "")
    ]
    by_model = explorer.each_model()
    sizes = [
        by_model[m].risk[r].item()
        for m in by_model
        for r in ("aleatoric", "epistemic", "total")
        if r in by_model[m].risk
    ]
    assert len(sizes) == 5
    assert widths == pytest.approx([100 * size / max(sizes) for size in sizes], abs=0.06)
    current = [a for tag, a in page.tags if tag == "tr" and "aria-current" in a]
    assert len(current) == 1
    before = v.side.value
    explorer.step()
    assert v.side.value != before


def test_one_model_has_no_list_and_no_table() -> None:
    v = view(Explorer(ensemble(), beams()))
    assert v.model not in v.rank.children
    assert v.side.value == ""


def test_a_refused_model_is_said_and_the_list_goes_back() -> None:
    wrapped = compose(sculpt.Wrapper(), neo.Wrapper())(nn.Linear(2, 1))
    wrapped.fit([(beams().train.x, beams().train.y)])
    explorer = Explorer({"strange": wrapped, "both": ensemble()}, beams()).filter(confident_unseen=True)
    v = view(explorer)
    v.model.value = "both"
    assert "it measures no vacuitic risk" in explorer.message
    assert v.model.value == explorer.model == "strange"


@pytest.mark.slow
def test_nothing_of_another_model_stays_where_a_model_has_nothing_to_show() -> None:
    """The plain baseline has no risk to refuse by: no curve, least of all that of the model before."""
    explorer = Explorer({"both": ensemble(), "plain": compose()(nn.Linear(2, 1))}, beams())
    v = view(explorer)
    v.tabs.selected_index = v.tabs.titles.index("Coverage")
    picture = v.frames["coverage"][1]
    assert "svg" in picture.value
    explorer.model = "plain"
    assert "measures no risk to refuse cases by" in explorer.message
    assert picture.value == v.left.value == v.refused.value == ""
    explorer.model = "both"
    assert explorer.message == ""
    assert "svg" in picture.value


# ---- trained on
@pytest.mark.slow
def test_a_model_that_was_trained_since_is_asked_again_about_all_rows(explorer: Explorer) -> None:
    explorer.model = "noise"
    widget = view(explorer)
    before = explorer.values.clone(), widget.list.options
    with torch.no_grad():
        for parameter in (*explorer.models["both"].parameters(), *explorer.models["noise"].parameters()):
            parameter.mul_(1.7).add_(0.1)
    explorer.select(explorer.row)
    for name, model in explorer.models.items():
        explorer.model = name
        alone = Explorer(model, explorer.data, by=explorer.by).select(explorer.row)
        assert torch.equal(explorer.ranked, alone.ranked)
        assert torch.equal(explorer.values, alone.values)
        assert torch.equal(explorer.prediction, alone.prediction)
        assert explorer.summary() == alone.summary()
        assert widget.list.options == view(alone).list.options
    explorer.model = "noise"
    assert not torch.equal(explorer.values, before[0])
    assert widget.list.options != before[1]


def test_asking_changes_no_parameter_that_is_looked_at(explorer: Explorer) -> None:
    versions = explorer._model_versions
    explorer.select(3).edit({"load": 1.0}).by = "error"
    assert explorer.importance is not None
    assert models_module.versions_of(explorer.models) == versions
