"""An error about a package that is not installed names the extra that brings it."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from workbench.errors import require


def test_what_is_there_is_imported() -> None:
    assert require("collections.abc") is sys.modules["collections.abc"]


@pytest.mark.parametrize("module", ["no_such_package", "no_such_package.inside"])
def test_what_is_missing_is_named_with_its_extra(module: str) -> None:
    message = r"needs no_such_package, which is not installed: pip install 'risk-workbench\[dask\]'"
    with pytest.raises(ModuleNotFoundError, match=message) as error:
        require(module, "dask")
    assert error.value.name == "no_such_package"


def test_what_another_package_lacks_is_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package_that_lacks_something.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_package'"):
        require("package_that_lacks_something")


def test_an_import_that_draws_leaves_the_random_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of rich does, which scikit-learn imports where it is installed."""
    (tmp_path / "package_that_draws.py").write_text("import random\nNUMBER = random.random()")
    monkeypatch.syspath_prepend(tmp_path)
    state = random.getstate()
    assert 0 <= require("package_that_draws").NUMBER < 1
    assert random.getstate() == state


WITHOUT_LAB = """
import sys

LAB = {"pandas", "matplotlib", "scipy", "sklearn", "torchmetrics", "IPython", "ipywidgets", "anywidget", "nbformat", "nbclient", "nbconvert",
       "papermill",
       "jinja2", "yaml", "filelock", "PIL", "bs4", "traitlets", "jupyter_client", "jupyterlab"}

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in LAB:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NotInstalled())

def missing(function, *args, **options):
    try:
        function(*args, **options)
    except ModuleNotFoundError as error:
        print(error)

import importlib, pkgutil
import workbench.cli
for package in ("notebook", "experiments", "widgets"):
    folder = importlib.import_module(f"workbench.{package}")
    for module in pkgutil.walk_packages(folder.__path__, f"{folder.__name__}."):
        if module.name != "workbench.notebook.client":  # classes of papermill, imported once it is known to be there
            importlib.import_module(module.name)

from workbench import record, record_table
from workbench.experiments import run_cells
from workbench.notebook import read_records, render, run_notebook
from workbench.widgets import Job, Jobs

record(rmse=0.5)
missing(record_table, "a", None)
missing(read_records, None)
missing(run_notebook, "a.ipynb", "b.ipynb")
missing(render, "a.ipynb")
missing(run_cells, "builtins:dict", [{"n": 1}], "a.csv")
print(workbench.cli.main(["report", "a.ipynb"]))
"""


@pytest.mark.slow
def test_without_the_lab_its_modules_import_and_name_what_they_lack() -> None:
    result = subprocess.run([sys.executable, "-c", WITHOUT_LAB], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    *lines, code = result.stdout.splitlines()
    assert [line.split(",")[0] for line in lines] == [
        f"this needs {name}" for name in ("pandas", "nbformat", "nbformat", "nbformat", "filelock")
    ]
    assert all(line.endswith("which is not installed: pip install 'risk-workbench[lab]'") for line in lines)
    assert code == "2"
    assert result.stderr.startswith("workbench: this needs nbformat")
