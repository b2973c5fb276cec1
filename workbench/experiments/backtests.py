"""Rolling back-tests: forecasts of a series at successive origins, each from earlier values only."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from workbench import metrics
from workbench.calibration.models import check_model, named_risks, output_of
from workbench.console import progress_bar
from workbench.core.additions import extra
from workbench.core.batches.call_arguments import answering
from workbench.core.method import evaluating
from workbench.core.wrapped import Wrapped, is_wrapped
from workbench.data.series import as_series, chosen, column_numbers, windows
from workbench.distributions.mixture import Mixture
from workbench.engine.effects.private_random import own_random
from workbench.errors import NotFittedError, as_count, require
from workbench.risk import Risk
from workbench.training import fit
from workbench.training.checkpoint import Checkpoint
from workbench.training.described_settings import describe

if TYPE_CHECKING:
    import pandas as pd

# arguments of `fit` that users can't set here
RESERVED_OPTIONS = ("wrapped", "data", "checkpoint", "progress", "strategy")


@dataclass(frozen=True, eq=False)
class Backtest:
    """Forecasts of a back-test and the true values.

    Args:
        origin: number of known values at each origin, int64 [origins].
        prediction: forecasts [origins, horizon] or [origins, horizon, series].
        risk: risks of the predictions, of the same shape; vacuitic [origins].
        truth: true values, of the shape of the predictions.
        series: the forecast series [time] or [time, series].
        paths: sample paths [paths, *prediction.shape], or None.
    """

    origin: Tensor
    prediction: Tensor
    risk: Risk
    truth: Tensor
    series: Tensor
    paths: Tensor | None = None

    def summary(self, level: float = 0.9, season: int = 1) -> dict[str, float]:
        """Return metrics over all origins, steps and series; all but mase and coverage follow the series with the largest numbers.

        Args:
            level: coverage of the intervals, which are those of normal distributions with the total risk as standard deviation.
            season: length of a season in time steps (24 for a daily season of hourly values), for `mase`: its unit is the error of the
                seasonal naive forecast before the first origin.

        Returns:
            rmse, mae and mase; with risks also crps, coverage, worst_step (the lowest coverage of a step), width and interval_score; with
            paths also energy_score, which is lower on average with more paths, and path_coverage if there are enough paths for the level.

        Raises:
            ValueError: a forecast is not finite, level or season is out of range, or the series is constant before the first origin.
        """
        y, truth, total = self.prediction, self.truth, self.risk.total
        past = self.series[: int(self.origin[0])]
        scores = {
            "rmse": metrics.rmse(y, truth),
            "mae": metrics.mae(y, truth),
            "mase": metrics.mase(y, truth, past, season),
        }
        if total is not None:
            steps = [metrics.picp(y[:, h], total[:, h], truth[:, h], level) for h in range(y.shape[1])]
            scores |= {
                "crps": metrics.crps(y, total, truth),
                "coverage": torch.stack(steps).mean(),
                "worst_step": torch.stack(steps).min(),
                "width": metrics.mpiw(y, total, level),
                "interval_score": metrics.interval_score(y, total, truth, level),
            }
        if self.paths is not None:
            scores["energy_score"] = metrics.energy_score(self.paths, truth)
            if len(self.paths) >= max(3.0, level / (1 - level)):
                scores["path_coverage"] = metrics.path_coverage(self.paths, truth, level)
        return {name: float(value) for name, value in scores.items()}

    def by_step(self, level: float = 0.9) -> pd.DataFrame:
        """Return metrics of each step of the horizon: rmse and mae; with risks also crps, coverage and width.

        Args:
            level: coverage of the intervals, as in `summary`.

        Returns:
            One row per step; the index starts at 1.
        """
        rows = []
        for h in range(self.prediction.shape[1]):
            y, truth = self.prediction[:, h], self.truth[:, h]
            row = {"rmse": metrics.rmse(y, truth), "mae": metrics.mae(y, truth)}
            if self.risk.total is not None:
                risk = self.risk.total[:, h]
                row |= {
                    "crps": metrics.crps(y, risk, truth),
                    "coverage": metrics.picp(y, risk, truth, level),
                    "width": metrics.mpiw(y, risk, level),
                }
            rows.append({name: float(value) for name, value in row.items()})
        pandas = require("pandas")
        return pandas.DataFrame(rows, index=pandas.RangeIndex(1, len(rows) + 1, name="step"))

    def __repr__(self) -> str:
        n, horizon = self.prediction.shape[:2]
        risks = ", ".join(self.risk.names()) or "none"
        return f"Backtest({n} origins from {int(self.origin[0])} to {int(self.origin[-1])}, {horizon} steps, risks: {risks})"


def backtest(
    forecaster: nn.Module | Callable[[], nn.Module],
    series: Any,
    *,
    window: int,
    horizon: int = 1,
    start: int,
    every: int = 1,
    refit: int | None = None,
    history: int | None = None,
    target: Any = None,
    validation: float = 0.1,
    paths: int = 0,
    seed: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool = True,
    **options: Any,
) -> Backtest:
    """Forecast a series at successive origins, each time from the values before the origin only.

    At an origin t the values 0 to t - 1 are known. The model sees the last `window` of them and forecasts the values from t on. If it is
    trained, its windows, their targets, the validation rows and the standardization all come from values before t.

    Args:
        forecaster: wrapped (or calibrated) model, x [n, window] -> [n, horizon], or for k series [n, window, k] -> [n, horizon, k]; or a
            function without arguments that returns a wrapped model. The model is not changed: copies of it are trained, each from its
            present weights.
        series: finite values [time], or of k series at the same times [time, k].
        window: number of past values that the model sees.
        horizon: number of values to forecast.
        start: first origin.
        every: distance between two origins in time steps.
        refit: number of origins between two trainings, the first being at the first origin; 1 trains at each origin, a number as large as
            that of the origins only once. None never trains: the model must then have been trained on values before `start`.
        history: number of latest values to train on; None: all.
        target: index of the series to forecast, or several indices; for a frame also names of columns. None: all series.
        validation: share of the windows, the latest ones, by which the best epoch is chosen; windows whose targets overlap with theirs are not
            trained on. 0: no validation, as with `folds=` (here contiguous periods).
        paths: number of sample paths of each forecast to keep, `wrapped.predictive(x).sample_paths`.
        seed: seed of the training and of random draws in predictions.
        checkpoint: file that stores finished forecasts. If it exists, the back-test resumes from it, with the same forecasts as without a break.
        progress: whether to show a progress bar if the back-test takes more than two seconds.
        options: further arguments of `workbench.fit`: epochs, lr, batch_size, criterion, folds, device, ... Series [time, k] are
            standardized separately, unless `standardize` or `criterion` is given.

    Returns:
        Forecasts, risks and truth, with `summary()` and `by_step()`. Risks are those of the model; for intervals that keep their coverage use
        `OnlineConformal(0.9).replay(result.prediction, result.truth, result.risk.total, every)`.

    Raises:
        TypeError: forecaster is not wrapped, or an argument is of the wrong type.
        ValueError: a number is out of range, the series has NaN or is too short, the model's forecasts have another shape, or checkpoint is of
            another back-test.
        KeyboardInterrupt: Ctrl-C was pressed; finished forecasts are in the checkpoint.

    Example:
        >>> from workbench import vote
        >>> series = torch.linspace(0, 30, 200).sin()
        >>> result = backtest(vote.Wrapper(2)(nn.Linear(8, 3)), series, window=8, horizon=3, start=150, every=10, refit=3, epochs=2)
        >>> result
        Backtest(5 origins from 150 to 190, 3 steps, risks: epistemic, total)
        >>> sorted(result.summary())
        ['coverage', 'crps', 'interval_score', 'mae', 'mase', 'rmse', 'width', 'worst_step']
    """
    values, target = as_series(series).detach(), column_numbers(series, target)
    _check_numbers(values, window, horizon, start, every, refit, history, paths, validation, options)
    target_values = chosen(values, target)
    with own_random(seed, values.device):
        model = forecaster if isinstance(forecaster, nn.Module) else forecaster()
    _check_forecaster(model, refit)
    arguments: dict[str, Any] = {"window": window, "horizon": horizon, "start": start, "every": every, "refit": refit}
    arguments |= {"history": history, "target": target, "validation": validation, "paths": paths, "seed": seed}
    settings = {name: str(value) for name, value in arguments.items()}
    settings |= {name: describe(value) for name, value in options.items() if name != "log_to"}
    settings |= {"series": _digest({"": values}), "model": _digest(model.state_dict(), repr(model))}
    checkpoint_file = None if checkpoint is None else Checkpoint(checkpoint, settings)
    origins = range(start, len(values) - horizon + 1, every)
    if paths and "folds" not in options:
        _check_paths(model, values[start - window : start][None], seed)
    rows = _stored(checkpoint_file)

    def train_at(origin: int) -> nn.Module:
        known_range = slice(0 if history is None else max(0, origin - history), origin)
        x, y, _ = windows(values[known_range], window, horizon, target=target)
        return _fitted(copy.deepcopy(model), x, y, values.dim() == 2, horizon, validation, seed, options)

    def forecast_at(origin: int, trained: nn.Module) -> dict[str, Tensor]:
        shape = (1, *target_values[:horizon].shape)
        return _forecast(trained, values[origin - window : origin][None], shape, paths, seed)

    try:
        _forecast_all(rows, origins, model, refit, train_at, forecast_at, progress, checkpoint_file)
    finally:
        if checkpoint_file is not None and rows:
            checkpoint_file.write(_joined(rows), force=True)
    truth = torch.stack([target_values[t : t + horizon] for t in origins])
    joined = _joined(rows)
    drawn = joined.pop("paths", None)
    prediction = joined.pop("prediction")
    drawn = None if drawn is None else drawn.movedim(0, 1)
    return Backtest(torch.tensor(origins), prediction, Risk(**joined), truth, target_values, drawn)


def _forecast_all(
    rows: list[dict[str, Tensor]],
    origins: range,
    model: nn.Module,
    refit: int | None,
    train_at: Callable[[int], nn.Module],
    forecast_at: Callable[[int, nn.Module], dict[str, Tensor]],
    progress: bool,
    checkpoint_file: Checkpoint | None,
) -> None:
    """Append the forecasts at the origins that have none yet to the rows."""
    current = model if refit is None else None
    total = len(origins)
    with progress_bar(
        total=total, initial=len(rows), desc="back-test", unit="origin", delay=2, disable=not progress, leave=False
    ) as bar:
        for number in range(len(rows), total):
            # a resumed back-test may start between two trainings, and must train again the model of that period
            if refit is not None and (current is None or number % refit == 0):
                current = train_at(origins[number - number % refit])
            assert current is not None
            rows.append(forecast_at(origins[number], current))
            if checkpoint_file is not None:
                checkpoint_file.write(_joined(rows))
            bar.update()


def _forecast(model: Any, x: Tensor, shape: tuple[int, ...], paths: int, seed: int) -> dict[str, Tensor]:
    """Return the prediction, risks and paths at one origin by name, without the batch dimension."""
    like = next((p for p in model.parameters() if p.is_floating_point()), x)
    x, device = x.to(like), like.device
    with evaluating(model, whole=True), torch.no_grad(), own_random(seed, device):
        prediction, risk = answering(model)(x, return_risk=True)
        if not isinstance(prediction, Tensor) or prediction.shape != shape:
            answer = list(prediction.shape) if isinstance(prediction, Tensor) else type(prediction).__name__
            raise ValueError(
                f"forecaster: for x {list(x.shape)} it returns {answer}, but horizon and target require {list(shape)}"
            )
        row = {
            "prediction": prediction,
            **{name: getattr(named_risks(model, risk), name) for name in named_risks(model, risk).names()},
        }
        if paths:
            row["paths"] = _draws(model, x, paths)
    return {name: value[0].cpu() for name, value in row.items()}


def _check_paths(model: Any, x: Tensor, seed: int) -> None:
    """Raise if the model can't draw sample paths, which only a cross-fitted one may learn."""
    like = next((p for p in model.parameters() if p.is_floating_point()), x)
    with (
        contextlib.suppress(NotFittedError),  # by the training
        evaluating(model, whole=True),
        torch.no_grad(),
        own_random(seed, like.device),
    ):
        _draws(model, x.to(like), 1)


