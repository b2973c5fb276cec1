"""Weights that a model's constructor draws, as research code often does: recognized, and new ones drawn in their scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

_SURE = 6  # standard errors beyond which a deviation is no chance, in a model of thousands of tensors
_LIKELY = 3  # the same of a scale, where a mistake changes little
_REPEATS = 4  # equal values of a bias that no draw would give
_MOST = 256  # about as many rows and columns of a weight are looked at, evenly spread


def looks_drawn(weight: Tensor) -> bool:
    """Return whether a weight [out, in, ...] may come from an initialization: mean 0, no heavy tails, rows and columns of one scale.

    Training leaves some rows and columns larger than others, and means of rows (of filters, say) beyond those of independent values.

    Args:
        weight: parameter of at least two dimensions; rows of zeros, as for padding, are left out.
    """
    rows, columns = (max(1, size // _MOST) for size in weight.shape[:2])
    values = weight.detach()[::rows, ::columns].float()
    values = values[values.flatten(1).any(1)]
    n = values.numel()
    if n < 2:
        return True
    values = values / values.square().mean().sqrt()
    if abs(values.mean()) > _SURE / math.sqrt(n) or values.pow(4).mean() > 3 + _SURE * math.sqrt(24 / n):
        return False
    return all(_is_homogeneous(groups.flatten(1)) for groups in (values, values.transpose(0, 1)))


def _is_homogeneous(groups: Tensor) -> bool:
    """Return whether means and mean squares of groups [n, size] vary at most as those of independent normal values."""
    n, size = groups.shape
    if min(n, size) == 1:
        return True
    means = groups.mean(1).square().mean() * size
    squares = groups.square().mean(1).var() * size / 2
    return bool(means < 1 + _SURE * math.sqrt(2 / n) and squares < 1 + _SURE * math.sqrt((2 + 12 / size) / n))


def matching(value: Tensor) -> Callable[[Tensor], None]:
    """Return a function that changes newly drawn values, in place, to those of the initialization that gave a parameter its value.

    Weights get its scale, unless the difference may be chance; biases its zeros and other constants (a forget gate's ones).

    Args:
        value: parameter from the model's own initialization; only the norm of a weight is kept.
    """
    if value.dim() == 1:
        return partial(_keep_constants, value=value.detach().clone())
    return partial(_rescale, norm=_norm(value))


@torch.no_grad()
def _keep_constants(drawn: Tensor, value: Tensor) -> None:
    if len(drawn) == 1 or not torch.equal(drawn, drawn[:1].expand_as(drawn)):
        constants, places, counts = value.unique(return_inverse=True, return_counts=True)
        is_constant = (counts >= max(_REPEATS, len(value) / 8)) | (constants == 0)
        drawn.copy_(torch.where(is_constant[places], value, drawn))


@torch.no_grad()
def _rescale(drawn: Tensor, norm: float) -> None:
    current = _norm(drawn)
    if min(norm, current) > 0 and abs(math.log(norm / current)) > _LIKELY / math.sqrt(drawn.numel()):
        drawn.mul_(norm / current)


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.promote_types(tensor.dtype, torch.float32)))
