"""Conformal quantiles of groups and of rows that count differently, and how much inputs of another place differ from those held out."""

from __future__ import annotations

import copy
import hashlib
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workbench.calibration.answers import level, precise
from workbench.errors import WorkbenchWarning
from workbench.metrics._inputs import numbers, tensor_of

LARGEST = 1e6  # weight of a row, against the mean of those held out
CHANCE = 1e-4  # of a false alarm, for all rows of a call
MODELS = ("linear", "squares", "quadratic")
MOST_COLUMNS = 3000  # of a logistic regression, which solves for all at once
FOLDS = 5  # of a classifier of the user's


def weighted_quantile(scores: Tensor, weights: Tensor, new: Tensor, coverage: float = 0.9) -> Tensor:
    """For each new row the least score that holds it with at least this probability, where rows are weighted by a likelihood ratio.

    Q(x) is the smallest score s_k for which the weights of all scores up to it are at least coverage (w_1 + ... + w_n + w(x)), or infinity
    if no score is large enough: P(new <= Q) >= coverage if w is the density of new inputs by that of held-out ones, up to a factor (Tibshirani,
    Foygel Barber, Candes & Ramdas 2019). With weights of one it is the quantile of split conformal prediction.

    Args:
        scores: [n, ...].
        weights: w of the held-out rows, [n], not negative.
        new: w of the new rows, [rows].
        coverage: strictly between 0 and 1.

    Returns:
        [rows, ...].

    Example:
        >>> weighted_quantile(torch.arange(9.0), torch.ones(9), torch.tensor([1.0, 2.0]), 0.9)
        tensor([8., inf])
    """
    kind, scores = scores.dtype, scores.double()
    ordered, order = scores.flatten(1).sort(0) if scores.dim() > 1 else (x[:, None] for x in scores.sort(0))
    weights, new = weights.double(), new.double()
    sums = weights[order].cumsum(0).mT.contiguous()  # [outputs, n]
    # a hair less, or ten tenths added up would miss the whole; infinite where even all rows do not reach it
    wanted = float(level("coverage", coverage)) * (sums[:1, -1] + new) * (1 - 1e-12)
    place = torch.searchsorted(sums, wanted.expand(len(sums), -1).contiguous())
    beyond = torch.cat([ordered.mT, ordered.new_full((len(sums), 1), math.inf)], 1)
    return beyond.gather(1, place).mT.reshape(len(new), *scores.shape[1:]).to(kind)


def grouped_quantile(
    scores: Tensor, groups: Tensor, weights: Tensor, new_groups: Tensor, new: Tensor, coverage: float
) -> Tensor:
    """As `weighted_quantile`, of the held-out rows of each new row's own group (Mondrian; Vovk et al. 2005, section 4.5)."""
    out = scores.new_full((len(new), *scores.shape[1:]), math.inf)
    for group in new_groups.unique().tolist():
        rows, held_out = new_groups == group, groups == group
        if held_out.any():
            out[rows] = weighted_quantile(scores[held_out], weights[held_out], new[rows], coverage)
    return out


def effective_rows(weights: Tensor) -> float:
    """How many rows of weight one carry as much (Kish 1965): (sum w)^2 / sum w^2."""
    weights = weights.double()
    return float(weights.sum().square() / weights.square().sum())


def warn_infinite(quantiles: Tensor, what: str, why: str) -> None:
    """Say how many rows have no finite answer."""
    rows = quantiles.reshape(len(quantiles), -1).isinf().any(1)
    if (count := int(rows.sum())) > 0:
        warnings.warn(
            f"{count} of {len(rows)} rows get {what} at this coverage: {why}. They hold the truth, and say nothing; hold out more rows like "
            "these, or ask for less coverage",
            WorkbenchWarning,
            stacklevel=4,
        )


