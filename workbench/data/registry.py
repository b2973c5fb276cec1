"""Reads registry.json: for every data set its kind, files, checksums, columns and card."""

from __future__ import annotations

import difflib
import json
from functools import cache
from importlib import resources
from typing import Any

from workbench.data.core import Card


@cache
def entries() -> dict[str, dict[str, Any]]:
    """The whole registry, by name."""
    return json.loads(resources.files("workbench.data").joinpath("registry.json").read_text(encoding="utf-8"))


def resolve(name: str) -> str:
    """The registered name for what the user wrote ("Sine_Gap" is "sine-gap"); a typo gets a suggestion.

    Raises:
        TypeError: name is not a string.
        ValueError: no data set has this name.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of a data set must be a string; found {type(name).__name__}")
    known = name.strip().lower().replace("_", "-")
    if known not in entries():
        near = difflib.get_close_matches(known, entries(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"there is no data set {name!r}{hint} Known names: {', '.join(entries())}")
    return known


def card(name: str) -> Card:
    """Description, source, licence, citation and notes of a data set, without loading it.

    Example:
        >>> from workbench import data
        >>> data.card("fashion-mnist").licence
        'MIT, copyright 2017 Zalando SE'
    """
    fields = entries()[resolve(name)]["card"]
    return Card(**{**fields, "notes": tuple(fields.get("notes", ()))})
