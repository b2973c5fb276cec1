"""The fast executor: one pass of all branches under nested `torch.vmap`, which either gives the right result or raises."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._functorch import vmap as functorch_vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..branch import Clone, is_batched
from ..branch_pass import refuse_recomputing, run_branch
from ..clone import share
from ..effects.containers import Containers, holds_mutable
from ..effects.reseeding import SeedWatch
from ..plan import Axis, Plan, concatenate
from ..request import Request
from ..results import StackedResults
from ..state import Sealed, expose_sealed, stack
from ..surroundings import is_exporting, leave_transforms
from ..tree import flatten, versions
from .autocast import AutocastUnderVmap
from .branched_tensors import BranchedTensor, branched_tensors, heads_on_trunks, tensors_of_one
from .first_pass import FirstPass, Watch, refuse_surviving
from .rescue import DropoutByFormula, Rescue

_functorch: Any = torch._C._functorch
PassOutput = tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]  # outputs, buffers, taps
_load_decompositions = functools.cache(functorch_vmap.lazy_load_decompositions)  # to load them again takes a while too


def run(request: Request, rescue: bool = False) -> StackedResults:
    """Run all branches in one pass, or in as few passes as `plan.chunk` allows.

    Everything before the first tensor that differs between branches is computed once. In the first request of its kind it also checks that no
    batched tensor outlives the pass, after which it would be invalid.

    Args:
        request: the request.
        rescue: whether operations without a batching rule are replaced by equivalent ones.

    Returns:
        One result per branch, in the order of `plan.indices`, stacked.
    """
    plan = request.plan
    request.begin(at_once=True)
    outermost = plan.axes[0]
    # random numbers that are the same for all branches must be drawn in one pass
    step = outermost.size if outermost.randomness == "same" else plan.chunk or outermost.size
    results: StackedResults | None = None
    watch = Watch() if request.first else None
    folding = plan.folding() if plan.folding is not None and step < outermost.size else None
    receive = request.receiver() if request.receiver is not None and step < outermost.size else None
    with nullcontext() if watch is None else watch.outside:
        for start in range(0, outermost.size, step):
            if start and request.impure:
                raise RuntimeError("forward changes attributes, which it would do once for each chunk of branches")
            if results is not None and results.inputs is not None and results.inputs.changed():
                raise RuntimeError(
                    "the model fills a list or dict among its inputs, which it would do once for each chunk"
                )
            chunk = _Pass(request, start, min(step, outermost.size - start), rescue, watch).run()
            if folding is not None:
                chunk.leaves = folding(chunk.leaves, chunk.rebuild)
            if receive is not None:
                receive(chunk.leaves, chunk.rebuild)
            results = chunk if results is None else results + chunk
        if watch is not None:
            refuse_surviving(watch.outputs)
    assert results is not None  # an axis has at least one branch
    return results


def rescued(request: Request) -> StackedResults:
    """Run a request like `run`, with operations without a batching rule replaced by equivalent ones."""
    return run(request, rescue=True)


class _Pass:
    """One pass for `count` branches of the outermost axis from `start` on, and all branches of the other axes.

    Args:
        request: the request.
        start, count: range of branches of the outermost axis.
        rescue: see `run`.
        watch: what is noted of the operations of a first pass, None: nothing.
    """

    def __init__(self, request: Request, start: int, count: int, rescue: bool, watch: Watch | None) -> None:
        self.request, self.rescue, self.watch = request, rescue, watch
        plan = request.plan
        self.clone = request.clone(plan.indices[0])
        self.sizes = (count, *(axis.size for axis in plan.axes[1:]))
        if count == 1 and heads_on_trunks(plan):  # a single model needs no axis of models
            plan = replace(plan, axes=plan.axes[1:], fixed={**plan.fixed, plan.axes[0].name: start})
        elif count < plan.axes[0].size:
            plan = replace(plan, axes=(plan.axes[0]._replace(size=count), *plan.axes[1:]))
        self.plan = plan
        self.inputs: Containers | None = None  # the containers among the inputs, as the model has filled them
        self.shared: dict[str, Tensor] = {}  # the buffers that the pass has computed once for all branches
        single = len(plan.axes) < len(self.sizes)
        self.tensors = tensors_of_one(plan, self.clone) if single else branched_tensors(plan, self.clone, start, count)
        self.leaves, self.regroup = request.flat
        self.dealt = self._deal(start, count) if plan.dealt else {}
        self.states = self._stack(start, count)
        # heads on one trunk without side effects can be joined into one axis, which avoids the function mode needed under two vmaps
        self.joint = (
            len(plan.axes) > 1
            and plan.shares_trunk
            and not (rescue or request.training or self.clone.copied_buffers or plan.interventions)
        )
        self.axes = (Axis("", plan.size, "error"),) if self.joint else plan.axes
        # whether draws must be different in each branch, as they are not where the model seeds them itself
        differ = any(axis.randomness == "different" and axis.size > 1 for axis in self.axes)
        self.watches_draws = differ and watch is not None

    def _deal(self, start: int, count: int) -> dict[int, Tensor]:
        """Return the leaves with rows by index, as tensors [branches, rows per branch, ...]."""
        plan, dealt = self.plan, {}
        branch_rows = plan.rows[start : start + count] if plan.dealt == plan.axes[0].name else plan.rows
        rows = concatenate(branch_rows)
        for i, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor) and leaf.dim():
                selected = leaf.index_select(0, rows.to(leaf.device, non_blocking=True))
                dealt[i] = selected.unflatten(0, (len(branch_rows), -1))
        return dealt

    def _stack(self, start: int, count: int) -> dict[int, tuple[list[BranchedTensor], Callable[..., Any]]]:
        """Return, for each leaf that is a state, by index: its stacked tensors, and a function from one branch's tensors to its part."""
        full_plan, stacked = self.request.plan, {}
        for i, parts in self.request.states(self.leaves).items():
            values, filled = stack(parts, full_plan.axes)
            cut = [
                (value.narrow(0, start, count) if names[:1] == (full_plan.axes[0].name,) else value, names)
                for value, names in values
            ]
            stacked[i] = cut, filled
        return stacked

    def run(self) -> StackedResults:
        """Run the pass."""
        shape = _OutputShape()
        with refuse_recomputing():
            values = [*self.tensors.values(), *((tensor, (self.plan.dealt,)) for tensor in self.dealt.values())]
            state = [value for values, _ in self.states.values() for value in values]
            values += state
            written = versions([tensor for tensor, _ in state])
            if self.joint:
                values = [
                    (_join_axes(tensor, names, self.plan.axes), ("",)) if names else (tensor, names)
                    for tensor, names in values
                ]
            token = torch.zeros((), device=values[0][0].device if values else None) if self.rescue else None
            # the user has not asked for vmap, so torch must not warn of operations that it runs branch by branch
            _functorch._set_vmap_fallback_warning_enabled(False)
            try:
                outputs, buffers, taps = _run_nested(
                    lambda values, token: self._all_branches(values, token, shape), self.axes, values, token
                )
            finally:
                _functorch._set_vmap_fallback_warning_enabled(True)
            if versions([tensor for tensor, _ in state]) != written:
                raise RuntimeError("the model writes into its state")
            if self.joint:
                outputs = [output.unflatten(0, self.sizes) for output in outputs]
                buffers = {slot: buffer.unflatten(0, self.sizes) for slot, buffer in buffers.items()}
        if len(self.plan.axes) < len(self.sizes):
            outputs = [output[None] for output in outputs]
            buffers = {slot: buffer[None] for slot, buffer in buffers.items()}
        leaves, rebuild = shape.filled(outputs)
        return StackedResults(self.sizes, leaves, rebuild, buffers, taps, self.inputs, self.shared)

    def _all_branches(self, values: list[Tensor], token: Tensor | None, shape: _OutputShape) -> PassOutput:
        """Run the branches on tensors without their branch axes; store the structure of the output in `shape`."""
        request, plan, clone = self.request, self.plan, self.clone
        sources = request.clones.sources(self.leaves) if self.watches_draws else None
        modes: list[TorchFunctionMode] = [] if self.watch is None else [FirstPass(self.watch, clone, plan, sources)]
        if token is not None:
            modes.append(Rescue(token))
        autocast = AutocastUnderVmap(request.autocast) if request.autocast else nullcontext()
        nested = nullcontext() if len(self.axes) == 1 else DropoutByFormula() if self.rescue else _TwoVmaps()
        # entered outside the interventions, so that noise and taps still see the layers
        with autocast, nested, request.watching(clone, first=True):
            installed = dict(zip(self.tensors, values[: len(self.tensors)], strict=True))
            for slot in clone.factored_slots(plan):
                installed[slot] = clone.weight(slot, [installed.pop(f"{slot}@{i}") for i in range(3)])
            rest = iter(values[len(self.tensors) :])
            replaced: dict[int, Any] = {i: next(rest) for i in self.dealt}
            replaced.update(
                {i: Sealed(filled([next(rest) for _ in state])) for i, (state, filled) in self.states.items()}
            )
            args, kwargs = request.args, request.kwargs
            if replaced or holds_mutable(args, kwargs):
                args, kwargs = self.regroup([replaced.get(i, leaf) for i, leaf in enumerate(self.leaves)])
            if self.watch is not None:
                self.watch.outside.know(flatten((args, kwargs))[0])
            mode = _all_entered(modes) if modes else None
            place = _EveryPosition(plan) if plan.interventions else plan.fixed  # only interventions read it
            seeds = SeedWatch() if self.watches_draws else nullcontext()
            with seeds:
                result = run_branch(clone, plan, installed, place, args, kwargs, mode, sealed=bool(self.states))
            if isinstance(seeds, SeedWatch):
                seeds.refuse()
        _refuse_kept_attributes(clone, request.impure)
        self.inputs = result.inputs
        if self.inputs is not None and self.inputs.changed() and any(map(_holds_batched, self.inputs.values())):
            raise RuntimeError("the model fills a list or dict among its inputs with tensors of its branch")
        if self.watch is not None:
            clone.install(clone.values(plan, plan.fixed))  # so that installed tensors do not count as kept by the model
        self.shared = {slot: buffer for slot, buffer in result.buffers.items() if not is_batched(buffer)}
        buffers = {slot: buffer for slot, buffer in result.buffers.items() if slot not in self.shared}
        return shape.take(expose_sealed(result.output) if plan.state else result.output), buffers, result.taps


