"""pytest plugin that runs notebooks as regression tests: ``pytest --notebooks notebooks/``.

Papermill runs each notebook in its own kernel, with ``smoke=True`` if the notebook has a parameter ``smoke``. The test fails if a cell
raises, if a `record_check` does not hold, or if the recorded values differ from the baseline ``baselines/NOTEBOOK/smoke.json`` next to the
notebook, which ``--update-baselines`` writes.

In a baseline, "tolerances" maps name patterns to a relative tolerance for floats (everything else must be equal), or to null to skip the
comparison, such as for seconds; the first matching pattern applies. Further files in that folder with their own "parameters", such as
``{"parameters": {"data": "digits"}}``, are further test cases of the notebook. A case is skipped if its baseline lists a package that is not
installed, as in ``"requires": ["keras"]``.

``--notebook-device cuda`` makes notebooks train on a GPU. ``--executed-notebooks FOLDER`` keeps the executed notebooks as
``NOTEBOOK-CASE.ipynb``. Runs are independent of each other and can run in parallel (pytest -n).

pytest imports this module in every project once this package is installed, so nothing heavy may be imported at module level.
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

# Measured with kernels for different CPU instruction sets (with and without AVX-512): most scores of trainings of a few seconds changed by
# less than 1 %. Values computed from few rows, such as calibration errors, and ratios of epistemic risks changed more: set their own tolerance.
TOLERANCES: dict[str, float | None] = {"*": 0.02}
# minimum tolerance on another device, where random numbers and the order of summation differ; `record_check` must still hold there
OTHER_DEVICE_TOLERANCE = 0.25


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("notebooks", "notebooks as tests (workbench)")
    group.addoption("--notebooks", action="store_true", help="collect .ipynb files as tests")
    group.addoption("--update-baselines", action="store_true", help="save the recorded values as the new baselines")
    group.addoption(
        "--executed-notebooks", metavar="FOLDER", help="folder for the executed notebooks (default: a temporary folder)"
    )
    group.addoption(
        "--notebook-device",
        metavar="DEVICE",
        help="device on which notebooks train, such as cuda, with wider tolerances (default: as the notebook says)",
    )
    group.addoption(
        "--notebook-timeout",
        type=float,
        default=600,
        metavar="S",
        help="time limit per notebook in seconds (default: 600)",
    )


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> NotebookFile | None:
    if file_path.suffix != ".ipynb" or not parent.config.getoption("notebooks"):
        return None
    return NotebookFile.from_parent(parent, path=file_path)


class NotebookFile(pytest.File):
    """A notebook file; each of its baselines is one test."""

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
        raise ValueError(f"{path} is not a valid baseline: {error}") from error


class NotebookItem(pytest.Item):
    """One run of a notebook, compared with its baseline.

    Args:
        baseline: path of the baseline file.
        case: content of the baseline; without "values" if it has not been written yet.
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
        if (output_folder := self.config.getoption("executed_notebooks")) is not None:
            folder = Path(self.config.invocation_params.dir, output_folder)
        else:  # outside of fixtures, pytest offers its temporary folder only through a private attribute
            folder = self.config._tmp_path_factory.mktemp("notebooks")  # type: ignore[attr-defined]
        with pytest.MonkeyPatch.context() as patch:
            if "OMP_NUM_THREADS" not in os.environ:  # results must not depend on the number of cores
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
        shown = _results(records)
        command = f"pytest --notebooks {_relative(self.path)} --update-baselines"
        if "values" not in self.case:
            if not any(shown.values()):  # a notebook that records nothing only has to run
                return []
            return [
                f"there is no baseline {_relative(self.baseline)} yet. The notebook recorded:\n",
                *_table(("name", "found"), [(name, _format_value(value)) for name, value in _leaves(shown["values"])]),
                f"\nIf these values are right, save them as the baseline: {command}",
            ]
        expected = {"values": {}, **self.case}
        if self.config.getoption("notebook_device") not in (None, "cpu"):
            pairs = expected["tolerances"].items()
            expected["tolerances"] = {
                pattern: None if tolerance is None else max(5 * tolerance, OTHER_DEVICE_TOLERANCE)
                for pattern, tolerance in pairs
            }
        rows = list(differences(expected, shown))
        if not rows:
            return []
        return [
            f"differs from its baseline {_relative(self.baseline)}:\n",
            *_table(("name", "expected", "found", "difference", "tolerance"), rows),
            f"\nIf the new values are right, save them as the baseline: {command}",
        ]

    def _write(self, records: Records) -> None:
        from workbench.notebook.values import to_json

        shown = _results(records)
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
    """Failure of a notebook run; its message is shown as the test output."""

    def __init__(self, message: str, run: Run) -> None:
        parameters = f"\nIts parameters: {_format_parameters(run.parameters)}" if run.parameters else ""
        super().__init__(f"{message}\n{parameters}\nThe executed notebook: {run.output}")


