"""run_notebook: parameters are checked first, outcomes are reported correctly, and unchanged runs are not repeated."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import numpy as np
import pytest
from conftest import THROWAWAY, write_notebook
from nbformat.sign import NotebookNotary

from workbench.experiments.environment import cause
from workbench.notebook import Run, environment, read_records, read_run, run_notebook
from workbench.notebook.commands import parse
from workbench.notebook.parameters import COMPUTED, declared_parameters, parse_parameter, split_values
from workbench.notebook.run import run_key

module = sys.modules["workbench.notebook.run"]
source_digest = module._source_digest  # as it is before any fixture replaces it


def outputs(run: Run) -> list[nbformat.NotebookNode]:
    return [output for cell in nbformat.read(run.output, 4).cells for output in cell.get("outputs", [])]


def text(run: Run) -> str:
    return "".join(output.text for output in outputs(run) if output.output_type == "stream")


def test_a_run_that_ends_well(throwaway: Callable[[str], Run]) -> None:
    run = throwaway("ok")
    assert (run.status, run.error, run.name, run.cached) == ("ok", None, "ok", False)
    assert run.parameters == {"n": 3, "rate": 0.5, "name": "x", "tags": ["a"]}
    assert 0 < run.seconds < 60
    assert run.key == run_key(run.notebook)
    assert run.environment == environment(Path(run.notebook).parent)
    assert read_run(run.output) == run
    assert not list(Path(run.output).parent.glob(".*.part"))


def test_records_come_out_of_a_real_kernel(throwaway: Callable[[str], Run]) -> None:
    records = throwaway("ok").records
    assert np.isnan(records.pop("loss"))
    assert records == {
        "bound": float("inf"),
        "n": 3,
        "third": 1 / 3,
        "single": float(np.float32(0.1)),
        "scores": [0, 1, 2],
    }
    assert list(records.figures) == ["line_plot"]
    assert list(records.tables["results"]) == ["wrapper", "rmse"]
    assert records.errors == []


def test_plots_appear_and_appear_once_whatever_backend_this_process_has(throwaway: Callable[[str], Run]) -> None:
    pictures = [o for o in outputs(throwaway("ok")) if "image/png" in o.get("data", {})]
    assert len(pictures) == 2  # one recorded, one shown by pyplot
    assert "matplotlib_inline" in text(throwaway("ok"))


@pytest.mark.skipif("GOMP_SPINCOUNT" in os.environ, reason="GOMP_SPINCOUNT is set")
def test_threads_that_wait_leave_the_cores_to_others(throwaway: Callable[[str], Run]) -> None:
    assert " threads 10000 " in text(throwaway("ok"))


def test_the_kernel_runs_beside_the_notebook_and_prints_no_noise(throwaway: Callable[[str], Run]) -> None:
    run = throwaway("ok")
    assert text(run).split(" in ")[1].strip() == str(Path(run.notebook).parent)
    assert not [o for o in outputs(run) if o.get("name") == "stderr"]


def test_jupyterlab_trusts_the_output(throwaway: Callable[[str], Run]) -> None:
    assert NotebookNotary().check_signature(nbformat.read(throwaway("ok").output, 4))


def test_a_cell_that_raises(throwaway: Callable[[str], Run]) -> None:
    run = throwaway("failed")
    assert (run.status, run.error) == ("failed", "ValueError: the <loss> is NaN")
    records = read_records(run.output)
    assert records == {"before": 1.5, "after": 2.5}
    assert records.errors == ["ValueError: the <loss> is NaN"]


@pytest.mark.slow
def test_a_name_recorded_by_two_cells_fails_the_run(throwaway: Callable[[str], Run], tmp_path: Path) -> None:
    run = run_notebook(throwaway("failed").notebook, tmp_path / "twice.ipynb", {"n": 2})
    assert run.status == "failed"
    assert run.error is not None
    assert "'before' is recorded already" in run.error
    assert run.records == {"before": 1.5}


@pytest.mark.slow
def test_a_cell_that_takes_too_long(throwaway: Callable[[str], Run]) -> None:
    run = throwaway("timeout")
    assert (run.status, run.error) == (
        "timeout",
        "the run took longer than 2 s; it was in cell 4 (cell-1)",
    )
    assert run.seconds < 30
    assert text(run) == "going to sleep\n"


@pytest.mark.slow
def test_a_kernel_that_dies(throwaway: Callable[[str], Run]) -> None:
    run = throwaway("died")
    assert run.status == "died"
    assert run.error is not None
    assert run.error.startswith("the kernel died in cell 3 (cell-0), exit code 3")
    assert read_run(run.output) == run


@pytest.mark.slow
@pytest.mark.parametrize("deaths", [1, 2])
def test_a_kernel_that_dies_as_it_starts_is_started_once_more(
    deaths: int, jupyter_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as one does whose port another process takes
    python, count = tmp_path / "python", tmp_path / "starts"
    python.write_text(
        f'#!/bin/sh\necho start >> {count}\n[ $(wc -l < {count}) -le {deaths} ] && exit 1\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr("workbench.notebook.client.sys", SimpleNamespace(executable=str(python)))
    run = run_notebook(write_notebook(tmp_path / "k.ipynb", "print('here')"), tmp_path / "out", progress=False)
    assert count.read_text().count("start") == 2
    assert run.status == ("ok" if deaths == 1 else "died")
    assert (text(run) == "here\n") is (deaths == 1)


@pytest.mark.slow
def test_a_run_from_inside_a_kernel(throwaway: Callable[[str], Run]) -> None:
    throwaway("ok")
    run = throwaway("nested")
    assert run.status == "ok", run.error
    assert text(run) == "ok 8\n"


@pytest.mark.slow
def test_interrupted_is_what_a_run_says_until_it_has_ended(jupyter_home: Path, tmp_path: Path) -> None:
    notebook = write_notebook(tmp_path / "slow.ipynb", THROWAWAY["timeout"])
    output = tmp_path / "out.ipynb"
    code = f"from workbench.notebook import run_notebook; run_notebook({str(notebook)!r}, {str(output)!r})"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "x.started").exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert read_run(output).status == "interrupted"  # what a SIGKILL would leave
    time.sleep(2)  # the next cell sleeps now
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=30)[1]
    assert "KeyboardInterrupt" in errors
    run = read_run(output)
    assert run.status == "interrupted"
    assert run.seconds > 0
    assert text(run) == "going to sleep\n"


def test_what_is_unchanged_is_not_run_again(throwaway: Callable[[str], Run]) -> None:
    run = throwaway("ok")
    before = os.stat(run.output).st_mtime_ns
    again = run_notebook(run.notebook, run.output, {"n": 3}, resume=True)  # spelling out a default changes nothing
    assert again.cached
    assert asdict(again) == {**asdict(run), "cached": True}
    assert os.stat(run.output).st_mtime_ns == before


@pytest.mark.slow
def test_what_failed_is_run_again(throwaway: Callable[[str], Run], tmp_path: Path) -> None:
    run = throwaway("died")
    copy = tmp_path / "died.ipynb"
    copy.write_bytes(Path(run.output).read_bytes())
    assert not run_notebook(run.notebook, copy, resume=True).cached


def test_the_key_covers_all_that_decides_the_result(
    jupyter_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = write_notebook(tmp_path / "a.ipynb", "print(n)")
    keys = [
        run_key(notebook),
        run_key(notebook, {"n": 4}),
        run_key(write_notebook(tmp_path / "b.ipynb", "print(rate)")),
    ]
    monkeypatch.setattr("workbench.notebook.run._source_digest", lambda: "edited")
    keys.append(run_key(notebook))
    monkeypatch.setattr("workbench.notebook.run.versions", lambda: {"torch": "99"})
    keys.append(run_key(notebook))
    assert len(set(keys)) == 5
    assert run_key(notebook, {"n": 3}) == run_key(notebook)
    assert run_key(write_notebook(tmp_path / "c.ipynb", "print(n)")) == run_key(notebook)


def test_the_key_covers_code_of_the_users_that_cells_import(jupyter_home: Path, tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    files = [tmp_path / name for name in ("net.py", "parts/layers.py", "unused.py", "parts/width.py")]
    for file, text in zip(
        files, ("from parts.layers import WIDTH", "from .width import WIDTH", "", "WIDTH = 3"), strict=True
    ):
        file.write_text(text)
    notebook = write_notebook(tmp_path / "a.ipynb", "%matplotlib inline\nimport net, json")
    nb = nbformat.read(notebook, as_version=4)
    nb.cells += [
        nbformat.v4.new_code_cell(text) for text in ("%%bash\nls | wc", "import unused.net if this were Python")
    ]
    nbformat.write(nb, notebook)
    before, changed = run_key(notebook), []
    for file in files:
        text = file.read_text()
        file.write_text(f"{text}  # another")
        changed.append(run_key(notebook) != before)
        file.write_text(text)
    assert changed == [True, True, False, True]
    (tmp_path / "elsewhere").mkdir()
    copied = shutil.copytree(tmp_path / "parts", tmp_path / "elsewhere" / "parts").parent
    for name in ("net.py", "a.ipynb"):
        shutil.copy(tmp_path / name, copied)
    assert run_key(copied / "a.ipynb") == run_key(notebook) == before


def test_the_digest_follows_the_source_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[source_digest.__module__], "__file__", str(tmp_path / "notebook" / "run.py"))
    (tmp_path / "notebook").mkdir()
    digests = set()
    for file, content in (("a.py", "x = 1"), ("a.py", "x = 2"), ("notebook/b.py", "")):
        (tmp_path / file).write_text(content)
        digests.add(source_digest())
    assert len(digests) == 2  # an empty file adds nothing
    (tmp_path / "notebook" / "b.py").write_text("y = 1")
    assert source_digest() not in digests


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ({"nmae": "y"}, ValueError, "no parameter 'nmae': did you mean name"),
        ({"zzz": 1}, ValueError, "it has n, name, rate, tags"),
        ({"n": 2.5}, TypeError, r"n of a.ipynb is 3 \(int\) by default and can't be 2.5 \(float\)"),
        ({"n": True}, TypeError, r"True \(bool\)"),
        ({"n": None}, TypeError, r"None \(NoneType\)"),
        ({"rate": "0.5"}, TypeError, r"rate of a.ipynb is 0.5 \(float\)"),
        ({"name": 3}, TypeError, r"can't be 3 \(int\)"),
        ({"tags": "a"}, TypeError, r"can't be 'a' \(str\)"),
        ({"tags": [{1: "a"}]}, TypeError, "tags of a.ipynb can't be .* keys that are texts"),
        ({"tags": [b"a"]}, TypeError, "lists hold numbers, texts, None, lists and dicts"),
        ({"name": "data-\udcff.csv"}, ValueError, r"name of a.ipynb: 'data-\\udcff.csv' has lone surrogates"),
        ({"tags": ["fine", "\ud800"]}, ValueError, r"tags of a.ipynb\[1\]: .* lone surrogates"),
    ],
)
def test_wrong_parameters_are_refused_before_anything_runs(
    tmp_path: Path, parameters: dict[str, Any], error: type[Exception], message: str
) -> None:
    notebook = write_notebook(tmp_path / "a.ipynb", "print(n)")
    with pytest.raises(error, match=message):
        run_notebook(notebook, tmp_path / "out" / "a.ipynb", parameters)
    assert [path.name for path in tmp_path.iterdir()] == ["a.ipynb"]


@pytest.mark.slow
def test_a_kernel_with_a_resource_tracker_ends_in_time_and_runs_its_exit_handlers(
    jupyter_home: Path, tmp_path: Path
) -> None:
    written = tmp_path / "written.txt"
    code = f"""import atexit, pathlib
