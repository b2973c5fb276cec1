"""Files of `workbench report`: each run has a name of its own, and nothing of the user's is replaced."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from conftest import write_notebook

from workbench.cli import main
from workbench.notebook import run_grid
from workbench.notebook.grid import combinations


def test_names_of_runs() -> None:
    assert list(dict(combinations("a", {"e": 1}, {}))) == ["a"]
    assert combinations("a", {"e": 1}, {"n": [3]}) == [("a_n-3", {"e": 1, "n": 3})]
    assert combinations("index", {}, {})[0][0] == "index-run"
    odd = combinations("a", {}, {"w": [["vote", "x/y"], "../up", "z" * 300]})
    assert [name[:20] for name, _ in odd] == [
        "a_w-vote-x-y-" + odd[0][0][-8:-1],
        "a_w-..-up-" + odd[1][0][-8:],
        "a_w-" + "z" * 16,
    ]
    assert all("/" not in name and len(name) <= 120 for name, _ in odd)
    with pytest.raises(ValueError, match="give each value once"):
        combinations("a", {}, {"n": [1, 1]})
    with pytest.raises(ValueError, match="both for all runs and in the grid"):
        combinations("a", {"n": 1}, {"n": [1]})
    for wrong in ([], "abc"):
        with pytest.raises(ValueError, match="has no values for n"):
            combinations("a", {}, {"n": wrong})


def test_two_runs_never_share_a_name_on_any_file_system() -> None:
    values: list[Any] = [
        "a/b",
        "a:b",
        "a-b",
        "a b",
        " a b",
        "😀",
        "😁",
        "x",
        "X",
        "é",
        "e\u0301",
        "\ud800",
        "\ud801",
        "ß",
        "ss",
    ]
    values += [
        1,
        "1",
        1.0,
        True,
        "true",
        None,
        "null",
        "",
        "-",
        ["a", "b"],
        "a,b",
        ["a,b"],
        "1_m-2",
        "1_m-3",
        "日" * 60,
        "日" * 61,
    ]
    names = [label for label, _ in combinations("a", {}, {"n": values})]
    names += [label for label, _ in combinations("a", {}, {"n": [1], "m": [2, 3]})]
    names += [combinations(stem, {}, {})[0][0] for stem in ("index", "index-run", "my notebook", "my-notebook")]
    folded = {unicodedata.normalize("NFKC", name).casefold() for name in names}
    assert len(folded) == len(names) == len(values) + 6
    assert all(
        len(f".{name}.ipynb.01234567.part".encode()) <= 255 and re.fullmatch(r"[\w.+=-]+", name) for name in names
    )
    assert names[:3] == [label for label, _ in combinations("a", {}, {"n": values[:3]})]  # whatever else is in the grid
    assert combinations("a", {}, {"n": ["sine_gap", 0.1]})[0][0] == "a_n-sine_gap"


@pytest.mark.slow
def test_links_out_of_the_folder_are_replaced_and_what_they_lead_to_stays(tmp_path: Path) -> None:
    notebook, outside, folder = tmp_path / "a.ipynb", tmp_path / "outside", tmp_path / "reports"
    write_notebook(notebook, "1")
    outside.mkdir()
    folder.mkdir()
    for name in ("a.ipynb", "a.html", "index.html", "index.json", "index.csv"):
        (outside / name).write_text("mine")
        (folder / name).symlink_to(outside / name)
    (run,) = run_grid(notebook, folder, progress=False)
    assert run.status == "ok"
    assert Path(run.output) == folder / "a.ipynb"
    assert {file.read_text() for file in outside.iterdir()} == {"mine"}
    assert not any(file.is_symlink() for file in folder.iterdir())


@pytest.mark.slow
def test_a_report_with_other_parameters_says_which_one_it_replaces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook, folder = write_notebook(tmp_path / "a.ipynb", "1"), tmp_path / "out"
    printed_lines = []
    for arguments in ([], ["-p", "rate", "0.1"], ["-p", "rate", "0.1"], ["-g", "rate=0.2"]):
        assert main(["report", str(notebook), "-o", str(folder), *arguments]) == 0
        printed_lines.append(capsys.readouterr().out)
    words = "replaces the report with rate=0.5; -g rate=0.1 or -o DIR keeps both"
    assert [words in line for line in printed_lines] == [False, True, False, False]
    assert not any("replaces" in line for line in (printed_lines[0], *printed_lines[2:]))


def test_a_notebook_of_the_user_is_not_replaced_by_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    notebook, existing = write_notebook(tmp_path / "a.ipynb", "1"), write_notebook(tmp_path / "mine" / "a.ipynb", "2")
    before = existing.read_text()
    assert main(["report", str(notebook), "-o", str(tmp_path / "mine")]) == 2
    assert "is a notebook, not a report, and would be replaced: choose another folder (-o)" in capsys.readouterr().err
    assert existing.read_text() == before
