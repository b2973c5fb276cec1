"""Recalibrated quantiles: probabilities that a model states are replaced by the shares that were observed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from workbench.calibration.base import (
    Answers,
    Calibrated,
    check_values,
    distribution_of,
    level,
    risk_named,
)
from workbench.distributions import Distribution
from workbench.metrics.regression import pit
from workbench.risk import Risk

NODES = 4096  # of the integrals over the quantiles of a standard distribution
NODES_EACH = 256  # the same where every number needs integrals of its own


def fit_recalibration(u: Tensor) -> tuple[Tensor, Tensor]:
    """The monotone map from stated probability to observed share, as a broken line (Kuleshov et al. 2018).

    Isotonic regression of the share of targets up to each one, i / (n + 1), on what the model states for it, through (0, 0) and (1, 1).

    Args:
        u: [n], the predicted cdf at each target.

    Returns:
        (stated, observed), float64 [knots], both rising.

    Example:
        >>> fit_recalibration(torch.tensor([0.4, 0.5, 0.6]))[1]
        tensor([0.0000, 0.2500, 0.5000, 0.7500, 1.0000], dtype=torch.float64)
    """
    import numpy as np
    from sklearn.isotonic import IsotonicRegression

    stated = np.sort(u.detach().cpu().double().numpy())
    observed = np.arange(1, len(stated) + 1) / (len(stated) + 1)
    line = IsotonicRegression(y_min=0, y_max=1).fit(np.r_[0, stated, 1], np.r_[0, observed, 1])
    return torch.as_tensor(line.X_thresholds_).double(), torch.as_tensor(line.y_thresholds_).double()


def broken_line(at: Tensor, knots: Tensor, heights: Tensor) -> Tensor:
    """Linear interpolation [...] between rising knots [k] and heights [k]; the end heights beyond them."""
    at = at.clamp(knots[0], knots[-1])
    right = torch.searchsorted(knots, at.contiguous()).clamp(1, len(knots) - 1)
    left = right - 1
    width = knots[right] - knots[left]
    share = torch.where(width > 0, (at - knots[left]) / width.where(width > 0, 1.0), 1.0)
    return heights[left] + share * (heights[right] - heights[left])


class QuantileRecalibration(Calibrated):
    """Predicted distributions with quantiles that hold on held-out rows, by isotonic regression (Kuleshov et al. 2018).

    With F the predicted cdf (of sculpt's family, Normal without sculpt, with the total risk) and R the map from stated probability to observed
    share, the new cdf is R(F(y)) and the new quantile F^-1(R^-1(q)). The prediction becomes the mean of the new distribution, and total risk
    its standard deviation; aleatoric and epistemic risk are multiplied by the same factor, so that variances still add. Vacuitic risk stays.

    Args:
        wrapped: what a wrapper made of a model of values.
        per_output: one map for each output (the last dimension) in place of one for all.

    Example:
        >>> from workbench import sculpt
        >>> wrapped = sculpt.Wrapper()(nn.Linear(2, 1))
        >>> calibrated = QuantileRecalibration(wrapped).fit((torch.zeros(99, 2), torch.linspace(-9, 9, 99)[:, None]))
        >>> calibrated.cdf(torch.zeros(1, 2), torch.tensor([[0.0]])).round(decimals=4)
        tensor([[0.5000]])
    """

    moves_prediction = True
    keeps_family = False
    stated: Tensor
    observed: Tensor

    def __init__(self, wrapped: nn.Module, per_output: bool = False) -> None:
        super().__init__(wrapped)
        self.per_output = per_output
        for name in ("stated", "observed"):  # the identity, as long as nothing is fitted
            self.register_buffer(name, torch.tensor([[0.0, 1.0]]))

    def _fit(self, answers: Answers, seed: int) -> None:
        check_values(answers, "recalibration of quantiles")
        u = pit(answers.y, risk_named(answers.risk, "total"), answers.target, distribution_of(self.wrapped))
        columns = u.flatten(0, -2).unbind(-1) if self.per_output else (u.flatten(),)
        lines = [fit_recalibration(column) for column in columns]
        most = max(len(stated) for stated, _ in lines)
        # rows of one length: the last knot, (1, 1), is repeated
        stated, observed = (
            torch.stack([torch.cat([line, line[-1:].expand(most - len(line))]) for line in part])
            for part in zip(*lines, strict=True)
        )
        self.stated, self.observed = stated.to(answers.y), observed.to(answers.y)

    def _mapped(self, probability: Tensor, knots: Tensor, heights: Tensor) -> Tensor:
        """Map probabilities [..., outputs] (any shape if there is one map for all)."""
        if len(knots) == 1:
            return broken_line(probability, knots[0], heights[0])
        parts = zip(probability.unbind(-1), knots, heights, strict=True)
        return torch.stack([broken_line(*part) for part in parts], -1)

    def _quantile(self, q: float, y: Tensor, sigma: Tensor, family: Distribution) -> Tensor:
        wanted = torch.full((len(self.stated),), q, dtype=self.stated.dtype, device=self.stated.device)
        stated = self._mapped(wanted, self.observed, self.stated)
        return family.icdf(stated.to(y).expand(y.shape) if len(stated) > 1 else stated.to(y), y, sigma)

    def _adjusted(self, y: Any, risk: Risk) -> tuple[Any, Risk]:
        family, sigma = distribution_of(self.wrapped), risk_named(risk, "total")
        family.stddev(y, sigma)  # a family without moments says so
        if family.location_scale:
            standard = torch.zeros(len(self.stated), dtype=self.stated.dtype, device=self.stated.device)
            mean, stddev = self._moments(standard, torch.ones_like(standard), family, NODES)
            mean, stddev = (y + mean.to(y) * sigma), stddev.to(y) * sigma
        else:
            mean, stddev = self._moments(y, sigma, family, NODES_EACH)
        factor = torch.where(sigma > 0, stddev / sigma.where(sigma > 0, 1.0), 0.0)
        return mean, Risk(**{n: risk[n] if n == "vacuitic" else risk[n] * factor for n in risk})

    def _moments(self, y: Tensor, sigma: Tensor, family: Distribution, nodes: int) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation as integrals of the quantiles over q = w^2 (3 - 2 w), whose nodes crowd where they are steep."""
        w = (torch.arange(nodes, dtype=torch.float64) + 0.5) / nodes
        first, second = torch.zeros_like(y), torch.zeros_like(y)
        for q, weight in zip((w * w * (3 - 2 * w)).tolist(), (6 * w * (1 - w) / nodes).tolist(), strict=True):
            away = self._quantile(q, y, sigma, family) - y
            first, second = first + weight * away, second + weight * away.square()
        return y + first, (second - first.square()).clamp_min(0).sqrt()

    def cdf(self, x: Any, y: Tensor) -> Tensor:
        """The recalibrated probability of a target up to y, shaped like y.

        Args:
            x: the input, or a tuple of positional inputs.
            y: shaped like the prediction.
        """
        prediction, risk = self._ask(x, risk=True)
        stated = distribution_of(self.wrapped).cdf(y, prediction, risk_named(risk, "total"))
        return self._mapped(stated.to(self.stated), self.stated, self.observed)

    def quantile(self, x: Any, q: float) -> Tensor:
        """The value that the target stays below with probability q, shaped like the prediction and in its units.

        Args:
            x: the input, or a tuple of positional inputs.
            q: probability, strictly between 0 and 1.
        """
        level("q", q)
        y, risk = self._ask(x, risk=True)
        return self._quantile(q, y, risk_named(risk, "total"), distribution_of(self.wrapped))

    def interval(self, x: Any, coverage: float = 0.9) -> tuple[Tensor, Tensor]:
        """The central interval of the recalibrated distribution.

        Args:
            x: the input, or a tuple of positional inputs.
            coverage: probability inside, strictly between 0 and 1.

        Returns:
            (lower, upper), each shaped like the prediction and in its units.
        """
        level("coverage", coverage)
        y, risk = self._ask(x, risk=True)
        sigma, family = risk_named(risk, "total"), distribution_of(self.wrapped)
        return tuple(self._quantile(q, y, sigma, family) for q in ((1 - coverage) / 2, (1 + coverage) / 2))  # type: ignore[return-value]
