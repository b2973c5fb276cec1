"""The table of a comparison: scores of each model on the test rows, and its costs."""

from __future__ import annotations

import html
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from workbench import metrics
from workbench.core.batches.rows import first_weight
from workbench.core.method import evaluating
from workbench.core.wrapper import compose
from workbench.data import Data
from workbench.training.defaults import move

from ..common.cases import with_spread
from ..common.inputs import inputs_like
from ..common.predictions import Predictions

if TYPE_CHECKING:
    import pandas as pd

LEVEL = 0.9  # nominal coverage of the intervals
TIMED_ROWS = 512
TIMING_SECONDS = 0.2


@dataclass(frozen=True)
class Column:
    """One column of the table.

    Args:
        title: header, with {unit} for " (unit of the target)".
        help: tooltip of the header.
        metric: name of the metric, for its direction; a value that it should be close to; or None for a cost.
        text: formats a value.
    """

    title: str
    help: str
    metric: str | float | None
    text: Callable[[float], str]

    @property
    def best(self) -> str | float | None:
        """The direction, "max" or "min", or a value that it should be close to; None for a cost."""
        return metrics.METRICS[self.metric].direction if isinstance(self.metric, str) else self.metric


def _three(value: float) -> str:
    if 999.5 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".") if 1e-3 <= abs(value) < 1e3 else f"{value:.3g}"


COLUMNS: dict[str, Column] = {
    "rmse": Column("RMSE{unit}", "root mean squared error of the prediction", "rmse", _three),
    "accuracy": Column("accuracy", "share of test rows classified correctly", "accuracy", "{:.1%}".format),
    "mean_iou": Column(
        "mean IoU",
        "intersection over union of truth and prediction, mean over the classes",
        "mean_iou",
        "{:.1%}".format,
    ),
    "nll": Column(
        "NLL (nats)", "negative log-likelihood of the true values; penalizes confident mistakes", "nll", "{:.3f}".format
    ),
    "coverage": Column(
        f"in {LEVEL:.0%} interval",
        f"share of true values inside the {LEVEL:.0%} interval; should be {LEVEL:.0%}",
        LEVEL,
        "{:.1%}".format,
    ),
    "calibration_error": Column(
        "calibration error",
        "mean difference between the observed and the nominal coverage of intervals",
        "calibration_error",
        "{:.3f}".format,
    ),
    "ece": Column("ECE", "mean difference between confidence and accuracy", "ece", "{:.3f}".format),
    "error_auroc": Column(
        "AUROC of errors",
        "probability that a wrong row has a higher risk than a right one; 0.5 is guessing",
        "auroc",
        "{:.3f}".format,
    ),
    "outside_auroc": Column(
        "AUROC outside",
        "probability that a row outside the training data has a higher risk than one inside; 0.5 is guessing",
        "auroc",
        "{:.3f}".format,
    ),
    "parameters_added": Column(
        "parameters added", "parameters that the wrapper adds to the plain model", None, "{:+,.0f}".format
    ),
    "seconds": Column(
        "training (s)",
        "training time in seconds; one-off work in the first step, such as loading libraries, is not counted",
        None,
        lambda value: f"{value:.1f}" if value >= 1 else f"{value:.2g}",
    ),
    "passes": Column(
        "cost of a prediction",
        "time of a prediction with risk, relative to a prediction of the plain model",
        None,
        "{:.1f}×".format,
    ),
}
COSTS = ("parameters_added", "seconds", "passes")


def column(name: str) -> Column:
    """Return a column of the table; "rmse_NAME" is that of one of several targets."""
    if name in COLUMNS:
        return COLUMNS[name]
    target = name.removeprefix("rmse_").replace("{", "{{").replace("}", "}}")
    return replace(COLUMNS["rmse"], title=f"RMSE {target}")


def ordered(names: Iterable[str]) -> list[str]:
    """Return the names that are columns, in the order of the table."""
    names = list(names)
    targets = [name for name in names if name.startswith("rmse_")]
    return [n for c in COLUMNS for n in ([c] * (c in names) + (targets if c == "rmse" else []))]


def scores(answers: Predictions, data: Data, y: Tensor) -> dict[str, float]:
    """Compute the metrics of one model.

    Args:
        answers: predictions for test rows.
        data: data set, with task and regions.
        y: true targets of these rows, which are the first test rows.

    Returns:
        Metrics by the names of `COLUMNS`.

    Raises:
        ValueError: if a prediction or target is not finite.
    """
    target = y.reshape(len(y), -1)[:, 0]
    values: dict[str, Tensor] = {}
    if answers.probs is None:
        values["rmse"] = metrics.rmse(answers.y, target)
        total = answers.risk.get("total")
        if total is not None and bool((total > 0).all()):
            values["nll"] = metrics.nll(answers.y, total, target)
            values["coverage"] = metrics.picp(answers.y, total, target, level=LEVEL)
            values["calibration_error"] = metrics.calibration_error(answers.y, total, target)
    else:
        values["accuracy"] = metrics.accuracy(answers.probs, target)
        values["nll"] = metrics.categorical_nll(answers.probs, target)
        values["ece"] = metrics.ece(answers.probs, target)
        right = answers.y == target
        if bool(right.any()) and not bool(right.all()):
            risk = answers.risk[answers.kind]
            values["error_auroc"] = metrics.auroc(risk[right], risk[~right])
    inside = data.test.regions.get("data")
    if inside is not None and answers.novelty is not None and bool(inside.any()) and not bool(inside.all()):
        risk, inside = answers.risk[answers.novelty], inside[: len(y)]
        values["outside_auroc"] = metrics.auroc(risk[inside], risk[~inside])
    return {name: float(value) for name, value in values.items()}


