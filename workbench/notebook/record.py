"""Named results that are stored in the executed notebook itself.

``record(rmse=0.12)`` shows a small table and stores the exact values in the *metadata* of that output. Every front end
can show a plain HTML table (with a custom MIME type they would show "no renderer" notices), clearing the outputs also removes the
values, and ``read_records`` reads them with nbformat alone: no kernel, no torch, no pandas.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import datetime
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
from .values import UNTYPESET, as_text, check_encodable, from_json, to_json
from .verdict import from_stamp

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.artist import Artist
    from nbformat import NotebookNode
    from pandas.io.formats.style import Styler

SCHEMA = 1
SHOWN_ROWS = 1000  # of a table; a page of more is slow to make and to scroll

# (function, name) -> (cell, execution) that recorded it; lives as long as the kernel, which is this process
_recorded: dict[tuple[str, str], tuple[str, str]] = {}


def record(**values: Any) -> None:
    """Show named values, and store them in this cell's output for reports and tests.

    Outside a Jupyter kernel the values are only checked, so that the same code runs in a script.

    Args:
        **values: numbers, text, None, lists and dicts of these, and numpy or torch scalars and arrays. Values are stored
            exactly, NaN and infinities included. Keep them small: they are stored as text in the notebook.

    Raises:
        TypeError: a value is of another type.
        ValueError: another cell, or this cell in the same run, has recorded the name already.

    Example:
        >>> record(rmse=0.12, coverage=[0.5, 0.9])
    """
    if not values:
        raise TypeError("record() has nothing to record: pass at least one name=value")
    plain = {name: to_json(value, name) for name, value in values.items()}
    rows = "".join(_row(name, as_text(value)) for name, value in plain.items()) if _execution() else ""
    text = "\n".join(f"{name} = {as_text(value)}" for name, value in plain.items())
    _display("record", list(plain), {"text/html": f"<table>{rows}</table>", "text/plain": text}, {"records": plain})


def record_figure(name: str, figure: Artist, *, alt: str | None = None, dpi: int = 100) -> None:
    """Show a matplotlib figure exactly once, under a name. In dark mode, reports show it with black and white swapped.

    In a kernel the figure is closed in pyplot, which would otherwise show it again at the end of the cell; the figure
    itself stays usable. Outside a kernel only the arguments are checked.

    Args:
        name: name of the figure, unique in the notebook.
        figure: matplotlib Figure, or an Axes in it.
        alt: description of the picture for readers who can't see it; default: the name.
        dpi: size on screen, in pixels per inch of the figure; it is stored with twice this resolution for sharp screens.

    Raises:
        TypeError: `figure` is neither a Figure nor an Axes.
        ValueError: another cell, or this cell in the same run, has recorded the name already.

    Example:
        >>> from matplotlib.figure import Figure
        >>> figure = Figure()
        >>> _ = figure.subplots().plot([1, 2, 4])
        >>> record_figure("growth", figure, alt="a curve that rises ever faster")
    """
    figure_object: Any = figure.get_figure() if hasattr(figure, "get_figure") else None
    if not hasattr(figure_object, "savefig"):
        raise TypeError(f"record_figure({name!r}, ...) takes a matplotlib Figure or Axes, not {type(figure).__name__}")
    check_encodable([name, alt], "record_figure")
    if _execution() is None:
        return
    from .dark import darkened

    with _laid_out(figure_object, 2 * dpi) as box:
        png = _drawn(figure_object, 2 * dpi, box)
        with darkened(figure_object):  # stored as WebP: compressed once
            dark = embedded(base64.b64encode(_drawn(figure_object, 2 * dpi, box, compress_level=0)).decode())
    width, height = (int.from_bytes(png[i : i + 4], "big") // 2 for i in (16, 20))  # the PNG header
    _display(
        "record_figure",
        [name],
        {"image/png": base64.b64encode(png).decode(), "text/plain": f"<figure {name}>"},
        {"figure": name, "dark": dark},
        {"image/png": {"alt": alt or name.replace("_", " "), "width": width, "height": height}},
    )
    import matplotlib.pyplot as plt

    plt.close(figure_object)


@contextlib.contextmanager
def _laid_out(figure: Any, dpi: int) -> Iterator[Any]:
    """Lay out a figure and leave it so, since that takes as long as a drawing; yield the box around all it shows, in inches."""
    import matplotlib

    engine, dpi_before = figure.get_layout_engine(), figure.dpi
    figure.set_dpi(dpi)
    try:
        figure.draw_without_rendering()
        box = figure.get_tightbbox().padded(matplotlib.rcParams["savefig.pad_inches"])
        with matplotlib.rc_context({"figure.autolayout": False, "figure.constrained_layout.use": False}):
            figure.set_layout_engine(None)
        yield box
    finally:
        figure.set_dpi(dpi_before)
        if engine is not None:
            figure.set_layout_engine(engine)


def _drawn(figure: Any, dpi: int, box: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    metadata = {"Software": None}
    figure.savefig(buffer, format="png", dpi=dpi, bbox_inches=box, metadata=metadata, pil_kwargs=options)
    return buffer.getvalue()


def _row(name: str, text: str) -> str:
    """Return a table row: the name in words, with the name itself as a tooltip, and the value."""
    return f'<tr><th title="{html.escape(name)}">{html.escape(spoken(name))}</th><td>{html.escape(text)}</td></tr>'


def record_check(claim: str, holds: Any, **found: Any) -> None:
    """Record a claim about the results, and show whether it holds.

    If it does not, the notebook continues and its report shows the failed check; `pytest --notebooks` fails.

    Args:
        claim: the claim in words, unique in the notebook.
        holds: whether it holds: a bool, or a single numpy or torch one.
        **found: the numbers behind it, shown with the claim; types as for `record`.

    Raises:
        TypeError: `holds` is not a single truth value, or `record` does not accept a number.
        ValueError: another cell, or this cell in the same run, has recorded the claim already.

    Example:
        >>> inside, outside = 0.2, 0.9
        >>> record_check("risk is higher outside the data", outside > inside, ratio=outside / inside)
    """
    answer = to_json(holds, claim)
    if not isinstance(answer, bool):
        raise TypeError(
            f"record_check({claim!r}, ...) takes True or False, not {answer!r:.60}: use a comparison, with .all() for arrays"
        )
    plain = {name: to_json(value, name) for name, value in found.items()}
    sentence = f"{'✓ holds' if answer else '✗ does not hold'}: {_claimed(claim, plain)}"
    colour = "" if answer else ' style="color: #D55E00; font-weight: bold"'
    data = {"text/html": f"<div{colour}>{html.escape(sentence)}</div>", "text/plain": sentence}
    _display("record_check", [claim], data, {"check": {"claim": claim, "holds": answer, "found": plain}})


def record_table(name: str, frame: pd.DataFrame | Styler) -> None:
    """Show a table, and store its columns under a name.

    Args:
        name: name of the table, unique in the notebook.
        frame: DataFrame (an index other than 0, 1, 2, ... becomes its first columns; of more than 1,000 rows the first are shown, and all are
            stored), or a DataFrame's ``.style`` with custom formats and highlights (its index is shown but not stored). Dates are stored as
            text (ISO 8601), missing ones as None.

    Raises:
        TypeError: `frame` is not a table, or holds values other than dates that `record` doesn't accept.
        ValueError: two columns have the same name, or the table's name is taken (see `record`).

    Example:
        >>> import pandas as pd
        >>> record_table("results", pd.DataFrame({"wrapper": ["vote", "sculpt"], "rmse": [0.51, 0.48]}))
    """
    require("pandas")
    require("jinja2")  # for the styles of pandas
    import pandas as pd
    from pandas.io.formats.style import Styler

    style: Any  # the stubs of pandas lack its attribute `data`
    if isinstance(frame, pd.DataFrame):
        if not isinstance(frame.index, pd.RangeIndex):
            frame = frame.reset_index()
        table, shown = frame, frame.iloc[:SHOWN_ROWS]
        style = (
            shown.style.format(as_text, na_rep="–", escape="html")
            .format_index(escape="html", axis=1)
            .hide(axis="index")
        )
        if len(shown) < len(table):
            style = style.set_caption(f"the first {len(shown):,} of {len(table):,} rows; all are stored")
    elif isinstance(frame, Styler):
        style = copy.deepcopy(frame)
        table = shown = style.data
    else:
        raise TypeError(f"record_table({name!r}, ...) takes a pandas DataFrame or Styler, not {type(frame).__name__}")
    titles = [" ".join(map(str, c)).strip() if isinstance(c, tuple) else str(c) for c in table.columns]
    if doubled := sorted({t for t in titles if titles.count(t) > 1}):
        raise ValueError(f"table {name!r} has more than one column named {', '.join(doubled)}: rename them")
    columns = [
        [title, to_json(list(map(_storable, table.iloc[:, i])), f"{name}[{title}]")] for i, title in enumerate(titles)
    ]
    text = [c for c, dtype in zip(table.columns, table.dtypes, strict=True) if not pd.api.types.is_numeric_dtype(dtype)]
    left_aligned: Any = {column: [{"selector": "", "props": [("text-align", "left")]}] for column in text}
    style = style.set_table_styles(left_aligned, overwrite=False)
    data = {
        "text/html": style.to_html(table_uuid=re.sub(r"\W", "_", name)),
        "text/plain": shown.to_string(index=False),
    }
    # a list of pairs, since notebook files sort the keys of dicts, and columns have an order
    _display("record_table", [name], data, {"table": {"name": name, "columns": columns}})


def _storable(value: Any) -> Any:
    """Return a value of a table, with dates as text and missing ones as None."""
    import pandas as pd

    if value is pd.NA or value is pd.NaT:
        return None
    return value.isoformat() if isinstance(value, datetime.date) else value  # a Timestamp is a date as well


class Check(NamedTuple):
    """A recorded check: whether the claim holds, and the numbers behind it by name."""

    holds: bool
    found: dict[str, Any]


class Records(dict[str, Any]):
    """Records of a notebook: a dict of the values by name, with figures, tables and more as attributes.

    Attributes:
        figures: name -> PNG bytes.
        tables: name -> {column: [values]}; ``pandas.DataFrame(records.tables[name])`` restores the table.
        comparisons: name -> scores of models over splits, see `workbench.record_comparison`; each is also in `tables`.
        checks: claim -> (holds, found), see `record_check`.
        parameters: name -> value, the parameters passed to the run.
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
    """Read the records of an executed notebook.

    Args:
        notebook: path of an executed notebook, or the notebook as read by nbformat.

    Returns:
        The values by name, exactly as they were recorded (arrays as lists), and the rest as attributes, see `Records`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a name is recorded twice, or a record is damaged.

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
                raise ValueError(f"the records of {where} are damaged ({error!r}): run the notebook again") from error
            for store, name, value in entries:
                if name in store:
                    raise ValueError(f"{name!r} is recorded twice, the second time in {where}: use another name there")
                store[name] = value
    return records


def _entries(records: Records, output: NotebookNode) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield the records of an output as (dict to store it in, name, value)."""
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
    """Return the claims that do not hold, each with the numbers behind it.

    Example:
        >>> failed_checks({"one": Check(True, {}), "risk is higher outside": Check(False, {"ratio": 0.8123456})})
        ['risk is higher outside (ratio = 0.8123)']
    """
    return [_claimed(claim, check.found) for claim, check in checks.items() if not check.holds]


