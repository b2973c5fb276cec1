"""Executed notebooks in the form that run_notebook writes, made by hand, and the index page of a folder of them."""

from __future__ import annotations

import base64
import io
from dataclasses import asdict
from pathlib import Path
from typing import Any

import nbformat
import pytest
from bs4 import BeautifulSoup, Tag
from matplotlib.figure import Figure
from nbformat import v4

from workbench.notebook import Run
from workbench.notebook.index import Index
from workbench.notebook.values import to_json


def picture() -> bytes:
    figure, buffer = Figure(figsize=(6, 4)), io.BytesIO()
    figure.subplots().plot([1, 3, 2])
    figure.savefig(buffer, format="png", dpi=200)
    return buffer.getvalue()


PNG = picture()


def executed(
    folder: Path,
    name: str,
    parameters: dict[str, Any],
    status: str = "ok",
    checks: dict[str, tuple[bool, dict[str, Any]]] | None = None,
    /,
    **records: Any,
) -> Run:
    """Write a notebook in the form of run_notebook, and its page; checks: claim -> (whether it holds, what was found)."""
    folder.mkdir(exist_ok=True)
    run = Run(
        name=name,
        notebook=f"elsewhere/{name.split('_')[0]}.ipynb",
        output=str(folder / f"{name}.ipynb"),
        status=status,
        seconds=2.0,
        parameters=parameters,
        error=None if status == "ok" else "ValueError: <bad> & worse",
        environment={"git": "v1", "torch": "2.9"},
        peak_memory=100.0,
        data={"diabetes": "ab" * 32},
    )
    values = {key: to_json(value, key) for key, value in records.items()}
    figure = v4.new_output(
        "display_data", {"image/png": base64.b64encode(PNG).decode()}, metadata={"workbench": {"figure": "curve"}}
    )
    outputs = [v4.new_output("display_data", {"text/plain": ""}, metadata={"workbench": {"records": values}}), figure]
    for claim, (holds, measured) in (checks or {}).items():
        check = {"claim": claim, "holds": holds, "found": measured}
        outputs.append(v4.new_output("display_data", {"text/plain": ""}, metadata={"workbench": {"check": check}}))
    cells = [v4.new_markdown_cell("# Many runs"), v4.new_code_cell("", outputs=outputs)]
    nbformat.write(v4.new_notebook(cells=cells, metadata={"workbench": asdict(run)}), run.output)
    (folder / f"{name}.html").write_text("")
    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with runs of two data sets, two seeds and two wrappers, of which one has failed and one is pending."""
    out = tmp_path / "out"
    scores = {("a", 0): (1.0, 3.0), ("a", 1): (2.0, 1.5), ("b", 0): (10.0, 30.0), ("b", 1): (20.0, float("nan"))}
    for (data, seed), (vote, sculpt) in scores.items():
        executed(
            out,
            f"many_{data}_{seed}",
            {"data": data, "seed": seed, "epochs": 5},
            vote_rmse=vote,
            sculpt_rmse=sculpt,
            accuracy=0.5 + seed / 10,
            name=f"run of {data}",
            history=[vote, sculpt],
        )
    executed(out, "many_c_0", {"data": "c", "seed": 0, "epochs": 5}, "failed", vote_rmse=0.001)
    index = Index(out)
    index.add(
        Run(
            "many_c_1",
            "elsewhere/many.ipynb",
            str(out / "many_c_1.ipynb"),
            "waiting",
            0.0,
            {"data": "c", "seed": 1, "epochs": 5},
        )
    )
    index.write(plots=True)
    return out


def page(folder: Path) -> tuple[str, BeautifulSoup]:
    text = (folder / "index.html").read_text(encoding="utf-8")
    return text, BeautifulSoup(text, "html.parser")


def own_text(tag: Tag) -> str:
    """The text of a tag without that of the tags in it: the name in the head of a column, without its arrow."""
    return "".join(tag.find_all(string=True, recursive=False))