def warn_unlike(held_out: Tensor, new: Tensor, measured: str) -> bool:
    """Say that new rows are stranger than those held out by more than chance allows: far more of them beyond 99 % of those, or all in all.

    Of exchangeable rows the number above the k-th smallest of n held-out ones is beta-binomial (m; n + 1 - k, k); and the largest D by which
    the share of new rows up to some value lies below that of held-out ones is above d with a probability of about exp(-2 d^2 n m / (n + m))
    (Smirnov 1939). Such tests of what a model says tell shifts of its inputs (Rabanser et al. 2019).

    Args:
        held_out: how strange the held-out rows are, [n], in rising order.
        new: of the new rows, [m].
        measured: by what, in words: "stranger by vacuitic risk".

    Returns:
        Whether it was said.
    """
    n, m, new = len(held_out), len(new), new.to(held_out).sort().values
    k = min(math.ceil(0.99 * (n + 1)), n)
    count = int((new > held_out[k - 1]).sum())
    # the new rows up to each held-out one: the difference is largest just there
    ahead = torch.arange(1, n + 1).to(held_out) / n - torch.searchsorted(new, held_out, right=True) / m
    distance, chance = float(ahead.max()), math.sqrt(-math.log(CHANCE) * (n + m) / (2 * n * m))
    if _beta_binomial_tail(count, m, n + 1 - k, k) < CHANCE:
        finding = f"{count} of {m} rows are {measured} than {100 * k / n:.3g} % of the {n} held-out rows"
    elif distance > chance:
        finding = f"{m} rows are {measured} than the {n} held-out rows (KS distance {distance:.2f}, by chance {chance:.2f} at most)"
    else:
        return False
    warnings.warn(
        f"{finding}: coverage is guaranteed for rows like those alone. Hold out rows from where these come from, or give weight= "
        "(calibration.DensityRatio)",
        WorkbenchWarning,
        stacklevel=4,
    )
    return True


def _beta_binomial_tail(count: int, m: int, above: int, below: int) -> float:
    """P(X >= count): so many of m new rows lie in the `above` upper ones of the above + below gaps between held-out rows."""
    j = torch.arange(count, m + 1, dtype=torch.float64)

    def log_beta(x: Tensor, y: Tensor) -> Tensor:
        return x.lgamma() + y.lgamma() - (x + y).lgamma()

    a, b = torch.tensor([above, below], dtype=torch.float64)
    ways = -log_beta(j + 1, m - j + 1) - math.log(m + 1)
    return float((ways + log_beta(j + a, m - j + b) - log_beta(a, b)).logsumexp(0).exp())


def row_numbers(name: str, function: Callable[[Any], Any], x: Any, n_rows: int) -> Tensor:
    """What a function of the user's says of each row of a batch, [rows] on the CPU; whole numbers for groups, else weights."""
    with torch.no_grad():
        values = function(x)
    values = tensor_of(values).detach().cpu()
    values = values.squeeze(-1) if values.dim() == 2 and values.shape[1] == 1 else values
    if values.shape != (n_rows,):
        raise ValueError(f"{name} must give one number for each of {n_rows} rows; found shape {list(values.shape)}")
    if name == "groups":
        if values.is_floating_point() and bool((values != values.round()).any()):
            raise ValueError("groups must give whole numbers, one for each row; found fractions")
        return values.long()
    numbers("weight", values)
    if bool((values < 0).any()):
        raise ValueError(f"weight must not be negative; found {float(values.min()):g}")
    return values.double()


