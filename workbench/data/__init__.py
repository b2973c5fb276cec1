"""Data sets by name, with fixed splits, units, licences and citations; toys whose true risk is known.

Example:
    >>> from workbench import data
    >>> d = data.load("cubic", n_train=500)
    >>> d.train.x.shape, d.train.y.shape, d.train.sigma.shape
    (torch.Size([500, 1]), torch.Size([500, 1]), torch.Size([500, 1]))
"""

from __future__ import annotations

from workbench.data import toy
from workbench.data.columns import Card, Column
from workbench.data.data_set import Data
from workbench.data.files import fetch
from workbench.data.loading import load, names
from workbench.data.provenance import checksum
from workbench.data.registry import card
from workbench.data.series import Windows, windows
from workbench.data.splits import LazySplit, Split

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
