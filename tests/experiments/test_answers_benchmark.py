"""The benchmark `answers`: its sums, and a small cell against plain passes and another library's AUROC."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import ROOT

from workbench.experiments.worker import load_file


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_file(ROOT / "benchmarks" / "answers.py")


def test_cells_are_json_and_each_is_there_once(bench: ModuleType) -> None:
    for smoke in (True, False):
        cells = bench.cells(smoke)
        assert len({json.dumps(cell, sort_keys=True) for cell in cells}) == len(cells)


def test_no_prompt_is_among_the_sums_of_the_training(bench: ModuleType) -> None:
    known, kinds = bench.sums(500)
    assert {len(some) for some in kinds.values()} == {400, 500}  # the block is of 20 x 20 sums
    for line in (*known, *(line for some in kinds.values() for line in some)):
        a, _, rest = line.partition("+")
        b, _, result = rest.partition("=")
        assert int(a) + int(b) == int(result)
    pairs = {tuple(map(int, line.split("=")[0].split("+"))) for line in known}
    assert not any(60 <= a < 80 and 60 <= b < 80 for a, b in pairs)
    for kind in ("held out", "unseen block", "three digits"):
        assert not pairs & {tuple(map(int, line.split("=")[0].split("+"))) for line in kinds[kind]}


def test_targets_are_the_characters_of_answers_and_their_end(bench: ModuleType) -> None:
    x, y = bench.encoded(["1+2=3", "10+9=19"])
    assert x.tolist() == [[1, 10, 2, 11, 3, 12, 12], [1, 0, 10, 9, 11, 1, 9]]
    assert y.tolist() == [[-100, -100, -100, 3, 13, -100, -100], [-100, -100, -100, -100, 1, 9, 13]]
    tokens = bench.Characters()
    assert tokens.decode(torch.tensor([1, 9, 13, 12])) == "19"


def test_answers_mean_the_same_where_they_are_the_same_number(bench: ModuleType) -> None:
    assert bench.same_number("07", "7")
    assert not bench.same_number("7", "17")
    assert bench.same_number("1+", "1+")
    assert not bench.same_number("", "0")


@pytest.mark.parametrize(("method", "epochs"), [("plain", 12), ("vote", 2)])  # until some answers are right, or none
def test_a_cell_and_its_summary(
    bench: ModuleType, method: str, epochs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("transformers")
    reference = pytest.importorskip("sklearn.metrics")
    monkeypatch.setattr(bench, "WIDTH", 16)
    monkeypatch.setattr(bench, "SHARE", 0.1)
    before = torch.get_rng_state()
    wrapped = bench.trained(method, 0, epochs)
    monkeypatch.setattr(bench, "trained", lambda *_: wrapped)
    cell: dict[str, Any] = {"method": method, "seed": 0, "epochs": epochs, "prompts": 60}
    frame = pandas.DataFrame([{**cell, **row} for row in bench.run(**cell)])
    assert torch.equal(torch.get_rng_state(), before)
    names = ["log-probability", "mean log-probability", "mean entropy", "max entropy"]
    names += ["mean aleatoric", "mean epistemic", "max epistemic", "perplexity spread"] if method == "vote" else []
    names += ["self-consistency", "semantic entropy", "semantic entropy, discrete"]
    for _, some in frame.groupby("prompts_of"):
        assert list(some["score"]) == names
    assert f"| {method} | semantic entropy |" in bench.summary(frame, tmp_path)

    plain = [voter.eval() for voter in wrapped.voters()] if method == "vote" else [wrapped.unwrap().eval()]
    tokens, wrong, sure = bench.Characters(), [], []
    for line in bench.sums(60)[1]["zero in front"]:  # of which an early network has some right
        row, doubt = tokens(line.split("=")[0] + "=")["input_ids"], 0.0
        start = len(row)
        while len(row) < start + 6 and row[-1] != tokens.eos_token_id:
            with torch.no_grad():
                probs = torch.stack([net(torch.tensor([row])).logits[0, -1].softmax(-1) for net in plain]).mean(0)
            row.append(int(probs.argmax()))
            doubt -= math.log(float(probs.max()))
        wrong.append(tokens.decode(torch.tensor(row[start:])) != line.split("=")[1])
        sure.append(doubt)
    row = frame[(frame["prompts_of"] == "zero in front") & (frame["score"] == "log-probability")].iloc[0]
    assert row["accuracy"] == pytest.approx(1 - sum(wrong) / 60)
    if 0 < sum(wrong) < 60:
        assert row["error_auroc"] == pytest.approx(reference.roc_auc_score(wrong, sure), abs=1e-3)
    else:
        assert math.isnan(row["error_auroc"])
