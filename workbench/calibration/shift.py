"""Conformal quantiles within groups and of weighted rows, and density ratios between new inputs and held-out ones (covariate shift)."""

from __future__ import annotations

import copy
import hashlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workbench.calibration.answers import level
from workbench.core.outputs.class_scores import at_least_float32
from workbench.errors import WorkbenchWarning
from workbench.metrics._inputs import numbers, tensor_of

MAX_RATIO = 1e6  # largest weight of a row, relative to the mean of the held-out rows
FALSE_ALARM_RATE = 1e-4  # highest probability of a false warning by each of the two tests of `warn_unlike`
MODELS = ("linear", "squares", "quadratic")
MAX_COLUMNS = 3000  # of a logistic regression, whose Newton steps solve for all columns at once
PIECE_SIZE = 2**21  # numbers per piece of the rows, 16 MiB: all products of all rows may not fit in memory
FOLDS = 5  # for the cross-fitting of a user's classifier


def weighted_quantile(scores: Tensor, weights: Tensor, new: Tensor, coverage: float = 0.9) -> Tensor:
    """Return for each new row the smallest bound of its score with at least this probability, where rows are weighted by a likelihood ratio.

    Q(x) is the smallest score s_k for which the weights of all scores up to it sum to at least coverage (w_1 + ... + w_n + w(x)), or infinity
    if no score is large enough: P(new <= Q) >= coverage if w is the ratio of the densities of new and held-out inputs, up to a factor
    (Tibshirani, Foygel Barber, Candes & Ramdas 2019). With equal weights of one, it is the quantile of split conformal prediction.

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
    dtype, scores = scores.dtype, scores.double()
    ordered, order = scores.flatten(1).sort(0) if scores.dim() > 1 else (x[:, None] for x in scores.sort(0))
    weights, new = weights.double(), new.double()
    sums = weights[order].cumsum(0).mT.contiguous()  # [outputs, n]
    # slightly less, since the sum of ten tenths may be below one; infinite if all rows together do not reach it, as without any weight
    required = float(level("coverage", coverage)) * (sums[:1, -1] + new) * (1 - 1e-12)
    required = required.clamp_min(torch.finfo(required.dtype).tiny)
    position = torch.searchsorted(sums, required.expand(len(sums), -1).contiguous())
    with_infinity = torch.cat([ordered.mT, ordered.new_full((len(sums), 1), math.inf)], 1)
    return with_infinity.gather(1, position).mT.reshape(len(new), *scores.shape[1:]).to(dtype)


def grouped_quantile(
    scores: Tensor, groups: Tensor, weights: Tensor, new_groups: Tensor, new: Tensor, coverage: float
) -> Tensor:
    """Return `weighted_quantile` over the held-out rows of each new row's group (Mondrian; Vovk et al. 2005, section 4.5)."""
    out = scores.new_full((len(new), *scores.shape[1:]), math.inf)
    for group in new_groups.unique().tolist():
        rows, held_out = new_groups == group, groups == group
        if held_out.any():
            out[rows] = weighted_quantile(scores[held_out], weights[held_out], new[rows], coverage)
    return out


def effective_rows(weights: Tensor) -> float:
    """Return the effective sample size (Kish 1965): (sum w)^2 / sum w^2."""
    weights = weights.double()
    return float(weights.sum().square() / weights.square().sum())


def warn_infinite(quantiles: Tensor, what: str, why: str) -> None:
    """Warn about the number of rows without a finite answer."""
    rows = quantiles[:, None].isinf().flatten(1).any(1)
    if (count := int(rows.sum())) > 0:
        warnings.warn(
            f"{count} of {len(rows)} rows get {what} at this coverage: {why}. These contain the truth, but are uninformative; hold out more "
            "rows like these, or ask for less coverage",
            WorkbenchWarning,
            stacklevel=4,
        )


