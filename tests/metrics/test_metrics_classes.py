"""Metric classes: batches, merged processes, reset, plots and errors give what the functions give."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pytest
import torch
import torchmetrics
from torch import Tensor

from workbench import metrics
from workbench.distributions import Laplace, StudentT

GENERATOR = torch.Generator().manual_seed(0)
PREDICTION, TARGET = torch.randn(2, 40, 2, generator=GENERATOR)
RISK = torch.rand(40, 2, generator=GENERATOR) + 0.5
PROBS = torch.randn(40, 3, generator=GENERATOR).softmax(-1)
LABELS = torch.randint(0, 3, (40,), generator=GENERATOR)
VOTERS = torch.randn(40, 4, generator=GENERATOR)
VALUES = (PREDICTION, RISK, TARGET)


def voters_first(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda samples, *rest: function(samples.T, *(r.T if r.ndim == 2 else r for r in rest))


class VotersFirst:
    """Feeds a metric of [voters, rows] input from batches of [rows, voters]."""

    def __init__(self, metric: Any) -> None:
        self.metric = metric

    def update(self, samples: Tensor, *rest: Tensor) -> None:
        self.metric.update(samples.T, *(r.T if r.ndim == 2 else r for r in rest))


# a new metric, the function it must agree with, arguments with rows first
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "RMSE": (metrics.RMSE, metrics.rmse, (PREDICTION, TARGET)),
    "MAE": (metrics.MAE, metrics.mae, (PREDICTION, TARGET)),
    "NLL": (metrics.NLL, metrics.nll, VALUES),
    "NLL of Laplace": (partial(metrics.NLL, Laplace), partial(metrics.nll, distribution=Laplace), VALUES),
    "CRPS": (partial(metrics.CRPS, StudentT(3.0)), partial(metrics.crps, distribution=StudentT(3.0)), VALUES),
    "IntervalScore": (partial(metrics.IntervalScore, 0.5), partial(metrics.interval_score, level=0.5), VALUES),
    "PICP": (metrics.PICP, metrics.picp, VALUES),
    "MPIW": (metrics.MPIW, metrics.mpiw, (PREDICTION, RISK)),
    "Sharpness": (metrics.Sharpness, metrics.sharpness, (RISK,)),
    "CalibrationError": (metrics.CalibrationError, metrics.calibration_error, VALUES),
    "QuantileCalibrationError": (metrics.QuantileCalibrationError, metrics.quantile_calibration_error, VALUES),
    "Accuracy": (metrics.Accuracy, metrics.accuracy, (PROBS, LABELS)),
    "CategoricalNLL": (metrics.CategoricalNLL, metrics.categorical_nll, (PROBS, LABELS)),
    "Brier": (metrics.Brier, metrics.brier, (PROBS, LABELS)),
    "ECE": (metrics.ECE, metrics.ece, (PROBS, LABELS)),
    "MaxECE": (partial(metrics.MaxECE, 4), partial(metrics.max_ece, n_bins=4), (PROBS, LABELS)),
    "ClasswiseECE": (partial(metrics.ClasswiseECE, 3), metrics.classwise_ece, (PROBS, LABELS)),
    "AdaptiveECE": (partial(metrics.AdaptiveECE, 4), partial(metrics.adaptive_ece, n_bins=4), (PROBS, LABELS)),
    "AUROC": (metrics.AUROC, metrics.auroc, (RISK, RISK + 0.2)),
    "AUPR": (metrics.AUPR, metrics.aupr, (RISK, RISK + 0.2)),
    "FPR95": (metrics.FPR95, metrics.fpr95, (RISK, RISK + 0.2)),
    "RiskErrorCorrelation": (metrics.RiskErrorCorrelation, metrics.risk_error_correlation, VALUES),
    "AURC": (metrics.AURC, metrics.aurc, (RISK, TARGET.abs())),
    "AUGRC": (metrics.AUGRC, metrics.augrc, (RISK, TARGET.abs())),
    "AUSE": (metrics.AUSE, metrics.ause, (RISK, TARGET.abs())),
    "SampleCRPS": (metrics.SampleCRPS, voters_first(metrics.crps_samples), (VOTERS, TARGET[:, 0])),
    "MixtureNLL": (metrics.MixtureNLL, voters_first(metrics.mixture_nll), (VOTERS, VOTERS.abs() + 1, TARGET[:, 0])),
    "MixtureCRPS": (metrics.MixtureCRPS, voters_first(metrics.mixture_crps), (VOTERS, VOTERS.abs() + 1, TARGET[:, 0])),
}  # fmt: skip
cases = pytest.mark.parametrize("name", CASES)


def fed(name: str, metric: Any, rows: slice) -> None:
    target = VotersFirst(metric) if name in ("SampleCRPS", "MixtureNLL", "MixtureCRPS") else metric
    target.update(*(argument[rows] for argument in CASES[name][2]))


def test_every_class_has_a_case() -> None:
    classes = {name for name in metrics.__all__ if isinstance(getattr(metrics, name), type) and "Curve" not in name}
    assert classes == {name for name in CASES if " " not in name}
    assert set(dir(metrics)) == set(metrics.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        metrics.nothing  # noqa: B018


@cases
def test_batches_agree_with_the_function_and_reset_forgets(name: str) -> None:
    new, function, arguments = CASES[name]
    metric = new()
    expected = function(*arguments)
    fed(name, metric, slice(10, 20))
    metric.reset()
    for rows in (slice(0, 1), slice(1, 25), slice(25, 40)):
        fed(name, metric, rows)
    found = metric.compute()
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    restored = pickle.loads(pickle.dumps(metric))
    torch.testing.assert_close(restored.compute(), expected, rtol=1e-12, atol=1e-12)


@cases
def test_one_row_is_scored_as_by_the_function(name: str) -> None:
    new, function, arguments = CASES[name]
    metric = new()
    fed(name, metric, slice(3, 4))
    if name == "RiskErrorCorrelation":  # two outputs of one row are two elements
        assert abs(metric.compute().item()) == pytest.approx(1)
        metric.reset()
        metric.update(*(argument[:1, :1] for argument in arguments))
        with pytest.raises(ValueError, match="values that differ"):
            metric.compute()
        return
    torch.testing.assert_close(metric.compute(), function(*(a[3:4] for a in arguments)), rtol=1e-12, atol=1e-12)


@cases
def test_states_are_safe_to_gather(name: str) -> None:
    metric = CASES[name][0]()
    reductions = set(metric._reductions.values())
    assert reductions <= {torchmetrics.utilities.dim_zero_sum, torchmetrics.utilities.dim_zero_cat}
    assert metric._reductions.keys() == metric._defaults.keys()


@cases
def test_two_processes_merge_into_all_rows(name: str) -> None:
    new, function, arguments = CASES[name]
    first, second = new(), new()
    fed(name, first, slice(0, 15))
    fed(name, second, slice(15, 40))
    first.merge_state(second)
    torch.testing.assert_close(first.compute(), function(*arguments), rtol=1e-12, atol=1e-12)
    # two processes that saw the same rows
    both = new(distributed_available_fn=lambda: True, dist_sync_fn=lambda state, group: [state, state])
    fed(name, both, slice(0, 40))
    doubled = function(*(torch.cat([a, a]) for a in arguments))
    torch.testing.assert_close(both.compute(), doubled, rtol=1e-12, atol=1e-12)


@cases
def test_direction_and_plot(name: str) -> None:
    new, _, arguments = CASES[name]
    metric = new()
    better = {"Accuracy": True, "AUROC": True, "AUPR": True, "RiskErrorCorrelation": True, "PICP": None}
    assert metric.higher_is_better is better.get(name, False)
    fed(name, metric, slice(0, 40))
    before = dict(matplotlib.rcParams)
    figure, ax = metric.plot()
    assert figure is ax.figure
    assert metric.plot([metric.compute(), metric.compute()], ax=ax)[1] is ax
    assert dict(matplotlib.rcParams) == before
    plt.close(figure)
    assert len(arguments[0]) == 40


@cases
@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_compute_without_rows_is_an_error(name: str) -> None:
    metric = CASES[name][0]()
    with pytest.raises(ValueError, match="has seen no rows yet"):
        metric.compute()
    fed(name, metric, slice(0, 40))
    metric.reset()
    with pytest.raises(ValueError, match="has seen no rows yet"):
        metric.compute()


def test_splits_may_come_in_turns_and_both_are_needed() -> None:
    metric = metrics.AUROC()
    metric.update(risk_out=RISK[:5] + 1)
    with pytest.raises(ValueError, match="found 0 in-distribution and 10 out-of-distribution"):
        metric.compute()
    metric.update(risk_in=RISK)
    metric.update(risk_out=RISK[5:] + 1)
    torch.testing.assert_close(metric.compute(), metrics.auroc(RISK, RISK + 1))
    with pytest.raises(ValueError, match="risk_in, risk_out or both"):
        metric.update()


def test_bad_input_leaves_the_state_as_it_was() -> None:
    metric = metrics.NLL()
    metric.update(*VALUES)
    before = metric.compute()
    for bad in ((PREDICTION, -RISK, TARGET), (PREDICTION, RISK[:1], TARGET), (PREDICTION * float("nan"), RISK, TARGET)):
        with pytest.raises(ValueError, match=r"risk|shapes|NaN"):
            metric.update(*bad)
    metric.update(*VALUES)  # the same rows again leave the mean, and drop the cached value
    torch.testing.assert_close(metric.compute(), before)
    with pytest.raises(ValueError, match="expected probabilities of 5 classes, found 3"):
        metrics.ClasswiseECE(5).update(PROBS, LABELS)
    with pytest.raises(ValueError, match="level"):
        metrics.PICP(level=90)


def test_collections_and_forward() -> None:
    collection = torchmetrics.MetricCollection(
        [metrics.NLL(), metrics.RMSE(), metrics.CalibrationError(), metrics.PICP()]
    )
    for rows in (slice(0, 10), slice(10, 40)):
        collection.update(prediction=PREDICTION[rows], risk=RISK[rows], target=TARGET[rows])
    found = collection.compute()
    torch.testing.assert_close(found["RMSE"], metrics.rmse(PREDICTION, TARGET))
    torch.testing.assert_close(found["NLL"], metrics.nll(*VALUES))
    metric = metrics.RMSE()
    torch.testing.assert_close(metric(PREDICTION[:10], TARGET[:10]), metrics.rmse(PREDICTION[:10], TARGET[:10]))
    metric(PREDICTION[10:], TARGET[10:])
    torch.testing.assert_close(metric.compute(), metrics.rmse(PREDICTION, TARGET))


def test_functions_do_not_load_the_heavy_libraries() -> None:
    code = (
        "import sys, workbench.metrics as m; m.rmse([1.0], [2.0]); "
        "heavy = {'torchmetrics', 'scipy', 'sklearn', 'matplotlib', 'pandas'} & set(sys.modules); "
        "assert not heavy, heavy; m.NLL; assert 'torchmetrics' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
