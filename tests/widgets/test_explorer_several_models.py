"""Several models of maps, tokens, columns and labels in one `Explorer`: each as if alone, side by side on one scale."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from helpers.widget_cases import Outline
from test_explorer_several import CASES, seeded
from torch import nn

from workbench import compose, neo, sculpt, vote
from workbench.widgets import Explorer
from workbench.widgets.explorer import row_pictures

pytest.importorskip("ipywidgets")


def models(name: str) -> dict[str, Any]:
    """Four voters, and two voters with heads."""
    _, model, output = CASES[name]

    def both() -> dict[str, Any]:
        heads = compose(vote.Wrapper(2), sculpt.Wrapper(), output=output)
        return {"voters": vote.Wrapper(4, output=output)(model()), "heads": heads(model())}

    built: dict[str, Any] = seeded(both)
    return built


def made(name: str, **options: Any) -> Explorer:
    return Explorer(models(name), CASES[name][0](), **options)


def view(explorer: Explorer) -> Any:
    assert explorer.widget is not None
    return explorer._view


# ---- without widgets
@pytest.mark.parametrize("name", CASES)
def test_each_model_is_explored_as_it_would_be_alone(name: str) -> None:
    explorer = made(name, by="total")
    assert list(explorer.models) == ["voters", "heads"]
    explorer.select(3)
    for model, wrapped in explorer.models.items():
        explorer.model = model
        alone = Explorer(wrapped, explorer.data, by="total").select(3)
        assert explorer.wrapped is wrapped
        assert (explorer.row, explorer.by, explorer.rankings) == (3, "total", alone.rankings)
        assert torch.equal(explorer.ranked, alone.ranked)
        assert torch.equal(explorer.values, alone.values)
        assert torch.equal(explorer.prediction, alone.prediction)
        assert list(explorer.risk.names()) == list(alone.risk.names())
        for risk in alone.risk.names():
            assert torch.equal(explorer.risk[risk], alone.risk[risk])
        assert torch.equal(explorer.abstained, alone.abstained)
        assert explorer.error == alone.error
        assert explorer.areas == alone.areas
        for by in alone.rankings:
            value = alone.values_of(torch.tensor([3]), by).item()
            place = 1 + sum(other > value for other in alone.values_of(alone.rows, by).tolist())
            assert explorer.rank_of(model, by) == (value, place)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_all_models_answer_the_chosen_row_whichever_is_looked_at() -> None:
    for name in CASES:
        explorer = made(name).select(2)
        by_model = explorer.each_model()
        explorer.model = "heads"
        again = explorer.each_model()
        for model, wrapped in explorer.models.items():
            alone = Explorer(wrapped, explorer.data).select(2)
            said = by_model[model].y if by_model[model].probs is None else by_model[model].probs
            assert said is not None
            assert torch.equal(said[0], alone.prediction)
            assert torch.equal(by_model[model].y, again[model].y)
            for risk in alone.risk.names():
                assert torch.equal(by_model[model].risk[risk][0], alone.risk[risk])
                assert torch.equal(again[model].risk[risk][0], alone.risk[risk])


@pytest.mark.slow
def test_selection_and_filter_stay_and_what_a_model_lacks_is_refused() -> None:
    data, _, output = CASES["maps"]
    rows = data()
    strange = seeded(
        lambda: compose(vote.Wrapper(2, output=output), neo.Wrapper(per="image"))(
            nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1))
        )
    )
    strange.fit(rows.train.x)
    explorer = Explorer({"strange": strange, "plain": models("maps")["voters"]}, rows, by="vacuitic")
    explorer.selection = explorer.ranked[:3]
    chosen = explorer.selection
    explorer.filter(confident_unseen=True)
    with pytest.raises(ValueError, match=r"model='plain': it measures no vacuitic risk.*explorer.filter\(\)"):
        explorer.model = "plain"
    assert (explorer.model, explorer.by) == ("strange", "vacuitic")
    explorer.filter().model = "plain"
    assert explorer.by == "epistemic"
    assert torch.equal(explorer.selection, chosen)
    assert "plain" in repr(explorer)
    assert explorer.each_model()["strange"].risk["vacuitic"].shape == (1,)  # one number for the whole row
    assert view(explorer).widget is not None
    assert explorer.message == ""


class Sometimes(nn.Module):
    """Gives NaN for rows that begin with a number above a limit."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.layer, self.limit = nn.Linear(3, 3), limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).masked_fill(x[:, :1] > self.limit, torch.nan)


@pytest.mark.filterwarnings("ignore:the risk is NaN")
def test_models_that_do_not_fit_are_refused_by_name() -> None:
    fits = models("columns")["voters"]
    data = CASES["columns"][0]()
    limit = data.test.x[:2, 0].max().item()  # of the rows that are asked about first
    assert data.test.x[:, 0].max() > limit
    for name, model, error, said in (
        ("plain", nn.Linear(3, 3), TypeError, "not wrapped"),
        ("two", vote.Wrapper(2)(nn.Linear(3, 2)), ValueError, "needed are values"),
        ("wide", vote.Wrapper(2)(nn.Linear(5, 3)), ValueError, "mat1 and mat2|shape"),
        ("sometimes", vote.Wrapper(2)(Sometimes(limit)), ValueError, "NaN or infinite"),
    ):
        with pytest.raises(error, match=f"the model '{name}' can't be explored with {data.name}.*({said})"):
            Explorer({"fits": fits, name: model}, data)
    with pytest.raises(ValueError, match="there is no model"):
        Explorer({}, data)


