"""What `workbench diff` finds in folders of reports, and what their pages say about failed checks."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from bs4 import BeautifulSoup
from helpers import executed_reports
from helpers.executed_reports import executed, own_text, page
from nbformat import v4

from workbench.cli import main
from workbench.notebook import compare_reports, render
from workbench.notebook.index import Index

folder = executed_reports.folder


@pytest.fixture
def two(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Two folders of one run each."""

    def make(second: dict[str, Any], **first: Any) -> tuple[Path, Path]:
        for name, records in (("a", first), ("b", second)):
            executed(tmp_path / name, "run", {"n": 1}, **records)
            Index(tmp_path / name).write()
        return tmp_path / "a", tmp_path / "b"

    return make


def test_reports_that_are_the_same(two: Callable[..., tuple[Path, Path]], capsys: pytest.CaptureFixture[str]) -> None:
    values = {"rmse": 0.1, "loss": float("nan"), "name": "x", "scores": [1, 2.5], "bound": float("inf")}
    a, b = two({**values, "rmse": 0.1 * (1 + 1e-7)}, **values)
    assert main(["diff", str(a), str(b)]) == 0
    assert capsys.readouterr().out == "6 of 6 values are the same\n"
    assert main(["diff", str(a / "run.ipynb"), str(b / "run.ipynb")]) == 0
    assert main(["diff", str(a), str(b), "--tolerance", "0"]) == 1


def test_reports_that_differ(two: Callable[..., tuple[Path, Path]], capsys: pytest.CaptureFixture[str]) -> None:
    a, b = two({"rmse": 0.12, "name": "y", "scores": [1, 3.0], "more": 1}, rmse=0.1, name="x", scores=[1, 2.5], less=2)
    assert main(["diff", str(a), str(b), "--tolerance", "0.01"]) == 1
    printed = capsys.readouterr().out
    comparison = compare_reports(a, b, 0.01)
    assert {d.name: (d.first, d.second) for d in comparison.differences if d.name not in ("more", "less")} == {
        "rmse": (0.1, 0.12),
        "name": ("x", "y"),
        "scores[1]": (2.5, 3.0),
    }
    assert {d.name for d in comparison.differences} == {"rmse", "name", "scores[1]", "more", "less"}
    assert comparison.compared == 6
    relative = {d.name: d.relative for d in comparison.differences}
    assert relative["rmse"] == pytest.approx(0.02 / 0.12)
    assert relative["name"] is None
    line = next(line for line in printed.splitlines() if " rmse " in line)
    assert line.split() == ["run", "rmse", "0.1", "0.12", "0.17"]
    assert main(["diff", str(a), str(b), "--tolerance", "0.5"]) == 1  # text and missing values still differ