def warn_unlike(held_out: Tensor, new: Tensor, measured: str) -> bool:
    """Warn if new rows are stranger than the held-out ones by more than chance allows: too many above their 99 % quantile, or overall.

    For exchangeable rows, the number above the k-th smallest of n held-out ones is beta-binomial (m; n + 1 - k, k); and the largest difference D
    by which the share of new rows up to some value falls short of that of held-out ones exceeds d with a probability of about exp(-2 d^2 n m /
    (n + m)) (Smirnov 1939). Each warns of rows that are alike with a probability of at most `FALSE_ALARM_RATE`. Such tests of model outputs
    detect shifts of the inputs (Rabanser et al. 2019).

    Args:
        held_out: strangeness of the held-out rows, [n], in rising order.
        new: strangeness of the new rows, [m].
        measured: description of the measure, such as "stranger by vacuitic risk".

    Returns:
        Whether a warning was given.
    """
    n, m, new = len(held_out), len(new), new.to(held_out).sort().values
    if not m:
        return False
    k = min(math.ceil(0.99 * (n + 1)), n)
    count = int((new > held_out[k - 1]).sum())
    # the difference is largest at one of the held-out values
    shortfall = torch.arange(1, n + 1).to(held_out) / n - torch.searchsorted(new, held_out, right=True) / m
    distance, critical_distance = float(shortfall.max()), math.sqrt(-math.log(FALSE_ALARM_RATE) * (n + m) / (2 * n * m))
    if _beta_binomial_tail(count, m, n + 1 - k, k) < FALSE_ALARM_RATE:
        finding = f"{count} of {m} rows are {measured} than {100 * k / n:.3g} % of the {n} held-out rows"
    elif distance > critical_distance:
        finding = f"{m} rows are {measured} than the {n} held-out rows (KS distance {distance:.2f}, by chance {critical_distance:.2f} at most)"
    else:
        return False
    warnings.warn(
        f"{finding}: coverage is guaranteed only for rows like those. Hold out rows from the source of the new ones, or give weight= "
        "(calibration.DensityRatio)",
        WorkbenchWarning,
        stacklevel=4,
    )
    return True


def _beta_binomial_tail(count: int, m: int, above: int, below: int) -> float:
    """Return P(X >= count) for the number X of m new rows that lie in the `above` upper ones of the above + below gaps between held-out rows."""
    j = torch.arange(count, m + 1, dtype=torch.float64)

    def log_beta(x: Tensor, y: Tensor) -> Tensor:
        return x.lgamma() + y.lgamma() - (x + y).lgamma()

    a, b = torch.tensor([above, below], dtype=torch.float64)
    log_binomial = -log_beta(j + 1, m - j + 1) - math.log(m + 1)
    return float((log_binomial + log_beta(j + a, m - j + b) - log_beta(a, b)).logsumexp(0).exp())


def row_numbers(name: str, function: Callable[[Any], Any], x: Any, n_rows: int) -> Tensor:
    """Return the values of a user's function for each row of a batch, [rows] on the CPU: integers for groups, else weights >= 0."""
    with torch.no_grad():
        values = function(x)
    values = tensor_of(values, name).detach().cpu()
    values = values.squeeze(-1) if values.dim() == 2 and values.shape[1] == 1 else values
    if values.shape != (n_rows,):
        raise ValueError(f"{name} must give one number for each of {n_rows} rows; found shape {list(values.shape)}")
    if name == "groups":
        if values.is_floating_point() and bool((values != values.round()).any()):
            raise ValueError("groups must give whole numbers, one for each row; found fractions")
        return values.long()
    if n_rows:
        numbers("weight", values)
    if bool((values < 0).any()):
        raise ValueError(f"weight must not be negative; found {float(values.min()):g}")
    return values.double()


