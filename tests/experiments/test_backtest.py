"""Rolling back-tests: no forecast uses data from after its origin, and an interrupted run resumes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import compose, fit, metrics, sculpt, vote
from workbench.experiments import backtest
from workbench.experiments.backtests import Backtest

SERIES = torch.stack([torch.linspace(0, 20, 90).sin(), 100 * torch.linspace(3, 25, 90).cos()], 1)
SETTINGS: dict[str, Any] = {"window": 6, "horizon": 3, "start": 50, "every": 5, "progress": False}
TRAINING: dict[str, Any] = {"refit": 3, "epochs": 2, "batch_size": 16}


class Forecaster(nn.Module):
    """[n, 6, 2] -> [n, 3, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.flatten(1)).unflatten(1, (3, 2))


class Last(nn.Module):
    """The last value, for all steps."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, -1:].expand(-1, 3, *x.shape[2:])


def made() -> nn.Module:
    return compose(vote.Wrapper(2), sculpt.Wrapper(n_layers=1))(Forecaster())


def same(one: Backtest, other: Backtest, rows: slice = slice(None)) -> bool:
    pairs = [
        (one.prediction, other.prediction),
        (one.risk.total, other.risk.total),
        (one.risk.epistemic, other.risk.epistemic),
    ]
    return all(torch.equal(a[rows], b[rows]) for a, b in pairs)


@pytest.fixture(scope="module")
def result() -> Backtest:
    return backtest(made, SERIES, **SETTINGS, **TRAINING)


@pytest.mark.parametrize("change", [61, 65])
def test_what_comes_after_an_origin_moves_no_earlier_forecast(result: Backtest, change: int) -> None:
    other = SERIES.clone()
    other[change:] = other[change:].flip(0) * 37 + 5
    moved = backtest(made, other, **SETTINGS, **TRAINING)
    before = int((result.origin <= change).sum())
    assert same(result, moved, slice(0, before))
    assert not torch.equal(result.prediction[before:], moved.prediction[before:])
    assert not torch.equal(result.truth, moved.truth)


@pytest.mark.slow
def test_forecasts_are_those_of_models_trained_by_hand(result: Backtest) -> None:
    assert result.origin.tolist() == [50, 55, 60, 65, 70, 75, 80, 85]
    torch.manual_seed(0)
    start = made()
    for number, t in enumerate(result.origin.tolist()):
        known = SERIES[: [50, 65, 80][number // 3]]
        rows = [(known[s - 6 : s], known[s : s + 3]) for s in range(6, len(known) - 2)]
        x, y = (torch.stack(part) for part in zip(*rows, strict=True))
        last = round(0.1 * len(x))
        train, held_out = slice(0, len(x) - last - 2), slice(len(x) - last, None)
        wrapped: Any = copy.deepcopy(start)
        columns = x[train].flatten(0, 1).double(), y[train].flatten(0, 1).double()
        (x_mean, x_scale), (y_mean, y_scale) = ((c.mean(0), c.std(0, correction=0)) for c in columns)
        wrapped.scale(x_mean=x_mean.float(), x_scale=x_scale.float(), y_mean=y_mean.float(), y_scale=y_scale.float())
        fit(
            wrapped,
            (x[train], y[train]),
            validation=(x[held_out], y[held_out]),
            epochs=2,
            batch_size=16,
            progress=False,
        )
        y, risk = wrapped(SERIES[None, t - 6 : t], return_risk=True)
        assert torch.allclose(result.prediction[number], y[0], rtol=1e-5)
        assert torch.allclose(result.risk.aleatoric[number], risk.aleatoric[0], rtol=1e-5)
        assert torch.equal(result.truth[number], SERIES[t : t + 3])


def test_a_run_that_was_ended_goes_on(result: Backtest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench.experiments import backtests

    settings = {**SETTINGS, **TRAINING, "checkpoint": tmp_path / "run.pt"}
    said, calls = backtests._forecast, []

    def ended(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return said(*args)

    monkeypatch.setattr(backtests, "_forecast", ended)
    with pytest.raises(KeyboardInterrupt):
        backtest(made, SERIES, **settings)
    resumed = backtest(made, SERIES, **settings)
    assert len(calls) == 5 + 4  # four forecasts were kept
    assert same(resumed, result)
    assert same(backtest(made, SERIES, **settings), result)
    assert len(calls) == 9
    with pytest.raises(ValueError, match="of another training"):
        backtest(made, SERIES, **{**settings, "every": 4})
    with pytest.raises(ValueError, match="of another training"):
        backtest(lambda: vote.Wrapper(2)(Forecaster()), SERIES, **settings)


def test_an_interrupted_training_gives_no_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(progress: Any) -> None:
        raise KeyboardInterrupt

    with pytest.warns(UserWarning, match="interrupted"), pytest.raises(KeyboardInterrupt):
        backtest(made, SERIES, **SETTINGS, **TRAINING, callback=interrupt)
    stopped = backtest(made, SERIES, **SETTINGS, **{**TRAINING, "refit": 99}, callback=lambda progress: True)
    assert len(stopped.origin) == 8


def test_a_model_is_trained_never_or_on_the_latest_values() -> None:
    naive = compose()(Last())
    result = backtest(naive, SERIES, **SETTINGS)
    assert torch.equal(result.prediction, SERIES[result.origin - 1][:, None].expand(-1, 3, 2))
    assert result.risk.names() == ()
    scale = SERIES[:50].diff(dim=0).abs().mean(0)
    expected = ((result.truth - result.prediction).abs() / scale).mean()
    assert result.summary()["mase"] == pytest.approx(float(expected), rel=1e-5)
    assert list(result.by_step().index) == [1, 2, 3]

    model = made()
    before = copy.deepcopy(model.state_dict())
    some = {**SETTINGS, **TRAINING, "refit": 99, "history": 30}
    short = backtest(model, SERIES, **some)
    other = SERIES.clone()
    other[:20] += 1e3
    assert same(short, backtest(model, other, **some))
    assert all(
        torch.equal(value, before[name]) for name, value in model.state_dict().items() if isinstance(value, Tensor)
    )


def test_summary_by_plain_sums(result: Backtest) -> None:
    summary = result.summary(0.8)
    y, risk, truth = (part.double() for part in (result.prediction, result.risk.total, result.truth))
    half = 1.2815515655446004 * risk
    inside = ((truth - y).abs() <= half).double()
    assert summary["coverage"] == pytest.approx(inside.mean().item())
    assert summary["worst_step"] == pytest.approx(inside.mean((0, 2)).min().item())
    assert summary["width"] == pytest.approx(2 * half.mean().item(), rel=1e-5)
    assert summary["rmse"] == pytest.approx((truth - y).square().mean().sqrt().item(), rel=1e-6)
    steps = result.by_step(0.8)
    assert steps["coverage"].mean() == pytest.approx(summary["coverage"])


def test_a_series_in_double_precision_is_forecast_in_the_precision_of_the_model(result: Backtest) -> None:
    double = backtest(made, SERIES.double(), **SETTINGS, **TRAINING)
    assert torch.allclose(double.prediction, result.prediction, rtol=1e-4)
    assert double.truth.dtype == torch.float64


def test_paths_of_each_origin() -> None:
    result = backtest(made(), SERIES, **SETTINGS, **{**TRAINING, "refit": 99}, paths=12)
    assert result.paths is not None
    assert result.paths.shape == (12, 8, 3, 2)
    expected = metrics.energy_score(result.paths, result.truth)
    assert result.summary()["energy_score"] == pytest.approx(float(expected))
    assert 0 <= result.summary()["path_coverage"] <= 1


def test_folds_are_stretches_of_time() -> None:
    settings = {**SETTINGS, "start": 80, "refit": 99, "epochs": 2}
    result = backtest(made, SERIES, **settings, folds=2)
    stretches = torch.arange(72) * 2 // 72  # of the windows that end before 80
    assert same(result, backtest(made, SERIES, **settings, folds=stretches))
    assert not same(result, backtest(made, SERIES, **settings, folds=1 - stretches))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"start": 5}, "start must be a whole number of at least 6; found 5"),
        ({"start": 88}, "none to compare with the forecast of 3 from 88 on"),
        ({"refit": 0}, "refit must be a whole number of at least 1"),
        ({"history": 8, **TRAINING}, "history must be a whole number of at least 9"),
        ({"start": 9, **TRAINING}, "windows lie before an origin, and"),
        ({"epochs": 3}, "epochs: without refit= nothing is trained"),
        ({"horizon": 4}, r"for x \[1, 6, 2\] it returns \[1, 3, 2\], but horizon and target require \[1, 4, 2\]"),
        ({"target": 0}, r"it returns \[1, 3, 2\], but horizon and target require \[1, 3\]"),
        ({"validation": 1}, "validation must be a share"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        backtest(made, SERIES, **{**SETTINGS, **settings})


def test_series_with_gaps_and_plain_models_are_refused() -> None:
    gap = SERIES.clone()
    gap[7, 1] = float("nan")
    with pytest.raises(ValueError, match="1 numbers that are NaN or infinite, the first at time 7"):
        backtest(made, gap, **SETTINGS)
    with pytest.raises(TypeError, match="is not wrapped"):
        backtest(Forecaster(), SERIES, **SETTINGS)
    with pytest.raises(TypeError, match="no argument 'epoch'"):
        backtest(made, SERIES, **SETTINGS, refit=1, epoch=3)


def test_what_cannot_be_forecast_is_refused_before_training() -> None:
    calls = []

    class Counted(Forecaster):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(len(x))
            return super().forward(x)

    wrapped = vote.Wrapper(2)(Counted())
    with pytest.raises(ValueError, match="no member predicts a distribution"):
        backtest(wrapped, SERIES, **SETTINGS, **TRAINING, paths=5)
    assert set(calls) == {1}  # one window
    with pytest.raises(TypeError, match="callback: found 'x'"):
        backtest(wrapped, SERIES, **SETTINGS, **TRAINING, callback="x")
    with pytest.raises(ValueError, match="seed must be a whole number of at most 64 bits; found 'a'"):
        backtest(wrapped, SERIES, **SETTINGS, **{**TRAINING, "seed": "a"})
