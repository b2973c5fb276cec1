"""Panels of `matrix` for single rows: strips of images, positions of a sequence, and maps."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from workbench.plots._answers import Answer, Subject
from workbench.plots._common import Array, colour, ink
from workbench.plots._images import add_spare_bar, draw_panel, pictures_of
from workbench.plots._panels import (
    PREDICTED,
    TrueRisk,
    blank,
    class_key,
    class_name,
    colour_bar,
    columns_of,
    grid,
    heights_of,
    label_of,
    shading,
    shared_legend,
    true_height,
    write_in_centre,
)
from workbench.plots._scales import beyond, scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_SERIES_CHANNELS = 3  # inputs [n, channels, steps] with more channels are taken for grey images


# ---- one prediction for each row
def strips(
    subject: Subject,
    x: Any,
    numbers: Sequence[int],
    answers: Mapping[str, Answer],
    truth: Array,
    true_risk: TrueRisk,
    figure: Any,
) -> np.ndarray[Any, Any]:
    """Draw rows one below the other, with a bar for the prediction and each risk, and a small picture if they are images or series."""
    columns, first = columns_of(answers), next(iter(answers.values()))
    kind = _kind_of_pictures(x)
    pictured, n = kind is not None, len(numbers)
    names = columns if kind is None else [kind, *columns]
    shares = [0.3] * pictured + [1.3] + [1.0] * (len(columns) - 1)
    figure, axes = grid(figure, list(answers), names, (2.3, 0.36 * n + 0.35), width_ratios=shares)
    scaled = columns if first.probs is None else columns[1:]  # probabilities of classes go from 0 to 1
    drawn = {c: heights_of(answers, c) for c in scaled}
    true = {c: heights for c in scaled if (heights := true_height(c, truth, true_risk)) is not None}
    limits = {c: _range([v for _, v in drawn[c]] + ([true[c]] if c in true else [])) for c in scaled}
    for line, answer in zip(axes, answers.values(), strict=True):
        if pictured:
            (_sparklines if kind == "series" else _thumbnails)(line[0], x)
        for ax, column in zip(line[pictured:], columns, strict=True):
            _bars(ax, subject, answer, column, truth)
            if column in true:
                label = "true value" if column == "prediction" else f"truth: {true_risk[1]}"  # type: ignore[index]
                ax.scatter(
                    true[column], np.arange(n), marker="|", s=130, linewidths=2, color=ink(ax), label=label, zorder=3
                )
            ax.set(xlim=limits.get(column, (0.0, 1.02)), ylim=(n - 0.5, -0.5), yticks=[])
        line[0].set_yticks(range(n), [str(i) for i in numbers], fontsize=8)
    for ax in axes[:-1].ravel():
        ax.tick_params(labelbottom=False)
    for ax, column in zip(axes[-1, pictured:], columns, strict=True):
        label = "probability of that class"
        if column in scaled:
            outliers = beyond(drawn[column], *limits[column])
            note = textwrap.wrap(f"beyond it: {outliers}", 30) if outliers else []
            label = "\n".join([label_of(subject, first, column), *note])
        ax.set_xlabel(label, fontsize=9)
        ax.tick_params(axis="x", labelsize=8)
        ax.locator_params(axis="x", nbins=4)
    shared_legend(figure, axes)
    return axes


def _kind_of_pictures(x: Any) -> str | None:
    """Return whether inputs are drawn as small pictures: "series", "image", or None for other inputs."""
    if not isinstance(x, Tensor):
        return None
    if x.ndim == 3:
        return "series" if x.shape[1] <= MAX_SERIES_CHANNELS else "image"
    return "image" if x.ndim == 4 and x.shape[1] in (1, 3) else None


def _range(values: Sequence[Array]) -> tuple[float, float]:
    """Return axis limits from 0, or from the lowest negative value, to the highest without outliers, with a small margin."""
    low, high = scale(values)
    low, high = min(0.0, low), max(0.0, high)
    room = 0.06 * (high - low) or 0.5
    return (low - room if low < 0 else 0.0), high + room


def _thumbnails(ax: Axes, x: Tensor) -> None:
    shape = tuple(x.shape[-2:])
    pictures = pictures_of(x.float().cpu(), (len(x), *shape), len(x))
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


def _bars(ax: Axes, subject: Subject, answer: Answer, column: str, truth: Array) -> None:
    rows = np.arange(len(truth))
    ax.grid(False, axis="y")
    if column != "prediction":
        if column in answer.risk:
            ax.barh(rows, answer.risk[column], 0.66, color=colour(ax, column))
        else:
            write_in_centre(ax, "not measured")
    elif answer.probs is None:
        ax.barh(rows, answer.value, 0.66, color=PREDICTED, alpha=0.55)
    else:
        ax.barh(rows, answer.probs[rows, answer.value], 0.66, color=PREDICTED, alpha=0.35)
        _write_classes(ax, subject, answer.value, truth)


def _write_classes(ax: Axes, subject: Subject, classes: Array, truth: Array) -> None:
    for i, (predicted, true) in enumerate(zip(classes, truth, strict=True)):
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
    for row, block in enumerate(axes.reshape(len(numbers), len(answers), -1)):
        for line, answer in zip(block, answers.values(), strict=True):
            _predicted_steps(line[0], subject, answer, at, row, truth)
            for ax, cause in zip(line[1:], columns[1:], strict=True):
                if cause in answer.risk:
                    ax.bar(at, answer.risk[cause][row], 0.8, color=colour(ax, cause), label=f"{cause} risk")
                else:
                    write_in_centre(ax, "not measured")
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
    first, size = next(iter(answers.values())), truth.shape[1:]
    pictures = _pictures_of_inputs(x, size)
    n_classes = 0 if first.probs is None else first.probs.shape[-1]
    columns = ["error", *columns_of(answers)]
    maps = {c: dict(heights_of(answers, c)) for c in columns[2:]}
    maps["error"] = {name: _errors(answer, truth) for name, answer in answers.items()}
    maps["prediction"] = {name: answer.value.astype(float) for name, answer in answers.items()}
    drawn = {c: list(maps[c].items()) for c in columns}
    drawn["prediction"].insert(0, ("truth", truth))
    looks = {c: shading(c, drawn[c], n_classes if c == "prediction" else 0) for c in columns[1:]}
    looks["prediction"]["interpolation"] = "nearest"
    highest = 1.0 if n_classes else scale(list(maps["error"].values()), bottom=0.0)[1]
    looks["error"] = {"cmap": "Greys", "vmin": 0.0, "vmax": highest}
    sides = [f"{side}{f', row {row}' if len(numbers) > 1 else ''}" for row in numbers for side in ("truth", *answers)]
    height = 2.1 * min(max(size[0] / size[1], 0.4), 2.0)
    figure, axes = grid(figure, sides, ["input; error", *columns[1:]], (2.1, height))
    mappables: dict[str, Any] = {}
    for i, (top, *lines) in enumerate(axes.reshape(len(numbers), 1 + len(answers), -1)):
        draw_panel(top[0], pictures[i])
        draw_panel(top[1], truth[i], **looks["prediction"])
        for ax in top[2:]:
            _blank_map(ax, "", size)
        for line, name in zip(lines, answers, strict=True):
            for ax, column in zip(line, columns, strict=True):
                if name in maps[column]:
                    mappables[column] = draw_panel(ax, maps[column][name][i], **looks[column])
                else:
                    _blank_map(ax, "not measured", size)
    for ax in axes.ravel():
        if ax.images:
            ax.spines[:].set_visible(True)
    for column, below in zip(columns, axes.T, strict=True):
        if n_classes and column in ("error", "prediction"):
            add_spare_bar(figure, mappables[column], below)
        else:
            label = f"|prediction - {subject.target}|" if column == "error" else label_of(subject, first, column)
            colour_bar(figure, mappables[column], below, label, drawn[column])
    if n_classes:
        class_key(figure, subject, n_classes, looks["prediction"]["cmap"])
    return axes


def _pictures_of_inputs(x: Any, size: tuple[int, ...]) -> Array:
    """Return the inputs as pictures [n, height, width, 3], of more than three channels the first one; refuse inputs of another size."""
    if not isinstance(x, Tensor) or x.shape[-2:] != size:
        inputs = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f"models: they give maps {list(size)} for inputs {inputs}; matrix draws maps only if they have the size of the inputs"
        )
    channels = x if x.ndim == 3 or x.shape[1] in (1, 3) else x[:, :1]
    return pictures_of(channels.float().cpu(), (len(x), *size), len(x))


def _errors(answer: Answer, truth: Array) -> Array:
    """Return the absolute errors of values, or 1 where a class is wrong; NaN where there is no truth."""
    errors = np.abs(answer.value - truth)
    return errors if answer.probs is None else np.where(np.isnan(errors), np.nan, errors > 0)


def _blank_map(ax: Axes, words: str, size: tuple[int, ...]) -> None:
    blank(ax, words)
    ax.set_box_aspect(size[0] / size[1])  # otherwise its title stands higher than the others