def differences(expected: Mapping[str, Any], shown: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the differences between the results of a notebook and its baseline.

    Args:
        expected: a baseline: "values" by name, "tolerances" by name pattern, and lists of names "figures" and "tables".
        shown: the results in the same form, without tolerances.

    Yields:
        Rows of five strings: name, expected, found, relative difference, tolerance; one row for each item of a list or dict.

    Example:
        >>> list(differences({"values": {"rmse": 2.0}, "tolerances": {"*": 0.1}}, {"values": {"rmse": 2.5}}))
        [('rmse', '2', '2.5', '25.00 %', '10 %')]
    """
    old_values, new_values = dict(_leaves(expected["values"])), dict(_leaves(shown["values"]))
    for name in {**old_values, **new_values}:
        tolerance = _tolerance(name, expected["tolerances"])
        if tolerance is None:
            continue
        if name not in new_values:
            yield name, _format_value(old_values[name]), "not recorded", "", ""
            continue
        if name not in old_values:
            yield name, "not in the baseline", _format_value(new_values[name]), "", ""
            continue
        old, new = old_values[name], new_values[name]
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (old, new))
        if not numbers or (isinstance(old, int) and isinstance(new, int)):
            if type(old) is not type(new) or old != new:
                yield name, _format_value(old), _format_value(new), "", "equal"
        elif not _close(old, new, tolerance):
            change = abs(new - old) / abs(old) if old else math.inf
            percent = f"{change:.2%}".replace("%", " %") if math.isfinite(change) else ""
            digits = next((n for n in range(4, 17) if f"{old:.{n}g}" != f"{new:.{n}g}"), 17)
            yield name, f"{old:.{digits}g}", f"{new:.{digits}g}", percent, f"{100 * tolerance:g} %"
    for kind in ("figures", "tables"):
        old_names, new_names = expected.get(kind, []), shown.get(kind, [])
        for name in old_names + [name for name in new_names if name not in old_names]:
            if name not in new_names:
                yield f"{kind[:-1]} {name}", "shown", "not shown", "", ""
            elif name not in old_names:
                yield f"{kind[:-1]} {name}", "not in the baseline", "shown", "", ""


def _close(old: float, new: float, tolerance: float) -> bool:
    if math.isfinite(old) and math.isfinite(new):
        return abs(new - old) <= tolerance * abs(old)
    return old == new or (math.isnan(old) and math.isnan(new))


def _results(records: Records) -> dict[str, Any]:
    return {"values": dict(records), "figures": sorted(records.figures), "tables": sorted(records.tables)}


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) for each leaf of nested dicts and lists."""
    if isinstance(value, (dict, list)) and (value or not name):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _leaves(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def _tolerance(name: str, tolerances: Mapping[str, float | None]) -> float | None:
    return next((value for pattern, value in tolerances.items() if fnmatch.fnmatchcase(name, pattern)), 0.0)


def _failure(run: Run) -> str:
    """Return the traceback of the cell that raised, as the notebook shows it; otherwise the status of the run."""
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


def _format_parameters(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {_format_value(value)}" for name, value in values.items())


def _format_value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _relative(path: Path) -> str:
    return os.path.relpath(path)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]
