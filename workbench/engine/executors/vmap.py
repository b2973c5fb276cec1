"""The fast executor: one pass under nested `torch.vmap`, which carries the branch axes physically and so is right, or raises."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._functorch.vmap import (  # torch.export knows them by these names
    _add_batch_dim,
    _remove_batch_dim,
    lazy_load_decompositions,
    vmap_increment_nesting,
)
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..branch import Clone, Together, call, is_batched, refuse_recomputing
from ..clone import share
from ..plan import Axis, Plan, joined
from ..tree import flatten
from .autocast import Lowered
from .rescue import Rescue, Unfused

if TYPE_CHECKING:
    from ..run import Engine

_functorch: Any = torch._C._functorch
Given = tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]  # what a pass gave: outputs, buffers, taps


def run(
    engine: Engine, plan: Plan, args: tuple, kwargs: dict[str, Any], first: bool = False, rescue: bool = False
) -> Together:
    """All branches in one pass, or in as few as `plan.chunk` allows.

    What comes before the first tensor that differs between branches is computed once.

    Args:
        engine: it holds the clones.
        plan: what differs between the branches.
        args, kwargs: the inputs.
        first: whether to look for tensors that outlive the pass, where nobody would expect them to have branches.
        rescue: whether operations that vmap knows no rule for are put in other words.

    Returns:
        One result a branch, in the order of `plan.indices`; stacked.
    """
    engine.begin(plan, alone=True)
    clone = engine.clone(plan, plan.indices[0])
    outer = plan.axes[0].size
    # numbers that are to be the same for all branches are drawn once
    step = outer if plan.axes[0].randomness == "same" else plan.chunk or outer
    results: Together | None = None
    made: list[weakref.ref[Tensor]] | None = [] if first else None
    for start in range(0, outer, step):
        if start and engine.impure:
            raise RuntimeError("forward changes attributes, which it would do once for each chunk of branches")
        part = _pass(engine, clone, plan, start, min(step, outer - start), args, kwargs, rescue, made)
        results = part if results is None else results + part
    kept = any(is_batched(ref()) for ref in made or ())
    for generation in (
        (1, 2) if kept else ()
    ):  # what the pass left in cycles is mostly young; a look at all objects takes long
        gc.collect(generation)
        kept = any(is_batched(ref()) for ref in made or ())
        if not kept:
            break
    if kept:
        raise RuntimeError(
            "the model, or a hook on it, keeps a tensor outside its modules (in a global variable, a class or a list)"
        )
    assert results is not None  # an axis has at least one branch
    return results


def rescued(engine: Engine, plan: Plan, args: tuple, kwargs: dict[str, Any], first: bool = False) -> Together:
    """As `run`, with operations that vmap knows no rule for put in other words."""
    return run(engine, plan, args, kwargs, first, rescue=True)


def _stacked(plan: Plan, clone: Clone, start: int, count: int) -> dict[str, tuple[Tensor, tuple[str, ...]]]:
    """For each slot its tensor with the branch axes in front, and their names; of the outermost axis only `count` branches from `start` on.

    Where a layer takes its weight in factors, those of each, by slot and number.
    """
    active = {axis.name: i for i, axis in enumerate(plan.axes)}
    outermost = plan.axes[0].name
    stacked: dict[str, tuple[Tensor, tuple[str, ...]]] = {}
    factored = clone.factored(plan)
    rules = {slot: rule for slot, rule in plan.rules.items() if slot not in factored}
    rules.update({f"{slot}@{i}": part for slot in factored for i, part in enumerate(plan.rules[slot].factors)})
    for slot, rule in rules.items():
        tensor, axes = rule.dense(plan.bank)
        for position in reversed(range(len(axes))):  # an axis that is not active stands at its fixed position
            if axes[position] not in active:
                tensor = tensor.select(position, plan.fixed.get(axes[position], 0))
        own = [name for name in axes if name in active]
        # outermost axis first: functorch writes batch norm's statistics into a copy where batch dimensions lie otherwise
        order = sorted(range(len(own)), key=lambda i: active[own[i]])
        if order != list(range(len(own))):
            tensor = tensor.permute(*order, *range(len(own), tensor.dim()))
        if outermost in own and count < tensor.shape[0]:
            tensor = tensor.narrow(0, start, count)
        stacked[slot] = tensor, tuple(own[i] for i in order)
    if not clone.buffers:
        return stacked
    ruled = {name for slot, rule in plan.rules.items() if slot in clone.home for name in rule.axes()}
    training = any(module.training for module in clone.tree.values())
    # noise reaches the statistics in training, so each branch needs its own
    apart = [axis for axis in plan.axes if axis.name not in ruled] if training else []
    sizes = [count if axis.name == outermost else axis.size for axis in apart]
    stacked.update({slot: (plan.bank.get(slot), ()) for slot in clone.buffers - clone.own - stacked.keys()})
    with torch.inference_mode(False):
        for slot in clone.own:
            if slot in stacked:
                tensor, own_names = stacked[slot]
                stacked[slot] = tensor.clone(memory_format=torch.contiguous_format), own_names
            else:
                tensor = plan.bank.get(slot)
                stacked[slot] = tensor.expand((*sizes, *tensor.shape)).clone(), tuple(axis.name for axis in apart)
    return stacked


def _pass(
    engine: Engine,
    clone: Clone,
    plan: Plan,
    start: int,
    count: int,
    args: tuple,
    kwargs: dict[str, Any],
    rescue: bool,
    made: list[weakref.ref[Tensor]] | None,
) -> Together:
    """One pass for `count` branches of the outermost axis and all of the others."""
    outermost = plan.axes[0].name
    if count < plan.axes[0].size:
        plan = replace(plan, axes=(replace(plan.axes[0], size=count), *plan.axes[1:]))
    stacked = _stacked(plan, clone, start, count)
    given, regroup = flatten((args, kwargs))
    dealt: dict[int, Tensor] = {}
    if plan.dealt:
        parts = plan.rows[start : start + count] if plan.dealt == outermost else plan.rows
        rows = joined(parts)
        for i, leaf in enumerate(given):
            if isinstance(leaf, Tensor) and leaf.dim():
                dealt[i] = leaf.index_select(0, rows.to(leaf.device, non_blocking=True)).unflatten(0, (len(parts), -1))
    shape: dict[str, Any] = {}
    sizes = tuple(axis.size for axis in plan.axes)
    # heads on one trunk, of which there is nothing to keep: no need to tell the axes apart, so that no mode has to watch over two vmaps
    one = (
        len(sizes) > 1 and plan.shares_trunk and not (rescue or engine.root.training or clone.own or plan.interventions)
    )
    axes = (Axis("", plan.size, "error"),) if one else plan.axes

    def once(values: list[Tensor], token: Tensor | None) -> Given:
        modes: list[TorchFunctionMode] = [] if made is None else [_Noting(made)]
        if token is not None:
            modes.append(Rescue(token))
        lowered = Lowered(engine.kind.device) if engine.kind.autocast else nullcontext()
        nested = nullcontext() if len(axes) == 1 else Unfused() if rescue else _Nested()
        # outside of noise and taps, which are to see the layers
        with lowered, nested, engine.watching(clone, plan, first=True):
            installed = dict(zip(stacked, values[: len(stacked)], strict=True))
            for slot in clone.factored(plan):
                installed[slot] = clone.weight(slot, [installed.pop(f"{slot}@{i}") for i in range(3)])
            own = dict(zip(dealt, values[len(stacked) :], strict=True))
            inputs = regroup([own.get(i, leaf) for i, leaf in enumerate(given)]) if own else (args, kwargs)
            result = call(
                clone, plan, installed, _Everywhere(plan), inputs[0], inputs[1], _together(modes) if modes else None
            )
        _refuse_held(clone, engine.impure)
        if made is not None:
            clone.install(plan.values(plan.fixed, clone))  # what is still in place is not kept by the model
        leaves, shape["rebuild"] = flatten(result.output)
        for leaf in leaves:
            if not isinstance(leaf, Tensor) and _holds_batched(leaf):
                raise RuntimeError(f"the output has a {type(leaf).__name__} with tensors of its branch inside")
        shape["static"] = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return outputs, result.buffers, result.taps

    with refuse_recomputing():
        values = [*stacked.values(), *((tensor, (plan.dealt,)) for tensor in dealt.values())]
        if one:
            values = [(_joint(tensor, own, plan.axes), ("",)) if own else (tensor, own) for tensor, own in values]
        token = torch.zeros((), device=values[0][0].device if values else None) if rescue else None
        # an operation that is run branch by branch is nothing to trouble the user with, who has not asked for vmap
        _functorch._set_vmap_fallback_warning_enabled(False)
        try:
            outputs, buffers, taps = _nested(once, axes, values, token)
        finally:
            _functorch._set_vmap_fallback_warning_enabled(True)
        if one:
            outputs = [output.unflatten(0, sizes) for output in outputs]
            buffers = {slot: buffer.unflatten(0, sizes) for slot, buffer in buffers.items()}

    items = iter(outputs)
    leaves = [next(items) if static is None else static[0] for static in shape["static"]]
    rebuild = flatten(shape["rebuild"](leaves))[
        1
    ]  # the other one holds the model's own containers, with dead tensors in them
    shape.clear()
    return Together(sizes, leaves, rebuild, buffers, taps)


def _nested(
    once: Callable[..., Given], axes: Sequence[Axis], values: list[tuple[Tensor, tuple[str, ...]]], token: Tensor | None
) -> Given:
    """A pass under one vmap for each axis; not a closure that calls itself, which would keep the inputs alive.

    What `torch.vmap` does, without its search through trees of inputs and outputs, which takes longer than a small network.

    Args:
        once: the pass, given values and token without their branch axes.
        axes: those that are left, outermost first.
        values: tensors with those of the axes in front along which they differ, and the names of these.
        token: a tensor that is batched along every axis, if one is wanted.
    """
    if not axes:
        return once([value for value, _ in values], token)
    axis, *inner = axes
    lazy_load_decompositions()
    with vmap_increment_nesting(axis.size, axis.randomness) as level:
        inside = [
            (_add_batch_dim(value, own.index(axis.name), level), tuple(n for n in own if n != axis.name))
            if axis.name in own
            else (value, own)
            for value, own in values
        ]
        seed = None if token is None else _add_batch_dim(token.new_zeros(axis.size), 0, level)
        outputs, buffers, taps = _nested(once, inner, inside, seed)

        def outside(tensor: Tensor) -> Tensor:
            return _remove_batch_dim(tensor, level, axis.size, 0)

        return (
            [outside(tensor) for tensor in outputs],
            {slot: outside(tensor) for slot, tensor in buffers.items()},
            {name: outside(tensor) for name, tensor in taps.items()},
        )


def _joint(tensor: Tensor, own: tuple[str, ...], axes: Sequence[Axis]) -> Tensor:
    """A tensor [branches, ...] of one that has some of the axes in front, in their order."""
    for i, axis in enumerate(axes):
        if axis.name not in own:
            tensor = tensor.unsqueeze(i).expand(*tensor.shape[:i], axis.size, *tensor.shape[i:])
    return tensor.flatten(0, len(axes) - 1)


class _Everywhere(dict):
    """The place of all branches at once, which has no number along the axes of the run."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.fixed)
        self._axes = {axis.name for axis in plan.axes}

    def __missing__(self, name: str) -> int:
        if name in self._axes:
            raise RuntimeError(
                f"an intervention asks for the branch's place along {name!r}, which vmap does not know; read what differs by a Stacked rule, or "
                "set loop_only"
            )
        raise KeyError(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self or name in self._axes else default


class _Nested(Unfused):
    """Under two vmaps at once: refuses attention, where fused attention crashes the interpreter (torch 2.13, CPU), and widens linear layers."""

    def __torch_function__(
        self, function: Any, kinds: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is F.linear and (found := _widened(*args, **(kwargs or {}))) is not None:
            return found
        if "attention" in (name := getattr(function, "__name__", "")):
            raise RuntimeError(f"{name} cannot run under two vmaps at once")
        return super().__torch_function__(function, kinds, args, kwargs)


def _widened(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """A linear layer of which only the weight differs along the inner axis (heads on one trunk) as one layer with all their outputs.

    vmap itself would copy the input once for each head.
    """
    level = _functorch.maybe_get_level(weight) if is_batched(weight) else -1
    if (
        level < 0 or weight.dim() != 2 or level != _functorch.maybe_current_level()
    ):  # inside a transform of the model's own
        return None
    if is_batched(input) and _functorch.maybe_get_level(input) >= level:
        return None
    if bias is not None and (not is_batched(bias) or _functorch.maybe_get_level(bias) != level):
        return None
    stacked, *rest = (
        _functorch.get_unwrapped(tensor).movedim(_functorch.maybe_get_bdim(tensor), 0)
        for tensor in (weight, *([] if bias is None else [bias]))
    )
    wide = F.linear(input, stacked.flatten(0, 1), rest[0].flatten() if rest else None)
    return _functorch._add_batch_dim(wide.unflatten(-1, stacked.shape[:2]), wide.dim() - 1, level)


@contextmanager
def _together(modes: list[TorchFunctionMode]) -> Iterator[None]:
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        yield


class _Noting(TorchFunctionMode):
    """Notes what comes out of every call, without keeping it alive."""

    def __init__(self, made: list[weakref.ref[Tensor]]) -> None:
        super().__init__()
        self._made = made

    def __torch_function__(
        self, function: Any, kinds: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        self._made.extend(weakref.ref(leaf) for leaf in flatten(out)[0] if isinstance(leaf, Tensor))
        return out


def _holds_batched(value: Any) -> bool:
    held: dict[int, Any] = {}
    share(value, held, set())
    return any(is_batched(item) for item in held.values())


def _refuse_held(clone: Clone, impure: frozenset[tuple[str, str]]) -> None:
    """What forward leaves in attributes must be the same for all branches: one clone stands for all of them here."""
    for path, name in impure:
        if _holds_batched(clone.tree[path].__dict__.get(name)):
            raise RuntimeError(f"forward keeps a tensor of its branch in {path + '.' if path else ''}{name}")
