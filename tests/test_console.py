"""Progress bars: without a console there are none, and nothing fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import ROOT

from workbench.console import progress_bar
from workbench.experiments import run_cells


def test_a_program_without_a_console_has_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)  # as of pythonw, or of a shell's 2>&-
    assert list(progress_bar([1, 2])) == [1, 2]
    with progress_bar(total=2) as bar:
        bar.update()
        bar.set_postfix(loss=1.0)


def test_all_bars_are_made_in_one_place() -> None:
    package = ROOT / "workbench"
    importing = [path for path in package.rglob("*.py") if "from tqdm.auto" in path.read_text(encoding="utf-8")]
    assert importing == [package / "console.py"]


@pytest.mark.slow
def test_a_program_without_a_console_runs_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    assert run_cells("builtins:dict", [{"seed": 1}, {"seed": 0}], tmp_path / "seeds.csv")["seed"].tolist() == [1, 0]
