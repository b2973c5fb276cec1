"""Registry of the metrics: which way each is better, and between which values it lies.

To add a metric is to write its function in a module of this package and to say both there:

    @metric("min", 0, 1)
    def miss_rate(prediction: Any, target: Any) -> Tensor: ...

`workbench.metrics` then has it, and tables, comparisons and reports know which value is the best. A class for batches, in `metrics.modules`,
takes direction and range from the function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
Direction = Literal["min", "max"]


@dataclass(frozen=True)
class MetricInfo:
    """What is known of a metric.

    Args:
        function: computes it.
        direction: "min" if less is better, "max" if more is, None if neither.
        low, high: the least and the largest value that it can have.
    """

    function: Callable[..., Any]
    direction: Direction | None
    low: float
    high: float

    @property
    def higher_is_better(self) -> bool | None:
        """The direction as torchmetrics says it."""
        return None if self.direction is None else self.direction == "max"


METRICS: dict[str, MetricInfo] = {}


def metric(direction: Direction | None, low: float = 0, high: float = math.inf) -> Callable[[Function], Function]:
    """Register a function as a metric under its name.

    Args:
        direction: "min" if less is better, "max" if more is, None if neither.
        low, high: the least and the largest value that it can have.

    Example:
        >>> METRICS["brier"].direction, METRICS["brier"].high
        ('min', 2)
    """
    if direction not in ("min", "max", None):
        raise ValueError(f"direction must be 'min', 'max' or None; found {direction!r}")
    if not low < high:
        raise ValueError(f"low must be below high; found {low!r} and {high!r}")

    def register(function: Function) -> Function:
        METRICS[function.__name__] = MetricInfo(function, direction, low, high)
        return function

    return register
