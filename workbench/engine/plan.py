"""Plan of a run: the axes along which branches differ, and a rule per slot that gives each branch its tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .rank_one import product

Index = Mapping[str, int]  # axis name -> position; an axis that is missing stands at position 0


class Axis(NamedTuple):  # a tuple, since it is created in every call and used in dictionary keys
    """One direction along which branches differ.

    Args:
        name: name of the method that owns the axis.
        size: number of branches along the axis.
        randomness: behaviour of the model's own random calls along the axis, as in `torch.func.vmap`: "different", "same" or "error".
        own_first: whether position 0 is the model itself and the others are auxiliary (risk heads). Integer and non-tensor outputs are then
            taken from position 0.
        apart: whether the branches differ from the first layer on (noise), so that they share no trunk.
    """

    name: str
    size: int
    randomness: str = "different"
    own_first: bool = False
    apart: bool = False


class Bank:
    """Registered tensors by name, from which the rules pick.

    The rows of a stacked tensor are separated by one `unbind` per run instead of one `select` per branch: the backward pass of each select
    would fill a tensor as large as the whole stack.

    Args:
        lookup: returns the registered tensor of a name.
    """

    def __init__(self, lookup: Callable[[str], Tensor]) -> None:
        self.get = lookup
        self._rows: dict[str, tuple[Tensor, ...]] = {}

    def row(self, name: str, i: int) -> Tensor:
        """Return row `i` of a stacked tensor."""
        if name not in self._rows:
            # a model may differentiate with respect to its weights even if its caller runs under no_grad
            with torch.enable_grad():
                self._rows[name] = self.get(name).unbind(0)
        return self._rows[name][i]

    def separated(self) -> dict[str, tuple[Tensor, ...]]:
        """Return the rows of the stacked tensors that branches have used, by name."""
        return self._rows

    def forget_rows(self) -> None:
        """Separate the rows anew for the next pass, since they are invalid if a pass has written into a stack under vmap."""
        self._rows.clear()

    def rebound(self) -> str | None:
        """Return the slot of a stacked tensor whose `.data` was reassigned by forward, or None. A cast to another dtype does not count."""
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
    """Rule that gives all branches the same tensor."""

    name: str
    factors: ClassVar[tuple[Rule, ...]] = ()

    def axes(self) -> tuple[str, ...]:
        """Return the names of the axes along which the tensor differs."""
        return ()

    def names(self, index: Index) -> list[str]:
        """Return the names of the registered tensors that a branch reads by this rule, without those that all branches share."""
        return []

    def registered(self) -> list[str]:
        """Return the names of all registered tensors behind the rule."""
        return [self.name]

    def pick(self, bank: Bank, index: Index) -> Tensor:
        """Return the tensor of one branch."""
        return bank.get(self.name)

    def dense(self, bank: Bank) -> tuple[Tensor, tuple[str, ...]]:
        """Return the tensor of all branches, with the axes along which it differs in front, and the names of these axes."""
        return bank.get(self.name), ()

    def home(self, index: Index) -> tuple[str, int | None]:
        """Return where a branch's new value is stored: the name of the registered tensor and the row in it (None: the whole tensor)."""
        return self.name, None


@dataclass(frozen=True)
class Stacked:
    """Rule that gives each branch along an axis one row of a stacked tensor [n, ...]."""

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
    """Rule that scales one shared weight W [out, in, ...] by factors s [n, out] and r [n, in] per branch: W * s r^T.

    This is BatchEnsemble (Wen et al. 2020). A tensor of one dimension has the factor s only.

    Args:
        axis: name of the axis.
        name: name of the registered tensor W.
        left: name of the registered factor s.
        right: name of the registered factor r, if there is one.
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
        """The rules of W, s and r, for a layer that can apply them without forming the product; empty if there is no r."""
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
    """Separate rules for the branches along an axis, such as one for the model's own head and one for the risk head."""

    axis: str
    options: tuple[Rule, ...]

    @functools.cached_property
    def factors(self) -> tuple[Rule, ...]:
        """As in `RankOne`, if all options have factors."""
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
    """Change to a branch beyond replaced tensors: noise on weights, noise at call sites, or taps, which record activations there."""

    def tensors(self, installed: dict[str, Tensor], index: Index) -> dict[str, Tensor]:
        """Return the tensors to install in the branch, given those that the plan picked (slot name -> tensor)."""
        return installed

    def inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], index: Index
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs of the branch. An intervention that reads its position from `index` must set `loop_only`."""
        return args, kwargs

    def output(self, output: Any, index: Index) -> Any:
        """Return the output of the branch, given the output of the model."""
        return output

    def active(
        self, parameters: Sequence[tuple[Tensor, str]], state: Sequence[Tensor], inputs: list[Tensor]
    ) -> AbstractContextManager[Any] | None:
        """Return a context manager for the branch's forward pass, or None.

        Args:
            parameters: every parameter of the branch, with its slot name.
            state: the buffers.
            inputs: the tensors among the inputs.
        """
        return None

    def draw_apart(self) -> None:
        """Draw from generators of its own from now on, since the model seeds torch's."""

    taps: dict[str, Tensor]  # recorded by `active`, returned along with the output
    trail: tuple[Any, ...] = ()  # the call sites that `active` met, in order
    # dtype of the model's output by leaf index, for leaves that `active` returns in a more precise dtype
    plain_dtypes: Mapping[int, torch.dtype] | None = None
    draws = False  # whether it draws random numbers at call sites
    draws_as_model = False  # whether it draws from torch's generators, as the model does
    only_records = False  # whether it changes nothing in the branch, but only records activations
    # advice in the error raised if it draws and activation checkpointing would draw again in the backward pass
    checkpoint_remedy: str = "switch checkpointing off"
    loop_only: str = ""  # reason why its branches must run one after another, "" if they need not


