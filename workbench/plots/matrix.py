"""The matrix of several models: a row for each model, columns for its prediction and each of its risks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workbench.plots import _panels, _row_panels
from workbench.plots._answers import (
    MAX_ROWS,
    Answer,
    Subject,
    answers_of,
    evenly_spaced,
    plane_over,
    subject_of,
    true_risk,
    true_values,
    two_axes,
)
from workbench.plots._common import Array

DEFAULT_ROWS = 6  # number of single rows drawn by default


def matrix(
    models: nn.Module | Mapping[str, nn.Module],
    data: Any,
    *,
    rows: Sequence[int] | None = None,
    features: Sequence[str | int] | None = None,
    target: int | None = None,
    words: Sequence[str] | None = None,
    output: str = "values",
    figure: Any = None,
) -> np.ndarray[Any, Any]:
    """Draw several models on the same rows: a row for each model, columns for prediction, aleatoric, epistemic and vacuitic risk.

    Each column has one scale for all models, and one legend or colour bar; columns that no model measures are left out. The kind of panel
    depends on the data:

    - one input: prediction and risks over it;
    - two inputs: maps over the plane, with a margin of 15 % around the data;
    - tables: each test row as a point, in the plane of two features or of the first two principal components of the standardized inputs;
    - images, series and other inputs with one prediction each: a strip of rows with a bar for each risk;
    - maps of classes or values: images of prediction and risks, and of the errors below the input;
    - tokens: the text of one row, coloured by class and by each risk as in `plots.tokens`, with wrong classes framed;
    - horizons and several targets: prediction and risks over the positions of one row.

    The truth is drawn where it is known: targets beside the predictions, and under aleatoric risk the sigma of the toy data, the entropy of the
    annotators' shares, or the spread of rows with the same input. It is drawn as a row on top, or as dashed lines and ticks in panels whose
    axis shows the values.

    Args:
        models: wrapped or calibrated models by name, or one model; all must give the same kind of output.
        data: a Data (its test rows), the name of one, a split, or a pair (x, y).
        rows: row numbers, for panels of single rows. None: six rows spread over all risks, or the first row of maps, tokens, horizons and
            several targets.
        features: two features of a table, by name or number, that span the plane; principal components if None.
        target: index of one of several targets, to draw that one alone; all of them, over positions, if None.
        words: tokens of the one row drawn; if None, those of the data's vocabulary, or else the token numbers.
        output: what models give that were wrapped without `output`, such as plain baselines: "values", "logits" or "probs".
        figure: an empty matplotlib Figure with constrained layout to draw on, or a function that makes one from width and height in inches; a
            new pyplot figure of a fitting size if None.

    Returns:
        Array of the Axes [rows, columns].

    Raises:
        TypeError: if data is none of these, or a model is not wrapped.
        ValueError: if the models give different kinds of output, y does not fit them, or rows, features or target do not exist.

    Example:
        >>> from workbench import data, vote
        >>> model = torch.nn.Linear(10, 1)
        >>> axes = matrix({"3 voters": vote.Wrapper(3)(model), "5 voters": vote.Wrapper(5)(model)}, data.load("diabetes"))
        >>> axes.shape, [ax.get_title() for ax in axes[0]]
        ((3, 2), ['prediction', 'epistemic'])
    """
    named = dict(models) if isinstance(models, Mapping) else {type(models).__name__: models}
    if not named:
        raise ValueError("models: there is none to draw")
    if output not in ("values", "logits", "probs"):
        raise ValueError(f'output: expected "values", "logits" or "probs", found {output!r}')
    subject = replace(subject_of(data), default_output=output)
    numbers = _chosen(rows, len(subject.rows))
    # the kind of panel follows from the prediction for the first row
    probe = next(iter(answers_of(named, subject.rows.take([0]).load().x, subject).values()))
    if target is not None:
        _check_target(target, probe)
    positions = probe.value.ndim - 1 if target is None else 0
    if words is not None and positions != 1:
        raise ValueError("words: the models give one prediction per row, or a map, and not one per word")
    if positions > 2:
        raise ValueError(
            f"models: they give {list(probe.value.shape[1:])} for each row; matrix draws at most maps [height, width]"
        )
    if positions:
        return _positions(named, subject, torch.tensor([0]) if numbers is None else numbers, positions, words, figure)
    x = subject.rows.take([0]).load().x
    if isinstance(x, Tensor) and x.ndim == 2:
        return _table(named, subject, numbers, features, target, figure)
    if features is not None:
        raise ValueError("features: the inputs are no table of features")
    return _strip(named, subject, numbers, target, figure)


def _chosen(rows: Sequence[int] | None, n: int) -> Tensor | None:
    if rows is None:
        return None
    numbers = torch.as_tensor(rows).reshape(-1)
    if not numbers.numel() or numbers.is_floating_point() or int(numbers.min()) < 0 or int(numbers.max()) >= n:
        raise ValueError(f"rows: expected numbers from 0 to {n - 1}, at least one, found {list(rows)}")
    return numbers


def _check_target(target: int, probe: Answer) -> None:
    if probe.value.ndim != 2 or probe.probs is not None:
        raise ValueError(
            "target: it chooses one of several values per row, and the models give one, a map, or classes; leave it out"
        )
    if isinstance(target, bool) or not isinstance(target, int) or not 0 <= target < probe.value.shape[1]:
        raise ValueError(f"target: expected a number from 0 to {probe.value.shape[1] - 1}, found {target!r}")


def _predict_rows(
    models: Mapping[str, nn.Module], subject: Subject, numbers: Tensor, target: int | None
) -> tuple[Any, dict[str, Answer], Array]:
    """Return the rows, the answers of each model for them, and their targets."""
    rows = subject.rows.take(numbers).load()
    answers = answers_of(models, rows.x, subject)
    truth = true_values(subject, rows, next(iter(answers.values())))
    if target is not None:
        at = (slice(None), target)
        answers, truth = {name: answer.at(at) for name, answer in answers.items()}, truth[at]
    return rows, answers, truth


def _table(
    models: Mapping[str, nn.Module],
    subject: Subject,
    numbers: Tensor | None,
    features: Sequence[str | int] | None,
    target: int | None,
    figure: Any,
) -> np.ndarray[Any, Any]:
    n = evenly_spaced(len(subject.rows), MAX_ROWS) if numbers is None else numbers
    rows, answers, truth = _predict_rows(models, subject, n, target)
    known = true_risk(subject, rows, n) if target is None else None
    if len(subject.features) == 1:
        return _panels.curves(subject, rows.x[:, 0].double().numpy(), answers, truth, known, figure)
    if len(subject.features) > 2 or features is not None:
        points, labels = two_axes(subject, rows, features)
        return _panels.planes(subject, points, labels, None, answers, truth, known, figure)
    xx, yy, nodes = plane_over(subject)
    answers = answers_of(models, nodes, subject)
    if target is not None:
        answers = {name: answer.at((slice(None), target)) for name, answer in answers.items()}
    labels = (subject.features[0], subject.features[1])
    return _panels.planes(subject, rows.x.double().numpy(), labels, (xx, yy), answers, truth, known, figure)


def _strip(
    models: Mapping[str, nn.Module], subject: Subject, numbers: Tensor | None, target: int | None, figure: Any
) -> np.ndarray[Any, Any]:
    if numbers is None:
        candidates = evenly_spaced(len(subject.rows), 200)
        answers = _predict_rows(models, subject, candidates, target)[1]
        ranks = [r.argsort().argsort() for answer in answers.values() for r in answer.risk.values() if r.ndim == 1]
        order = np.argsort(np.sum(ranks, 0), kind="stable") if ranks else np.arange(len(candidates))
        numbers = candidates[torch.from_numpy(order)][evenly_spaced(len(order), DEFAULT_ROWS)]
    rows, answers, truth = _predict_rows(models, subject, numbers, target)
    known = true_risk(subject, rows, numbers) if target is None else None
    return _row_panels.strips(subject, rows.x, numbers.tolist(), answers, truth, known, figure)


def _positions(
    models: Mapping[str, nn.Module],
    subject: Subject,
    numbers: Tensor,
    positions: int,
    words: Sequence[str] | None,
    figure: Any,
) -> np.ndarray[Any, Any]:
    rows, answers, truth = _predict_rows(models, subject, numbers, None)
    for name, answer in answers.items():  # a risk with one number per row can't be drawn over positions
        risk = {cause: r for cause, r in answer.risk.items() if r.shape == answer.value.shape}
        answers[name] = Answer(answer.value, answer.probs, risk)
    if positions == 2:
        return _row_panels.images(subject, rows.x, numbers.tolist(), answers, truth, figure)
    if words is not None and (len(numbers) != 1 or len(words) != truth.shape[1]):
        raise ValueError(f"words: expected the {truth.shape[1]} of one row, found {len(words)} and {len(numbers)} rows")
    written = [words] if words is not None else _written(subject, rows.x, truth.shape)
    if written is not None and next(iter(answers.values())).probs is not None:
        from workbench.plots._token_panels import texts

        return texts(subject, numbers.tolist(), answers, truth, written, figure)
    return _row_panels.steps(subject, numbers.tolist(), answers, truth, words, figure)


def _written(subject: Subject, x: Any, shape: tuple[int, ...]) -> list[list[str]] | None:
    """Return the tokens of each row as words, or as numbers if not in the vocabulary; None if the inputs are no tokens."""
    if not isinstance(x, Tensor) or x.is_floating_point() or tuple(x.shape) != shape:
        return None
    return [[f" {subject.words.get(number, str(number))}" for number in row] for row in x.tolist()]


__all__ = ["matrix"]