class DensityRatio:
    """Ratio of the densities of new and held-out inputs, for `calibrate(..., "conformal", weight=...)`.

    It is estimated by a classifier that tells the two sources apart: w(x) = P(new | x) / P(held out | x) times n_held_out / n_new (Sugiyama et
    al. 2012; used this way by Tibshirani et al. 2019). A classifier detects only the shifts that it can represent: give suitable features, for
    images those of a network.

    Args:
        held_out: inputs of the held-out rows, [n, ...].
        new: inputs from the new source, without targets, [m, ...].
        features: function from a batch of inputs to [rows, k]; None: the inputs themselves, flattened.
        ridge: strength of the L2 penalty on standardized columns, relative to the log loss of one row; for the named models.
        model: "linear", logistic regression on the features, which detects only shifts of their means; "squares", also on their squares, which
            detects shifts of each feature's spread, too (exact for independent normal features), in 2 k columns;
            "quadratic", also on their products, which detects shifts of correlation (exact for any two normal distributions), and
            needs many more rows than its k (k + 3) / 2 columns; or a classifier with `fit` and `predict_proba`, such as one of scikit-learn.
            Copies of such a classifier are trained by cross-fitting in five folds: a row that was given here is predicted by the copy trained
            without its fold, other rows by all five, whose log odds are averaged.

    Raises:
        TypeError: model is none of these.
        ValueError: a source has fewer than two rows (five different ones for a classifier), there are more columns than can be
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
        if not (hasattr(ridge, "__float__") and ridge > 0):
            raise ValueError(f"ridge must be above 0; found {ridge!r}")
        if features is not None and not callable(features):
            raise TypeError(f"features must be a function of a batch of inputs; found {features!r:.100}")
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
        self._n_features = x.shape[1]
        self._log_odds: Callable[[Any, Tensor], Tensor]
        if isinstance(model, str):
            self._log_odds = _Logistic(x, is_new, ridge, model)
        else:
            self._log_odds = _CrossFitted(model, _names(held_out, rows[0]) + _names(new, rows[1]), x, is_new)
        self._offset = math.log(len(rows[0]) / len(rows[1]))

    def _features(self, x: Any) -> Tensor:
        x = tensor_of(x if self.features is None else self.features(x)).detach().cpu()
        x = at_least_float32(x).double()[:, None].flatten(1)
        if len(x):
            numbers("features", x)
        return x

    def __call__(self, x: Any) -> Tensor:
        """Return the ratio for each row of a batch of inputs, float64 [rows] on the CPU; at most 1e6."""
        features = self._features(x)
        if features.shape[1] != self._n_features:
            raise ValueError(
                f"x has {features.shape[1]} features a row, and the ratio was estimated from {self._n_features}"
            )
        log_ratio = self._log_odds(x, features) + self._offset
        return log_ratio.clamp_max(math.log(MAX_RATIO)).exp()


class _Logistic:
    """Log odds by logistic regression on standardized features, optionally with their squares and products."""

    def __init__(self, x: Tensor, is_new: Tensor, ridge: float, model: str) -> None:
        self.products: tuple[Tensor, Tensor] | None = None
        count = columns = x.shape[1]
        if model != "linear":
            columns = 2 * count if model == "squares" else count * (count + 3) // 2
            if columns > MAX_COLUMNS:
                raise ValueError(
                    f'model="{model}": {count} features make {columns} columns, more than {MAX_COLUMNS}; select fewer by features=, or pass a '
                    "classifier as model="
                )
            self.centre = _mean_and_scale([x])
            each = torch.arange(count)
            self.products = (each, each) if model == "squares" else tuple(torch.triu_indices(count, count))
        self.rows = max(1, PIECE_SIZE // max(1, columns))  # per piece
        self.scaling = _mean_and_scale(map(self._columns, x.split(self.rows)))
        self.coefficients = _logistic(
            lambda: zip(map(self._standardized, x.split(self.rows)), is_new.split(self.rows), strict=True), ridge
        )

    def _columns(self, x: Tensor) -> Tensor:
        if self.products is None:
            return x
        x = (x - self.centre[0]) / self.centre[1]
        return torch.cat([x, x[:, self.products[0]] * x[:, self.products[1]]], 1)

    def _standardized(self, x: Tensor) -> Tensor:
        return (self._columns(x) - self.scaling[0]) / self.scaling[1]

    def __call__(self, inputs: Any, x: Tensor) -> Tensor:
        pieces = [self._standardized(piece) @ self.coefficients[1:] for piece in x.split(self.rows)]
        return torch.cat(pieces) + self.coefficients[0]


class _CrossFitted:
    """Log odds by copies of a classifier, each trained without one fold of the rows, which is used to predict the rows of that fold.

    A flexible classifier is overconfident on its training rows, so that held-out rows would get weights near zero.
    """

    def __init__(self, classifier: Any, names: list[bytes], x: Tensor, is_new: Tensor) -> None:
        self.fold: dict[bytes, int] = {}
        for place, source_name in enumerate(("held_out", "new")):
            # duplicate rows must be in the same fold
            distinct_rows = list(
                dict.fromkeys(name for name, new in zip(names, is_new.tolist(), strict=True) if new == place)
            )
            if len(distinct_rows) < FOLDS:
                raise ValueError(
                    f"{source_name}: a classifier as model= needs {FOLDS} different rows; found {len(distinct_rows)}"
                )
            order = torch.randperm(len(distinct_rows), generator=torch.Generator().manual_seed(place)).tolist()
            for k, at in enumerate(order):
                self.fold.setdefault(distinct_rows[at], k % FOLDS)
        fold = torch.tensor([self.fold[name] for name in names])
        self.classifiers = []
        for k in range(FOLDS):
            classifier_copy, kept = copy.deepcopy(classifier), fold != k
            if len(is_new[kept].unique()) < 2:
                raise ValueError("held_out and new: too many rows are in both to tell the places apart")
            classifier_copy.fit(x[kept].numpy(), is_new[kept].long().numpy())
            shape = np.shape(classifier_copy.predict_proba(x[:2].numpy()))
            if shape != (2, 2):
                raise ValueError(
                    f"model: predict_proba must give the probabilities of both sources, [rows, 2]; for 2 rows it gave {list(shape)}"
                )
            self.classifiers.append(classifier_copy)

    def __call__(self, inputs: Any, x: Tensor) -> Tensor:
        probabilities = torch.stack(
            [torch.as_tensor(classifier.predict_proba(x.numpy())[:, 1]) for classifier in self.classifiers]
        )
        odds = probabilities.double().clamp(1 / MAX_RATIO, 1 - 1 / MAX_RATIO).logit()
        unseen_by = [self.fold.get(name, -1) for name in _names(inputs, x)]
        fold = torch.tensor(unseen_by)
        return odds.mean(0).where(fold < 0, odds.gather(0, fold.clamp_min(0)[None])[0])


def _mean_and_scale(pieces: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each column of pieces [rows, k], 1 for a constant column (Chan et al. 1983)."""
    count, mean, squares = 0, torch.zeros(()), torch.zeros(())
    for piece in pieces:
        variance, mean_of_piece = torch.var_mean(piece, 0, correction=0)
        share, difference = len(piece) / (count + len(piece)), mean_of_piece - mean
        mean = mean + share * difference
        squares = squares + len(piece) * variance + count * share * difference.square()
        count += len(piece)
    spread = (squares / count).sqrt()
    return mean, spread.where(spread > 0, 1.0)


