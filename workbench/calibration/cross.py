"""CV+ intervals for cross-fitted models, from the errors of voters on rows that they have not seen."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from workbench.calibration.answers import Answers, level
from workbench.calibration.base import Calibrated
from workbench.calibration.support import buffer_of, clipped, outward, support_of
from workbench.core.crossfit import committee_of
from workbench.core.fitted_weights import FittedWeights
from workbench.core.members import predictive
from workbench.core.method import evaluating
from workbench.core.outputs.class_scores import at_least_float32
from workbench.core.saving.training_data import today
from workbench.distributions.base import wide_dtype
from workbench.errors import NotFittedError
from workbench.metrics._inputs import numbers
from workbench.training.history import History, OutOfFold

MAX_NUMBERS = 20_000_000  # numbers held in memory at once


def cv_plus(loc: Tensor, scale: Tensor, scores: Tensor, fold: Tensor, coverage: float) -> tuple[Tensor, Tensor]:
    """Return intervals that contain at least 2 coverage - 1 - sqrt(2 / n) of new targets for any distribution, in practice about `coverage`.

    The ends are quantiles over the training rows i of loc_k(i)(x) -+ score_i scale_k(i)(x), where k(i) are the voters that have not seen row i
    (Barber et al. 2021, CV+, for folds of equal size; with one row per fold the jackknife+, without sqrt(2 / n); scores divided by a risk as in
    Papadopoulos et al. 2002).

    Args:
        loc: [folds, m, ...], predictions of new rows by the voters that have not seen a fold.
        scale: the same for the risk that scores were divided by; ones without.
        scores: [n, ...], |y - loc| / scale of each training row by the voters that have not seen it.
        fold: int64 [n], the fold of each training row.
        coverage: above 0 and below 1.

    Returns:
        (lower, upper), each [m, ...], in the units of loc; infinite if there are too few rows.

    Raises:
        ValueError: shapes do not match, there are no rows, a number is NaN or infinite, a scale or score is negative, or a fold is missing in
            loc.

    Example:
        >>> low, high = cv_plus(torch.zeros(2, 1), torch.ones(2, 1), torch.arange(1.0, 20.0), torch.arange(19) % 2, 0.9)
        >>> low, high
        (tensor([-18.]), tensor([18.]))
    """
    _check(loc, scale, scores, fold)
    n = len(scores)
    rank = math.ceil(level("coverage", coverage) * (n + 1))
    if rank > n:
        infinite = torch.full_like(loc[0], math.inf)
        return -infinite, infinite
    if (wide := at_least_float32(loc)) is not loc:
        return outward(cv_plus(wide, at_least_float32(scale), at_least_float32(scores), fold, coverage), loc.dtype)
    lower, upper = [], []
    for start in range(0, loc.shape[1], max(1, MAX_NUMBERS // max(1, n * loc[0, :1].numel()))):
        part = slice(start, start + max(1, MAX_NUMBERS // max(1, n * loc[0, :1].numel())))
        middle, margin = loc[:, part][fold], scores[:, None] * scale[:, part][fold]
        lower.append((middle - margin).kthvalue(n + 1 - rank, 0).values)
        upper.append((middle + margin).kthvalue(rank, 0).values)
    return torch.cat(lower), torch.cat(upper)


def _check(loc: Tensor, scale: Tensor, scores: Tensor, fold: Tensor) -> None:
    for name, value in (("loc", loc), ("scale", scale), ("scores", scores), ("fold", fold)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, found {type(value).__name__}")
        if (numbers(name, value) < 0).any() and value is not loc:
            raise ValueError(f"{name} must be >= 0, found {value.min().item():g} (shape {tuple(value.shape)})")
    fits = (
        loc.ndim >= 2 and loc.shape == scale.shape and scores.shape[1:] == loc.shape[2:] and scores.ndim == loc.ndim - 1
    )
    if not fits or fold.shape != scores.shape[:1]:
        raise ValueError(
            "loc and scale must be [folds, m, ...], scores [n, ...] and fold [n]; found "
            f"{tuple(loc.shape)}, {tuple(scale.shape)}, {tuple(scores.shape)} and {tuple(fold.shape)}"
        )
    if fold.dtype != torch.int64 or int(fold.max()) >= len(loc):
        raise ValueError(f"fold must be int64 and below {len(loc)}, found {fold.dtype} up to {fold.max().item():g}")


class CrossConformal(Calibrated):
    """CV+ intervals for a cross-fitted model, from the out-of-fold predictions of its voters, so that no rows are held out.

    They contain at least 2 coverage - 1 - sqrt(2 / n) of new targets if the n rows are exchangeable, for any distribution, and in practice
    about `coverage` of them (Barber et al. 2021). The proof does not cover what `fit` takes from all rows: the standardization, and the epoch
    and the weights of several settings, which are chosen by the same out-of-fold predictions.

    Args:
        wrapped: a model trained by `fit(..., folds=)`.
        score: "normalized", |y - prediction| / total risk, so that intervals are wide where the risk is high; or "absolute".

    Example:
        >>> from workbench import compose, fit, sculpt, vote
        >>> x = torch.linspace(0, 1, 60)[:, None]
        >>> wrapped = compose(vote.Wrapper(2), sculpt.Wrapper(n_layers=1))(nn.Linear(1, 1))
        >>> history = fit(wrapped, (x, x.sin()), folds=2, epochs=2)
        >>> lower, upper = CrossConformal(wrapped).fit(history).interval(x, coverage=0.9)
        >>> bool((lower < upper).all())
        True
    """

    options = ("score",)
    new_buffers = ("support",)

    scores: Tensor
    fold: Tensor
    support: Tensor

    def __init__(self, wrapped: nn.Module, score: str = "normalized") -> None:
        if score not in ("normalized", "absolute"):
            raise ValueError(f"score must be 'normalized' or 'absolute'; found {score!r}")
        super().__init__(wrapped)
        if committee_of(wrapped) is None:
            raise ValueError("the model was not cross-fitted: train it with workbench.fit(wrapped, data, folds=5)")
        self.score = score
        self.register_buffer("scores", torch.empty(0))
        self.register_buffer("fold", torch.empty(0, dtype=torch.int64))
        self.register_buffer("support", torch.empty(0))

    def fit(self, data: Any, *, batch_size: int = 1024, seed: int = 0) -> CrossConformal:
        """Set the scores from the out-of-fold predictions.

        Args:
            data: the `History` of the training, or its `out_of_fold`.
            batch_size, seed: not used.

        Returns:
            The object itself.
        """
        out_of_fold = data.out_of_fold if isinstance(data, History) else data
        if not isinstance(out_of_fold, OutOfFold):
            raise TypeError(
                f"data: found {type(data).__name__} without out-of-fold predictions; give the history of workbench.fit(..., folds=5)"
            )
        weights = FittedWeights(self.wrapped) if out_of_fold.weights is None else copy.copy(out_of_fold.weights)
        if name := weights.changed(self.wrapped):
            raise ValueError(
                f"data: this history is of another training, since the weights of the model have changed, such as {name}. Give the history of "
                "its last training, with folds="
            )
        if not out_of_fold.target.is_floating_point():
            raise ValueError(
                "CV+ intervals are for values, but the targets are class numbers; calibrate with held-out rows"
            )
        prediction = at_least_float32(out_of_fold.prediction)
        risk = torch.ones_like(prediction) if self.score == "absolute" else at_least_float32(out_of_fold.risk.total)
        device = next(self.wrapped.parameters()).device
        self.scores = ((out_of_fold.target - prediction).abs() / risk).detach().to(device)
        self.fold = out_of_fold.fold.to(device)
        self.support = buffer_of(support_of(self.wrapped, (), {}), out_of_fold.target).to(device)
        self.fitted_on = {"name": "rows out of fold of the training", "rows": len(self.fold), "date": today()}
        self.weights = weights
        return self

    def _fit(self, answers: Answers, seed: int) -> None:
        raise TypeError("CV+ needs the history of a training")

    def interval(self, x: Any, coverage: float = 0.9) -> tuple[Tensor, Tensor]:
        """Return lower and upper ends, each shaped like the prediction and in its units.

        Args:
            x: the input, or a tuple of positional inputs.
            coverage: desired share of new targets inside, strictly between 0 and 1.
        """
        if not self.scores.numel():
            raise NotFittedError("calibrate first: .fit(history)")
        probability, n = level("coverage", coverage), len(self.scores)
        if math.ceil(probability * (n + 1)) > n:
            raise ValueError(
                f"coverage {coverage:g} needs at least {math.ceil(probability / (1 - probability))} rows, there are {n}"
            )
        committee = committee_of(self.wrapped)
        assert committee is not None
        self.warn_if_trained()
        with evaluating(self.wrapped, whole=True), torch.no_grad():
            mixture = predictive(self.wrapped, x if isinstance(x, tuple) else (x,), {})
        voters = len(committee.fold)
        # in float64: squares of tiny or huge risks leave the range of float32
        loc, risk = (t.to(wide_dtype(t)).unflatten(0, (voters, -1)) for t in (mixture.loc, mixture.risk))
        weights = mixture.weights.to(loc).reshape(voters, -1, *[1] * (loc.dim() - 2))
        middles, spreads = [], []
        for k in range(int(committee.fold.max()) + 1):
            in_fold = committee.fold == k
            share = weights[in_fold] / weights[in_fold].sum()
            middles.append((share * loc[in_fold]).sum((0, 1)))
            deviation = (loc[in_fold] - middles[-1]).square()
            spreads.append((share * (risk[in_fold].square() + deviation)).sum((0, 1)).sqrt())
        middle, spread = torch.stack(middles), torch.stack(spreads)
        if self.score == "absolute":
            spread = torch.ones_like(spread)
        ends = outward(cv_plus(middle, spread, self.scores, self.fold, coverage), mixture.loc.dtype)
        return clipped(ends, self.support)
