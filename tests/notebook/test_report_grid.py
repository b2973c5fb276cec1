"""`workbench report` over a grid: a failing, hanging or dying run costs only itself, and nothing is lost however it ends."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import filelock
import nbformat
import pytest
from bs4 import BeautifulSoup
from conftest import write_notebook

from workbench.cli import main
from workbench.experiments import pool
from workbench.notebook import grid, pdf, read_run, run_grid, run_notebook
from workbench.notebook.client import MAX_PRINTED
from workbench.notebook.run import Run, finished, perform, plan, write

TROUBLE = """
import os, signal, sys, time
from pathlib import Path
from workbench.notebook import record

record(half=n / 2)
print("before")
---
print("in the cell", flush=True)
if n == 3:
    raise ValueError("unlucky")
if n == 4:
    os.kill(os.getpid(), signal.SIGKILL)
if n == 5:
    time.sleep(1000)
if n == 6:
    for _ in range(10):
        print("x" * 1_000_000)
if n == 7:
    import no_such_package
record(rmse=1 / n, threads=os.environ.get("OMP_NUM_THREADS", "any"))
---
print("after")
"""

FAKE_CHROMIUM = """#!/bin/sh
for option in "$@"; do case "$option" in --print-to-pdf=*) echo "%PDF of $option $*" > "${option#--print-to-pdf=}";; esac; done
"""


def statuses(folder: Path) -> dict[str, str]:
    return {run["name"]: run["status"] for run in json.loads((folder / "index.json").read_text())["runs"]}


def printed(executed: Path) -> str:
    cells = nbformat.read(executed, 4).cells
    return "".join(o.text for cell in cells for o in cell.get("outputs", []) if o.output_type == "stream")


@pytest.fixture(scope="module")
def environment(jupyter_home: Path) -> dict[str, str]:
    """For processes of their own."""
    return {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "MPLBACKEND")}


@pytest.fixture(scope="module")
def trouble(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, int]:
    """Folder, printed lines and exit code of a grid in which all goes wrong."""
    folder = tmp_path_factory.mktemp("trouble")
    notebook = write_notebook(folder / "t.ipynb", TROUBLE)
    command = [sys.executable, "-m", "workbench", "report", str(notebook), "-g", "n=2,3,4,5,6,7", "-j", "2"]
    done = subprocess.run(
        [*command, "--timeout", "12", "-o", str(folder / "out")],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return folder / "out", done.stdout + done.stderr, done.returncode


@pytest.mark.slow
def test_each_run_ends_in_its_own_way(trouble: tuple[Path, str, int]) -> None:
    out, said, code = trouble
    assert code == 1, said
    assert statuses(out) == {
        "t_n-2": "ok", "t_n-3": "failed", "t_n-4": "died", "t_n-5": "timeout", "t_n-6": "ok", "t_n-7": "failed"
    }  # fmt: skip
    lines = said.splitlines()
    assert [line.split("]")[0] for line in lines[:6]] == [f"[{k}/6" for k in range(1, 7)]
    assert lines[6].startswith("index: ")
    assert lines[6].endswith("index.html")
    reasons = {name: next(line for line in lines if name in line) for name in statuses(out)}
    assert reasons["t_n-3"].endswith("ValueError: unlucky")
    assert "killed by SIGKILL (as the system does when memory runs out)" in reasons["t_n-4"]
    assert "the run took longer than 12 s; it was in cell 4 (cell-1)" in reasons["t_n-5"]
    assert "No module named 'no_such_package' (notebooks run in the Python of workbench" in reasons["t_n-7"]
    assert not list(out.glob(".*.part"))


@pytest.mark.slow
def test_what_there_was_until_then_is_kept_and_shown(trouble: tuple[Path, str, int]) -> None:
    out, _, _ = trouble
    for n in (3, 4, 5):
        executed = out / f"t_n-{n}.ipynb"
        assert read_run(executed).records == {"half": n / 2}
        assert "before" in printed(executed)
        assert "after" not in printed(executed)
        page = BeautifulSoup((out / f"t_n-{n}.html").read_text(encoding="utf-8"), "html.parser")
        assert page.select_one(".banner.bad") is not None
        assert "1 later code cell did not run" in page.get_text()
    assert "in the cell" in printed(out / "t_n-5.ipynb")
    traceback = BeautifulSoup((out / "t_n-3.html").read_text(encoding="utf-8"), "html.parser").select_one("main .error")
    assert traceback is not None
    assert 'raise ValueError("unlucky")' in traceback.get_text()
    assert (json.loads((out / "index.json").read_text())["runs"][1])["records"] == {"half": 1.5}


@pytest.mark.slow
def test_a_flood_of_output_is_cut_and_the_run_goes_on(trouble: tuple[Path, str, int]) -> None:
    out, _, _ = trouble
    text = printed(out / "t_n-6.ipynb")
    assert 0.9 * MAX_PRINTED < len(text) < 1.1 * MAX_PRINTED
    assert "the rest of what this cell printed is left out" in text
    assert text.endswith("after\n")
    assert read_run(out / "t_n-6.ipynb").records["rmse"] == 1 / 6


@pytest.mark.slow
def test_runs_beside_each_other_take_one_thread_each_and_tell_their_memory(trouble: tuple[Path, str, int]) -> None:
    run = read_run(trouble[0] / "t_n-2.ipynb")
    assert run.records["threads"] == "1"
    assert run.peak_memory is not None
    assert 10 < run.peak_memory < 10_000
    assert {"git", "torch", "device"} <= set(run.environment)


@pytest.mark.slow
def test_only_what_is_needed_runs_again(jupyter_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cell = (
        "from pathlib import Path\nfrom workbench.notebook import record_check\n"
        "with open(f'{n}.count', 'a') as file: file.write('x')\n"
        "assert n == 1 or Path('ready').exists()\nrecord_check('n is not 3', n != 3, n=n)"
    )
    notebook, out = write_notebook(tmp_path / "r.ipynb", cell), tmp_path / "out"

    def counts() -> tuple[int, ...]:
        files = (tmp_path / f"{n}.count" for n in (1, 2, 3))
        return tuple(len(file.read_text()) if file.exists() else 0 for file in files)

    arguments = ["report", str(notebook), "-o", str(out)]
    assert main([*arguments, "-g", "n=1,2"]) == 1
    assert counts() == (1, 1, 0)
    (tmp_path / "ready").touch()
    (out / "r_n-1.html").unlink()
    capsys.readouterr()
    assert main([*arguments, "-g", "n=2,1,3"]) == 3  # all ended well, and a check of n = 3 does not hold
    assert counts() == (1, 2, 1)
    lines = capsys.readouterr().out.splitlines()
    # taken as it is, then the new one, then the one that failed
    assert [re.findall(r"r_n-\d", line) for line in lines[:3]] == [["r_n-1"], ["r_n-3"], ["r_n-2"]]
    assert lines[1].endswith("r_n-3  does not hold: n is not 3 (n = 3)")
    assert "cached" in lines[0]
    assert (out / "r_n-1.html").is_file()
    assert set(statuses(out).values()) == {"ok"}
    assert main([*arguments, "-g", "n=1", "--resume"]) == 0
    assert main([*arguments, "-g", "n=3"]) == 3  # a run whose check does not hold is done all the same
    assert counts() == (1, 2, 1)
    assert len(statuses(out)) == 3  # the index is of the whole folder


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_is_interrupted_is_kept_marked_and_resumable(
    environment: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    cell = "import time\nfrom pathlib import Path\nprint('going to sleep', flush=True)\nPath(f'{n}.started').touch()\n"
    notebook = write_notebook(tmp_path / "s.ipynb", f"{cell}if not Path('awake').exists(): time.sleep(1000)")
    out = tmp_path / "out"
    command = [sys.executable, "-m", "workbench", "report", str(notebook), "-g", "n=1,2", "-o", str(out)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 120
    while not (tmp_path / "1.started").exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert statuses(out) == {"s_n-1": "waiting", "s_n-2": "waiting"}
    time.sleep(2)  # what was printed comes from another process
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "0 of 2 runs have ended; run the same command again to resume" in said
    assert statuses(out) == {"s_n-1": "interrupted", "s_n-2": "waiting"}
    run = read_run(out / "s_n-1.ipynb")
    assert (run.status, run.seconds > 0) == ("interrupted", True)
    assert "going to sleep" in printed(out / "s_n-1.ipynb")
    page = (out / "s_n-1.html").read_text(encoding="utf-8")
    assert "stopped from outside" in page
    if number == signal.SIGTERM:
        (tmp_path / "awake").touch()
        assert main(command[3:]) == 0  # in this process, where all is imported already
        assert statuses(out) == {"s_n-1": "ok", "s_n-2": "ok"}


def test_an_interrupted_run_is_marked_as_such_also_after_clocks_were_turned_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outcomes(work: str, cells: list[dict[str, Any]], **options: Any) -> Iterator[Any]:
        begun = Run(**cells[0]["run"] | {"status": "interrupted", "started": "2000-01-01T00:00:00"})
        write(nbformat.reads(cells[0]["source"], 4), begun)
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(pool, "outcomes", outcomes)
    notebook, out = write_notebook(tmp_path / "a.ipynb", "print(n)"), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run_grid(notebook, out, grid={"n": [1, 2]}, progress=False)
    assert statuses(out) == {"a_n-1": "interrupted", "a_n-2": "waiting"}


def test_a_second_report_in_the_same_folder_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notebook, out = write_notebook(tmp_path / "a.ipynb", "print(n)"), tmp_path / "out"
    out.mkdir()
    with filelock.FileLock(out / ".workbench.lock"):
        assert main(["report", str(notebook), "-o", str(out)]) == 2
    assert "another report is being written to" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == [".workbench.lock"]


@pytest.fixture
def small_files(environment: dict[str, str], tmp_path: Path) -> Callable[[int, str], subprocess.CompletedProcess[str]]:
    """Run a report that may write files of so many kB, as where a disk is full."""

    def run(kilobytes: int, cells: str) -> subprocess.CompletedProcess[str]:
        notebook = write_notebook(tmp_path / "f.ipynb", cells)
        command = (
            f"ulimit -f {kilobytes}; exec {sys.executable} -m workbench report {notebook} -g n=1,2 -o {tmp_path}/out"
        )
        return subprocess.run(
            ["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    return run


@pytest.mark.slow
def test_a_folder_that_is_full_is_found_out_before_anything_runs(small_files: Any, tmp_path: Path) -> None:
    done = small_files(1, "open('ran', 'w')")
    assert done.returncode == 2
    assert "File too large" in done.stderr
    assert "out/index." in done.stderr  # which file
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_a_folder_that_fills_up_costs_what_does_not_fit(small_files: Any, tmp_path: Path) -> None:
    done = small_files(300, "print('x' * (900_000 if n == 1 else 9))")
    assert done.returncode == 1, done.stderr
    assert "File too large" in done.stdout
    assert statuses(tmp_path / "out") == {"f_n-1": "failed", "f_n-2": "ok"}
    assert not list((tmp_path / "out").glob(".*.part"))


def test_a_folder_that_must_not_be_written_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, content: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("workbench.notebook.index.atomic.write", refuse)
    notebook = write_notebook(tmp_path / "a.ipynb", "open('ran', 'w')")
    assert main(["report", str(notebook), "-o", str(tmp_path / "out")]) == 2
    assert "Permission denied" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_a_folder_that_cannot_be_made_is_named_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = write_notebook(tmp_path / "a.ipynb", "open('ran', 'w')")
    (tmp_path / "file").touch()
    for name, reason in (("file", "File exists"), ("file/folder", "Not a directory")):
        assert main(["report", str(notebook), "-o", str(tmp_path / name)]) == 2
        assert f"the folder for reports {tmp_path / name} can't be made: {reason}" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_data_that_changed_are_noticed(jupyter_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench import data

    cell = nbformat.v4.new_code_cell("from workbench import data\nd = data.load('diabetes')")
    notebook, output = tmp_path / "plain.ipynb", tmp_path / "out.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), notebook)  # without a cell of parameters
    run = run_notebook(notebook, output)
    assert run.status == "ok", run.error
    assert run.data == {"diabetes": data.checksum("diabetes")}
    assert run_notebook(notebook, output, resume=True).cached
    planned, _ = plan(nbformat.read(notebook, 4), notebook, output, {})
    monkeypatch.setattr("workbench.data.provenance.checksum", lambda name: "other")
    assert finished(planned) is None
    with pytest.raises(ValueError, match="no cell of it is tagged 'parameters'"):
        run_grid(notebook, tmp_path / "out", grid={"n": [1]})


def test_what_cannot_run_is_refused_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notebook = write_notebook(tmp_path / "a.ipynb", "x = 1\n---\ny = (2\nz = ]")
    nb = nbformat.read(notebook, 4)
    assert main(["report", str(notebook), "-o", str(tmp_path / "out")]) == 2
    assert "a.ipynb can't be run: cell 4 (cell-1), line 2: closing parenthesis" in capsys.readouterr().err
    nb.cells[3].metadata["tags"] = ["raises-exception"]  # it is meant
    plan(nb, notebook, tmp_path / "b.ipynb", {})
    nb.cells[3].update(source="%%bash\nif [ ; then", metadata={})
    plan(nb, notebook, tmp_path / "b.ipynb", {})
    nb.metadata["language_info"] = {"name": "R"}
    nbformat.write(nb, notebook)
    assert main(["report", str(notebook), "-o", str(tmp_path / "out")]) == 2
    assert "(R); only Python can be run" in capsys.readouterr().err
    assert main(["report", str(write_notebook(notebook, "1")), "-o", str(tmp_path / "out"), "-j", "0"]) == 2
    assert "jobs must be a whole number" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("package", ["papermill", "nbconvert", "bs4"])
def test_missing_packages_are_told_before_anything_runs(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook, output = write_notebook(tmp_path / "a.ipynb", "1"), tmp_path / "earlier.ipynb"
    output.write_text("an earlier result")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=f"this needs {package}, which is not installed"):
        run_grid(notebook, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    if package == "papermill":
        with pytest.raises(ModuleNotFoundError, match="this needs papermill"):
            run_notebook(notebook, output)
    assert output.read_text() == "an earlier result"


def test_arguments_that_are_no_dicts_are_refused(tmp_path: Path) -> None:
    notebook, names = write_notebook(tmp_path / "a.ipynb", "1"), cast(Any, ["n"])
    with pytest.raises(TypeError, match=r"parameters: found \['n'\]; give a dict"):
        run_notebook(notebook, tmp_path / "b.ipynb", names)
    with pytest.raises(TypeError, match=r"grid: found \['n'\]; give a dict"):
        run_grid(notebook, tmp_path / "out", grid=names)


def test_a_script_that_workers_would_start_again_is_told_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = write_notebook(tmp_path / "a.ipynb", "1")
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)  # as in a new worker
    with pytest.raises(RuntimeError, match="put what starts the runs under if __name__ == '__main__':"):
        run_grid(notebook, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_pdf_needs_a_chromium_and_says_so_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pdf.shutil, "which", lambda name: None)
    monkeypatch.setattr(pdf, "_PLACES", ())
    notebook = write_notebook(tmp_path / "a.ipynb", "1")
    assert main(["report", str(notebook), "--pdf", "-o", str(tmp_path / "out")]) == 2
    assert "install one (Debian, Ubuntu: apt install chromium;" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_pages_are_printed_by_what_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "bin" / "chromium"
    fake.parent.mkdir()
    fake.write_text(FAKE_CHROMIUM)
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(fake.parent), prepend=os.pathsep)
    page = tmp_path / "a page.html"
    page.write_text("")
    assert pdf.find_chromium() == str(fake)
    printed = pdf.print_pdf(page, str(fake))
    assert printed == tmp_path / "a page.pdf"
    assert printed.read_text().startswith("%PDF")
    assert page.as_uri() in printed.read_text()
    assert [path.name for path in tmp_path.iterdir() if path.is_file() and path != page] == ["a page.pdf"]
    fake.write_text("#!/bin/sh\necho no display >&2\n")
    with pytest.raises(RuntimeError, match=r"printed no PDF of a page\.html: no display"):
        pdf.print_pdf(page, str(fake))


def test_pages_are_prepared_once_a_kernel_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()
    with grid._meanwhile(done.set):
        pass  # the run has ended before
    monkeypatch.setattr(grid, "KERNEL_START", 0.0)
    assert not done.is_set()
    with grid._meanwhile(lambda: 1 / 0, done.set):
        assert done.wait(30)


@pytest.mark.slow
def test_pictures_are_compressed_as_cells_show_them(tmp_path: Path) -> None:
    cell = nbformat.v4.new_code_cell(
        "from matplotlib.figure import Figure\nfrom workbench import record_figure\nrecord_figure('empty', Figure())"
    )
    nb, shown = nbformat.v4.new_notebook(cells=[cell]), []
    nbformat.write(nb, tmp_path / "a.ipynb")
    run, values = plan(nb, tmp_path / "a.ipynb", tmp_path / "b.ipynb", {})
    assert perform(nb, run, values, on_picture=shown.append).status == "ok"
    stored = nbformat.read(tmp_path / "b.ipynb", as_version=4).cells[0].outputs[0].data["image/png"]
    assert shown == [stored]


def test_notebooks_are_read_without_grammars_of_iris() -> None:
    code = """
import sys
import threading
from workbench.notebook.parameters import skip_iri_grammars
skip_iri_grammars()
import nbformat
assert "jsonschema" in sys.modules and not {"rfc3987_syntax", "lark"} & set(sys.modules)
nbformat.validate(nbformat.v4.new_notebook())
"""
    subprocess.run([sys.executable, "-c", code], check=True)
