"""Parameters of tests of which the default suite takes a part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(every: int, values: Iterable[Any]) -> list[Any]:
    """Return the values as parameters: one in `every` is tested by default, the others are slow."""
    return [pytest.param(value, marks=[pytest.mark.slow] * (i % every > 0)) for i, value in enumerate(values)]
