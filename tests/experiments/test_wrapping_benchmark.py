"""The benchmark `wrapping`: its models, results of a cell compared with closed forms, and its page."""

from __future__ import annotations

import json
import subprocess
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import ROOT

from workbench.experiments.store import read
from workbench.experiments.worker import load_file


@pytest.fixture(scope="module")
def wrapping() -> ModuleType:
    return load_file(ROOT / "benchmarks" / "wrapping.py")


def test_cells_differ_and_are_of_all_wrappers_and_models(wrapping: ModuleType) -> None:
    cells = wrapping.cells()
    assert len({json.dumps(cell, sort_keys=True) for cell in cells}) == len(cells)
    wraps = [cell for cell in cells if cell["task"] == "wrap" and cell["on"] == "cpu"]
    assert {cell["wrapper"] for cell in wraps} == set(wrapping.WRAPPERS)
    assert {cell["model"] for cell in wraps} == set(wrapping.MODELS)
    assert {cell["millions"] for cell in wraps if cell["wrapper"] in wrapping.WHOLE} == {100}


def test_a_cell_that_cannot_run_is_known_by_its_reason(wrapping: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(wrapping.importlib.util, "find_spec", lambda name: None)
    cell = wrapping.cells(smoke=True)[0]
    assert wrapping.possible(cell) == ""
    assert wrapping.possible({**cell, "on": "cuda"}) == "there is no CUDA device"
    assert "cannot measure the processor time" in wrapping.possible(wrapping.cells()[0])


@pytest.mark.parametrize("millions", [1, 100, 1000])
@pytest.mark.parametrize("model", ["mlp", "gpt2 classes", "gpt2 words"])
def test_models_have_about_so_many_parameters(wrapping: ModuleType, model: str, millions: int) -> None:
    made = wrapping.build(model, millions, "meta")
    assert all(p.dtype is torch.bfloat16 for p in made.parameters())
    count = sum(p.numel() for p in made.parameters())
    if millions == 1000:
        assert 1e9 < count < 1.1e9
    assert count / 1e6 == pytest.approx(millions, rel=0.45)
    rows = torch.zeros(2, 7, dtype=torch.long) if "gpt2" in model else torch.zeros(2, made[0].in_features)
    outputs = {"mlp": 1, "gpt2 classes": 10, "gpt2 words": 3000 if millions == 1 else 50_257}[model]
    answer = made(rows.to("meta", None if "gpt2" in model else torch.bfloat16))
    assert answer.shape == (2, outputs)


@pytest.fixture(scope="module")
def rows(wrapping: ModuleType) -> list[dict[str, Any]]:
    before = torch.get_rng_state()
    more = wrapping._cell("mlp", "vote finetune, rank-one factors", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wrapping, "ROUNDS", 2)
        measured = [{**cell, **wrapping.run(**cell)} for cell in (*wrapping.cells(smoke=True), more)]
    assert torch.equal(torch.get_rng_state(), before)
    return measured


@pytest.mark.slow
def test_what_a_cell_gives(wrapping: ModuleType, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        json.dumps(row)
        assert row["wrap_low"] <= row["wrap_s"] <= row["wrap_high"]
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert row["bytes"] == 2 * row["parameters"]
        assert row["peak_copy"] == pytest.approx(1, abs=1e-6)
        assert row["added"] <= row["peak_wrap"] + 1e-6
    words, whole, factors = rows
    assert words["added"] == pytest.approx(3000 * 64 / words["parameters"], rel=1e-4)  # one more head
    assert whole["added"] == pytest.approx(5, rel=1e-6)
    width, depth = wrapping.MLP[1]
    # of each layer two factors and a bias, or as many numbers, for each voter; the last one has one output
    added = 5 * (depth * 3 * width + width + 2)
    assert factors["added"] == pytest.approx(added / factors["parameters"], rel=1e-3)


class Cycle:
    def __init__(self) -> None:
        self.own = self


@pytest.mark.slow
def test_what_was_made_is_gone_before_the_next_is_timed(wrapping: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Cycle]] = []

    def make() -> Cycle:
        assert not any(before() for before in made)
        cycle = Cycle()
        made.append(weakref.ref(cycle))
        return cycle

    monkeypatch.setattr(wrapping, "ROUNDS", 1)
    times = wrapping._timed({"one": make, "other": make}, "cpu")
    assert [len(values) for values in times.values()] == [1, 1]
    assert len(made) == 4


@pytest.mark.slow
def test_processes_are_timed_beside_import_torch(wrapping: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = {"import torch": ("-c", "sum(range(10**7))"), "nothing": ("-c", "pass")}
    monkeypatch.setattr(wrapping, "STARTS", starts)
    monkeypatch.setattr(wrapping, "ROUNDS", 2)
    slow, fast = wrapping.run("start", "cpu")
    assert (slow["what"], slow["cpu_ratio"], slow["wall_ratio"]) == ("import torch", 1, 1)
    assert 0 < fast["cpu_s"] < slow["cpu_s"]
    assert 0 < fast["cpu_ratio"] < 1
    assert fast["wall_low"] <= fast["wall_s"] <= fast["wall_high"]
    monkeypatch.setattr(wrapping, "STARTS", {"import torch": ("-c", "raise SystemExit(3)")})
    with pytest.raises(subprocess.CalledProcessError):
        wrapping.run("start", "cpu")


def test_each_report_has_a_folder_of_its_own(wrapping: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report that is there already would not be run again."""
    write = "import pathlib, sys; (pathlib.Path(sys.argv[1]) / 'page.html').touch(exist_ok=False)"
    reports = dict.fromkeys(("other", wrapping.REPORT), ("-c", write, wrapping.FOLDER))
    monkeypatch.setattr(wrapping, "REPORTS", reports)
    assert [row["what"] for row in wrapping.run("report", "cpu")] == ["other", wrapping.REPORT]


@pytest.mark.slow
def test_the_page_tells_what_was_missed(wrapping: ModuleType, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    good = {**rows[2], "millions": 1000, "wrap_s": 0.1, "added": 0.002}
    late, large = {**good, "wrapper": "neo", "wrap_s": 0.7}, {**good, "wrapper": "sample", "added": 0.0312}
    start = {"task": "start", "hardware": "a CPU", "what": "import torch", "cpu_s": 1.0, "wall_s": 2.0}
    start |= {f"{kind}_{end}": 1.0 for kind in ("cpu", "wall") for end in ("low", "high", "ratio")}
    names = {**start, "what": wrapping.NAMES, "cpu_ratio": 1.15}
    report = {**start, "task": "report", "what": wrapping.REPORT, "wall_s": 29.0}
    starts = [start, names, {**start, "what": wrapping.ANSWER, "wall_s": 0.2}, report]
    text = wrapping.summary(pandas.DataFrame([*starts, good, rows[1]]), tmp_path)
    assert "Both are met in 1 of 1 cases.\n" in text
    assert "Missed" not in text
    assert "`--help` in less than 0.3 s. Both are met." in " ".join(text.split())
    assert "| `import torch` | 1.000 (1.000 to 1.000) | 2.000 (1.000 to 1.000) | 1.000 | 1.000 |" in text
    assert "Target: less than 30 s. It is met." in text
    assert "| vote finetune, all layers |" in text
    assert "| 500 % |" in text
    starts[1], starts[3] = {**names, "wall_ratio": 1.2}, {**report, "wall_s": 31.5}
    text = wrapping.summary(pandas.DataFrame([*starts, good, late, large]), tmp_path)
    assert "Both are met in 1 of 3 cases. Missed:\n\n- neo: 0.70 s (MLP)\n- sample: 3.12 % (MLP)\n\n" in text
    assert "Measured: 1.200 and 0.200 s." in " ".join(text.split())
    assert "Target: less than 30 s. Measured: 31.5 s." in text
    assert "nan" not in text


def test_results_show_what_is_said_of_them() -> None:
    """The claims of the README, in the committed results."""
    frame = read(ROOT / "benchmarks" / "results" / "wrapping.csv")
    wraps = frame[(frame["task"] == "wrap") & (frame["millions"] == 1000)]
    one = wraps[~wraps["wrapper"].str.contains(" of ")]
    assert one["wrap_s"].max() < 0.3
    assert one.loc[one["model"] != "gpt2 words", "wrap_s"].max() < 0.05
    assert one.loc[(one["model"] != "gpt2 words") & (one["wrapper"] != "sculpt, three layers"), "added"].max() < 0.01
    assert wraps.loc[wraps["wrapper"].str.contains("rank-one"), "added"].max() < 0.01
    starts = frame[frame["task"] == "start"].set_index("what")
    names = next(name for name in starts.index if name.startswith("from workbench"))
    assert starts.loc[names, "cpu_ratio"] < 1.15
    assert starts.loc["workbench --help", "wall_s"] < 0.3
