"""Base classes of the metrics: sums over batches for additive metrics, all rows for others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from workbench.metrics.registry import METRICS


class AccumulatedMetric(Metric):
    """Base of all classes: states in float64, a plot, and the direction and range of the registered function given as `of=`."""

    function: ClassVar[Callable[..., Tensor]]
    is_differentiable = False
    full_state_update = False

    def __init_subclass__(cls, of: Callable[..., Tensor] | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if of is not None:
            info = METRICS[of.__name__]
            cls.function = staticmethod(of)
            cls.higher_is_better = info.higher_is_better
            cls.plot_lower_bound, cls.plot_upper_bound = (
                float(bound) if math.isfinite(bound) else None for bound in (info.low, info.high)
            )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all states, also in a process that has seen no rows, so that they can be gathered."""
        return torch.float64

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """Plot the value (or the given values, one per step) on matplotlib axes; return figure and axes."""
        return self._plot(val, ax)

    def _add_to_states(self, *values: Tensor) -> None:
        """Add values to the states of the class, in the order of their declaration."""
        for state, value in zip(self._defaults, values, strict=True):
            setattr(self, state, getattr(self, state) + value.detach().to(getattr(self, state).device))

    def _declare_sums(self, *names: str, shape: tuple[int, ...] = ()) -> None:
        for name in names:
            self.add_state(name, torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")

    def _check_not_empty(self, count: Tensor) -> None:
        if not count.any():
            raise ValueError(f"{type(self).__name__} has seen no rows yet; call update before compute")


class MeanMetric(AccumulatedMetric):
    """Mean of a term over all elements of all batches."""

    total: Tensor
    count: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._declare_sums("total", "count")

    def _add(self, terms: Tensor) -> None:
        self._add_to_states(terms.sum(), torch.tensor(float(terms.numel())))

    def compute(self) -> Tensor:
        """Return the mean over everything seen since the last reset."""
        self._check_not_empty(self.count)
        return self.total / self.count


class RowsMetric(AccumulatedMetric):
    """A metric that needs all rows at once, two numbers per row."""

    states: ClassVar[tuple[str, str]] = ("risk", "error")

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for state in self.states:
            self.add_state(state, default=[], dist_reduce_fx="cat")

    def _keep(self, *columns: Tensor) -> None:
        for state, column in zip(self.states, columns, strict=True):
            getattr(self, state).append(column.detach().flatten().to(self.device))

    def _columns(self) -> list[Tensor]:
        lists = [getattr(self, state) for state in self.states]
        columns = [
            dim_zero_cat(rows) if len(rows) else torch.zeros(0, dtype=self.dtype, device=self.device) for rows in lists
        ]
        self._check_not_empty(torch.tensor([len(column) for column in columns]))
        return columns

    def compute(self) -> Tensor:
        """Return the metric of all rows seen since the last reset."""
        return type(self).function(*self._columns())
