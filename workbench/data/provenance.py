"""Checksums of data sets, by which the same data are known again, those that a process has loaded, and what is known of rows."""

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
from workbench.data.usage import AVAILABLE, asked_for


def checksum(name: str) -> str:
    """SHA-256 of the content of a data set, as it is on this machine now.

    Args:
        name: as `load` takes it. A toy stands for all its draws with the arguments it has by default.

    Returns:
        64 hexadecimal digits, or "none" if it is not on this machine, or damaged.

    Raises:
        ValueError: no such data set.

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
    """The checksum; files are read once while their times and sizes stay."""
    if files:
        try:
            read(name)  # holds contents against the sums of the registry
        except ValueError:
            return "none"
        return hashlib.sha256("".join(entries()[name]["files"].values()).encode()).hexdigest()
    data = build(name, 0)
    splits = {"train": data.train, "test": data.test}
    return digest({f"{split}.{axis}": getattr(rows, axis).numpy() for split, rows in splits.items() for axis in "xy"})


def facts(data: Any, train: Source, valid: Source | None) -> Facts:
    """What is known of the rows of a training, for the files and the card of the model.

    Args:
        data: what was given to train on; a Data says the most.
        train: the rows of it that are trained on.
        valid: the rows that it is validated on, if any.

    Returns:
        As `workbench.core.saving.training_data.facts_of`, with "validation rows".

    Example:
        >>> from workbench import data
        >>> d = data.load("diabetes")
        >>> facts(d, d.train, None)["name"]
        'diabetes, split 0'
    """
    known: Facts = facts_of(data)
    for what, rows in (("rows", train), ("validation rows", valid)):
        if isinstance(rows, DataLoader):
            known |= {what: number} if (number := facts_of(rows).get("rows")) is not None else {}
        elif rows is not None:
            known[what] = len(cast(Sized, rows))
    return known


def used() -> dict[str, str]:
    """Every data set that this process has loaded: name -> `checksum`.

    Example:
        >>> from workbench import data
        >>> d = data.load("diabetes")
        >>> used()["diabetes"] == checksum("diabetes")
        True
    """
    return {name: checksum(name) for name in asked_for()}
