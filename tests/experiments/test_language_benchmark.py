"""The benchmark `language`: its texts, and a small cell of each kind compared with plain passes and another library's AUROC."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import ROOT

from workbench.experiments.worker import load_file

SOURCE = '''"""A module.

    With indents."""
import os  # a comment
class A:
    """A class."""
async def f(x):
    "A function, naïve."
    return """no docstring"""
def g():
    return 1
'''


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_file(ROOT / "benchmarks" / "language.py")


@pytest.fixture
def texts(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A standard library of ten modules, two of which are held out."""
    module = sys.modules["language_texts"]
    names = [f"m{i}" for i in range(10)]
    for i, name in enumerate(names):
        (tmp_path / f"{name}.py").write_text(f'"""Module number {i}. {"Reads and writes. " * 40}"""\nx = {i}\n' * 20)
    monkeypatch.setattr(module.sys, "stdlib_module_names", frozenset([*names, "built_in"]))
    monkeypatch.setattr(module.sysconfig, "get_path", lambda name: str(tmp_path))
    return module


def test_cells_are_json_and_each_is_there_once(bench: ModuleType) -> None:
    for smoke in (True, False):
        cells = bench.cells(smoke)
        assert len({json.dumps(cell, sort_keys=True) for cell in cells}) == len(cells)


def test_docstrings_and_code_of_a_module(bench: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    path.write_text(SOURCE, encoding="utf-8")
    prose, code = sys.modules["language_texts"]._parts(path)
    assert prose.split("\n\n") == ["A module.", "With indents.", "A class.", "A function, naïve."]
    assert "comment" not in code
    assert not any(
        ast.get_docstring(node) for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Module | ast.ClassDef)
    )
    assert "no docstring" in code
    assert sys.modules["language_texts"]._known("naïve\ttext\n") == "navetext\n"


def test_held_out_modules_are_never_learned(texts: ModuleType) -> None:
    learned, held_out = texts.texts("docstrings")
    assert all(f"number {i}." in (held_out if i % 5 == 0 else learned) for i in range(10))
    assert not any(f"number {i}." in (learned if i % 5 == 0 else held_out) for i in range(10))
    assert texts.texts("pages")[0] == ""
    assert "workbench bench --page" not in texts.texts("pages")[1][:200]


def test_targets_are_the_next_characters(texts: ModuleType) -> None:
    text = "".join(texts.CHARACTERS[i % 90] for i in range(1000))
    x, y = texts.windows(text, 100, 0)
    assert x.shape == (999 // 64, 64)
    assert torch.equal(x[:, 1:], y[:, :-1])
    starts = sorted(int(row[0]) for row in x)
    assert starts == sorted((64 * i) % 90 for i in range(999 // 64))
    assert len(texts.windows(text, 3, 0)[0]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("method", ["plain", "vote"])
def test_a_cell_and_its_summary(
    bench: ModuleType, texts: ModuleType, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("transformers")
    reference = pytest.importorskip("sklearn.metrics")
    monkeypatch.setattr(texts, "WIDTH", 16)
    monkeypatch.setattr(texts, "LAYERS", 1)
    before = torch.get_rng_state()
    wrapped = texts.trained(method, "docstrings", 0, 2, 60)
    monkeypatch.setattr(bench, "trained", lambda *_: wrapped)
    cell: dict[str, Any] = {**bench.cells(smoke=True)[0], "method": method}
    frame = pandas.DataFrame([{**cell, **row} for row in bench.run(**cell)])
    assert torch.equal(torch.get_rng_state(), before)
    names = [
        "1 - highest probability",
        "total",
        *(["aleatoric", "epistemic"] if method == "vote" else []),
        "perplexity",
    ]
    assert [list(some["score"]) for _, some in frame.groupby("kind", sort=False)] == [names] * 3
    written = bench.summary(frame, tmp_path)
    assert f"| {method} | total |" in written
    assert "### learned from docstrings\n" in written

    plain = [voter.eval() for voter in wrapped.voters()] if method == "vote" else [wrapped.unwrap().eval()]
    means = {}
    for kind in ("docstrings", "pages"):
        x, y = texts.windows(texts.texts(kind)[1], cell["asked"], 1)
        y = y[:, bench.READ :]
        with torch.no_grad():
            probs = torch.stack([net(x).logits.softmax(-1) for net in plain])[:, :, bench.READ :].double()
        mean = probs.mean(0)
        entropy = torch.special.entr(mean).sum(-1)
        aleatoric = torch.special.entr(probs).sum(-1).mean(0)
        scores = {
            "total": entropy,
            "aleatoric": aleatoric,
            "epistemic": entropy - aleatoric,
            "1 - highest probability": 1 - mean.amax(-1),
        }
        wrong = mean.argmax(-1) != y
        nll = -mean.gather(-1, y[..., None]).log()[..., 0]
        means[kind] = {**{name: values.mean(1) for name, values in scores.items()}, "perplexity": nll.mean(1).exp()}
        for _, row in frame[frame["kind"] == kind].iterrows():
            assert row["accuracy"] == pytest.approx(1 - wrong.double().mean().item(), abs=1e-6)
            assert row["perplexity"] == pytest.approx(nll.mean().exp().item(), rel=1e-4)
            if row["score"] != "perplexity":
                told = reference.roc_auc_score(wrong.flatten(), scores[row["score"]].flatten())
                assert row["error_auroc"] == pytest.approx(told, abs=0.01)
            if kind == "pages":
                both = torch.cat([means["docstrings"][row["score"]], means[kind][row["score"]]])
                foreign = reference.roc_auc_score([0] * (len(both) - len(x)) + [1] * len(x), both)
                # one of 16 pairs may change places by rounding
                assert row["auroc"] == pytest.approx(foreign, abs=0.07)
