"""What can be compared in an index: numbers of one data set, split for split."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

_DATA = ("data", "dataset", "data_set", "datasets")
_SPLITS = ("split", "splits", "fold", "repeat", "test_split")
_ROWS = ("train", "training", "valid", "val", "validation", "test")


def data_parameters(parameters: Sequence[Mapping[str, Any]]) -> list[str]:
    """The parameters that say which data a run is of: by their name, or because their value is the name of a data set.

    Example:
        >>> data_parameters([{"data": "mine", "first": "concrete", "lr": 0.1}])
        ['data', 'first']
    """
    from ..data.registry import entries

    every = {name: value for mapping in parameters for name, value in mapping.items()}
    named = {name for mapping in parameters for name, v in mapping.items() if isinstance(v, str) and v in entries()}
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
    from ..data.registry import entries

    words = (*(name.replace("-", "_") for name in entries()), *_ROWS)
    return tuple(word for word in words if re.search(rf"(^|_){re.escape(word)}(_|$)", of.replace("-", "_")))
