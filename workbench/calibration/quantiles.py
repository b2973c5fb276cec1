"""Quantile recalibration: predicted probabilities are replaced by observed frequencies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from workbench.calibration.answers import Answers, check_rows, check_values, level, positive_total, risk_named
from workbench.calibration.base import Calibrated
from workbench.calibration.models import distribution_of
from workbench.calibration.scaling import VarianceScaling, check_columns
from workbench.calibration.support import buffer_of, clipped
from workbench.distributions import Distribution
from workbench.distributions.base import wide_dtype
from workbench.errors import check_flag, require
from workbench.metrics._inputs import numbers
from workbench.metrics.regression import pit
from workbench.risk import Risk

NODES = 4096  # quadrature nodes for the integrals over the quantiles of a standard distribution
NODES_EACH = 256  # the same if each number needs its own integrals


def fit_recalibration(u: Tensor) -> tuple[Tensor, Tensor]:
    """Return the monotone map from predicted probability to observed share as a piecewise linear function (Kuleshov et al. 2018).

    Isotonic regression of the share of targets up to each one, i / (n + 1), on the predicted cdf there, through (0, 0) and (1, 1).

    Args:
        u: predicted cdf at each target [n].

    Returns:
        (stated, observed), float64 [knots], both increasing.

    Raises:
        ValueError: there are no rows, or a number is NaN or not between 0 and 1.

    Example:
        >>> fit_recalibration(torch.tensor([0.4, 0.5, 0.6]))[1]
        tensor([0.0000, 0.2500, 0.5000, 0.7500, 1.0000], dtype=torch.float64)
    """
    import numpy as np

    IsotonicRegression = require("sklearn.isotonic").IsotonicRegression
    checked = numbers("u", u).detach().cpu()
    if checked.ndim != 1 or ((checked < 0) | (checked > 1)).any():
        raise ValueError(
            f"u must hold probabilities [n], found {checked.min().item():g} to {checked.max().item():g} of shape {list(checked.shape)}"
        )
    stated = np.sort(checked.numpy())
    observed = np.arange(1, len(stated) + 1) / (len(stated) + 1)
    line = IsotonicRegression(y_min=0, y_max=1).fit(np.r_[0, stated, 1], np.r_[0, observed, 1])
    return torch.as_tensor(line.X_thresholds_).double(), torch.as_tensor(line.y_thresholds_).double()


def interpolate(at: Tensor, knots: Tensor, heights: Tensor) -> Tensor:
    """Return linear interpolation [...] between increasing knots [k] with heights [k]; constant beyond the ends."""
    at = at.clamp(knots[0], knots[-1])
    right = torch.searchsorted(knots, at.contiguous()).clamp(1, len(knots) - 1)
    left = right - 1
    width = knots[right] - knots[left]
    share = torch.where(width > 0, (at - knots[left]) / width.where(width > 0, 1.0), 1.0)
    return heights[left] + share * (heights[right] - heights[left])


class QuantileRecalibration(Calibrated):
    """Predicted distributions recalibrated on held-out rows so that their quantiles hold, by isotonic regression (Kuleshov et al. 2018).

    With F the predicted cdf (of sculpt's family, Normal without sculpt, with the total risk) and R the map from predicted probability to
    observed share, the new cdf is R(F(y)) and the new quantile F^-1(R^-1(q)). The prediction becomes the mean of the new distribution, and total
    risk its standard deviation; aleatoric and epistemic risk are multiplied by the same factor, so that variances still add up. Vacuitic risk
    does not change.

    Args:
        wrapped: a wrapped model of values.
        per_output: one map per output (the last dimension) instead of one for all.

    Example:
        >>> from workbench import sculpt
        >>> wrapped = sculpt.Wrapper()(nn.Linear(2, 1))
        >>> calibrated = QuantileRecalibration(wrapped).fit((torch.zeros(99, 2), torch.linspace(-2, 2, 99)[:, None]))
        >>> calibrated.cdf(torch.zeros(1, 2), torch.tensor([[0.0]])).detach().round(decimals=4)
        tensor([[0.5000]])
    """

    options = ("per_output",)
    moves_prediction = True
    keeps_family = False
    new_buffers = ("support",)
    support: Tensor
    stated: Tensor
    observed: Tensor

    def __init__(self, wrapped: nn.Module, per_output: bool = False) -> None:
        check_flag("per_output", per_output)
        super().__init__(wrapped)
        self.per_output = per_output
        # the identity until fitted; `stated` is in log-odds, since float32 has no numbers between 1 - 6e-8 and 1
        self.register_buffer("stated", torch.tensor([[-torch.inf, torch.inf]]))
        self.register_buffer("observed", torch.tensor([[0.0, 1.0]]))
        self.register_buffer("support", torch.empty(0))

    def _check(self, answers: Answers) -> None:
        check_values(answers, "recalibration of quantiles")
        check_columns(self.per_output, answers.y)
        risk_named(answers.risk, "total")
        distribution_of(self.wrapped)
        require("sklearn.isotonic")

    def _fit(self, answers: Answers, seed: int) -> None:
        check_rows(answers, "recalibration of quantiles")
        u = pit(answers.y, positive_total(answers.risk), answers.target, distribution_of(self.wrapped))
        if (saturated := (u <= 0) | (u >= 1)).any():
            tails = "train with heavier tails, sculpt.Wrapper(sculpt.StudentT), or use 'conformal'"
            scale = "scale the risks first: calibrate(calibrate(wrapped, data, 'variance'), data, 'isotonic')"
            raise ValueError(
                f"the predicted cdf is exactly 0 or 1 at {int(saturated.sum())} of {saturated.numel()} targets, so that no quantile reaches "
                f"them; {tails if isinstance(self.wrapped, VarianceScaling) else scale}"
            )
        columns = u.flatten(0, -2).unbind(-1) if self.per_output else (u.flatten(),)
        lines = [fit_recalibration(column) for column in columns]
        n_knots = max(len(stated) for stated, _ in lines)
        # pad to equal length by repeating the last knot, (1, 1)
        stated, observed = (
            torch.stack([torch.cat([line, line[-1:].expand(n_knots - len(line))]) for line in part])
            for part in zip(*lines, strict=True)
        )
        self.stated, self.observed = stated.logit().to(answers.y), observed.to(answers.y)
        self.support = buffer_of(answers.support, answers.target)

    def _lines(self) -> tuple[Tensor, Tensor]:
        return _to_float64(self.stated).sigmoid(), _to_float64(self.observed)

    def _quantile(self, q: Tensor, y: Tensor, sigma: Tensor, family: Distribution) -> Tensor:
        """Return new quantiles [levels, ...] at probabilities q [levels] for y [...]."""
        stated, observed = self._lines()
        levels = torch.stack([interpolate(q, *line) for line in zip(observed, stated, strict=True)], -1)
        limits = torch.finfo(levels.dtype)
        # so that rounding can't make a finite quantile infinite
        levels = levels.clamp(limits.tiny, 1 - limits.eps / 2)
        levels = levels.reshape(len(q), *[1] * (y.dim() - 1), -1)  # the last dimension: outputs, or one for all
        shape = (len(q), *y.shape)
        return family.icdf(levels.expand(shape), _to_float64(y).expand(shape), _to_float64(sigma).expand(shape))

    def _adjusted(self, y: Any, risk: Risk) -> tuple[Any, Risk]:
        family, sigma = distribution_of(self.wrapped), risk_named(risk, "total")
        family.stddev(y, sigma)  # raises for a family without moments
        if family.location_scale:
            standard = torch.zeros(len(self.stated), device=y.device)
            moments = self._moments(standard, torch.ones_like(standard), family, NODES)
            shift, factor = (part.to(sigma) for part in moments)
            shift, factor = shift * sigma, factor.expand(y.shape)
        else:
            shift, stddev = (part.to(sigma) for part in self._moments(y, sigma, family, NODES_EACH))
            factor = torch.where(sigma > 0, stddev / sigma.where(sigma > 0, 1.0), 1.0)
        return (y + shift).to(y.dtype), Risk(**{n: risk[n] if n == "vacuitic" else risk[n] * factor for n in risk})

    def _moments(self, y: Tensor, sigma: Tensor, family: Distribution, nodes: int) -> tuple[Tensor, Tensor]:
        """Return mean (as a distance from y) and standard deviation, by integrating the quantiles over the probability.

        With q = w^2 (3 - 2 w) and equal steps in w, nodes are dense at both ends, where the quantiles are steep.
        """
        shift, square = torch.zeros_like(_to_float64(y)), torch.zeros_like(_to_float64(y))
        w = ((torch.arange(nodes, device=y.device) + 0.5) / nodes).to(shift.dtype)
        q, weight = w * w * (3 - 2 * w), 6 * w * (1 - w) / nodes
        for part in torch.arange(nodes, device=y.device).split(max(1, 2**20 // max(1, y.numel()))):
            distance = self._quantile(q[part], y, sigma, family) - _to_float64(y)
            shift = shift + torch.tensordot(weight[part], distance, 1)
            square = square + torch.tensordot(weight[part], distance.square(), 1)
        return shift, (square - shift.square()).clamp_min(0).sqrt()

    def cdf(self, x: Any, y: Tensor) -> Tensor:
        """Return the recalibrated probability of a target up to y, shaped like y.

        Args:
            x: the input, or a tuple of positional inputs.
            y: shaped like the prediction.
        """
        prediction, risk = self._ask(x, risk=True)
        family, sigma = distribution_of(self.wrapped), risk_named(risk, "total")
        u = family.cdf(_to_float64(y.to(prediction.device)), _to_float64(prediction), _to_float64(sigma))
        parts = u.unbind(-1) if len(self.stated) > 1 else (u,)
        mapped = [interpolate(part, *line) for part, line in zip(parts, zip(*self._lines(), strict=True), strict=True)]
        return (torch.stack(mapped, -1) if len(mapped) > 1 else mapped[0]).to(prediction)

    def quantile(self, x: Any, q: float) -> Tensor:
        """Return the q-quantile of the target, shaped like the prediction and in its units.

        Args:
            x: the input, or a tuple of positional inputs.
            q: probability, strictly between 0 and 1.
        """
        level("q", q)
        return self._quantiles(x, q)[0]

    def interval(self, x: Any, coverage: float = 0.9) -> tuple[Tensor, Tensor]:
        """Return the central interval of the recalibrated distribution.

        Its coverage is approximate, and lower with few held-out rows; use method="conformal" for a guarantee.

        Args:
            x: the input, or a tuple of positional inputs.
            coverage: probability inside, strictly between 0 and 1.

        Returns:
            (lower, upper), each shaped like the prediction and in its units, clipped to the support of the model's distribution.
        """
        level("coverage", coverage)
        lower, upper = self._quantiles(x, (1 - coverage) / 2, (1 + coverage) / 2)
        return clipped((lower, upper), self.support)

    def _quantiles(self, x: Any, *q: float) -> Tensor:
        y, risk = self._ask(x, risk=True)
        wanted = torch.tensor(q, dtype=wide_dtype(y), device=y.device)
        return self._quantile(wanted, y, risk_named(risk, "total"), distribution_of(self.wrapped)).to(y)


def _to_float64(tensor: Tensor) -> Tensor:
    """Return the tensor in float64, if its device supports it."""
    return tensor if tensor.device.type == "mps" else tensor.double()
