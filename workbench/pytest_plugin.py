"""``pytest --notebooks notebooks/``: notebooks as regression tests.

Each notebook is run by papermill in a kernel of its own, with ``smoke=True`` where it has a parameter ``smoke``. It fails if a cell
raises, if a `record_check` does not hold, or if what it records differs from its baseline: ``baselines/NOTEBOOK/smoke.json`` beside it, which
``--update-baselines`` writes. There, "tolerances" has patterns of names, the first that matches counts: a relative tolerance for numbers with a
fraction (all else must be equal), or null for what is not compared, such as seconds. Another file in that folder with "parameters" of its
own, ``{"parameters": {"data": "digits"}}``, is another test of the notebook. Runs share nothing: they can go in parallel (pytest -n).
``--notebook-device cuda`` trains on a GPU what the notebooks train.
``--executed-notebooks FOLDER`` keeps what was executed, as ``NOTEBOOK-CASE.ipynb``. A case whose baseline names a package that is not
installed, ``"requires": ["keras"]``, is skipped.

pytest imports this module in every project as soon as this package is installed: nothing heavy may be imported here.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from workbench.notebook import Records, Run

# Kernels for another instruction set (AVX-512 or none) moved most scores of trainings of some seconds by less than one percent;
# what is made of few rows, such as calibration errors, and ratios of epistemic risks moved more and need tolerances of their own.
TOLERANCES: dict[str, float | None] = {"*": 0.02}
ELSEWHERE = 0.25  # of trainings of some seconds on another device, which draws and adds up otherwise; checks must hold there as here


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("notebooks", "notebooks as tests (workbench)")
    group.addoption("--notebooks", action="store_true", help="run the .ipynb files among the tests, too")
    group.addoption("--update-baselines", action="store_true", help="write what notebooks record as what they shall")
    group.addoption(
        "--executed-notebooks", metavar="FOLDER", help="keep what was executed there (default: a temporary folder)"
    )
    group.addoption(
        "--notebook-device",
        metavar="DEVICE",
        help="train there what notebooks train (cuda); numbers may then differ by more (default: where they say)",
    )
    group.addoption(
        "--notebook-timeout", type=float, default=600, metavar="S", help="seconds that one run may take (default: 600)"
    )


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> NotebookFile | None:
    if file_path.suffix != ".ipynb" or not parent.config.getoption("notebooks"):
        return None
    return NotebookFile.from_parent(parent, path=file_path)


class NotebookFile(pytest.File):
    """A notebook; its tests are its cases."""

    def collect(self) -> Iterator[NotebookItem]:
        from workbench.notebook.parameters import check_parameters, declared_parameters, load_notebook

        folder = self.path.parent / "baselines" / self.path.stem
        try:
            declared = declared_parameters(load_notebook(self.path))
            cases = {path: _baseline(path) for path in sorted(folder.glob("*.json"))}
            if not cases:
                smoke = isinstance(declared.get("smoke"), bool)
                path = folder / ("smoke.json" if smoke else "default.json")
                cases = {path: {"parameters": {"smoke": True} if smoke else {}, "tolerances": TOLERANCES}}
            for case in cases.values():
                check_parameters(declared, case["parameters"], self.path.name)
        except (ValueError, TypeError) as error:
            raise self.CollectError(str(error)) from error
        for path, case in cases.items():
            yield NotebookItem.from_parent(self, name=path.stem, baseline=path, case=case)


def _baseline(path: Path) -> dict[str, Any]:
    from workbench.notebook.values import from_json

    try:
        case = json.loads(path.read_text(encoding="utf-8"))
        tolerances = {"tolerances": TOLERANCES, **case}["tolerances"]
        wrong = [t for t in tolerances.values() if not (t is None or (isinstance(t, int | float) and t >= 0))]
        if wrong:
            raise ValueError(f"a tolerance must be a number of at least 0, or null, not {wrong[0]!r}")
        return {"parameters": {}, **from_json(case), "tolerances": tolerances}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no baseline: {error}") from error


class NotebookItem(pytest.Item):
    """One run of a notebook, held against its baseline.

    Args:
        baseline: the file of the baseline.
        case: its content; without "values" if it is still to be written.
    """

    def __init__(self, *, baseline: Path, case: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.baseline, self.case = baseline, case

    def runtest(self) -> None:
        from workbench.notebook import run_notebook
        from workbench.notebook.record import failed_checks

        for package in self.case.get("requires", []):
            if importlib.util.find_spec(package) is None:
                pytest.skip(f"{self.path.name} needs {package}")
        if (kept := self.config.getoption("executed_notebooks")) is not None:
            folder = Path(self.config.invocation_params.dir, kept)
        else:  # a public way to pytest's folder for temporary files exists for functions only
            folder = self.config._tmp_path_factory.mktemp("notebooks")  # type: ignore[attr-defined]
        with pytest.MonkeyPatch.context() as patch:
            if "OMP_NUM_THREADS" not in os.environ:  # so that results do not depend on the number of cores
                patch.setenv("OMP_NUM_THREADS", "1")
            if (device := self.config.getoption("notebook_device")) is not None:
                patch.setenv("WORKBENCH_DEVICE", device)
            run = run_notebook(
                self.path,
                folder / f"{self.path.stem}-{self.name}.ipynb",
                self.case["parameters"],
                timeout=self.config.getoption("notebook_timeout"),
            )
        if run.status != "ok":
            raise Failure(_failure(run), run)
        records = run.records
        wrong = [f"does not hold: {claim}" for claim in failed_checks(records.checks)]
        if not self.config.getoption("update_baselines"):
            wrong += self._differences(records)
        if wrong:
            raise Failure("\n".join(wrong), run)
        if self.config.getoption("update_baselines"):
            self._write(records)

    def _differences(self, records: Records) -> list[str]:
        shown = _shown(records)
        command = f"pytest --notebooks {_relative(self.path)} --update-baselines"
        if "values" not in self.case:
            if not any(shown.values()):  # it has only to run
                return []
            return [
                f"there is no baseline {_relative(self.baseline)} yet. It has recorded:\n",
                *_table(("name", "found"), [(name, _text(value)) for name, value in _leaves(shown["values"])]),
                f"\nIf these values are right, let them be the baseline: {command}",
            ]
        expected = {"values": {}, **self.case}
        if self.config.getoption("notebook_device") not in (None, "cpu"):
            pairs = expected["tolerances"].items()
            expected["tolerances"] = {name: None if one is None else max(5 * one, ELSEWHERE) for name, one in pairs}
        rows = list(differences(expected, shown))
        if not rows:
            return []
        return [
            f"differs from its baseline {_relative(self.baseline)}:\n",
            *_table(("name", "expected", "found", "difference", "tolerance"), rows),
            f"\nIf the new values are right, let them be the baseline: {command}",
        ]

    def _write(self, records: Records) -> None:
        from workbench.notebook.values import to_json

        shown = _shown(records)
        if not any(shown.values()):
            return
        case = {name: self.case[name] for name in ("parameters", "requires", "tolerances") if name in self.case}
        self.baseline.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(to_json({**case, **shown}, "baseline"), indent=1, ensure_ascii=False)
        self.baseline.write_text(f"{text}\n", encoding="utf-8")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *args: Any, **kwargs: Any) -> Any:
        if isinstance(excinfo.value, Failure):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style="short")

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, f"{self.path.name} [{self.name}]"


class Failure(Exception):
    """What is wrong with a run, in words for the reader of the test's output."""

    def __init__(self, what: str, run: Run) -> None:
        parameters = f"\nIts parameters: {_listed(run.parameters)}" if run.parameters else ""
        super().__init__(f"{what}\n{parameters}\nThe executed notebook: {run.output}")


