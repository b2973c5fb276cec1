"""Detection of means that are passed back as inputs in the place of state, of which each branch should have kept its own.

Averaged tensors are marked in two ways: by their storage, as long as it is alive, which finds views, slices and detached tensors; and by an
attribute, which deep copies and pickles keep.
"""

from __future__ import annotations

import inspect
import re
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ...engine.effects.inputs import is_object
from ...engine.effects.random import values_unavailable
from ...engine.plan import Plan
from ...engine.tree import flatten, is_float, names, tensors
from ...introspect.objects import tensors_and_generators
from ..function import Function
from ..ownership import marks_of
from .call import Call

_ATTRIBUTE = "_workbench_mean"
# names of parameters and keys that take state; under other names the first input takes data, and so does any input for a model's only output
_STATE = re.compile(r"(^|_)(hx?|cx?|hc|[hc]_?[0nt]|mems?)(_|$)|hidden|state|carry|memory|cache|past_key", re.IGNORECASE)


class Mark(NamedTuple):
    """Mark of a tensor that a call has averaged."""

    owner: str  # id of the wrapped object
    name: str  # name of the output
    n_floats: int  # number of floating-point tensors in the output


class Marks:
    """Tensors that a wrapped object has averaged.

    Args:
        owner: id of the object, which is the same in copies of it.
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self._storages: dict[int, tuple[StorageWeakRef, Mark]] = {}
        self._limit = 64
        self._names: list[str] = []

    def add(self, output: Any) -> None:
        """Mark the floating-point tensors of an output."""
        leaves = flatten(output)[0]
        count = sum(map(is_float, leaves))
        if torch.compiler.is_dynamo_compiling():
            for name, leaf in zip(names(output), leaves, strict=True) if count > 1 else ():
                if is_float(leaf):
                    setattr(leaf, _ATTRIBUTE, (self.owner, name, count))
            return
        if len(leaves) != len(self._names):
            self._names = names(output)
        for name, leaf in zip(self._names, leaves, strict=True):
            if is_float(leaf) and type(leaf) is Tensor and leaf.layout is torch.strided:
                mark = Mark(self.owner, name, count)
                leaf.__dict__[_ATTRIBUTE] = tuple(mark)
                storage = StorageWeakRef(leaf.untyped_storage())
                self._storages[storage.cdata] = storage, mark
        if len(self._storages) > self._limit:
            self._storages = {key: entry for key, entry in self._storages.items() if not entry[0].expired()}
            self._limit = 2 * len(self._storages) + 64

    def of(self, tensor: Tensor) -> Mark | None:
        """Return the mark of a tensor, None if it is no mean of this object."""
        entry = tensor.__dict__.get(_ATTRIBUTE)
        if entry is None and (base := tensor._base) is not None:
            entry = base.__dict__.get(_ATTRIBUTE)
        if entry is not None and entry[0] == self.owner:
            return Mark(*entry)
        if not self._storages or tensor.layout is not torch.strided:
            return None
        known = self._storages.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[1]


def marks_for(wrapped: Any, return_risk: bool, output: Any) -> Marks | None:
    """Return the marks to which `mark_means` adds predictions in evaluation mode like this one, None if it marks none."""
    call = Call(training=False, return_risk=return_risk)
    axes = [axis for method in wrapped._workbench.methods if (axis := method.axis(call)) is not None]
    if wrapped._workbench.state == () or not any(axis.size > 1 and not axis.own_first for axis in axes):
        return None
    return None if type(output) is Tensor and not _takes_state(wrapped) else marks_of(wrapped)


def mark_means(wrapped: Any, plan: Plan, output: Any) -> None:
    """Mark the outputs that a call has averaged, or gathered from dealt rows."""
    if wrapped._workbench.state == () or not any(axis.size > 1 and not axis.own_first for axis in plan.axes):
        return
    if type(output) is Tensor and (torch.compiler.is_dynamo_compiling() or not _takes_state(wrapped)):
        return  # the only output of a model that takes no state is data wherever it is passed back
    if torch.compiler.is_dynamo_compiling() or not values_unavailable():
        marks_of(wrapped).add(output)


def carries_mean(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Return whether an input has the attribute of a mean; storages cannot be compared while `torch.compile` traces."""
    return any(getattr(leaf, _ATTRIBUTE, None) is not None for leaf in tensors((args, kwargs)))