def _names(x: Any, features: Tensor) -> list[bytes]:
    """Return a hash of each row's input, since features of a network may differ slightly with the batch that a row is in."""
    rows = x.detach().cpu() if isinstance(x, Tensor) else x if isinstance(x, np.ndarray) else features
    return [hashlib.blake2b(torch.as_tensor(row).double().numpy().tobytes(), digest_size=16).digest() for row in rows]


def _logistic(pieces: Callable[[], Iterator[tuple[Tensor, Tensor]]], ridge: float) -> Tensor:
    """Return intercept and coefficients of a ridge-penalized logistic regression, by Newton's method; the intercept is not penalized.

    Args:
        pieces: returns columns [rows, k] and targets [rows] of all rows, piece by piece.
        ridge: strength of the penalty.
    """

    def with_ones() -> Iterator[tuple[Tensor, Tensor]]:
        return ((torch.cat([torch.ones_like(x[:, :1]), x], 1), y) for x, y in pieces())

    penalty = torch.full_like(next(with_ones())[0][0], ridge)
    penalty[0] = 1e-9
    w = torch.zeros_like(penalty)

    def loss(w: Tensor) -> Tensor:
        cross_entropy = nn.functional.binary_cross_entropy_with_logits
        terms = (cross_entropy(x @ w, y, reduction="sum") for x, y in with_ones())
        return sum(terms, start=0.5 * (penalty * w * w).sum())

    for _ in range(100):
        gradient, hessian = penalty * w, torch.diag(penalty)
        for x, y in with_ones():
            p = (x @ w).sigmoid()
            gradient = gradient + x.mT @ (p - y)
            hessian += (x * (p * (1 - p))[:, None]).mT @ x
        step, size = torch.linalg.solve(hessian, gradient), 1.0
        at_start = loss(w)
        while size > 1e-6 and loss(w - size * step) > at_start:
            size /= 2
        w = w - size * step
        if float((size * step).abs().max()) < 1e-9:
            break
    return w


__all__ = ["DensityRatio", "effective_rows", "grouped_quantile", "weighted_quantile"]
