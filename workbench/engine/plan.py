"""The plan of a run: the axes along which its branches differ, and for every taken-over tensor the rule that gives each branch its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .rank_one import product

Index = Mapping[str, int]  # axis name -> position; an axis that is not in it stands at 0


class Axis(NamedTuple):  # made anew in every call, and part of keys
    """One direction along which branches differ.

    Args:
        name: the method that owns it.
        size: number of branches along it.
        randomness: what the model's own random calls do along it, as in `torch.func.vmap`: "different", "same" or "error".
        own_first: position 0 is the model itself, and the others only stand beside it: of whole numbers and whatever is no tensor its are taken.
        apart: the branches differ from the first layer on (noise), so that they share no trunk.
    """

    name: str
    size: int
    randomness: str = "different"
    own_first: bool = False
    apart: bool = False


class Bank:
    """The registered tensors by name, for the rules to pick from; the rows of a stacked one are cut apart once a run.

    One `unbind` a run, not one `select` a branch: the backward pass of a select fills a tensor of the whole bank's size for every branch.
    """

    def __init__(self, lookup: Callable[[str], Tensor]) -> None:
        self.get = lookup
        self._rows: dict[str, tuple[Tensor, ...]] = {}

    def row(self, name: str, i: int) -> Tensor:
        if name not in self._rows:
            # so that a model that differentiates by its weights can do so where its caller wants no gradients
            with torch.enable_grad():
                self._rows[name] = self.get(name).unbind(0)
        return self._rows[name][i]

    def rebound(self) -> str | None:
        """The slot of a stacked tensor whose first row holds other numbers by now, since something has set its `.data`; a cast is none."""
        for name, rows in self._rows.items():
            row = rows[0]
            if type(row) is not Tensor or torch._C._functorch.is_functorch_wrapped_tensor(row) or row.is_meta:
                continue
            before = self.get(name).detach()[0]
            if row.data_ptr() != before.data_ptr() and not torch.equal(row.detach(), before.to(row)):
                return name.partition("@")[0]
        return None


@dataclass(frozen=True)
class Shared:
    """One tensor for all branches."""

    name: str
    factors: ClassVar[tuple[Rule, ...]] = ()

    def axes(self) -> tuple[str, ...]:
        return ()

    def names(self, index: Index) -> list[str]:
        """The registered tensors that a branch reads by this rule, without those that all branches share."""
        return []

    def registered(self) -> list[str]:
        """Every registered tensor behind the rule."""
        return [self.name]

    def pick(self, bank: Bank, index: Index) -> Tensor:
        return bank.get(self.name)

    def dense(self, bank: Bank) -> tuple[Tensor, tuple[str, ...]]:
        return bank.get(self.name), ()

    def home(self, index: Index) -> tuple[str, int | None]:
        """Where a branch's new value is kept: the name of the registered tensor, and the row of it."""
        return self.name, None


@dataclass(frozen=True)
class Stacked:
    """One row of a stacked tensor [n, ...] for every branch along an axis."""

    axis: str
    name: str
    factors: ClassVar[tuple[Rule, ...]] = ()

    def axes(self) -> tuple[str, ...]:
        return (self.axis,)

    def names(self, index: Index) -> list[str]:
        return [self.name]

    def registered(self) -> list[str]:
        return [self.name]

    def pick(self, bank: Bank, index: Index) -> Tensor:
        return bank.row(self.name, index.get(self.axis, 0))

    def dense(self, bank: Bank) -> tuple[Tensor, tuple[str, ...]]:
        return bank.get(self.name), (self.axis,)

    def home(self, index: Index) -> tuple[str, int | None]:
        return self.name, index.get(self.axis, 0)


@dataclass(frozen=True)
class RankOne:
    """One shared weight W [out, in, ...] and per branch the factors s [n, out] and r [n, in]: W * s r^T (Wen et al. 2020, BatchEnsemble).

    A tensor of one dimension has the factor s only.
    """

    axis: str
    name: str
    left: str
    right: str | None

    def axes(self) -> tuple[str, ...]:
        return (self.axis,)

    def names(self, index: Index) -> list[str]:
        return [self.left, self.right] if self.right else [self.left]

    def registered(self) -> list[str]:
        return [self.name, self.left, *([self.right] if self.right else [])]

    @functools.cached_property
    def factors(self) -> tuple[Rule, ...]:
        """The rules of W, s and r, for a layer that needs no product of them; none if there is no r."""
        if self.right is None:
            return ()
        return Shared(self.name), Stacked(self.axis, self.left), Stacked(self.axis, self.right)

    def _scaled(self, bank: Bank, left: Tensor, right: Tensor | None) -> Tensor:
        weight = bank.get(self.name)
        return weight * left if right is None else product(weight, left, right)

    def pick(self, bank: Bank, index: Index) -> Tensor:
        i = index.get(self.axis, 0)
        return self._scaled(bank, bank.row(self.left, i), bank.row(self.right, i) if self.right else None)

    def dense(self, bank: Bank) -> tuple[Tensor, tuple[str, ...]]:
        return self._scaled(bank, bank.get(self.left), bank.get(self.right) if self.right else None), (self.axis,)

    def home(self, index: Index) -> tuple[str, int | None]:
        return self.name, None


