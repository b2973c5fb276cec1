"""`workbench demo` up to where JupyterLab takes over; the browser tests go on from there."""

from __future__ import annotations

import shutil
import socket
import sys
import sysconfig

import pytest
from conftest import ROOT

from workbench.cli import main
from workbench.widgets import demo


@pytest.fixture
def started(tmp_path, monkeypatch):
    """A folder to be in, and what JupyterLab is started with there."""
    from jupyterlab.labapp import LabApp

    found = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(LabApp, "launch_instance", found.append)
    return found


def test_the_notebook_is_copied_and_opened(started, tmp_path, capsys):
    assert main(["demo", "--no-browser"]) == 0
    copy = tmp_path / "workbench-demo" / "comparison.ipynb"
    assert copy.read_bytes() == (ROOT / "notebooks" / "comparison.ipynb").read_bytes()
    assert capsys.readouterr().out == f"notebook: {copy}\n"
    (arguments,) = started
    assert f"--ServerApp.root_dir={copy.parent}" in arguments
    assert "--LabApp.default_url=/lab/tree/comparison.ipynb" in arguments
    assert "--no-browser" in arguments
    assert not any("port" in argument for argument in arguments)


def test_a_copy_that_is_there_is_kept(started, tmp_path):
    copy = tmp_path / "workbench-demo" / "explorer.ipynb"
    copy.parent.mkdir()
    copy.write_text("mine")
    assert main(["demo", "explorer.ipynb"]) == 0
    assert copy.read_text() == "mine"
    assert "--no-browser" not in started[0]


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
    assert main(["demo", "--port", str(port)]) == 0
    assert {f"--ServerApp.port={port}", "--ServerApp.port_retries=0"} <= set(started[0])


def test_an_installed_package_finds_its_notebooks(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "__file__", str(tmp_path / "site-packages" / "workbench" / "widgets" / "demo.py"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / name))
    with pytest.raises(ValueError, match=r"not installed: neither .* holds comparison\.ipynb"):
        demo.notebooks_folder()
    installed = tmp_path / "data" / "share" / "workbench" / "notebooks"
    shutil.copytree(ROOT / "notebooks", installed)
    assert demo.notebooks_folder() == installed


def test_the_wheel_carries_the_notebooks_to_where_they_are_looked_for():
    folders = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[tool.setuptools.data-files]")[2]
    assert folders.strip().startswith('"share/workbench/notebooks" = ["notebooks/*.ipynb"]')
