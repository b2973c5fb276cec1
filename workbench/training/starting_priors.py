"""Let randomised prior functions be near zero at the training rows before voters are trained beside them."""

from __future__ import annotations

import torch

from workbench.core.batches.call_arguments import opened
from workbench.core.batches.rows import Source, TensorRows
from workbench.core.wrapped import Wrapped
from workbench.training.unshadowed import unshadowed

MOST_ROWS = 2000


def settle_priors(wrapped: Wrapped, train: Source) -> None:
    """Settle the priors of voters that have some, on a part of the rows.

    Args:
        wrapped: the model, with its standardization set, where it will be trained.
        train: the rows to train on; only tensors are looked at.
    """
    voting = [method for method in wrapped._workbench.methods if method.name == "vote" and method.wrapper.prior]
    if not voting or not isinstance(train, TensorRows):
        return
    like = next(p for p in wrapped.parameters() if p.is_floating_point())
    few = torch.linspace(0, len(train) - 1, min(len(train), MOST_ROWS), dtype=torch.float64).round().long()
    args, kwargs = opened(wrapped, train.take(few).to(like.device, like.dtype).x)
    if (scaling := unshadowed(wrapped, "scaling")) is not None:
        args, kwargs = scaling.inputs(args, kwargs)
    voting[0].settle_prior(wrapped, args, kwargs)


__all__ = ["settle_priors"]
