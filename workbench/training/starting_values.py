"""Initialization of the heads of counts and positive values at the scale of the targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.core.batches.call_arguments import as_arguments
from workbench.core.batches.rows import Source, TensorRows
from workbench.core.outputs.options import form_of
from workbench.core.ownership import Table, table_of
from workbench.core.wrapped import Wrapped
from workbench.distributions import FromTorch
from workbench.distributions.mixture import Mixture
from workbench.engine.effects.private_random import own_random
from workbench.engine.plan import Rule, Shared, Split, Stacked
from workbench.training.unshadowed import unshadowed

FAR = 1.0  # log of the factor (e) between the means of targets and predictions above which biases are shifted
# lower bound of the variance relative to the squared mean: smaller ones are learned quickly anyway
MIN_VARIANCE_SHARE = 1e-2


@dataclass(frozen=True)
class _Probe:
    """Predictions for a few rows: raw outputs [1 + n_heads, members, rows, ...], and the average mean and variance over these rows."""

    raw: Tensor
    mean: Tensor
    variance: Tensor


def start_at_targets(wrapped: Wrapped, train: Source, size: int, seed: int) -> None:
    """Shift the biases of the last layer so that predictions start near the mean of the targets and the variance of their noise.

    Raw outputs near 0 correspond to a mean near 1, and a rate of 150 takes a model long to reach. Nothing is changed if the mean of the
    predictions is already within a factor of e, as that of a trained model is, or if the raw outputs do not move exactly as the biases do.

    Args:
        wrapped: the model, with its standardization set.
        train: the training rows; only tensors are used.
        size: number of rows for which the model is evaluated.
        seed: seed of the model's random draws.
    """
    families = [method.distribution for method in wrapped._workbench.methods if method.name == "sculpt"]
    distribution = families[0] if families else None
    if (
        not isinstance(distribution, FromTorch)
        or not distribution.has_start
        or form_of(wrapped._workbench.output) != "values"
    ):
        return
    if not isinstance(train, TensorRows) or not isinstance(train.y, Tensor):
        return
    biases = _biases(table_of(wrapped), 1 + distribution.n_heads)
    if not biases:
        return
    reference = biases[0]
    columns = reference.shape[-1]
    if columns > 1 and train.y.shape[1:] != (columns,):
        return
    rows = train.take(torch.linspace(0, len(train) - 1, min(size, len(train))).long()).to(
        reference.device, reference.dtype
    )
    before = _probe(wrapped, rows, seed, columns)
    if before is None:
        return
    y = train.y.cpu().double().flatten(1 if columns > 1 else 0)
    mean, variance = y.mean(0), _residuals(train.x, y).var(0, correction=0)
    is_far = (mean / before.mean).log().abs() > FAR
    wanted = distribution.start(mean, variance.maximum(MIN_VARIANCE_SHARE * mean.square()))
    shift = wanted - distribution.start(before.mean, before.variance)
    shift = shift.where(is_far & shift.isfinite().all(0), 0.0)  # [1 + n_heads] or [1 + n_heads, columns]
    if not shift.any():
        return
    original = [bias.detach().clone() for bias in biases]
    with torch.no_grad():
        for bias, amount in zip(biases, shift, strict=True):
            bias.add_(amount.to(bias))
    after = _probe(wrapped, rows, seed, columns)
    moved = shift.reshape(len(shift), *[1] * (before.raw.dim() - shift.dim()), *shift.shape[1:])
    if after is None or not torch.allclose(after.raw, before.raw + moved.to(before.raw), rtol=1e-3, atol=1e-3):
        with torch.no_grad():
            for bias, value in zip(biases, original, strict=True):
                bias.copy_(value)


def _residuals(x: Any, y: Tensor) -> Tensor:
    """Return the residuals of a linear fit to a table, approximately the noise; for other inputs the targets, which spread more than it."""
    if not isinstance(x, Tensor) or x.dim() != 2 or not x.is_floating_point() or len(x) < 10 * (x.shape[1] + 1):
        return y
    x = x.cpu().double()
    varies = x.amin(0) < x.amax(0)
    inputs = torch.cat([torch.ones_like(x[:, :1]), (x[:, varies] - x[:, varies].mean(0)) / x[:, varies].std(0)], 1)
    targets = y.reshape(len(x), -1)
    plane = torch.linalg.lstsq(inputs, targets, driver="gelsd").solution
    return (targets - inputs @ plane).reshape(y.shape)


def _biases(table: Table, heads: int) -> list[Tensor]:
    """Return the bias of the last layer for each raw output, [columns] or [voters, columns]; empty unless all can be trained."""
    last_layers = table.last_layers()
    slots = [f"{path}.bias" if path else "bias" for path in last_layers]
    if len(slots) != 1 or slots[0] not in table.record.slots or table.value(slots[0]).dim() != 1:
        return []
    slot = slots[0]
    rule: Rule = table.record.rules.get(slot, Shared(slot))
    options = rule.options if isinstance(rule, Split) and rule.axis == "sculpt" else (rule,)
    if len(options) != heads or not all(isinstance(option, Shared | Stacked) for option in options):
        return []
    biases = [table.get(name) for option in options for name in option.registered()]
    return biases if all(bias.requires_grad and bias.is_floating_point() for bias in biases) else []


def _probe(wrapped: Wrapped, rows: TensorRows, seed: int, columns: int) -> _Probe | None:
    modes = [(module, module.training) for module in wrapped.modules()]
    wrapped.eval()
    try:
        with torch.no_grad(), own_random(seed, rows.device):
            args, kwargs = as_arguments(wrapped, rows.x)
            predictive: Any = unshadowed(wrapped, "predictive")(*args, **kwargs)
    finally:
        for module, mode in modes:
            module.training = mode
    if not isinstance(predictive, Mixture):
        return None
    mean, variance = (
        moment.cpu().double().flatten(1 if columns > 1 else 0) for moment in (predictive.mean, predictive.variance)
    )
    raw = torch.cat([predictive.loc.unsqueeze(0), predictive.risk]).cpu().double()
    return _Probe(raw, mean.mean(0), variance.mean(0))
