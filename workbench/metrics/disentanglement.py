"""The Disentanglement Error: whether aleatoric risk follows only label noise, and epistemic risk only the amount of data."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workbench.metrics._inputs import numbers

FLAT = 1e-6  # a curve whose range is below this share of its largest value is flat up to rounding
MIN_COUNT = 3  # minimum number of runs, and of levels of a lever


class LeverCurves(NamedTuple):
    """Results of a model while one property of its training (a lever) changes; each [runs, levels], with each run trained from scratch.

    Attributes:
        accuracy: accuracy on the test rows, or any score that is higher for better models (for regression, minus the error).
        aleatoric: mean aleatoric risk of the test rows.
        epistemic: mean epistemic risk of the test rows.
    """

    accuracy: Any
    aleatoric: Any
    epistemic: Any


class Disentanglement(NamedTuple):
    """The Disentanglement Error and its parts, each a float64 tensor without dimensions.

    Attributes:
        error: the error, from 0 (perfect) to 1; .5 is the best value of two risks that always move together.
        aleatoric_noise: mean correlation of aleatoric risk with the loss of accuracy by label noise; 1 is perfect.
        epistemic_size: the same for epistemic risk and fewer rows; 1 is perfect.
        aleatoric_size: mean absolute correlation of aleatoric risk with the loss of accuracy by fewer rows; 0 is perfect.
        epistemic_noise: the same for epistemic risk and label noise; 0 is perfect.
        aleatoric_ratio: range of aleatoric risk over sizes / over label noise, of the curves averaged over runs; 0 is perfect.
        epistemic_ratio: range of epistemic risk over label noise / over sizes, likewise; 0 is perfect.
        floor: expected error of a perfect response whose flat parts are independent noise: a flat response has a correlation by
            chance, with mean absolute value gamma((n - 1) / 2) / (sqrt(pi) gamma(n / 2)) over n levels. It is a lower bound where training
            sets share rows, since then the noise drifts with their size, as accuracy does.
        package: the value of the package `disentanglement-error` (0.1.6), which counts the aleatoric term of label noise twice, and the
            epistemic term of sizes not at all.
    """

    error: Tensor
    aleatoric_noise: Tensor
    epistemic_size: Tensor
    aleatoric_size: Tensor
    epistemic_noise: Tensor
    aleatoric_ratio: Tensor
    epistemic_ratio: Tensor
    floor: Tensor
    package: Tensor


def disentanglement_error(size: LeverCurves, noise: LeverCurves) -> Disentanglement:
    """The Disentanglement Error of two levers (de Jong et al. 2024, "How disentangled are your classification uncertainties?").

    A model is trained from scratch on fewer and fewer rows, and on labels of which a growing share is shuffled (also in the test rows).
    With r the Pearson correlation of mean risk and minus accuracy over the levels,

        1/4 (|r(aleatoric, noise) - 1| + |r(epistemic, size) - 1| + |r(aleatoric, size)| + |r(epistemic, noise)|),

    where each term is a mean over runs. Correlations ignore scale: a response that is flat up to noise has a correlation by chance (`floor`),
    and one that is ten times too small has a perfect one. So at least three runs are required, and the ratios of the ranges complement the
    correlations. The correlation of a curve that is flat up to rounding (1e-6 of its largest value) is set to 0.

    Args:
        size: curves over the number of training rows.
        noise: curves over label noise.

    Returns:
        The error, its four correlations and the ratios of ranges.

    Raises:
        ValueError: If shapes differ, there are fewer than 3 runs or levels, or accuracy does not change with a lever.

    Example:
        >>> rising = torch.tensor([0.1, 0.2, 0.3, 0.4]).expand(3, 4)
        >>> flat = torch.full((3, 4), 0.5)
        >>> result = disentanglement_error(LeverCurves(-rising, flat, rising), LeverCurves(-rising, rising, flat))
        >>> result.error
        tensor(0., dtype=torch.float64)
    """
    size, noise = _check_curves("size", size), _check_curves("noise", noise)
    aleatoric_size, epistemic_size = (_correlations(risk, size.accuracy) for risk in size[1:])
    aleatoric_noise, epistemic_noise = (_correlations(risk, noise.accuracy) for risk in noise[1:])
    consistent = (1 - aleatoric_noise).abs().mean()
    cross = aleatoric_size.abs().mean() + epistemic_noise.abs().mean()
    expected = [_chance_correlation(curves.accuracy.shape[1]) for curves in (size, noise)]
    return Disentanglement(
        (consistent + (1 - epistemic_size).abs().mean() + cross) / 4,
        aleatoric_noise.mean(),
        epistemic_size.mean(),
        aleatoric_size.abs().mean(),
        epistemic_noise.abs().mean(),
        _range(size.aleatoric) / _range(noise.aleatoric),
        _range(noise.epistemic) / _range(size.epistemic),
        aleatoric_size.new_tensor(sum(expected) / 4),
        (2 * consistent + cross) / 4,
    )


def _check_curves(lever: str, curves: LeverCurves) -> LeverCurves:
    names = LeverCurves._fields
    checked = LeverCurves(*(numbers(f"{lever}.{name}", value) for name, value in zip(names, curves, strict=True)))
    for name, values in zip(names, checked, strict=True):
        if values.dim() != 2 or values.shape != checked.accuracy.shape:
            raise ValueError(
                f"{lever}.{name} has the shape {tuple(values.shape)}, and {lever}.accuracy {tuple(checked.accuracy.shape)}: each curve must "
                "be [runs, levels], with the same runs and levels"
            )
    if min(checked.accuracy.shape) < MIN_COUNT:
        raise ValueError(
            f"{lever} has {checked.accuracy.shape[0]} runs of {checked.accuracy.shape[1]} levels; at least {MIN_COUNT} of each are needed, "
            "since a flat response has a large correlation by chance: add runs with other seeds"
        )
    if bool((constant := _flat(checked.accuracy)).any()):
        raise ValueError(
            f"{lever}.accuracy is the same at all levels of run {int(constant.nonzero()[0])}: a lever without effect on the model reveals "
            "nothing about its risks; choose more extreme levels"
        )
    return checked


def _flat(curves: Tensor) -> Tensor:
    return (curves.amax(1) - curves.amin(1)) <= FLAT * curves.abs().amax(1)


def _correlations(risk: Tensor, accuracy: Tensor) -> Tensor:
    """Return Pearson's correlation of risk with minus accuracy for each run; 0 where the risk is flat."""
    risk, loss = (curves - curves.mean(1, keepdim=True) for curves in (risk.where(~_flat(risk)[:, None], 0), -accuracy))
    scale = risk.norm(dim=1) * loss.norm(dim=1)
    return ((risk * loss).sum(1) / scale.where(scale > 0, 1)).clamp(-1, 1)


def _range(curves: Tensor) -> Tensor:
    mean = curves.mean(0)
    return torch.where(_flat(mean[None])[0], 0, mean.amax() - mean.amin())


def _chance_correlation(levels: int) -> float:
    """Return the mean of |r| over `levels` independent normal pairs."""
    return math.exp(math.lgamma((levels - 1) / 2) - math.lgamma(levels / 2)) / math.sqrt(math.pi)


__all__ = ["Disentanglement", "LeverCurves", "disentanglement_error"]
