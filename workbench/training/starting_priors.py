"""Centering of randomized prior functions, so that they are near zero at the training rows before voters are trained."""

from __future__ import annotations

import torch

from workbench.core.batches.call_arguments import as_arguments
from workbench.core.batches.rows import Source, TensorRows
from workbench.core.wrapped import Wrapped
from workbench.training.unshadowed import unshadowed

MAX_ROWS = 2000


def settle_priors(wrapped: Wrapped, train: Source) -> None:
    """Center the priors of voters, if they have any, on a subset of the rows.

    Args:
        wrapped: the model, with its standardization set, on the device of the training.
        train: the training rows; only tensors are used.
    """
    vote_methods = [method for method in wrapped._workbench.methods if method.name == "vote" and method.wrapper.prior]
    if not vote_methods or not isinstance(train, TensorRows):
        return
    parameter = next(p for p in wrapped.parameters() if p.is_floating_point())
    subset = torch.linspace(0, len(train) - 1, min(len(train), MAX_ROWS), dtype=torch.float64).round().long()
    args, kwargs = as_arguments(wrapped, train.take(subset).to(parameter.device, parameter.dtype).x)
    if (scaling := unshadowed(wrapped, "scaling")) is not None:
        args, kwargs = scaling.inputs(args, kwargs)
    vote_methods[0].settle_prior(wrapped, args, kwargs)


__all__ = ["settle_priors"]
