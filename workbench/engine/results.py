"""Results of branches: of each by itself, or of all in one pass, stacked."""

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
    """Statistics of a leaf of the output over the branches, in the place of their tensors: see `Plan.folding`.

    Args:
        like: the leaf of some branches, [branches, ...].
    """

    def __init__(self, like: Tensor) -> None:
        self.shape, self.dtype = like.shape[1:], like.dtype
        self.stand_in = like.new_empty(()).expand(self.shape)  # of the right shape and dtype, without numbers

    def add(self, branches: Tensor) -> None:
        """Take in some branches, [branches, ...]."""
        raise NotImplementedError

    def check(self, branches: Tensor) -> None:
        """Raise if branches [branches, ...] have another shape than those before."""
        if branches.shape[1:] != self.shape:
            raise OutputShapeError(
                f"the output has other shapes in other branches: {sorted({tuple(self.shape), tuple(branches.shape[1:])})}; return a fixed shape"
            )


def folded(folding: Any, output: Any, depth: int) -> Any:
    """The output of one branch, with running statistics in the place of the tensors that they have taken in.

    Args:
        folding: as `Plan.folding` makes it.
        output: of the branch.
        depth: how many axes the plan has.
    """
    leaves, rebuild = flatten(output)
    with_axes = [leaf[(None,) * depth] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    taken = folding(with_axes, rebuild)
    return rebuild([new if isinstance(new, Running) else leaf for leaf, new in zip(leaves, taken, strict=True)])


@dataclass
class Result:
    """What one branch gave."""

    output: Any
    buffers: dict[str, Tensor]  # the slots whose value changed
    taps: dict[str, Tensor] = field(default_factory=dict)
    inputs: Containers | None = None  # the lists and dicts that the model was given, if there were any


class StackedResults(Sequence[Result]):
    """What all branches gave in one pass, cut apart only where a single one is asked for.

    Args:
        sizes: number of branches along each axis, outermost first.
        leaves: the leaves of the output: tensors [*sizes, ...], and whatever is no tensor once for all.
        rebuild: puts as many leaves into the shape of the model's output.
        buffers, taps: [*sizes, ...], see `Result`.
        inputs: of the one pass, see `Result`.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        leaves: list[Any],
        rebuild: Callable[[list[Any]], Any],
        buffers: dict[str, Tensor],
        taps: dict[str, Tensor],
        inputs: Containers | None = None,
    ) -> None:
        self.sizes, self.leaves, self.rebuild, self.buffers, self.taps = sizes, leaves, rebuild, buffers, taps
        self.inputs = inputs

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
            {slot: tensor[index] for slot, tensor in self.buffers.items()},
            {name: tensor[index] for name, tensor in self.taps.items()},
        )

    def __add__(self, other: StackedResults) -> StackedResults:
        """The results of two chunks of the outermost axis.

        Raises:
            RuntimeError: what is no tensor is not the same in both, or they have written into other buffers.
        """
        if self.buffers.keys() != other.buffers.keys():
            raise RuntimeError("some branches write into buffers that others do not")
        return StackedResults(
            (self.sizes[0] + other.sizes[0], *self.sizes[1:]),
            [_joined(first, second) for first, second in zip(self.leaves, other.leaves, strict=True)],
            self.rebuild,
            {slot: torch.cat([tensor, other.buffers[slot]]) for slot, tensor in self.buffers.items()},
            {name: torch.cat([tensor, other.taps[name]]) for name, tensor in self.taps.items()},
            self.inputs,
        )


def _joined(first: Any, second: Any) -> Any:
    if isinstance(first, Tensor):
        return torch.cat([first, second])
    # an object may hold tensors of its branch
    if first is second or (type(first) is type(second) and type(first) in _ATOMS and first == second):
        return first
    raise RuntimeError(f"the output has a {type(first).__name__} that is not the same object in all branches")
