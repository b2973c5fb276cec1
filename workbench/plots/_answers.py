"""The rows that `matrix` draws, with the predictions and risks of several models for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.calibration.answers import log_probabilities
from workbench.calibration.collection import collect
from workbench.calibration.models import output_of
from workbench.core.batches.arrays import check_index
from workbench.data import Data, LazySplit, Split, load
from workbench.data.targets import as_tensor
from workbench.data.texts import Vocabulary
from workbench.plots._common import Array

CAUSES = ("aleatoric", "epistemic", "vacuitic")
MAX_ROWS = 2000  # more rows of a table are thinned out
GRID_SIZE = 70  # nodes along each side of a plane


@dataclass(frozen=True, eq=False)
class Subject:
    """Rows to predict, with the names of their features, target and classes.

    Args:
        rows: test rows of a Data, or the rows given by the user.
        seen: training rows of a Data, or else the same as `rows`.
        features: names of the columns of x with units; () unless x is [n, features].
        target: name of y.
        unit: unit of y; "" if it has none.
        classes: class names; None for regression, or if the classes have no names.
        shares: whether y holds a probability for each class, such as the shares of annotators.
        default_output: what models give that were wrapped without `output`.
        words: words by token number, as far as the vocabulary of the data has them.
    """

    rows: Any
    seen: Any
    features: tuple[str, ...]
    target: str
    unit: str
    classes: tuple[str, ...] | None
    shares: bool
    default_output: str = "values"
    words: Mapping[int, str] = field(default_factory=dict)


def subject_of(data: Any) -> Subject:
    """Return the subject for a Data, the name of one, a split, or a pair (x, y)."""
    data = load(data) if isinstance(data, str) else data
    if isinstance(data, Data):
        return _subject_of_data(data)
    if isinstance(data, tuple | list) and len(data) == 2:
        data = _split_of(*data)
    if not isinstance(data, Split | LazySplit):
        raise TypeError(
            f"data: expected a Data, the name of one, a split or a pair (x, y), found {type(data).__name__}"
        )
    if not len(data):
        raise ValueError("data: there is no row")
    x = data.take([0]).load().x
    n_columns = x.shape[1] if isinstance(x, Tensor) and x.ndim == 2 else 0
    columns = ("x",) if n_columns == 1 else tuple(f"x{i + 1}" for i in range(n_columns))
    return Subject(data, data, columns, "y", "", None, False)


def _subject_of_data(data: Data) -> Subject:
    if isinstance(data.task, Mapping) or data.task == "labels":
        raise ValueError(
            f"data: {data.name} has {'several targets by name' if isinstance(data.task, Mapping) else 'several labels a row'}; "
            "matrix draws one output: give a function that returns one, and a pair (x, y) of its target"
        )
    columns = tuple(map(str, data.features))
    shares = data.task == "probabilities"
    unit = "" if shares else data.target.unit
    words = dict(enumerate(data.encoding.words, 2)) if isinstance(data.encoding, Vocabulary) else {}
    return Subject(data.test, data.train, columns, data.target.name, unit, data.classes, shares, words=words)


def _split_of(x: Any, y: Any) -> Split:
    """Return a pair (x, y) as a split, with values in float32 and as columns [n, 1], and class numbers in int64."""
    for part in x.values() if isinstance(x, Mapping) else [x]:
        check_index(part, y, "data")
    y = as_tensor(y, "y")
    y = y.float() if y.is_floating_point() else y.long()
    if y.ndim == 1 and y.is_floating_point():
        y = y[:, None]
    if isinstance(x, Mapping):
        return Split({name: as_tensor(values, f"x[{name!r}]") for name, values in x.items()}, y)
    x = as_tensor(x, "x")
    return Split(x.float() if x.dtype == torch.float64 else x, y)


def evenly_spaced(n: int, count: int) -> Tensor:
    """Return at most `count` evenly spaced row numbers from 0 to n - 1."""
    return torch.linspace(0, n - 1, min(n, count)).round().long()


@dataclass(frozen=True, eq=False)
class Answer:
    """Output of one model: a value or class for each row or position [n, ...], class probabilities if it classifies, and risks by cause."""

    value: Array
    probs: Array | None
    risk: dict[str, Array]

    def at(self, index: Any) -> Answer:
        """Return the answer for some rows, or for one position of each row."""
        risk = {name: r[index] if r.ndim >= np.ndim(self.value) else r for name, r in self.risk.items()}
        return Answer(self.value[index], None if self.probs is None else self.probs[index], risk)


def answers_of(models: Mapping[str, Any], x: Any, subject: Subject) -> dict[str, Answer]:
    """Predict rows with each model.

    Raises:
        ValueError: if some models give values and others classes, or if their shapes differ.
    """
    class_names, answers = subject.classes, dict[str, Answer]()
    forms: dict[str, str] = {}
    for name, model in models.items():
        output = output_of(model, subject.default_output)
        collected = collect(model, x, targets=False, batch_size=256)
        risk = {cause: _flat(collected.risk[cause]) for cause in (*CAUSES, "total") if cause in collected.risk.names()}
        if output == "values":
            answers[name] = Answer(_flat(collected.y), None, risk)
            forms[name] = f"values {list(answers[name].value.shape[1:])}"
        else:
            probs = log_probabilities(collected.y, output).exp().double().cpu().numpy()
            answers[name] = Answer(probs.argmax(-1), probs, risk)
            forms[name] = f"scores of classes {list(probs.shape[1:])}"
    first = next(iter(forms))
    for name, form in forms.items():
        if form != forms[first]:
            raise ValueError(
                f"models: {first!r} gives {forms[first]} for each row and {name!r} {form}; all models of a matrix must give the same. For "
                'models that were wrapped without `output`, pass output="logits" or output="probs" to matrix'
            )
    scores = answers[first].probs
    if class_names is not None and (scores is None or scores.shape[-1] != len(class_names)):
        hint = '; if these are class scores, pass output="logits"' if scores is None else ""
        raise ValueError(
            f"models: {first!r} gives {forms[first]} for each row, and the data have {len(class_names)} classes{hint}"
        )
    return answers


def _flat(tensor: Tensor) -> Array:
    """Drop the second dimension of [n, 1] and of [n, 1, height, width]."""
    values = tensor.detach().double().cpu().numpy()
    return values[:, 0] if values.ndim in (2, 4) and values.shape[1] == 1 else values


def true_values(subject: Subject, rows: Any, like: Answer) -> Array:
    """Return the targets, shaped like the value of the answer `like`; NaN where a position has no class.

    Raises:
        ValueError: if the targets have another shape, or are values where the model gives classes or the reverse.
    """
    y = rows.y
    if subject.shares:
        y = y.argmax(-1)
    if (like.probs is not None) == y.is_floating_point():
        kinds = ("class numbers", "values") if like.probs is None else ("values", "class numbers")
        raise ValueError(f"data: y are {kinds[0]}, and the models give {kinds[1]}")
    values = _flat(y.float() if y.is_floating_point() else y)
    if values.shape != like.value.shape:
        raise ValueError(f"shapes do not match: y {list(values.shape)}, predictions {list(like.value.shape)}")
    return np.where(values < 0, np.nan, values) if like.probs is not None else values


def true_risk(subject: Subject, rows: Any, numbers: Tensor) -> tuple[Array, str] | None:
    """Return the true aleatoric risk of each row [n] and its description, or None if it is not known.

    It is the sigma of the toy data (for two classes the entropy of a label that is wrong with probability p, where sigma**2 = p (1 - p)), the
    entropy of the annotators' shares, or the standard deviation of the targets of rows with the same input. NaN where it is not known.
    """
    if subject.shares:
        return torch.special.entr(rows.y.double()).sum(-1).numpy(), "entropy of the annotators' shares"
    if rows.sigma is not None:
        sigma = rows.sigma[:, 0].double().numpy()
        if rows.y.is_floating_point():
            return sigma, "standard deviation of the noise"
        if subject.classes is not None and len(subject.classes) == 2:
            wrong = 0.5 - np.sqrt(np.clip(0.25 - sigma**2, 0, None))
            entropies = torch.special.entr(torch.from_numpy(np.stack([wrong, 1 - wrong]))).sum(0).numpy()
            return entropies, "entropy of the labels"
        return None
    if not (subject.features and rows.y.is_floating_point() and rows.y.shape[1:] == (1,)):
        return None
    parts = [subject.rows] if subject.seen is subject.rows else [subject.rows, subject.seen]
    loaded = [split.load() for split in parts]
    x, y = (np.concatenate([getattr(split, name).numpy() for split in loaded]) for name in ("x", "y"))
    _, group, count = np.unique(x, axis=0, return_inverse=True, return_counts=True)
    group = group.reshape(-1)
    if count.max() < 2:
        return None
    mean = np.bincount(group, y[:, 0]) / count
    square = np.bincount(group, (y[:, 0] - mean[group]) ** 2)
    spread = np.where(count > 1, np.sqrt(square / np.maximum(count - 1, 1)), np.nan)[group][numbers.numpy()]
    return (spread, "spread of rows with the same input") if np.isfinite(spread).any() else None


def plane_over(subject: Subject) -> tuple[Array, Array, Tensor]:
    """Return a grid over the two inputs, with a margin of 15 %: xx, yy and the nodes as rows [nodes, 2]."""
    x = torch.cat([split.load().x.float() for split in (subject.seen, subject.rows)])
    low, high = x.amin(0), x.amax(0)
    margin = torch.where(high > low, 0.15 * (high - low), 1.0)
    sides = [
        torch.linspace(a, b, GRID_SIZE) for a, b in zip((low - margin).tolist(), (high + margin).tolist(), strict=True)
    ]
    xx, yy = torch.meshgrid(*sides, indexing="xy")
    return xx.numpy(), yy.numpy(), torch.stack([xx.flatten(), yy.flatten()], 1)


def two_axes(subject: Subject, rows: Any, features: Sequence[str | int] | None) -> tuple[Array, tuple[str, str]]:
    """Return the coordinates [n, 2] of rows of a table and the two axis labels: two features, or the first two principal components."""
    x = rows.x.double()
    if features is not None:
        if isinstance(features, str) or len(features) != 2:
            raise ValueError(f"features: expected two, by name or number, found {features!r}")
        plain = [name.split(" (")[0] for name in subject.features]
        chosen = []
        for feature in features:
            place = feature if isinstance(feature, int) else plain.index(feature) if feature in plain else -1
            if not 0 <= place < x.shape[1]:
                raise ValueError(f"features: there is no {feature!r}; there are {', '.join(plain)}")
            chosen.append(place)
        return x[:, chosen].numpy(), (subject.features[chosen[0]], subject.features[chosen[1]])
    seen = subject.seen.load().x.double()
    mean, spread = seen.mean(0), seen.std(0, correction=0)
    scale = torch.where(spread > 0, spread, 1.0)
    standardized = (seen - mean) / scale
    if len(seen) == 1:  # it has a single direction
        standardized = standardized.expand(2, -1)
    _, singular, directions = torch.linalg.svd(standardized, full_matrices=False)
    directions = directions[:2]
    largest = directions.abs().argmax(1)
    directions = directions * directions[torch.arange(2), largest].sign()[:, None]  # the sign of an SVD is arbitrary
    total = (singular**2).sum()
    shares = (singular**2 / torch.where(total > 0, total, 1.0))[:2].tolist()  # 0 of constant rows
    labels = [f"{kind} principal component ({100 * s:.0f} %)" for kind, s in zip(("1st", "2nd"), shares, strict=True)]
    return ((x - mean) / scale @ directions.T).numpy(), (labels[0], labels[1])
