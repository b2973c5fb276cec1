"""What can be compared in an index: numbers of one data set, split for split, and widths of intervals that cover."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..experiments.directions import metric_of

_DATA = ("data", "dataset", "data_set", "datasets")
_SPLITS = ("split", "splits", "fold", "repeat", "test_split")
_ROWS = ("train", "training", "valid", "val", "validation", "test")
_WIDTHS = ("mpiw", "sharpness")
_COVERAGES = ("picp", "coverage")
_USUAL = "90"  # percent, where the name of a metric says no level


def data_parameters(parameters: Sequence[Mapping[str, Any]]) -> list[str]:
    """The parameters that say which data a run is of: by their name, or because their value is the name of a data set.

    Example:
        >>> data_parameters([{"data": "mine", "first": "concrete", "lr": 0.1}])
        ['data', 'first']
    """
    from ..data import names

    known = set(names())
    every = {name: value for mapping in parameters for name, value in mapping.items()}
    named = {name for mapping in parameters for name, v in mapping.items() if isinstance(v, str) and v in known}
    return [name for name in every if name in _DATA or name in named]


def data_key(run: Any, data: Collection[str]) -> str:
    """The same for runs on the same data.

    Args:
        run: its parameters and the checksums of its data.
        data: names of the parameters that say which data; see `data_parameters`.
    """
    chosen = {name: run.parameters.get(name) for name in data}
    return repr((chosen, sorted((name, digest) for name, digest in run.data.items() if "(" not in name)))


def split_key(parameters: Mapping[str, Any]) -> str:
    """The same for runs on the same split."""
    return repr({name: parameters[name] for name in _SPLITS if name in parameters})


def rows_of(of: str) -> tuple[str, ...]:
    """The data sets, or the kind of rows, that the name of what a metric is of speaks about.

    Example:
        >>> rows_of("concrete_vote"), rows_of("vote"), rows_of("train")
        (('concrete',), (), ('train',))
    """
    from ..data import names

    words = (*(name.replace("-", "_") for name in names()), *_ROWS)
    return tuple(word for word in words if re.search(rf"(^|_){re.escape(word)}(_|$)", of.replace("-", "_")))


def may_be_best(name: str, numbers: Mapping[str, float | None]) -> bool:
    """Whether a number may be the best of all: the width of intervals only where these cover, to the percent.

    Args:
        name: of the metric.
        numbers: all that was recorded beside it, by name; its coverage is looked for there.

    Example:
        >>> [may_be_best("mpiw90", {"picp90": covered}) for covered in (0.5, 0.91)], may_be_best("rmse", {})
        ([False, True], True)
    """
    metric = (metric_of(name) or ("", ""))[1]
    width = re.fullmatch(rf"(?:ood_)?({'|'.join(_WIDTHS)})([0-9]*)", metric)
    if width is None:
        return True
    level = width[2] or _USUAL
    suffixes = (level, "") if level == _USUAL else (level,)
    for coverage in (f"{word}{suffix}" for word in _COVERAGES for suffix in suffixes):
        observed = numbers.get(name.replace(f"{width[1]}{width[2]}", coverage))
        if observed is not None:
            return round(observed, 2) >= int(level) / 100
    return False
