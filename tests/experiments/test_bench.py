"""`workbench bench`: the benchmarks of the repository, and the page made from their results."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from workbench import data
from workbench.cli import main
from workbench.experiments import bench
from workbench.experiments.environment import version
from workbench.experiments.store import key, read
from workbench.experiments.worker import load_file

BENCHMARKS = ROOT / "benchmarks"
RESULTS = sorted((BENCHMARKS / "results").glob("*.csv"))

SMALL = '''"""Halves of numbers,
by division.

More about it.
"""

def cells(smoke=False):
    return [{"n": n, "how": how} for n in ((1,) if smoke else (1, 2)) for how in ("fast", "slow")]

def run(n, how):
    assert n != 2 or how != "slow", "too slow"
    return {"half": n / 2}

def summary(frame, images):
    if len(frame) < 2:
        raise KeyError("half")
    (images / "small.txt").write_text("a picture")
    return f"{len(frame)} rows with a mean of {frame['half'].mean():g}\\n"
'''


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A benchmark in a folder of its own."""
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "models.py").write_text("def cells(): ...")
    (folder / "small.py").write_text(SMALL)
    return folder / "small.py"


def test_what_there_is_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(bench.names(BENCHMARKS))
    assert any(line.startswith("toy ") and "Known truths" in line for line in lines)


@pytest.mark.slow
def test_a_run_goes_on_and_tells_what_failed(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = small.parent / "results" / "small.csv"
    assert main(["bench", str(small), "-g", "n=1", "-g", "how=fast"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("[1/1] ok")
    assert printed[1:] == [f"1 of 1 cells: {results}"]

    assert main(["bench", str(small), "-j", "2", "--timeout", "60"]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[:3]] == ["[2/4]", "[3/4]", "[4/4]"]
    assert printed[3:] == [
        f"3 of 4 cells: {results}",
        f"1 without results: {results.with_suffix('.failed.txt')}",
    ]
    assert "AssertionError: too slow" in results.with_suffix(".failed.txt").read_text()
    assert read(results)["half"].tolist() == [0.5, 0.5, 1.0]
    runs = json.loads(results.with_suffix(".json").read_text())["runs"]
    assert [run["command"] for run in runs] == [
        "workbench bench small -g n=1 -g how=fast",
        "workbench bench small -j 2",
    ]

    assert main(["bench", str(small), "-g", "n=1", "--fresh"]) == 0
    assert capsys.readouterr().out.count("] ok") == 2


def test_cells_that_cannot_run_here_are_left_out_with_a_word(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    possible = 'def possible(cell):\n    return f"there is no {cell[\'n\']}" if cell["how"] == "slow" or cell["n"] == 1 else ""\n'
    small.write_text(f"{SMALL}\n\n{possible}")
    assert main(["bench", str(small)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == ["2 cells left out: there is no 1", "1 cell left out: there is no 2"]
    assert printed[2].startswith("[1/1] ok")
    results = small.parent / "results" / "small.csv"
    assert printed[3:] == [f"1 of 1 cells: {results}"]
    assert read(results)["half"].tolist() == [1.0]
    assert main(["bench", str(small), "-g", "n=1"]) == 0
    assert capsys.readouterr().out == "2 cells left out: there is no 1\n"
    assert read(results)["half"].tolist() == [1.0]


def test_a_smoke_run_is_kept_apart(small: Path) -> None:
    assert main(["bench", str(small), "--smoke"]) == 0
    assert len(read(small.parent / "results" / "smoke" / "small.csv")) == 2
    assert not (small.parent / "results" / "small.csv").exists()
    assert main(["bench", str(small), "--smoke", "-o", str(small.parent / "out")]) == 0
    assert (small.parent / "out" / "small.csv").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["toi"], "there is no benchmark 'toi': did you mean toy? there are "),
        (["none.py"], "there is no file none.py"),
        (["toy", "-g", "metod=vote"], "toy has no argument 'metod': did you mean method? there are task, method"),
        (["toy", "-g", "method=vot"], "toy has no cell with method=vot: did you mean vote? there are plain"),
        (["toy", "-g", "method=neo", "-g", "task=noise"], "no cell of toy has all of method=neo task=noise at once"),
        (["toy", "-g", "method"], "-g takes NAME=A,B"),
        (["toy", "-g", "method="], "names no values"),
        (["toy", "-j", "0"], "jobs must be a whole number of at least 1"),
        (["toy", "--timeout", "0"], "timeout must be a positive number"),
    ],
)
def test_bad_input_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["bench", *arguments, "-o", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_no_benchmark(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(small.parent / "models.py")]) == 2
    assert "must define cells, run, summary, and lacks run, summary" in capsys.readouterr().err


def test_without_the_repository(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "site-packages" / "workbench" / "experiments" / "bench.py"))
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "toy"]) == 2
    assert "run this in a clone of the repository" in capsys.readouterr().err
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "benchmarks").mkdir()
    assert bench.benchmarks_folder() == tmp_path / "benchmarks"  # now it is one


