"""The committed notebooks run, through papermill, and what they record stays what it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("notebooks")  # runs of notebooks are shared within a process

WRAPPERS = ["baseline", "sculpt", "sample", "vote", "vote+sculpt", "neo"]
# short trainings on other machines and versions end in somewhat other weights: wide enough for that, not for a mistake
TOLERANCES = {"rmse": 0.1, "nll": 0.03, "crps": 0.1, "accuracy": 0.05, "ood_auroc": 0.1}


def names(*metrics: str, wrappers: list[str] = WRAPPERS) -> dict[str, float]:
    """Relative tolerances of all recorded values of these metrics."""
    found = {f"{w.replace('+', '_')}_{m}": TOLERANCES[m] for w in wrappers for m in metrics}
    found.pop("baseline_ood_auroc", None)  # a plain regression measures no risk
    return found


def test_first_look(executed: Callable[..., Any], baseline: Callable[..., None]) -> None:
    run = executed("first_look.ipynb", smoke=True, epochs=100)
    assert run.status == "ok", run.error
    records = run.records
    assert set(records.figures) == {"cubic", "moons"}
    assert len(records.tables["cubic_risks"]["place"]) == 3
    assert records["epistemic_outside_to_inside"] > 3
    assert records["vacuitic_auroc"] > 0.95
    assert records["aleatoric_blob_to_clean"] > 3
    baseline(
        "first_look",
        records,
        {"noise_found_within": 0.5, "vacuitic_auroc": 0.03, "accuracy": 0.03, "accuracy_clean": 0.02},
    )


def test_compare_on_values(executed: Callable[..., Any], baseline: Callable[..., None]) -> None:
    run = executed("compare.ipynb", data="diabetes", epochs=15)
    assert run.status == "ok", run.error
    records = run.records
    expected = {"comparison", "predicted_against_true", "coverage", "risk_against_error", "ood", "history"}
    assert set(records.figures) == expected
    assert records.tables["comparison"]["wrapper"] == WRAPPERS
    assert records.tables["cost"]["wrapper"] == WRAPPERS
    # neo must not touch the prediction, and the same seed starts the same model
    assert records["neo_rmse"] == records["baseline_rmse"]
    for wrapper in ("baseline", "sculpt", "sample", "vote", "vote_sculpt", "neo"):
        assert records[f"{wrapper}_rmse"] < 77  # the standard deviation of the target: better than its mean
        assert 0.7 < records[f"{wrapper}_picp90"] <= 1
    baseline("compare_diabetes", records, names("rmse", "nll", "crps", "ood_auroc"))


def test_compare_on_classes(executed: Callable[..., Any], baseline: Callable[..., None]) -> None:
    chosen = ["baseline", "vote+sculpt+neo"]
    run = executed("compare.ipynb", data="digits", wrappers=chosen, epochs=10, max_rows=800)
    assert run.status == "ok", run.error
    records = run.records
    assert set(records.figures) == {"comparison", "reliability", "risk_against_error", "ood", "history"}
    assert records["rows_train"] + records["rows_validation"] == 800
    assert records["baseline_accuracy"] > 0.85
    assert records["vote_sculpt_neo_ood_auroc"] > 0.9
    baseline("compare_digits", records, {**names("accuracy", wrappers=chosen), "vote_sculpt_neo_ood_auroc": 0.05})


def test_compare_refuses_unknown_wrappers(executed: Callable[..., Any]) -> None:
    run = executed("compare.ipynb", data="diabetes", wrappers=["baseline", "vote+skulpt"], epochs=1)
    assert run.status == "failed"
    assert "no wrapper skulpt" in run.error


@pytest.mark.parametrize("parameters", [{"epoch": 5}, {"epochs": "many"}])
def test_parameters_are_checked_before_anything_runs(executed: Callable[..., Any], parameters: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match="epochs"):
        executed("compare.ipynb", **parameters)