class DensityRatio:
    """The density of inputs of a new place by that of those held out, for `calibrate(..., "conformal", weight=...)`.

    By a classifier of which place a row comes from: w(x) = P(new | x) / P(held out | x) times n_held_out / n_new (Sugiyama et al. 2012; used so
    by Tibshirani et al. 2019). A classifier sees the shifts that it can tell: give features in which it can, of images those of a network.

    Args:
        held_out: inputs of the held-out rows, [n, ...].
        new: inputs of the new place, without targets, [m, ...].
        features: from a batch of inputs to [rows, k]; None: the inputs themselves, flattened.
        ridge: strength of the penalty on standardised columns, against one row's log loss; of a model with a name.
        model: "linear", logistic regression on the features, which knows shifts of their means and no others; "squares", on their squares as
            well, which knows shifts of each one's spread, too (of independent normal features the log ratio is just that), in 2 k columns;
            "quadratic", also on their products, which knows shifts of correlation (of any two normal distributions the log ratio is such), and
            wants many more rows than the k (k + 3) / 2 columns; or a classifier with `fit` and `predict_proba`, such as one of scikit-learn.
            Of that, copies are trained: a row that was given here is asked of the one that was trained without its fifth of the rows,
            others of all five, whose log odds are averaged.

    Raises:
        TypeError: model is none of these.
        ValueError: there are fewer than two rows of a place (of different ones five for a classifier), more columns than can be
            solved for, or a feature is not finite.

    Example:
        >>> draw = torch.Generator().manual_seed(0)
        >>> held_out, new = torch.randn(500, 2, generator=draw), 0.5 * torch.randn(500, 2, generator=draw)
        >>> ratio = DensityRatio(held_out, new, model="quadratic")
        >>> bool(ratio(torch.zeros(1, 2)) > 10 * ratio(torch.full((1, 2), 2.0)))
        True
    """

    def __init__(
        self,
        held_out: Any,
        new: Any,
        features: Callable[[Any], Tensor] | None = None,
        ridge: float = 1.0,
        model: Any = "linear",
    ) -> None:
        if not ridge > 0:
            raise ValueError(f"ridge must be above 0; found {ridge!r}")
        if not (
            model in MODELS if isinstance(model, str) else hasattr(model, "fit") and hasattr(model, "predict_proba")
        ):
            raise TypeError(
                f"model must be {' or '.join(map(repr, MODELS))}, or a classifier with fit and predict_proba; found {model!r}"
            )
        self.features = features
        rows = [self._features(x) for x in (held_out, new)]
        for name, x in zip(("held_out", "new"), rows, strict=True):
            if len(x) < 2:
                raise ValueError(f"{name}: a density needs at least 2 rows; found {len(x)}")
        if rows[0].shape[1] != rows[1].shape[1]:
            raise ValueError(f"new has {rows[1].shape[1]} features a row, held_out {rows[0].shape[1]}")
        x, is_new = torch.cat(rows), torch.cat([torch.zeros(len(rows[0])), torch.ones(len(rows[1]))]).double()
        self._log_odds: Callable[[Any, Tensor], Tensor]
        if isinstance(model, str):
            self._log_odds = _Logistic(x, is_new, ridge, model)
        else:
            self._log_odds = _CrossFitted(model, _names(held_out, rows[0]) + _names(new, rows[1]), x, is_new)
        self._offset = math.log(len(rows[0]) / len(rows[1]))

    def _features(self, x: Any) -> Tensor:
        x = tensor_of(x if self.features is None else self.features(x)).detach().cpu()
        x = precise(x).double().reshape(len(x), -1)
        numbers("features", x)
        return x

    def __call__(self, x: Any) -> Tensor:
        """The ratio for each row of a batch of inputs, float64 [rows] on the CPU; at most 1e6."""
        log_ratio = self._log_odds(x, self._features(x)) + self._offset
        return log_ratio.clamp_max(math.log(LARGEST)).exp()


class _Logistic:
    """Log odds by logistic regression on standardised features, with their squares, also their products, or without."""

    def __init__(self, x: Tensor, is_new: Tensor, ridge: float, model: str) -> None:
        self.products: tuple[Tensor, Tensor] | None = None
        if model != "linear":
            count = x.shape[1]
            columns = 2 * count if model == "squares" else count * (count + 3) // 2
            if columns > MOST_COLUMNS:
                raise ValueError(
                    f'model="{model}": {count} features make {columns} columns, more than {MOST_COLUMNS}; give fewer by features=, or a '
                    "classifier as model="
                )
            self.centre = _standardising(x)
            each = torch.arange(count)
            self.products = (each, each) if model == "squares" else tuple(torch.triu_indices(count, count))
        self.scaling = _standardising(self._columns(x))
        self.coefficients = _logistic(self._standard(x), is_new, ridge)

    def _columns(self, x: Tensor) -> Tensor:
        if self.products is None:
            return x
        x = (x - self.centre[0]) / self.centre[1]
        return torch.cat([x, x[:, self.products[0]] * x[:, self.products[1]]], 1)

    def _standard(self, x: Tensor) -> Tensor:
        return (self._columns(x) - self.scaling[0]) / self.scaling[1]

    def __call__(self, given: Any, x: Tensor) -> Tensor:
        return self._standard(x) @ self.coefficients[1:] + self.coefficients[0]