def test_the_page_is_made_of_the_files_alone(small: Path, tmp_path: Path) -> None:
    assert main(["bench", str(small)]) == 1
    results = small.parent / "results" / "small.csv"
    rows = results.read_text().splitlines()
    results.with_suffix(".jsonl").unlink()  # as in a checkout
    stale = rows[1].replace(key({"n": 1, "how": "fast"}), key({"n": 9})).replace("0.5", "900")
    results.write_text("\n".join([*rows, stale]) + "\n")
    text = bench.page(small.parent, tmp_path / "docs").read_text()
    assert "## small\n\nHalves of numbers, by division.\n\n3 rows with a mean of 0.666667\n\n" in text
    assert (tmp_path / "docs" / "images" / "small.txt").is_file()
    assert "- `workbench bench small`, 20" in text
    assert "3 cells, 0 s of work, 1 at a time with 1 thread each, on " in text
    assert f"Version of the code: {read(results)['version'][0]}." in text
    assert str(tmp_path) not in text

    results.write_text("\n".join([rows[0], rows[1].replace(version(small), "v0"), *rows[2:]]) + "\n")
    assert "(2 cells), v0 (1 cells)" in bench.page(small.parent, tmp_path / "docs").read_text()
    results.write_text(rows[0] + "\n")
    assert "## small" not in bench.page(small.parent, tmp_path / "docs").read_text()  # a run has only begun
    results.write_text("\n".join(rows[:2]) + "\n")
    with pytest.raises(ValueError, match=r"small\.py can't summarize the 1 rows of small\.csv .*workbench bench small"):
        bench.page(small.parent, tmp_path / "docs")


