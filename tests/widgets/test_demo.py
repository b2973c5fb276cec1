"""`workbench demo` up to the start of JupyterLab; the browser tests cover the rest."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tomllib

import nbformat
import pytest
from conftest import ROOT

from workbench.cli import main
from workbench.widgets import demo


@pytest.fixture
def started(tmp_path, monkeypatch):
    """A folder to be in, and what JupyterLab is started with there."""
    from jupyterlab.labapp import LabApp

    calls = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(LabApp, "launch_instance", calls.append)
    return calls


@pytest.mark.slow
def test_the_notebook_is_copied_and_opened(started, tmp_path, capsys):
    assert main(["demo", "comparison", "--no-browser"]) == 0
    copy = tmp_path / "workbench-demo" / "comparison.ipynb"
    assert copy.read_bytes() == (ROOT / "notebooks" / "comparison.ipynb").read_bytes()
    assert capsys.readouterr().out == f"notebook: {copy}\n"
    (arguments,) = started
    assert f"--ServerApp.root_dir={copy.parent}" in arguments
    assert "--LabApp.default_url=/lab/tree/comparison.ipynb" in arguments
    assert "--no-browser" in arguments
    assert not any("port" in argument for argument in arguments)


@pytest.mark.slow
def test_a_copy_that_is_there_is_kept(started, tmp_path):
    copy = tmp_path / "workbench-demo" / "explorer.ipynb"
    copy.parent.mkdir()
    copy.write_text("mine")
    assert main(["demo", "explorer.ipynb"]) == 0
    assert copy.read_text() == "mine"
    assert "--no-browser" not in started[0]


def _with_source(path, source):
    notebook = nbformat.read(path, 4)
    notebook.cells = [nbformat.v4.new_code_cell(source)]
    nbformat.write(notebook, path)


@pytest.mark.slow
def test_it_opens_on_results_that_are_there(started, tmp_path, monkeypatch, capsys):
    notebooks = tmp_path / "all" / "notebooks"
    shutil.copytree(ROOT / "notebooks", notebooks)
    for folder in ("docs", "benchmarks"):
        (tmp_path / "all" / folder).symlink_to(ROOT / folder)
    _with_source(notebooks / "two_minutes.ipynb", "print(40 + 2)")
    monkeypatch.setattr(demo, "notebooks_folder", lambda: notebooks)
    copy = tmp_path / "workbench-demo" / "two_minutes.ipynb"
    assert main(["demo"]) == 0
    assert nbformat.read(copy, 4).cells[0].outputs[0].text == "42\n"
    assert "running two_minutes.ipynb once" in capsys.readouterr().out
    results = copy.read_bytes()
    assert main(["demo"]) == 0  # what has results is not run again
    assert copy.read_bytes() == results
    assert "running" not in capsys.readouterr().out
    assert len(started) == 2
    copy.unlink()
    _with_source(notebooks / "two_minutes.ipynb", "1 / 0")
    assert main(["demo"]) == 0  # without results it opens all the same
    assert not nbformat.read(copy, 4).cells[0].outputs
    assert "opened without results: ZeroDivisionError" in capsys.readouterr().out
    assert not list(copy.parent.glob(".run-*"))


def test_links_of_the_pages_lead_to_what_is_there(started, tmp_path):
    assert main(["demo", "comparison"]) == 0
    folder, links = tmp_path / "workbench-demo", 0
    for page in folder.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).resolve().is_file(), f"{page.name}: {target}"
                links += 1
    assert links > 1


def test_all_that_the_notebooks_import_and_lead_to_is_there(started, tmp_path):
    assert main(["demo", "regression_benchmark"]) == 0
    folder = tmp_path / "workbench-demo"
    names = {path.name for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert {path.name for path in folder.glob("*.ipynb")} == names
    links = 0
    for path in folder.glob("*.ipynb"):
        cells = nbformat.read(path, 4).cells
        for cell in cells:
            targets = re.findall(r"\]\(([^)#]+)", cell.source) if cell.cell_type == "markdown" else []
            for target in (t for t in targets if "://" not in t):
                assert (path.parent / target).resolve().is_file(), f"{path.name}: {target}"
                # else not served
                assert (path.parent / target).resolve().is_relative_to(folder), f"{path.name}: {target}"
                links += 1
    assert links > 8


def test_the_benchmark_notebook_finds_its_imports_anywhere(started, tmp_path):
    assert main(["demo", "regression_benchmark"]) == 0
    cells = nbformat.read(tmp_path / "workbench-demo" / "regression_benchmark.ipynb", 4).cells
    source = next(cell.source for cell in cells if cell.id == "imports")
    lines = [line for line in source.splitlines() if line.startswith(("import sys", "sys.path", "import published"))]
    assert lines[-1] == "import published"
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=tmp_path / "workbench-demo",
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_bad_input_is_refused_before_anything_is_written(started, tmp_path, monkeypatch, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["demo", "--port", str(port)]) == 2
    assert f"port {port} can't be used" in capsys.readouterr().err
    assert main(["demo", "--port", "70000"]) == 2
    assert "from 1 to 65535" in capsys.readouterr().err
    assert main(["demo", "comparisons"]) == 2
    said = capsys.readouterr().err
    assert "no notebook 'comparisons'" in said
    assert "comparison, " in said
    assert main(["demo", "../notebooks/comparison"]) == 2
    monkeypatch.setitem(sys.modules, "jupyterlab", None)
    assert main(["demo"]) == 2
    assert "needs jupyterlab, which is not installed: pip install 'risk-workbench[lab]'" in capsys.readouterr().err
    assert not started
    assert list(tmp_path.iterdir()) == []


def test_a_free_port_is_taken_as_it_is(started):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert main(["demo", "comparison", "--port", str(port)]) == 0
    assert {f"--ServerApp.port={port}", "--ServerApp.port_retries=0"} <= set(started[0])


def test_an_installed_package_finds_its_notebooks(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "__file__", str(tmp_path / "site-packages" / "workbench" / "widgets" / "demo.py"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / name))
    with pytest.raises(ValueError, match=r"not installed: neither .* holds comparison\.ipynb"):
        demo.notebooks_folder()
    installed = tmp_path / "data" / "share" / "workbench" / "notebooks"
    shutil.copytree(ROOT / "notebooks", installed)
    assert demo.notebooks_folder() == installed


def test_the_wheel_carries_the_notebooks_to_where_they_are_looked_for(tmp_path, monkeypatch):
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders, written = settings["tool"]["setuptools"]["data-files"], []
    assert folders["share/workbench/notebooks"] == ["notebooks/*.ipynb"]
    for place, patterns in folders.items():
        for path in (path for pattern in patterns for path in ROOT.glob(pattern)):
            written.append(tmp_path / place / path.name)
            written[-1].parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, written[-1])
    monkeypatch.setattr(demo, "notebooks_folder", lambda: tmp_path / "share" / "workbench" / "notebooks")
    assert demo.copy_notebooks("comparison", tmp_path / "here").is_file()
    assert len([path for path in (tmp_path / "here").rglob("*") if path.is_file()]) == len(written)
