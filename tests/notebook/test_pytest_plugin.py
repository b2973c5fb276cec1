"""``pytest --notebooks``: notebooks as tests in a user's project."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import write_notebook

from workbench.experiments.environment import source_digest
from workbench.notebook import read_records, run_notebook
from workbench.pytest_plugin import differences

pytest_plugins = ["pytester"]

RECORDS = """
from helper import scale
from workbench.notebook import record, record_check

record(rmse=1.5 * scale * n, rows=100 + int(scale), seconds=scale, curve=[scale, float("nan")], smoke=smoke)
record_check("the error is smaller than ten", scale * n < 10, error=scale * n)
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project with one notebook, which reads a module of its own."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(pytester.path / "jupyter"))
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    # runs of pytest in another process know nothing of what `jupyter_home` puts in its place here
    monkeypatch.setattr("workbench.notebook.run._source_digest", source_digest)
    notebooks = pytester.mkdir("notebooks")
    write(notebooks / "study.ipynb", RECORDS)
    (notebooks / "helper.py").write_text("scale = 1.0\n")
    return pytester


def write(path: Path, cells: str) -> None:
    """A notebook whose parameters cell says `n = 3` and `smoke = False`, among others."""
    import nbformat

    nb = nbformat.read(write_notebook(path, cells), as_version=4)
    nb.cells[1].source += "\nsmoke = False"
    nbformat.write(nb, path)


