"""Merging of the buffers of all branches: each branch updates its own copy, and the merged value is kept."""

from __future__ import annotations

import functools
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import WorkbenchWarning
from ..plan import Bank, Index, Plan, Stacked
from ..results import Result, StackedResults
from .random import values_unavailable


def merged_buffers(
    plan: Plan,
    results: Sequence[Result],
    allow_resize: Callable[[str], bool] = lambda name: False,
    is_table: Callable[[str], bool] = lambda name: False,
    may_wait: bool = False,
    training: bool = False,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the buffers that the branches have written into, whole or rows of stacked ones, and their merged values.

    Args:
        plan: the plan of the run.
        results: the results of its branches.
        allow_resize: returns whether the buffer of a name, which all branches share, may have another shape now.
        is_table: returns whether a buffer that all branches share is a table that forward computes rather than a statistic.
        may_wait: whether buffers on other devices are compared as well, which makes the program wait for the device.
        training: whether to warn of buffers that hold gradients.
    """
    merger = BufferMerger(allow_resize, is_table, may_wait, training)
    if isinstance(results, StackedResults):
        _add_stacked(merger, plan, results)
    else:
        for index, result in zip(plan.indices, results, strict=True):
            for slot, value in result.buffers.items():
                merger.add(*_home(plan, slot, index), value)
    return merger.merge(plan.bank)


def _home(plan: Plan, slot: str, index: Index) -> tuple[str, int | None]:
    """Return where the buffer of a branch is stored; see `Rule.home`."""
    return plan.rules[slot].home(index) if slot in plan.rules else (slot, None)


def _add_stacked(merger: BufferMerger, plan: Plan, results: StackedResults) -> None:
    """Add the buffers of all branches of one pass, where possible without separating them: each operation on a buffer counts."""
    for slot, value in results.shared.items():
        indices = plan.indices if slot in plan.rules else plan.indices[:1]
        for home in dict.fromkeys(_home(plan, slot, index) for index in indices):
            merger.add(*home, value)
    names, depth = [axis.name for axis in plan.axes], len(plan.axes)
    for slot, branches in results.buffers.items():
        rule = plan.rules.get(slot)
        separate = [] if rule is None else [name for name in names if name in rule.axes()]
        repeats = [i for i, name in enumerate(names) if name not in separate and _is_repeated(branches, i)]
        if len(repeats) + len(separate) == depth:  # no two values are merged
            values = functools.reduce(lambda tensor, i: tensor.select(i, 0), reversed(repeats), branches)
            if isinstance(rule, Stacked) and separate and len(values) == len(plan.bank.get(rule.name)):
                merger.add_rows(rule.name, values)
                continue
            indices = [index for index in plan.indices if not any(index[names[i]] for i in repeats)]
            homes = [_home(plan, slot, index) for index in indices]
            if len(set(homes)) == len(homes):
                for home, index in zip(homes, indices, strict=True):
                    merger.add(*home, values[tuple(index[name] for name in separate)])
                continue
        if not separate:
            merger.add_branches(*_home(plan, slot, plan.indices[0]), branches.flatten(0, depth - 1))
            continue
        for index in plan.indices:
            merger.add(*_home(plan, slot, index), branches[tuple(index[name] for name in names)])


def _is_repeated(branches: Tensor, axis: int) -> bool:
    return branches.shape[axis] == 1 or branches.stride(axis) == 0


class BufferMerger:
    """Collects the buffers of all branches and merges them once.

    A buffer that a method has stacked along an axis keeps one row per branch. Over all other axes a floating-point buffer takes the mean:
    for running statistics, whose update is linear, the mean of n updates equals one update with the mean statistic. Integer buffers should
    agree; if they do not, the first branch's value is kept with a warning. So should tables that forward computes: if they differ, they may be
    a state from which the next call goes on.

    Args:
        allow_resize, is_table, may_wait, training: see `merged_buffers`.
    """

    def __init__(
        self, allow_resize: Callable[[str], bool], is_table: Callable[[str], bool], may_wait: bool, training: bool
    ) -> None:
        self._allow_resize, self._is_table, self._may_wait, self._training = allow_resize, is_table, may_wait, training
        self._new: dict[tuple[str, int | None], list[Tensor] | Tensor] = {}
        self._rows: dict[str, Tensor] = {}

    def add(self, name: str, row: int | None, value: Tensor) -> None:
        """Add a branch's value of a registered tensor, or of one row of it."""
        values = self._new.setdefault((name, row), [])
        assert isinstance(values, list)  # the branches of a buffer come one by one, or all at once
        values.append(value)

    def add_branches(self, name: str, row: int | None, values: Tensor) -> None:
        """Add all branches' values [branches, ...] of a registered tensor, or of one row of it."""
        self._new[name, row] = values

    def add_rows(self, name: str, rows: Tensor) -> None:
        """Add the values [n, ...] of all rows of a stacked tensor."""
        self._rows[name] = rows

    def merge(self, bank: Bank) -> tuple[list[Tensor], list[Tensor]]:
        """Return the buffers (rows of stacked ones) and their merged values."""
        targets, merged = [], []
        with torch.no_grad():
            for name, rows in self._rows.items():
                self._check_gradient(name, rows)
                target = bank.get(name)
                _refuse_shape(name, target.shape[1:], rows.shape[1:])
                targets.append(target)
                merged.append(rows.detach())
            unbound: dict[str, tuple[Tensor, ...]] = {}
            for (name, row), values in self._new.items():
                if row is not None and name not in unbound:
                    unbound[name] = bank.get(name).unbind(0)
                target = bank.get(name) if row is None else unbound[name][row]
                if isinstance(values, list):
                    for other in values[1:]:
                        _refuse_shape(name, values[0].shape, other.shape)
                self._check_gradient(name, values[0])
                new = self._merged(name, target, values)
                if target.shape != new.shape and not (row is None and self._allow_resize(name)):
                    _refuse_shape(name, target.shape, new.shape)
                targets.append(target)
                merged.append(new.detach())
        return targets, merged

    def _merged(self, name: str, target: Tensor, values: list[Tensor] | Tensor) -> Tensor:
        if len(values) == 1 or (isinstance(values, list) and all(value is values[0] for value in values)):
            return values[0]
        # not compared where this would be recorded in a graph
        can_wait = target.is_cpu or (self._may_wait and not target.is_meta)
        looks = can_wait and not torch.compiler.is_dynamo_compiling() and not torch._C._len_torch_dispatch_stack()
        if target.is_floating_point() or target.is_complex():
            if looks and self._is_table(name) and any(not torch.equal(values[0], value) for value in values[1:]):
                warnings.warn(
                    f"buffer {name!r}, registered with persistent=False, differs between branches, and their mean is kept. If forward goes on "
                    "from it in the next call, as from a hidden state, each branch goes on from the mean: register it with persistent=True and "
                    "its final shape, so that each voter has its own, or return the state and pass it in again (state=)",
                    WorkbenchWarning,
                    stacklevel=2,
                )
            stacked = torch.stack(values) if isinstance(values, list) else values.contiguous()
            # equal values are kept exactly, since their sum could round or overflow; elementwise, since a test would synchronize a GPU
            return torch.where((stacked == stacked[0]).all(0), stacked[0], stacked.mean(0))
        if looks and any(not torch.equal(values[0], value) for value in values[1:]):
            warnings.warn(
                f"buffer {name!r} holds integers that differ between branches; the first branch's are kept",
                WorkbenchWarning,
                stacklevel=2,
            )
        return values[0]

    def _check_gradient(self, name: str, new: Tensor) -> None:
        """Warn of a buffer that forward has computed with gradients, such as a term of a loss, since only its numbers are kept."""
        if self._training and new.requires_grad and not torch.compiler.is_dynamo_compiling():
            warnings.warn(
                f"forward keeps a tensor with gradients in the buffer {name.partition('@')[0]!r}, of which only the numbers are kept: a loss "
                "that uses it, here or in a later call, trains nothing by it. Keep it in an attribute that is no buffer (a number is averaged "
                "over the branches, so that each learns from its own), return it, or detach it if no loss uses it",
                WorkbenchWarning,
                stacklevel=2,
            )


def _refuse_shape(name: str, registered: Sequence[int], new: Sequence[int]) -> None:
    """Raise RuntimeError if a buffer, or one row of it, has another shape than the registered one."""
    if registered != new:
        raise RuntimeError(
            f"buffer {name!r} changed its shape in forward from {tuple(registered)} to {tuple(new)}; "
            "register it with its final shape before wrapping, or call the model once before"
        )


def commit(targets: list[Tensor], values: list[Tensor]) -> None:
    """Write all buffers, so that an interrupt leaves none half updated: one operation for each dtype, as GPUs copy many tensors at once."""
    if not targets:
        return
    with torch.no_grad():
        for target, value in zip(targets, values, strict=True):
            if target.shape != value.shape:
                target.data = value.clone()
        plain = all(type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta for tensor in (*targets, *values))
        if plain and not values_unavailable():
            groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
            for target, value in zip(targets, values, strict=True):
                group = groups.setdefault((target.device, target.dtype, value.dtype), ([], []))
                group[0].append(target)
                group[1].append(value)
            # without a line of Python in between, at which an interrupt could be raised
            deque(map(torch._foreach_copy_, *zip(*groups.values(), strict=True)), maxlen=0)
            return
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)