def differences(expected: Mapping[str, Any], shown: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Where what a notebook shows is not what is expected.

    Args:
        expected: a baseline: "values" by name, "tolerances" by pattern, and lists of names "figures" and "tables".
        shown: the same without tolerances.

    Returns:
        Rows of five texts: name, expected, found, relative difference, tolerance. Items of lists and dicts have a row each.

    Example:
        >>> list(differences({"values": {"rmse": 2.0}, "tolerances": {"*": 0.1}}, {"values": {"rmse": 2.5}}))
        [('rmse', '2', '2.5', '25.00 %', '10 %')]
    """
    before, now = dict(_leaves(expected["values"])), dict(_leaves(shown["values"]))
    for name in {**before, **now}:
        tolerance = _tolerance(name, expected["tolerances"])
        if tolerance is None:
            continue
        if name not in now:
            yield name, _text(before[name]), "not recorded", "", ""
            continue
        if name not in before:
            yield name, "not in the baseline", _text(now[name]), "", ""
            continue
        one, other = before[name], now[name]
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (one, other))
        if not numbers or (isinstance(one, int) and isinstance(other, int)):
            if type(one) is not type(other) or one != other:
                yield name, _text(one), _text(other), "", "equal"
        elif not _close(one, other, tolerance):
            change = abs(other - one) / abs(one) if one else math.inf
            share = f"{change:.2%}".replace("%", " %") if math.isfinite(change) else ""
            digits = next((n for n in range(4, 17) if f"{one:.{n}g}" != f"{other:.{n}g}"), 17)
            yield name, f"{one:.{digits}g}", f"{other:.{digits}g}", share, f"{100 * tolerance:g} %"
    for kind in ("figures", "tables"):
        wanted, there = expected.get(kind, []), shown.get(kind, [])
        for name in wanted + [name for name in there if name not in wanted]:
            if name not in there:
                yield f"{kind[:-1]} {name}", "shown", "not shown", "", ""
            elif name not in wanted:
                yield f"{kind[:-1]} {name}", "not in the baseline", "shown", "", ""


def _close(one: float, other: float, tolerance: float) -> bool:
    if math.isfinite(one) and math.isfinite(other):
        return abs(other - one) <= tolerance * abs(one)
    return one == other or (math.isnan(one) and math.isnan(other))


def _shown(records: Records) -> dict[str, Any]:
    return {"values": dict(records), "figures": sorted(records.figures), "tables": sorted(records.tables)}


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The single values, items of lists and dicts with dotted names."""
    if isinstance(value, (dict, list)) and (value or not name):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _leaves(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def _tolerance(name: str, tolerances: Mapping[str, float | None]) -> float | None:
    return next((value for pattern, value in tolerances.items() if fnmatch.fnmatchcase(name, pattern)), 0.0)


def _failure(run: Run) -> str:
    """The traceback of the cell that raised, as the notebook shows it; else how the run ended."""
    import nbformat

    cells = [
        cell
        for cell in nbformat.read(run.output, as_version=4).cells
        if not {"injected-parameters", "papermill-error-cell-tag"} & set(cell.metadata.get("tags", []))
    ]
    for number, cell in enumerate(cells, 1):
        for output in cell.get("outputs", []):
            if output.output_type == "error" and run.status == "failed":
                trace = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(output.traceback))
                return f"cell {number} ({cell.id}) raised {run.error}\n\n{trace}"
    return f"{run.status}: {run.error}"


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {_text(value)}" for name, value in values.items())


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _relative(path: Path) -> str:
    return os.path.relpath(path)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]
