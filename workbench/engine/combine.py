"""Combination of the branches' results into one output, whose tensors have the axes of the run in front."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import NonTensorOutputError, NotDealableError, OutputShapeError
from .plan import Plan, concatenate
from .results import Result, StackedResults
from .selections import REMEDY
from .state import BranchedState, Sealed, cut, seal_exposed, separate
from .tree import flatten, is_float, names, paths

_STATE_NAME = re.compile("cache|state|memory", re.IGNORECASE)


class Ragged:
    """Tensors of all branches for one output leaf whose rows each branch selects by itself.

    Args:
        items: one tensor per branch, last axis fastest.
        sizes: sizes of the axes, outermost first.
    """

    def __init__(self, items: Sequence[Tensor], sizes: Sequence[int]) -> None:
        self.items, self.sizes = list(items), tuple(sizes)


class Branched:
    """Outputs of all branches: one tree whose tensor leaves have the axes of the run in front.

    Args:
        axes: names of the leading axes, outermost first.
        leaves: leaves of the output; tensors are [*sizes, ...], or `Ragged` where the plan says so.
        rebuild: function from equally many leaves to an output of the model's structure.
    """

    def __init__(self, axes: tuple[str, ...], leaves: list[Any], rebuild: Callable[[list[Any]], Any]) -> None:
        self.axes, self.leaves, self.rebuild = axes, leaves, rebuild
        self.plain_dtypes: Mapping[int, torch.dtype] = {}  # see `Intervention.plain_dtypes`

    def plain_dtype(self, i: int) -> torch.dtype:
        """Return the dtype in which the model itself returns a leaf."""
        return self.plain_dtypes.get(i, self.leaves[i].dtype)  # the leaf is a tensor or `Running`

    def sizes(self) -> tuple[int, ...]:
        """Return the number of branches along each axis."""
        first = next(leaf for leaf in self.leaves if isinstance(leaf, Tensor | Ragged))
        return first.sizes if isinstance(first, Ragged) else tuple(first.shape[: len(self.axes)])


def combine(plan: Plan, results: Sequence[Result]) -> Branched:
    """Stack the branches' outputs along the axes of the plan; dealt rows are put back in the order of the batch.

    Raises:
        NonTensorOutputError: if a part that is no tensor differs between the branches.
        OutputShapeError: if the shape of a part differs between the branches.
        NotDealableError: if rows were dealt, and the output does not hold one answer per row.
    """
    if isinstance(results, StackedResults):
        return _combine_stacked(plan, results)
    axes = plan.axes
    trees = [flatten(result.output) for result in results]
    rebuild = trees[0][1]
    if len({len(leaves) for leaves, _ in trees}) > 1:
        raise NonTensorOutputError(
            f"the output has {sorted({len(leaves) for leaves, _ in trees})} parts, depending on the branch; return the same structure in all "
            "of them"
        )
    if plan.dealt:
        axes = tuple(axis for axis in axes if axis.name != plan.dealt)
    kinds = (plan.rows, *plan.parts)
    orders: dict[int, Tensor] = {}  # permutation that restores the order of dealt rows, by their position in `kinds`
    sizes = [axis.size for axis in axes]
    own_first = [axis.name for axis in plan.axes if axis.own_first]
    models = [k for k, index in enumerate(plan.indices) if not any(index[name] for name in own_first)]
    ragged = plan.ragged(names(results[0].output)) if plan.ragged is not None and sizes else ()
    columns: list[Any] = []
    for i, items in enumerate(zip(*(leaves for leaves, _ in trees), strict=True)):
        if isinstance(items[0], Sealed):
            columns.append(_state(plan, [item.value for item in items]))
        elif not isinstance(items[0], Tensor):
            columns.append(_common_value([items[k] for k in models], results[0].output, i))
        elif i in ragged and items[0].dim():
            columns.append(Ragged(items, sizes))
        elif not plan.dealt:
            columns.append(_stack(items, sizes, results[0].output, i))
        else:
            kind = _kind_answered(items, plan, kinds)
            if kind not in orders:
                orders[kind] = torch.argsort(concatenate(kinds[kind]))
            columns.append(_gather(items, plan, sizes, orders[kind]))
    return Branched(tuple(axis.name for axis in axes), columns, rebuild)


def _combine_stacked(plan: Plan, results: StackedResults) -> Branched:
    """Combine results that are already stacked."""
    axes = [axis.name for axis in plan.axes]
    leaves, rebuild = list(results.leaves), results.rebuild
    if plan.state:
        numbers, rebuild = flatten(seal_exposed(rebuild(list(range(len(leaves))))))
        leaves = [
            _state(plan, cut(number.value, leaves, plan.axes)) if isinstance(number, Sealed) else leaves[number]
            for number in numbers
        ]
    if plan.dealt:
        position, rows = axes.index(plan.dealt), concatenate(plan.rows)
        axes.remove(plan.dealt)
        in_order = bool((rows[1:] > rows[:-1]).all())
        order = rows if in_order else torch.argsort(rows)
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            if leaf.dim() <= len(plan.axes) or leaf.shape[len(plan.axes)] != len(plan.rows[0]):
                raise NotDealableError
            leaf = leaf.movedim(position, len(plan.axes) - 1).flatten(len(axes), len(axes) + 1)
            leaves[i] = leaf if in_order else leaf.index_select(len(axes), order.to(leaf.device, non_blocking=True))
    return Branched(tuple(axes), leaves, rebuild)


def _state(plan: Plan, parts: list[Any]) -> BranchedState | None:
    if all(part is None for part in parts):
        return None
    return BranchedState(plan.axes, separate(parts), plan.rows if plan.dealt else None)


def _stack(items: tuple[Tensor, ...], sizes: list[int], output: Any, i: int) -> Tensor:
    if len(items) == 1:
        return items[0].reshape((*sizes, *items[0].shape)) if sizes else items[0]
    if items[0].is_nested or items[0].layout is not torch.strided:
        kind, remedy = ("nested", "padded to a common length") if items[0].is_nested else ("sparse", "with to_dense()")
        raise OutputShapeError(
            f"{paths(output)[i]} is a {kind} tensor, for which the branches' mean and spread are not supported; return it {remedy}"
        )
    if any(item.shape != items[0].shape for item in items):
        shapes = sorted({tuple(map(int, item.shape)) for item in items})
        raise OutputShapeError(
            f"{paths(output)[i]} has different shapes in different branches: {shapes}; return a fixed shape. {REMEDY}"
        )
    stacked = torch.stack(items)
    return stacked if len(sizes) == 1 else stacked.reshape((*sizes, *items[0].shape))


def _kind_answered(items: tuple[Tensor, ...], plan: Plan, kinds: tuple[Sequence[Tensor] | Tensor, ...]) -> int:
    """Return which kind (the dealt rows, or items of another kind, see `Plan.parts`) the branches answer one by one."""
    candidates = [
        kind
        for kind, rows in enumerate(kinds)
        if all(
            item.dim() and len(item) == len(rows[index[plan.dealt]])
            for index, item in zip(plan.indices, items, strict=True)
        )
    ]
    if not candidates or any(
        not torch.equal(concatenate(kinds[kind]), concatenate(kinds[candidates[0]])) for kind in candidates[1:]
    ):
        raise NotDealableError  # none fits, or several different ones do
    return candidates[0]


def _gather(items: tuple[Tensor, ...], plan: Plan, sizes: list[int], order: Tensor) -> Tensor:
    """Concatenate rows answered branch by branch and restore the order of the batch; other axes are stacked in front."""
    position = next(i for i, axis in enumerate(plan.axes) if axis.name == plan.dealt)
    grouped: dict[tuple, list[Tensor]] = {}
    for index, item in zip(plan.indices, items, strict=True):
        key = tuple(index[axis.name] for i, axis in enumerate(plan.axes) if i != position)
        grouped.setdefault(key, []).append(item)
    if any(item.shape[1:] != items[0].shape[1:] for item in items):
        raise NotDealableError
    stacked = torch.stack(
        [torch.cat(rows).index_select(0, order.to(rows[0].device, non_blocking=True)) for rows in grouped.values()]
    )
    return stacked.reshape((*sizes, *stacked.shape[1:]))


def _common_value(items: list[Any], output: Any, i: int) -> Any:
    first = items[0]
    if isinstance(first, Iterator) and len(items) > 1:
        raise NonTensorOutputError(
            f"{paths(output)[i]} is a {type(first).__name__}, which would be read only after its branch has ended; return a list, list(...)"
        )
    for item in items[1:]:
        if item is first:
            continue
        if isinstance(first, np.ndarray) and isinstance(item, np.ndarray):
            if not np.array_equal(first, item, equal_nan=first.dtype.kind in "fc"):
                raise NonTensorOutputError(
                    f"{paths(output)[i]} is a numpy array that differs from branch to branch; return it as a tensor, and call .numpy() "
                    "outside the wrapped model"
                )
            continue
        try:
            same = type(item) is type(first) and bool(item == first)
        except Exception:  # values that cannot be compared
            same = False
        if not same and isinstance(first, bool | int | float | complex | str | bytes | set | frozenset):
            raise NonTensorOutputError(
                f"{paths(output)[i]} is {first!r} in one branch and {item!r} in another; return it as a tensor, or leave it out of the output"
            )
        if not same and _tensors_differ(first, item):
            parameters = " (logits, loc and scale, ...)" if isinstance(first, torch.distributions.Distribution) else ""
            raise NonTensorOutputError(
                f"{paths(output)[i]} is an object of type {type(first).__name__} whose tensors differ from branch to branch, and objects have "
                f"no mean; return its tensors{parameters} in a dict, tuple or dataclass, and make the object outside the wrapped model"
            )
    return first


def _tensors_differ(first: Any, other: Any, depth: int = 3) -> bool:
    """Return whether two objects hold different tensors in the same place; False for states and caches, which are checked when passed back."""
    if (
        _STATE_NAME.search(type(first).__name__)
        or isinstance(first, torch.nn.Module | type)
        or type(first) is not type(other)
    ):
        return False
    pairs = zip(flatten(_contents(first))[0], flatten(_contents(other))[0], strict=False)
    for a, b in pairs:
        if a is b:
            continue
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if is_float(a) and not (a.shape == b.shape and torch.equal(a, b)):
                return True
        elif depth and _contents(a) and _tensors_differ(a, b, depth - 1):
            return True
    return False


def _contents(value: Any) -> dict[str, Any]:
    if isinstance(value, Tensor):
        return {}
    names_seen = getattr(getattr(value, "__code__", None), "co_freevars", ())
    cells = dict(
        zip(names_seen, [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()], strict=False)
    )
    return {**cells, **getattr(value, "__dict__", {})}
