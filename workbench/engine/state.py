"""State that the caller passes from call to call, such as the hidden state of a recurrent cell or a cache: each branch has its own."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..introspect.objects import is_atom, parts, tensors_and_generators
from .plan import Axis, Plan
from .tree import children, flatten, like, tree_map, values_of

Path = tuple[int | str, ...]  # names and indices of a part of an output


class BranchedState:
    """State that the branches of a wrapped object returned, one part per branch.

    Pass it back anywhere among the inputs, and each branch receives its own part. It is opaque: `map` applies a function to the part of every
    branch, and is the only way to look inside. Copying, pickling and `to` work as for a tensor. If the parts are objects, their methods, such
    as `crop` or `reorder_cache` of a cache, are called for every branch.

    Args:
        axes: axes of the branches.
        parts: part of each branch, last axis fastest.
        rows: row numbers that each branch answered, if each row of the batch was answered by one branch only (vote in training mode).

    Example:
        >>> import torch
        >>> from workbench import vote
        >>> class Cell(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.cell, self.head = torch.nn.GRUCell(2, 8), torch.nn.Linear(8, 1)
        ...     def forward(self, x, h=None):
        ...         h = self.cell(x, h)
        ...         return self.head(h), h
        >>> wrapped = vote.Wrapper(3, state=1)(Cell()).eval()
        >>> y, state = wrapped(torch.zeros(4, 2))
        >>> y, state = wrapped(torch.zeros(4, 2), state.map(lambda h: 0.5 * h))
        >>> state
        BranchedState(3 vote: Tensor [4, 8])
    """

    def __init__(self, axes: Sequence[Axis], parts: list[Any], rows: Sequence[Tensor] | Tensor | None = None) -> None:
        self._axes, self._parts, self._rows = tuple(axes), parts, rows

    def map(self, function: Callable[[Any], Any]) -> BranchedState:
        """Return a state with a function applied to each branch's part, such as to pick rows, reorder beams or crop a cache.

        Args:
            function: takes the state as the model itself returned it. It may return None after changing it in place.
        """
        parts = list(self._parts)
        for first, *others in self._groups_sharing_tensors():  # branches that share tensors continue to share them
            new = function(self._parts[first])
            parts[first] = self._parts[first] if new is None else new
            for k in others:
                parts[k] = _duplicate(parts[first], lambda tensor: tensor)
        return BranchedState(self._axes, parts, self._rows)

    def _groups_sharing_tensors(self) -> list[list[int]]:
        """Group the indices of branches that hold the same tensor objects."""
        groups: dict[Any, list[int]] = {}
        for k, part in enumerate(self._parts):
            groups.setdefault(_signature(part, set()), []).append(k)
        return list(groups.values())

    def to(self, *args: Any, **kwargs: Any) -> BranchedState:
        """Return the state on another device or in another dtype; arguments as for `torch.Tensor.to`."""
        return self._with_tensors(lambda tensor: tensor.to(*args, **kwargs))

    def detach(self) -> BranchedState:
        """Return the state detached from the autograd graph, for truncated backpropagation through time."""
        return self._with_tensors(torch.Tensor.detach)

    # ---- for the engine
    @property
    def rows(self) -> Sequence[Tensor] | Tensor | None:
        """The row numbers that each branch answered, None if it answered all rows."""
        return self._rows

    def copy(self, *, share: bool = False) -> BranchedState:
        """Return a copy; with `share` it refers to the same tensors."""
        return self._with_tensors((lambda tensor: tensor) if share else torch.Tensor.clone)

    def take(self, other: BranchedState) -> None:
        """Take over the parts of another state."""
        self._parts = other._parts

    def tensors(self) -> list[Tensor]:
        """Return every tensor of the state once."""
        return [leaf for leaf in tensors_and_generators(self._parts) if isinstance(leaf, Tensor)]

    def of(self, plan: Plan) -> list[Any]:
        """Return the parts for the branches of a plan, in the order of `plan.indices`.

        Raises:
            ValueError: if the state was returned by other branches.
        """
        sizes, own_axes = {axis.name: axis.size for axis in plan.axes}, {axis.name: axis for axis in self._axes}
        for axis in self._axes:
            missing = axis.name not in sizes and axis.name not in plan.fixed
            if sizes.get(axis.name, axis.size) != axis.size or (
                missing and plan.keep_state and not axis.own_first and axis.size > 1
            ):
                self._refuse(plan)
        if any(axis.size > 1 and axis.name not in own_axes for axis in plan.axes):
            self._refuse(plan)
        if plan.keep_state and bool(plan.dealt) is not (self._rows is not None):
            whole, one = "every voter answered every row", "each row was answered by one voter"
            raise ValueError(
                f"this state comes from a call in which {one if self._rows is not None else whole}, and in this call "
                f"{whole if self._rows is not None else one}; call with tile_and_reduce=True throughout a sequence, or stay in one mode "
                "(train or eval, with or without return_risk)"
            )
        return [self._parts[self._position(index)] for index in plan.indices]

    def _position(self, index: Mapping[str, int]) -> int:
        position = 0
        for axis in self._axes:
            position = position * axis.size + index.get(axis.name, 0)
        return position

    def _refuse(self, plan: Plan) -> NoReturn:
        raise ValueError(
            f"this state was returned by {_describe_axes(self._axes)}, and this call has {_describe_axes(plan.axes)}: call in the same way "
            "throughout a sequence (return_risk=True or not, train or eval, the same wrapped model), or start again without a state"
        )

    def unshare(self) -> None:
        """Copy parts that share a tensor with another branch's, before a pass that may write into it."""
        seen: set[int] = set()
        for k, part in enumerate(self._parts):
            inside = {id(leaf) for leaf in tensors_and_generators(part) if isinstance(leaf, Tensor)}
            if not seen.isdisjoint(inside):
                self._parts[k] = _duplicate(part, torch.Tensor.clone)
            seen |= inside

    def _with_tensors(self, function: Callable[[Tensor], Tensor]) -> BranchedState:
        return BranchedState(self._axes, _duplicate(self._parts, function), self._rows)

    def __bool__(self) -> bool:
        """Return the truth value of the parts: models use `if past_key_values` to test whether there is a non-empty cache."""
        answers = {bool(part) for part in self._parts if not isinstance(part, Tensor)}
        if len(answers) != 1:
            _raise_opaque("a truth value")()
        return answers.pop()

    def __repr__(self) -> str:
        kinds = [
            f"Tensor {list(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
            for leaf in flatten(self._parts[0])[0]
        ]
        return f"BranchedState({_describe_axes(self._axes)}: {', '.join(kinds)})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if all(_is_object(part) and hasattr(part, name) for part in self._parts):
            values = [getattr(part, name) for part in self._parts]
            if all(map(callable, values)):
                return functools.partial(self._call, name)
            if _is_plain_data(values[0]) and all(value == values[0] for value in values):
                return values[0]
        raise AttributeError(f"a state has no {name!r}: {_OPAQUE_HINT}")

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of every branch's object, such as `reorder_cache` or `crop`; its answer must be the same for all branches."""
        answers = []

        def called(part: Any) -> Any:
            answer = getattr(part, name)(*args, **kwargs)
            answers.append(None if answer is part else answer)
            return part

        self.take(self.map(called))
        if _is_plain_data(answers[0]) and all(
            type(answer) is type(answers[0]) and answer == answers[0] for answer in answers
        ):
            return answers[0]
        raise TypeError(
            f"{name} of a state returns a different {type(answers[0]).__name__} for each branch: {_OPAQUE_HINT}"
        )


_OPAQUE_HINT = (
    "it holds the separate state of each branch of a wrapped model. Pass it back to that model unchanged; state.map(function) changes the part "
    "of each branch, such as state.map(lambda h: h[rows]) or state.map(lambda cache: cache.crop(5))"
)


def _raise_opaque(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(f"{name} cannot work on a state: {_OPAQUE_HINT}")

    return refuse


_OPERATORS = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_OTHER_METHODS = ("getitem", "setitem", "iter", "len", "neg", "abs", "float", "int", "lt", "le", "gt", "ge", "array")
for _name in (*(side + name for name in _OPERATORS for side in ("", "r", "i")), *_OTHER_METHODS):
    setattr(BranchedState, f"__{_name}__", _raise_opaque(_name))
BranchedState.__torch_function__ = classmethod(  # type: ignore[attr-defined]
    lambda cls, function, kinds, args=(), kwargs=None: _raise_opaque(getattr(function, "__name__", "torch"))()
)


def _is_object(part: Any) -> bool:
    """Return whether a part is an object such as a cache, neither a tensor nor a tree of tensors."""
    return not isinstance(part, Tensor) and not is_atom(part) and children(part) is None


def _is_plain_data(value: Any) -> bool:
    """Return whether a value holds only numbers and strings."""
    return all(is_atom(leaf) for leaf in flatten(value)[0])


def _signature(value: Any, seen: set[int]) -> Any:
    """Return a key that is equal for interchangeable values: the same tensor objects in the same places, and equal numbers."""
    if is_atom(value):
        return type(value), value
    if isinstance(value, Tensor) or callable(value) or id(value) in seen:
        return id(value)
    seen.add(id(value))
    inside = tuple((key, _signature(item, seen)) for key, item in parts(value))
    return (type(value), inside) if tensors_and_generators(value) else id(value)


def _describe_axes(axes: Sequence[Axis]) -> str:
    return " x ".join(f"{axis.size} {axis.name}" for axis in axes) or "one branch"


def _duplicate(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a deep copy with a function applied to each tensor; objects that cannot be copied are shared."""
    memo = {id(item): function(item) if isinstance(item, Tensor) else item for item in tensors_and_generators(value)}
    return copy.deepcopy(value, memo)


# ---- state in the output and the inputs of one branch
class Sealed:
    """Marks a part of one branch's output or inputs as state, which counts as a single leaf whatever it contains."""

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass
class Exposed:
    """Marks a part as state like `Sealed`, but exposes its tensors to `flatten`, so that vmap stacks them."""

    value: Any


def seal(output: Any, paths: Sequence[Path]) -> Any:
    """Return the output with the parts at the given paths sealed; paths that do not exist are ignored."""
    for path in paths:
        output = _seal_at(output, path)
    return output


def _seal_at(node: Any, path: Path) -> Any:
    if node is None or isinstance(node, Sealed):
        return node
    if not path:
        return Sealed(node)
    items = children(node) or []
    position = _find(node, len(items), path[0])
    if position is None:
        return node
    values = [value for _, value in items]
    values[position] = _seal_at(values[position], path[1:])
    return like(node, values)


_RENAMED = {"past_key_values": "cache", "cache": "past_key_values"}  # output names that transformers 5.24 exchanged


def _find(node: Any, count: int, step: int | str) -> int | None:
    """Return the index of a path step among the values of a container, or None."""
    names: list[Any] = list(range(count))
    if isinstance(node, Mapping):
        names = list(node)
    elif hasattr(node, "_fields"):
        names = list(node._fields)
    elif hasattr(node, "__dataclass_fields__"):
        names = list(node.__dataclass_fields__)
    names = [str(name) for name in names]
    for name in (str(step), _RENAMED.get(str(step))):
        if name in names:
            return names.index(name)
    number = int(step) if str(step).lstrip("-").isdigit() else count
    return number % count if -count <= number < count else None


def unseal(tree: Any) -> Any:
    """Return a tree with sealed parts replaced by their values."""
    return tree_map(lambda leaf: leaf.value if isinstance(leaf, Sealed) else leaf, tree)


def own_sealed(tree: Any) -> Any:
    """Return a tree in which sealed parts are deep copies."""
    return tree_map(
        lambda leaf: Sealed(_duplicate(leaf.value, torch.Tensor.clone)) if isinstance(leaf, Sealed) else leaf, tree
    )


def expose_sealed(tree: Any) -> Any:
    """Return a tree in which sealed parts are replaced by `Exposed` ones."""
    return tree_map(lambda leaf: Exposed(leaf.value) if isinstance(leaf, Sealed) else leaf, tree)


def seal_exposed(tree: Any) -> Any:
    """Invert `expose_sealed`."""
    if isinstance(tree, Exposed):
        return Sealed(tree.value)
    values = values_of(tree)
    return tree if values is None else like(tree, [seal_exposed(value) for value in values])


# ---- stacked state of all branches
def stack(
    parts: Sequence[Any], axes: Sequence[Axis]
) -> tuple[list[tuple[Tensor, tuple[str, ...]]], Callable[..., Any]]:
    """Stack the parts of all branches.

    Returns:
        The tensors, each with the axes along which it differs in front, and the names of these axes; and a function from one branch's
        tensors to its part.

    Raises:
        RuntimeError: if the parts hold anything but tensors of equal shapes, numbers and strings.
    """
    trees = [flatten(part) for part in parts]
    leaves, rebuild = trees[0]
    if any(len(other) != len(leaves) for other, _ in trees):
        raise RuntimeError("the states of the branches have other structures")
    stacked: list[tuple[Tensor, tuple[str, ...]]] = []
    for column in zip(*(other for other, _ in trees), strict=True):
        first = column[0]
        if isinstance(first, Tensor):
            if any(not isinstance(item, Tensor) or item.shape != first.shape for item in column):
                raise RuntimeError("the states of the branches have other shapes")
            stacked.append(_stack(column, axes))
        elif not (first is None or isinstance(first, bool | int | float | str)) or any(i != first for i in column):
            raise RuntimeError(f"a state holds a {type(first).__name__}, which is no tensor")

    def filled(tensors: Sequence[Tensor]) -> Any:
        items = iter(tensors)
        return rebuild([next(items) if isinstance(leaf, Tensor) else leaf for leaf in leaves])

    return stacked, filled


def _stack(column: Sequence[Tensor], axes: Sequence[Axis]) -> tuple[Tensor, tuple[str, ...]]:
    """Stack tensors along the axes along which they are not the same object; return the tensor and the names of these axes."""
    names: list[str] = []
    sizes: list[int] = []
    items = list(column)
    for axis in axes:
        # from the outermost axis in: `items` holds, for each position along the axes kept so far, the branches along this and later axes
        groups = math.prod(sizes)
        inner = len(items) // groups // axis.size
        blocks = [
            [items[(g * axis.size + i) * inner : (g * axis.size + i + 1) * inner] for i in range(axis.size)]
            for g in range(groups)
        ]
        if all(a is b for group in blocks for block in group for a, b in zip(block, group[0], strict=True)):
            items = [item for group in blocks for item in group[0]]
        else:
            names.append(axis.name)
            sizes.append(axis.size)
    return (torch.stack(items).unflatten(0, sizes) if sizes else items[0]), tuple(names)


def cut(tree: Any, leaves: Sequence[Any], axes: Sequence[Axis]) -> list[Any]:
    """Invert `stack`: return the parts of all branches.

    Args:
        tree: a part in which each leaf is replaced by its index in `leaves`.
        leaves: tensors [*sizes, ...] and other objects.
        axes: axes of the branches.
    """
    numbers, rebuild = flatten(tree)
    columns = [_cut(leaves[number], axes) for number in numbers]
    return [rebuild(items) for items in zip(*columns, strict=True)] or [tree]


def _cut(leaf: Any, axes: Sequence[Axis]) -> list[Any]:
    """Return each branch's slice of a leaf; branches that share memory get the same tensor object."""
    sizes = [axis.size for axis in axes]
    if not isinstance(leaf, Tensor):
        return [leaf] * math.prod(sizes)
    for i, size in enumerate(sizes):
        if size > 1 and leaf.stride(i) == 0:
            leaf = leaf.narrow(i, 0, 1)
    kept = leaf.shape[: len(sizes)]
    items = leaf.flatten(0, len(sizes) - 1).unbind(0) if sizes else (leaf,)
    places = torch.arange(len(items)).reshape(kept).expand(sizes).flatten().tolist() if sizes else [0]
    return [items[position] for position in places]


def of_one_branch(output: Any, paths: Sequence[Path]) -> Any:
    """Return the output of a model without branches, with its state as a `BranchedState`."""
    sealed = seal(output, paths)
    return tree_map(lambda leaf: BranchedState((), [leaf.value]) if isinstance(leaf, Sealed) else leaf, sealed)


def separate(parts: list[Any]) -> list[Any]:
    """Return the parts with copies of objects that several branches share, since each branch may change its own; tensors stay shared."""
    seen: set[int] = set()
    for k, part in enumerate(parts):
        objects = {id(leaf) for leaf in flatten(part)[0] if not isinstance(leaf, Tensor) and not is_atom(leaf)}
        if not seen.isdisjoint(objects):
            parts[k] = _duplicate(part, lambda tensor: tensor)
        seen |= objects
    return parts


def states_in(tree: Any) -> list[BranchedState]:
    """Return the states among the leaves of a tree."""
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, BranchedState)]
