"""Named results that live in the executed notebook itself.

``record(rmse=0.12)`` shows a small table and carries the exact values in the *metadata* of that output. Every front end
can show a plain HTML table (a MIME type of our own would draw "no renderer" notices), clearing the outputs removes the
values with them, and ``read_records`` gets them back with nbformat alone: no kernel, no torch, no pandas.
"""

from __future__ import annotations

import base64
import copy
import html
import io
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import require
from ..experiments.paired import Comparison
from .labels import spoken
from .pictures import embedded
from .values import UNTYPESET, as_text, from_json, to_json
from .verdict import from_stamp

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.artist import Artist
    from nbformat import NotebookNode
    from pandas.io.formats.style import Styler

SCHEMA = 1

# (kind, name) -> (cell, execution) that recorded it; one process is one kernel, so this lives as long as the kernel
_recorded: dict[tuple[str, str], tuple[str, str]] = {}


def record(**values: Any) -> None:
    """Show named values, and carry them in this cell's output for reports and tests.

    Outside a Jupyter kernel the values are checked and nothing else happens, so that the same code runs in a script.

    Args:
        **values: numbers, text, None, lists and dicts of these, and numpy or torch scalars and arrays. Values are kept
            exactly, NaN and infinities included. Keep them small: they are stored as text in the notebook.

    Raises:
        TypeError: for any other type of value.
        ValueError: where another cell, or this cell in the same run, has recorded the name already.

    Example:
        >>> record(rmse=0.12, coverage=[0.5, 0.9])
    """
    if not values:
        raise TypeError("record() was given nothing to record: pass at least one name=value")
    plain = {name: to_json(value, name) for name, value in values.items()}
    rows = "".join(_row(name, as_text(value)) for name, value in plain.items()) if _execution() else ""
    text = "\n".join(f"{name} = {as_text(value)}" for name, value in plain.items())
    _display("record", list(plain), {"text/html": f"<table>{rows}</table>", "text/plain": text}, {"records": plain})


def record_figure(name: str, figure: Artist, *, alt: str | None = None, dpi: int = 100) -> None:
    """Show a matplotlib figure exactly once, under a name; a report shows it on dark pages as well, with black and white swapped.

    In a kernel the figure is taken out of pyplot's list, or the end of the cell would show it a second time; the figure
    itself stays usable. Outside a kernel only the arguments are checked.

    Args:
        name: name of the figure, used once in a notebook.
        figure: a matplotlib Figure, or an Axes in it.
        alt: what the picture shows, in words, for readers who can't see it; default: the name.
        dpi: size on screen, in pixels per inch of the figure; twice as many are stored, for sharp screens.

    Raises:
        TypeError: if `figure` is neither a Figure nor an Axes.
        ValueError: where another cell, or this cell in the same run, has recorded the name already.

    Example:
        >>> from matplotlib.figure import Figure
        >>> figure = Figure()
        >>> _ = figure.subplots().plot([1, 2, 4])
        >>> record_figure("growth", figure, alt="a curve that rises ever faster")
    """
    whole: Any = figure.get_figure() if hasattr(figure, "get_figure") else None
    if not hasattr(whole, "savefig"):
        raise TypeError(f"record_figure({name!r}, ...) takes a matplotlib Figure or Axes, not {type(figure).__name__}")
    if _execution() is None:
        return
    from .dark import darkened

    png = _drawn(whole, dpi)
    with darkened(whole):
        dark = embedded(base64.b64encode(_drawn(whole, dpi)).decode())
    width, height = (int.from_bytes(png[i : i + 4], "big") // 2 for i in (16, 20))  # the PNG header
    _display(
        "record_figure",
        [name],
        {"image/png": base64.b64encode(png).decode(), "text/plain": f"<figure {name}>"},
        {"figure": name, "dark": dark},
        {"image/png": {"alt": alt or name.replace("_", " "), "width": width, "height": height}},
    )
    import matplotlib.pyplot as plt

    plt.close(whole)


def _drawn(figure: Any, dpi: int) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=2 * dpi, bbox_inches="tight", metadata={"Software": None})
    return buffer.getvalue()


def _row(name: str, text: str) -> str:
    """A line of the table: what it is in words, the value, and the name for scripts, if it is another."""
    said, raw, value = html.escape(spoken(name)), html.escape(name), html.escape(text)
    code = "" if said == raw else f"<td><code>{raw}</code></td>"
    return f'<tr><th title="{raw}">{said}</th><td>{value}</td>{code}</tr>'


