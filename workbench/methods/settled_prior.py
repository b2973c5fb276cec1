"""Prior functions made near zero at the training rows, so that voters need not learn to undo them there."""

from __future__ import annotations

from typing import Any

import torch

from ..core.additions import extra
from ..core.method import evaluating
from ..core.ownership import engine_of, table_of
from ..core.prior import NAME, Whole, bank_of
from ..engine.plan import Plan
from ..engine.tree import map_tensors
from .densities.moments import double, full_precision
from .last_layer import Probe, flatten_rows

# Ridge relative to the mean squared feature: a smaller one leaves too little of the prior away from the rows, a larger one too much at them.
RIDGE = 1e-2
MAX_VECTORS = 4096  # feature vectors that the ridge regression uses


@torch.no_grad()
def settle(wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Subtract from the last layer of each prior its ridge regression on the features of some rows.

    With phi the inputs of the layer at the rows, with a 1 appended if it has a bias, A the mean of phi phi^T and l = 0.01 tr(A) / d, the weights
    w become w - (A + l I)^-1 A w = l (A + l I)^-1 w: the prior vanishes along the features of the rows, and stays along those of other inputs.

    Args:
        wrapped: wrapped model with a prior.
        args, kwargs: inputs of the model, in the units that it is trained in.

    Returns:
        Whether it was done; it needs priors that end in a single linear layer whose weights differ between the voters.
    """
    prior, table = extra(wrapped, NAME), table_of(wrapped)
    paths = table.last_layers()
    path = next(iter(paths), "")
    weight, bias = (f"{path}.{part}".lstrip(".") for part in ("weight", "bias"))
    if len(paths) != 1 or weight not in prior.drawn or bias in prior.shared:
        return False
    settled = []
    for i in range(len(prior.value(weight))):
        probe = Probe(frozenset((weight, bias)))
        plan = Plan(
            (),
            prior.rules(),
            bank_of(wrapped),
            (Whole(), probe),
            keep_state=False,
            fixed={prior.axis: i},
        )
        with evaluating(wrapped):
            engine_of(wrapped).run(plan, *map_tensors(lambda t: t.clone(), (args, kwargs)))
        if probe.calls != 1:
            return False
        phi, values = double(flatten_rows(probe.taps["features"])), double(probe.taps["weights"])
        phi = phi[torch.linspace(0, len(phi) - 1, min(len(phi), MAX_VECTORS), dtype=torch.float64).round().long()]
        with full_precision(phi):
            products = phi.mT @ phi / len(phi)
            ridge = RIDGE * products.diagonal().mean() * torch.eye(len(products)).to(products)
            settled.append(torch.linalg.solve(products + ridge, ridge @ values.mT).mT)
    stacked = torch.stack(settled)
    if not bool(stacked.isfinite().all()):
        return False
    for slot, part in ((weight, stacked[..., : prior.value(weight).shape[-1]]), (bias, stacked[..., -1])):
        if slot in prior.drawn:
            prior.value(slot).copy_(part)
    return True


__all__ = ["settle"]
