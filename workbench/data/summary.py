"""Summary of a data set as a table, in text and HTML."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from workbench.data.splits import LazySplit
from workbench.data.targets import VOID, kind


def as_text(data: Any) -> str:
    """Return the summary as aligned lines of text."""
    rows = _summary(data)
    width = max(len(label) for label, _ in rows)
    lines = [f"{data.name}: {data.card.description}"]
    for label, text in rows:
        wrapped = textwrap.wrap(text, 100 - width) or [""]
        lines += [f"  {label:<{width}}  {wrapped[0]}", *(" " * (width + 4) + line for line in wrapped[1:])]
    return "\n".join(lines)


def as_html(data: Any) -> str:
    """Return the summary as an HTML table, in which JupyterLab does not typeset text between dollar signs."""
    left = "text-align: left; vertical-align: top"
    body = "".join(
        f'<tr><th style="{left}">{html.escape(label)}</th><td style="{left}; overflow-wrap: anywhere">{html.escape(text)}</td></tr>'
        for label, text in _summary(data)
    )
    caption = f"<b>{html.escape(data.name)}</b>: {html.escape(data.card.description)}"
    return f'<table class="tex2jax_ignore mathjax_ignore"><caption style="text-align: left">{caption}</caption><tbody>{body}</tbody></table>'


def _summary(data: Any) -> list[tuple[str, str]]:
    train, test, card = data.train, data.test, data.card
    lazy = isinstance(train, LazySplit)
    if isinstance(data.task, Mapping):
        task = ", ".join(f"{name}: {task}" for name, task in data.task.items())
        target = "; ".join(
            f"{data.target.get(name, name)}: {', '.join((data.classes or {}).get(name) or ['values'])}"
            for name in data.task
        )
    else:
        task, target = data.task, _described_target(data)
    shape = kind(train[0][0]) if lazy else str([*data.input_shape]) if isinstance(train.x, Tensor) else kind(train.x)
    rows = [
        ("task", task),
        (
            "rows",
            f"{len(train):,} training, {len(test):,} test (split {data.split}){', read when asked for' if lazy else ''}",
        ),
        ("input", f"{shape}: " + ", ".join(map(str, data.features))),
        ("target", target),
    ]
    if data.parts:
        rows.append(("parts", ", ".join(f"{name} {len(split)}" for name, split in data.parts.items())))
    if test.regions:
        rows.append(
            ("regions", ", ".join(f"{name} {int(mask.sum())}" for name, mask in test.regions.items()) + " (test)")
        )
    rows += [("source", card.source), ("licence", card.licence), ("citation", card.citation)]
    rows += [("note", note) for note in card.notes]
    return [row for row in rows if row[1]]  # a user's own data have no citation


def _described_target(data: Any) -> str:
    """Describe one target by its range or class counts, if these are known without reading rows."""
    train = data.train
    if isinstance(train, LazySplit) and (data.classes is None or train.labels is None):
        return f"{data.target}{': ' + ', '.join(data.classes) if data.classes else ''}"
    y: Any = train.labels if isinstance(train, LazySplit) else train.y
    if data.classes is None:
        if not len(y):
            return ""
        names = [str(replace(data.target, name=name)) for name in data.target.name.split(", ")]
        if y.ndim == 2 and y.shape[1] == len(names) > 1:  # each has a unit of its own
            return f"{'; '.join(map(_range, names, y.T))} in training"
        shape = f" {list(y.shape[1:])}" if y.shape[1:] != (1,) else ""
        return f"{_range(f'{data.target}{shape}', y)} in training"
    if data.task == "probabilities":
        shares = zip(data.classes, y.mean(0).tolist(), strict=True)
        return f"{data.target}: " + ", ".join(f"{name} {share:.3g}" for name, share in shares)
    counts = y.sum(0) if data.task == "labels" else torch.bincount(y[y != VOID], minlength=len(data.classes))
    texts = [f"{c} ({n:,})" for c, n in zip(data.classes, counts.tolist(), strict=True)]
    n_void = int((y == VOID).sum())
    return f"{data.target}: " + ", ".join([*texts, *([f"none ({n_void})"] if n_void else [])])


def _range(name: str, y: Tensor) -> str:
    low, high = (f"{float(f'{number:.4g}'):.10g}" for number in (y.min(), y.max()))  # 18990, and not 1.899e+04
    return f"{name}, {low} to {high}"