class _CrossFitted:
    """Log odds by copies of a classifier, each trained without a fifth of the rows, which are asked of that one.

    What a flexible classifier says of rows that it was trained on is too sure, and those held out would count for nothing.
    """

    def __init__(self, classifier: Any, names: list[bytes], x: Tensor, is_new: Tensor) -> None:
        self.fold: dict[bytes, int] = {}
        for place, what in enumerate(("held_out", "new")):
            # rows that are there twice are in one fold
            different = list(
                dict.fromkeys(name for name, new in zip(names, is_new.tolist(), strict=True) if new == place)
            )
            if len(different) < FOLDS:
                raise ValueError(f"{what}: a classifier as model= needs {FOLDS} different rows; found {len(different)}")
            order = torch.randperm(len(different), generator=torch.Generator().manual_seed(place)).tolist()
            for number, at in enumerate(order):
                self.fold.setdefault(different[at], number % FOLDS)
        fold = torch.tensor([self.fold[name] for name in names])
        self.classifiers = []
        for number in range(FOLDS):
            one, kept = copy.deepcopy(classifier), fold != number
            if len(is_new[kept].unique()) < 2:
                raise ValueError("held_out and new: too many rows are in both to tell the places apart")
            self.classifiers.append(one.fit(x[kept].numpy(), is_new[kept].long().numpy()))

    def __call__(self, given: Any, x: Tensor) -> Tensor:
        said = torch.stack([torch.as_tensor(one.predict_proba(x.numpy())[:, 1]) for one in self.classifiers])
        odds = said.double().clamp(1 / LARGEST, 1 - 1 / LARGEST).logit()
        unseen_by = [self.fold.get(name, -1) for name in _names(given, x)]
        number = torch.tensor(unseen_by)
        return odds.mean(0).where(number < 0, odds.gather(0, number.clamp_min(0)[None])[0])


def _standardising(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each column, 1 for a column that never varies."""
    spread = x.std(0, correction=0)
    return x.mean(0), spread.where(spread > 0, 1.0)


def _names(x: Any, features: Tensor) -> list[bytes]:
    """What tells each row from others: its input, to the last bit, since features of a network may differ with the batch that it is in."""
    rows = x.detach().cpu() if isinstance(x, Tensor) else x if isinstance(x, np.ndarray) else features
    return [hashlib.blake2b(torch.as_tensor(row).double().numpy().tobytes(), digest_size=16).digest() for row in rows]


def _logistic(x: Tensor, y: Tensor, ridge: float) -> Tensor:
    """Intercept and coefficients of logistic regression, by Newton's method; the intercept is not penalised."""
    x = torch.cat([torch.ones_like(x[:, :1]), x], 1)
    penalty = torch.full_like(x[0], ridge)
    penalty[0] = 1e-9
    w = torch.zeros_like(x[0])

    def loss(w: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(x @ w, y, reduction="sum") + 0.5 * (penalty * w * w).sum()

    for _ in range(100):
        p = (x @ w).sigmoid()
        gradient = x.mT @ (p - y) + penalty * w
        hessian = (x * (p * (1 - p))[:, None]).mT @ x + torch.diag(penalty)
        step, size = torch.linalg.solve(hessian, gradient), 1.0
        while size > 1e-6 and loss(w - size * step) > loss(w):
            size /= 2
        w = w - size * step
        if float((size * step).abs().max()) < 1e-9:
            break
    return w


__all__ = ["DensityRatio", "effective_rows", "grouped_quantile", "weighted_quantile"]
