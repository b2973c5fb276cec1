"""Panels of `matrix` for tokens: the text, coloured by class and by risk as in `plots.tokens`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, to_rgba

from workbench.plots._answers import Answer, Subject
from workbench.plots._common import Array, ink
from workbench.plots._images import MAX_CLASSES, add_spare_bar, class_colours, shades_of
from workbench.plots._panels import blank, class_key, colour_bar, columns_of, grid, label_of
from workbench.plots._scales import TYPICAL, scale
from workbench.plots.sequences import _draw_words, _spelled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 34  # characters in a line
CHARACTER_WIDTH, LINE_HEIGHT = 0.08, 0.24  # inches


def texts(
    subject: Subject,
    numbers: Sequence[int],
    answers: Mapping[str, Answer],
    truth: Array,
    words: Sequence[Sequence[str]],
    figure: Any,
) -> np.ndarray[Any, Any]:
    """Draw the text of each row with its true classes, and below it the text with the classes and risks of each model.

    Args:
        subject: has the class names.
        numbers: row numbers.
        answers: predictions and risks by model.
        truth: class numbers [rows, tokens], NaN where there is none.
        words: words of each row.
        figure: as for `matrix`.
    """
    columns, first = columns_of(answers), next(iter(answers.values()))
    n_classes = 0 if first.probs is None else first.probs.shape[-1]
    known = np.isfinite(truth)
    last = int(np.flatnonzero(known.any(0)).max(initial=-1)) + 1 or truth.shape[1]  # the rest is padding
    spelled = [[_spelled(word, WIDTH) for word in row[:last]] for row in words]
    sides = [f"{name}{f', row {row}' if len(numbers) > 1 else ''}" for row in numbers for name in ("truth", *answers)]
    high = max(_draw_words(None, row, WIDTH) for row in spelled)
    figure, axes = grid(figure, sides, columns, (CHARACTER_WIDTH * WIDTH, max(LINE_HEIGHT * high, 1.0)))
    drawn = {c: [(name, a.risk[c][:, :last]) for name, a in answers.items() if c in a.risk] for c in columns[1:]}
    limits = {
        c: scale([v for _, v in pairs], bottom=None if c == "vacuitic" else 0.0, typical=TYPICAL)
        for c, pairs in drawn.items()
    }
    for i in range(len(numbers)):
        block = axes[i * (len(answers) + 1) : (i + 1) * (len(answers) + 1)]
        _classes(block[0, 0], spelled[i], truth[i, :last], truth[i, :last], n_classes)
        for ax in block[0, 1:]:
            blank(ax)
        for line, answer in zip(block[1:], answers.values(), strict=True):
            _classes(line[0], spelled[i], answer.value[i, :last].astype(float), truth[i, :last], n_classes)
            for ax, column in zip(line[1:], columns[1:], strict=True):
                if column not in answer.risk:
                    blank(ax, "not measured")
                    continue
                shades = shades_of(column, dark=False)(Normalize(*limits[column])(answer.risk[column][i, :last]))
                _draw_words(ax, spelled[i], WIDTH, shades)
    for j, column in enumerate(columns):
        if column == "prediction":
            add_spare_bar(figure, ScalarMappable(), axes[:, j])
        else:
            mappable = ScalarMappable(Normalize(*limits[column]), shades_of(column, dark=False))
            colour_bar(figure, mappable, axes[:, j], label_of(subject, first, column), drawn[column])
    axes[0, 0].set_title("prediction\n(wrong ones framed)", fontsize=11)
    if n_classes <= MAX_CLASSES:
        class_key(figure, subject, n_classes, _pale(n_classes))
    return axes


def _pale(n_classes: int) -> Any:
    """Return class colours light enough for dark letters."""
    palette = class_colours(n_classes)
    return lambda number: tuple(0.45 + 0.55 * channel for channel in palette(number)[:3])


def _classes(ax: Axes, words: Sequence[str], classes: Array, truth: Array, n_classes: int) -> None:
    """Draw words in the colours of their classes, unless there are too many classes; frame the wrong ones."""
    pale = _pale(n_classes) if n_classes <= MAX_CLASSES else None
    shades = np.full((len(words), 4), np.nan)
    for i, number in enumerate(classes):
        if pale is not None and np.isfinite(number):
            shades[i] = to_rgba(pale(int(number)))
    wrong = np.isfinite(truth) & (classes != truth)
    _draw_words(ax, words, WIDTH, shades, framed=wrong, frame=ink(ax))


__all__ = ["texts"]