def pytest_in(project: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    # a process of its own: pytester would forget the modules that it loads here, and compiled ones do not survive that
    return project.runpytest_subprocess("-p", "workbench.pytest_plugin", *arguments)


@pytest.mark.slow
def test_a_baseline_is_made_and_held(project: pytest.Pytester) -> None:
    baselines = project.path / "notebooks" / "baselines" / "study"
    missing = pytest_in(project, "--notebooks", "notebooks")
    missing.assert_outcomes(failed=1)
    missing.stdout.fnmatch_lines(
        [
            f"there is no baseline {Path('notebooks/baselines/study/smoke.json')} yet*",
            "  rmse     4.5",
            "*pytest --notebooks notebooks/study.ipynb --update-baselines",
        ]
    )
    assert not baselines.exists()

    baselines.mkdir(parents=True)  # two cases, one of them with parameters and tolerances of its own
    (baselines / "smoke.json").write_text('{"parameters": {"smoke": true}}')
    wide = {"parameters": {"n": 2}, "tolerances": {"seconds": None, "c*.0": 0.5, "*": 0.2}}
    (baselines / "two.json").write_text(json.dumps(wide))
    update = ("--notebooks", "notebooks", "--update-baselines", "--executed-notebooks", "kept")
    pytest_in(project, *update).assert_outcomes(passed=2)
    kept = project.path / "kept"
    assert sorted(path.name for path in kept.glob("*.ipynb")) == ["study-smoke.ipynb", "study-two.ipynb"]
    again = run_notebook(
        project.path / "notebooks/study.ipynb", kept / "study-smoke.ipynb", {"smoke": True}, resume=True
    )
    assert again.cached
    made = json.loads((baselines / "two.json").read_text())
    assert made["parameters"] == {"n": 2}
    assert made["tolerances"] == wide["tolerances"]
    assert made["values"]["rmse"] == 3.0
    assert made["values"]["smoke"] is False
    assert "NaN" not in (baselines / "two.json").read_text()  # which is no JSON

    before = {path: path.read_text() for path in baselines.iterdir()}
    # code that changes is run: 10 % off is too much for the one, and not for the other
    (project.path / "notebooks" / "helper.py").write_text("scale = 1.1\n")
    changed = pytest_in(project, "--notebooks", "notebooks/study.ipynb", "-p", "xdist", "-n", "2")
    changed.assert_outcomes(passed=1, failed=1)
    changed.stdout.fnmatch_lines(
        [
            f"differs from its baseline {Path('notebooks/baselines/study/smoke.json')}:",
            "",
            "  name     expected  found  difference  tolerance",
            "  curve.0  1*        1.1*   10.00 %     2 %",
            "  rmse     4.5*      4.95*  10.00 %     2 %",
            "  seconds  1*        1.1*   10.00 %     2 %",
        ]
    )
    assert {path: path.read_text() for path in baselines.iterdir()} == before


@pytest.mark.slow
def test_what_ends_badly_fails_with_the_reason(project: pytest.Pytester) -> None:
    folder = project.path / "notebooks"
    write(folder / "study.ipynb", "def inner():\n    raise KeyError('the <column> is gone')\n\ninner()\n---\nprint(1)")
    write(folder / "dies.ipynb", "import os\n\nos._exit(3)")
    write(folder / "claims.ipynb", RECORDS.replace("n < 10", "n < 2"))
    write(folder / "records_nothing.ipynb", "print(n)")
    (folder / "broken.ipynb").write_text("{")
    write(folder / "typo.ipynb", "print(n)")
    (folder / "baselines" / "typo").mkdir(parents=True)
    (folder / "baselines" / "typo" / "smoke.json").write_text('{"parameters": {"smoek": true}}')

    before = sorted(folder.rglob("*"))
    result = pytest_in(project, "--notebooks", "--update-baselines", "--continue-on-collection-errors", "notebooks")
    result.assert_outcomes(passed=1, failed=3, errors=2)
    text = result.stdout.str()
    assert "does not hold: the error is smaller than ten (error = 3)" in text
    assert "cell 3 (cell-0) raised KeyError: 'the <column> is gone'" in text
    assert "n = 3, rate = 0.5, name = x, tags = ['a'], smoke = True" in text
    assert "----> 4 inner()" in text
    assert "died: the kernel died in cell 3 (cell-0), exit code 3" in text
    assert "broken.ipynb is not a Jupyter notebook" in text
    assert "has no parameter 'smoek': did you mean smoke?" in text
    assert "PapermillExecutionError" not in text
    assert "site-packages" not in text

    executed = next(line for line in result.outlines if line.startswith("The executed notebook: "))
    assert Path(executed.removeprefix("The executed notebook: ")).is_file()
    assert [path for path in sorted(folder.rglob("*")) if "__pycache__" not in str(path)] == before


def test_without_the_option_nothing_happens(project: pytest.Pytester) -> None:
    pytest_in(project, "notebooks").assert_outcomes()


def test_every_project_can_afford_the_plugin() -> None:
    """It is imported whenever pytest starts where workbench is installed."""
    code = "import pytest, sys; before = set(sys.modules); import workbench.pytest_plugin; print(*set(sys.modules) - before)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    packages = {name.partition(".")[0] for name in modules}
    assert packages <= {"workbench", *sys.stdlib_module_names}


def test_differences_are_told_value_by_value() -> None:
    expected = {
        "values": {
            "rmse": 2.0,
            "same": math.nan,
            "bound": math.inf,
            "rows": 100,
            "name": "a",
            "flag": True,
            "gone": 1.0,
            "seconds": 3.0,
            "zero": 0.0,
            "nested": {"a": [1.0, 2.0], "empty": []},
        },
        "tolerances": {"seconds": None, "nested.*": 0.5, "*": 0.01},
        "figures": ["curve"],
        "tables": ["scores"],
    }
    recorded = {
        "values": {
            "rmse": 2.019,
            "same": math.nan,
            "bound": math.inf,
            "rows": 100,
            "name": "a",
            "flag": True,
            "gone": 1.0,
            "seconds": 9.0,
            "zero": 0.0,
            "nested": {"a": [1.4, 1.1], "empty": []},
        },
        "figures": ["curve"],
        "tables": ["scores"],
    }
    assert list(differences(expected, recorded)) == []

    values = recorded["values"]
    assert isinstance(values, dict)
    values.update(rmse=2.021, same=1.0, bound=-math.inf, rows=101, name="b", flag=1, zero=1e-9, more=5)
    values["nested"] = {"a": [1.6, 2.0, 3.0], "empty": []}
    del values["gone"]
    recorded.update(figures=["line"], tables=[])
    rows = {row[0]: row[1:] for row in differences(expected, recorded)}
    assert rows == {
        "rmse": ("2", "2.021", "1.05 %", "1 %"),
        "same": ("nan", "1", "", "1 %"),
        "bound": ("inf", "-inf", "", "1 %"),
        "rows": ("100", "101", "", "equal"),
        "name": ("a", "b", "", "equal"),
        "flag": ("True", "1", "", "equal"),
        "gone": ("1", "not recorded", "", ""),
        "zero": ("0", "1e-09", "", "1 %"),
        "nested.a.0": ("1", "1.6", "60.00 %", "50 %"),
        "nested.a.2": ("not in the baseline", "3", "", ""),
        "more": ("not in the baseline", "5", "", ""),
        "figure curve": ("shown", "not shown", "", ""),
        "figure line": ("not in the baseline", "shown", "", ""),
        "table scores": ("shown", "not shown", "", ""),
    }


@pytest.mark.slow
def test_a_wrong_baseline_is_refused(project: pytest.Pytester) -> None:
    for name, content in (("negative", '{"tolerances": {"*": -1}}'), ("study", "[1]"), ("cut", "{")):
        folder = project.path / "notebooks" / "baselines" / name
        folder.mkdir(parents=True)
        (folder / "smoke.json").write_text(content)
        write(project.path / "notebooks" / f"{name}.ipynb", RECORDS)
    result = pytest_in(project, "--notebooks", "--continue-on-collection-errors", "notebooks")
    result.assert_outcomes(errors=3)
    for name in ("negative", "study", "cut"):
        assert f"{Path('baselines', name, 'smoke.json')} is not a valid baseline" in result.stdout.str()


@pytest.mark.slow
def test_checks_are_read_back(tmp_path: Path, jupyter_home: Path) -> None:
    claims = """
import numpy as np
from workbench.notebook import record_check

record_check("one", np.bool_(True), ratio=1 / 3)
record_check("two", False)
---
record_check("many", np.ones(3) > 0)
"""
    write_notebook(tmp_path / "claims.ipynb", claims)
    run = run_notebook(tmp_path / "claims.ipynb", tmp_path / "executed.ipynb")
    assert run.status == "failed"
    assert "with .all() for arrays" in run.error
    assert read_records(run.output).checks == {"one": (True, {"ratio": 1 / 3}), "two": (False, {})}
    text = Path(run.output).read_text()
    assert "✓ holds: one (ratio = 0.3333)" in text
    assert "✗ does not hold: two" in text


@pytest.mark.slow
def test_a_case_that_needs_what_is_not_installed_is_skipped(project: pytest.Pytester) -> None:
    folder = project.path / "notebooks" / "baselines" / "study"
    folder.mkdir(parents=True)
    for package, outcome in (("no_such_package", {"skipped": 1}), ("json", {"passed": 1})):
        case = {"parameters": {"smoke": True}, "requires": [package], "tolerances": {"*": None}, "values": {}}
        (folder / "smoke.json").write_text(json.dumps(case))
        result = pytest_in(project, "--notebooks", "-rs", "notebooks")
        result.assert_outcomes(**outcome)
        assert ("study.ipynb needs no_such_package" in str(result.stdout)) is ("skipped" in outcome)


TRAINS = """
import torch
from workbench import fit, vote
from workbench.notebook import record

wrapped = vote.Wrapper(2)(torch.nn.Linear(2, 1))
places = []
where = lambda _: places.append(next(wrapped.parameters()).device.type)
fit(wrapped, (torch.zeros(40, 2), torch.zeros(40, 1)), epochs=1, progress=False, callback=where)
record(trained_on=sorted(set(places)), after=next(wrapped.parameters()).device.type)
"""


@pytest.mark.slow
def test_notebooks_train_on_the_device_that_is_named(project: pytest.Pytester) -> None:
    write(project.path / "notebooks" / "study.ipynb", TRAINS)
    baselines = project.path / "notebooks" / "baselines" / "study"
    baselines.mkdir(parents=True)
    pytest_in(project, "--notebooks", "notebooks", "--update-baselines").assert_outcomes(passed=1)
    assert json.loads((baselines / "smoke.json").read_text())["values"] == {"trained_on": ["cpu"], "after": "cpu"}
    pytest_in(project, "--notebooks", "notebooks", "--notebook-device", "cpu").assert_outcomes(passed=1)
    missing = pytest_in(project, "--notebooks", "notebooks", "--notebook-device", "cuda")
    if not torch.cuda.is_available():  # it was asked for
        missing.assert_outcomes(failed=1)
        missing.stdout.fnmatch_lines(["*torch sees no GPU here, found 'cuda'*"])
