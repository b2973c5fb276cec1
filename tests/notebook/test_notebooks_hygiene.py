"""Requirements on every committed notebook, checked without running it."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import nbformat
import pytest
from conftest import ROOT, write_notebook

from workbench.errors import WorkbenchWarning
from workbench.notebook.formulas import markdown_to_html
from workbench.notebook.parameters import COMPUTED, declared_parameters

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def problems(path: Path) -> list[str]:
    """Everything that is wrong with a notebook, each with what to do about it."""
    nb = nbformat.read(path, as_version=4)
    nbformat.validate(nb)
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    prose = [cell for cell in nb.cells if cell.cell_type == "markdown"]
    messages = []
    if any(cell.outputs or cell.execution_count for cell in code):
        messages.append("has outputs: clear them, so that differences can be read")
    if sum("parameters" in cell.metadata.get("tags", []) for cell in code) != 1:
        messages.append("needs exactly one cell tagged 'parameters'")
    elif computed := [name for name, value in declared_parameters(nb).items() if value is COMPUTED]:
        messages.append(f"parameters must be plain values, so that they can be checked: {', '.join(computed)}")
    if nb.metadata.get("kernelspec", {}).get("name") != "python3":
        messages.append("must name the kernel python3")
    if extra := sorted(set(nb.metadata) - {"kernelspec", "language_info"}):
        messages.append(f"carries metadata of a run or a front end: {', '.join(extra)}")
    if not prose or nb.cells[0] is not prose[0] or not prose[0].source.startswith("# "):
        messages.append("must begin with a title: a text cell that starts with '# '")
    if not isinstance(declared_parameters(nb).get("smoke"), bool):
        messages.append("needs a parameter smoke = False, which makes a short run of it")
    if not nb.cells[-1].source.count("## What to take away"):
        messages.append("must end with the section '## What to take away'")
    if not any("record_check(" in cell.source for cell in code):
        messages.append("must check what it claims, by record_check(...)")
    if not list((path.parent / "baselines" / path.stem).glob("*.json")):
        messages.append("has no baseline: pytest --notebooks --update-baselines makes one")
    if unnamed := [cell.id for cell in nb.cells if re.fullmatch(r"\d+|[0-9a-f]{8}(-[0-9a-f-]{27})?", cell.id)]:
        messages.append(f"cells need ids that say what they do, such as 'train': {', '.join(unnamed)}")
    if absolute := [
        cell.id for cell in nb.cells if re.search(r"[\"'](/(home|root|tmp|mnt|Users)/|[A-Z]:\\)", cell.source)
    ]:
        messages.append(f"names paths of one machine, in {', '.join(absolute)}")
    if path.stat().st_size > 50_000:
        messages.append("is larger than 50 kB")
    for cell in prose:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", WorkbenchWarning)
                markdown_to_html(cell.source)
        except WorkbenchWarning as warning:
            messages.append(f"cell {cell.id}: {warning}")
    return messages


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_committed_notebook_has_no_problems(path: Path) -> None:
    assert problems(path) == []


def test_the_check_finds_each_problem(tmp_path: Path) -> None:
    python3 = {"name": "python3", "display_name": "Python 3", "language": "python"}
    good = write_notebook(tmp_path / "good.ipynb", "record_check('three', n == 3)", kernelspec=python3)
    nb = nbformat.read(good, 4)
    nb.cells[1].source += "\nsmoke = False"
    nb.cells[-1].source = "## What to take away\n\nThree."
    nbformat.write(nb, good)
    (tmp_path / "baselines" / "good").mkdir(parents=True)
    (tmp_path / "baselines" / "good" / "smoke.json").touch()
    assert problems(good) == []

    nb.metadata = {"papermill": {}}
    nb.cells[1].source = "n = len('abc')"
    nb.cells[2].update(execution_count=1, id="1a2b3c4d", source="open('/home/me/data.csv')" + "#" * 50_000)
    nb.cells[3].source = r"$\nosuchthing$"
    nb.cells.append(nb.cells.pop(0))
    nbformat.write(nb, tmp_path / "bad.ipynb")
    text = "\n".join(problems(tmp_path / "bad.ipynb"))
    words = ["outputs", "plain values", "python3", "papermill", "title", "1a2b3c4d", "one machine", "50 kB", "TeX"]
    words += ["smoke = False", "take away", "record_check", "baseline"]
    assert [word for word in words if word not in text] == []
    assert text.count("\n") == len(words) - 1

    nb.cells[0].metadata = {}
    nbformat.write(nb, tmp_path / "bad.ipynb")
    assert "exactly one cell tagged 'parameters'" in "\n".join(problems(tmp_path / "bad.ipynb"))
