"""Registry of the metrics with their direction and range.

To add a metric, write its function in a module of this package and decorate it:

    @metric("min", 0, 1)
    def miss_rate(prediction: Any, target: Any) -> Tensor: ...

It is then available from `workbench.metrics`, and tables, comparisons and reports know which value is the best. A class that accumulates
over batches, in `metrics.modules`, takes direction and range from the function.
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
    """Function, direction and range of a metric.

    Args:
        function: the function that computes it.
        direction: "min" if lower is better, "max" if higher is better, None if neither.
        low, high: smallest and largest possible value.
    """

    function: Callable[..., Any]
    direction: Direction | None
    low: float
    high: float

    @property
    def higher_is_better(self) -> bool | None:
        """The direction in the form of torchmetrics."""
        return None if self.direction is None else self.direction == "max"


METRICS: dict[str, MetricInfo] = {}


def metric(direction: Direction | None, low: float = 0, high: float = math.inf) -> Callable[[Function], Function]:
    """Register a function as a metric under its name.

    Args:
        direction: "min" if lower is better, "max" if higher is better, None if neither.
        low, high: smallest and largest possible value.

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
