"""Data sets by name, with fixed splits, units, licences and citations, and toy data whose true risk is known.

Example:
    >>> from workbench import data
    >>> d = data.load("cubic", n_train=500)
    >>> d.train.x.shape, d.train.y.shape, d.train.sigma.shape
    (torch.Size([500, 1]), torch.Size([500, 1]), torch.Size([500, 1]))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import toy
    from .columns import Card, Column
    from .data_set import Data
    from .files import fetch
    from .loading import load, names
    from .provenance import checksum
    from .registry import card
    from .series import Windows, windows
    from .splits import LazySplit, Split

_MODULES = {
    "Card": "columns",
    "Column": "columns",
    "Data": "data_set",
    "LazySplit": "splits",
    "Split": "splits",
    "Windows": "series",
    "card": "registry",
    "checksum": "provenance",
    "fetch": "files",
    "load": "loading",
    "names": "loading",
    "windows": "series",
}
__all__ = [
    "Card",
    "Column",
    "Data",
    "LazySplit",
    "Split",
    "Windows",
    "card",
    "checksum",
    "fetch",
    "load",
    "names",
    "toy",
    "windows",
]


def __getattr__(name: str) -> Any:
    """Import a name on first use: report indexes only need the registry, which does not import torch."""
    if name == "toy":
        return importlib.import_module(f"{__name__}.toy")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
