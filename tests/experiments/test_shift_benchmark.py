"""The benchmark `shift`: its cells, groups and table."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import ROOT

from workbench import compose
from workbench.calibration import calibrate
from workbench.errors import WorkbenchWarning
from workbench.experiments.worker import load_file


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_file(ROOT / "benchmarks" / "shift.py")


def test_cells_are_json_and_each_is_there_once(bench: ModuleType) -> None:
    for smoke in (True, False):
        cells = bench.cells(smoke)
        assert len({json.dumps(cell, sort_keys=True) for cell in cells}) == len(cells)


def test_rows_that_were_computed_before_are_calibrated_like_a_model(bench: ModuleType) -> None:
    """Sets of the split and of groups by risk, against quantiles taken by hand."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(400, bench.N_CLASSES, generator=generator).log_softmax(1)
    risk, y = torch.randn(400, generator=generator), torch.randint(bench.N_CLASSES, (400,), generator=generator)
    rows = torch.cat([scores, risk[:, None], torch.randn(400, 3, generator=generator)], 1)
    model = compose(output="logits")(bench.Known())
    missed = 1 - scores.exp()[torch.arange(400), y]
    sets = calibrate(model, (rows, y), "conformal", score="lac").predict_set(rows, 0.9)
    assert torch.equal(sets, 1 - scores.exp() <= missed.sort().values[360])  # the 361st of 400: ceil(401 * 0.9)
    groups = bench.bins_of(rows)(rows)
    assert groups.bincount().tolist() == [40] * bench.BINS
    sets = calibrate(model, (rows, y), "conformal", score="lac", groups=bench.bins_of(rows)).predict_set(rows, 0.9)
    for group in range(bench.BINS):
        inside = groups == group
        quantile = missed[inside].sort().values[36]  # the 37th of 40
        assert torch.equal(sets[inside], 1 - scores.exp()[inside] <= quantile)


def test_only_the_warning_of_strange_rows_counts_as_said(bench: ModuleType) -> None:
    assert not bench.warns(lambda: warnings.warn("something else", WorkbenchWarning, stacklevel=1))
    assert bench.warns(lambda: warnings.warn("9 rows are stranger by vacuitic risk", WorkbenchWarning, stacklevel=1))


def test_the_table_tells_moderate_shifts_from_severe_ones(bench: ModuleType, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    covered = {("none", 0): 0.9, ("blur", 1): 0.88, ("blur", 3): 0.8, ("noise", 2): 0.87, ("blur", 5): 0.5}
    same = {"seed": 0, "method": "split"}
    rows = [
        {**same, "kind": kind, "severity": severity, "coverage": value, "size": 1.5, "told": value < 0.85}
        for (kind, severity), value in covered.items()
    ]  # fmt: skip
    text = bench.summary(pandas.DataFrame(rows), tmp_path)
    assert "| split | 90.0% | 87.0% | 84.0% | nan% | nan% | 80.0% | 67% | 67% | 50.0% | 1.50 | 1.50 |" in text
    words = "a warning was given for 2 of them; also for 0 of 2 other shifts, and for 0 of 1 sets of clean images"
    assert "fell below 87% under 2 shifts" in " ".join(text.split())
    assert words in " ".join(text.split())


def test_the_table_of_losses_has_a_line_for_each_wrapper_and_way(bench: ModuleType, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    same = {"seed": 0, "method": "split"}
    rows = [
        {**same, "task": task, "wrapper": wrapper, "kind": kind, "severity": severity, "loss": loss, "above": 0.5, "size": 2.0}
        for task in ("masks", "labels")
        for wrapper in ("plain", "vote")
        for kind, severity, loss in (("none", 0, 0.1), ("blur", 1, 0.12), ("blur", 3, 0.2))
    ]  # fmt: skip
    sets = [
        {**same, "kind": kind, "severity": severity, "coverage": 0.9, "size": 1.5, "told": False}
        for kind, severity in (("none", 0), ("blur", 1))
    ]  # fmt: skip
    text = bench.summary(pandas.DataFrame(sets + rows), tmp_path)
    line = "split | 10.0% | nan% | 16.0% | nan% | nan% | 20.0% | 50% | 50% | 2.00 | 2.00 |"
    assert text.count(f"| plain | {line}") == text.count(f"| vote | {line}") == 2


def test_probabilities_below_each_threshold_are_counted(bench: ModuleType) -> None:
    losses = load_file(ROOT / "benchmarks" / "shift_losses.py")
    p = torch.rand(50, generator=torch.Generator().manual_seed(0))
    expected = [(p < 1 - t).double().mean().item() for t in losses.THRESHOLDS]
    assert losses._below(p).tolist() == pytest.approx(expected)
    x, y = losses.pairs(torch.arange(8.0).reshape(4, 1, 1, 2), torch.tensor([0, 3, 0, 5]))
    assert x[:, 0, 0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert [row.nonzero().flatten().tolist() for row in y] == [[0], [3, 5]]
