"""Detection of outputs whose rows the model selects by computed values, such as boxes above a threshold.

Row i of such an output is not the same item in every branch. A pass is tracked call by call. For a tensor whose entries were selected by a mask,
`nonzero`, `topk`, `argsort` and the like, the tracker keeps an integer tensor that says which entry of the source each one is. Calls that only
move entries are repeated on these integers, so that sorting rows and restoring their order cancel out. Elementwise calls and layers pass them
on. A reduction along the selected dimension, or a write into other tensors (`index_add`, `scatter`, `x[rows] = ...`), ends the tracking. Masks
that depend on the inputs alone are the same in all branches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..errors import OutputShapeError
from ..introspect.source_lines import is_user_code, line_name
from .sites import tensors_among
from .tensor_facts import TensorFacts
from .tree import flatten, is_float, paths

_PYTHON_READS = frozenset(["item", "tolist", "bool", "int", "float", "index", "numpy", "array", "len"])
_RANDOM = frozenset(
    [
        "rand",
        "randn",
        "rand_like",
        "randn_like",
        "randint",
        "randperm",
        "multinomial",
        "bernoulli",
        "normal",
        "uniform",
        "dropout",
    ]
)
_RANKS = frozenset(["topk", "sort", "argsort", "msort"])
_CHOICES = frozenset(
    [
        "nonzero",
        "argwhere",
        "nonzero_static",
        "nms",
        "batched_nms",
        "unique",
        "unique_consecutive",
        "randperm",
        "multinomial",
    ]
)
_LISTS = frozenset(["tensor", "as_tensor"])
_PICKS = frozenset(["getitem", "gather", "index_select", "take_along_dim", "masked_select", "embedding"])
_JOINS = frozenset(["cat", "concat", "concatenate", "stack", "hstack", "vstack", "column_stack", "dstack"])
_MOVES = frozenset([
    "reshape", "view", "flatten", "unflatten", "ravel", "permute", "transpose", "t", "movedim", "moveaxis", "swapaxes", "swapdims", "unsqueeze",
    "squeeze", "expand", "repeat", "repeat_interleave", "tile", "chunk", "split", "tensor_split", "unbind", "select", "narrow", "flip", "roll",
    "get",
])  # fmt: skip
_REDUCTIONS = frozenset([
    "sum", "mean", "amax", "amin", "max", "min", "prod", "logsumexp", "norm", "vector_norm", "std", "var", "median", "all", "any", "nansum",
    "nanmean", "argmax", "argmin", "count_nonzero",
])  # fmt: skip
_WRITES = frozenset([
    "index_add", "index_put", "index_copy", "index_fill", "index_reduce", "scatter", "scatter_add", "scatter_reduce", "masked_scatter", "copy",
    "put", "zero", "fill",
])  # fmt: skip
_PRODUCTS = frozenset(["matmul", "mm", "bmm", "rmatmul"])
_FACTORIES = frozenset([
    "empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided",
])  # fmt: skip
_NOT_SELECTED = -1  # number of an entry that was not selected
_MIX_FACTOR = 1_000_003  # factor that combines the numbers of successive selections into one


class Rows(NamedTuple):
    """Which entries of its source a tensor holds.

    Args:
        numbers: number of each entry in the source, int64, same shape as the tensor.
        picked: whether a single entry was taken, so that there is no dimension of selected entries.
        place: the user's line of code that selected.
    """

    numbers: Tensor
    picked: bool
    place: str


class RowTracker(TorchFunctionMode):
    """Function mode that tracks row selections in the pass of one branch.

    Args:
        inputs: tensors that are the same in all branches.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._same, self._rows = TensorFacts((tensor, True) for tensor in inputs), TensorFacts()
        self._ranks = TensorFacts()  # for indices sorted by rank, such as those of topk: the rank of each
        self._inverse = TensorFacts()  # marks tensors of the rank of each entry, such as an argsort of an argsort
        self._read = False  # whether values that differ between branches were read into Python
        self.ranks = False  # whether the model sorts or selects by computed values
        # under vmap values are unavailable, and no tensor of the pass may be kept
        self._tracks = torch._C._functorch.peek_interpreter_stack() is None

    def of(self, leaf: Tensor) -> Rows | None:
        """Return which entries an output tensor holds, None if they were not selected."""
        rows = self._rows.get(leaf)
        if rows is None or rows.picked or (rows.numbers.numel() and bool((rows.numbers == _NOT_SELECTED).all())):
            return None
        return rows

    def __torch_function__(self, function: Any, kinds: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():  # inside torch.cond or a compiled function of the model
            return out
        name = getattr(function, "__name__", "").strip("_")
        if not self._tracks:  # under vmap only detect selections; they are then tracked in a separate pass
            self.ranks = self.ranks or name in _RANKS or name in _CHOICES
            return out
        ins, outs = tensors_among((*args, *kwargs.values())), tensors_among((out,))
        same = all(map(self._same.get, ins)) and name not in _RANDOM
        if self._read and (name in _LISTS or (name == "getitem" and _has_python_index(args[1]))):
            same = False
        if not outs:
            self._read = self._read or (name in _PYTHON_READS and not same)
            if name == "setitem" and not same:
                self._same.set(args[0], None)
                self._note_write(*args)
            return out
        if same:
            for leaf in outs:
                self._same.set(leaf, True)
            return out
        for leaf in outs:
            if self._same.get(leaf):  # written in place
                self._same.set(leaf, None)
        self.ranks = self.ranks or name in _RANKS or name in _CHOICES
        is_selection = name in _RANKS or name in _CHOICES or name in _LISTS or name in _PICKS or name == "where"
        if is_selection or any(map(self._rows.get, ins)):
            try:
                with torch.no_grad():
                    followed = self._follow(name, function, args, kwargs, outs)
            except Exception:  # an unusual call: its results count as not selected
                followed = [None] * len(outs)
            for leaf, rows in zip(outs, followed, strict=False):
                self._rows.set(leaf, rows)
        return out

    def _follow(
        self, name: str, function: Any, args: tuple, kwargs: dict[str, Any], outs: list[Tensor]
    ) -> list[Rows | None]:
        """Return what is known about the result tensors of a call."""
        nothing: list[Rows | None] = [None] * len(outs)
        if name in _FACTORIES and outs[0].is_floating_point():
            return nothing
        if name == "copy" and args[0].shape == args[1].shape:
            return [self._rows.get(args[1])]
        if name in _WRITES:
            return [self._rows.get(args[0])] * len(outs)
        if name in _RANKS:
            return self._ranked(name, args, kwargs, outs)
        if name in _CHOICES or (name == "where" and len(args) + len(kwargs) == 1):
            return [_select_rows(leaf) for leaf in outs[: 1 if name.startswith("unique") else None]]
        if name in _LISTS:
            made = self._read and isinstance(args[0], list | tuple) and not outs[0].is_floating_point()
            return [_select_rows(outs[0])] if made else nothing
        if name in _PICKS:
            return [self._picked(name, function, args, kwargs, outs[0])]
        if name in _JOINS:
            return [self._joined(function, args, kwargs)]
        source = self._rows.get(args[0]) if args else None
        if name in _MOVES:
            if source is None:
                return nothing
            moved = tensors_among((function(source.numbers, *args[1:], **kwargs),))
            picked = self._ranked_alike(function, args, kwargs, outs)
            return [Rows(leaf, source.picked or one, source.place) for leaf, one in zip(moved, picked, strict=True)]
        if name in _REDUCTIONS and not (len(args) > 1 and isinstance(args[1], Tensor)):
            return nothing if source is None else [_reduced(source, args, kwargs, outs[0]), *nothing[1:]]
        if name in _PRODUCTS:
            sides = [_contracted(self._rows.get(args[i]), dim) for i, dim in ((0, -1), (1, -2))]
            return [_carried([rows for rows in sides if rows is not None], outs[0], loose=True)]
        sources = args[:1] if "attention" in name else (*args, *kwargs.values())
        rows = [
            rows for leaf in tensors_among(sources) if (rows := self._rows.get(leaf)) is not None and not rows.picked
        ]
        return [_carried(rows, leaf) for leaf in outs]

    def _note_write(self, target: Tensor, index: Any, value: Any) -> None:
        """Note that selected entries are written into a part of a tensor that does not depend on values, such as the first n rows."""
        rows = self._rows.get(value) if isinstance(value, Tensor) else None
        items = index if isinstance(index, tuple) else (index,)
        if rows is None or rows.picked or not all(item is Ellipsis or isinstance(item, int | slice) for item in items):
            return
        before = self._rows.get(target)
        numbers = torch.full_like(target, _NOT_SELECTED, dtype=torch.long) if before is None else before.numbers.clone()
        numbers[index] = rows.numbers
        self._rows.set(target, Rows(numbers, False, rows.place))

    def _ranked(self, name: str, args: tuple, kwargs: dict[str, Any], outs: list[Tensor]) -> list[Rows | None]:
        """Return the rows of a sort or topk: its indices select entries; its values mean the same in every branch (best, second best, ...)."""
        # only the best entry is taken, so that there is no dimension of ranks
        if name == "msort" or (name == "topk" and (kwargs["k"] if "k" in kwargs else args[1]) == 1):
            return [None] * len(outs)
        position = 2 if name == "topk" else 1
        dim = kwargs.get("dim", args[position] if len(args) > position and type(args[position]) is int else -1)
        if name != "topk" and self._ranks.get(args[0]) is not None:
            self._inverse.set(outs[-1], True)
        self._ranks.set(outs[-1], _positions(outs[-1], [dim % outs[-1].dim()]).expand(outs[-1].shape))
        return [*[None] * (len(outs) - 1), _select_rows(outs[-1])]

    def _ranked_alike(self, function: Any, args: tuple, kwargs: dict[str, Any], outs: list[Tensor]) -> list[bool]:
        """Return which results of a call on indices sorted by rank hold a single rank, such as the second best of every row.

        These have no dimension of selected entries.
        """
        ranks = self._ranks.get(args[0])
        if ranks is None:
            return [False] * len(outs)
        parts = tensors_among((function(ranks, *args[1:], **kwargs),))
        for leaf, part in zip(outs, parts, strict=True):
            self._ranks.set(leaf, part)
        return [bool((part == part.flatten()[:1]).all()) for part in parts]

    def _picked(self, name: str, function: Any, args: tuple, kwargs: dict[str, Any], out: Tensor) -> Rows | None:
        """Return the rows of a call that takes entries by an index."""
        if name == "embedding":
            return _select_rows(args[0][..., None].expand(out.shape)) if self._selects(args[0]) else None
        x, single, short = args[0], False, False
        if name == "getitem":
            dims, chosen, single = self._indexed(x, args[1])
            short = not isinstance(args[1], tuple)
        else:
            index = next(arg for arg in (*args[1:], *kwargs.values()) if isinstance(arg, Tensor))
            if self._same.get(x) and self._inverse.get(index):
                return None  # values by rank, looked up by the rank of each entry: row i is still entry i
            dim = kwargs.get("dim", next((arg for arg in args[1:] if isinstance(arg, int)), None))
            chosen = not self._same.get(index) if index.dtype == torch.bool else self._selects(index)
            dims = list(range(x.dim())) if dim is None else [dim % x.dim()]
            single = not chosen and self._rows.get(index) is not None
        source = self._rows.get(x)
        if not (chosen or single):
            if source is None:
                return None
            [one] = self._ranked_alike(function, args, kwargs, [out])
            return source._replace(numbers=function(source.numbers, *args[1:], **kwargs), picked=source.picked or one)
        positions = _positions(x, dims)
        if source is None:
            numbers = positions if short else positions.expand(x.shape)
        else:
            numbers = source.numbers if _varies(source.numbers, dims) else source.numbers * _MIX_FACTOR + positions
        is_single = not chosen and (source is None or source.picked or _varies(source.numbers, dims))
        return Rows(function(numbers, *args[1:], **kwargs).expand(out.shape), is_single, _user_line())

    def _indexed(self, x: Tensor, index: Any) -> tuple[list[int], bool, bool]:
        """Return the dimensions in which an index selects entries, whether it selects several, and whether it selects a single one."""
        items = list(index) if isinstance(index, tuple) else [index]
        width = [_width(item) for item in items]
        dims: list[int] = []
        chosen = single = False
        dim = 0
        for item, size in zip(items, width, strict=True):
            if item is Ellipsis:
                dim += x.dim() - sum(width)
                continue
            several = self._chooses(item)
            one = not several and self._takes_one(item)
            chosen, single = chosen or several, single or one
            if several or one:
                dims += range(dim, dim + size)
            dim += size
        return dims, chosen, single

    def _chooses(self, item: Any) -> bool:
        if isinstance(item, list):
            return self._read or any(isinstance(part, Tensor) and self._rows.get(part) is not None for part in item)
        if not isinstance(item, Tensor) or not item.dim():
            return False
        return not self._same.get(item) if item.dtype in (torch.bool, torch.uint8) else self._selects(item)

    def _takes_one(self, item: Any) -> bool:
        if isinstance(item, Tensor):
            return self._rows.get(item) is not None
        return self._read and type(item) is int

    def _selects(self, index: Tensor) -> bool:
        rows = self._rows.get(index)
        return rows is not None and not rows.picked and index.dim() > 0

    def _joined(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Rows | None:
        parts = args[0] if args else kwargs["tensors"]
        rows = [self._rows.get(part) for part in parts]
        numbers = [
            torch.full_like(p, _NOT_SELECTED, dtype=torch.long) if r is None else r.numbers
            for p, r in zip(parts, rows, strict=True)
        ]
        first = next((r for r in rows if r is not None), None)
        return None if first is None else Rows(function(numbers, *args[1:], **kwargs), False, first.place)


def _has_python_index(index: Any) -> bool:
    """Return whether an index holds Python numbers or lists."""
    return any(type(item) in (int, list) for item in (index if isinstance(index, tuple) else (index,)))


def _width(item: Any) -> int:
    """Return how many dimensions of the tensor an item of an index covers."""
    if item is None or item is Ellipsis:
        return 0
    return item.dim() if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8) else 1


def _select_rows(leaf: Tensor) -> Rows:
    return Rows(leaf.double().view(torch.long) if leaf.is_floating_point() else leaf.long(), False, _user_line())


def _positions(x: Tensor, dims: Collection[int]) -> Tensor:
    """Return the number of each entry counted along the given dimensions, with size 1 along the others."""
    shape = [size if dim in dims else 1 for dim, size in enumerate(x.shape)]
    return torch.arange(torch.Size(shape).numel(), device=x.device).view(shape)


def _varies(numbers: Tensor, dims: Collection[int]) -> bool:
    """Return whether numbers differ along any of the given dimensions."""
    return any(numbers.shape[dim] > 1 and bool((numbers != numbers.narrow(dim, 0, 1)).any()) for dim in dims)


def _reduced(rows: Rows, args: tuple, kwargs: dict[str, Any], out: Tensor) -> Rows | None:
    """Return the rows after a reduction, None if it reduces the selected dimension."""
    dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
    if dim is None:
        return None
    numbers = rows.numbers
    dims = sorted({d % numbers.dim() for d in ((dim,) if isinstance(dim, int) else dim)}, reverse=True)
    if any(numbers.shape[d] == 1 for d in dims) or _varies(numbers, dims):
        return None
    for d in dims:
        numbers = numbers.narrow(d, 0, 1) if out.dim() == rows.numbers.dim() else numbers.select(d, 0)
    return rows._replace(numbers=numbers)


def _contracted(rows: Rows | None, dim: int) -> Rows | None:
    """Return the rows of one operand of a matrix product, None if the product sums over the selected entries."""
    if rows is None or rows.picked or rows.numbers.dim() < -dim or _varies(rows.numbers, [dim % rows.numbers.dim()]):
        return None
    return rows._replace(numbers=rows.numbers.narrow(dim, 0, 1))


def _carried(operands: list[Rows], out: Tensor, loose: bool = False) -> Rows | None:
    """Return the rows after a call that keeps them: elementwise, or a layer that changes other dimensions than the selected one."""
    result: Rows | None = None
    for rows in operands:
        numbers = rows.numbers
        if numbers.dim() == out.dim():
            changed = [d for d in range(out.dim()) if numbers.shape[d] not in (1, out.shape[d])]
            if _varies(numbers, changed):
                continue
            for d in changed:
                numbers = numbers.narrow(d, 0, 1)
        try:
            numbers = numbers.expand(out.shape)
        except RuntimeError:
            continue
        result = (
            rows._replace(numbers=numbers)
            if result is None
            else result._replace(numbers=_mixed(result.numbers, numbers))
        )
    return result


def _mixed(a: Tensor, b: Tensor) -> Tensor:
    if a is b or torch.equal(a, b):
        return a
    return torch.where(a == _NOT_SELECTED, b, torch.where(b == _NOT_SELECTED, a, a * _MIX_FACTOR + b))


def _user_line() -> str:
    """Return the line of the user's code that is running."""
    frame = sys._getframe(1)
    while frame is not None and not is_user_code(frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    return (
        "" if frame is None else f"{frame.f_code.co_qualname} at {line_name(frame.f_code.co_filename, frame.f_lineno)}"
    )


Tracked = tuple[RowTracker, Any]  # the tracker of a pass, and its output


def selected(
    passed: Tracked, ragged: Callable[[list[str]], Collection[int]] | None, names: Callable[[Any], list[str]]
) -> list[int]:
    """Return the indices of the output leaves whose rows the model selects, without those that `ragged` names."""
    tracker, output = passed
    leaves = flatten(output)[0]
    indices = [i for i, leaf in enumerate(leaves) if is_float(leaf) and tracker.of(leaf) is not None]
    matched = ragged(names(output)) if ragged is not None and indices else ()
    return [i for i in indices if i not in matched]


def refuse_other_rows(passes: Sequence[Tracked], places: Sequence[int]) -> None:
    """Raise if the branches have selected different rows for one of the given leaves.

    Args:
        passes: the tracked passes of all branches.
        places: indices of the leaves.

    Raises:
        OutputShapeError: with the line that selected, and a remedy.
    """
    for i in places:
        rows = [None if i >= len(leaves := flatten(output)[0]) else tracker.of(leaves[i]) for tracker, output in passes]
        known = [row for row in rows if row is not None]
        for row in known[1:]:
            a, b = known[0].numbers, row.numbers
            if a.shape == b.shape and not bool(((a != b) & (a != _NOT_SELECTED) & (b != _NOT_SELECTED)).any()):
                continue
            raise OutputShapeError(
                f"{paths(passes[0][1])[i]} holds rows that the model selects by its own numbers{f' ({row.place})' if row.place else ''}, and "
                f"the branches have selected different ones, so that row i is not the same item in all of them. {REMEDY}"
            )


REMEDY = (
    "If these are boxes with scores and labels, use output=Detections(boxes=..., scores=..., labels=...), from workbench.outputs import "
    "Detections; otherwise return the scores and values of all rows and select outside the wrapped model"
)
