"""Start the heads of counts and positive values at the scale of the targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.core.batches.call_arguments import opened
from workbench.core.batches.rows import Source, TensorRows
from workbench.core.outputs.options import form_of
from workbench.core.ownership import Table, table_of
from workbench.core.wrapped import Wrapped
from workbench.distributions import FromTorch
from workbench.distributions.mixture import Mixture
from workbench.engine.effects.private_random import own_random
from workbench.engine.plan import Rule, Shared, Split, Stacked
from workbench.training.unshadowed import unshadowed

FAR = 1.0  # a factor of e between the mean of the targets and that of the predictions
SMALLEST_SHARE = 1e-2  # of the squared mean, below which a variance says nothing that training would not learn at once


@dataclass(frozen=True)
class _Probe:
    """What the model says of a few rows: raw outputs [1 + n_heads, members, rows, ...], and the average mean and variance over these rows."""

    raw: Tensor
    mean: Tensor
    variance: Tensor


def start_at_targets(wrapped: Wrapped, train: Source, size: int, seed: int) -> None:
    """Shift the biases that raw outputs end in, so that predictions have about the mean of the targets and the variance of their noise.

    Raw outputs near 0 are a mean near 1, and a rate of 150 takes a model long to reach. Nothing is changed if predictions have about the right
    mean already (a factor of e), as those of a trained model have, nor unless the raw outputs move by just what the biases did.

    Args:
        wrapped: the model, with its standardization set.
        train: the rows to train on; only tensors are looked at.
        size: how many of them the model is asked about.
        seed: of what the model draws.
    """
    families = [method.distribution for method in wrapped._workbench.methods if method.name == "sculpt"]
    said = families[0] if families else None
    if not isinstance(said, FromTorch) or not said.has_start or form_of(wrapped._workbench.output) != "values":
        return
    if not isinstance(train, TensorRows) or not isinstance(train.y, Tensor):
        return
    biases = _biases(table_of(wrapped), 1 + said.n_heads)
    if not biases:
        return
    like = biases[0]
    columns = like.shape[-1]
    if columns > 1 and train.y.shape[1:] != (columns,):
        return
    rows = train.take(torch.linspace(0, len(train) - 1, min(size, len(train))).long()).to(like.device, like.dtype)
    before = _probe(wrapped, rows, seed, columns)
    if before is None:
        return
    y = train.y.cpu().double().flatten(1 if columns > 1 else 0)
    mean, variance = y.mean(0), _residuals(train.x, y).var(0, correction=0)
    far = (mean / before.mean).log().abs() > FAR
    wanted = said.start(mean, variance.maximum(SMALLEST_SHARE * mean.square()))
    shift = wanted - said.start(before.mean, before.variance)
    shift = shift.where(far & shift.isfinite().all(0), 0.0)  # [1 + n_heads] or [1 + n_heads, columns]
    if not shift.any():
        return
    kept = [bias.detach().clone() for bias in biases]
    with torch.no_grad():
        for bias, by in zip(biases, shift, strict=True):
            bias.add_(by.to(bias))
    after = _probe(wrapped, rows, seed, columns)
    moved = shift.reshape(len(shift), *[1] * (before.raw.dim() - shift.dim()), *shift.shape[1:])
    if after is None or not torch.allclose(after.raw, before.raw + moved.to(before.raw), rtol=1e-3, atol=1e-3):
        with torch.no_grad():
            for bias, value in zip(biases, kept, strict=True):
                bias.copy_(value)


def _residuals(x: Any, y: Tensor) -> Tensor:
    """What a plane through a table leaves of targets, about the noise; else the targets, whose spread is more than that of the noise."""
    if not isinstance(x, Tensor) or x.dim() != 2 or not x.is_floating_point() or len(x) < 10 * (x.shape[1] + 1):
        return y
    x = x.cpu().double()
    varies = x.amin(0) < x.amax(0)
    inputs = torch.cat([torch.ones_like(x[:, :1]), (x[:, varies] - x[:, varies].mean(0)) / x[:, varies].std(0)], 1)
    targets = y.reshape(len(x), -1)
    plane = torch.linalg.lstsq(inputs, targets, driver="gelsd").solution
    return (targets - inputs @ plane).reshape(y.shape)


def _biases(table: Table, heads: int) -> list[Tensor]:
    """The registered bias of the last layer for each raw output, [columns] or [voters, columns]; none unless all can be trained."""
    last = table.last_layers()
    slots = [f"{path}.bias" if path else "bias" for path in last]
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
            args, kwargs = opened(wrapped, rows.x)
            said: Any = unshadowed(wrapped, "predictive")(*args, **kwargs)
    finally:
        for module, mode in modes:
            module.training = mode
    if not isinstance(said, Mixture):
        return None
    mean, variance = (moment.cpu().double().flatten(1 if columns > 1 else 0) for moment in (said.mean, said.variance))
    raw = torch.cat([said.loc.unsqueeze(0), said.risk]).cpu().double()
    return _Probe(raw, mean.mean(0), variance.mean(0))
