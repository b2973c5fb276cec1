"""Answers of metrics, calibration and distributions by plain loops and scipy, for successful calls of `bad_calls`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy import stats

from workbench import distributions


def rows(value: Any) -> list[float]:
    """Return the numbers of a tensor or an array in order."""
    value = getattr(value, "total", value)
    array = value.detach().double().numpy() if isinstance(value, torch.Tensor) else np.ma.getdata(np.asarray(value))
    return [float(number) for number in np.asarray(array, dtype=np.float64).ravel()]


def mean(values: list[float], reduction: str = "mean") -> list[float]:
    return [math.fsum(values) / len(values)] if reduction == "mean" else values


def rmse(prediction: Any, target: Any) -> list[float]:
    errors = [p - t for p, t in zip(rows(prediction), rows(target), strict=True)]
    return [math.hypot(*errors) / math.sqrt(len(errors))]


def mae(prediction: Any, target: Any, reduction: str = "mean") -> list[float]:
    return mean([abs(p - t) for p, t in zip(rows(prediction), rows(target), strict=True)], reduction)


def sharpness(risk: Any) -> list[float]:
    return [math.hypot(*rows(risk)) / math.sqrt(len(rows(risk)))]


def classes(scores: Any, target: Any) -> list[tuple[list[float], int]]:
    columns, flat = scores.shape[-1], rows(scores)
    return [(flat[i * columns : (i + 1) * columns], int(label)) for i, label in enumerate(rows(target))]


def accuracy(scores: Any, target: Any, reduction: str = "mean") -> list[float]:
    return mean([float(row.index(max(row)) == label) for row, label in classes(scores, target)], reduction)


def categorical_nll(probabilities: Any, target: Any, reduction: str = "mean") -> list[float]:
    chances = [row[label] for row, label in classes(probabilities, target)]
    return mean([-math.log(chance) if chance > 0 else math.inf for chance in chances], reduction)


def brier(probabilities: Any, target: Any, reduction: str = "mean") -> list[float]:
    pairs = classes(probabilities, target)
    return mean([sum((p - (k == label)) ** 2 for k, p in enumerate(row)) for row, label in pairs], reduction)


def ece(probabilities: Any, target: Any, n_bins: int = 15) -> list[float]:
    bins: dict[int, list[tuple[float, bool]]] = {}
    for row, label in classes(probabilities, target):
        bins.setdefault(math.ceil(max(row) * n_bins), []).append((max(row), row.index(max(row)) == label))
    count = sum(map(len, bins.values()))
    return [sum(abs(sum(c for c, _ in pairs) - sum(right for _, right in pairs)) for pairs in bins.values()) / count]


def auroc(risk_in: Any, risk_out: Any) -> list[float]:
    pairs = [(a > b) + 0.5 * (a == b) for a in rows(risk_out) for b in rows(risk_in)]
    return [sum(pairs) / len(pairs)]


def fpr95(risk_in: Any, risk_out: Any) -> list[float]:
    outside = sorted(rows(risk_out))
    missed = 5 * len(outside) // 100
    return mean([float(risk >= outside[missed]) for risk in rows(risk_in)])


def aurc(risk: Any, error: Any) -> list[float]:
    pairs = list(zip(rows(risk), rows(error), strict=True))
    by_risk = {a: np.mean([e for b, e in pairs if b == a]) for a, _ in pairs}
    ordered = [by_risk[a] for a, _ in sorted(pairs)]
    return [float(np.mean([np.mean(ordered[: k + 1]) for k in range(len(ordered))]))]


def crps_samples(samples: Any, target: Any, fair: bool = False, reduction: str = "mean") -> list[float]:
    voters = [rows(voter) for voter in samples]
    scores = []
    for i, y in enumerate(rows(target)):
        column = [voter[i] for voter in voters]
        spread = sum(abs(a - b) for a in column for b in column) / (len(column) * (len(column) - fair))
        scores.append(float(np.mean([abs(a - y) for a in column])) - spread / 2)
    return mean(scores, reduction)


def conformal_quantile(scores: Any, coverage: float = 0.9) -> list[float]:
    columns = np.asarray(rows(scores)).reshape(len(scores), -1)
    rank = math.ceil((len(scores) + 1) * coverage - 1e-9)
    return [sorted(column)[rank - 1] for column in columns.T.tolist()]


FAMILIES: dict[str, Callable[[float, float], Any]] = {
    "Normal": lambda loc, risk: stats.norm(loc, risk),
    "Laplace": lambda loc, risk: stats.laplace(loc, risk / math.sqrt(2)),
    "Cauchy": lambda loc, risk: stats.cauchy(loc, risk),
}


def family_answers(name: str, method: str, y: Any, loc: Any, risk: Any) -> list[float]:
    pairs = list(zip(rows(y), rows(loc), rows(risk), strict=True))
    if any(scale <= 0 for _, _, scale in pairs):
        raise ValueError("scipy has no distribution of width 0")
    kind = {"log_prob": "logpdf", "cdf": "cdf", "icdf": "ppf"}[method]
    return [float(getattr(FAMILIES[name](m, s), kind)(v)) for v, m, s in pairs]


def scored(sign: int, method: str) -> Callable[..., list[float]]:
    def score(
        prediction: Any, risk: Any, target: Any, distribution: Any = None, reduction: str = "mean"
    ) -> list[float]:
        family = name_of(distribution or distributions.Normal)
        return mean([sign * v for v in family_answers(family, method, target, prediction, risk)], reduction)

    return score


def picp(
    prediction: Any, risk: Any, target: Any, level: float = 0.9, distribution: Any = None, reduction: str = "mean"
) -> list[float]:
    family = name_of(distribution or distributions.Normal)
    chances = family_answers(family, "cdf", target, prediction, risk)
    return mean([float(abs(2 * u - 1) <= level) for u in chances], reduction)


def name_of(distribution: Any) -> str:
    plain = distribution in (distributions.Normal, distributions.Laplace, distributions.Cauchy)
    return distribution.__name__ if plain else ""


ANSWERS: dict[str, Callable[..., list[float]]] = {
    **{f.__name__: f for f in (rmse, mae, sharpness, accuracy, categorical_nll, brier, ece, auroc, fpr95, aurc)},
    **{
        "crps_samples": crps_samples,
        "conformal_quantile": conformal_quantile,
        "picp": picp,
        "nll": scored(-1, "log_prob"),
    },
    **{
        f"{family}.{method}": lambda *arguments, family=family, method=method: family_answers(
            family, method, *arguments
        )
        for family in FAMILIES
        for method in ("log_prob", "cdf", "icdf")
    },
}


def difference(name: str, arguments: tuple[Any, ...], options: dict[str, Any], answer: Any) -> str:
    """Return how an answer differs from the plain one; "" if it agrees, or there is none to compare with."""
    if name not in ANSWERS:
        return ""
    try:
        with np.errstate(all="ignore"):
            plain = ANSWERS[name](*arguments, **options)
    except (KeyError, ValueError, TypeError, ZeroDivisionError, OverflowError, AttributeError):
        return ""  # broadcast, or a family without a closed form here
    numbers = rows(answer)
    # compared at the lowest precision involved
    floats = [t for t in (answer, *arguments) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    tolerance = max([1e-8, *(64 * torch.finfo(t.dtype).eps for t in floats)])
    same = len(numbers) == len(plain) and np.allclose(numbers, plain, rtol=tolerance, atol=tolerance, equal_nan=True)
    return "" if same else f"{numbers[:4]} where plain loops give {plain[:4]}"


__all__ = ["difference"]
