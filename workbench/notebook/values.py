"""Conversion of recorded values to exact JSON and to readable text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

FLOAT = "__float__"  # JSON has neither NaN nor infinity; they are stored as {"__float__": "nan"}

#: HTML classes that stop JupyterLab from typesetting the text between two dollar signs as a formula.
UNTYPESET = "tex2jax_ignore mathjax_ignore"


def to_json(value: Any, where: str) -> Any:
    """Convert a value to JSON types, with NaN and infinities encoded as dicts.

    Args:
        value: numbers, text, None, lists and dicts of these, and numpy or torch scalars and arrays.
        where: name of the value for error messages.

    Raises:
        TypeError: the value is of another type.
        ValueError: a text has lone surrogates.
    """
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str) or key == FLOAT]:
            raise TypeError(f"record() takes dicts with string keys, but {where} has the key {wrong[0]!r}")
        return {encodable(str(key), where): to_json(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        return {FLOAT: repr(float(value))}
    if isinstance(value, str):
        return encodable(value, where)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    kind = type(value).__name__
    raise TypeError(f"record() takes numbers, text, lists and dicts, but {where} is of type {kind}: convert it first")


def encodable(text: str, where: str) -> str:
    """Return a text, or raise a ValueError that names it if UTF-8, in which notebooks are written, can't encode it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        around = text[max(error.start - 100, 0) : error.start + 100]
        raise ValueError(
            f"{where}: {around!r} has lone surrogates, as names of files that are not UTF-8 do, which no notebook can hold: "
            'give text.encode("utf-8", "backslashreplace").decode()'
        ) from error
    return text


def check_encodable(value: Any, where: str) -> None:
    """Raise a ValueError if a text in lists and dicts, keys included, has lone surrogates."""
    if isinstance(value, str):
        encodable(value, where)
    elif isinstance(value, Mapping):
        check_encodable([*value, *value.values()], where)
    elif isinstance(value, list | tuple):
        for item in value:
            check_encodable(item, where)


def from_json(value: Any) -> Any:
    """Restore the value that `to_json` converted, with arrays as lists.

    Example:
        >>> from_json(to_json({"a": [1, float("inf")]}, "a"))
        {'a': [1, inf]}
    """
    if isinstance(value, dict):
        if set(value) == {FLOAT}:
            return float(value[FLOAT])
        return {name: from_json(item) for name, item in value.items()}
    return [from_json(item) for item in value] if isinstance(value, list) else value


def as_text(value: Any) -> str:
    """Format a value for display: four significant digits, no exponent for common magnitudes, long texts shortened."""
    value = from_json(value)
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e7 else f"{value:.4g}"
    text = ", ".join(map(as_text, value)) if isinstance(value, list) and value else str(value)
    return text if len(text) <= 200 else f"{text[:199]}…"
