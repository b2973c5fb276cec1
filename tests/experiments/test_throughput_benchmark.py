"""The benchmark `throughput`: its cells, its augmentation, its loop compared with `fit`, and its page."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
import torch
from conftest import ROOT
from torch import nn
from torch.nn import functional as F

from workbench import compose
from workbench.experiments.worker import load_file


@pytest.fixture(scope="module")
def throughput() -> ModuleType:
    return load_file(ROOT / "benchmarks" / "throughput.py")


@pytest.fixture
def rows(throughput: ModuleType) -> Any:
    """Two classes of images that differ in brightness."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(512) % 2
    x = 0.5 * torch.randn(512, 1, 28, 28, generator=generator) + (2.0 * y - 1)[:, None, None, None]
    return throughput.Rows(x, y, x[:64], y[:64])


def test_cells_differ_and_the_first_seed_comes_first(throughput: ModuleType) -> None:
    cells = throughput.cells()
    assert len({json.dumps(cell, sort_keys=True) for cell in cells}) == len(cells)
    there = [cell for cell in cells if cell["on"] == "cuda" and cell["model"] != "resnet18"]
    assert [cell["seed"] for cell in there] == sorted(cell["seed"] for cell in there)
    assert {cell["method"] for cell in there} == set(throughput.WRAPPERS)
    assert {cell["on"] for cell in cells if cell["model"] == "resnet18"} == {"cuda"}


def test_a_cell_that_cannot_run_is_known_by_its_reason(throughput: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("workbench.data.files.is_local", lambda name: name == "fashion-mnist")
    here, there = throughput.cells(smoke=True)[0], throughput.cells()[0]
    assert throughput.possible(here) == ""
    assert throughput.possible(there) == "there is no CUDA device"
    assert throughput.possible({**here, "data": "cifar10-jpeg"}) == "cifar10-jpeg is not on this machine"


def test_images_are_moved_and_mirrored_in_training_only(throughput: ModuleType) -> None:
    shifted, x = throughput.Shifted(), torch.randn(40, 2, 6, 5)
    assert shifted.eval()(x) is x
    moved = shifted.train()(x)
    padded = F.pad(x, (4, 4, 4, 4))
    for before, after in zip(padded, moved, strict=True):
        windows = [before[:, top : top + 6, left : left + 5] for top in range(9) for left in range(9)]
        assert any(torch.equal(after, w) or torch.equal(after, w.flip(-1)) for w in windows)
    assert moved.shape == x.shape


def test_the_loop_learns_what_fit_learns(throughput: ModuleType, rows: Any) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    wrapped = compose()(copy.deepcopy(network))
    throughput.by_hand(network, rows, 4, 0.01, "cpu")
    throughput.fitted(wrapped, rows, 4, 0.01, 0)
    for model in (network, wrapped):
        scores = throughput.scores(model, rows, "cpu")
        assert scores["accuracy"] == 1
        assert scores["nll"] < 0.1


def test_a_wait_is_counted_where_more_rows_add_one(
    throughput: ModuleType, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    x, y = rows.x.repeat(8, 1, 1, 1), rows.y.repeat(8)

    def training(part: Any) -> None:
        for step in range(3 + len(part.x) // throughput.BATCH):
            warnings.warn(f"called a synchronizing CUDA operation, {step}", stacklevel=1)

    assert throughput.waits(training, throughput.Rows(x, y, x, y)) == 1
    assert modes == ["warn", "default"] * 2


def test_the_page_says_what_is_measured(throughput: ModuleType, tmp_path: Path) -> None:
    scores = {"accuracy": 0.9, "nll": 0.3, "auroc_wrong": 0.85}
    row = {
        "rows_s": 1000.0,
        "hand_rows_s": 2000.0,
        "ratio": 0.5,
        **scores,
        **{f"hand_{k}": v for k, v in scores.items()},
    }
    cells = [{**cell, **row, "hardware": "H"} for cell in throughput.cells() if cell["model"] != "resnet18"]
    for cell in cells:
        if cell["on"] == "cuda":
            cell["waits"] = 0.0
    page = throughput.summary(pd.DataFrame(cells), tmp_path)
    assert "### lenet5, fashion-mnist, H: 4 epochs, 3 seeds" in page
    assert "| vote | 1,000 | 0.50 / 0.20 | 0.900 | 0.300 | 0.850 | 0 |" in page
    assert "| plain | 1,000 | 0.50 | 0.900 | 0.300 | 0.850 |  |" in page  # no waits on a CPU
