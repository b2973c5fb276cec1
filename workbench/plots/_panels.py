"""Panels of `matrix` for tables: curves over one input, and planes of two."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from workbench.errors import require
from workbench.plots._answers import CAUSES, Answer, Subject
from workbench.plots._common import Array, colour, ink, new_axes, risk_label, thinned, with_unit
from workbench.plots._images import MAX_CLASSES, class_colours, key_columns, shades_of
from workbench.plots._scales import TYPICAL, beyond, extension, scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PREDICTED = "#CC79A7"  # colour of predictions

DASHES = (0, (4, 2))
MAX_VACUITIC = 10.0  # upper limit of curves of vacuitic risk, in standard deviations of the training data


# ---- shared by all panels
def columns_of(answers: Mapping[str, Answer]) -> list[str]:
    """Return "prediction" and the risks that any model measures; the total only if there is no other."""
    causes = [cause for cause in CAUSES if any(cause in answer.risk for answer in answers.values())]
    total = [] if causes or not any("total" in answer.risk for answer in answers.values()) else ["total"]
    return ["prediction", *causes, *total]


def grid(
    figure: Any, sides: Sequence[str], columns: Sequence[str], size: tuple[float, float], **options: Any
) -> tuple[Any, np.ndarray[Any, Any]]:
    """Return a figure and its Axes [rows, columns], with row names on the left and column names on top."""
    width, height = size[0] * len(columns) + 0.5, size[1] * len(sides) + 1.1
    if figure is None:
        figure = require("matplotlib.pyplot").figure(figsize=(width, height), layout="constrained")
    elif callable(figure):
        figure = figure(width, height)
    axes = figure.subplots(len(sides), len(columns), squeeze=False, **options)
    for ax in axes.ravel():
        new_axes(ax)
    for ax, column in zip(axes[0], columns, strict=True):
        ax.set_title(column, fontsize=12)
    for ax, side in zip(axes[:, 0], sides, strict=True):
        lines = textwrap.wrap(side, max(10, int(size[1] * 9))) or [""]
        ax.annotate(
            "\n".join(lines),
            (0, 0.5),
            (-46, 0),
            xycoords="axes fraction",
            textcoords="offset points",
            rotation=90,
            ha="right",
            va="center",
            fontsize=11,
            color=ink(ax),
        )
    return figure, axes


def blank(ax: Axes, words: str = "") -> None:
    """Empty a panel without data, except for an optional text."""
    ax.set(xticks=[], yticks=[])
    ax.grid(False)
    ax.spines[:].set_visible(False)
    ax.patch.set_visible(False)
    write_in_centre(ax, words, va="center", alpha=0.7)


def write_in_centre(ax: Axes, words: str, **look: Any) -> None:
    if words:
        ax.text(0.5, 0.5, words, transform=ax.transAxes, ha="center", fontsize=9, color=ink(ax), **look)


def shared_legend(figure: Any, axes: np.ndarray[Any, Any]) -> None:
    """Add one legend of all labelled artists below the Axes."""
    entries: dict[str, Any] = {}
    for ax in axes.ravel():
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if entries:
        figure.legend(
            list(entries.values()),
            list(entries),
            loc="outside lower center",
            ncols=min(len(entries), 4),
            fontsize=9,
            frameon=False,
        )


def label_of(subject: Subject, answer: Answer, column: str) -> str:
    """Return the label of a column, with its unit."""
    if column != "prediction":
        return risk_label(column, subject.unit if answer.probs is None else "nats")
    if answer.probs is None:
        return with_unit(subject.target, subject.unit)
    return f"probability of {class_name(subject, 1)}" if answer.probs.shape[-1] == 2 else "class"


def class_name(subject: Subject, i: int) -> str:
    return subject.classes[i] if subject.classes is not None else f"class {i}"


def height_of(answer: Answer, column: str) -> Array | None:
    """Return the numbers of a column, None if not measured. Predictions are the second class's probability of two, class numbers of more."""
    if column != "prediction":
        return answer.risk.get(column)
    return answer.probs[..., 1] if answer.probs is not None and answer.probs.shape[-1] == 2 else answer.value


Drawn: TypeAlias = "Sequence[tuple[str, Array]]"  # name of the model, and its numbers


def heights_of(answers: Mapping[str, Answer], column: str) -> list[tuple[str, Array]]:
    """Return the numbers of a column (see `height_of`) of each model that measures it, with the name of the model."""
    return [(name, values) for name, answer in answers.items() if (values := height_of(answer, column)) is not None]


TrueRisk: TypeAlias = "tuple[Array, str] | None"  # the true aleatoric risk of each row and its description, if known


def true_height(column: str, truth: Array, true_risk: TrueRisk) -> Array | None:
    """Return the true numbers of a column, None if not known."""
    if column == "prediction":
        return truth
    return true_risk[0] if column == "aleatoric" and true_risk is not None else None


