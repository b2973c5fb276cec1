"""The benchmark `ood_pairs`: its cells, images and table."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import ROOT

from workbench.experiments.worker import load_file
from workbench.methods import made_outliers


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_file(ROOT / "benchmarks" / "ood_pairs.py")


@pytest.fixture(scope="module")
def models(bench: ModuleType) -> ModuleType:
    return load_file(ROOT / "benchmarks" / "ood_pairs_models.py")


def test_cells_are_json_and_the_networks_of_the_design_are_not_among_them(
    bench: ModuleType, models: ModuleType
) -> None:
    for smoke in (True, False):
        cells = bench.cells(smoke)
        assert len({json.dumps(cell, sort_keys=True) for cell in cells}) == len(cells)
        assert not {cell["seed"] for cell in cells} & {*models.DESIGN}
    assert {"auto", bench.WITHOUT} <= {*bench.METHODS}
    made = {**made_outliers.KINDS, **made_outliers.PICTURES}
    assert {*bench.LIKE_SHIFTS} < {*made}


def test_shifts_grow_and_leave_the_random_state_alone(models: ModuleType) -> None:
    before = torch.get_rng_state()
    x = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for kind in ("noise", "blur", "contrast", "jpeg"):
        away = [(models.shifted(x, kind, severity) - x).square().mean().item() for severity in range(1, 6)]
        assert away == sorted(away)
        assert 0 < away[0] < away[-1]
        assert models.shifted(x, kind, 2).shape == x.shape
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(models.shifted(x, "contrast", 2).std((2, 3)), 0.75**2 * x.std((2, 3)))


def test_the_table_says_how_far_each_lies_behind_the_best_single_one(bench: ModuleType, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    aurocs = {"msp": (0.7, 0.6), "vim": (0.5, 0.8), "auto": (0.9, 0.7), bench.WITHOUT: (1.0, 0.9)}
    rows = [
        {"seed": 0, "method": method, "out": out, "auroc": auroc, "fpr95": 0.5, "accuracy": 0.85}
        for method, both in aurocs.items()
        for out, auroc in zip(("near", "blur 1"), both, strict=True)
    ]
    text = bench.summary(pandas.DataFrame(rows), tmp_path)
    assert "| auto | 0.900 | 0.700 | 0.8000 | -0.050 | 0.100 | 50% |" in text
    assert "| msp | 0.700 | 0.600 | 0.6500 | 0.100 | 0.200 | 50% |" in text
