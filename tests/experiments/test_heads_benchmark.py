"""The benchmark `heads`: its cells, the cost of a pass compared with a count by hand, and its table of differences."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
import torch
from conftest import ROOT

from workbench.experiments.worker import load_file


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load_file(ROOT / "benchmarks" / "heads.py")
    monkeypatch.setattr(module, "timed", lambda passes, device: {name: [2.0, 2.0] for name in passes})
    return module


def test_cells_are_json_and_each_is_there_once(heads: ModuleType) -> None:
    for smoke in (True, False):
        cells = heads.cells(smoke)
        assert len({json.dumps(cell, sort_keys=True) for cell in cells}) == len(cells)


def test_costs_are_those_of_the_layers_that_run_twice(heads: ModuleType) -> None:
    state = torch.random.get_rng_state()
    rows = heads.run(task="toy", seed=0, epochs=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    products = [50, 2500, 2500, 50]
    for row, depth in zip(rows, (1, 2, 3), strict=True):
        assert row["layers"] == depth
        assert row["operations"] == pytest.approx(1 + sum(products[-depth:]) / sum(products))
        assert row["passes"] == 1
        assert math.isfinite(row["nll"])
        assert 0 < row["errors"] < 1


def test_differences_are_paired(heads: ModuleType, tmp_path: Path) -> None:
    """Seeds differ by far more than depths do, and two layers are as good as three in one seed and not in the other."""
    rows: list[dict[str, Any]] = []
    for seed, level in enumerate((1.0, 7.0)):
        for depth, more in ((1, -0.1), (2, 0.2 * seed), (3, 0.0)):
            row = {"task": "toy", "seed": seed, "layers": depth, "nll": level + more, "errors": 0.5, "sigma_error": 0.1}
            rows.append({**row, "operations": 1.5, "passes": 2.0})
    text = heads.summary(pd.DataFrame(rows), tmp_path)
    last, two, three = (line for line in text.splitlines() if line.startswith("| toy"))
    assert "-0.100 ± 0.000" in last
    assert "0.100 ± 0.100" in two
    assert "±" not in three.split("|")[4]
    assert text.endswith("last layer: toy (better); last two: none.")
