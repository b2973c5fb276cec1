"""Temperature of class scores and scale of standard deviations, fitted to a trained model."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from workbench.calibration.answers import (
    Answers,
    all_where_nan,
    check_known,
    check_labels,
    check_rows,
    check_values,
    level,
    log_probabilities,
    positive_total,
    risk_named,
)
from workbench.calibration.base import Calibrated
from workbench.calibration.models import as_given, class_scores, distribution_of, output_of
from workbench.calibration.support import buffer_of, clipped
from workbench.distributions import Distribution, Normal
from workbench.errors import check_flag, require
from workbench.metrics._inputs import family_of, numbers, predicted
from workbench.metrics._inputs import labels as class_numbers
from workbench.risk import Risk

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-2, 1e2


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the temperature T that minimizes the mean cross entropy of softmax(logits / T) (Guo et al. 2017).

    The loss is convex in 1 / T, so it has one minimum, which is searched between 0.01 and 100. T = 1 is kept unless another value is better, so
    that the loss on these rows never increases.

    Args:
        logits: [..., classes], log-probabilities up to a constant per row.
        labels: int64 [...].

    Raises:
        ValueError: there are no rows, a score is NaN or infinity (minus infinity excludes a class), a label is not a class, or its score is
            minus infinity, which no temperature can change.

    Example:
        >>> logits = torch.tensor([[4.0, 0.0]] * 4)
        >>> T = fit_temperature(logits, torch.tensor([0, 0, 0, 1]))
        >>> torch.softmax(logits[0] / T, -1)
        tensor([0.7500, 0.2500])
    """
    minimize_scalar = require("scipy.optimize").minimize_scalar
    checked = numbers("logits", logits, finite=False)
    if (bad := checked.isposinf() | checked.isneginf().all(-1, keepdim=True)).any():
        raise ValueError(
            f"logits has {int(bad.any(-1).sum())} rows with infinity, or with only minus infinity, of shape {tuple(checked.shape)}"
        )
    labels = class_numbers(labels, checked, "logits").cpu()
    scores = checked.detach().cpu().flatten(0, -2).log_softmax(-1)
    if (impossible := scores.gather(1, labels[:, None]).isneginf()).any():
        raise ValueError(
            f"the label has probability 0 in {int(impossible.sum())} of {len(labels)} rows, first in row {int(impossible.nonzero()[0, 0])}; "
            "no temperature changes that"
        )

    def loss(log_temperature: float) -> float:
        return nn.functional.cross_entropy(scores / math.exp(log_temperature), labels).item()

    optimum = minimize_scalar(
        loss, bounds=(math.log(MIN_TEMPERATURE), math.log(MAX_TEMPERATURE)), method="bounded", options={"xatol": 1e-7}
    )
    return math.exp(optimum.x) if optimum.fun < loss(0.0) else 1.0


def fit_variance_scale(
    prediction: Tensor,
    risk: Tensor,
    target: Tensor,
    distribution: Distribution | type[Distribution] = Normal,
    per_output: bool = False,
) -> Tensor:
    """Return the factor s that minimizes the negative log-likelihood of standard deviations s * risk.

    For Normal, s^2 = mean(((target - prediction) / risk)^2) (Levi et al. 2022); for other families, a one-dimensional search. s = 1 is kept
    if nothing is better, so that the loss on these rows never increases.

    Args:
        prediction: [..., outputs].
        risk: standard deviation > 0, shaped like prediction.
        target: shaped like prediction.
        distribution: family of the predicted distribution, class or instance.
        per_output: one factor per output (the last dimension) instead of one for all.

    Returns:
        float64, [outputs] or [].

    Raises:
        TypeError: per_output is not a bool.
        ValueError: shapes differ, a risk is not positive, or all predictions are exact (s would be 0).

    Example:
        >>> fit_variance_scale(torch.zeros(2, 1), torch.ones(2, 1), torch.tensor([[2.0], [-2.0]]))
        tensor(2., dtype=torch.float64)
    """
    values = predicted(prediction, risk, target, positive=True)
    family_of(distribution)
    check_flag("per_output", per_output)
    check_columns(per_output, values[0])
    if not per_output:
        return torch.tensor(_scale(*values, distribution), dtype=torch.float64)
    columns = zip(*(value.flatten(0, -2).unbind(-1) for value in values), strict=True)
    return torch.tensor([_scale(y, sigma, t, distribution) for y, sigma, t in columns], dtype=torch.float64)