from joblib.externals.loky.backend import resource_tracker
resource_tracker.ensure_running()
_ = atexit.register(pathlib.Path({str(written)!r}).write_text, "exited")"""
    run = run_notebook(write_notebook(tmp_path / "parallel.ipynb", code), tmp_path / "out.ipynb")
    assert run.status == "ok"
    assert written.read_text() == "exited"


@pytest.mark.slow
def test_numpy_values_and_odd_paths_reach_the_notebook(jupyter_home: Path, tmp_path: Path) -> None:
    notebook = write_notebook(tmp_path / "{n} a.ipynb", "print(repr((n, rate, tags, name)))")
    values = {"n": np.int64(7), "rate": 2, "tags": np.array([1.5]), "name": 'it\'s "{x}"\n'}
    run = run_notebook(notebook, tmp_path / "out {x}" / "{0}.ipynb", values, timeout=None)
    assert run.status == "ok", run.error
    assert text(run).strip() == repr((7, 2, [1.5], 'it\'s "{x}"\n'))
    assert run.parameters["n"] == 7
    assert Path(run.output) == tmp_path / "out {x}" / "{0}.ipynb"


@pytest.mark.slow
def test_defaults_of_any_literal_can_be_recorded(tmp_path: Path) -> None:
    source = "words = {'b', 'c', 'a'}\nsizes = {10, 9}\nnested = {'a': (1, 2)}\nraw = b'a'\npairs = {(1, 2): 3}\nz = 1j"
    cell = nbformat.v4.new_code_cell(source, metadata={"tags": ["parameters"]})
    notebook = tmp_path / "a.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), notebook)
    planned, _ = module.plan(nbformat.read(notebook, 4), notebook, tmp_path / "out.ipynb", {})
    assert planned.parameters == {"words": ["a", "b", "c"], "sizes": [9, 10], "nested": {"a": [1, 2]}}
    # the order of a set of texts differs between processes, and must not make another run of it
    code = f"from workbench.notebook.run import run_key; print(run_key({str(notebook)!r}))"
    keys = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert len(keys) == 1


def test_an_error_of_syntax_quotes_the_cell_beside_a_file_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_notebook(tmp_path / "a.ipynb", "def f(:\n    pass")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"a.ipynb can't be run: cell 3 .*, line 1: invalid syntax: 'def f\(:'"):
        run_notebook("a.ipynb", "out.ipynb")


def test_notebooks_that_cannot_be_run_are_refused(tmp_path: Path) -> None:
    notebook = write_notebook(tmp_path / "compare.ipynb", "print(n)")
    with pytest.raises(FileNotFoundError, match=r"did you mean compare.ipynb"):
        run_notebook(tmp_path / "comapre.ipynb", tmp_path / "out.ipynb")
    (tmp_path / "text.ipynb").write_text("hello")
    with pytest.raises(ValueError, match=r"text.ipynb is not a Jupyter notebook"):
        run_notebook(tmp_path / "text.ipynb", tmp_path / "out.ipynb")
    julia = write_notebook(
        tmp_path / "j.ipynb", "", kernelspec={"name": "julia-1.10", "language": "julia", "display_name": "J"}
    )
    with pytest.raises(ValueError, match=r"'julia-1.10' \(julia\); only Python"):
        run_notebook(julia, tmp_path / "out.ipynb")
    with pytest.raises(ValueError, match="overwrite the notebook itself"):
        run_notebook(notebook, notebook)
    with pytest.raises(ValueError, match="timeout must be a positive number"):
        run_notebook(notebook, tmp_path / "out.ipynb", timeout=0)
    with pytest.raises(ValueError, match="has no record of a run"):
        read_run(notebook)
    assert not (tmp_path / "out.ipynb").exists()


def test_parameters_are_read_without_running_them() -> None:
    source = (
        "a = 1\nb: float = -1e-3\nc = ['x',\n     'y']  # two\nd = open('nowhere')\ne = f = None\nprint(a)\ng.h = 2"
    )
    cell = nbformat.v4.new_code_cell(source, metadata={"tags": ["parameters"]})
    parameters = declared_parameters(nbformat.v4.new_notebook(cells=[cell]))
    assert parameters == {"a": 1, "b": -1e-3, "c": ["x", "y"], "d": COMPUTED, "e": None, "f": None}
    cell.source = "a = 1\nb = = 2"
    with pytest.raises(ValueError, match="line 2 of the parameters cell is not plain Python: 'b = = 2'"):
        declared_parameters(nbformat.v4.new_notebook(cells=[cell]))
    for source in ("a = 1\nb = \0", "a = " + "(" * 500 + ")" * 500):
        cell.source = source
        with pytest.raises(ValueError, match=rf"cell 2 \({cell.id}\): line . of the parameters cell"):
            declared_parameters(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("text"), cell]))
    cell.source = "a = {[]: 1}"
    assert declared_parameters(nbformat.v4.new_notebook(cells=[cell])) == {"a": COMPUTED}
    assert declared_parameters(nbformat.v4.new_notebook()) == {}


@pytest.mark.parametrize(
    ("default", "argument", "value"),
    [
        (3, "7", 7),
        (0.1, "1e-3", 1e-3),
        (0.1, "3", 3.0),
        (True, "no", False),
        ("x", "1", "1"),
        (["a"], "a, b", ["a", "b"]),
        (["a"], "none,1,'b,c',it's", ["none", "1", "b,c", "it's"]),
        (["a"], "vote(f(1, 2), 3), sculpt", ["vote(f(1, 2), 3)", "sculpt"]),
        ([[1, 2]], "[1, 2], [3, 4]", [[1, 2], [3, 4]]),
        ([[1, 2]], "[[1, [2]], [3, 4]]", [[1, [2]], [3, 4]]),
        ([[1, 2]], "[3, 4]", [[3, 4]]),
        ([(1, 2)], "(3, 4)", [(3, 4)]),
        ((1, 2), "(3, 4)", [3, 4]),
        ({1}, "{3, 4}", [3, 4]),
        ([1], "[1, 2]", [1, 2]),
        ([], "", []),
        (None, "none", None),
        (None, "2.5", 2.5),
        (None, "vote", "vote"),
        ({"a": 1}, "{'a': 2}", {"a": 2}),
    ],
)
def test_text_becomes_what_the_default_is(default: Any, argument: str, value: Any) -> None:
    parsed = parse_parameter({"p": default}, "p", argument, "a.ipynb")
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("default", "argument"), [(3, "2.5"), (3, "two"), (0.1, "x"), (True, "maybe"), ({}, "[1]"), ([0.1], "1e-3,o.2")]
)
def test_text_that_is_no_such_value_is_refused(default: Any, argument: str) -> None:
    with pytest.raises(ValueError, match=f"{argument!r} can.t be read as {type(default).__name__}".replace("[", r"\[")):
        parse_parameter({"p": default}, "p", argument, "a.ipynb")


def test_commas_inside_brackets_and_quotes_stay() -> None:
    assert split_values("a,[b,c],'d,e',{'f': 1, 'g': 2}") == ["a", "[b,c]", "'d,e'", "{'f': 1, 'g': 2}"]
    assert split_values("[[1, 2], [3]], f(g(1, 2), 3), don't, it's") == [
        "[[1, 2], [3]]",
        "f(g(1, 2), 3)",
        "don't",
        "it's",
    ]


def test_quotes_around_a_value_of_a_grid_are_no_part_of_it(tmp_path: Path) -> None:
    cell = nbformat.v4.new_code_cell("name = 'a'", metadata={"tags": ["parameters"]})
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "a.ipynb")
    assert parse(tmp_path / "a.ipynb", [], ["name='a,b',c"]) == ({}, {"name": ["a,b", "c"]})


def test_the_environment_tells_the_state_of_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment(tmp_path)["git"] == "none"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"], ["tag", "v7"]):
        subprocess.run([*git, *command], check=True)
    assert environment(tmp_path)["git"] == "v7"
    subprocess.run([*git, "tag", "-d", "v7"], check=True, capture_output=True)
    subprocess.run([*git, "tag", "größe"], check=True)
    monkeypatch.setattr("locale.getpreferredencoding", lambda *_: "ascii")  # as in the C locale
    monkeypatch.setattr("locale.getencoding", lambda: "ascii")
    monkeypatch.setattr("subprocess._text_encoding", lambda: "ascii")
    assert environment(tmp_path)["git"] == "größe"
    assert cause(-9).startswith("killed by SIGKILL")
    assert cause(-40).startswith("killed by signal 40")  # a real-time signal without a name
    here = environment()
    assert here["python"] == ".".join(map(str, sys.version_info[:3]))
    assert here["numpy"] == np.__version__
    assert {"torch", "pandas", "matplotlib", "papermill", "platform", "device"} <= set(here)
