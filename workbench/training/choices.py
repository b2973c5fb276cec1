"""What `fit` chooses where its user does not: rows to validate on, batch size, standardisation, criterion, device, optimizer and schedule."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence, Sized
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from workbench.core.wrapped import Wrapped
from workbench.training.checks import Criterion, keeps_meaning
from workbench.training.loop import FROZEN, own
from workbench.training.rows import Batches, Rows, Source, cut, moments, read

WARM_UP = 0.05  # share of all steps


def sources(data: Any, validation: Any, batch_size: int | None, seed: int) -> tuple[Source, Source | None]:
    """Rows to train on and rows to validate on."""
    train = read(data)
    share = validation if isinstance(validation, int | float) else None
    if isinstance(train, DataLoader):
        if batch_size is not None:
            raise ValueError(f"batch_size: the DataLoader has its own; leave batch_size={batch_size} out")
        if share:
            raise ValueError(
                "validation: the rows of a DataLoader can't be cut; give validation=0, or validation=another_loader"
            )
    elif len(cast(Sized, train)) < 2:
        raise ValueError(f"data: found {len(cast(Sized, train))} rows; training needs at least 2")
    if share is None:
        valid = read(validation, "validation")
        if isinstance(train, Rows) and isinstance(valid, Rows):
            shapes = [[tuple(part.shape[1:]) for part in (*rows.args, rows.y)] for rows in (train, valid)]
            if shapes[0] != shapes[1]:
                raise ValueError(f"validation: its rows have shapes {shapes[1]}, those to train on {shapes[0]}")
        if not isinstance(valid, DataLoader) and not len(cast(Sized, valid)):
            raise ValueError("validation: there is no row; give validation=0 to do without")
        return train, valid
    if isinstance(share, bool) or not 0 <= share < 1:
        raise ValueError(f"validation must be a share of at least 0 and below 1, or rows; found {validation!r}")
    return cut(train, float(share), seed) if share and not isinstance(train, DataLoader) else (train, None)


def batch_size_of(train: Source) -> int:
    """A DataLoader's own; of n rows the power of two next to n / 16, between 32 and 256."""
    if isinstance(train, DataLoader):
        return train.batch_size or 32
    return min(256, max(32, 2 ** round(math.log2(len(cast(Sized, train)) / 16))))


def scaling_of(
    wrapped: Wrapped, train: Source, criterion: Criterion | None, standardize: bool | None, learns: bool
) -> dict[str, Tensor] | None:
    """The standardisation to set, empty to remove the present one, None to leave all as it is."""
    if standardize is False:
        return {}
    if standardize is None and (own(wrapped, "scaling") is not None or not learns or not isinstance(train, Rows)):
        return None
    if not isinstance(train, Rows):
        raise ValueError(
            f"standardize: it takes tensors or arrays, not a {type(train).__name__}, whose rows can't be seen at once"
        )
    values: dict[str, Tensor] = {}
    if isinstance(train.x, Tensor) and train.x.is_floating_point():
        values["x_mean"], values["x_scale"] = moments(train.x)
    if train.y.is_floating_point() and (standardize or (keeps_meaning(criterion) and _output(wrapped) == "values")):
        values["y_mean"], values["y_scale"] = moments(train.y, centre=own(wrapped, "_location_scale"))
    return values


def _output(wrapped: Any) -> str:
    return wrapped._workbench.output


def criterion_of(wrapped: Wrapped, y: Any) -> Criterion:
    """Mean squared error for float targets, cross entropy for class numbers."""
    if y.is_floating_point():
        return F.mse_loss
    return cross_entropy_of_probs if _output(wrapped) == "probs" else F.cross_entropy


def cross_entropy_of_probs(probs: Tensor, y: Tensor) -> Tensor:
    """Mean of -log p over the rows, for probabilities [n, classes] and class numbers [n]."""
    return F.nll_loss(probs.clamp_min(torch.finfo(probs.dtype).tiny).log(), y)


def device_of(device: str | torch.device | None, present: torch.device) -> torch.device:
    """The device that is named, or the present one."""
    if device is None:
        return present
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.empty(0, device=device).device  # with its index, and an error here if there is no such device


def optimizer_of(
    wrapped: Wrapped,
    optimizer: Callable[..., Optimizer] | None,
    lr: float,
    weight_decay: float,
    batches: Batches,
    epochs: int,
) -> tuple[Optimizer, LambdaLR | None]:
    """The user's own optimizer, or Adam with its schedule, for all parameters that require a gradient."""
    parameters = [p for p in wrapped.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError(f"wrapped: no parameter requires a gradient, so there is nothing to train{FROZEN}")
    if optimizer is not None:
        made = optimizer(parameters)
        if not isinstance(made, Optimizer):
            raise TypeError(f"optimizer: the callable gave {type(made).__name__}; it must give a torch Optimizer")
        return made, None
    try:
        steps = epochs * len(batches)
    except TypeError as error:
        raise TypeError(
            "data: the DataLoader has no length, which the learning rate's schedule needs; give optimizer=..., "
            "which goes without"
        ) from error
    adam = _adam(parameters, lr=lr, weight_decay=weight_decay)
    return adam, LambdaLR(adam, functools.partial(one_cycle, steps=steps))


def _adam(parameters: Sequence[Tensor], **settings: Any) -> Optimizer:
    """All of a step in one kernel where torch has one for these parameters."""
    fused = all(p.is_floating_point() and p.device.type in ("cpu", "cuda", "mps") for p in parameters)
    return torch.optim.AdamW(list(parameters), fused=fused or None, **settings)


def one_cycle(step: int, steps: int) -> float:
    """The share of the peak learning rate at a step, counted from 0: up in a line, down in half a cosine.

    Example:
        >>> [round(one_cycle(step, steps=40), 2) for step in (0, 1, 2, 20, 40)]
        [0.5, 1.0, 1.0, 0.54, 0.0]
    """
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))