# ---- widgets
def widths(page: str) -> list[float]:
    return [float(width) for width in re.findall(r"width:([\d.]+)%", page)]


@pytest.mark.slow
def test_numbers_of_the_row_stand_side_by_side_on_one_scale() -> None:
    explorer = made("maps")
    v = view(explorer)
    assert v.model in v.rank.children
    page = Outline(v.chosen.value)
    assert f"row {explorer.row} by each model, with its rank (#) among {len(explorer.rows)} rows" in "".join(page.words)
    numbers = {name: explorer.numbers_by(name) for name in explorer.models}  # type: ignore[attr-defined]
    at = explorer.rows.tolist().index(explorer.row)
    names = ("aleatoric", "epistemic", "total", "confidence", "error")
    size = {(model, by): numbers[model][by][at].item() for model in numbers for by in names if by in numbers[model]}
    top = max(size[key] for key in size if key[1] in ("aleatoric", "epistemic", "total"))
    worst = max(size[model, "error"] for model in numbers)
    scale = dict.fromkeys(("aleatoric", "epistemic", "total"), top) | {"confidence": 1.0, "error": worst}
    assert widths(v.chosen.value) == pytest.approx(
        [100 * value / scale[by] for (_, by), value in size.items()], abs=0.06
    )
    assert len([a for tag, a in page.tags if tag == "tr" and "aria-current" in a]) == 1
    heads = v.panel.rows.value.split("<th>")[1:]
    assert [head.removesuffix("</th>") for head in heads[:3]] == ["row", "epistemic, voters", "epistemic, heads"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["maps", "depth", "tokens"])
def test_pictures_of_all_models_have_one_scale_for_each_column(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    draw = row_pictures._picture
    monkeypatch.setattr(row_pictures, "_picture", lambda figure, *rest: (drawn.append(figure), draw(figure, *rest))[1])
    explorer = made(name)
    body = row_pictures.row_body(explorer)  # type: ignore[arg-type]
    assert not isinstance(body, str)
    axes = np.array([ax for ax in drawn[0].axes if ax.get_subplotspec() is not None])
    by_column: dict[int, set[Any]] = {}
    for ax in axes:
        column = ax.get_subplotspec().colspan.start
        if name == "tokens":
            by_column.setdefault(column, set()).add(ax.get_ylim())
        elif ax.images and (column or ax.get_subplotspec().rowspan.start):  # the input is no number
            by_column.setdefault(column, set()).add(ax.images[0].get_clim())
    assert len(by_column) >= 3
    assert all(len(scales) == 1 for scales in by_column.values()), by_column


@pytest.mark.slow
def test_columns_have_a_line_for_each_model_and_labels_one_scale() -> None:
    explorer = made("columns")
    v = view(explorer)
    page = v.places.still.value
    assert page.count(">voters</td>") == page.count(">heads</td>") == 3
    wanted = []
    risks = {model: explorer.each_model()[model].risk for model in explorer.models}
    for i in range(3):
        top = max(value[0, i].item() for risk in risks.values() for value in risk.values())
        for risk in risks.values():
            order = [name for name in ("aleatoric", "epistemic", "total") if name in risk]
            wanted += [100 * risk[name][0, i].item() / top for name in order]
    assert widths(page) == pytest.approx(wanted, abs=0.06)
    labels = made("labels")
    page = view(labels).places.still.value
    top = max(value.max().item() for answers in labels.each_model().values() for value in answers.risk.values())
    assert max(widths(page)) == pytest.approx(100)
    assert sum(width > 99.9 for width in widths(page)) < 4, top


@pytest.mark.slow
def test_the_list_of_models_changes_what_is_shown() -> None:
    explorer = made("tokens", by="total")
    v = view(explorer)
    panel = v.panel
    v.model.value = "heads"
    assert (explorer.model, explorer.message, explorer.by) == ("heads", "", "total")
    assert v.panel is not panel
    assert v.select_page.children == (v.panel.widget,)
    assert [row for _, row in v.list.options] == explorer.shown.tolist()
    assert v.by.options == explorer.rankings
    assert "svg" in v.frames["coverage"][1].value
    explorer.select(int(explorer.ranked[-1]))
    assert f"<b>row {explorer.row}</b>" in v.chosen.value
    assert explorer.message == ""


@pytest.mark.parametrize("name", CASES)
def test_a_model_that_was_trained_since_is_asked_again_about_all_rows(name: str) -> None:
    explorer = made(name, by="total").select(3)
    with torch.no_grad():
        for parameter in explorer.models["voters"].parameters():
            parameter.mul_(1.7).add_(0.1)
    explorer.select(2)
    alone = Explorer(explorer.wrapped, explorer.data, by="total").select(2)
    assert torch.equal(explorer.ranked, alone.ranked)
    assert torch.equal(explorer.values, alone.values)
    assert torch.equal(explorer.prediction, alone.prediction)
