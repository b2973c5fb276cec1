"""Which data a process has loaded, and the checksums by which the same data are known again."""

from __future__ import annotations

import hashlib
from functools import lru_cache

from workbench.data.registry import entries, resolve

AVAILABLE = "names(available=True)"  # what a notebook decides by, when it takes "what is there"

_used: set[str] = set()  # by name; read by `used` at the end of a run


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
        from workbench.data.loading import names

        return hashlib.sha256("\n".join(names(available=True)).encode()).hexdigest()
    from workbench.data.files import locate

    name = resolve(name)
    seen = []
    for file in entries()[name].get("files", ()):
        if (path := locate(file)) is None:
            return "none"
        state = path.stat()
        seen.append((str(path), state.st_mtime_ns, state.st_size))
    return _content(name, tuple(seen))


@lru_cache(maxsize=64)
def _content(name: str, files: tuple[tuple[str, int, int], ...]) -> str:
    """The checksum; files are read once while their times and sizes stay."""
    if files:
        from workbench.data.files import read

        try:
            read(name)  # holds contents against the sums of the registry
        except ValueError:
            return "none"
        return hashlib.sha256("".join(entries()[name]["files"].values()).encode()).hexdigest()
    from workbench.data.core import digest
    from workbench.data.loading import build

    found = build(name, 0)
    parts = {"train": found.train, "test": found.test}
    return digest({f"{part}.{axis}": getattr(rows, axis).numpy() for part, rows in parts.items() for axis in "xy"})


def note(name: str) -> None:
    """Remember that this process has asked for a data set."""
    _used.add(name)


def used() -> dict[str, str]:
    """Every data set that this process has loaded: name -> `checksum`.

    Example:
        >>> from workbench import data
        >>> d = data.load("diabetes")
        >>> used()["diabetes"] == checksum("diabetes")
        True
    """
    return {name: checksum(name) for name in sorted(_used)}
