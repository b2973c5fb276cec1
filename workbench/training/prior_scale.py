"""Choose the scale of randomised prior functions by training rows at the ends of columns, which are left out for it."""

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
    """The least scale of `vote.Wrapper(prior=)` by which bands hold training rows that voters have not come near.

    For each of some columns copies of the model are trained without the rows at both of its ends. The spread of voters e at these grows with
    the scale in proportion, about, as priors are near zero at the rows that are trained on; so the scale that a row at a distance d from the
    prediction wants is that of the wrapper times sqrt((d / z)^2 - a^2) / e, where a is the noise and z the normal quantile of a central band.
    The coverage's quantile of it over the rows left out is taken, and the largest of the columns.

    Args:
        wrapper: what wraps the model for this, voters with a prior to start from, such as `vote.Wrapper(10, prior=300)`; it says the noise if
            `sculpt` is part of it, and else that is the root mean square of the residuals of the rows trained on.
        model: a plain model, which stays as it is.
        data: training rows as `fit` takes them, x [n, columns] and y [n, outputs], floating-point.
        columns: at most so many, those whose ranks correlate most with those of the targets.
        share: of the rows, left out at each end of a column.
        coverage: of the bands.
        settings: of `fit`.

    Raises:
        ValueError: the rows are no table of values, no column has ends, or the wrapper has voters without a prior.

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
        raise ValueError("data: the ends of columns are those of a table x [n, columns] with values y [n, outputs]")
    z = float(Normal().icdf(torch.tensor((1 + coverage) / 2), torch.tensor(0.0), torch.tensor(1.0)))
    wanted = []
    for inside in _without_ends(x, y, columns, share):
        wrapped = wrapper(copy.deepcopy(model))
        scale = next((method.wrapper.prior for method in wrapped._workbench.methods if method.name == "vote"), None)
        if not scale:
            raise ValueError(
                "wrapper: it has no voters with a prior to start from, such as vote.Wrapper(10, prior=300)"
            )
        fit(wrapped, (x[inside], y[inside]), **{"progress": False, **settings})
        wanted.append(float(scale) * _factor(wrapped, x, y, inside, z, coverage))
    if not wanted:
        raise ValueError("data: no column has rows at its ends that could be left out; choose the scale by hand")
    return max(wanted)


def _without_ends(x: Tensor, y: Tensor, columns: int, share: float) -> Iterator[Tensor]:
    """Masks [n] of the rows between the ends, a mask for each column, the most telling first."""
    ranks = x.double().argsort(0).argsort(0).double()
    targets = y.double().reshape(len(y), -1).argsort(0).argsort(0).double()
    telling = torch.corrcoef(torch.cat([ranks, targets], 1).mT)[: x.shape[1], x.shape[1] :].abs().amax(1)
    left = columns
    for column in telling.nan_to_num().argsort(descending=True):
        values = x[:, column].double()
        low, high = values.quantile(share), values.quantile(1 - share)
        inside = (values >= low) & (values <= high)
        if left and 2 <= int(inside.sum()) < len(x):
            left -= 1
            yield inside


@torch.no_grad()
def _factor(wrapped: Any, x: Tensor, y: Tensor, inside: Tensor, z: float, coverage: float) -> float:
    """What the scale would have to be multiplied by."""
    like = next(p for p in wrapped.parameters() if p.is_floating_point())
    mean, risk = wrapped(x.to(like.device, like.dtype), return_risk=True)

    def as_targets(values: Tensor) -> Tensor:
        return values.to(y.device, torch.float64).reshape(y.shape)

    distance = (y.double() - as_targets(mean)).abs()
    epistemic, noise = (risk, None) if isinstance(risk, Tensor) else (risk.epistemic, risk.aleatoric)
    if noise is None:
        noise = distance[inside].square().mean().sqrt().expand_as(distance)
    spread = ((distance / z).square() - as_targets(noise).square()).clamp_min(0).sqrt()
    factors = spread / as_targets(epistemic).clamp_min(1e-12)
    return float(factors[~inside].flatten().quantile(coverage))


__all__ = ["prior_scale"]
