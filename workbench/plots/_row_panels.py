"""Panels of `matrix` for single rows: strips of images, positions of a sequence, and maps."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from workbench.plots._answers import Answer, Subject
from workbench.plots._common import Array, colour, ink
from workbench.plots._panels import (
    blank,
    class_key,
    class_name,
    colour_bar,
    columns_of,
    grid,
    label_of,
    shading,
    shared_legend,
    true_height,
)
from workbench.plots._scales import beyond, scale
from workbench.plots.maps import _draw, _pictures, _spare_bar

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PREDICTED = "#CC79A7"
MAX_SERIES_CHANNELS = 3  # inputs [n, channels, steps] with more channels are taken for grey images


# ---- one prediction for each row
def strips(
    subject: Subject,
    x: Any,
    numbers: Sequence[int],
    answers: Mapping[str, Answer],
    truth: Array,
    known: tuple[Array, str] | None,
    figure: Any,
) -> np.ndarray[Any, Any]:
    """Draw rows one below the other, with a bar for the prediction and each risk, and a small picture if they are images or series."""
    columns, first = columns_of(answers), next(iter(answers.values()))
    of_series = isinstance(x, Tensor) and x.ndim == 3 and x.shape[1] <= MAX_SERIES_CHANNELS
    pictured = isinstance(x, Tensor) and (x.ndim == 3 or (x.ndim == 4 and x.shape[1] in (1, 3)))
    names = [*(["series" if of_series else "image"] if pictured else []), *columns]
    n = len(numbers)
    shares = [0.3] * pictured + [1.3] + [1.0] * (len(columns) - 1)
    figure, axes = grid(figure, list(answers), names, (2.3, 0.36 * n + 0.35), width_ratios=shares)
    drawn = {c: [(name, a.risk[c]) for name, a in answers.items() if c in a.risk] for c in columns[1:]}
    if first.probs is None:
        drawn["prediction"] = [(name, a.value) for name, a in answers.items()]
    trues = {c: [true] for c in drawn if (true := true_height(c, truth, known)) is not None}
    limits = {c: _range([v for _, v in pairs] + trues.get(c, [])) for c, pairs in drawn.items()}
    for line, answer in zip(axes, answers.values(), strict=True):
        if pictured:
            (_sparklines if of_series else _thumbnails)(line[0], x)
        for ax, column in zip(line[pictured:], columns, strict=True):
            ax.grid(False, axis="y")
            if column == "prediction":
                _bars_of_predictions(ax, subject, answer, truth)
            elif column in answer.risk:
                ax.barh(np.arange(n), answer.risk[column], 0.66, color=colour(ax, column))
            else:
                ax.text(0.5, 0.5, "not measured", transform=ax.transAxes, ha="center", fontsize=9, color=ink(ax))
            true = true_height(column, truth, known) if column != "prediction" or first.probs is None else None
            if true is not None:
                label = "true value" if column == "prediction" else f"truth: {known[1]}"  # type: ignore[index]
                ax.scatter(true, np.arange(n), marker="|", s=130, linewidths=2, color=ink(ax), label=label, zorder=3)
            ax.set_xlim(limits.get(column, (0.0, 1.02)))
            ax.set_ylim(n - 0.5, -0.5)
            ax.set_yticks([])
            if ax not in axes[-1]:
                ax.tick_params(labelbottom=False)
        line[0].set_yticks(range(n), [str(i) for i in numbers], fontsize=8)
    for ax, column in zip(axes[-1, pictured:], columns, strict=True):
        of_classes = column == "prediction" and first.probs is not None
        label = "probability of that class" if of_classes else label_of(subject, first, column)
        if not of_classes:
            pairs = drawn[column]
            more = beyond([name for name, _ in pairs], [v for _, v in pairs], *limits[column])
            label = "\n".join([label, *(textwrap.wrap(f"beyond it: {more}", 30) if more else [])])
        ax.set_xlabel(label, fontsize=9)
        ax.tick_params(axis="x", labelsize=8)
        ax.locator_params(axis="x", nbins=4)
    shared_legend(figure, axes)
    return axes


def _range(values: Sequence[Array]) -> tuple[float, float]:
    """Return axis limits from 0, or from the lowest negative value, to the highest without outliers, with a small margin."""
    low, high = scale(values)
    low, high = min(0.0, low), max(0.0, high)
    room = 0.06 * (high - low) or 0.5
    return (low - room if low < 0 else 0.0), high + room


def _thumbnails(ax: Axes, x: Tensor) -> None:
    shape = tuple(x.shape[-2:])
    pictures = _pictures(x.float().cpu(), (len(x), *shape), len(x))
    ax.imshow(np.concatenate(list(pictures)), extent=(0, 1, len(x) - 0.5, -0.5), aspect="auto")
    ax.set_xticks([])
    ax.grid(False)
    ax.spines[:].set_visible(False)


def _sparklines(ax: Axes, x: Tensor) -> None:
    """Draw series [n, channels, steps] one below the other, on one scale."""
    values = x.double().cpu().numpy()
    low, high = values.min(), values.max()
    for i, row in enumerate(values):
        ax.plot(i + 0.4 - 0.8 * (row.T - low) / ((high - low) or 1.0), color=ink(ax), linewidth=0.8)
    ax.set(xticks=[], ylim=(len(x) - 0.5, -0.5))
    ax.grid(False)
    ax.spines[:].set_visible(False)


def _bars_of_predictions(ax: Axes, subject: Subject, answer: Answer, truth: Array) -> None:
    rows = np.arange(len(truth))
    if answer.probs is None:
        ax.barh(rows, answer.value, 0.66, color=PREDICTED, alpha=0.55)
        return
    ax.barh(rows, answer.probs[rows, answer.value], 0.66, color=PREDICTED, alpha=0.35)
    for i, (predicted, true) in enumerate(zip(answer.value, truth, strict=True)):
        right = predicted == true or np.isnan(true)
        words = class_name(subject, int(predicted)) + ("" if right else f", true: {class_name(subject, int(true))}")
        ax.text(0.02, i, words, va="center", fontsize=8.5, color=ink(ax), fontweight="normal" if right else "bold")


# ---- positions of one row
def steps(
    subject: Subject,
    numbers: Sequence[int],
    answers: Mapping[str, Answer],
    truth: Array,
    words: Sequence[str] | None,
    figure: Any,
) -> np.ndarray[Any, Any]:
    """Draw prediction and risks over steps, tokens or targets, with the truth as open circles."""
    columns, first = columns_of(answers), next(iter(answers.values()))
    sides = [name if len(numbers) == 1 else f"{name}, row {row}" for row in numbers for name in answers]
    at = np.arange(truth.shape[1])
    figure, axes = grid(figure, sides, columns, (max(2.9, 0.03 * len(at) + 2.4), 1.6), sharex=True, sharey="col")
    for i, answer in enumerate([answer for _ in numbers for answer in answers.values()]):
        row = i // len(answers)
        for ax, column in zip(axes[i], columns, strict=True):
            if column == "prediction":
                _predicted_steps(ax, subject, answer, at, row, truth)
            elif column in answer.risk:
                height = answer.risk[column][row]
                ax.bar(at, height, 0.8, color=colour(ax, column), label=f"{column} risk")
            else:
                ax.text(0.5, 0.5, "not measured", transform=ax.transAxes, ha="center", fontsize=9, color=ink(ax))
    for ax, column in zip(axes[0], columns, strict=True):
        label = label_of(subject, first, column)
        below = "class" if first.probs is not None and column == "prediction" else label.partition("(")[2].rstrip(")")
        ax.set_title(f"{column}\n{below or ' '}", fontsize=11)
    for ax in axes[-1]:
        if words is not None:
            ax.set_xticks(at, [word.strip("Ġ▁ ") for word in words], rotation=90, fontsize=8)
        else:
            ax.set_xlabel("position")
            ax.locator_params(axis="x", integer=True)
    shared_legend(figure, axes)
    return axes


def _predicted_steps(ax: Axes, subject: Subject, answer: Answer, at: Array, row: int, truth: Array) -> None:
    joined = "-" if answer.probs is None else "none"
    ax.plot(
        at,
        answer.value[row],
        color=PREDICTED,
        marker="o",
        markersize=4,
        linestyle=joined,
        linewidth=1.4,
        label="prediction",
    )
    ax.plot(
        at, truth[row], "o", markersize=7, markerfacecolor="none", color=ink(ax), markeredgewidth=1.1, label="truth"
    )
    if answer.probs is not None and answer.probs.shape[-1] <= 12:
        classes = range(answer.probs.shape[-1])
        ax.set_yticks(classes, [class_name(subject, i) for i in classes], fontsize=8)
        ax.set_ylim(-0.6, len(classes) - 0.4)


# ---- maps
def images(
    subject: Subject, x: Any, numbers: Sequence[int], answers: Mapping[str, Answer], truth: Array, figure: Any
) -> np.ndarray[Any, Any]:
    """Draw the input and truth of each row, and below them the errors, prediction and risks of each model."""
    columns, first = columns_of(answers), next(iter(answers.values()))
    size = truth.shape[1:]
    if not isinstance(x, Tensor) or x.shape[-2:] != size:
        inputs = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f"models: they give maps {list(size)} for inputs {inputs}; matrix draws maps only if they have the size of the inputs"
        )
    channels = x if x.ndim == 3 or x.shape[1] in (1, 3) else x[:, :1]
    pictures = _pictures(channels.float().cpu(), (len(x), *size), len(x))
    n_classes = 0 if first.probs is None else first.probs.shape[-1]
    drawn = {c: [(name, a.risk[c]) for name, a in answers.items() if c in a.risk] for c in columns[1:]}
    drawn["prediction"] = [("truth", truth), *((name, a.value.astype(float)) for name, a in answers.items())]
    looks = {c: shading(c, drawn[c], n_classes if c == "prediction" else 0) for c in columns}
    errors = [np.abs(a.value - truth) for a in answers.values()]
    if n_classes:
        errors = [np.where(np.isnan(e), np.nan, e > 0) for e in errors]
    wrong = {
        "cmap": "Greys",
        "vmin": 0.0,
        "vmax": 1.0 if n_classes else scale(errors, bottom=0.0)[1],
    }
    sides = [f"{side}{f', row {row}' if len(numbers) > 1 else ''}" for row in numbers for side in ("truth", *answers)]
    high = 2.1 * min(max(size[0] / size[1], 0.4), 2.0)
    figure, axes = grid(figure, sides, ["input", *columns], (2.1, high))
    mappables: dict[str, Any] = {}
    for i in range(len(numbers)):
        block = axes[i * (len(answers) + 1) : (i + 1) * (len(answers) + 1)]
        _draw(block[0, 0], pictures[i])
        _draw(block[0, 1], truth[i], interpolation="nearest", **looks["prediction"])
        for ax in block[0, 2:]:
            blank(ax)
            ax.set_box_aspect(size[0] / size[1])  # otherwise its title stands higher than the others
        for line, error, answer in zip(block[1:], errors, answers.values(), strict=True):
            mappables["error"] = _draw(line[0], error[i], **wrong)
            for ax, column in zip(line[1:], columns, strict=True):
                values = answer.value.astype(float) if column == "prediction" else answer.risk.get(column)
                if values is None:
                    blank(ax, "not measured")
                    ax.set_box_aspect(size[0] / size[1])
                else:
                    look = looks[column] | ({"interpolation": "nearest"} if column == "prediction" else {})
                    mappables[column] = _draw(ax, values[i], **look)
    for ax in axes.ravel():
        if ax.images:
            ax.spines[:].set_visible(True)
    axes[0, 0].set_title("input; error", fontsize=12)
    for j, column in enumerate(["error", *columns]):
        if n_classes and column in ("error", "prediction"):
            _spare_bar(figure, mappables[column], axes[:, j])
            continue
        label = f"|prediction - {subject.target}|" if column == "error" else label_of(subject, first, column)
        pairs = list(zip(answers, errors, strict=True)) if column == "error" else drawn[column]
        colour_bar(figure, mappables[column], axes[:, j], label, pairs)
    if n_classes:
        class_key(figure, subject, n_classes, looks["prediction"]["cmap"])
    return axes
