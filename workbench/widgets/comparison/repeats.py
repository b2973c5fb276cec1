"""Repeated trainings on several splits and seeds: their data, their spread, and differences beyond noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from workbench.data import Data, Split
from workbench.experiments.paired import Comparison, differences, standard_error

from ..common.positions import comparable_data
from .scores import column
from .settings import PLAIN
from .trials import VALIDATION, Trained

Place = tuple[int, int]  # the split and seed of a training
CHECKED_ROWS = 1000  # test rows that are searched among the training rows of another split


class Splits:
    """The data of a comparison, split by split.

    Args:
        source: data as given by the user: a name, a pair of inputs and targets, or a Data, which has only one split.
        base: the split that pictures show.
    """

    def __init__(self, source: Any, base: Data) -> None:
        self._source, self._by_split = source, {base.split: base}
        self.base = base

    @property
    def several(self) -> bool:
        """Whether the data can have other splits."""
        return not isinstance(self._source, Data)

    def __getitem__(self, split: int) -> Data:
        return self._by_split[split]

    def get(self, split: int) -> Data | None:
        """Return the data of a split; None if `prepare` has not made it."""
        return self._by_split.get(split)

    def prepare(self, count: int) -> None:
        """Make `count` splits, starting with the base.

        Raises:
            ValueError: if there are no such splits, two are the same, or the rows were changed since the comparison was made.
        """
        wanted = [self.base.split + i for i in range(count)]
        missing = [split for split in wanted if split not in self._by_split]
        if not missing:
            return
        if not self.several:
            raise ValueError(
                f"splits={count}: the data were given as one split of {self.base.name}; give its name, or the pair (x, y), or seeds={count}"
            )
        if not _same(comparable_data(self._source, self.base.split), self.base):
            raise ValueError(
                f"splits={count}: the rows of {self.base.name} were changed since this comparison was made; make a new Comparison of them"
            )
        for split in missing:
            data = comparable_data(self._source, split)
            if _same(data, self.base):
                raise ValueError(f"splits={count}: split {split} of {data.name} is split {self.base.split}; give seeds")
            self._by_split[split] = data

    def test_share(self) -> float:
        """Return the number of test rows per training row if splits share rows; 0 if each split has new rows."""
        others = [data for split, data in self._by_split.items() if split != self.base.split]
        if not others:
            return 0.0
        known = set(_rows(self.base.train))
        if known.isdisjoint(row for data in others for row in _rows(data.test, CHECKED_ROWS)):
            return 0.0
        return len(self.base.test) / (len(self.base.train) * (1 - VALIDATION))


def _same(one: Data, other: Data) -> bool:
    pairs = ((one.train.x, other.train.x), (one.train.y, other.train.y), (one.test.x, other.test.x))
    return all(torch.equal(a, b) for a, b in (*pairs, (one.test.y, other.test.y)))


def _rows(split: Split, most: int | None = None) -> list[bytes]:
    x, y = (t[:most].reshape(len(t[:most]), -1).cpu().numpy() for t in (split.x, split.y))
    return [a.tobytes() + b.tobytes() for a, b in zip(x, y, strict=True)]


def over(places: Sequence[Place]) -> str:
    """Return what these places repeat: "splits", "seeds" of one split, or "" for a single place."""
    return "" if len(places) < 2 else "splits" if len({split for split, _ in places}) > 1 else "seeds"


def in_words(places: Sequence[Place]) -> str:
    """Describe the number of splits and seeds of these places.

    Example:
        >>> in_words([(0, 0), (0, 1)]), in_words([(0, 0), (1, 0)]), in_words([(0, 0), (0, 1), (1, 0), (1, 1)])
        ('2 seeds of one split', '2 splits', '2 splits, 2 seeds each')
    """
    splits, seeds = len({split for split, _ in places}), len({seed for _, seed in places})
    if splits == 1:
        return f"{seeds} seeds of one split"
    return f"{splits} splits" + (f", {seeds} seeds each" if seeds > 1 else "")


def number_of(places: Sequence[Place]) -> str:
    """Describe the number of trainings per model on these places.

    Example:
        >>> number_of([(0, 0), (0, 1)]), number_of([(0, 0), (0, 1), (1, 0), (1, 1)])
        ('2 seeds', '4 splits and seeds')
    """
    several = [name for i, name in enumerate(("splits", "seeds")) if len({place[i] for place in places}) > 1]
    return f"{len(places)} {' and '.join(several) or 'training'}"


def values(runs: Mapping[Place, Trained], metric: str) -> list[float]:
    """Return a score for each split, as mean over its seeds, or for each seed of a single split; NaN where a run has none."""
    scores = {place: run.scores.get(metric, math.nan) for place, run in sorted(runs.items())}
    if over(list(scores)) != "splits":
        return list(scores.values())
    splits = dict.fromkeys(split for split, _ in scores)
    return [statistics.fmean(value for place, value in scores.items() if place[0] == split) for split in splits]


def spread(runs: Mapping[Place, Trained], metric: str) -> float:
    """Return the standard error of the mean of a score; NaN for a single run, and if a run has none."""
    return standard_error(values(runs, metric))


def paired(
    runs: Mapping[str, Mapping[Place, Trained]], places: Sequence[Place], test_share: float
) -> Comparison | None:
    """Return the paired comparison of models with the plain one, each trained at all places; None if nothing can be tested.

    Args:
        runs: runs by model and place.
        places: places at which all models were trained.
        test_share: see `experiments.paired.Comparison`.
    """
    kind = over(places)
    scores = {name: {m for run in at.values() for m in run.scores} for name, at in runs.items()}
    names = dict.fromkeys(metric for row in scores.values() for metric in sorted(row))
    higher = {name: column(name).best == "max" for name in names if column(name).best in ("max", "min")}
    headline = next((name for name in ("rmse", "accuracy", "mean_iou", *higher) if name in higher), "")
    if not kind or PLAIN not in runs or len(runs) < 2 or not headline:
        return None
    return Comparison(
        {name: {metric: values(at, metric) for metric in names} for name, at in runs.items()},
        sorted({split for split, _ in places} if kind == "splits" else {seed for _, seed in places}),
        higher,
        PLAIN,
        headline,
        labels={name: column(name).title.format(unit="") for name in names},
        test_share=test_share if kind == "splits" else 0.0,
        over=kind,
    )


def beyond_noise(comparison: Comparison) -> dict[str, list[str]]:
    """Return by metric the models that are better than the plain one beyond noise."""
    marked: dict[str, list[str]] = {}
    for (model, metric), difference in differences(comparison).items():
        if difference.better:
            marked.setdefault(metric, []).append(model)
    return marked
