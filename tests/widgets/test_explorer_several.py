"""`Explorer` of maps, tokens, columns and labels: every number equals a plain loop over voters, rows and positions."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from helpers.map_rows import Depth, rng, value_maps
from torch import nn

from workbench import compose, neo, sculpt, vote
from workbench.core.outputs.class_scores import Binary, Logits
from workbench.data import Data
from workbench.data.columns import Column
from workbench.widgets import Explorer


def seeded(make):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def class_maps(rows=40):
    """Maps of 3 classes on 3 x 7 x 7 inputs, where classes could lie in several dimensions; a fifth is void, and of one row everything."""
    x = torch.randn(rows, 3, 3, 7, generator=rng(0))
    x = torch.nn.functional.interpolate(x, (7, 7))
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    y[torch.rand(y.shape, generator=rng(1)) < 0.2] = 255
    return Data.from_arrays(x, y, classes=["road", "sky", "tree"], void=255)


def tokens():
    """Sentences of 1 to 5 tokens; what pads them is far off, so that one that counts would show."""
    x = torch.randn(40, 5, 3, generator=rng(2))
    lengths = [1 + i % 5 for i in range(40)]
    for row, length in zip(x, lengths, strict=True):
        row[length:] = 50.0
    return Data.from_arrays(x, (x[..., 0] > 0).long() + (x[..., 1] > 0).long(), classes=3, lengths=lengths)


def columns():
    x = torch.randn(60, 3, generator=rng(3))
    y = torch.stack([x[:, 0], 1000 * x[:, 1], 0.01 * x[:, 2] + 5], 1)
    return Data.from_arrays(x, y, target=Column("length, number of cells, dose", "m, , g"))


def labels():
    x = torch.randn(60, 3, generator=rng(4))
    return Data.from_arrays(x, x > 0.5, classes=["beach", "dog", "night"])


CASES = {
    "maps": (class_maps, lambda: nn.Conv2d(3, 3, 1), Logits(dim=1)),
    "tokens": (tokens, lambda: nn.Linear(3, 3), Logits(dim=-1)),
    "columns": (columns, lambda: nn.Linear(3, 3), None),
    "labels": (labels, lambda: nn.Linear(3, 3), "binary"),
    "depth": (value_maps, Depth, None),
}


def made(name, **options):
    data, model, output = CASES[name]
    wrapped = seeded(lambda: vote.Wrapper(4, output=output)(model()))
    return Explorer(wrapped, data(), **options)


def members(explorer):
    x = explorer.data.test.x
    with torch.no_grad():
        return torch.stack([copy.deepcopy(member).eval()(x).double() for member in explorer.wrapped.voters()])


def entropy(p):
    return -(p * p.log()).sum(-1)


def in_rows(explorer, by):
    """What it ranks by, in the order of the test rows."""
    explorer.by = by
    return dict(zip(explorer.ranked.tolist(), explorer.values.tolist(), strict=True))


# ---- ranking
@pytest.mark.parametrize(("name", "dim"), [("maps", 2), ("tokens", -1)])
def test_entropies_are_the_mean_over_the_positions_that_have_a_class(name, dim):
    explorer = made(name)
    probs = members(explorer).movedim(dim, -1).softmax(-1)
    total, aleatoric = entropy(probs.mean(0)).numpy(), entropy(probs).mean(0).numpy()
    doubt, pooled = (1 - probs.mean(0).amax(-1)).numpy(), probs.mean(0).numpy()
    y = explorer.data.test.y
    totals, epistemics, errors, doubts = (in_rows(explorer, by) for by in ("total", "epistemic", "error", "confidence"))
    for row in range(len(y)):
        places = [tuple(p) for p in (y[row] != -100).nonzero().tolist()]
        assert 0 < len(places) < y[row].numel() or name == "tokens"

        def mean(values, row=row, places=places):
            return sum(values[(row, *place)] for place in places) / len(places)

        assert totals[row] == pytest.approx(mean(total), rel=1e-4)
        assert epistemics[row] == pytest.approx(mean(total - aleatoric), rel=1e-3, abs=1e-6)
        assert doubts[row] == pytest.approx(mean(doubt), rel=1e-4)
        surprises = [-math.log(pooled[(row, *place, int(y[(row, *place)]))]) for place in places]
        assert errors[row] == pytest.approx(sum(surprises) / len(places), rel=1e-4)
    assert explorer.ranked.tolist() == sorted(doubts, key=doubts.get, reverse=True)


def test_columns_of_different_units_are_divided_by_their_spread_before_they_rank():
    explorer = made("columns")
    said = members(explorer)
    spread = explorer.data.train.y.double().std(0, correction=0)
    deviation = said.std(0, correction=0)
    off = (said.mean(0) - explorer.data.test.y).abs()
    epistemic, error = in_rows(explorer, "epistemic"), in_rows(explorer, "error")
    cells, off_cells = (in_rows(explorer, f"{by} of number of cells") for by in ("epistemic", "error"))
    for row in range(len(off)):
        squares = [(deviation[row, i] / spread[i]).item() ** 2 for i in range(3)]
        assert epistemic[row] == pytest.approx(math.sqrt(sum(squares) / 3), rel=1e-4)
        assert error[row] == pytest.approx(sum((off[row, i] / spread[i]).item() for i in range(3)) / 3, rel=1e-4)
        assert cells[row] == pytest.approx(deviation[row, 1].item(), rel=1e-4)
        assert off_cells[row] == pytest.approx(off[row, 1].item(), rel=1e-4)
    assert [explorer.unit(by) for by in ("epistemic", "total of length", "error of dose")] == ["", "m", "g"]


def test_labels_rank_by_the_mean_entropy_of_yes_or_no():
    explorer = made("labels")
    p = members(explorer).sigmoid().mean(0)
    y = explorer.data.test.y
    total, error, night = (in_rows(explorer, by) for by in ("total", "error", "total of night"))
    each = entropy(torch.stack([p, 1 - p], -1))
    for row in range(len(y)):
        assert total[row] == pytest.approx(each[row].mean().item(), rel=1e-4)
        assert night[row] == pytest.approx(each[row, 2].item(), rel=1e-4)
        surprises = [-math.log((p if yes else 1 - p)[row, i].item()) for i, yes in enumerate(y[row].bool())]
        assert error[row] == pytest.approx(sum(surprises) / 3, rel=1e-4)
    torch.testing.assert_close(explorer.prediction.double(), p[explorer.row], rtol=1e-4, atol=1e-5)
    explorer.by = "total"
    wrong = ((p > 0.5) != y.bool()).double().mean(1)
    assert explorer.error[1] == pytest.approx(wrong.mean().item())


def test_labels_of_a_model_that_gives_probabilities_are_not_squashed_twice():
    model = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid())
    explorer = Explorer(seeded(lambda: vote.Wrapper(2, output=Binary(logits=False))(model)), labels())
    torch.testing.assert_close(
        explorer.prediction.double(), members(explorer).mean(0)[explorer.row], rtol=1e-4, atol=1e-5
    )


def test_standard_deviations_of_maps_are_a_root_mean_square_in_the_unit_of_the_values():
    explorer = made("depth")
    deviation = members(explorer).std(0, correction=0)
    for row, value in in_rows(explorer, "epistemic").items():
        assert value == pytest.approx(deviation[row].square().mean().sqrt().item(), rel=1e-4)


@pytest.mark.slow
def test_vacuitic_risk_of_pixels_which_may_be_negative_ranks_by_its_plain_mean():
    data, _, output = CASES["maps"]
    wrapped = neo.Wrapper(output=output)(
        seeded(lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1)))
    )
    rows = data()
    wrapped.fit(rows.train.x)
    explorer = Explorer(wrapped, rows)
    with torch.no_grad():
        risk = wrapped.eval()(rows.test.x, return_risk=True)[1]
    known = rows.test.y != -100
    assert risk.min() < 0
    for row, value in in_rows(explorer, "vacuitic").items():
        mean = risk[row][known[row]].mean() if risk.ndim > 1 else risk[row]
        assert value == pytest.approx(mean.item(), rel=1e-4, abs=1e-5)
    assert explorer.widget is not None
    assert len(explorer._view.places.plot.panels) == 4 + (risk.ndim > 1)  # image, truth, prediction, error, risks


# ---- refusing
def test_the_error_of_answered_rows_is_the_mean_share_of_wrong_positions():
    explorer = made("tokens", by="total", coverage=0.5)
    y = explorer.data.test.y
    best = members(explorer).softmax(-1).mean(0).argmax(-1)
    shares = [(best[i] != y[i])[y[i] != -100].double().mean().item() for i in range(len(y))]
    refused = set(explorer.abstained.tolist())
    assert 0 < len(refused) < len(y)
    assert refused == set(explorer.ranked[: len(refused)].tolist())
    kept = [share for i, share in enumerate(shares) if i not in refused]
    assert explorer.error == pytest.approx((sum(kept) / len(kept), sum(shares) / len(shares)))
    assert "share of positions wrong" in explorer.summary()


@pytest.mark.slow
def test_rows_of_nothing_but_void_are_left_out_and_counted():
    data = class_maps()
    data.test.y[2] = -100
    wrapped = seeded(lambda: vote.Wrapper(2, output=Logits(dim=1))(nn.Conv2d(3, 3, 1)))
    explorer = Explorer(wrapped, data)
    assert 2 not in explorer.ranked.tolist()
    assert bool(explorer.values.isfinite().all())
    view = explorer.select(2)._make_view()
    assert "1 have no class" in view.note.value
    assert "not among the ranked rows" in view.chosen.value


# ---- as it is seen
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_widget_goes_through_the_ranking_and_draws_the_row(name):
    import matplotlib.pyplot as plt

    explorer = made(name)
    assert isinstance(explorer, Explorer)
    view = explorer._make_view()
    assert f"<b>row {explorer.ranked[0]}</b>" in view.chosen.value
    if name in ("columns", "labels"):
        assert "<table" in view.places.still.value
        assert view.places.plot is None
    else:
        assert "<svg" in view.places.plot.markup
        assert "var(--i)" in view.places.plot.markup  # in the colours of the page, light or dark
        assert view.places.plot.layout.display == ""
    assert plt.get_fignums() == []


@pytest.mark.slow
def test_buttons_and_rankings_move_the_view():
    explorer = made("columns")
    rows = explorer.ranked.tolist()
    assert explorer.widget is not None
    explorer._view.next.click()
    assert explorer.row == rows[1]
    assert f"<b>row {rows[1]}</b>" in explorer._view.chosen.value
    explorer._view.by.value = "error of dose"
    assert "epistemic of dose" in explorer.summary() or "total of dose" in explorer.summary()
    assert explorer.message == ""


@pytest.mark.slow
def test_a_snapshot_is_html_and_a_picture(monkeypatch):
    import IPython.display

    pages = []
    monkeypatch.setattr(IPython.display, "display", lambda data, **options: pages.append(data))
    made("tokens").snapshot()
    assert set(pages[0]) >= {"text/html", "image/png"}


def test_a_plain_baseline_of_values_ranks_by_its_error():
    data, model, output = CASES["maps"]
    explorer = Explorer(seeded(lambda: compose(output=output)(model())), data())
    assert explorer.rankings == ("aleatoric", "total", "confidence", "error")
    values = Explorer(seeded(lambda: compose()(nn.Linear(3, 3))), columns())
    assert values.rankings[0] == values.by == "error"
    assert len(values.rankings) == 4
    with pytest.raises(ValueError, match="plain baseline"):
        _ = values.selective
    assert values.widget is not None
    assert values.message == ""


@pytest.mark.slow
def test_aleatoric_risk_of_columns_is_in_the_table_in_its_unit():
    data = columns()
    wrapped = seeded(lambda: compose(vote.Wrapper(2), sculpt.Wrapper())(nn.Linear(3, 3)))
    explorer = Explorer(wrapped, data)
    assert explorer.risk.aleatoric.shape == (3,)
    assert [explorer.unit_of(i) for i in range(3)] == ["m", "", "g"]
    assert explorer.widget is not None
    assert "number of cells" in explorer._view.places.still.value


# ---- refused
def test_what_does_not_fit_is_refused():
    wrapped = seeded(lambda: vote.Wrapper(2)(nn.Linear(3, 2)))
    with pytest.raises(ValueError, match=r"gives values \[\d+, 2\].*needed are values \[\d+, 3\]"):
        Explorer(wrapped, columns())
    with pytest.raises(ValueError, match="needed are binary"):
        Explorer(seeded(lambda: vote.Wrapper(2)(nn.Linear(3, 3))), labels())
    numbers = columns()  # such as zeros and ones as floats
    with pytest.raises(ValueError, match=r"needed are values.*give y.bool\(\), or task='labels'"):
        Explorer(seeded(lambda: vote.Wrapper(2, output="binary")(nn.Linear(3, 3))), numbers)
    explorer = made("maps")
    with pytest.raises(ValueError, match="can't be edited"):
        explorer.edit(noise=1)
    with pytest.raises(ValueError, match="neighbours"):
        explorer.space = "inputs"
    with pytest.raises(ValueError, match="can be ranked by"):
        made("columns", by="epistemic of speed")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["maps", "depth", "tokens"])
def test_saved_pictures_follow_the_page_and_stand_as_pixels_where_no_svg_is_shown(name, monkeypatch):
    from workbench.widgets.explorer import several_view

    explorer = made(name)
    page = several_view.saved_page(explorer)
    drawn = page[page.index('class="wb-picture"') :]
    assert "var(--i)" in drawn
    assert page.count('class="wb-pixels"') == 1
    # too large to be saved: pixels alone
    monkeypatch.setattr(several_view, "MAX_SAVED", 100)
    small = several_view.saved_page(explorer)
    assert '<img src="data:image/png' in small
    assert 'class="wb-pixels"' not in small