def refuse_means(wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raise if a mean is passed back in the place of state.

    Raises:
        ValueError: if a mean of an earlier call is passed as an input other than the first, or as one named like state.
    """
    if wrapped._workbench.state == () or values_unavailable():
        return
    marks = marks_of(wrapped)
    values = [value for value in (*args, *kwargs.values()) if value is not None]
    if all(type(value) is Tensor for value in values) and not any(map(marks.of, values)):
        return
    for place, leaf in enumerate(flatten((args, kwargs))[0]):
        if isinstance(leaf, Tensor):
            if (mark := marks.of(leaf)) is not None:
                _check(wrapped, args, kwargs, place, mark)
        elif is_object(leaf):
            for inside in tensors_and_generators(leaf):
                if isinstance(inside, Tensor) and (mark := marks.of(inside)) is not None:
                    _refuse(wrapped, f"a {type(leaf).__name__} among the inputs", mark)


def _check(wrapped: Any, args: tuple, kwargs: dict[str, Any], place: int, mark: Mark) -> None:
    """Raise ValueError for a mean at a leaf index of the inputs, unless that input takes data."""
    words, tensors_before = _parameters(wrapped, args, kwargs)[place]
    named = any(_STATE.search(word) for word in words)
    first = not tensors_before
    if (named or not first) if mark.n_floats > 1 else (named and not first):
        _refuse(wrapped, f"the input {'.'.join(words)!r}", mark)


def _takes_state(wrapped: Any) -> bool:
    """Return whether a parameter after the first is named like state."""
    return any(map(_STATE.search, _parameter_names(wrapped)[1:]))


def _parameter_names(wrapped: Any) -> list[str]:
    """Return the parameter names of the wrapped method or function."""
    if isinstance(wrapped, Function):
        return _names_of(wrapped._held.function)
    return _names_of(getattr(type(wrapped)._plain_class, wrapped._workbench.method, None))[1:]


def _names_of(function: Any) -> list[str]:
    try:
        code = getattr(inspect.unwrap(function), "__code__", None)
        if code is not None:  # faster than inspect.signature, which cannot be cached for unhashable functions
            return list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def _parameters(wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> list[tuple[list[str], bool]]:
    """Return, for each leaf of the inputs, the name of its parameter with the keys of its path, and whether an earlier leaf is a tensor."""
    known = _parameter_names(wrapped)
    order = [known[i] if i < len(known) else str(i) for i in range(len(args))] + list(kwargs)
    parameters = list(zip(order, [*args, *kwargs.values()], strict=True))
    rank = {name: i for i, name in enumerate(known)}
    with_tensor = [
        (rank.get(name, i), name, k)
        for i, (name, value) in enumerate(parameters)
        for k, leaf in enumerate(flatten(value)[0])
        if isinstance(leaf, Tensor)
    ]
    first = min(with_tensor, default=None)
    out = []
    for i, (name, value) in enumerate(parameters):
        for k, path in enumerate(names(value)):
            words = [name, *filter(None, path.split("."))]
            out.append((words, first is not None and (rank.get(name, i), name, k) != first))
    return out


def _refuse(wrapped: Any, where: str, mark: Mark) -> None:
    model = type(wrapped)._plain_class.__name__
    state_paths = wrapped._workbench.state
    if mark.n_floats > 1:
        key = int(mark.name) if mark.name.isdigit() else mark.name
        remedy = f"wrap with state={key!r}, so that each branch keeps its own"
        if state_paths:
            remedy = f"wrap with state={(*('.'.join(map(str, path)) for path in state_paths), key)!r}"
    else:
        remedy = "return the state beside the prediction (return h, h) and wrap with state=1, so that each branch keeps its own"
    output = f"its output {mark.name!r}" if mark.name else "its output"
    raise ValueError(
        f"{where} of {model} is {output} of an earlier call, the mean over its branches, which is the state of none of them: {remedy}. If it "
        "is data, as in a forecast that continues from its own mean, say so with state=()"
    )


__all__ = ["Marks", "carries_mean", "mark_means", "refuse_means"]
