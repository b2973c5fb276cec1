"""The benchmark `camvid`: which pixels count, and a small cell of each kind on synthetic scenes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import ROOT
from torch import Tensor

from workbench import data
from workbench.experiments.worker import load_file

CLASSES = ["sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist"]
VOID = -100


def made(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Scenes [n, 3, 60, 80] of patches of 10 x 10 pixels whose brightness tells the class."""
    generator = torch.Generator().manual_seed(seed)
    patches = torch.randint(0, 12, (n, 6, 8), generator=generator)
    labels = patches.repeat_interleave(10, 1).repeat_interleave(10, 2)
    x = labels[:, None] / 12 + 0.02 * torch.randn(n, 3, 60, 80, generator=generator)
    return x, labels.masked_fill(labels == 11, VOID)


@pytest.fixture
def camvid(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    x, y = made(14, 0)
    rows = data.Data.from_arrays(x[:8], y[:8], classes=CLASSES, test=(x[8:], y[8:]), void=VOID)
    rows = replace(rows, parts={"validation": rows.test})
    monkeypatch.setattr(data, "load", lambda name, **options: rows)
    module = load_file(ROOT / "benchmarks" / "camvid.py")
    monkeypatch.setitem(module.trained.__wrapped__.__globals__, "CROP", (40, 60))
    yield module
    module.scenes.cache_clear()
    module.trained.cache_clear()


def test_unknown_pixels_have_no_label_and_the_others_are_numbered_anew(camvid: ModuleType) -> None:
    x, labels = made(14, 0)
    images, y, unknown = camvid.scenes(0)["train"]
    assert torch.equal(images, x[:8])
    for i, j in ((0, 0), (27, 53), (59, 79)):
        label = int(labels[2, i, j])
        assert int(y[2, i, j]) == (label if 0 <= label < 9 else VOID)
        assert bool(unknown[2, i, j]) == (label in (9, 10))


@pytest.mark.parametrize("method", ["plain", "neo", "vote last"])
def test_a_cell_and_its_summary(camvid: ModuleType, method: str, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    metrics = pytest.importorskip("sklearn.metrics")
    before = torch.get_rng_state()
    cell: dict[str, Any] = {"method": method, "seed": 0, "epochs": 1, "rows": 8}
    rows = camvid.run(**cell)
    assert torch.equal(torch.get_rng_state(), before)
    frame = pandas.DataFrame([{**cell, **row} for row in rows])
    assert not frame.isna().any().any()
    assert (
        list(frame["risk"])
        == {
            "plain": ["entropy", "1 - confidence", "- largest score"],
            "neo": ["vacuitic"],
            "vote last": ["aleatoric", "epistemic", "total"],
        }[method]
    )
    text = camvid.summary(frame, tmp_path)
    assert f"| {method} | {rows[-1]['risk']} |" in text
    if method == "plain":
        x, y, unknown = camvid.scenes(8)["test"]
        with torch.no_grad():
            p = camvid.trained("plain", 0, 1, 8)(x).softmax(1).movedim(1, -1)
        entropy, known = -(p * p.log()).sum(-1), y != VOID
        wrong = p.argmax(-1)[known] != y[known]
        row = frame.set_index("risk").loc["entropy"]
        assert row["accuracy"] == pytest.approx(1 - wrong.double().mean().item())
        assert row["error_auroc"] == pytest.approx(metrics.roc_auc_score(wrong, entropy[known]), abs=1e-6)
        strange = torch.cat([torch.zeros(int(known.sum())), torch.ones(int(unknown.sum()))])
        both = torch.cat([entropy[known], entropy[unknown]])
        assert row["unknown_auroc"] == pytest.approx(metrics.roc_auc_score(strange, both), abs=1e-6)
