"""The executor for shared trunks of models that vmap refuses: one pass per branch, in which results of the trunk are replayed.

The trunk is everything before the first operation on a tensor that differs between branches. It is recorded in the first pass and not computed
again. This works with Python control flow, `.item()`, dynamic shapes and recurrent layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from ...introspect.objects import tensors_and_generators
from ..branch_pass import refuse_recomputing, run_branch
from ..effects.buffers import commit
from ..effects.containers import holds_mutable
from ..effects.random import RandomSources, were_drawn
from ..request import Request
from ..results import Result, folded
from ..state import Sealed
from ..tree import flatten, version

# They expose memory in which writes are not counted, so that a changed trunk could not be detected.
_MEMORY_ACCESS = frozenset(["numpy", "__array__", "__dlpack__", "data_ptr", "storage", "untyped_storage", "set_"])
_AUTOGRAD = frozenset(["backward", "grad", "requires_grad_", "retain_grad", "register_hook"])
# They read metadata that is the same for all branches, so they are not recorded and do not end the trunk.
_METADATA = frozenset([
    "__get__", "__len__", "__hash__", "size", "dim", "ndimension", "numel", "nelement", "stride",
    "element_size", "storage_offset", "is_floating_point", "is_complex", "is_contiguous", "is_inference", "get_device",
])  # fmt: skip
_CONSTANT = (
    *(Tensor, bool, int, float, complex, str, bytes, type(None)),
    *(torch.Size, torch.dtype, torch.device, torch.layout),
)
_DATA = Tensor.data


class NotReplayableError(RuntimeError):
    """Raised if the results of the trunk cannot be replayed."""


class _TrunkMode(TorchFunctionMode):
    """Function mode that handles the calls of the trunk, and refuses, during the whole pass, calls that make replaying impossible."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = True

    def __torch_function__(self, function: Any, kinds: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in _MEMORY_ACCESS or (name in ("__get__", "__set__") and getattr(function, "__self__", None) is _DATA):
            raise NotReplayableError(f"the model reaches into a tensor's memory (.{name.strip('_')})")
        if name in _AUTOGRAD or (name == "__get__" and getattr(function, "__self__", None) is Tensor.grad):
            raise NotReplayableError("the model differentiates in its forward pass")
        if not self.trunk:
            return function(*args, **kwargs)
        if forward_ad._current_level >= 0:  # tangents, as of `torch.func.jvp`, end with the pass
            raise NotReplayableError("the model differentiates in its forward pass")
        if name in _METADATA and not isinstance(value := function(*args, **kwargs), Tensor):
            return value
        return self.on_trunk(function, args, kwargs)

    def on_trunk(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Handle a call that belongs to the trunk."""
        raise NotImplementedError


class Recording(_TrunkMode):
    """Mode of the first pass: records each call with arguments and result, up to the first call on a branched tensor.

    Args:
        branched: ids of the tensors that differ between branches.
        buffers: buffers of the pass that all branches share, by slot.
        sources: random sources of the model.
    """

    def __init__(self, branched: set[int], buffers: Mapping[str, Tensor], sources: RandomSources) -> None:
        super().__init__()
        self.buffers = buffers
        self._branched, self._sources, self._start = branched, sources, sources.all()
        self._gradients = torch.is_grad_enabled()
        self.calls: list[tuple[Any, list[Any], Any]] = []

    def on_trunk(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        arguments = flatten((args, kwargs))[0]
        if any(isinstance(leaf, Tensor) and id(leaf) in self._branched for leaf in arguments):
            self.end()
            return function(*args, **kwargs)
        out = function(*args, **kwargs)
        if all(isinstance(leaf, _CONSTANT) for leaf in flatten(out)[0]) and not isinstance(out, list | dict):
            self.calls.append((function, arguments, out))
        else:  # a list that the model may change, or an unknown object
            self.end()
        return out

    def end(self) -> None:
        """End the trunk. Also called after the pass, for a model that uses no branched tensor."""
        if not self.trunk:
            return
        if torch.is_grad_enabled() is not self._gradients:
            raise NotReplayableError("the trunk ends inside a block with other gradients than the call")
        self.trunk = False
        self._streams = self._sources.all()
        self.random = were_drawn([*self._start], [*self._streams])
        with torch.no_grad(), torch.inference_mode(False):
            self.values = {slot: value.clone() for slot, value in self.buffers.items()}
        leaves = [leaf for _, arguments, out in self.calls for leaf in (*arguments, *flatten(out)[0])]
        trunk_tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
        buffers = {id(value) for value in self.buffers.values()}
        self._versions = [(leaf, version(leaf)) for key, leaf in trunk_tensors.items() if key not in buffers]

    def restore_random(self) -> None:
        """Set the random state to that at the end of the recorded trunk."""
        if self.random:
            self._sources.restore(self._streams)

    def check(self) -> None:
        """Raise NotReplayableError if the trunk's tensors were written into after the trunk."""
        if any(version(leaf) != count for leaf, count in self._versions):
            raise NotReplayableError("what comes after the trunk writes into it in place")


class Replaying(_TrunkMode):
    """Mode of a later pass: returns the recorded results while calls and arguments are the same, and computes all calls after the trunk.

    Args:
        tape: the recording of the first pass.
        buffers: this pass's copies of the recorded buffers, by slot.
    """

    def __init__(self, tape: Recording, buffers: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._tape, self._next = tape, 0
        self._recorded_ids = {id(value): id(tape.buffers[slot]) for slot, value in buffers.items()}

    def on_trunk(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if self._next < len(self._tape.calls):
            recorded, arguments, out = self._tape.calls[self._next]
            if recorded != function or not self._equal(arguments, flatten((args, kwargs))[0]):
                raise NotReplayableError("the trunk does not do the same in every pass")
            self._next += 1
            return out
        self.trunk = False
        self._tape.restore_random()
        return function(*args, **kwargs)

    def _equal(self, recorded: list[Any], current: list[Any]) -> bool:
        return len(recorded) == len(current) and all(map(self._is_same, recorded, current))

    def _is_same(self, recorded: Any, current: Any) -> bool:
        if recorded is current:
            return True
        if isinstance(current, Tensor):
            return self._recorded_ids.get(id(current)) == id(recorded)
        try:
            return type(recorded) is type(current) and bool(recorded == current)
        except Exception:  # arrays and other objects whose comparison has no truth value
            return False


def run(request: Request) -> list[Result]:
    """Run all branches one after another, computing their trunk once.

    Returns:
        One result per branch, in the order of `plan.indices`.
    """
    plan, args, kwargs = request.plan, request.args, request.kwargs
    leaves, rebuild = flatten((args, kwargs))
    sources = request.sources(leaves)
    streams = request.streams(sources)
    request.begin()
    states = request.states(leaves)
    unshared, has_mutable = _unshared_tensors(states), holds_mutable(args, kwargs)
    tape: Recording | None = None
    results: list[Result] = []
    folding = plan.folding() if plan.folding is not None and request.trackers is None else None
    for k, index in enumerate(plan.indices):
        clone = request.clone(index)
        values = clone.values(plan, index)
        branched = {id(values[slot]) for slot, rule in plan.rules.items() if rule.axes()} | unshared
        shared = {slot: values[slot] for slot in clone.copied_buffers if id(values[slot]) not in branched}
        if states or has_mutable:
            args, kwargs = rebuild([Sealed(states[i][k]) if i in states else leaf for i, leaf in enumerate(leaves)])
        with streams.branch(index), request.watching(clone, first=k == 0), refuse_recomputing():
            if tape is None:
                tape = Recording(branched, shared, sources)
                results.append(run_branch(clone, plan, values, index, args, kwargs, tape, bool(states)))
                tape.end()
                if folding is not None:
                    results[-1].output = folded(folding, results[-1].output, len(plan.axes))
                continue
            if tape.random and streams.differ:
                raise NotReplayableError("the trunk draws random numbers, and each branch is to have its own")
            tape.check()
            # the values at the end of the trunk
            commit([*shared.values()], [tape.values[slot] for slot in shared])
            replaying = Replaying(tape, shared)
            results.append(run_branch(clone, plan, values, index, args, kwargs, replaying, bool(states)))
            tape.check()
            if folding is not None:
                results[-1].output = folded(folding, results[-1].output, len(plan.axes))
    return results


def _unshared_tensors(states: dict[int, list[Any]]) -> set[int]:
    """Return the ids of the tensors in states that are not shared by all branches."""
    unshared: set[int] = set()
    for parts in states.values():
        first, *others = ({id(leaf) for leaf in tensors_and_generators(part)} for part in parts)
        unshared |= first.union(*others) - first.intersection(*others)
    return unshared