def parameters_added(wrapped: nn.Module, plain: nn.Module) -> int:
    """Return the number of parameters beyond those of the plain model."""
    return sum(p.numel() for p in wrapped.parameters()) - sum(p.numel() for p in plain.parameters())


def passes(wrapped: Any, plain: nn.Module, x: Tensor, repeats: int = 5) -> float:
    """Measure the cost of a prediction with risk, relative to a prediction of the plain model: the ratio of minimum times on the same rows.

    The two are called in turn, at least `repeats` times and for a fifth of a second, so that a moment in which the machine is busy
    with something else does not fall on one of them alone.
    """
    like = first_weight(wrapped)
    x = inputs_like(x[:TIMED_ROWS], wrapped)
    # wrapped as well, since small models spend most of the time outside the forward pass
    move(plain, like.device, like.dtype)
    baseline = compose()(plain)

    def seconds(call: Callable[[], Any]) -> float:
        start = time.perf_counter()
        call()
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        return time.perf_counter() - start

    with torch.no_grad(), evaluating(wrapped, whole=True), evaluating(baseline, whole=True), warnings.catch_warnings():
        calls = (lambda: wrapped(x, return_risk=True), lambda: baseline(x))
        for call in calls:  # warm up: the first call chooses how to run
            call()
        rounds: list[list[float]] = []
        while len(rounds) < repeats or sum(map(sum, rounds)) < TIMING_SECONDS:
            rounds.append([seconds(call) for call in calls])
    with_risk, plain_seconds = map(min, zip(*rounds, strict=True))
    return with_risk / plain_seconds


def table(
    frame: pd.DataFrame,
    unit: str,
    status: Mapping[str, str],
    notes: Sequence[str] = (),
    differs: Mapping[str, str] = MappingProxyType({}),
    *,
    spreads: pd.DataFrame | None = None,
    marked: Mapping[str, Sequence[str]] = MappingProxyType({}),
    test: str = "",
    about: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return the table as HTML.

    Args:
        frame: one row for each model, columns of `COLUMNS`.
        unit: unit of the target.
        status: notes beside the names of rows, such as "stopped after 12 epochs".
        notes: lines below the table.
        differs: by row, why it can't be compared with the others; such rows are grey and never marked.
        spreads: standard errors of the means in `frame`.
        marked: by column, the rows that are better than the plain model beyond noise.
        test: description of the test, for the tooltips of columns.
        about: by row, what was trained, for the tooltips of names.
    """
    names = [name for name in ordered(map(str, frame)) if frame[name].notna().any()]
    tested = {name for name in names if test and column(name).best in ("max", "min")}
    in_unit = f" ({unit})" if unit else ""
    helps = {n: column(n).help + (f". {test}" if n in tested else "") for n in names}
    head = "".join(
        f'<th scope="col" title="{html.escape(helps[n])}">{html.escape(column(n).title.format(unit=in_unit))}{_ARROWS[_direction(n)]}</th>'
        for n in names
    )
    rows = []
    for row in frame.index:
        cells = []
        for name in names:
            value = frame.loc[row, name]
            text = "–" if math.isnan(value) else column(name).text(value)
            if spreads is not None and name not in COSTS and row in spreads.index:
                error = spreads.loc[row, name]
                if not math.isnan(error):
                    together = column(name).text is _three and error > 0
                    text, error_text = (
                        with_spread(value, error).split(" ± ") if together else (text, column(name).text(error))
                    )
                    text += f" <small>± {error_text}</small>"
            better = row in marked.get(name, ()) and row not in differs
            cells.append(f'<td class="wb-best"><b>{text}</b></td>' if better else f"<td>{text}</td>")
        note = f" <small>{html.escape(status[row])}</small>" if status.get(row) else ""
        why = html.escape(differs.get(row, ""))
        greyed = f' class="wb-outdated" title="differs from the current settings: {why}"' if why else ""
        tip = f' title="{html.escape(about[row])}"' if about.get(row) else ""
        rows.append(f'<tr{greyed}><th scope="row"{tip}>{html.escape(str(row))}{note}</th>{"".join(cells)}</tr>')
    below = "".join(f"<p>{html.escape(note)}</p>" for note in notes if note)
    return (
        f'<div class="wb-scroll"><table class="wb-table"><thead><tr><th scope="col">model</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>{below}"
    )


_ARROWS = {"max": " ↑", "min": " ↓", "": ""}


def _direction(name: str) -> str:
    way = column(name).best
    return way if isinstance(way, str) else ""