def _draws(model: Any, x: Tensor, paths: int) -> Tensor:
    predictive = Wrapped.predictive(model, x) if is_wrapped(model) else None
    if not isinstance(predictive, Mixture):
        raise ValueError(
            f"paths: {type(predictive if is_wrapped(model) else model).__name__} can't draw sample paths; give a wrapped model whose last "
            "layers predict a distribution, such as compose(vote.Wrapper(), sculpt.Wrapper())(model), or paths=0"
        )
    return predictive.sample_paths((paths,))[:, 0][None]


def _fitted(
    wrapped: Any,
    x: Tensor,
    y: Tensor,
    many_series: bool,
    horizon: int,
    validation: float,
    seed: int,
    options: dict[str, Any],
) -> nn.Module:
    """Return the model trained on windows in time order; the latest of them are used to choose the best epoch."""
    folds = options.get("folds")
    held_out = 0 if folds is not None else round(validation * len(x))
    rows = len(x) - held_out - (horizon - 1 if held_out else 0)
    if rows < 2:
        raise ValueError(
            f"start: {len(x)} windows lie before an origin, and {max(0, rows)} of them are left to train on; use a later start, longer history, "
            "or validation=0"
        )
    if many_series and not {"standardize", "criterion"} & options.keys() and extra(wrapped, "scaling") is None:
        _standardize(wrapped, x[:rows], y[:rows])
    if isinstance(folds, int) and 2 <= folds <= rows:  # contiguous folds, since neighbouring windows overlap
        options = {**options, "folds": torch.arange(rows) * folds // rows}
    stopped, callback = [], options.get("callback")
    if callable(callback):
        options = {**options, "callback": lambda now: stopped.append(1) if (end := callback(now)) else None or end}
    history = fit(
        wrapped,
        (x[:rows], y[:rows]),
        validation=(x[len(x) - held_out :], y[len(x) - held_out :]) if held_out else None if folds is not None else 0,
        seed=seed,
        progress=False,
        **options,
    )
    if history.interrupted and not stopped:
        raise KeyboardInterrupt
    return wrapped


def _standardize(wrapped: Any, x: Tensor, y: Tensor) -> None:
    """Standardize each series to mean 0 and standard deviation 1, if the distribution of the targets allows it."""
    families = [method.distribution for method in wrapped._workbench.methods]
    if not all(getattr(family, name, True) for family in families for name in ("standardizable", "location_scale")):
        return  # `fit` scales such targets in its own way
    like = next((p for p in wrapped.parameters() if p.is_floating_point()), x)
    moments: dict[str, Tensor] = {}
    for name, rows in (("x", x), ("y", y)):
        flat = rows.double().flatten(0, 1) if rows.dim() == 3 else rows.double().flatten()
        scale, mean = torch.std_mean(flat, 0, correction=0)
        moments |= {f"{name}_mean": mean.to(like), f"{name}_scale": scale.where(scale > 0, 1.0).to(like)}
    Wrapped.scale(wrapped, **moments)


def _check_numbers(
    values: Tensor,
    window: int,
    horizon: int,
    start: int,
    every: int,
    refit: int | None,
    history: int | None,
    paths: int,
    validation: Any,
    options: dict[str, Any],
) -> None:
    minima = {"window": (window, 1), "horizon": (horizon, 1), "start": (start, window), "every": (every, 1)}
    minima |= {"paths": (paths, 0)}
    minima |= {} if refit is None else {"refit": (refit, 1)}
    minima |= {} if history is None else {"history": (history, window + horizon)}
    for name, (number, minimum) in minima.items():
        as_count(name, number, minimum)
    if start + horizon > len(values):
        raise ValueError(
            f"start: the series has {len(values)} values, none to compare with the forecast of {horizon} from {start} on"
        )
    if not bool(values.isfinite().all()):
        first = int((~values.isfinite()).nonzero()[0, 0])
        raise ValueError(
            f"series: found {int((~values.isfinite()).sum())} numbers that are NaN or infinite, the first at time {first}; fill them from "
            "earlier values, such as the last one (pandas: frame.ffill())"
        )
    if isinstance(validation, bool) or not isinstance(validation, int | float) or not 0 <= validation < 1:
        raise ValueError(
            f"validation must be a share of the windows, at least 0 and below 1; found {validation!r:.100}"
        )
    fit_parameters = inspect.signature(fit).parameters
    for name in options:
        if name in RESERVED_OPTIONS or name not in fit_parameters:
            raise TypeError(f"backtest() has no argument {name!r}, nor does fit() accept it here")
    if options and refit is None:
        raise ValueError(f"{', '.join(options)}: without refit= nothing is trained; give refit=1, or leave these out")


def _check_forecaster(model: Any, refit: int | None) -> None:
    check_model(model)
    if refit is not None and not is_wrapped(model):
        raise TypeError(
            f"forecaster: a {type(model).__name__} was fitted already and can't be trained; give the wrapped model, or refit=None"
        )
    if (form := output_of(model)) != "values":
        raise ValueError(f"forecaster: it predicts {form}; back-tests need a model that predicts values")


def _digest(state: dict[str, Any], text: str = "") -> str:
    hasher = hashlib.sha256(text.encode())
    for name, value in state.items():
        hasher.update(name.encode())
        if isinstance(value, Tensor):
            hasher.update(f"{value.dtype} {tuple(value.shape)}".encode())
            hasher.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        else:
            hasher.update(repr(value).encode())
    return hasher.hexdigest()


def _joined(rows: list[dict[str, Tensor]]) -> dict[str, Any]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _stored(checkpoint_file: Checkpoint | None) -> list[dict[str, Tensor]]:
    """Return the rows stored in the checkpoint, one per origin."""
    state = None if checkpoint_file is None else checkpoint_file.read()
    if state is None:
        return []
    del state["settings"]
    n = len(state["prediction"])
    return [{name: value[i] for name, value in state.items()} for i in range(n)]


__all__ = ["Backtest", "backtest"]
