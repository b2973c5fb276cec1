"""Metric classes: batches, merged processes, reset, plots and errors agree with the functions."""

from __future__ import annotations

import pickle
import subprocess
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pytest
import torch
import torchmetrics
from helpers.metric_cases import CASES, LABELS, PREDICTION, PROBS, RISK, TARGET, VALUES, fed

from workbench import metrics

cases = pytest.mark.parametrize("name", CASES)


def test_every_class_has_a_case() -> None:
    exported = {name: getattr(metrics, name) for name in metrics.__all__}
    classes = {
        name for name, value in exported.items() if isinstance(value, type) and issubclass(value, torchmetrics.Metric)
    }
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
    value = metric.compute()
    assert value.dtype == torch.float64
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
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
    if name == "ErrorAUROC":  # of one row either all are right or all are wrong, or its two outputs differ
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
    if hasattr(first, "merge_state"):  # torchmetrics 1.4 has none
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
    better = {
        "Accuracy": True,
        "AUROC": True,
        "AUPR": True,
        "RiskErrorCorrelation": True,
        "PICP": None,
        "MeanIoU": True,
        "AURG": True,
        "ErrorAUROC": True,
        "PathCoverage": None,
    }
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
    values = collection.compute()
    torch.testing.assert_close(values["RMSE"], metrics.rmse(PREDICTION, TARGET))
    torch.testing.assert_close(values["NLL"], metrics.nll(*VALUES))
    metric = metrics.RMSE()
    torch.testing.assert_close(metric(PREDICTION[:10], TARGET[:10]), metrics.rmse(PREDICTION[:10], TARGET[:10]))
    metric(PREDICTION[10:], TARGET[10:])
    torch.testing.assert_close(metric.compute(), metrics.rmse(PREDICTION, TARGET))


@pytest.mark.slow
def test_functions_do_not_load_the_heavy_libraries() -> None:
    code = (
        "import sys, workbench.metrics as m; m.rmse([1.0], [2.0]); "
        "heavy = {'torchmetrics', 'scipy', 'sklearn', 'matplotlib', 'pandas'} & set(sys.modules); "
        "assert not heavy, heavy; m.NLL; assert 'torchmetrics' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
