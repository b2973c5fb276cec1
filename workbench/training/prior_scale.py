"""Choice of the scale of randomized prior functions, by training rows at the ends of columns that are held out for it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from workbench.core.batches.rows import TensorRows
from workbench.data.reader import read
from workbench.distributions import Normal
from workbench.training.fitting import fit


def prior_scale(
    wrapper: Callable[[nn.Module], Any],
    model: nn.Module,
    data: Any,
    *,
    columns: int = 2,
    share: float = 0.15,
    coverage: float = 0.9,
    **settings: Any,
) -> float:
    """Return the smallest scale of `vote.Wrapper(prior=)` at which intervals cover training rows far from those that the voters were trained on.

    For each of several columns, copies of the model are trained without the rows at both of its ends. The spread e of the voters there grows
    about in proportion to the scale, since the priors are near zero at the training rows; so a row at a distance d from the
    prediction needs the wrapper's scale times sqrt((d / z)^2 - a^2) / e, where a is the noise and z the normal quantile of a central interval.
    The result is the `coverage` quantile of this over the held-out rows, and the largest over the columns.

    Args:
        wrapper: wraps the model for this purpose, with voters that have a prior to start from, such as `vote.Wrapper(10, prior=300)`; the noise
            is that of `sculpt` if it is part of the wrapper, and else the root mean square of the training residuals.
        model: a plain model, which is not changed.
        data: training rows as for `fit`, x [n, columns] and y [n, outputs], floating-point.
        columns: maximum number of columns; those with the largest rank correlation with the targets are used.
        share: share of the rows held out at each end of a column.
        coverage: coverage of the intervals.
        settings: keyword arguments of `fit`.

    Raises:
        ValueError: the rows are not a table of values, no column has ends, or the wrapper has no voters with a prior.

    Example:
        >>> from workbench import vote
        >>> x = torch.linspace(-1, 1, 100)[:, None]
        >>> net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
        >>> prior_scale(vote.Wrapper(3, prior=10), net, (x, x**3), epochs=5) >= 0
        True
    """
    if not 0 < share < 0.5 or not 0 < coverage < 1 or columns < 1:
        raise ValueError(
            "share must lie between 0 and 0.5, coverage between 0 and 1, and columns must be 1 or more; "
            f"found {share!r}, {coverage!r} and {columns!r}"
        )
    rows = read(data)
    x, y = (rows.x, rows.y) if isinstance(rows, TensorRows) else (None, None)
    if not isinstance(x, Tensor) or not isinstance(y, Tensor) or x.dim() != 2 or not y.is_floating_point():
        raise ValueError("data: prior_scale needs a table x [n, columns] with float targets y [n, outputs]")
    z = float(Normal().icdf(torch.tensor((1 + coverage) / 2), torch.tensor(0.0), torch.tensor(1.0)))
    scales = []
    for inside in _without_ends(x, y, columns, share):
        wrapped = wrapper(copy.deepcopy(model))
        scale = next((method.wrapper.prior for method in wrapped._workbench.methods if method.name == "vote"), None)
        if not scale:
            raise ValueError(
                "wrapper: it has no voters with a prior to start from; use one such as vote.Wrapper(10, prior=300)"
            )
        fit(wrapped, (x[inside], y[inside]), **{"progress": False, **settings})
        scales.append(float(scale) * _factor(wrapped, x, y, inside, z, coverage))
    if not scales:
        raise ValueError("data: no column has rows at its ends that could be held out; choose the scale by hand")
    return max(scales)


def _without_ends(x: Tensor, y: Tensor, columns: int, share: float) -> Iterator[Tensor]:
    """Yield masks [n] of the rows between the ends, one per column, the column with the largest rank correlation with the targets first."""
    ranks = x.double().argsort(0).argsort(0).double()
    targets = y.double().reshape(len(y), -1).argsort(0).argsort(0).double()
    correlation = torch.corrcoef(torch.cat([ranks, targets], 1).mT)[: x.shape[1], x.shape[1] :].abs().amax(1)
    remaining = columns
    for column in correlation.nan_to_num().argsort(descending=True):
        values = x[:, column].double()
        low, high = values.quantile(share), values.quantile(1 - share)
        inside = (values >= low) & (values <= high)
        if remaining and 2 <= int(inside.sum()) < len(x):
            remaining -= 1
            yield inside


@torch.no_grad()
def _factor(wrapped: Any, x: Tensor, y: Tensor, inside: Tensor, z: float, coverage: float) -> float:
    """Return the factor by which the scale would have to be multiplied."""
    parameter = next(p for p in wrapped.parameters() if p.is_floating_point())
    mean, risk = wrapped(x.to(parameter.device, parameter.dtype), return_risk=True)

    def as_targets(values: Tensor) -> Tensor:
        return values.to(y.device, torch.float64).reshape(y.shape)

    distance = (y.double() - as_targets(mean)).abs()
    epistemic, noise = (risk, None) if isinstance(risk, Tensor) else (risk.epistemic, risk.aleatoric)
    if noise is None:
        noise = distance[inside].square().mean().sqrt().expand_as(distance)
    spread = ((distance / z).square() - as_targets(noise).square()).clamp_min(0).sqrt()
    # voters may agree exactly; the bound is in the unit of the targets
    factors = spread / as_targets(epistemic).clamp_min(1e-12 * (float(distance.max()) or 1.0))
    return float(factors[~inside].flatten().quantile(coverage))


__all__ = ["prior_scale"]