@dataclass(frozen=True)
class Split:
    """A rule of its own for every branch along an axis, such as the model's own head and the risk head beside it."""

    axis: str
    options: tuple[Rule, ...]

    @functools.cached_property
    def factors(self) -> tuple[Rule, ...]:
        """As those of `RankOne`, if all options have them."""
        return tuple(Split(self.axis, rules) for rules in zip(*(o.factors for o in self.options), strict=False))

    def names(self, index: Index) -> list[str]:
        position = index.get(self.axis, 0)
        option = self.options[position]
        return [option.name] if position and isinstance(option, Shared) else option.names(index)

    def axes(self) -> tuple[str, ...]:
        return (self.axis, *dict.fromkeys(name for option in self.options for name in option.axes()))

    def registered(self) -> list[str]:
        return [name for option in self.options for name in option.registered()]

    def pick(self, bank: Bank, index: Index) -> Tensor:
        return self.options[index.get(self.axis, 0)].pick(bank, index)

    def dense(self, bank: Bank) -> tuple[Tensor, tuple[str, ...]]:
        tensors, names = zip(*(option.dense(bank) for option in self.options), strict=True)
        if len(set(names)) > 1:
            raise ValueError(f"the branches of {self.axis} differ along different axes: {names}")
        return torch.stack(tensors), (self.axis, *names[0])

    def home(self, index: Index) -> tuple[str, int | None]:
        return self.options[index.get(self.axis, 0)].home(index)


Rule = Shared | Stacked | RankOne | Split


class Intervention:
    """What happens inside a branch beside replaced tensors: noise on weights, noise or taps at call sites."""

    def tensors(self, installed: dict[str, Tensor], index: Index) -> dict[str, Tensor]:
        """The tensors that the branch is to see, given those that the plan picked (slot name -> tensor)."""
        return installed

    def inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], index: Index
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs that the branch is to see; one that reads its place in `index` says why in `loop_only`."""
        return args, kwargs

    def output(self, output: Any, index: Index) -> Any:
        """What the branch gives, made of what the model gave there."""
        return output

    def active(
        self, parameters: Sequence[tuple[Tensor, str]], state: Sequence[Tensor], inputs: list[Tensor]
    ) -> AbstractContextManager[Any] | None:
        """A context for the branch's forward pass, or None.

        Args:
            parameters: every parameter that the branch sees, with its slot name.
            state: the buffers.
            inputs: the tensors among the inputs.
        """
        return None

    taps: dict[str, Tensor]  # what `active` collected, returned along with the output
    trail: tuple[Any, ...] = ()  # the call sites that `active` met, in order
    # by place among the leaves of the output: the dtype that the model gives, where `active` made it more precise
    plain_dtypes: Mapping[int, torch.dtype] | None = None
    draws = False  # whether it draws random numbers at call sites
    # if it draws: what to do instead where activation checkpointing would draw again in the backward pass
    checkpoint_remedy: str = "switch checkpointing off"
    loop_only: str = ""  # why its branches must run one after another, if they must


def concatenate(rows: Sequence[Tensor] | Tensor) -> Tensor:
    """The rows of all branches, one branch after another."""
    return rows.flatten() if isinstance(rows, Tensor) else torch.cat(list(rows))


def differ_in_length(rows: Sequence[Tensor] | Tensor) -> bool:
    """Whether some branches answer more rows than others."""
    return not isinstance(rows, Tensor) and len({len(numbers) for numbers in rows}) > 1


@dataclass
class Plan:
    """One run: the active axes (outermost first), the rules by slot name, the interventions, and how far the branches share their work."""

    axes: tuple[Axis, ...]
    rules: dict[str, Rule]
    bank: Bank
    interventions: tuple[Intervention, ...] = ()
    shares_trunk: bool = False
    loop_only: str = ""  # why the branches must run one after another, if they must
    dealt: str = ""  # the axis along which each row of the batch is answered by one branch only
    # for each branch along it the rows that it answers; [branches, n] if all have as many
    rows: Sequence[Tensor] | Tensor = ()
    # leaves of the inputs, rows -> the leaves of a branch that answers these, where rows are not those of every tensor
    cut: Callable[[Sequence[Any], Tensor], list[Any]] | None = None
    parts: Sequence[Sequence[Tensor]] = ()  # `rows` of other kinds of parts of the inputs, which an output may answer
    keep_state: bool = True  # whether buffers and attributes keep what the run did to them
    fixed: dict[str, int] = field(default_factory=dict)  # axes that are held at one position
    chunk: int | None = None  # how many branches of the outermost axis run at once under vmap
    purity: str = "once"  # what is made of attributes that forward changes
    state: tuple[tuple[int | str, ...], ...] = ()  # where the output holds state, of which each branch keeps its own
    # of the dotted names of an output's leaves, the places of those whose rows each branch chooses by itself
    ragged: Callable[[list[str]], Collection[int]] | None = None
    # makes what takes in the leaves of some branches, with the axes in front, and gives `Running` statistics for those that need not be kept
    folding: Callable[[], Callable[[list[Any], Callable[[list[Any]], Any]], list[Any]]] | None = None

    size: int = field(init=False)  # number of branches
    indices: list[dict[str, int]] = field(init=False)  # the position of every branch, last axis fastest

    def __post_init__(self) -> None:
        indices = [dict(self.fixed)]
        for axis in self.axes:
            indices = [{**index, axis.name: i} for index in indices for i in range(axis.size)]
        self.size, self.indices = len(indices), indices