def _claimed(claim: str, numbers_by_name: Mapping[str, Any]) -> str:
    numbers = ", ".join(f"{name} = {as_text(value)}" for name, value in numbers_by_name.items())
    return f"{claim} ({numbers})" if numbers else claim


def _execution() -> tuple[str, str] | None:
    """Return identifiers of the running cell and of this execution of it; None outside a kernel (scripts, IPython's terminal)."""
    import sys

    if "IPython" not in sys.modules:  # kernels have imported it, and scripts should not
        return None
    from IPython import get_ipython

    shell = get_ipython()
    if getattr(shell, "kernel", None) is None:
        return None
    message = shell.get_parent()
    run = message.get("header", {}).get("msg_id", "")
    # JupyterLab sends the id of the cell; without one (papermill), every execution counts as a separate cell
    return message.get("metadata", {}).get("cellId") or run, run


def _display(
    function: str, names: list[str], data: dict[str, str], stamp: dict[str, Any], metadata: Any = None
) -> None:
    json.dumps(stamp, allow_nan=False)
    check_encodable([names, stamp, data, metadata], function)
    execution = _execution()
    if execution is None:
        return
    for name in names:
        previous = _recorded.get((function, name))
        # a cell that runs again replaces its own records; anything else would store two values under one name
        if previous is not None and (previous[0] != execution[0] or previous[1] == execution[1]):
            raise ValueError(
                f"{function}: {name!r} is recorded already. Use another name; if you deleted the cell that recorded it, "
                "restart the kernel"
            )
    from IPython.display import display

    if "text/html" in data:
        data = {**data, "text/html": f'<div class="{UNTYPESET}">{data["text/html"]}</div>'}
    display(data, raw=True, metadata={"workbench": {"schema": SCHEMA, **stamp}, **(metadata or {})})
    _recorded.update({(function, name): execution for name in names})
