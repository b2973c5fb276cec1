"""Online conformal prediction: forecast intervals that are adjusted as observations arrive, for drifting series."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from workbench.calibration.answers import level
from workbench.calibration.support import outward
from workbench.metrics._inputs import check_integer, numbers, real, risks, same_shape

Method = Literal["aci", "dtaci", "pid", "enbpi"]
# step sizes of the experts (Gibbs & Candes 2024, section 4)
RATES = (0.001, 0.002, 0.004, 0.008, 0.0160, 0.032, 0.064, 0.128)
REGRET_INTERVAL = 500  # times over which the experts' regret is bounded (same section)
SATURATION = 5.0  # of the integrator: with smaller values, fewer misses make the interval infinite


class _Forecast(NamedTuple):
    time: int  # when the forecast was made
    prediction: Tensor  # [steps, ...]
    unit: Tensor  # risk that one unit of score stands for, [steps, ...]
    bound: Tensor  # largest score inside the interval, [steps, ...]
    scores: Tensor  # scores known at that time, [window, steps, ...], in rising order with NaN at the end


class OnlineConformal:
    """Forecast intervals whose width follows the coverage reached so far.

    Split conformal prediction requires exchangeable rows. A series drifts, and its intervals lose coverage unnoticed.
    Here each observation moves the later intervals, so that coverage lost to a drift is regained. Nothing is guaranteed for a single time. The
    share of misses among n observations of one step ahead differs from 1 - coverage by at most (1 + rate) / (rate n) for "aci", whatever the
    series does, and by about 8 / log(n) for "pid" in the worst case. "dtaci" weights several rates without such a bound: of targets placed just
    outside of each interval it misses more than requested. Each step of the horizon and each series has its own level, and
    learns from an observation when it arrives, `step` times after the forecast. Scores are |target - prediction|, or these divided by the risk:
    the intervals are prediction +- score, or prediction +- score * risk.

    Methods:

    - "aci": adaptive conformal inference (Gibbs & Candes 2021). The quantile of the past scores at 1 - a, with a <- a + rate (1 - coverage - e),
      where e is 1 if the target was outside. Intervals can be infinite or empty.
    - "dtaci": its dynamically tuned form (Gibbs & Candes 2024): several rates at once, weighted by their recent performance.
    - "pid": quantile tracking with an integrator (Angelopoulos, Candes & Tibshirani 2023, without their scorecaster): the bound itself moves by
      rate * s * (e - 1 + coverage), where s is the largest past score, plus s tan(log(t + 1) / (5 (t + 1)) * sum of (e - 1 + coverage)).
    - "enbpi": the quantile of the latest `window` scores at `coverage`, after `start` with out-of-bag scores of an ensemble (Xu & Xie 2021,
      algorithm 1: symmetric intervals; with n out-of-bag rows their window is n). Its level does not adapt: coverage holds as far as the
      next errors are like the latest ones, not for arbitrary series.

    Args:
        coverage: strictly between 0 and 1.
        method: "dtaci", "aci", "pid" or "enbpi".
        rate: step size of "aci" and "pid"; None: 0.005 and 0.1.
        window: number of latest times whose scores are used; of forecasts made every 24 times, each step has a score at one time in 24.

    Raises:
        ValueError: an option is out of range.

    Example:
        >>> online = OnlineConformal(0.8, method="pid")
        >>> forecasts, truth = torch.zeros(300, 2), torch.linspace(0, 30, 301).sin().unfold(0, 2, 1)
        >>> lower, upper = online.replay(forecasts, truth)
        >>> float(((lower <= truth) & (truth <= upper)).double().mean().round(decimals=1))
        0.8
    """

    def __init__(
        self, coverage: float = 0.9, method: Method = "dtaci", rate: float | None = None, window: int = 1000
    ) -> None:
        if method not in get_args(Method):
            raise ValueError(f"method must be one of {', '.join(get_args(Method))}; found {method!r:.100}")
        if rate is not None and (method in ("dtaci", "enbpi") or not 0 < rate < math.inf):
            raise ValueError(
                "rate must be above 0 and finite; method='dtaci' has fixed rates, and 'enbpi' has none; "
                f"found {rate!r:.100} for {method!r}"
            )
        check_integer("window", window, minimum=2)
        self.coverage, self.method, self.window = float(level("coverage", coverage)), method, window
        self.rate = {"aci": 0.005, "pid": 0.1, "enbpi": 0.0}.get(method, math.nan) if rate is None else float(rate)
        self._time = 0
        self._pending: list[_Forecast] = []
        self._scores = torch.empty(0)  # of the latest times [window, steps, ...], NaN where there was no observation

    def start(self, prediction: Any, target: Any, risk: Any = None) -> None:
        """Add the scores of rows forecast before the first interval, each by models that have not seen it.

        For a cross-fitted ensemble, this is `history.out_of_fold`, with folds of consecutive times (`fit(..., folds=number_of_fold)`);
        windows that overlap with rows of another fold have been seen in part.

        Args:
            prediction: [n, steps, ...], rows in the order of time.
            target: observations of the same shape.
            risk: standard deviations > 0 of the same shape (or a Risk: its total) if later forecasts have them; else None.

        Raises:
            ValueError: shapes differ, numbers are NaN or infinite, or the method is "pid", which has no window of scores.
            RuntimeError: there are forecasts already.

        Example:
            >>> online = OnlineConformal(0.5, method="enbpi", window=3)
            >>> online.start(torch.zeros(3, 1), torch.tensor([[1.0], [-2.0], [3.0]]))
            >>> online.interval(torch.tensor([10.0]))
            (tensor([8.]), tensor([12.]))
        """
        if self.method == "pid":
            raise ValueError(
                "method='pid' follows the coverage only and takes no scores to start with; don't call start"
            )
        if self._scores.dim() > 1:
            raise RuntimeError("start(...) comes before the first interval; make a new OnlineConformal")
        predicted, observed = numbers("prediction", prediction), numbers("target", target)
        unit = torch.ones_like(predicted) if risk is None else risks(risk, positive=True).to(predicted.device)
        same_shape(prediction=predicted, target=observed, risk=unit)
        if predicted.dim() < 2:
            raise ValueError(f"prediction must have shape [n, steps, ...], found {list(predicted.shape)}")
        scores = ((observed.to(predicted.device) - predicted).abs() / unit)[-self.window :]
        self._begin(scores[0], risk is not None)
        self._scores[self.window - len(scores) :] = scores

    def interval(self, prediction: Any, risk: Any = None) -> tuple[Tensor, Tensor]:
        """Return intervals for the next steps, before their targets are known.

        Args:
            prediction: the forecast [steps, ...] made now; `...` are series, as in all other calls.
            risk: its standard deviation > 0, of the same shape (or a Risk: its total); None for equal widths. Either always or never.

        Returns:
            (lower, upper), each shaped like the prediction. Infinite as long as there are too few observations for the coverage; lower is above
            upper if the method asks for an empty interval.

        Raises:
            ValueError: shapes differ from those before, numbers are NaN or infinite, or a risk is 0 or less.
            RuntimeError: nothing was observed since the last forecast.
        """
        forecast = real("prediction", prediction)
        values = numbers("prediction", forecast)
        if not values.dim():
            raise ValueError("prediction must have shape [steps, ...], found one number")
        unit = torch.ones_like(values) if risk is None else risks(risk, positive=True).to(values.device)
        same_shape(prediction=values, risk=unit)
        if not self._scores.dim() > 1:
            self._begin(values, risk is not None)
        elif self._scores.shape[1:] != values.shape or self._by_risk != (risk is not None):
            mode = "with" if self._by_risk else "without"
            raise ValueError(
                f"forecasts so far were {list(self._scores.shape[1:])} {mode} risk, found {list(values.shape)} "
                f"{'without' if risk is None else 'with'}; make one OnlineConformal for each model and horizon"
            )
        elif self._pending and self._pending[-1].time == self._time:
            raise RuntimeError(
                "there is already a forecast for this time: call observe(target) with the observation before the next forecast"
            )
        ordered = self._scores.sort(0).values  # NaN comes last
        bound = self._bound(ordered)
        self._pending.append(_Forecast(self._time, values, unit, bound, ordered))
        dtype = forecast.dtype if forecast.is_floating_point() else torch.get_default_dtype()
        return outward((values - bound * unit, values + bound * unit), dtype)

    def observe(self, target: Any) -> None:
        """Add the observation of the next time, and learn from it for each step at which it was forecast.

        Args:
            target: one number per series [...], shaped like a step of the forecasts; NaN for missing observations.

        Raises:
            ValueError: the shape differs, or a number is infinite.
        """
        value = real("target", target).to(torch.float64)
        if self._scores.dim() > 1 and value.shape != self._scores.shape[2:]:
            raise ValueError(
                f"target must be {list(self._scores.shape[2:])}, one step of the forecasts, found {list(value.shape)}"
            )
        if value.isinf().any():
            raise ValueError(
                f"target holds {int(value.isinf().sum())} infinite numbers; mark missing observations by NaN"
            )
        self._time += 1
        if not self._pending:
            return
        steps_ahead = [self._time - forecast.time - 1 for forecast in self._pending]  # all different
        forecast_steps = list(zip(self._pending, steps_ahead, strict=True))
        prediction = torch.stack([forecast.prediction[step] for forecast, step in forecast_steps])
        unit = torch.stack([forecast.unit[step] for forecast, step in forecast_steps])
        bound = torch.stack([forecast.bound[step] for forecast, step in forecast_steps])
        score = (value.to(unit.device) - prediction).abs() / unit
        self._learn(
            steps_ahead, score, bound, torch.stack([forecast.scores[:, step] for forecast, step in forecast_steps], 1)
        )
        row = torch.full_like(self._tracked, math.nan)
        row[steps_ahead] = score
        self._scores = torch.cat([self._scores[1:], row[None]])
        n_steps = self._scores.shape[1]
        self._pending = [forecast for forecast in self._pending if self._time - forecast.time < n_steps]

    def replay(self, prediction: Any, target: Any, risk: Any = None, every: int = 1) -> tuple[Tensor, Tensor]:
        """Return the intervals of a back-test, each computed from what was known when its forecast was made.

        Args:
            prediction: forecasts [times, steps, ...], in the order in which they were made.
            target: observations of the same shape; NaN where missing.
            risk: standard deviations > 0 of the same shape, or None.
            every: number of steps between two forecasts; with more than `steps`, no observations are known in between.

        Returns:
            (lower, upper), each shaped like the prediction.

        Raises:
            ValueError: shapes differ, targets of overlapping forecasts differ (so they are not of one series), or `every` is wrong.
        """
        prediction, target = real("prediction", prediction), real("target", target)
        risk = None if risk is None else real("risk", getattr(risk, "total", risk))
        same_shape(prediction=prediction, target=target, **({} if risk is None else {"risk": risk}))
        if prediction.dim() < 2:
            raise ValueError(f"prediction must have shape [times, steps, ...], found {list(prediction.shape)}")
        check_integer("every", every)
        n_common = max(0, target.shape[1] - every)
        earlier, later = target[:-1, every:], target[1:, :n_common]
        if not torch.equal(earlier.nan_to_num(), later.nan_to_num()):
            raise ValueError(
                f"target: forecasts made {every} steps apart must have the same target at the same time; is every={every} right, and are "
                "the rows in the order of time?"
            )
        intervals = []
        for row, observed in enumerate(target):
            intervals.append(self.interval(prediction[row], None if risk is None else risk[row]))
            for step in range(every):
                self.observe(observed[step] if step < len(observed) else torch.full(observed.shape[1:], math.nan))
        lower, upper = zip(*intervals, strict=True)
        return torch.stack(lower), torch.stack(upper)

    # ---- levels and bounds
    def _begin(self, values: Tensor, by_risk: bool) -> None:
        self._by_risk, shape = by_risk, values.shape
        self._scores = values.new_full((self.window, *shape), math.nan)
        rates = RATES if self.method == "dtaci" else (self.rate,)
        self._rates = values.new_tensor(rates).reshape(-1, *[1] * values.dim())
        self._levels = values.new_full((len(rates), *shape), 1 - self.coverage)
        self._weights = torch.ones_like(self._levels)
        # for "pid": the tracked bound, the number of observations, and the excess of observations outside
        self._tracked, self._count, self._excess = (torch.zeros_like(values) for _ in range(3))

    def _bound(self, scores: Tensor) -> Tensor:
        """Return the largest score [steps, ...] inside the intervals, from scores in rising order."""
        n = (~scores.isnan()).sum(0)
        if self.method == "pid":
            angle = self._excess * (self._count + 1).log() / (SATURATION * (self._count + 1))
            half = math.pi / 2
            integral = angle.clamp(-half, half).tan()
            integral = integral.masked_fill(angle >= half, math.inf).masked_fill(angle <= -half, -math.inf)
            largest = scores.nan_to_num(nan=0.0).amax(0)
            widened = self._tracked + torch.where(largest > 0, largest * integral, 0)
            return torch.where(n > 0, widened, math.inf)
        alpha = (self._levels * self._weights).sum(0) / self._weights.sum(0)
        # rounded first: (1 - 0.1) * 10 is 9, but slightly more in floating point
        rank = ((n + 1) * (1 - alpha)).mul(2**32).round().div(2**32).ceil().long()
        bound = scores.gather(0, (rank - 1).clamp(0, self.window - 1)[None])[0]
        return bound.masked_fill(rank > n, math.inf).masked_fill(rank < 1, -math.inf)

    def _learn(self, steps: list[int], score: Tensor, bound: Tensor, past: Tensor) -> None:
        """Update the levels of some steps.

        Args:
            steps: their numbers.
            score: scores of the new observation, [steps, ...], NaN where missing.
            bound, past: largest score [steps, ...] inside the interval, and scores [window, steps, ...] known when the forecast was made.
        """
        alpha, known, n = 1 - self.coverage, ~score.isnan(), (~past.isnan()).sum(0)
        if self.method == "pid":
            excess = torch.where(known, (score > bound).to(score) - alpha, 0)
            first = known & ~(self._count[steps] > 0)  # tracking starts at the first score
            largest = past.nan_to_num(nan=0.0).amax(0)
            moved = self._tracked[steps] + self.rate * torch.where(largest > 0, largest, score).nan_to_num() * excess
            self._tracked[steps] = torch.where(first, score, moved)
            self._count[steps] += known
            self._excess[steps] += torch.where(first, 0, excess)
            return
        known &= n > 0  # without past scores the intervals are infinite, and carry no information on a level
        levels, weights = self._levels[:, steps], self._weights[:, steps]
        # the largest level at which the score would have been inside
        beta = 1 - (past < score).sum(0) / (n + 1)
        missed = (levels >= beta).to(levels) if self.method == "dtaci" else (score > bound).to(levels)[None]
        if self.method == "dtaci":
            loss = alpha * (beta - levels) - (beta - levels).clamp_max(0)
            k, squares = len(RATES), ((1 - alpha) ** 2 * alpha**3 + alpha**2 * (1 - alpha) ** 3) / 3
            eta = math.sqrt((math.log(REGRET_INTERVAL * k) + 2) / (REGRET_INTERVAL * squares))
            scaled = weights / weights.sum(0) * (-eta * loss).exp()
            share = 1 / (2 * REGRET_INTERVAL)
            self._weights[:, steps] = torch.where(known, (1 - share) * scaled + share * scaled.mean(0), weights)
        self._levels[:, steps] = torch.where(known, levels + self._rates * (alpha - missed), levels)
