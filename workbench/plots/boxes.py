"""Figure of detections: boxes on their image, with the spread of each corner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from workbench.errors import require
from workbench.plots._common import COLOURS, SERIES, Array, Values, array, finite, new_axes, not_negative, vector
from workbench.plots._images import picture
from workbench.plots._texts import break_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Text


def boxes(
    image: Values,
    corners: Values,
    ax: Axes | None = None,
    *,
    spread: Values | None = None,
    scores: Values | None = None,
    labels: Values | None = None,
    classes: Sequence[str] | None = None,
    truth: Values | None = None,
) -> Axes:
    """Draw boxes on an image, with a band of ± two standard deviations around each side.

    For one image and a model with `output=Detections()`: `boxes(image, y["boxes"], spread=risk.epistemic["boxes"],
    scores=y["scores"], labels=y["labels"])`.

    Args:
        image: [channels, height, width] of 1 or 3 channels, or [height, width].
        corners: boxes as x1, y1, x2, y2 in pixels [k, 4]; k may be 0.
        ax: Axes to draw on; a new figure if None.
        spread: standard deviations of the corners in pixels [k, 4].
        scores: scores [k], written beside the boxes.
        labels: class numbers [k], written beside the boxes.
        classes: class names, by number.
        truth: true boxes [m, 4], drawn dashed.

    Returns:
        The Axes.

    Raises:
        ValueError: for shapes that do not match, boxes with x1 > x2 or y1 > y2, negative spreads, class numbers without a name, or numbers that
            are not finite.

    Example:
        >>> import torch
        >>> ax = boxes(torch.ones(3, 32, 32), [[4, 4, 20, 24]], spread=[[1, 1, 2, 3]], scores=[0.8], labels=[1], classes=["sky", "car"])
        >>> [text.get_text() for text in ax.texts]
        ['car 0.80']
    """
    outlines = _corners(corners, "corners")
    expected = None if truth is None else _corners(truth, "truth")
    k = len(outlines)
    deviations = None if spread is None or not k else array(spread, "spread")
    if deviations is not None:
        if deviations.shape != outlines.shape:
            raise ValueError(f"shapes do not match: spread {list(deviations.shape)}, corners {list(outlines.shape)}")
        finite(spread=deviations)
        not_negative(spread=deviations)
    texts = _written(k, scores, labels, classes)
    background = picture(image)
    ax = new_axes(ax, (5.6, 5.6 * background.shape[0] / background.shape[1] + 0.4), linear="xy")
    patches = require("matplotlib.patches")
    ax.imshow(background)
    ax.set(xticks=[], yticks=[], xlim=(-0.5, background.shape[1] - 0.5), ylim=(background.shape[0] - 0.5, -0.5))
    ax.apply_aspect()
    for i, (x1, y1, x2, y2) in enumerate(outlines):
        if deviations is not None:
            for side in _bands(outlines[i], 2 * deviations[i]):
                ax.add_patch(patches.Rectangle(*side, color=COLOURS["epistemic"], alpha=0.3, linewidth=0))
        outline = patches.Rectangle(
            (x1, y1), x2 - x1, y2 - y1, fill=False, edgecolor=COLOURS["epistemic"], linewidth=1.8
        )
        ax.add_patch(outline)
        if texts[i]:
            text_background = {"facecolor": COLOURS["epistemic"], "edgecolor": "none", "pad": 1.5}
            written = ax.text(x1, y1, texts[i], color="white", fontsize=9, va="bottom", bbox=text_background)
            written.set_in_layout(False)  # a long text would otherwise leave the image no room
            _keep_inside(written, ax, x2)
    for x1, y1, x2, y2 in () if expected is None else expected:
        dashed = {"linestyle": "--", "linewidth": 1.5, "edgecolor": SERIES[0]}
        ax.add_patch(patches.Rectangle((x1, y1), x2 - x1, y2 - y1, fill=False, **dashed))
    ax.grid(False)
    return ax


def _keep_inside(text: Text, ax: Axes, right: float) -> None:
    """Align a text at the left end of a box with its right end, break it into lines and put it into the box where it would leave the Axes."""
    place = ax.get_window_extent()
    here, there = ax.transData.transform([(x, text.get_position()[1]) for x in (text.get_position()[0], right)])
    room = place.x1 - here[0]
    if text.get_window_extent().width > room and there[0] - place.x0 > room:
        text.set(x=right, horizontalalignment="right")
        room = there[0] - place.x0
    break_lines(text, room)
    if text.get_window_extent().y1 > place.y1:
        text.set_verticalalignment("top")


def _corners(value: Values, name: str) -> Array:
    if hasattr(value, "__len__") and np.shape(value)[:1] == (0,):  # no boxes, which `array` would refuse
        return np.zeros((0, 4))
    result = array(value, name)
    if result.ndim != 2 or result.shape[1] != 4:
        raise ValueError(f"{name}: expected boxes [k, 4], found {list(result.shape)}")
    finite(**{name: result})
    wrong = np.flatnonzero((result[:, 2:] < result[:, :2]).any(1))
    if wrong.size:
        raise ValueError(
            f"{name}: expected corners x1, y1, x2, y2 with x1 <= x2 and y1 <= y2; box {wrong[0]} is {result[wrong[0]].tolist()}"
        )
    return result


def _written(k: int, scores: Values | None, labels: Values | None, classes: Sequence[str] | None) -> list[str]:
    """Return the text beside each box: its class and score."""
    parts: list[list[str]] = [[] for _ in range(k)]
    for name, value in (("labels", labels), ("scores", scores)):
        if value is None or not k:
            continue
        numbers = vector(value, name)
        if len(numbers) != k:
            raise ValueError(f"shapes do not match: {len(numbers)} {name}, {k} boxes")
        finite(**{name: numbers})
        if name == "labels" and classes is not None and not all(0 <= n < len(classes) for n in numbers):
            raise ValueError(
                f"classes: {len(classes)} names, and labels go from {numbers.min():g} to {numbers.max():g}"
            )
        for part, number in zip(parts, numbers, strict=True):
            label = classes[int(number)] if classes is not None else f"class {number:g}"
            part.append(label if name == "labels" else f"{number:.2f}")
    return [" ".join(part) for part in parts]


def _bands(corners: Array, width: Array) -> list[tuple[tuple[float, float], float, float]]:
    """Return position, width and height of the band around each side: left, top, right, bottom."""
    (x1, y1, x2, y2), (left, top, right, bottom) = corners, width
    return [
        ((x1 - left, y1), 2 * left, y2 - y1),
        ((x1, y1 - top), x2 - x1, 2 * top),
        ((x2 - right, y1), 2 * right, y2 - y1),
        ((x1, y2 - bottom), x2 - x1, 2 * bottom),
    ]
