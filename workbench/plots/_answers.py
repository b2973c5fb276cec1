"""Rows of any data and what several models say about them, in the forms that `matrix` draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.calibration.answers import log_probabilities
from workbench.calibration.base import collect, output_of
from workbench.core.batches.arrays import check_index
from workbench.data import Data, LazySplit, Split, load
from workbench.data.targets import as_tensor
from workbench.data.texts import Vocabulary
from workbench.plots._common import Array

CAUSES = ("aleatoric", "epistemic", "vacuitic")
ASKED = 2000  # rows at most
NODES = 70  # along each side of a plane


@dataclass(frozen=True, eq=False)
class Subject:
    """Rows to ask about, with the names of what is in them.

    Args:
        rows: the test rows of a Data, or what was given.
        seen: the training rows of a Data, or the same rows.
        features: names of the columns of x with units; () where x has other dimensions.
        target: name of y.
        unit: of y; "" where it has none.
        classes: their names; None of values, or where nobody has named them.
        shares: whether y are shares of people, or other probabilities, of the classes.
        unsaid: what models give that were wrapped without `output`.
        words: of tokens by their numbers, as far as the data know them.
    """

    rows: Any
    seen: Any
    features: tuple[str, ...]
    target: str
    unit: str
    classes: tuple[str, ...] | None
    shares: bool
    unsaid: str = "values"
    words: Mapping[int, str] = field(default_factory=dict)


def subject_of(data: Any) -> Subject:
    """Rows of a Data, its name, a split, or a pair (x, y)."""
    data = load(data) if isinstance(data, str) else data
    if isinstance(data, Data):
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
    if isinstance(data, tuple | list) and len(data) == 2:
        for part in data[0].values() if isinstance(data[0], Mapping) else [data[0]]:
            check_index(part, data[1], "data")
        x, y = data[0], as_tensor(data[1], "y")
        y = y.float() if y.is_floating_point() else y.long()
        inputs = {name: as_tensor(v, f"x[{name!r}]") for name, v in x.items()} if isinstance(x, Mapping) else None
        one = as_tensor(x, "x") if inputs is None else None
        one = one.float() if one is not None and one.dtype == torch.float64 else one
        data = Split(one if inputs is None else inputs, y[:, None] if y.ndim == 1 and y.is_floating_point() else y)
    if not isinstance(data, Split | LazySplit):
        raise TypeError(
            f"data: expected a Data, the name of one, a split or a pair (x, y), found {type(data).__name__}"
        )
    if not len(data):
        raise ValueError("data: there is no row")
    x = data.take([0]).load().x
    columns = tuple(f"x{i + 1}" for i in range(x.shape[1])) if isinstance(x, Tensor) and x.ndim == 2 else ()
    return Subject(data, data, columns if len(columns) > 1 else ("x",) * len(columns), "y", "", None, False)


def spread_out(n: int, count: int) -> Tensor:
    """At most `count` of n row numbers, evenly spread."""
    return torch.linspace(0, n - 1, min(n, count)).round().long()


@dataclass(frozen=True, eq=False)
class Answer:
    """What one model says: values or the class of each row or position [n, ...], probabilities of the classes, and risks by cause."""

    value: Array
    probs: Array | None
    risk: dict[str, Array]

    def at(self, index: Any) -> Answer:
        """That of some rows, or of one position of each."""
        risk = {name: r[index] if r.ndim >= np.ndim(self.value) else r for name, r in self.risk.items()}
        return Answer(self.value[index], None if self.probs is None else self.probs[index], risk)


def answers_of(models: Mapping[str, Any], x: Any, subject: Subject) -> dict[str, Answer]:
    """What each model says about rows.

    Raises:
        ValueError: one gives values, another classes; or their shapes differ.
    """
    names, answers = subject.classes, dict[str, Answer]()
    forms: dict[str, str] = {}
    for name, model in models.items():
        output = output_of(model, subject.unsaid)
        said = collect(model, x, targets=False, batch_size=256)
        risk = {cause: _flat(said.risk[cause]) for cause in (*CAUSES, "total") if cause in said.risk.names()}
        if output == "values":
            answers[name] = Answer(_flat(said.y), None, risk)
            forms[name] = f"values {list(answers[name].value.shape[1:])}"
        else:
            probs = log_probabilities(said.y, output).exp().double().cpu().numpy()
            answers[name] = Answer(probs.argmax(-1), probs, risk)
            forms[name] = f"scores of classes {list(probs.shape[1:])}"
    first = next(iter(forms))
    for name, form in forms.items():
        if form != forms[first]:
            raise ValueError(
                f"models: {first!r} gives {forms[first]} for each row and {name!r} {form}; models of one matrix give the same. Of those that "
                'were wrapped without a word on it, say output="logits" or output="probs"'
            )
    scores = answers[first].probs
    if names is not None and (scores is None or scores.shape[-1] != len(names)):
        hint = '; of scores say so, output="logits"' if scores is None else ""
        raise ValueError(
            f"models: {first!r} gives {forms[first]} for each row, and the data have {len(names)} classes{hint}"
        )
    return answers


def _flat(tensor: Tensor) -> Array:
    """Numbers [n] of [n, 1], and maps [n, height, width] of [n, 1, height, width]."""
    values = tensor.detach().double().cpu().numpy()
    return values[:, 0] if values.ndim in (2, 4) and values.shape[1] == 1 else values


def true_values(subject: Subject, rows: Any, like: Answer) -> Array:
    """Targets, shaped like the value of an answer; NaN where a position has no class.

    Raises:
        ValueError: they have another shape, or are values where the model gives classes.
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
    """The true aleatoric risk of rows [n], NaN where it is not known, and what it is; None where nothing is known.

    It is the sigma of the toys (of two classes the entropy of a label that is wrong with probability p, sigma**2 = p (1 - p)), the entropy of
    the shares of people, or the standard deviation of the targets that one input has in several rows.
    """
    if subject.shares:
        return torch.special.entr(rows.y.double()).sum(-1).numpy(), "entropy of the shares of people"
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
    """A grid over the two inputs, with a margin of 15 %, and its nodes as rows [nodes, 2]."""
    x = torch.cat([split.load().x.float() for split in (subject.seen, subject.rows)])
    low, high = x.amin(0), x.amax(0)
    margin = torch.where(high > low, 0.15 * (high - low), 1.0)
    sides = [
        torch.linspace(a, b, NODES) for a, b in zip((low - margin).tolist(), (high + margin).tolist(), strict=True)
    ]
    xx, yy = torch.meshgrid(*sides, indexing="xy")
    return xx.numpy(), yy.numpy(), torch.stack([xx.flatten(), yy.flatten()], 1)


def two_axes(subject: Subject, rows: Any, features: Sequence[str | int] | None) -> tuple[Array, tuple[str, str]]:
    """Where rows of a table lie in a plane [n, 2], and what its axes are: two features, or the first two principal components."""
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
    _, singular, directions = torch.linalg.svd((seen - mean) / scale, full_matrices=False)
    directions = directions[:2]
    largest = directions.abs().argmax(1)
    directions = directions * directions[torch.arange(2), largest].sign()[:, None]  # so that it is the same everywhere
    shares = (singular**2 / (singular**2).sum())[:2].tolist()
    labels = [f"{kind} principal component ({100 * s:.0f} %)" for kind, s in zip(("1st", "2nd"), shares, strict=True)]
    return ((x - mean) / scale @ directions.T).numpy(), (labels[0], labels[1])
