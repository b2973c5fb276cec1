"""Risk of rows: the density of features that are pooled to one vector per row, and the rows that it is fitted to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..core.outputs.options import has_classes
from .class_rows import (
    TrainingRows,
    class_numbers,
    class_scores,
    concatenate_if_all,
    in_range,
    last_layer,
    shape_of_values,
)
from .densities import Density
from .made_outliers import concatenate_by_kind, make_outliers

MAX_ROWS = 20_000  # training rows that a fit uses
MAX_OUTLIERS = 10_000  # outliers that a fit makes of training rows


def learn(method: Any, wrapped: Any, batches: Iterable[tuple[tuple, dict[str, Any], Any]]) -> None:
    """Fit the density to the features of the training rows.

    Args:
        method: the method of neo.
        wrapped: the wrapped model.
        batches: positional and keyword inputs of the model, and targets.
    """
    density, output = method.model(wrapped), wrapped._workbench.output
    rows = _training_rows(method, wrapped, batches)
    needs_classes = _needs_classes(method, density)
    if needs_classes:
        _check_scores(density, rows.scores)
        _check_values(method, wrapped, rows.value_shape)
    is_classifier = needs_classes or (
        method.wrapper.classes is None and (has_classes(output) or rows.labels is not None)
    )
    # a user-defined density may accept neither
    options: dict[str, Any] = {}
    if density.needs_head or density.uses_head:
        head = last_layer(wrapped, method.sites[-1], density, rows.features[-1], rows.scores)
        options |= {} if head is None else {"head": head}
    if density.takes_outliers:
        options["outliers"] = concatenate_by_kind(rows.outliers)
    scores = rows.scores if is_classifier else None
    with torch.enable_grad():
        density.fit(rows.features, scores, rows.labels if density.uses_labels else None, **options)


@torch.no_grad()
def _training_rows(method: Any, wrapped: Any, batches: Iterable[tuple[tuple, dict[str, Any], Any]]) -> TrainingRows:
    density = method.model(wrapped)
    collected: list[list[Tensor]] = []
    scores: list[Tensor | None] = []
    labels: list[Tensor | None] = []
    outliers: list[tuple[list[Tensor], Tensor, str]] = []
    value_shape: list[int] | None = None
    n_rows = 0
    for args, kwargs, target in batches:
        y, n, features, _ = method.features(wrapped, args, kwargs)
        collected.append(features)
        scores.append(class_scores(wrapped, y, n) if method.wrapper.classes is not False else None)
        labels.append(class_numbers(target, scores[-1]))
        value_shape = value_shape or shape_of_values(target)
        if density.takes_outliers and method.rows_first and sum(len(part[1]) for part in outliers) < MAX_OUTLIERS:
            outliers += _outliers(method, wrapped, args, kwargs, n, n_rows)
        n_rows += n
        if n_rows >= MAX_ROWS:
            break
    if not collected:
        raise ValueError("fit got no inputs; give the training inputs as a tensor or a loader")
    all_scores = concatenate_if_all(scores)
    return TrainingRows(
        [torch.cat(parts) for parts in zip(*collected, strict=True)],
        all_scores,
        in_range(concatenate_if_all(labels), all_scores),
        value_shape,
        outliers,
    )


@torch.no_grad()
def check(method: Any, wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raise ValueError if a call with these inputs shows that `learn` would refuse the model."""
    density: Density = method.model(wrapped)
    if not _needs_classes(method, density):
        return
    y, n, features, _ = method.features(wrapped, args, kwargs)
    scores = class_scores(wrapped, y, n)
    _check_scores(density, scores)
    if density.needs_head:
        last_layer(wrapped, method.sites[-1], density, features[-1], scores)
        density.check_features(features[-1])


def check_targets(method: Any, wrapped: Any, target: Any) -> None:
    """Raise ValueError if class scores are to be used, and targets show that the outputs are values."""
    if _needs_classes(method, method.model(wrapped)):
        _check_values(method, wrapped, shape_of_values(target))


def _needs_classes(method: Any, density: Density) -> bool:
    return method.wrapper.classes or density.needs_logits


def _check_scores(density: Density, scores: Tensor | None) -> None:
    if scores is None:
        raise ValueError(
            f"neo: density={type(density).__name__} is to use class scores, but the model has no output [rows, classes] with at least two "
            f"classes; choose another density{'' if density.needs_logits else ', or classes=False'}"
        )


def _check_values(method: Any, wrapped: Any, value_shape: list[int] | None) -> None:
    if value_shape and method.wrapper.classes is None and not has_classes(wrapped._workbench.output):
        raise ValueError(
            f"neo: density={type(method.model(wrapped)).__name__} is to use class scores, but the targets are values of shape {value_shape}, "
            'not class numbers or probabilities; choose another density, or give output="logits" if the model is a classifier'
        )


def _outliers(
    method: Any, wrapped: Any, args: tuple, kwargs: dict[str, Any], rows: int, seed: int
) -> Iterator[tuple[list[Tensor], Tensor, str]]:
    """Make outliers of the rows of a batch; yields their features, class scores and kind."""
    for kind, inputs in make_outliers((args, kwargs), rows, seed):
        y, n, features, _ = method.features(wrapped, *inputs)
        if (scores := class_scores(wrapped, y, n)) is not None:
            yield features, scores, kind


def judge(method: Any, wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Tensor]:
    """Return the model's output and the risk of each row [n]."""
    density: Density = method.model(wrapped)
    y, rows, features, _ = method.features(wrapped, args, kwargs)
    return y, density(features, class_scores(wrapped, y, rows) if density.wants_logits else None)


__all__ = ["MAX_ROWS", "check", "check_targets", "judge", "learn"]
