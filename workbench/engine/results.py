"""Results of branches: one per branch, or stacked for all branches of one pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import torch
from torch import Tensor

from ..errors import OutputShapeError
from .effects.containers import Containers
from .tree import flatten

_ATOMS = frozenset([int, float, bool, str, bytes, complex])


class Running:
    """Running statistics of one output leaf over the branches, used instead of the stacked tensors: see `Plan.folding`.

    Args:
        like: the leaf of some branches, [branches, ...].
    """

    def __init__(self, like: Tensor) -> None:
        self.shape, self.dtype = like.shape[1:], like.dtype
        self.stand_in = like.new_empty(()).expand(self.shape)  # has the shape and dtype of the leaf, but no data

    def add(self, branches: Tensor) -> None:
        """Add some branches, [branches, ...]."""
        raise NotImplementedError

    def check(self, branches: Tensor) -> None:
        """Raise OutputShapeError if branches [branches, ...] have another shape than earlier ones."""
        if branches.shape[1:] != self.shape:
            raise OutputShapeError(
                f"the output has different shapes in different branches: {sorted({tuple(self.shape), tuple(branches.shape[1:])})}; return a "
                "fixed shape"
            )


def folded(folding: Any, output: Any, depth: int) -> Any:
    """Return the output of one branch, with large tensors replaced by running statistics.

    Args:
        folding: the function that `Plan.folding` returns.
        output: output of the branch.
        depth: number of axes of the plan.
    """
    leaves, rebuild = flatten(output)
    folded_leaves = folding(with_axes(leaves, depth), rebuild)
    return rebuild([new if isinstance(new, Running) else leaf for leaf, new in zip(leaves, folded_leaves, strict=True)])


def with_axes(leaves: list[Any], depth: int) -> list[Any]:
    """Return the leaves of the output of one branch, tensors but nested ones with `depth` axes of size 1 in front."""
    return [leaf[(None,) * depth] if isinstance(leaf, Tensor) and not leaf.is_nested else leaf for leaf in leaves]


@dataclass
class Result:
    """Result of one branch."""

    output: Any
    buffers: dict[str, Tensor]  # the buffers whose value changed, by slot
    taps: dict[str, Tensor] = field(default_factory=dict)
    inputs: Containers | None = None  # the lists and dicts among the model's inputs, if there were any


class StackedResults(Sequence[Result]):
    """Stacked results of all branches of one pass, split only when a single result is requested.

    Args:
        sizes: number of branches along each axis, outermost first.
        leaves: leaves of the output: tensors [*sizes, ...], and other objects, one for all branches.
        rebuild: function from equally many leaves to an output of the model's structure.
        buffers, taps: tensors [*sizes, ...], see `Result`.
        inputs: containers of the pass, see `Result`.
        shared: buffers that were computed once for all branches, without their axes, by slot.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        leaves: list[Any],
        rebuild: Callable[[list[Any]], Any],
        buffers: dict[str, Tensor],
        taps: dict[str, Tensor],
        inputs: Containers | None = None,
        shared: dict[str, Tensor] | None = None,
    ) -> None:
        self.sizes, self.leaves, self.rebuild, self.buffers, self.taps = sizes, leaves, rebuild, buffers, taps
        self.inputs, self.shared = inputs, shared or {}

    def __len__(self) -> int:
        return math.prod(self.sizes)

    @overload
    def __getitem__(self, k: int) -> Result: ...
    @overload
    def __getitem__(self, k: slice) -> list[Result]: ...
    def __getitem__(self, k: int | slice) -> Result | list[Result]:
        if isinstance(k, slice):
            return [self[i] for i in range(*k.indices(len(self)))]
        positions: list[int] = []
        rest = range(len(self))[k]
        for size in reversed(self.sizes):
            rest, position = divmod(rest, size)
            positions.insert(0, position)
        index = tuple(positions)
        return Result(
            self.rebuild([leaf[index] if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]),
            {**self.shared, **{slot: tensor[index] for slot, tensor in self.buffers.items()}},
            {name: tensor[index] for name, tensor in self.taps.items()},
        )

    def __add__(self, other: StackedResults) -> StackedResults:
        """Concatenate the results of two chunks along the outermost axis.

        Raises:
            RuntimeError: if a part that is no tensor differs, or if different buffers were written.
        """
        buffers, others = self._expanded_buffers(), other._expanded_buffers()
        if buffers.keys() != others.keys():
            raise RuntimeError("some branches write into buffers that others do not")
        return StackedResults(
            (self.sizes[0] + other.sizes[0], *self.sizes[1:]),
            [_joined(first, second) for first, second in zip(self.leaves, other.leaves, strict=True)],
            self.rebuild,
            {slot: _concatenated(tensor, others[slot], len(self.sizes)) for slot, tensor in buffers.items()},
            {name: torch.cat([tensor, other.taps[name]]) for name, tensor in self.taps.items()},
            self.inputs,
        )

    def _expanded_buffers(self) -> dict[str, Tensor]:
        """Return all buffers as tensors [*sizes, ...]."""
        shared = {slot: value.expand((*self.sizes, *value.shape)) for slot, value in self.shared.items()}
        return {**shared, **self.buffers}


def _concatenated(first: Tensor, second: Tensor, depth: int) -> Tensor:
    """Concatenate buffers along the outermost of `depth` axes; along the others, those computed once stay expanded."""
    pair = [first, second]
    for i in range(1, depth):
        if first.stride(i) == 0 == second.stride(i):
            pair = [tensor.narrow(i, 0, 1) for tensor in pair]
    return torch.cat(pair).expand(-1, *first.shape[1:])


def _joined(first: Any, second: Any) -> Any:
    if isinstance(first, Tensor):
        return torch.cat([first, second])
    # equal objects are not enough: an object may hold tensors of its branch
    if first is second or (type(first) is type(second) and type(first) in _ATOMS and first == second):
        return first
    raise RuntimeError(f"the output has a {type(first).__name__} that is not the same object in all branches")
