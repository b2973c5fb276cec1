"""Defaults of `fit`: batch size, device, optimizer and learning-rate schedule."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence, Sized
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from workbench.core.batches.rows import Source
from workbench.core.wrapped import Wrapped
from workbench.training.batches import Batches
from workbench.training.checks import FROZEN
from workbench.training.unshadowed import unshadowed

WARM_UP = 0.05  # share of all steps


def default_batch_size(train: Source) -> int:
    """A DataLoader's own; of n rows the power of two next to n / 16, between 32 and 256."""
    if isinstance(train, DataLoader):
        return train.batch_size or 32
    return min(256, max(32, 2 ** round(math.log2(len(cast(Sized, train)) / 16))))


def move(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Move a module as `module.to(device, dtype)` does, but let complex tensors be complex, of the precision of `dtype`."""
    complex_dtype = torch.complex128 if dtype == torch.float64 else torch.complex64
    tensors = [*module.parameters(), *module.buffers()]
    if not any(tensor.is_complex() for tensor in tensors):
        module.to(device, dtype)
        return

    def moved(tensor: Tensor) -> Tensor:
        kind = dtype if tensor.is_floating_point() else complex_dtype if tensor.is_complex() else tensor.dtype
        return tensor.to(device, kind)

    module._apply(moved)


def resolve_device(device: str | torch.device | None, present: torch.device) -> torch.device:
    """The device that is named, or the present one."""
    if device is None:
        return present
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device: torch sees no GPU here, found {str(device)!r}; device='auto' takes one where there is any"
        )
    return torch.empty(0, device=device).device  # with its index, and an error here if there is no such device


def make_optimizer(
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
        users = optimizer(parameters)
        if not isinstance(users, Optimizer):
            raise TypeError(f"optimizer: the callable gave {type(users).__name__}; it must give a torch Optimizer")
        return users, None
    try:
        steps = epochs * len(batches)
    except TypeError as error:
        raise TypeError(
            "data: the DataLoader has no length, which the learning rate's schedule needs; give optimizer=..., "
            "which goes without"
        ) from error
    trained = unshadowed(wrapped, "parameter_groups")(weight_decay) if weight_decay else parameters
    adam = _adam(trained, lr=lr, weight_decay=weight_decay)
    return adam, LambdaLR(adam, functools.partial(one_cycle, steps=steps))


def _adam(trained: Sequence[Any], **settings: Any) -> Optimizer:
    """Adam of parameters or groups of them, with all of a step in one kernel where torch has one for these parameters."""
    parameters = [p for group in trained for p in (group["params"] if isinstance(group, dict) else [group])]
    fused = all(p.is_floating_point() and p.device.type in ("cpu", "cuda", "mps") for p in parameters)
    return torch.optim.AdamW(trained, fused=fused or None, **settings)


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
