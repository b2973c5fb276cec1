"""Which columns and positions carry the risk, in `Explorer`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.calibration_models import known
from helpers.widget_cases import Outline, beams, pictures, voters

from workbench import attributions, data, vote
from workbench.widgets import Explorer

pytest.importorskip("ipywidgets")


def opened(explorer: Explorer, page: str) -> Any:
    """Its view, with a page open."""
    assert explorer.widget is not None
    view: Any = explorer._view
    view.tabs.selected_index = view.tabs.titles.index(page)
    assert explorer.message == ""
    return view


def test_a_table_says_which_column_carries_which_risk() -> None:
    """x = [mu, raw]: the prediction is the load, the noise the other column."""
    explorer = Explorer(known().float(), beams(), by="aleatoric")
    view = opened(explorer, "Features")
    assert explorer.importance.ranked("aleatoric") == ("raw <1>", "load")
    assert explorer.importance is explorer.importance  # asked once
    wanted = attributions.permutation_importance(explorer.wrapped, explorer.data, n_repeats=5)
    assert torch.equal(explorer.importance.values["error"], wanted.values["error"])
    page = Outline(view.carriers.value)
    assert "importance of columns: prediction: load, raw <1>; aleatoric: raw <1>, load" in {
        attributes.get("aria-label") for _, attributes in page.tags
    }
    assert "The mean error rises most without load" in "".join(page.words)
    before = view.carriers.value
    explorer.select(3)
    assert view.carriers.value is before  # of all rows, whichever is chosen
    with pytest.raises(ValueError, match="beams are no pictures"):
        explorer.occlusion()


@pytest.mark.slow
def test_a_picture_says_which_places_carry_which_risk_and_follows_the_case() -> None:
    explorer = Explorer(voters(), pictures())
    view = opened(explorer, "Places")
    mean = explorer.data.train.x.mean((0, 2, 3))[:, None, None]
    wanted = attributions.occlusion(explorer.wrapped, explorer.x[None], baseline=mean)
    torch.testing.assert_close(explorer.occlusion().change["epistemic"], wanted.change["epistemic"])
    first = view.carriers.value
    assert f"Row {explorer.row}, place after place" in first
    explorer.step()
    assert f"Row {explorer.row}, place after place" in view.carriers.value
    second = view.places.plot.markup
    explorer.edit(brightness=0.4)
    assert "The edited case, place after place" in view.carriers.value
    explorer.reset()
    assert view.places.plot.markup.count("<image") == second.count("<image")
    Outline(view.carriers.value)
    Outline(view.places.plot.markup)
    with pytest.raises(ValueError, match="stripes are no table"):
        _ = explorer.importance


def test_nothing_is_asked_before_the_page_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    explorer = Explorer(voters(), pictures())
    monkeypatch.setattr("workbench.widgets.explorer.carriers.occlusion", lambda *_, **__: pytest.fail("asked"))
    assert explorer.widget is not None
    explorer.step()


def test_rows_of_several_targets_are_refused() -> None:
    x = torch.rand(60, 3, generator=torch.Generator().manual_seed(0))
    both = data.Data.from_arrays(x, x[:, :2], name="pairs")
    explorer = Explorer(vote.Wrapper(2)(torch.nn.Linear(3, 2)), both)
    with pytest.raises(ValueError, match="rows of pairs have several targets, and there is no importance for them"):
        _ = explorer.importance
    with pytest.raises(ValueError, match="there is no occlusion for them"):
        explorer.occlusion()
