"""A metric is one function, from which direction, range, classes, tables and reports follow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench import metrics
from workbench.experiments.directions import higher_is_better, metric_of
from workbench.metrics.modules.base import RowsMetric
from workbench.metrics.registry import MetricInfo


@pytest.fixture
def miss_rate() -> Iterator[Any]:
    @metrics.metric("min", 0, 1)
    def miss_rate(prediction: Any, target: Any) -> Tensor:
        return (prediction != target).double().mean()

    yield miss_rate
    del metrics.METRICS["miss_rate"]


def test_a_new_metric_is_known_to_reports(miss_rate: Any) -> None:
    assert metrics.METRICS["miss_rate"] == MetricInfo(miss_rate, "min", 0, 1)
    assert metric_of("vote_sculpt_miss_rate") == ("vote_sculpt", "miss_rate")
    assert higher_is_better("baseline_miss_rate") is False


def test_a_class_takes_direction_and_range_of_its_function(miss_rate: Any) -> None:
    class MissRate(RowsMetric, of=miss_rate):
        states = ("prediction", "target")

        def update(self, prediction: Tensor, target: Tensor) -> None:
            self._keep(prediction, target)

    metric = MissRate()
    metric.update(torch.tensor([1, 2]), torch.tensor([1, 3]))
    metric.update(torch.tensor([5, 6]), torch.tensor([5, 6]))
    assert metric.compute() == 0.25
    assert (metric.higher_is_better, metric.plot_lower_bound, metric.plot_upper_bound) == (False, 0.0, 1.0)


@pytest.mark.parametrize(
    ("name", "direction", "low", "high"),
    [
        ("accuracy", "max", 0, 1),
        ("mean_iou", "max", 0, 1),
        ("mean_average_precision", "max", 0, 1),
        ("aurg", "max", -math.inf, 1),
        ("path_coverage", None, 0, 1),
        ("auroc", "max", 0, 1),
        ("brier", "min", 0, 2),
        ("mase", "min", 0, math.inf),
        ("pinball", "min", 0, math.inf),
        ("nll", "min", -math.inf, math.inf),
        ("mixture_nll", "min", -math.inf, math.inf),
        ("picp", None, 0, 1),
        ("risk_error_correlation", "max", -1, 1),
        ("rmse", "min", 0, math.inf),
    ],
)
def test_directions_and_ranges(name: str, direction: str | None, low: float, high: float) -> None:
    info = metrics.METRICS[name]
    assert (info.direction, info.low, info.high) == (direction, low, high)
    assert info.function is getattr(metrics, name)


def test_every_function_that_gives_one_number_is_registered() -> None:
    assert len(metrics.METRICS) == 38
    assert set(metrics.METRICS) < set(metrics.__all__)


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="'min', 'max' or None; found 'low'"):
        metrics.metric("low")
    with pytest.raises(ValueError, match="low must be below high; found 1 and 0"):
        metrics.metric("min", 1, 0)