@pytest.mark.slow
def test_the_committed_page_is_that_of_the_committed_results(tmp_path: Path) -> None:
    """If this fails: workbench bench --page."""
    from matplotlib.image import imread

    assert RESULTS
    page = bench.page(BENCHMARKS, tmp_path)
    assert page.read_text(encoding="utf-8") == (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    pictures = list((tmp_path / "images").iterdir())
    assert pictures
    for picture in pictures:
        committed = ROOT / "docs" / "images" / picture.name
        assert committed.stat().st_size < 200_000
        new, old = imread(picture), imread(committed)
        assert new.shape == old.shape
        assert np.abs(new - old).mean() < 0.02  # versions of matplotlib may differ by a pixel


@pytest.mark.parametrize("path", bench.names(BENCHMARKS).values(), ids=lambda path: path.stem)
def test_a_benchmark_keeps_to_the_protocol(path: Path) -> None:
    module = load_file(path)
    assert 20 < len(bench.description(path)) < 300
    for smoke in (False, True):
        cells = module.cells(smoke=smoke)
        assert cells == module.cells(smoke=smoke)
        assert len({key(cell) for cell in cells}) == len(cells) > 0
    assert len(module.cells(smoke=True)) < len(module.cells())


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_are_of_cells_that_there_are(path: Path) -> None:
    keys = {key(cell) for cell in load_file(BENCHMARKS / f"{path.stem}.py").cells()}
    assert set(read(path)["cell"]) <= keys
    text = path.read_text() + path.with_suffix(".json").read_text()
    assert not re.search(r"(?<![\w.])/\w+/", text)  # no path of the machine


# ---- toy


class Oracle(nn.Module):
    """Gives the mean that it is told, and the risk."""

    def __init__(self, y: Tensor, risk: Tensor) -> None:
        super().__init__()
        self.y, self.risk = y, risk

    def forward(self, x: Tensor, return_risk: bool = False) -> tuple[Tensor, Tensor]:
        return self.y, self.risk


def test_toy_scores_of_noise() -> None:
    toy = load_file(BENCHMARKS / "toy.py")
    rows = data.toy.cubic(n_train=100)
    fresh = data.toy.cubic(n_train=5000, seed=10_003).train
    assert fresh.sigma is not None
    truth = fresh.x**3 / 6
    perfect = toy._noise(Oracle(truth, fresh.sigma), "sculpt", rows, 3)
    assert perfect["rmse"] < 1e-5
    assert perfect["sigma_error"] == 0
    assert perfect["nll"] == pytest.approx(perfect["nll_true"], abs=1e-9)

    worse = toy._noise(Oracle(truth + 0.3, 1.5 * fresh.sigma), "sculpt", rows, 3)
    true, predicted = (
        torch.distributions.Normal(m.double(), s.double())
        for m, s in ((truth, fresh.sigma), (truth + 0.3, 1.5 * fresh.sigma))
    )
    assert worse["nll_true"] == pytest.approx(float(true.entropy().mean()), rel=1e-6)
    divergence = torch.distributions.kl_divergence(true, predicted).mean()
    assert worse["nll"] - worse["nll_true"] == pytest.approx(float(divergence), rel=1e-5)
    assert worse["rmse"] == pytest.approx(0.3, rel=1e-5)
    assert (worse["sigma_error"], worse["sigma_bias"]) == pytest.approx((0.5, 0.5), rel=1e-5)


def test_toy_scores_of_what_was_not_seen() -> None:
    toy = load_file(BENCHMARKS / "toy.py")
    rows = data.toy.sine_gap(n_train=100)
    risk = (rows.test.x - 1).abs() + 0.5
    scores = toy._unseen(Oracle(rows.test.y, risk), "vote", rows, 0)
    assert scores["rmse"] == 0
    seen = rows.test.regions["data"]
    for name, region in (("gap", "gap"), ("far", "outside")):
        there = rows.test.regions[region]
        of = seen | there
        assert scores[f"auroc_{name}"] == pytest.approx(roc_auc_score(there[of], risk[of].flatten()))
        assert scores[f"ratio_{name}"] == pytest.approx(float(np.median(risk[there]) / np.median(risk[seen])), rel=1e-2)


@pytest.mark.slow
def test_toy_cells_repeat_exactly_and_have_the_baseline() -> None:
    toy = load_file(BENCHMARKS / "toy.py")
    random = torch.random.get_rng_state()
    for cell in toy.cells(smoke=True):
        row = toy.run(**cell)
        again = toy.run(**cell)
        assert row == again
        assert all(math.isfinite(value) for value in row.values())
        if cell["method"] == "plain" and cell["task"] == "unseen":
            assert (row["auroc_gap"], row["ratio_far"]) == (0.5, 1.0)
    assert torch.equal(random, torch.random.get_rng_state())


def test_toy_results_show_what_the_page_claims() -> None:
    """Each against the plain baseline of the same file."""
    frame = read(BENCHMARKS / "results" / "toy.csv")
    frame = frame[frame["n_train"] == 2000]
    means = frame.groupby("method").mean(numeric_only=True)
    assert means.loc["sculpt", "sigma_error"] < 0.1 < means.loc["plain", "sigma_error"]
    assert means.loc["vote of sculpt", "nll"] < means.loc["plain", "nll"]
    assert means.loc["vote", "ratio_gap"] > 3
    assert means.loc["neo", "auroc_far"] > 0.99


def test_cells_of_none_and_of_texts_with_commas_can_be_selected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small.py").write_text(
        "def cells(smoke=False):\n    return [{'b': b} for b in (None, 'y,z', 'x')]\n"
        "def run(b):\n    return {'v': 1}\ndef summary(frame, images):\n    return ''\n"
    )
    path = str(tmp_path / "small.py")
    assert main(["bench", path, "-o", str(tmp_path), "-g", "b='y,z',None"]) == 0
    assert "2 of 2 cells" in capsys.readouterr().out
    assert main(["bench", path, "-o", str(tmp_path), "-g", "b=w"]) == 2
    assert "there are None, y,z, x" in capsys.readouterr().err
