"""Centres, scales and covariances that are robust to a few extreme rows and constant columns."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

# smallest unit of a column relative to the layer's largest, so that nearly constant features do not explode
_FLOOR = 1e-3
_MIN_SHRINKAGE = 1e-4  # keeps duplicate features from having infinite density


def full_precision(like: Tensor) -> AbstractContextManager[Any]:
    """Return a context without autocast on the device of a tensor: half precision is too coarse for covariances and sums."""
    kind = like.device.type
    # torch.compile cannot always trace these queries
    on = torch.compiler.is_compiling() or (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind))
    return torch.autocast(kind, enabled=False) if on else nullcontext()


def double(tensor: Tensor) -> Tensor:
    """Return the tensor in float64, on the CPU if its device does not support it."""
    return tensor.to("cpu" if tensor.device.type == "mps" else tensor.device).double()


def units(features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and unit of every column, and which columns are constant.

    Args:
        features: Tensor [n, d] of finite floats, n >= 2.

    Returns:
        Mean [d], unit [d] > 0 and a mask [d] of constant columns. The unit is the standard deviation, at least
        1e-3 of the largest one; constant columns get the largest one, since their own scale is unknown.
    """
    variance, mean = torch.var_mean(features, dim=0, correction=0)
    sd = variance.sqrt()
    constant = sd <= 1e-6 * mean.abs()
    largest = sd.masked_fill(constant, 0).amax()
    largest = torch.where(largest > 0, largest, torch.ones_like(largest))
    return mean, torch.where(constant, largest, sd.clamp_min(_FLOOR * largest)), constant


def check_shrinkage(shrinkage: float | None) -> None:
    """Raise ValueError if a shrinkage is not between 0 and 1."""
    if shrinkage is not None and not 0 <= shrinkage <= 1:
        raise ValueError(f"shrinkage is a share between 0 and 1, got {shrinkage}")


def ledoit_wolf(z: Tensor) -> float:
    """Return the shrinkage towards mu I that minimizes the expected squared error of the covariance, mu = trace / d.

    rho = min(b, delta) / delta with delta = |S - mu I|^2 and b = sum_i |z_i z_i' - S|^2 / n^2, in Frobenius norms
    (Ledoit & Wolf, "A well-conditioned estimator for large-dimensional covariance matrices", 2004).

    Args:
        z: Centred float tensor [n, d].

    Returns:
        rho in [0, 1].

    Example:
        >>> ledoit_wolf(torch.tensor([[1.0, 1.0], [-1.0, -1.0], [1.0, -1.0], [-1.0, 1.0]]))
        0.0
    """
    n, d = z.shape
    covariance = z.T @ z / n
    delta = covariance.square().sum() - covariance.trace().square() / d
    error = (z.square().sum(1).square().sum() / n - covariance.square().sum()) / n
    return float((error / delta).clamp(0, 1)) if delta > 0 else 0.0


def whiten(features: Tensor, shrinkage: float | None) -> tuple[Tensor, Tensor]:
    """Return the mean m and the lower-triangular W with W' W = S^-1, S the shrunk covariance.

    Constant columns have no covariance. They get the standard deviation that one of the n rows would cause if it deviated
    by the largest unit: they add nothing in training, but react when a dead feature becomes active.

    Args:
        features: Float tensor [n, d].
        shrinkage: Share of the identity in the covariance of the standardized columns; None: Ledoit-Wolf,
            at least 1e-4.

    Returns:
        m [d] and W [d, d], float64.

    Raises:
        ValueError: If the covariance is singular (shrinkage 0 and dependent columns).
    """
    n, d = features.shape
    x = double(features)
    mean, unit, constant = units(x)
    unit = torch.where(constant, unit / math.sqrt(n), unit)
    z = ((x - mean) / unit)[:, ~constant]
    covariance = torch.eye(d, dtype=x.dtype, device=x.device)
    if z.shape[1]:
        rho = max(ledoit_wolf(z), _MIN_SHRINKAGE) if shrinkage is None else shrinkage
        shrunk = (1 - rho) * (z.T @ z / n)
        shrunk.diagonal().add_(rho * z.square().mean())
        active = (~constant).nonzero()[:, 0]
        covariance[active[:, None], active] = shrunk
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if failed:
        raise ValueError(
            f"the covariance of {d} features on {n} rows is singular, and shrinkage={shrinkage} does not make it regular: "
            "use shrinkage=None, or more rows"
        )
    inverse = torch.linalg.solve_triangular(factor, torch.eye(d, dtype=x.dtype, device=x.device), upper=False)
    return mean, inverse / unit


def robust_moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation after clipping to median +- 10 robust standard deviations (1.4826 MAD), ignoring NaN.

    Args:
        values: Float tensor [n], n >= 1.

    Returns:
        Two scalars; the standard deviation is 1 if all values are (numerically) equal.
    """
    median = _nanmedian(values)
    mad = _nanmedian((values - median).abs())
    reach = torch.where(mad > 0, 14.826 * mad, torch.inf)
    clipped = values.clamp(median - reach, median + reach)
    mean = clipped.nanmean()
    sd = (clipped - mean).square().nanmean().sqrt()
    return mean, torch.where(sd > 1e-6 * (1 + mean.abs()), sd, torch.ones_like(sd))


def _nanmedian(values: Tensor) -> Tensor:
    """Return the median like torch.nanmedian, but without synchronizing with a GPU for the number of NaN."""
    at = (len(values) - 1 - values.isnan().sum()).div(2, rounding_mode="floor").clamp_min(0)
    return values.sort().values.gather(0, at[None])[0]  # NaN come last
