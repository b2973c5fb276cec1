"""Figures of training and of single cases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import require
from workbench.plots._common import (
    COLOURS,
    REFERENCE,
    SERIES,
    Values,
    array,
    choose_scale,
    every_nth,
    ink,
    legend,
    new_axes,
    not_negative,
    usable,
    vectors,
    whole_numbers,
    width_for,
)
from workbench.plots._texts import label_axes, name_rows

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


def history(frame: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Draw the losses of a training over its epochs, and mark the best epoch.

    Args:
        frame: table with the columns ``epoch``, ``loss`` and optionally ``validation_loss``; a loss that is not
            finite leaves a gap.
        ax: Axes to draw on; a new figure if None.

    Returns:
        The Axes. The best epoch is the one with the lowest validation loss, or the lowest loss without validation.

    Raises:
        ValueError: if a column is missing or the table is empty.

    Example:
        >>> import pandas as pd
        >>> ax = history(pd.DataFrame({"epoch": [1, 2, 3], "loss": [3, 2, 1], "validation_loss": [3.0, 2.5, 2.75]}))
        >>> ax.get_legend_handles_labels()[1]
        ['training loss', 'validation loss', 'best: 2.5 in epoch 2']
    """
    if not isinstance(frame, require("pandas").DataFrame):
        raise TypeError(f"frame: expected the DataFrame of a training, history.frame; found {type(frame).__name__}")
    missing = [name for name in ("epoch", "loss") if name not in frame]
    if missing:
        raise ValueError(
            f"frame: no column {' or '.join(missing)}, found {', '.join(map(str, frame.columns)) or 'none'}"
        )
    frame = frame.sort_values("epoch", kind="stable")
    epochs = array(frame["epoch"], "frame column epoch")
    names = {"loss": "training loss", "validation_loss": "validation loss"}
    losses = {name: array(frame[name], f"frame column {name}") for name in names if name in frame}
    losses = {name: np.where(np.isfinite(loss), loss, np.nan) for name, loss in losses.items()}
    losses = {name: loss for name, loss in losses.items() if name == "loss" or not np.isnan(loss).all()}
    ax = new_axes(ax)
    for (name, loss), shade in zip(losses.items(), SERIES, strict=False):
        known = np.pad(np.isfinite(loss), 1)
        alone = (known[1:-1] & ~known[:-2] & ~known[2:]).any()  # a loss between two gaps, where no line goes
        marker = "o" if known.sum() <= 30 or alone else None
        ax.plot(epochs, loss, color=shade, linewidth=1.8, marker=marker, markersize=4, label=names[name])
    notes = []
    name, loss = list(losses.items())[-1]
    if np.isfinite(loss).any():
        best = int(np.nanargmin(loss))
        label = f"best: {loss[best]:.4g} in epoch {epochs[best]:g}"
        ax.axvline(epochs[best], color=ink(ax), linewidth=1, linestyle=(0, (4, 2)), alpha=0.6, zorder=REFERENCE)
        ax.plot(epochs[best], loss[best], "D", color=ink(ax), markersize=6, linestyle="none", label=label, zorder=4)
    for name, loss in losses.items():
        if gaps := int(np.isnan(loss).sum()):
            notes.append(f"{names[name]}: {gaps:,} of {loss.size:,} not finite")
    choose_scale(ax, "y", np.concatenate(list(losses.values())), tail=0)
    whole_numbers(ax)
    label_axes(ax, "epoch", "loss")
    legend(ax, notes)
    return ax


def risk_split(
    aleatoric: Values, epistemic: Values, labels: Sequence[str] | None = None, ax: Axes | None = None
) -> Axes:
    r"""Draw the aleatoric and epistemic shares of the variance of single cases.

    Shares are :math:`\mathrm{aleatoric}^2 / \mathrm{total}^2` and :math:`\mathrm{epistemic}^2 / \mathrm{total}^2`,
    which sum to one, as variances add. A case without any risk has no bar.

    Args:
        aleatoric: standard deviations of the cases [n] or [n, 1].
        epistemic: the same, in the same units.
        labels: n names; the number of each row if None.
        ax: Axes to draw on; a new figure, whose height grows with the number of cases, if None.

    Returns:
        The Axes. Where it is too low for a line of text per case, bars have no numbers, and every tenth, say, has a name.

    Raises:
        ValueError: for shapes or a number of labels that do not match, or negative risk.

    Example:
        >>> ax = risk_split([3.0, 1.0], [4.0, 0.0], labels=["beam 7", "beam 12"])
        >>> [text.get_text() for text in ax.texts]
        ['36 %', '100 %', '64 %', '']
    """
    noise, model = vectors(aleatoric=aleatoric, epistemic=epistemic)
    not_negative(aleatoric=noise, epistemic=model)
    names = np.array([str(i) for i in range(noise.size)] if labels is None else [str(name) for name in labels])
    if len(names) != noise.size:
        raise ValueError(f"labels: expected {noise.size}, one for each case, found {len(names)}")
    (_, noise, model, names), notes = usable(noise + model, noise, model, names)
    total = np.hypot(noise, model)
    rows = np.arange(total.size)
    ax = new_axes(ax, (width_for(names.tolist()), float(np.clip(1.4 + 0.34 * total.size, 2.2, 14))), linear="xy")
    step = every_nth(ax, total.size)
    ax.grid(False, axis="y")
    ax.set(xlim=(0, 100), ylim=(total.size - 0.5, -0.5))
    name_rows(ax, rows[::step], names[::step].tolist())
    label_axes(ax, "share of the predicted variance (%)")
    name_rows(ax, rows[::step], names[::step].tolist())  # the label may leave the rows less room
    letters = min(8.5, 0.55 * ax.get_window_extent().height / total.size * 72 / ax.figure.dpi)
    # in percent; narrower bars have no room for "12 %"
    narrowest = max(10.0, 100 * 3 * letters * ax.figure.dpi / 72 / ax.get_window_extent().width)
    left = np.zeros(total.size)
    for name, risk in (("aleatoric", noise), ("epistemic", model)):
        share = 100 * np.divide(risk, total, out=np.zeros_like(risk), where=total > 0) ** 2
        if step == 1:
            bars = ax.barh(rows, share, 0.72, left, color=COLOURS[name], label=name)
            texts = [f"{width:.0f} %" if width >= narrowest else "" for width in share]
            ax.bar_label(bars, texts, label_type="center", color="white", fontsize=letters)
        else:  # one shape, as drawing many thousands of bars takes minutes
            ends, edges = left + share, np.arange(total.size + 1) - 0.5
            look: dict[str, Any] = {"color": COLOURS[name], "label": name, "fill": True, "linewidth": 0}
            ax.stairs(ends, edges, baseline=left, orientation="horizontal", **look)
        left = left + share
    legend(ax, notes, columns=2, headroom=True)
    return ax
