"""Defaults of `fit`: batch size, device, optimizer and learning-rate schedule."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from workbench.core.batches.rows import Source, TensorRows
from workbench.core.wrapped import Wrapped
from workbench.engine.threads import torch_threads
from workbench.training.batches import Batches
from workbench.training.checks import FROZEN
from workbench.training.unshadowed import unshadowed

MAX_LIGHT = 2**19  # products of one layer in a step, up to which one thread is as fast as several
WARM_UP = 0.05  # share of all steps


def default_batch_size(train: Source) -> int:
    """Return the batch size of a DataLoader, or, for n rows, the power of two closest to n / 16, between 32 and 256."""
    if isinstance(train, DataLoader):
        return train.batch_size or 32
    return min(256, max(32, 2 ** round(math.log2(len(cast(Sized, train)) / 16))))


def threads_of_steps(wrapped: Wrapped, train: Source, size: int, device: torch.device) -> AbstractContextManager[None]:
    """Run steps of small networks on tables in one thread of the CPU, in which they compute the same numbers.

    Several would save microseconds on an idle machine, and cost milliseconds where other processes occupy a core.
    """
    if device.type != "cpu" or not isinstance(train, TensorRows):
        return nullcontext()
    is_table = all(leaf.is_floating_point() and leaf.dim() <= 2 for leaf in train.inputs)
    largest = max((p.numel() for p in wrapped.parameters()), default=0)
    return torch_threads(1) if is_table and largest * size <= MAX_LIGHT else nullcontext()


def move(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Move a module as `module.to(device, dtype)` does, but keep complex tensors complex, in the precision of `dtype`."""
    complex_dtype = torch.complex128 if dtype == torch.float64 else torch.complex64

    def kind(tensor: Tensor) -> torch.dtype:
        return dtype if tensor.is_floating_point() else complex_dtype if tensor.is_complex() else tensor.dtype

    tensors = [*module.parameters(), *module.buffers()]
    if all(tensor.device == device and tensor.dtype == kind(tensor) for tensor in tensors):
        return  # without a call, as a class may have a method `to` with other arguments
    if any(tensor.is_complex() for tensor in tensors):
        module._apply(lambda tensor: tensor.to(device, kind(tensor)))
    else:
        module.to(device, dtype)


def resolve_device(device: str | torch.device | None, current: torch.device) -> torch.device:
    """Return the device of this name, or the current one for None."""
    if device is None:
        return current
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"device: torch knows no device {device!r}; give 'cpu', 'cuda', 'cuda:1', 'mps', or 'auto' for a GPU if there is one"
        ) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device: torch sees no GPU here, found {str(device)!r}; device='auto' uses one only if available"
        )
    return torch.empty(0, device=device).device  # adds the index, and raises if there is no such device


def make_optimizer(
    wrapped: Wrapped,
    optimizer: Callable[..., Optimizer] | None,
    lr: float,
    weight_decay: float,
    batches: Batches,
    epochs: int,
) -> tuple[Optimizer, LambdaLR | None]:
    """Return the user's own optimizer, or Adam with its schedule, for all parameters that require a gradient."""
    parameters = [p for p in wrapped.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError(f"wrapped: no parameter requires a gradient, so there is nothing to train{FROZEN}")
    if optimizer is not None:
        custom = optimizer(parameters)
        if not isinstance(custom, Optimizer):
            raise TypeError(
                f"optimizer: the callable returned {type(custom).__name__}; it must return a torch Optimizer"
            )
        held = {p for group in custom.param_groups for p in group["params"]}
        if held.isdisjoint(parameters):
            raise ValueError(
                f"optimizer: this {type(custom).__name__} holds none of the parameters of the model; make it from those that the callable "
                "is given, as lambda parameters: torch.optim.SGD(parameters, lr=0.1) does"
            )
        closure = inspect.signature(custom.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise TypeError(
                f"optimizer: {type(custom).__name__}.step needs a closure that computes the loss several times, which fit does not give; train "
                "in your own loop, with wrapped.loss(criterion, x, y) in the closure"
            )
        return custom, None
    try:
        steps = epochs * len(batches)
    except TypeError as error:
        raise TypeError(
            "data: the DataLoader has no length, which the learning rate schedule needs; give optimizer=..., "
            "which has no schedule"
        ) from error
    groups = unshadowed(wrapped, "parameter_groups")(weight_decay) if weight_decay else parameters
    adam = _adam(groups, lr=lr, weight_decay=weight_decay)
    return adam, LambdaLR(adam, functools.partial(one_cycle, steps=steps))


def _adam(groups: Sequence[Any], **settings: Any) -> Optimizer:
    """Return AdamW for parameters or groups of them, with the fused implementation where torch supports it."""
    parameters = [p for group in groups for p in (group["params"] if isinstance(group, dict) else [group])]
    fused = all(p.is_floating_point() and p.device.type in ("cpu", "cuda", "mps") for p in parameters)
    return torch.optim.AdamW(groups, fused=fused or None, **settings)


def one_cycle(step: int, steps: int) -> float:
    """Return the share of the peak learning rate at a step, counted from 0: linear warm-up, then half a cosine.

    Example:
        >>> [round(one_cycle(step, steps=40), 2) for step in (0, 1, 2, 20, 40)]
        [0.5, 1.0, 1.0, 0.54, 0.0]
    """
    warm_up_steps = max(1, round(WARM_UP * steps))
    if step < warm_up_steps:
        return (step + 1) / warm_up_steps
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up_steps) / max(1, steps - warm_up_steps)))
