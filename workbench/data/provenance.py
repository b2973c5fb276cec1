"""Checksums of data sets, by which the same data are known again, and those that a process has loaded."""

from __future__ import annotations

import hashlib
from functools import lru_cache

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


def used() -> dict[str, str]:
    """Every data set that this process has loaded: name -> `checksum`.

    Example:
        >>> from workbench import data
        >>> d = data.load("diabetes")
        >>> used()["diabetes"] == checksum("diabetes")
        True
    """
    return {name: checksum(name) for name in asked_for()}
