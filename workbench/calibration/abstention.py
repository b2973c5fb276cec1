"""Decisions by risk: answer where it is low and abstain elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from workbench.calibration.answers import Answers, check_known, check_labels, check_values, level
from workbench.calibration.collection import collect
from workbench.calibration.models import (
    check_model,
    check_targets,
    class_scores,
    named_risks,
    output_name,
    output_of,
    risks_at,
)
from workbench.calibration.one_output import pick
from workbench.calibration.ranked_rows import check_by, check_confidence, position_risk, row_risk
from workbench.calibration.staleness import FitsWeights
from workbench.core.batches.call_arguments import answering
from workbench.core.batches.rows import first_weight
from workbench.core.fitted_weights import FittedWeights
from workbench.core.method import evaluating
from workbench.core.outputs.class_scores import at_least_float32
from workbench.core.saving.save_pretrained import SavesPretrained
from workbench.core.saving.training_data import Facts
from workbench.distributions.base import common_dtype
from workbench.errors import require
from workbench.metrics._inputs import numbers
from workbench.metrics.selective import RiskCoverageCurve, ranked, risk_coverage_curve

LEVELS = 25  # number of coverages whose bounds hold simultaneously


Per = Literal["row", "position"]


class Decision(NamedTuple):
    """Prediction for each row, whether it is kept, and the risk that decided: bool and numbers [rows], or [rows, ...] for positions."""

    prediction: Any
    kept: Tensor
    risk: Tensor


def upper_bound(errors: Tensor, confidence: float = 0.95, max_error: float = 1.0) -> float:
    """Return an upper confidence bound for the expected error, from the errors of independent rows.

    Errors of 0 or 1: Clopper & Pearson (1934), exact: the (1 - delta) quantile of Beta(k + 1, n - k) with k wrong of n and delta = 1 -
    confidence. Errors between 0 and max_error: mean + max_error * sqrt(log(1 / delta) / (2 n)) (Hoeffding 1963), at most max_error.

    Args:
        errors: [n], n >= 1, between 0 and max_error.
        confidence: probability that the bound holds, strictly between 0 and 1.
        max_error: largest possible error.

    Example:
        >>> round(upper_bound(torch.zeros(59), 0.95), 4)
        0.0495
    """
    level("confidence", confidence)
    largest = numbers("max_error", max_error)
    if largest.numel() != 1 or not largest > 0:
        raise ValueError(f"max_error must be a number above 0; found {max_error!r:.100}")
    max_error = largest.item()
    errors = numbers("errors", errors).detach().cpu()
    if errors.ndim != 1 or bool(((errors < 0) | (errors > max_error)).any()):
        raise ValueError(
            f"errors must be numbers between 0 and max_error={max_error:g}, at least one; found {_range(errors)} of shape {list(errors.shape)}"
        )
    n, total = len(errors), errors.sum().item()
    return _bound(total, n, 1 - confidence, max_error, binary=max_error == 1 and _binary(errors))


def _range(values: Tensor) -> str:
    return f"{values.min().item():g} to {values.max().item():g}" if values.numel() else "none"


def _binary(errors: Tensor) -> bool:
    return bool(((errors == 0) | (errors == 1)).all())


def _bound(total: float, n: int, delta: float, max_error: float, binary: bool) -> float:
    if n < 1 or total >= n * max_error:
        return max_error
    if not binary:
        return min(max_error, total / n + max_error * math.sqrt(math.log(1 / delta) / (2 * n)))
    return float(require("scipy.special").betaincinv(total + 1, n - total, 1 - delta))


class SelectivePredictor(SavesPretrained, FitsWeights):
    """A model that abstains: it answers the rows, or positions, whose risk is at most a threshold.

    Args:
        wrapped: a wrapped or calibrated model.
        by: the risk that decides.
        threshold: highest risk that is answered.
        per: "row" to answer or reject whole rows, "position" to decide for each pixel, token or number.

    Example:
        >>> from workbench import vote
        >>> predictor = SelectivePredictor(vote.Wrapper(3)(nn.Linear(2, 1)), "epistemic", threshold=0.5)
        >>> y, kept, risk = predictor(torch.zeros(4, 2))
        >>> torch.equal(kept, risk <= 0.5)
        True
    """

    threshold: Tensor
    # facts about the rows that the threshold was chosen on, if known
    fitted_on: Facts | None = None
    refit = "its threshold was chosen", "its answers", "Choose it again"

    def __init__(self, wrapped: nn.Module, by: str, threshold: float | Tensor, per: Per = "row") -> None:
        super().__init__()
        check_model(wrapped)
        check_by(by, per)
        self.wrapped, self.by, self.per = wrapped, by, per
        # in the dtype of the risks: rounded down, a threshold would reject the row that it is the risk of
        dtype = None if isinstance(threshold, Tensor) else common_dtype(first_weight(wrapped))
        self.register_buffer("threshold", torch.as_tensor(threshold, dtype=dtype).detach().clone())
        self.training = wrapped.training

    def forward(self, *args: Any, **kwargs: Any) -> Decision:
        """Return each row's prediction, whether it is kept, and the risk that decided: bool and numbers [rows], or [rows, ...] for positions.

        Args:
            args, kwargs: as for the model.
        """
        if "return_risk" in kwargs:
            raise TypeError(
                "return_risk: a predictor that abstains always returns the risk that decided, prediction, kept, risk = predictor(x); all risks "
                "are those of predictor.wrapped(x, return_risk=True)"
            )
        self.warn_if_trained()
        with evaluating(self.wrapped, whole=True):
            y, raw_risk = answering(self.wrapped)(*args, return_risk=True, **kwargs)
        name = output_name(self.wrapped, y)
        risks = risks_at(named_risks(self.wrapped, raw_risk), name).map(at_least_float32)
        part = pick(y, name)
        scores = class_scores(self.wrapped, part) if self.by == "confidence" else part
        risk_of = row_risk if self.per == "row" else position_risk
        risk = risk_of(scores, risks, self.by, output_of(self.wrapped))
        return Decision(y, risk <= self.threshold, risk)

    def arguments(self) -> tuple[dict[str, Any], list[str]]:
        """Return the JSON-serializable arguments besides the model, and the names of those that are functions: none."""
        return {"by": self.by, "threshold": self.threshold.item(), "per": self.per}, []

    def extra_repr(self) -> str:
        per = "" if self.per == "row" else f", per={self.per!r}"
        return f"by={self.by!r}, threshold={self.threshold.item():.6g}{per}"


class Selective:
    """Error of the remaining rows when the rows of highest risk are rejected; see `selective`.

    Args:
        wrapped: the model.
        by: the risk that decides.
        risk: risks of held-out rows (or positions) [n].
        error: errors of the same rows [n], >= 0.
        per: unit of the decision, "row" or "position".
        facts: facts about the rows, if known, as from `facts_of`.
    """

    def __init__(
        self, wrapped: nn.Module, by: str, risk: Tensor, error: Tensor, per: Per = "row", facts: Facts | None = None
    ) -> None:
        ranked(risk, error)  # checks them
        order = risk.argsort(stable=True)
        self.wrapped, self.by, self.risk, self.error, self.per = wrapped, by, risk[order], error[order], per
        self.facts, self.weights = facts, FittedWeights(wrapped)

    @property
    def curve(self) -> RiskCoverageCurve:
        """Share of answered rows, and their mean error, each float64 [n]; see `workbench.metrics.risk_coverage_curve`."""
        return risk_coverage_curve(self.risk, self.error)

    def threshold(
        self,
        *,
        coverage: float | None = None,
        risk: float | None = None,
        confidence: float | None = None,
        max_error: float | None = None,
    ) -> float:
        """Return the highest risk to answer, for a desired share of answered rows or an acceptable error.

        Without `confidence`, the error holds only on the held-out rows; on new ones it is higher, the fewer were held out. With it, the
        expected error of the answered rows is at most `risk`, with that probability over the draw of the held-out rows. For this,
        simultaneous upper bounds (Bonferroni) are computed at 25 fixed coverages, and the highest coverage whose bound is low enough is taken
        (after Geifman & El-Yaniv 2017, who search for it). The bound is exact for errors of 0 or 1 (Clopper & Pearson), Hoeffding's for
        others. New rows must be drawn like the held-out ones, and risks must differ between rows.

        Args:
            coverage: share of the held-out rows to answer, above 0 and at most 1; of new ones it is slightly less on average.
            risk: acceptable mean error of the answered rows, in units of the error. Give either this or coverage.
            confidence: probability that the error holds for new rows, such as 0.95.
            max_error: largest possible error; required with confidence, except that it is taken to be 1 if all held-out errors are 0 or 1.

        Returns:
            The threshold, in units of the risk that decides.

        Raises:
            ValueError: neither or both are given, no threshold reaches such a low error, or confidence is given for positions, which are not
                independent within a row.
        """
        if confidence is not None and self.per == "position":
            raise ValueError(
                "confidence: the bound needs independent rows, and the positions of a row are not; leave confidence out, or use per='row'"
            )
        if (coverage is None) == (risk is None):
            raise ValueError("give either coverage (share of rows to answer) or risk (acceptable error)")
        n = len(self.risk)
        if coverage is not None:
            try:
                is_share = bool(0 < coverage <= 1)
            except (TypeError, ValueError, RuntimeError):  # no number, or several
                is_share = False
            if not is_share:
                raise ValueError(f"coverage must lie above 0 and at most at 1; found {coverage!r:.100}")
            if confidence is not None:
                raise ValueError(
                    "confidence needs risk=, an acceptable error; a coverage alone makes no promise about it"
                )
            return self.risk[math.ceil(Fraction(repr(float(coverage))) * n) - 1].item()
        acceptable_error = numbers("risk", risk)
        if acceptable_error.numel() != 1:
            raise ValueError(f"risk must be one number; found {risk!r:.100}")
        risk = acceptable_error.item()
        total, is_last = self.error.double().cumsum(0), self._last_of_equal()
        if confidence is None:
            acceptable = (total / torch.arange(1, n + 1, device=total.device) <= risk) & is_last
            if not acceptable.any():
                raise ValueError(f"no threshold has an error of {risk:g}; the lowest is {self._lowest_error():.4g}")
            return self.risk[acceptable.nonzero()[-1, 0]].item()
        delta = float(1 - level("confidence", confidence)) / LEVELS
        binary = _binary(self.error) and max_error in (None, 1)
        if not binary and max_error is None:
            raise ValueError("errors are not 0 or 1, so that a bound needs the largest possible error: give max_error=")
        largest_error = 1.0 if max_error is None else float(max_error)
        if self.error.max() > largest_error:
            raise ValueError(f"max_error={largest_error:g}, but errors go up to {self.error.max().item():g}")
        threshold, lowest_bound = None, largest_error
        for rank in sorted({math.ceil(n * k / LEVELS) for k in range(1, LEVELS + 1)}):
            n_answered = int((self.risk <= self.risk[rank - 1]).sum())
            # the threshold is the risk of a row; given the threshold, only the other rows are independent of it
            bound = _bound(total[n_answered - 1].item(), n_answered - 1, delta, largest_error, binary)
            lowest_bound = min(lowest_bound, bound)
            if bound <= risk:
                threshold = self.risk[n_answered - 1].item()
        if threshold is None:
            raise ValueError(
                f"no threshold guarantees an error of at most {risk:g} with confidence {confidence:g} on {n} held-out rows; the lowest "
                f"bound is {lowest_bound:.4g}: hold out more rows, or accept a larger error"
            )
        return threshold

    def _last_of_equal(self) -> Tensor:
        """Return a mask of the rows that are the last of those with equal risk: a threshold accepts all of them or none."""
        return torch.cat([self.risk[1:] > self.risk[:-1], torch.ones_like(self.risk[:1], dtype=torch.bool)])

    def _lowest_error(self) -> float:
        rows = torch.arange(1, len(self.error) + 1).to(self.error)
        return (self.error.double().cumsum(0) / rows)[self._last_of_equal()].min().item()

    def predictor(self, threshold: float | None = None, **wanted: Any) -> SelectivePredictor:
        """Return the model that abstains above a threshold.

        Args:
            threshold: highest risk to answer; None: `threshold(**wanted)`.
            wanted: coverage, or risk with confidence and max_error, as for `threshold`.
        """
        if threshold is not None and wanted:
            raise ValueError(f"give a threshold or {', '.join(wanted)}, not both")
        chosen = self.threshold(**wanted) if threshold is None else threshold
        at = torch.tensor(chosen, dtype=self.risk.dtype, device=self.risk.device)
        predictor = SelectivePredictor(self.wrapped, self.by, at, self.per)
        if threshold is None:
            predictor.fitted_on, predictor.weights = self.facts, self.weights
        return predictor

    def __repr__(self) -> str:
        return f"Selective(by={self.by!r}, {len(self.risk)} held-out {self.per}s, error {self.error.double().mean():.4g} if all are answered)"


def selective(
    wrapped: Any,
    data: Any,
    by: str = "total",
    *,
    error: Callable[[Tensor, Tensor], Tensor] | None = None,
    per: Per = "row",
    batch_size: int = 1024,
    seed: int = 0,
) -> Selective:
    """Measure on held-out rows what is gained by answering only where the risk is low (El-Yaniv & Wiener 2010).

    Args:
        wrapped: a model wrapped by one of the wrappers, or a calibrated model.
        data: a pair (x, y), a Split, a Dataset or a DataLoader of rows that the model was not trained on.
        by: the risk that decides: "total", "aleatoric", "epistemic" or "vacuitic"; or "confidence", 1 - the highest class probability. For
            several outputs, pixels or tokens, the root mean square over all of them counts: new rows have no targets to tell which have a
            class. Outputs of different units are not scaled: the one with the largest numbers decides, so select one or scale them first.
        error: error(prediction, target) -> [rows], >= 0 (for positions: shaped like the risk), with the classes of predictions last (of
            `Binary` no and yes); None: 1 for a wrong class and 0 for the right one, or the absolute error of values, averaged over each row.
        per: "row" answers or rejects whole rows; "position" each pixel, token or number. Class numbers of -100 have no error: such
            positions are ignored, and so are rows without any others.
        batch_size: rows per call of the model.
        seed: seed of the model's random draws; the global random state is not touched.

    Returns:
        An object with `curve`, `threshold(coverage=0.8)` or `threshold(risk=0.05, confidence=0.95)`, and `predictor(...)`.

    Raises:
        ValueError: the model does not measure this risk, or the rows are not valid.

    Example:
        >>> from workbench import compose, sculpt, vote
        >>> wrapped = compose(vote.Wrapper(3), sculpt.Wrapper())(nn.Linear(2, 1))
        >>> x = torch.linspace(-3, 3, 40)[:, None] * torch.ones(1, 2)
        >>> chosen = selective(wrapped, (x, x[:, :1] ** 2))
        >>> y, kept, risk = chosen.predictor(coverage=0.5)(x)
        >>> int(kept.sum())
        20
    """
    check_by(by, per)
    if by == "confidence":
        check_confidence(wrapped)
    if error is not None and not callable(error):
        raise TypeError(f"error must be a function error(prediction, target); found {error!r:.100}")
    risk_of = row_risk if per == "row" else position_risk

    def check(answers: Answers) -> None:
        risk = risk_of(answers.y, answers.risk, by, output_of(wrapped))
        if error is None:
            check_targets(wrapped, answers)
            _check_errors(answers, risk, by, per)

    answers = collect(wrapped, data, risk=by != "confidence", batch_size=batch_size, seed=seed, check=check)
    risk = risk_of(answers.y, answers.risk, by, output_of(wrapped))
    is_counted = torch.ones_like(risk, dtype=torch.bool)
    if error is not None:
        errors = error(answers.y, answers.target)
        if not isinstance(errors, Tensor) or errors.shape != risk.shape:
            shape = list(errors.shape) if isinstance(errors, Tensor) else type(errors).__name__
            raise ValueError(
                f"error must give one number for each of {len(risk)} rows, {list(risk.shape)}; it gave {shape}"
                if per == "row"
                else f"error must give one number for each position, {list(risk.shape)}; it gave {shape}"
            )
        if answers.labels and answers.target.shape == risk.shape:
            is_counted = answers.known
    else:
        errors, weight = _errors(answers)
        if per == "row":
            errors, weight = (value.reshape(len(risk), -1) for value in (errors, weight))
            count = weight.sum(1)
            errors, is_counted = (errors * weight).sum(1) / count.clamp_min(1), count > 0
        else:
            is_counted = weight > 0
    return Selective(wrapped, by, risk[is_counted], errors[is_counted], per, answers.facts)


def _check_errors(answers: Answers, risk: Tensor, by: str, per: Per) -> None:
    """Raise unless the targets have errors, of single positions if these are to be decided on."""
    if answers.labels:
        check_labels(answers, "a selective classifier")
    else:
        check_values(answers, "a selective regression")
    if per == "position" and answers.target.shape != risk.shape:
        raise ValueError(
            f"per='position': the {by} risk has shape {list(risk.shape)}, and the targets {list(answers.target.shape)}; there is no risk of "
            "single positions: use per='row'"
            + (", or wrap with neo.Wrapper(per='position')" if by == "vacuitic" else "")
        )


def _errors(answers: Answers) -> tuple[Tensor, Tensor]:
    """Return the error of each class number or value, and its weight: 1, or 0 for targets without a class."""
    if answers.labels:
        check_known(answers)
        return (answers.y.argmax(-1) != answers.target).to(answers.y), answers.known.to(answers.y)
    errors = (answers.y - answers.target).abs()
    return errors, torch.ones_like(errors)