def record_check(claim: str, holds: Any, **found: Any) -> None:
    """State what must be true of this run, and show whether it is; a test of the notebook fails where it is not.

    A claim that does not hold ends nothing: the notebook goes on, and its report shows it. `pytest --notebooks` fails.

    Args:
        claim: what must be true, in words; used once in a notebook.
        holds: whether it is: a bool, or a numpy or torch one.
        **found: the numbers that decided it, shown beside the claim; as for `record`.

    Raises:
        TypeError: if `holds` is no single truth value, or what was found is nothing that `record` takes.
        ValueError: where another cell, or this cell in the same run, has made the claim already.

    Example:
        >>> inside, outside = 0.2, 0.9
        >>> record_check("risk is higher outside the data", outside > inside, ratio=outside / inside)
    """
    answer = to_json(holds, claim)
    if not isinstance(answer, bool):
        raise TypeError(
            f"record_check({claim!r}, ...) takes True or False, not {answer!r:.60}: compare, and take .all() of many"
        )
    plain = {name: to_json(value, name) for name, value in found.items()}
    sentence = f"{'✓ holds' if answer else '✗ does not hold'}: {_claimed(claim, plain)}"
    colour = "" if answer else ' style="color: #D55E00; font-weight: bold"'
    data = {"text/html": f"<div{colour}>{html.escape(sentence)}</div>", "text/plain": sentence}
    _display("record_check", [claim], data, {"check": {"claim": claim, "holds": answer, "found": plain}})


def record_table(name: str, frame: pd.DataFrame | Styler) -> None:
    """Show a table, and carry its columns under a name.

    Args:
        name: name of the table, used once in a notebook.
        frame: a DataFrame (an index other than 0, 1, 2, ... becomes its first columns), or a DataFrame's ``.style``
            with formats and highlights of your own (its index is only shown, and not carried).

    Raises:
        TypeError: if `frame` is not a table, or holds values that `record` doesn't take (dates: turn them to text).
        ValueError: if two columns have the same name, or the table's name is taken (see `record`).

    Example:
        >>> import pandas as pd
        >>> record_table("results", pd.DataFrame({"wrapper": ["vote", "sculpt"], "rmse": [0.51, 0.48]}))
    """
    require("pandas")
    require("jinja2")  # for the styles of pandas
    import pandas as pd
    from pandas.io.formats.style import Styler

    if isinstance(frame, pd.DataFrame):
        if not isinstance(frame.index, pd.RangeIndex):
            frame = frame.reset_index()
        style = (
            frame.style.format(as_text, na_rep="–", escape="html")
            .format_index(escape="html", axis=1)
            .hide(axis="index")
        )
    elif isinstance(frame, Styler):
        style = copy.deepcopy(frame)
    else:
        raise TypeError(f"record_table({name!r}, ...) takes a pandas DataFrame or Styler, not {type(frame).__name__}")
    table: pd.DataFrame = style.data  # type: ignore[attr-defined]
    titles = [" ".join(map(str, c)).strip() if isinstance(c, tuple) else str(c) for c in table.columns]
    if doubled := sorted({t for t in titles if titles.count(t) > 1}):
        raise ValueError(f"table {name!r} has more than one column named {', '.join(doubled)}: rename them")
    columns = [
        [title, to_json([None if v is pd.NA else v for v in table.iloc[:, i].tolist()], f"{name}[{title}]")]
        for i, title in enumerate(titles)
    ]
    text = [c for c, dtype in zip(table.columns, table.dtypes, strict=True) if not pd.api.types.is_numeric_dtype(dtype)]
    left: Any = {column: [{"selector": "", "props": [("text-align", "left")]}] for column in text}
    style = style.set_table_styles(left, overwrite=False)
    data = {
        "text/html": style.to_html(table_uuid=re.sub(r"\W", "_", name)),
        "text/plain": table.to_string(index=False),
    }
    # pairs, since a notebook's file sorts the keys of mappings, and columns have an order
    _display("record_table", [name], data, {"table": {"name": name, "columns": columns}})


class Check(NamedTuple):
    """A claim's answer: whether it holds, and the numbers that decided it by name."""

    holds: bool
    found: dict[str, Any]


class Records(dict[str, Any]):
    """What a notebook has recorded: name -> value, and more as attributes.

    Attributes:
        figures: name -> PNG bytes.
        tables: name -> {column: [values]}; ``pandas.DataFrame(records.tables[name])`` gives the table back.
        comparisons: name -> scores of models over splits, see `workbench.record_comparison`; each is in `tables` as well.
        checks: claim -> (holds, found), see `record_check`.
        parameters: name -> value, the parameters that the run was given.
        errors: "Type: message" of every exception shown in the notebook.
    """

    def __init__(self) -> None:
        super().__init__()
        self.figures: dict[str, bytes] = {}
        self.tables: dict[str, dict[str, list[Any]]] = {}
        self.comparisons: dict[str, Comparison] = {}
        self.checks: dict[str, Check] = {}
        self.parameters: dict[str, Any] = {}
        self.errors: list[str] = []


