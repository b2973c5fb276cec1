"""The benchmark `answers`: its questions, and small cells compared with plain passes and another library's AUROC."""

from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import ROOT

from workbench.experiments.store import key
from workbench.experiments.worker import load_file


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_file(ROOT / "benchmarks" / "answers.py")


@pytest.fixture(scope="module")
def tasks(bench: ModuleType) -> ModuleType:
    """As the benchmark imports it."""
    return sys.modules["answers_tasks"]


def test_cells_are_json_and_each_is_there_once(bench: ModuleType) -> None:
    for smoke in (True, False):
        cells = bench.cells(smoke)
        assert len({json.dumps(cell, sort_keys=True) for cell in cells}) == len(cells)


def test_the_committed_results_are_those_of_all_cells(bench: ModuleType) -> None:
    with (ROOT / "benchmarks/results/answers.csv").open(encoding="utf-8", newline="") as file:
        assert {row["cell"] for row in csv.DictReader(file)} == {key(cell) for cell in bench.cells()}


def test_no_prompt_is_among_the_sums_of_the_training(tasks: ModuleType) -> None:
    known, kinds = tasks.sums(500)
    assert {len(some) for some in kinds.values()} == {400, 500}  # the block is of 20 x 20 sums
    for question, answer in (*known, *(line for some in kinds.values() for line in some)):
        assert sum(map(int, question.removesuffix("=").split("+"))) == int(answer)
    pairs = {tuple(map(int, question[:-1].split("+"))) for question, _ in known}
    assert not any(60 <= a < 80 and 60 <= b < 80 for a, b in pairs)
    for kind in ("held out", "unseen block", "three digits"):
        assert not pairs & {tuple(map(int, question[:-1].split("+"))) for question, _ in kinds[kind]}


def every_line(known: Any, kinds: Any) -> list[tuple[str, str, str]]:
    """Kind, question and answer; of each kind there are 40, none of them known."""
    assert all(len(set(some)) == 40 and not set(some) & set(known) for some in kinds.values())
    return [("known", *line) for line in known] + [(kind, *line) for kind, some in kinds.items() for line in some]


def test_words_are_what_their_kinds_say(tasks: ModuleType) -> None:
    for kind, question, word in every_line(*tasks.copies(40)):
        assert question == f"{word}="
        assert len(word) in ((8, 9, 10) if kind == "longer" else (4, 5, 6))
        assert sum(letter in tasks.UNSEEN for letter in word) == (kind == "unseen letter")
        assert kind != "two letters" or len(set(word)) <= 2


def test_tables_are_what_their_kinds_say(tasks: ModuleType) -> None:
    for kind, question, answer in every_line(*tasks.lookups(40)):
        rows, _, asked = question.partition("?")
        keys, values = rows[::2], rows[1::2]
        assert len(set(keys)) == len(keys) == len(values) == {"longer table": 5, "key not there": 2}.get(kind, 3)
        assert answer == dict(zip(keys, values, strict=True)).get(asked, "")
        assert (answer == "") == (kind == "key not there")
        assert sum(key in tasks.UNSEEN for key in keys) == (kind == "unseen key") == (asked in tasks.UNSEEN)
        assert (list(keys) != sorted(keys)) == (kind == "other order") or kind == "unseen key"
        assert asked in "abc" or kind == "unseen key"


def test_answers_and_lines_fit_into_the_network(tasks: ModuleType) -> None:
    for task in tasks.TASKS.values():
        known, kinds = task.lines(20)
        for question, answer in (*known, *(line for some in kinds.values() for line in some)):
            assert len(answer) < task.longest
            assert len(question) + task.longest <= task.positions
            assert set(question + answer) <= set(task.characters)


def test_targets_are_the_characters_of_answers_and_their_end(tasks: ModuleType) -> None:
    tokens = tasks.Characters()
    x, y = tasks.encoded([("1+2=", "3"), ("10+9=", "19")], tokens)
    assert x.tolist() == [[1, 10, 2, 11, 3, 12, 12], [1, 0, 10, 9, 11, 1, 9]]
    assert y.tolist() == [[-100, -100, -100, 3, 13, -100, -100], [-100, -100, -100, -100, 1, 9, 13]]
    assert tokens.decode(torch.tensor([1, 9, 13, 12])) == "19"


def test_answers_mean_the_same_where_they_are_the_same_number(tasks: ModuleType) -> None:
    assert tasks.same_number("07", "7")
    assert not tasks.same_number("7", "17")
    assert tasks.same_number("1+", "1+")
    assert not tasks.same_number("", "0")
    assert not tasks.same_text("07", "7")


@pytest.mark.slow
@pytest.mark.parametrize(  # until some answers are right, or none
    ("method", "epochs", "task", "asked"),
    [
        ("plain", 12, "addition", "zero in front"),
        ("vote", 2, "addition", "zero in front"),
        ("plain", 1, "retrieval", "unseen key"),
    ],
)
def test_a_cell_and_its_summary(
    bench: ModuleType,
    tasks: ModuleType,
    method: str,
    epochs: int,
    task: str,
    asked: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("transformers")
    reference = pytest.importorskip("sklearn.metrics")
    monkeypatch.setattr(tasks, "WIDTH", 16)
    monkeypatch.setattr(tasks, "SHARE", 0.1)
    monkeypatch.setattr(tasks, "TABLES", 1000)
    before = torch.get_rng_state()
    wrapped = tasks.trained(method, 0, epochs, task)
    monkeypatch.setattr(bench, "trained", lambda *_: wrapped)
    cell: dict[str, Any] = {"method": method, "seed": 0, "epochs": epochs, "prompts": 60, "task": task}
    frame = pandas.DataFrame([{**cell, **row} for row in bench.run(**cell)])
    assert torch.equal(torch.get_rng_state(), before)
    names = ["log-probability", "mean log-probability", "mean entropy", "max entropy"]
    names += ["mean aleatoric", "mean epistemic", "max epistemic", "perplexity spread"] if method == "vote" else []
    names += ["self-consistency", "semantic entropy", "semantic entropy, discrete"]
    for _, some in frame.groupby("prompts_of"):
        assert list(some["score"]) == names
    written = bench.summary(frame, tmp_path)
    assert f"| {method} | semantic entropy |" in written
    assert f"### {task}\n" in written
    assert (tmp_path / "answers-wrong.png").stat().st_size > 5000

    plain = [voter.eval() for voter in wrapped.voters()] if method == "vote" else [wrapped.unwrap().eval()]
    tokens, wrong, sure = tasks.Characters(tasks.TASKS[task].characters), [], []
    for question, answer in tasks.TASKS[task].lines(60)[1][asked]:  # of which an early network has some sums right
        row, doubt = tokens(question)["input_ids"], 0.0
        start = len(row)
        while len(row) < start + tasks.TASKS[task].longest and row[-1] != tokens.eos_token_id:
            with torch.no_grad():
                probs = torch.stack([net(torch.tensor([row])).logits[0, -1].softmax(-1) for net in plain]).mean(0)
            row.append(int(probs.argmax()))
            doubt -= math.log(float(probs.max()))
        wrong.append(tokens.decode(torch.tensor(row[start:])) != answer)
        sure.append(doubt)
    row = frame[(frame["prompts_of"] == asked) & (frame["score"] == "log-probability")].iloc[0]
    assert row["accuracy"] == pytest.approx(1 - sum(wrong) / 60)
    if 0 < sum(wrong) < 60:
        assert row["error_auroc"] == pytest.approx(reference.roc_auc_score(wrong, sure), abs=1e-3)
    else:
        assert math.isnan(row["error_auroc"])
