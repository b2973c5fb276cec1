"""One call of a loss for all models, where the mean of their losses is the loss of all their rows together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..engine.tree import is_float
from .outputs.meanings import Values
from .outputs.options import meaning_of

# means over the elements of a target that is shaped like the prediction
_FUNCTIONS = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)
_MODULES = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)


def joined(
    record: Any, models: Sequence[int], leaves: Sequence[Any], criterion: Any, y: Any, pair: Any
) -> tuple[Tensor, Tensor] | None:
    """The rows of all models one after another, and as many targets; None where each model's loss has to be asked for by itself.

    A criterion is called by itself for each model unless it is known to be a mean. Gradients are the same to the last bit: the number of
    targets is a power of two, so that dividing by it is exact, whether it comes before or after dividing by the number of models.

    Args:
        record: of the wrapped object.
        models: how many there are along each axis.
        leaves: of the output, [*models, rows, ...], with a pair [*models, 2, rows, ...].
        criterion, y, pair: as for `loss_of_model`.
    """
    n_models, depth = math.prod(models), len(models) + (pair is not None)
    # a graph of all calls is as fast, and Dynamo cannot follow what is looked at here
    if torch.compiler.is_compiling():
        return None
    if n_models < 2 or len(leaves) != 1 or not is_float(leaf := leaves[0]) or leaf.layout is not torch.strided:
        return None
    of_classes = _is_mean(criterion, (F.cross_entropy,), (nn.CrossEntropyLoss,))
    if not (criterion is None or of_classes or _is_mean(criterion, _FUNCTIONS, _MODULES)):
        return None
    if not isinstance(y, Tensor) or not torch.is_grad_enabled():
        return None
    values = record.output is None or isinstance(meaning_of(record.output), Values)
    if pair is not None and not (pair.likelihood_of_rows and values):
        return None
    one, n_targets = leaf.shape[depth:], y.numel()
    fits = y.shape == one or (of_classes and len(one) > 1 and y.shape == (one[0], *one[2:]))
    if not fits or not one or n_targets == 0 or n_targets & (n_targets - 1):
        return None
    stacked = leaf.reshape(n_models, *leaf.shape[len(models) :])
    rows = stacked.flatten(0, 1) if pair is None else stacked.movedim(0, 1).flatten(1, 2)
    return rows, y.expand(n_models, *y.shape).flatten(0, 1)


def _is_mean(criterion: Any, functions: Sequence[Any], modules: Sequence[type[nn.Module]]) -> bool:
    """Whether a criterion is one of these as torch has it, with its default reduction."""
    if not isinstance(criterion, nn.Module):
        return any(criterion is function for function in functions)
    if type(criterion) not in modules or criterion.reduction != "mean":
        return False
    return not (criterion._forward_hooks or criterion._forward_pre_hooks or "forward" in vars(criterion))


__all__ = ["joined"]