def check_columns(per_output: bool, prediction: Tensor) -> None:
    """Raise if there is to be a number for each output, and the predictions have no dimension of outputs."""
    if per_output and prediction.ndim < 2:
        raise ValueError(f"per_output=True needs predictions [rows, outputs], found {tuple(prediction.shape)}")


def _scale(prediction: Tensor, risk: Tensor, target: Tensor, distribution: Distribution | type[Distribution]) -> float:
    z = ((target - prediction) / risk).abs()
    if not z.any():
        raise ValueError(
            f"the prediction is exact in all {z.numel()} held-out numbers, so that the best standard deviation is 0; give rows that the model "
            "was not trained on"
        )
    if distribution is Normal or isinstance(distribution, Normal):
        return z.square().mean().sqrt().item()
    minimize_scalar = require("scipy.optimize").minimize_scalar

    def loss(log_scale: float) -> float:
        return -distribution.log_prob(target, prediction, risk * math.exp(log_scale)).mean().item()

    # start at the median, since with heavy tails outliers dominate the mean square
    centre, step = math.log(z.median().item() or z.square().mean().sqrt().item()), 0.25
    best = min((centre + step * k for k in range(-32, 33)), key=loss)
    optimum = minimize_scalar(loss, bounds=(best - step, best + step), method="bounded", options={"xatol": 1e-8})
    return math.exp(optimum.x) if optimum.fun < loss(0.0) else 1.0


class TemperatureScaling(Calibrated):
    """Class scores divided by one temperature, fitted to held-out rows (Guo et al. 2017).

    p = softmax(log p / T), where p is the average probability if there are several voters or samples (pool, then calibrate: Rahaman & Thiery
    2021). The most probable class does not change. Predictions keep their form, logits or probabilities. A model wrapped with
    output="values" is assumed to return logits, and its risks, which are in units of the logits, are divided by T.

    Maps and tokens are calibrated over all pixels and tokens that have a class; class number -100 is ignored. A yes or no (`Binary`) has two
    classes, with logits 0 and that of the model; several labels share the temperature. `predict_set` returns no and yes in its last dimension.

    Risks of class outputs: total is the entropy of the new probabilities, in nats. The average does not determine each voter's prediction at
    another temperature, so aleatoric and epistemic keep their shares of the total (still `total == aleatoric + epistemic`); epistemic is then
    no longer a mutual information. Vacuitic risk does not change.

    Args:
        wrapped: a wrapped classifier.

    Example:
        >>> from workbench import vote
        >>> wrapped = vote.Wrapper(3, output="logits")(nn.Linear(2, 4))
        >>> held_out = torch.zeros(20, 2), torch.arange(20) % 4
        >>> calibrated = TemperatureScaling(wrapped).fit(held_out)
        >>> logits, risk = calibrated(torch.zeros(5, 2), return_risk=True)
        >>> torch.allclose(risk.total, torch.distributions.Categorical(logits=logits).entropy())
        True
    """

    needs_risk = False
    temperature: Tensor

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__(wrapped)
        self.register_buffer("temperature", torch.tensor(1.0))

    def _check(self, answers: Answers) -> None:
        check_labels(answers, "temperature scaling")
        require("scipy.optimize")

    def _fit(self, answers: Answers, seed: int) -> None:
        form = output_of(self.wrapped)
        check_known(answers)
        check_rows(answers, "temperature scaling")
        known = answers.known
        temperature = fit_temperature(log_probabilities(answers.y[known], form), answers.target[known])
        self.temperature = torch.tensor(temperature, dtype=answers.y.dtype, device=answers.y.device)

    def _adjusted(self, y: Any, risk: Risk) -> tuple[Any, Risk]:
        form = output_of(self.wrapped)
        wide = class_scores(self.wrapped, y)
        scores = (log_probabilities(wide, form) if form == "probs" else wide) / self.temperature
        if form == "values":
            return scores.to(y.dtype), Risk(
                **{n: risk[n] if n == "vacuitic" else risk[n] / self.temperature for n in risk}
            )
        new = {"vacuitic": risk.vacuitic}
        if risk.total is not None:
            log_p = scores.log_softmax(-1)
            new["total"] = torch.special.entr(log_p.exp()).sum(-1).reshape(risk.total.shape)
            share = torch.zeros_like(risk.total) if risk.epistemic is None else risk.epistemic / risk.total
            share = share.where(risk.total > 0, 0.0)
            new["aleatoric"] = new["total"] * (1 - share)
            new["epistemic"] = None if risk.epistemic is None else new["total"] * share
        return as_given(self.wrapped, scores.softmax(-1) if form == "probs" else scores, y), Risk(**new)

    def predict_set(self, x: Any, coverage: float = 0.9) -> Tensor:
        """Return the smallest set of classes whose probabilities sum to at least the coverage; use method="conformal" for a guarantee.

        Args:
            x: the input, or a tuple of positional inputs.
            coverage: desired probability that the set contains the true class, strictly between 0 and 1.

        Returns:
            bool [rows, ..., classes], with the classes last; all classes, with a warning, where the scores are NaN.
        """
        probability = float(level("coverage", coverage))
        probs = (
            log_probabilities(self._ask(x, risk=False)[0], output_of(self.wrapped)).div(self.temperature).softmax(-1)
        )
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        return all_where_nan(torch.zeros_like(probs, dtype=torch.bool).scatter(-1, order, before < probability), probs)


