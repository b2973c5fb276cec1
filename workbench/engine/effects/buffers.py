"""Merging of the buffers of all branches: each branch updates its own copy, and the merged value is kept."""

from __future__ import annotations

import warnings
from collections import defaultdict

import torch
from torch import Tensor, nn

from ...errors import WorkbenchWarning
from ..plan import Bank
from .random import values_unavailable


class BufferMerger:
    """Collects the buffers of all branches and merges them once.

    A buffer that a method has stacked along an axis keeps one row per branch. Over all other axes a floating-point buffer takes the mean:
    for running statistics, whose update is linear, the mean of n updates equals one update with the mean statistic. Integer buffers should
    agree; if they do not, the first branch's value is kept with a warning.
    """

    def __init__(self) -> None:
        self._new: dict[tuple[str, int | None], list[Tensor]] = defaultdict(list)

    def add(self, name: str, row: int | None, value: Tensor) -> None:
        """Add a branch's value of a registered tensor, or of one row of it."""
        self._new[name, row].append(value)

    def merge(self, bank: Bank) -> tuple[list[Tensor], list[Tensor]]:
        """Return the buffers (rows of stacked ones) and their merged values."""
        targets, merged = [], []
        with torch.no_grad():
            for (name, row), values in self._new.items():
                target = bank.get(name) if row is None else bank.get(name)[row]
                new = self._merged(name, target, values)
                if new.shape != target.shape:
                    raise RuntimeError(
                        f"buffer {name!r} changed its shape in forward from {tuple(target.shape)} to {tuple(new.shape)}; "
                        "register it with its final shape before wrapping"
                    )
                targets.append(target)
                merged.append(new)
        return targets, merged

    def _merged(self, name: str, target: Tensor, values: list[Tensor]) -> Tensor:
        if len(values) == 1 or all(value is values[0] for value in values):
            return values[0]
        if target.is_floating_point() or target.is_complex():
            stacked = torch.stack(values)
            # equal values are kept exactly, since their sum could round or overflow; elementwise, since a test would synchronize a GPU
            return torch.where((stacked == stacked[0]).all(0), stacked[0], stacked.mean(0))
        # compared only where this neither synchronizes a device nor is recorded in a graph
        looks = target.is_cpu and not torch.compiler.is_dynamo_compiling() and not torch._C._len_torch_dispatch_stack()
        if looks and any(not torch.equal(values[0], value) for value in values[1:]):
            warnings.warn(
                f"buffer {name!r} holds integers that differ between branches; the first branch's are kept",
                WorkbenchWarning,
                stacklevel=2,
            )
        return values[0]


def commit(targets: list[Tensor], values: list[Tensor]) -> None:
    """Write all buffers in one operation, so that an interrupt leaves none half updated."""
    if not targets:
        return
    with torch.no_grad():
        plain = all(type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta for tensor in (*targets, *values))
        if plain and not values_unavailable():
            torch._foreach_copy_(targets, values)
            return
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)
