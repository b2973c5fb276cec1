"""The benchmark `intents`: its cells, and a small cell of each kind on synthetic sentences, compared with other formulas."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import ROOT

from workbench.data.registry import entries
from workbench.experiments.worker import load_file

FILE = "clinc150/clinc150.json.gz"


def made() -> dict[str, list[list[str]]]:
    """Sentences of three intents, some of which nothing tells, so that some answers are wrong; those out of scope have other words."""
    filling, intents = ("please", "now", "my", "the", "could"), ("pay", "call", "play")
    parts: dict[str, list[list[str]]] = {}
    for part, count in (("train", 120), ("val", 30), ("test", 45)):
        texts = [f"{filling[i % 5]} {intents[i % 3] if i % 4 else 'do'} {filling[i % 2]}" for i in range(count)]
        parts[part] = [[text, intents[i % 3]] for i, text in enumerate(texts)]
    for part, count in (("oos_train", 5), ("oos_val", 5), ("oos_test", 20)):
        parts[part] = [["why whales" if i % 2 else f"{filling[i % 5]} why whales", "oos"] for i in range(count)]
    return parts


@pytest.fixture
def intents(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    raw = json.dumps(made()).encode()
    (tmp_path / FILE).parent.mkdir()
    (tmp_path / FILE).write_bytes(gzip.compress(raw))
    monkeypatch.setitem(entries()["clinc150"]["files"], FILE, hashlib.sha256(raw).hexdigest())
    monkeypatch.setenv("WORKBENCH_DATA", str(tmp_path))
    module = load_file(ROOT / "benchmarks" / "intents.py")
    module.sentences.cache_clear()
    yield module
    module.sentences.cache_clear()


def test_cells_are_json_and_each_is_there_once() -> None:
    bench = load_file(ROOT / "benchmarks" / "intents.py")
    for smoke in (True, False):
        cells = bench.cells(smoke)
        assert len({json.dumps(cell, sort_keys=True) for cell in cells}) == len(cells)


def test_no_sentence_out_of_scope_is_trained_or_chosen_on(intents: ModuleType) -> None:
    parts = intents.sentences(0)
    assert [len(parts[part][0]) for part in ("train", "validation", "test", "strange")] == [120, 30, 45, 20]
    assert set(parts["strange"][1].tolist()) == {-100}
    assert min(int(parts[part][1].min()) for part in ("train", "validation", "test")) == 0
    unknown = intents._unknown_words(parts["strange"][0])
    assert unknown.tolist() == pytest.approx([2 / len(text.split()) for text, _ in made()["oos_test"]])


@pytest.mark.parametrize("network", ["bag", "transformer"])
def test_padding_changes_no_answer(intents: ModuleType, network: str) -> None:
    from_models: Any = intents.trained.__globals__
    torch.manual_seed(0)
    net = from_models["NETWORKS"][network](12, 3).eval()
    x = torch.tensor([[4, 2, 7, 0, 0], [3, 5, 0, 0, 0]])
    torch.testing.assert_close(net(x)[1:], net(x[1:, :2]))


@pytest.mark.parametrize("method", ["plain", "vote", "sculpt", "sample"])
def test_a_cell_and_its_summary(intents: ModuleType, method: str, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    reference = pytest.importorskip("sklearn.metrics")
    before = torch.get_rng_state()
    cell: dict[str, Any] = {"network": "bag", "method": method, "seed": 0, "epochs": 1, "rows": 0}
    rows = intents.run(**cell)
    assert torch.equal(torch.get_rng_state(), before)
    frame = pandas.DataFrame([{**cell, **row} for row in rows])
    assert not frame.isna().any().any()
    voting = ["total", "aleatoric", "epistemic"]
    expected = {
        "plain": ["total", "unknown words", *intents.SCORES],
        "vote": [*voting, "epistemic by design", "total by design"],
        "sculpt": ["aleatoric"],
        "sample": voting,
    }[method]
    assert sorted(frame["risk"]) == sorted(expected)
    text = intents.summary(frame, tmp_path)
    assert "| bag | plain | total |" in text or f"| bag | {method} | aleatoric |" in text
    if method == "plain":
        parts, net = intents.sentences(0), intents.trained("bag", "plain", 0, 1, 0)
        with torch.no_grad():
            usual, strange = (net(parts[part][0]).softmax(1) for part in ("test", "strange"))
        y, scores = parts["test"][1], frame.set_index("risk")
        wrong = usual.argmax(1) != y
        out = torch.cat([torch.zeros(len(usual)), torch.ones(len(strange))])
        for name, doubt in (("total", lambda p: -(p * p.log()).sum(1)), ("msp", lambda p: 1 - p.amax(1))):
            inside, both = doubt(usual), torch.cat([doubt(usual), doubt(strange)])
            assert scores.loc[name, "error_auroc"] == pytest.approx(reference.roc_auc_score(wrong, inside), abs=1e-6)
            assert scores.loc[name, "auroc"] == pytest.approx(reference.roc_auc_score(out, both), abs=1e-6)
            assert scores.loc[name, "aupr"] == pytest.approx(reference.average_precision_score(out, both), abs=1e-6)
            flagged, hits, _ = reference.roc_curve(out, both, drop_intermediate=False)
            assert scores.loc[name, "fpr95"] == pytest.approx(flagged[hits >= 0.95].min(), abs=1e-6)
        assert scores.loc["total", "nll"] == pytest.approx(
            reference.log_loss(y, usual.double() / usual.double().sum(1, keepdim=True))
        )
        confidence, right = usual.amax(1), (~wrong).float()
        bins = [(confidence > k / 15) & (confidence <= (k + 1) / 15) for k in range(15)]
        gaps = [
            (right[rows].mean() - confidence[rows].mean()).abs() * rows.float().mean() for rows in bins if rows.any()
        ]
        assert scores.loc["total", "ece"] == pytest.approx(float(sum(gaps)), abs=1e-6)