class _OutputShape:
    """Structure of the output of a pass, without its tensors, which are invalid after the pass."""

    def take(self, output: Any) -> list[Tensor]:
        """Store the structure of an output and return its tensors."""
        leaves, self._rebuild = flatten(output)
        for leaf in leaves:
            if isinstance(leaf, Iterator):
                raise RuntimeError(f"the output has a {type(leaf).__name__}, which would be read only after the pass")
            if not isinstance(leaf, Tensor) and _holds_batched(leaf):
                raise RuntimeError(f"the output has a {type(leaf).__name__} with tensors of its branch inside")
        self._others = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def filled(self, tensors: list[Tensor]) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """Return the leaves with these tensors in place, and the function that rebuilds an output from leaves."""
        items = iter(tensors)
        leaves = [next(items) if other is None else other[0] for other in self._others]
        # a new rebuild function, since the stored one refers to the model's containers, which hold invalid tensors
        return leaves, flatten(self._rebuild(leaves))[1]


def _run_nested(
    run: Callable[..., PassOutput], axes: Sequence[Axis], values: list[BranchedTensor], token: Tensor | None
) -> PassOutput:
    """Run a pass under one vmap per axis.

    This does what `torch.vmap` does, without flattening inputs and outputs, which takes longer than a small network. It is no recursive
    closure, which would be a reference cycle and keep the inputs alive.

    Args:
        run: the pass, a function of values and token without their branch axes.
        axes: remaining axes, outermost first.
        values: tensors with the axes along which they differ in front, and the names of these axes.
        token: a tensor to be batched along every axis, or None.
    """
    if not axes:
        return run([value for value, _ in values], token)
    axis, *inner = axes
    # torch.export recognizes the Python functions only; these look for it in each call, which takes as long as an operation
    functions: Any = functorch_vmap if is_exporting() else _functorch
    (_load_decompositions if functions is _functorch else functorch_vmap.lazy_load_decompositions)()
    depth = _functorch.get_dynamic_layer_stack_depth()
    level = functions._vmap_increment_nesting(axis.size, axis.randomness)
    try:
        batched = [
            (
                functions._add_batch_dim(value, names.index(axis.name), level),
                tuple(name for name in names if name != axis.name) if len(names) > 1 else (),
            )
            if axis.name in names
            else (value, names)
            for value, names in values
        ]
        seed = None if token is None else functions._add_batch_dim(token.new_zeros(axis.size), 0, level)
        outputs, buffers, taps = _run_nested(run, inner, batched, seed)

        def unbatched(tensor: Tensor) -> Tensor:
            return functions._remove_batch_dim(tensor, level, axis.size, 0)

        results = (
            [unbatched(tensor) for tensor in outputs],
            {slot: unbatched(tensor) for slot, tensor in buffers.items()},
            {name: unbatched(tensor) for name, tensor in taps.items()},
        )
    except BaseException:  # also after an interrupt, the stack of transforms must be as deep as before
        leave_transforms(depth)
        raise
    functions._vmap_decrement_nesting()
    return results