class VarianceScaling(Calibrated):
    """Standard deviations multiplied by one factor, fitted to held-out rows by maximum likelihood (Levi et al. 2022; Laves et al. 2020).

    The family is sculpt's (Normal without sculpt), with the total risk as standard deviation. Aleatoric, epistemic and total risk are all
    multiplied by the factor, so that still total**2 == aleatoric**2 + epistemic**2; predictions and vacuitic risk do not change.

    Args:
        wrapped: a wrapped model of values.
        per_output: one factor per output (the last dimension) instead of one for all.

    Example:
        >>> from workbench import sculpt
        >>> wrapped = sculpt.Wrapper()(nn.Linear(2, 1))
        >>> calibrated = VarianceScaling(wrapped).fit((torch.zeros(50, 2), torch.linspace(-9, 9, 50)[:, None]))
        >>> y, risk = calibrated(torch.zeros(4, 2), return_risk=True)
        >>> lower, upper = calibrated.interval(torch.zeros(4, 2), coverage=0.9)
        >>> torch.allclose(upper - lower, 2 * 1.64485 * risk)
        True
    """

    options = ("per_output",)
    new_buffers = ("support",)
    scale: Tensor
    support: Tensor

    def __init__(self, wrapped: nn.Module, per_output: bool = False) -> None:
        check_flag("per_output", per_output)
        super().__init__(wrapped)
        self.per_output = per_output
        self.register_buffer("scale", torch.tensor(1.0))
        self.register_buffer("support", torch.empty(0))

    def _check(self, answers: Answers) -> None:
        check_values(answers, "variance scaling")
        check_columns(self.per_output, answers.y)
        risk_named(answers.risk, "total")
        if not isinstance(distribution_of(self.wrapped), Normal):
            require("scipy.optimize")

    def _fit(self, answers: Answers, seed: int) -> None:
        check_rows(answers, "variance scaling")
        family, risk = distribution_of(self.wrapped), positive_total(answers.risk)
        self.scale = fit_variance_scale(answers.y, risk, answers.target, family, self.per_output).to(answers.y)
        self.support = buffer_of(answers.support, answers.target)

    def _adjusted(self, y: Any, risk: Risk) -> tuple[Any, Risk]:
        return y, Risk(**{n: risk[n] if n == "vacuitic" else risk[n] * self.scale for n in risk})

    def quantile(self, x: Any, q: float) -> Tensor:
        """Return the q-quantile of the target, shaped like the prediction and in its units.

        Args:
            x: the input, or a tuple of positional inputs.
            q: probability, strictly between 0 and 1.
        """
        level("q", q)
        y, risk = self._ask(x, risk=True)
        return distribution_of(self).icdf(q, y, risk_named(risk, "total") * self.scale)

    def interval(self, x: Any, coverage: float = 0.9) -> tuple[Tensor, Tensor]:
        """Return the central interval of the calibrated distribution.

        Its coverage is approximate, and lower with few held-out rows; use method="conformal" for a guarantee.

        Args:
            x: the input, or a tuple of positional inputs.
            coverage: probability inside, strictly between 0 and 1.

        Returns:
            (lower, upper), each shaped like the prediction and in its units, clipped to the support of the model's distribution.
        """
        level("coverage", coverage)
        y, risk = self._ask(x, risk=True)
        family, sigma = distribution_of(self), risk_named(risk, "total") * self.scale
        ends = family.icdf((1 - coverage) / 2, y, sigma), family.icdf((1 + coverage) / 2, y, sigma)
        return clipped(ends, self.support)
