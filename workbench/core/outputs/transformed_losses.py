"""Losses of torch that take a prediction for the logarithm or logit of what the targets are about, where that is compared with targets."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn import functional as F

from ..calls.risks import pair_of
from .options import has_classes


def refuse_transformed(wrapped: Any, criterion: Any, axes: tuple[str, ...], folds: bool = False) -> None:
    """Raise ValueError if a loss takes predictions in other units than those in which risk heads or folds compare them with targets.

    Args:
        wrapped: the wrapped object.
        criterion: the loss, or None.
        axes: names of the axes among which that of the risk heads may be.
        folds: whether the model is cross-fitted.
    """
    record = wrapped._workbench
    link_and_advice = _link_of(criterion)
    if link_and_advice is None or isinstance(record.output, Mapping) or has_classes(record.output):
        return
    pair = pair_of(record, axes)
    if pair is not None and getattr(pair.distribution, "own_prediction", False):
        user = f"the risk heads of {pair.name} learn how far the targets are from it"
    elif folds:
        user = "folds choose weights and noise by how far the targets are from it"
    else:
        return
    link, advice = link_and_advice
    raise ValueError(
        f"criterion: {getattr(criterion, '__name__', type(criterion).__name__)} takes the prediction for {link}, and {user}, in other units: "
        f"{advice}"
    )


def _link_of(criterion: Any) -> tuple[str, str] | None:
    """Return what a loss takes the prediction for, and what to do instead; None if that is in the units of the targets or unknown."""
    options: dict[str, Any] = {}
    if isinstance(criterion, functools.partial):
        criterion, options = criterion.func, criterion.keywords
    if criterion is F.poisson_nll_loss or type(criterion) is nn.PoissonNLLLoss:
        if options.get("log_input", getattr(criterion, "log_input", True)):
            return "the logarithm of a rate", (
                "let the model return the rate, with log_input=False, or use sculpt.Wrapper(torch.distributions.Poisson) without criterion= and "
                "folds=, or voters without risk heads and folds"
            )
    elif criterion is F.binary_cross_entropy_with_logits or type(criterion) is nn.BCEWithLogitsLoss:
        return "the logit of a probability", 'wrap with output="binary"'
    return None


__all__ = ["refuse_transformed"]