def _join_axes(tensor: Tensor, names: tuple[str, ...], axes: Sequence[Axis]) -> Tensor:
    """Return a tensor [branches, ...] from one that has some of the axes in front, in order."""
    for i, axis in enumerate(axes):
        if axis.name not in names:
            tensor = tensor.unsqueeze(i).expand(*tensor.shape[:i], axis.size, *tensor.shape[i:])
    return tensor.flatten(0, len(axes) - 1)


class _EveryPosition(dict):
    """Index that stands for all branches at once; reading a position along an axis of the run raises RuntimeError."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.fixed)
        self._axes = {axis.name for axis in plan.axes}

    def __missing__(self, name: str) -> int:
        if name in self._axes:
            raise RuntimeError(
                f"an intervention reads the branch's position along {name!r}, which is unknown under vmap; use a Stacked rule for what "
                "differs, or set loop_only"
            )
        raise KeyError(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self or name in self._axes else default


class _TwoVmaps(DropoutByFormula):
    """Function mode under two vmaps, which refuses attention and computes linear layers of heads as one wide layer.

    Fused attention crashes the interpreter under two vmaps (torch 2.13, CPU).
    """

    def __torch_function__(
        self, function: Any, kinds: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is F.linear and (wide := _wide_linear(*args, **(kwargs or {}))) is not None:
            return wide
        if "attention" in (name := getattr(function, "__name__", "")):
            raise RuntimeError(f"{name} cannot run under two vmaps at once")
        return super().__torch_function__(function, kinds, args, kwargs)


def _wide_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """Compute a linear layer whose weight, but not its input, differs along the inner axis (heads on one trunk) as one wide layer.

    vmap itself would copy the input once per head. Returns None if the layer is not of this kind.
    """
    level = _functorch.maybe_get_level(weight) if is_batched(weight) else -1
    # inside a function transform of the model itself, the current level is another one
    if level < 0 or weight.dim() != 2 or level != _functorch.maybe_current_level():
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
def _all_entered(modes: list[TorchFunctionMode]) -> Iterator[None]:
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        yield


def _holds_batched(value: Any) -> bool:
    batched: dict[int, Any] = {}
    share(value, batched, set())
    return any(is_batched(item) for item in batched.values())


def _refuse_kept_attributes(clone: Clone, impure: frozenset[tuple[str, str]]) -> None:
    """Raise RuntimeError if forward stores batched tensors in attributes, since one clone runs all branches."""
    for path, name in impure:
        if _holds_batched(clone.tree[path].__dict__.get(name)):
            raise RuntimeError(f"forward keeps a tensor of its branch in {path + '.' if path else ''}{name}")
