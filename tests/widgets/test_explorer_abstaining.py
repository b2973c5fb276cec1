"""Which risk of the explored model best identifies the cases to abstain on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.calibration_models import known
from helpers.widget_cases import Outline, beams, pictures, voters
from test_explorer import ensemble
from torch import nn

from workbench import compose, sculpt, selective, vote
from workbench.metrics import aurc
from workbench.widgets import Explorer
from workbench.widgets.explorer.abstaining import Abstention

pytest.importorskip("ipywidgets")


def opened(explorer: Explorer) -> Any:
    """Its view, with the page on coverage open."""
    assert explorer.widget is not None
    view: Any = explorer._view
    view.tabs.selected_index = view.tabs.titles.index("Coverage")
    assert explorer.message == ""
    return view


@pytest.mark.parametrize("make", [lambda: Explorer(ensemble(), beams()), lambda: Explorer(voters(), pictures())])
def test_areas_are_those_of_selective_prediction_lowest_first(make: Any) -> None:
    explorer = make()
    test = explorer.data.test
    wanted = {}
    for name in explorer.rankings:
        if name != "error":
            chosen = selective(explorer.wrapped, (test.x, test.y), by=name)
            wanted[name] = aurc(chosen.risk, chosen.error).item()
    assert explorer.areas == pytest.approx(wanted)
    assert list(explorer.areas.values()) == sorted(wanted.values())
    assert list(explorer.refusals) == [name for name in explorer.rankings if name != "error"]


@pytest.mark.slow
def test_the_page_draws_all_risks_and_names_the_best() -> None:
    explorer = Explorer(ensemble(), beams())
    view = opened(explorer)
    best, *others = explorer.areas
    assert f"{best} is best for refusing these rows: area under the curve" in view.left.value
    assert all(f"{name} {explorer.areas[name]:.3g}" in view.left.value for name in others)
    picture = view.frames["coverage"][1].value
    page = Outline(picture)
    assert "mean error over coverage, by aleatoric, epistemic, total" in {a.get("aria-label") for _, a in page.tags}
    explorer.by = "aleatoric"
    assert view.frames["coverage"][1].value == picture  # all are there already
    assert "aleatoric risk of at most" in view.left.value


def test_risks_that_rank_rows_alike_are_best_together_and_one_risk_is_not_praised() -> None:
    explorer = Explorer(vote.Wrapper(3)(nn.Linear(2, 1)), beams())  # epistemic is the total there
    assert explorer.areas["epistemic"] == explorer.areas["total"]
    assert explorer.areas_in_words() == ""
    assert Explorer(known().float(), beams()).areas_in_words() == ""


def test_a_known_risk_is_best_where_it_is_the_error() -> None:
    """Voters that disagree by exactly what they are wrong by, under a noise that says nothing."""
    explorer = Explorer(ensemble(), beams())
    error = explorer.refusal_error
    explorer._answers.risk["epistemic"] = 2 * error
    explorer._answers.risk["aleatoric"] = -error
    assert next(iter(explorer.areas)) == "epistemic"
    assert list(explorer.areas)[-1] == "aleatoric"
    said = explorer.areas_in_words()
    assert said.startswith("epistemic is best for refusing these rows")
    assert said.endswith(f"aleatoric {explorer.areas['aleatoric']:.3g}")  # far beyond chance


def test_risks_that_differ_by_chance_are_said_to() -> None:
    """Two risks of nothing but noise: whichever has the lower area, that is chance."""
    explorer = Explorer(ensemble(), beams())
    for i, name in enumerate(("aleatoric", "epistemic")):
        explorer._answers.risk[name] = torch.rand(30, generator=torch.Generator().manual_seed(i))
    explorer._answers.risk["total"] = explorer._answers.risk["aleatoric"] + 1
    state = torch.get_rng_state()
    said = explorer.areas_in_words()
    assert torch.equal(torch.get_rng_state(), state)
    assert said.count("(may be chance)") == said.count(", ") + 1


@pytest.mark.slow
def test_the_best_of_five_equal_risks_is_seldom_called_better() -> None:
    """The one with the lowest area is chosen on these rows: with twice the standard error, every fourth time some other was said to be worse."""
    draw, called = torch.Generator().manual_seed(0), 0
    for _ in range(40):
        error = (torch.rand(30, generator=draw) < 0.3).float()
        risks = {f"risk {i}": error + torch.randn(30, generator=draw) for i in range(5)}
        areas = {name: float(aurc(risk, error)) for name, risk in risks.items()}
        explorer: Any = SimpleNamespace(areas=areas, refusals=risks, refusal_error=error)
        called += Abstention._compared(explorer).count("(may be chance)") < 4
    assert called <= 4


def test_rows_of_several_targets_name_it_too_of_the_column_that_ranks() -> None:
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    explorer = Explorer(ensemble_of_two(), (x, x * 2))
    assert list(explorer.refusals) == ["aleatoric", "epistemic", "total"]
    column = next(name for name in explorer.rankings if name.startswith("total of "))
    explorer.by = column
    assert list(explorer.refusals) == [column.replace("total", risk) for risk in ("aleatoric", "epistemic", "total")]
    assert explorer.areas[column] == pytest.approx(aurc(explorer.selective.risk, explorer.selective.error).item())
    explorer.by = "total"
    assert explorer.widget is not None
    view: Any = explorer._view
    assert f"{next(iter(explorer.areas))} is best for refusing these rows" in view.left.value
    assert explorer.message == ""


def ensemble_of_two() -> Any:
    torch.manual_seed(0)
    return compose(vote.Wrapper(3), sculpt.Wrapper())(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)))