def read_records(notebook: str | Path | NotebookNode) -> Records:
    """Read what an executed notebook has recorded.

    Args:
        notebook: path of an executed notebook, or the notebook itself as nbformat gives it.

    Returns:
        The values by name, exactly as they were recorded (arrays as lists); the rest as attributes: see `Records`.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if a name is recorded twice, or what is recorded is damaged.

    Example:
        >>> import nbformat
        >>> read_records(nbformat.v4.new_notebook())
        {}
    """
    nbformat = require("nbformat")
    nb = nbformat.read(notebook, as_version=4) if isinstance(notebook, (str, Path)) else notebook
    records = Records()
    records.parameters = dict(nb.metadata.get("papermill", {}).get("parameters", {}))
    for position, cell in enumerate(nb.cells):
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                records.errors.append(f"{output.ename}: {output.evalue}")
            where = f"cell {position + 1} ({cell.get('id', 'no id')})"
            try:
                entries = list(_entries(records, output))
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                raise ValueError(
                    f"what {where} has recorded can't be read ({error!r}): run the notebook again"
                ) from error
            for store, name, value in entries:
                if name in store:
                    raise ValueError(f"{name!r} is recorded twice, the second time in {where}: use another name there")
                store[name] = value
    return records


def _entries(records: Records, output: NotebookNode) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """What an output has recorded: where it belongs, its name, its value."""
    stamp = output.get("metadata", {}).get("workbench", {})
    for name, value in stamp.get("records", {}).items():
        yield records, name, from_json(value)
    if "figure" in stamp:
        yield records.figures, stamp["figure"], base64.b64decode(output.data["image/png"])
    if "table" in stamp:
        name, table = stamp["table"]["name"], dict(from_json(stamp["table"]["columns"]))
        yield records.tables, name, table
        if "comparison" in stamp:
            yield records.comparisons, name, from_stamp(table, stamp["comparison"])
    if "check" in stamp:
        check = stamp["check"]
        yield records.checks, check["claim"], Check(check["holds"], from_json(check["found"]))


def failed_checks(checks: Mapping[str, Check]) -> list[str]:
    """The claims that do not hold, each with the numbers that decided it.

    Example:
        >>> failed_checks({"one": Check(True, {}), "risk is higher outside": Check(False, {"ratio": 0.8123456})})
        ['risk is higher outside (ratio = 0.8123)']
    """
    return [_claimed(claim, check.found) for claim, check in checks.items() if not check.holds]


def _claimed(claim: str, numbers_by_name: Mapping[str, Any]) -> str:
    numbers = ", ".join(f"{name} = {as_text(value)}" for name, value in numbers_by_name.items())
    return f"{claim} ({numbers})" if numbers else claim


def _execution() -> tuple[str, str] | None:
    """The cell that runs and which run of it this is; None outside a kernel (scripts, IPython's terminal)."""
    import sys

    if "IPython" not in sys.modules:  # a kernel has imported it; a script need not pay for it
        return None
    from IPython import get_ipython

    shell = get_ipython()
    if getattr(shell, "kernel", None) is None:
        return None
    message = shell.get_parent()
    run = message.get("header", {}).get("msg_id", "")
    # JupyterLab says which cell it runs; where nobody does (papermill), every execution counts as a cell of its own
    return message.get("metadata", {}).get("cellId") or run, run


def _display(
    function: str, names: list[str], data: dict[str, str], stamp: dict[str, Any], metadata: Any = None
) -> None:
    json.dumps(stamp, allow_nan=False)
    here = _execution()
    if here is None:
        return
    for name in names:
        before = _recorded.get((function, name))
        # running a cell again replaces what it has recorded; anything else would leave two values under one name
        if before is not None and (before[0] != here[0] or before[1] == here[1]):
            raise ValueError(
                f"{function}: {name!r} is recorded already. Use another name; if the cell that recorded it is gone, "
                "restart the kernel"
            )
    from IPython.display import display

    if "text/html" in data:
        data = {**data, "text/html": f'<div class="{UNTYPESET}">{data["text/html"]}</div>'}
    display(data, raw=True, metadata={"workbench": {"schema": SCHEMA, **stamp}, **(metadata or {})})
    _recorded.update({(function, name): here for name in names})