def shading(column: str, drawn: Drawn, n_classes: int) -> dict[str, Any]:
    """Return the colour map and limits shared by a column, ignoring outliers among the models; for classes one colour each."""
    if n_classes:
        if n_classes > MAX_CLASSES:
            raise ValueError(f"models: matrix draws at most {MAX_CLASSES} classes as colours, found {n_classes}")
        return {"cmap": class_colours(n_classes), "vmin": -0.5, "vmax": n_classes - 0.5}
    values = [v for _, v in drawn]
    if column == "prediction":
        low, high = scale(values)
        return {"cmap": "viridis", "vmin": low, "vmax": high}
    low, high = scale(values, bottom=None if column == "vacuitic" else 0.0, typical=TYPICAL)
    return {"cmap": shades_of(column), "vmin": low, "vmax": high}


def colour_bar(figure: Any, mappable: Any, axes: Any, label: str, drawn: Drawn) -> None:
    """Add one colour bar below a column; its label names the models that reach far beyond its ends."""
    values, (low, high) = [v for _, v in drawn], (mappable.norm.vmin, mappable.norm.vmax)
    place: Any = {"location": "bottom", "fraction": 0.06, "pad": 0.02, "shrink": 0.9, "aspect": 24}
    bar = figure.colorbar(mappable, ax=list(axes), **place, extend=extension(values, low, high))
    outliers = beyond(drawn, low, high)
    lines = [*textwrap.wrap(label, 24), *(textwrap.wrap(f"beyond it: {outliers}", 24) if outliers else [])]
    bar.set_label("\n".join(lines), fontsize=9)
    bar.ax.tick_params(labelsize=8)
    bar.ax.locator_params(nbins=4)
    bar.outline.set_visible(False)


def class_key(figure: Any, subject: Subject, n_classes: int, palette: Any, title: str | None = None) -> None:
    """Add one legend of the classes."""
    from matplotlib.patches import Patch

    handles = [Patch(color=palette(i), label=class_name(subject, i)) for i in range(n_classes)]
    figure.legend(
        handles=handles,
        title=title,
        loc="outside lower center",
        ncols=key_columns([class_name(subject, i) for i in range(n_classes)], figure.get_figwidth(), 7),
        fontsize=9,
        title_fontsize=10,
        frameon=False,
        handlelength=1.2,
    )


# ---- one input
def curves(
    subject: Subject,
    x: Array,
    answers: Mapping[str, Answer],
    truth: Array,
    true_risk: TrueRisk,
    figure: Any,
) -> np.ndarray[Any, Any]:
    """Draw prediction and risks over one input, with the truth as points or dashed line."""
    columns, first = columns_of(answers), next(iter(answers.values()))
    figure, axes = grid(figure, list(answers), columns, (2.9, 2.0), sharex=True, sharey="col")
    for line, answer in zip(axes, answers.values(), strict=True):
        _predicted_curve(line[0], subject, x, answer, truth)
        for ax, cause in zip(line[1:], columns[1:], strict=True):
            if cause in answer.risk:
                _risk_curve(ax, cause, x, answer.risk[cause], true_risk if cause == "aleatoric" else None)
            else:
                write_in_centre(ax, "not measured", alpha=0.7)
    for ax, column in zip(axes[0], columns, strict=True):
        note = _limit_height(ax, column, heights_of(answers, column), true_height(column, truth, true_risk))
        unit = _unit(label_of(subject, first, column))
        ax.set_title("\n".join([column, unit, *textwrap.wrap(note, 28)]), fontsize=11)
    for ax in axes[-1]:
        ax.set_xlabel(subject.features[0])
    shared_legend(figure, axes)
    return axes