@pytest.mark.parametrize("nothing", [[], {}])
def test_an_empty_value_differs_from_a_missing_and_from_a_full_one(
    nothing: Any, two: Callable[..., tuple[Path, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    full = [1] if nothing == [] else {"0": 1}
    a, b = two({"same": [nothing], "full": full}, same=[nothing], full=nothing, lone=nothing)
    assert main(["diff", str(a), str(b)]) == 1
    assert str(nothing) in capsys.readouterr().out
    comparison = compare_reports(a, b)
    assert comparison.compared == 3
    assert [(d.name, str(d.first), str(d.second)) for d in comparison.differences] == [
        ("lone", str(nothing), "–"),
        ("full[0]", "–", "1"),
    ]


def test_a_value_named_status_is_not_that_of_the_run(tmp_path: Path) -> None:
    executed(tmp_path / "a", "run", {"n": 1}, status="converged")
    executed(tmp_path / "b", "run", {"n": 1}, "failed", status="converged")
    for name in "ab":
        Index(tmp_path / name).write()
    comparison = compare_reports(tmp_path / "a", tmp_path / "b")
    assert [(d.name, d.first, d.second) for d in comparison.differences] == [("status", "ok", "failed")]
    assert comparison.compared == 2


def test_every_difference_is_one_line(two: Callable[..., tuple[Path, Path]]) -> None:
    a, b = two({"text": "one\nthree", "a\nb": 2}, **{"text": "one\ntwo", "a\nb": 1})
    lines = str(compare_reports(a, b)).splitlines()
    assert len(lines) == 5
    assert lines[3].split() == ["run", r"a\nb", "1", "2", "0.5"]
    assert lines[4].split() == ["run", "text", r"one\ntwo", r"one\nthree"]


def test_what_made_them_is_told_too(tmp_path: Path) -> None:
    for name, n in (("a", 1), ("b", 2)):
        executed(tmp_path / name, "run", {"n": n}, rmse=1.0)
        Index(tmp_path / name).write()
    comparison = compare_reports(tmp_path / "a", tmp_path / "b")
    assert not comparison.differences
    assert "n: 1 -> 2" in str(comparison)


@pytest.mark.slow
def test_a_run_that_is_missing_or_failed_is_a_difference(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    executed(other, "many_a_0", {}, "failed", vote_rmse=1.0)
    Index(other).write()
    differences = {(d.run, d.name): (str(d.first), str(d.second)) for d in compare_reports(folder, other).differences}
    assert differences["many_a_1", "(the run)"] == ("there", "–")
    assert differences["many_a_0", "status"] == ("ok", "failed")


CLAIM, GROWS = "risk is <higher> outside", "error falls with rows"


@pytest.fixture
def checked(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders: all claims hold, and one of two does not in one run; a third run makes no claims."""
    for name, ratio in (("a", 1.5), ("b", 0.8123456)):
        for seed in (0, 1):
            claims = {
                CLAIM: (seed == 0 or ratio > 1, {"loss": {"__float__": "nan"}, "ratio": ratio}),
                GROWS: (True, {}),
            }
            executed(tmp_path / name, f"run_{seed}", {"seed": seed}, "ok", claims, rmse=1.0)
        executed(tmp_path / name, "run_2", {"seed": 2}, rmse=1.0)
        Index(tmp_path / name).write()
    return tmp_path / "a", tmp_path / "b"


def test_a_check_that_does_not_hold_is_told_by_the_index(checked: tuple[Path, Path]) -> None:
    good, bad = checked
    _, soup = page(bad)
    heads = [own_text(head.button) for head in soup.select("table.runs thead th") if head.button]
    assert heads[:4] == ["run", "status", "checks", "seed"]
    rows = soup.select("table.runs tbody tr")
    cells = [row.select("td")[1] for row in rows]
    assert [cell.get_text() for cell in cells] == ["2 of 2", "1 of 2", "–"]
    assert ["bad" in cell["class"] for cell in cells] == [False, True, False]
    assert [cell["data-value"] for cell in cells] == ["0", "-1", ""]  # sorted by how many do not hold
    said = [line.get_text() for line in rows[1].select(".error-line")]
    assert said == [f"✗ {CLAIM} (loss = nan, ratio = 0.8123)"]
    assert not rows[0].select(".error-line")
    assert [chip.get_text() for chip in soup.select(".counts li")] == ["3 ok", "1 with a check that does not hold"]
    assert "does not hold" not in page(good)[0]
    assert "checks" not in [head.get_text() for head in page(good)[1].select(".best")]


def test_checks_are_in_the_data_files(checked: tuple[Path, Path]) -> None:
    _, bad = checked
    runs = {run["name"]: run for run in json.loads((bad / "index.json").read_text(encoding="utf-8"))["runs"]}
    numbers = {"loss": {"__float__": "nan"}, "ratio": 0.8123456}
    assert runs["run_1"]["checks"] == {
        CLAIM: {"holds": False, "found": numbers},
        GROWS: {"holds": True, "found": {}},
    }
    assert runs["run_2"]["checks"] == {}
    with (bad / "index.csv").open(newline="", encoding="utf-8") as file:
        rows = {(row["run"], row["metric"]): row["value"] for row in csv.DictReader(file)}
    checks = {key: value for key, value in rows.items() if key[1].startswith("check: ")}
    assert checks == {
        ("run_0", f"check: {CLAIM}"): "1",
        ("run_0", f"check: {GROWS}"): "1",
        ("run_1", f"check: {CLAIM}"): "0",
        ("run_1", f"check: {GROWS}"): "1",
    }


def test_a_check_that_held_before_is_a_difference(
    checked: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = checked
    assert main(["diff", str(good), str(good)]) == 0
    assert main(["diff", str(good), str(bad)]) == 1
    for pair in ((good, bad), (good / "run_1.ipynb", bad / "run_1.ipynb")):
        comparison = compare_reports(*pair)
        assert [(d.run, d.name, d.first, d.second) for d in comparison.differences] == [
            ("run_1", f"check: {CLAIM}", "holds", "does not hold")
        ]
    assert comparison.compared == 3  # the rmse, and two checks
    assert f"check: {CLAIM}  holds  does not hold" in capsys.readouterr().out


@pytest.mark.slow
def test_the_banner_of_a_page_tells_its_checks(checked: tuple[Path, Path], tmp_path: Path) -> None:
    _, bad = checked
    banners = []
    for seed in range(3):
        text = render(bad / f"run_{seed}.ipynb", tmp_path / "page.html").read_text(encoding="utf-8")
        banners.append(BeautifulSoup(text, "html.parser").select_one(".banner"))
    holds, broken, none = banners
    assert holds is not None
    assert broken is not None
    assert none is not None
    assert "✓ all 2 checks hold" in holds.get_text()
    assert "doubted" not in holds["class"]
    assert {"doubted"} == set(broken["class"]) - {"banner"}
    assert broken["role"] == "alert"
    assert "✓ ok" in broken.get_text()  # the run itself ended well
    assert "✗ 1 of 2 checks does not hold:" in broken.get_text()
    assert [line.get_text() for line in broken.select("li")] == [f"{CLAIM} (loss = nan, ratio = 0.8123)"]
    assert "check" not in none.get_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none", "out"], "there is neither a folder of reports nor an executed notebook none"),
        (["out", "empty"], "empty holds no reports"),
        (["out", "out/many_a_0.ipynb"], "compare two folders or two notebooks"),
        (["out", "broken"], "was not written by workbench report"),
        (["out", "out", "--tolerance", "-1"], "tolerance must be a number of at least 0"),
        (["plain.ipynb", "plain.ipynb"], "has no record of a run"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(folder.parent)
    for name in ("empty", "broken"):
        Path(name).mkdir()
    Path("broken/index.json").write_text("[]")
    nbformat.write(v4.new_notebook(), "plain.ipynb")
    assert main(["diff", *arguments]) == 2
    assert message in capsys.readouterr().err
