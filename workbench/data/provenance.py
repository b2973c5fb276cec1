"""Checksums of data sets, the data sets that a process has loaded, and facts about training rows for model files."""

from __future__ import annotations

import hashlib
from collections.abc import Sized
from functools import lru_cache
from typing import Any, cast

from torch.utils.data import DataLoader

from workbench.core.batches.rows import Source
from workbench.core.saving.training_data import Facts, facts_of
from workbench.data.digests import digest
from workbench.data.files import locate, read
from workbench.data.loading import build, names
from workbench.data.registry import entries, resolve
from workbench.data.usage import AVAILABLE, used_names


def checksum(name: str) -> str:
    """Return the SHA-256 of the content of a data set as it is on this machine.

    Args:
        name: name of the data set, as for `load`. For a toy, the checksum is that of its default arguments.

    Returns:
        64 hexadecimal digits, or "none" if the data set is not on this machine or is damaged.

    Raises:
        ValueError: there is no such data set.

    Example:
        >>> checksum("diabetes") == checksum("Diabetes"), len(checksum("diabetes"))
        (True, 64)
    """
    if name == AVAILABLE:
        return hashlib.sha256("\n".join(names(available=True)).encode()).hexdigest()
    name = resolve(name)
    states = []
    for file in entries()[name].get("files", ()):
        if (path := locate(file)) is None:
            return "none"
        state = path.stat()
        states.append((str(path), state.st_mtime_ns, state.st_size))
    return _content(name, tuple(states))


@lru_cache(maxsize=64)
def _content(name: str, files: tuple[tuple[str, int, int], ...]) -> str:
    """Return the checksum. Files are read again only if their modification times or sizes change."""
    if files:
        try:
            read(name)  # verifies the contents
        except ValueError:
            return "none"
        return hashlib.sha256("".join(entries()[name]["files"].values()).encode()).hexdigest()
    data = build(name, 0)
    splits = {"train": data.train, "test": data.test}
    return digest({f"{split}.{axis}": getattr(rows, axis).numpy() for split, rows in splits.items() for axis in "xy"})


def facts(data: Any, train: Source, valid: Source | None) -> Facts:
    """Return facts about the training data for the files and the card of a model.

    Args:
        data: data as passed by the user; a Data has the most facts.
        train: training rows.
        valid: validation rows, or None.

    Returns:
        Facts as from `workbench.core.saving.training_data.facts_of`, with "validation rows".

    Example:
        >>> from workbench import data
        >>> d = data.load("diabetes")
        >>> facts(d, d.train, None)["name"]
        'diabetes, split 0'
    """
    result: Facts = facts_of(data)
    for key, rows in (("rows", train), ("validation rows", valid)):
        if isinstance(rows, DataLoader):
            result |= {key: number} if (number := facts_of(rows).get("rows")) is not None else {}
        elif rows is not None:
            result[key] = len(cast(Sized, rows))
    return result


def used() -> dict[str, str]:
    """Return the data sets that this process has loaded: name -> `checksum`.

    Example:
        >>> from workbench import data
        >>> d = data.load("diabetes")
        >>> used()["diabetes"] == checksum("diabetes")
        True
    """
    return {name: checksum(name) for name in used_names()}