def _predicted_curve(ax: Axes, subject: Subject, x: Array, answer: Answer, truth: Array) -> None:
    n_classes = 0 if answer.probs is None else answer.probs.shape[-1]
    if n_classes not in (0, 2):
        ax.set_yticks(range(n_classes), [class_name(subject, i) for i in range(n_classes)], fontsize=8)
    some = thinned(len(x))[0][:: max(1, len(x) // 300)]
    ax.scatter(x[some], truth[some], s=7, color=ink(ax), alpha=0.45, linewidths=0, label="targets")
    order, values = np.argsort(x, kind="stable"), height_of(answer, "prediction")
    ax.plot(x[order], values[order], color=PREDICTED, linewidth=1.8, label="prediction")  # type: ignore[index]


def _risk_curve(ax: Axes, cause: str, x: Array, risk: Array, true_risk: TrueRisk) -> None:
    order = np.argsort(x, kind="stable")
    ax.fill_between(x[order], 0, risk[order], color=colour(ax, cause), alpha=0.25, linewidth=0)
    ax.plot(x[order], risk[order], color=colour(ax, cause), linewidth=1.8, label=f"{cause} risk")
    if true_risk is not None:
        true, what = true_risk
        ax.plot(x[order], true[order], color=ink(ax), linestyle=DASHES, linewidth=1.2, label=f"truth: {what}")


def _limit_height(ax: Axes, column: str, drawn: Drawn, true: Array | None) -> str:
    """Set the vertical limits of a column, and return a note on the curves that leave them, "" if none does."""
    values = [v for _, v in drawn]
    low, high = scale(values if true is None else [*values, true])
    outliers = beyond(drawn, low, high)
    if outliers:  # otherwise one model would flatten all others
        ax.set_ylim(low - 0.06 * (high - low), high + 0.06 * (high - low))
    if column in ("aleatoric", "epistemic", "total"):
        ax.set_ylim(bottom=0)
    elif column == "vacuitic" and ax.get_ylim()[1] > MAX_VACUITIC:
        # vacuitic risk grows without bound outside the data; the automatic lower margin grew with it
        low = min(*(float(np.nanmin(v)) for v in values), 0.0)
        ax.set_ylim(low - 0.05 * (MAX_VACUITIC - low), MAX_VACUITIC)
        return f"shown up to {MAX_VACUITIC:g}"
    return f"beyond: {outliers}" if outliers else ""


def _unit(label: str) -> str:
    """Return the unit of a risk label, or any other label as it is."""
    return label if "risk" not in label else label.partition("(")[2].rstrip(")") or " "


# ---- two inputs, or two directions of a table
def planes(
    subject: Subject,
    points: Array,
    labels: tuple[str, str],
    mesh: tuple[Array, Array] | None,
    answers: Mapping[str, Answer],
    truth: Array,
    true_risk: TrueRisk,
    figure: Any,
) -> np.ndarray[Any, Any]:
    """Draw prediction and risks as colours of mesh nodes or of table rows, and the truth of the rows above them."""
    columns, first = columns_of(answers), next(iter(answers.values()))
    n_scores = 0 if first.probs is None else first.probs.shape[-1]
    n_classes = 0 if n_scores == 2 else n_scores  # of two classes, the probability of the second is drawn
    true = {c: heights for c in columns if (heights := true_height(c, truth, true_risk)) is not None}
    drawn = {c: heights_of(answers, c) for c in columns}
    for column, heights in true.items():
        drawn[column].insert(0, ("truth", heights))
    looks = {c: shading(c, drawn[c], n_classes if c == "prediction" else 0) for c in columns}
    if n_scores == 2:
        looks["prediction"] |= {"vmin": 0.0, "vmax": 1.0}
    figure, axes = grid(figure, ["truth", *answers], columns, (2.7, 2.1), sharex=True, sharey=True)
    for column, (top, *others) in zip(columns, axes.T, strict=True):
        _plane(top, true.get(column), "", points, None, looks[column])
        mappables = [
            _plane(ax, height_of(answer, column), "not measured", points, mesh, looks[column])
            for ax, answer in zip(others, answers.values(), strict=True)
        ]
        if column != "prediction" or not n_classes:
            mappable = next(m for m in mappables if m is not None)
            colour_bar(figure, mappable, [top, *others], label_of(subject, first, column), drawn[column])
    across, up = mesh or points.T
    margin = 0.0 if mesh else 0.04
    axes[0, 0].set(xlim=_widened(across, margin), ylim=_widened(up, margin))
    if true_risk is not None and "aleatoric" in columns:
        what = textwrap.fill(f"truth: {true_risk[1]}", 28)
        axes[0, columns.index("aleatoric")].set_title(f"aleatoric\n{what}", fontsize=11)
    directions = f"across: {labels[0]};  up: {labels[1]}"
    if n_classes:
        class_key(figure, subject, n_classes, looks["prediction"]["cmap"], directions)
    else:
        figure.supxlabel(directions, fontsize=10)
    return axes


def _plane(
    ax: Axes,
    values: Array | None,
    if_missing: str,
    points: Array,
    mesh: tuple[Array, Array] | None,
    look: Mapping[str, Any],
) -> Any:
    """Draw values as colours of mesh nodes, or of points if there is no mesh; return the artist, None without values."""
    ax.grid(False)
    if values is None:
        blank_plane(ax, if_missing)
        return None
    if mesh is None:
        return _points(ax, points, values, look)
    return ax.pcolormesh(*mesh, values.reshape(mesh[0].shape), shading="nearest", rasterized=True, **look)


def _widened(values: Array, share: float) -> tuple[float, float]:
    """Return the range of values, with a margin of a share of its width at both ends."""
    low, high = values.min(), values.max()
    if low == high:
        return low - 0.5, high + 0.5
    return low - share * (high - low), high + share * (high - low)


def blank_plane(ax: Axes, words: str) -> None:
    """Empty a panel like `blank`, but keep its ticks, which it shares with other panels."""
    ax.spines[:].set_visible(False)
    ax.tick_params(left=False, bottom=False)
    write_in_centre(ax, words, va="center", alpha=0.7)


def _points(ax: Axes, points: Array, values: Array, look: Mapping[str, Any]) -> Any:
    """Draw points coloured by value, the highest on top; leave out unknown values."""
    known = np.flatnonzero(np.isfinite(values))
    order = known[np.argsort(values[known], kind="stable")]
    some = order[np.sort(np.random.default_rng(0).permutation(len(order))[:1500])]
    size = float(np.clip(2500 / max(len(some), 1), 5, 22))
    ax.set_facecolor("#BBBBBB")  # contrasts with the lowest risk, white, and the highest, nearly black
    across, up = points[some].T
    return ax.scatter(across, up, c=values[some], s=size, linewidths=0, **look)