def concatenate(rows: Sequence[Tensor] | Tensor) -> Tensor:
    """Return the row numbers of all branches, one branch after another."""
    return rows.flatten() if isinstance(rows, Tensor) else torch.cat(list(rows))


def differ_in_length(rows: Sequence[Tensor] | Tensor) -> bool:
    """Return whether some branches answer more rows than others."""
    return not isinstance(rows, Tensor) and len({len(numbers) for numbers in rows}) > 1


@dataclass
class Plan:
    """Specification of one run.

    Args:
        axes: active axes, outermost first.
        rules: rule of each slot.
        bank: registered tensors that the rules pick from.
        interventions: applied in every branch, in this order.
        shares_trunk: whether the branches share a trunk, which need be computed only once.
        loop_only: reason why the branches must run one after another, "" if they need not.
        dealt: name of the axis along which rows are dealt, "" if every branch answers every row.
        rows: row numbers that each branch along the dealt axis answers; one tensor [branches, n] if all have equally many.
        cut: function (leaves of the inputs, row numbers) -> leaves for those rows, for inputs that cannot be indexed along dimension 0.
        parts: like `rows`, for other kinds of items in the inputs (such as nodes of graphs) that an output may answer one by one.
        keep_state: whether changes that the run makes to buffers and attributes are kept.
        fixed: positions of axes that are held fixed.
        chunk: number of branches of the outermost axis that run at once under vmap.
        purity: treatment of attributes that forward changes, one of `run.PURITIES`.
        state: paths in the output to state, of which each branch keeps its own.
        ragged: function from the dotted names of the output's leaves to the indices of those whose rows each branch chooses by itself.
        folding: factory of a function (leaves of some branches with the axes in front, rebuild) -> leaves, in which large leaves are replaced
            by `Running` statistics, so that their branches need not be kept.
    """

    axes: tuple[Axis, ...]
    rules: dict[str, Rule]
    bank: Bank
    interventions: tuple[Intervention, ...] = ()
    shares_trunk: bool = False
    loop_only: str = ""
    dealt: str = ""
    rows: Sequence[Tensor] | Tensor = ()
    cut: Callable[[Sequence[Any], Tensor], list[Any]] | None = None
    parts: Sequence[Sequence[Tensor]] = ()
    keep_state: bool = True
    fixed: dict[str, int] = field(default_factory=dict)
    chunk: int | None = None
    purity: str = "once"
    state: tuple[tuple[int | str, ...], ...] = ()
    ragged: Callable[[list[str]], Collection[int]] | None = None
    folding: Callable[[], Callable[[list[Any], Callable[[list[Any]], Any]], list[Any]]] | None = None

    size: int = field(init=False)  # number of branches
    indices: list[dict[str, int]] = field(init=False)  # index of every branch, last axis fastest

    def __post_init__(self) -> None:
        indices = [dict(self.fixed)]
        for axis in self.axes:
            indices = [{**index, axis.name: i} for index in indices for i in range(axis.size)]
        self.size, self.indices = len(indices), indices

    def draw_apart(self) -> None:
        """Let interventions draw from generators of their own, since the model seeds torch's."""
        for intervention in self.interventions:
            intervention.draw_apart()
        self.loop_only = next((i.loop_only for i in self.interventions if i.loop_only), self.loop_only)
