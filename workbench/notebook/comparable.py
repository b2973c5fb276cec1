"""Keys by which an index decides what can be compared: numbers of the same data set and split."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

_DATA = ("data", "dataset", "data_set", "datasets")
_SPLITS = ("split", "splits", "fold", "repeat", "test_split")
_ROWS = ("train", "training", "valid", "val", "validation", "test", "all", "answered", "refused", "clean", "half")


def data_parameters(parameters: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the parameters that select data, recognized by their name or by a data set's name as value.

    Example:
        >>> data_parameters([{"data": "mine", "first": "concrete", "lr": 0.1}])
        ['data', 'first']
    """
    from ..data.registry import entries

    all_values = {name: value for mapping in parameters for name, value in mapping.items()}
    data_names = {
        name for mapping in parameters for name, v in mapping.items() if isinstance(v, str) and v in entries()
    }
    return [name for name in all_values if name in _DATA or name in data_names]


def data_key(run: Any, data: Collection[str]) -> str:
    """Return a key that is equal for runs on the same data.

    Args:
        run: run, of which the parameters and the checksums of its data are used.
        data: names of the parameters that select data; see `data_parameters`.
    """
    selected = {name: run.parameters.get(name) for name in data}
    return repr((selected, sorted((name, digest) for name, digest in run.data.items() if "(" not in name)))


def split_key(parameters: Mapping[str, Any]) -> str:
    """Return a key that is equal for runs on the same split."""
    return repr({name: parameters[name] for name in _SPLITS if name in parameters})


def rows_of(of: str) -> tuple[str, ...]:
    """Return the data sets or kinds of rows that the subject of a metric names.

    Example:
        >>> rows_of("concrete_vote"), rows_of("vote"), rows_of("train"), rows_of("of_all")
        (('concrete',), (), ('train',), ('all',))
    """
    from ..data.registry import entries

    words = (*(name.replace("-", "_") for name in entries()), *_ROWS)
    return tuple(word for word in words if re.search(rf"(^|_){re.escape(word)}(_|$)", of.replace("-", "_")))
