"""The command line: its output, the location of the report, and its exit codes."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import write_notebook

import workbench
from workbench.cli import main
from workbench.experiments.bench import FUNCTIONS
from workbench.notebook import read_run


@pytest.fixture
def notebook(jupyter_home: Path, tmp_path: Path) -> Path:
    return write_notebook(tmp_path / "small.ipynb", "assert n != 13, 'unlucky'\nprint(n, rate, tags)")


def test_help_needs_nothing_heavy() -> None:
    code = (
        "import sys; from workbench.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'numpy', 'pandas', 'nbformat', 'papermill'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=300, capture_output=True, text=True)
    assert "report" in done.stdout
    assert "data" in done.stdout


@pytest.mark.slow
def test_report_runs_renders_and_says_where(
    notebook: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["report", "small.ipynb", "-p", "rate", "1e-3", "-p", "tags", "b,c", "-o", "out"]
    assert main(arguments) == 0
    page = tmp_path / "out" / "small.html"
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("[1/1] ok")
    assert lines[1:] == [f"report: {page}", f"        {page.as_uri()}"]
    run = read_run(tmp_path / "out" / "small.ipynb")
    assert run.parameters == {"n": 3, "rate": 1e-3, "name": "x", "tags": ["b", "c"]}
    assert "0.001" in page.read_text(encoding="utf-8")

    page.unlink()
    assert main(arguments) == 0  # not run again, but rendered
    assert "cached" in capsys.readouterr().out
    assert page.is_file()
    assert read_run(run.output).started == run.started
    assert main([*arguments, "--fresh"]) == 0
    assert "cached" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_grid_goes_on_after_a_failed_run_and_tells(
    notebook: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["report", str(notebook), "-g", "n=13,2", "-g", "name=a-b", "-o", str(out)]) == 1
    printed = capsys.readouterr().out
    assert "[1/2] failed" in printed
    assert "small_n-13_name-a-b  AssertionError: unlucky" in printed
    assert "[2/2] ok" in printed
    pages = ["index.html", "small_n-13_name-a-b.html", "small_n-2_name-a-b.html"]
    assert sorted(path.name for path in out.glob("*.html")) == pages
    assert f"index: {out / 'index.html'}" in printed
    assert read_run(out / "small_n-2_name-a-b.ipynb").parameters["name"] == "a-b"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", "nmae", "y"], "did you mean name"),
        (["-p", "n", "many"], "'many' can't be read as int"),
        (["-g", "n=1,two"], "'two' can't be read as int"),
        (["-g", "n"], "-g takes NAME=A,B, not 'n'"),
        (["-g", "n="], "names no values"),
        (["-p", "n", "1", "-g", "n=2,3"], "parameter n is given twice"),
        (["-g", "n=2,2"], "give each value once"),
        (["--timeout", "-1"], "timeout must be a positive number"),
    ],
)
def test_bad_input_ends_with_2_before_anything_runs(
    notebook: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["report", str(notebook), "-o", str(tmp_path / "out"), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("workbench: ")
    assert message in captured.err
    assert captured.out == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "command", ["compare", "report", "diff a b", "bench", "demo", "data", "data list", "data show x"]
)
def test_an_unknown_argument_shows_how_to_call_the_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*command.split(), "--nope"])
    assert end.value.code == 2
    name = " ".join(word for word in command.split() if len(word) > 1)
    error = capsys.readouterr().err
    assert error.startswith(f"usage: workbench {name} [-h]")
    assert error.endswith(f"workbench {name}: error: unrecognized arguments: --nope\n")


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert (end.value.code, capsys.readouterr().out) == (0, f"workbench {workbench.__version__}\n")


def test_a_notebook_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "none.ipynb")]) == 2
    assert "there is no notebook" in capsys.readouterr().err


def test_an_output_folder_that_cannot_be(notebook: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["report", str(notebook), "-o", str(tmp_path / "file" / "out")]) == 2
    assert "file" in capsys.readouterr().err


def test_python_m_workbench_does_the_same(notebook: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "workbench", "report", str(notebook), "-p", "zzz", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert "no parameter 'zzz'" in done.stderr


def test_data_sets_are_listed_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from workbench import data

    monkeypatch.delenv("WORKBENCH_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("workbench.data.files.REPOSITORY", tmp_path)
    assert main(["data"]) == 0
    listed = capsys.readouterr().out
    assert main(["data", "list"]) == 0
    assert capsys.readouterr().out == listed
    lines = listed.splitlines()
    assert [line.split()[0] for line in lines[: len(data.names())]] == data.names()
    starred = [line.split()[0] for line in lines[:-2] if line.endswith("*")]
    assert starred == [name for name in data.names() if name not in data.names(available=True)]
    assert "concrete" in starred

    assert main(["data", "show", "Cubic"]) == 0
    assert "regression" in capsys.readouterr().out
    assert main(["data", "show", "concrete"]) == 0
    assert "workbench data fetch concrete" in capsys.readouterr().out
    assert main(["data", "fetch", "cubic"]) == 0
    assert capsys.readouterr().out == ""
    assert main(["data", "show", "conrete"]) == 2
    assert "did you mean 'concrete'" in capsys.readouterr().err


def test_a_terminal_that_lacks_a_character_shows_a_question_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions = "".join(f"def {name}(): ...\n" for name in FUNCTIONS)
    (tmp_path / "toy.py").write_text(f'"""Mean ± error."""\n{functions}', encoding="utf-8")
    monkeypatch.setattr("workbench.experiments.bench.benchmarks_folder", lambda: tmp_path)
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main(["bench"]) == 0
    assert written.getvalue().endswith(b"Mean ? error.\n")


@pytest.mark.parametrize("arguments", [["data", "list"], ["data", "show", "conrete"]])
def test_a_program_without_a_console_runs_commands(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)  # as of pythonw, or of a shell's >&-
    monkeypatch.setattr("sys.stderr", None)
    assert main(arguments) == (2 if "show" in arguments else 0)


@pytest.mark.slow
def test_a_reader_that_goes_away_gets_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)  # as head does when it has seen enough
    command = [sys.executable, "-m", "workbench", "data", "list"]
    process = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert process.stderr == ""
    assert process.returncode == 1
