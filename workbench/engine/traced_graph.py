"""Graphs of tensor operations: recorded from one run of a Python function, simplified with bitwise equal results, and run without Python."""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .effects.private_random import CPU, call_in_mode, random_states
from .graph_passes import (
    clone_shared_outputs,
    drop_unused,
    is_random,
    lift_constants,
    lift_views,
    root_of,
    simplify,
    undeclared_writes,
    written_nodes,
)
from .torchscript import RefusedError, script

_aten: Any = torch.ops.aten
_OpOverload = torch._ops.OpOverload
# depend on dtypes only, not on values
_DTYPE_OPS = {_aten.promote_types.default, _aten.result_type.Tensor, _aten.result_type.Scalar, _aten.can_cast.default}


class Graph:
    """Recorded graph of a function of tensors, whose results are bitwise equal to the function's.

    Args:
        function: function(*batch) -> list of tensors. It is called once and must compute with torch only.
        parameters, buffers: tensors that it uses in addition to the batch, read anew in each run; it may write into buffers.
        batch: example inputs. Other batches must have the same devices, shapes, strides and dtypes.

    Raises:
        RefusedError: if the function uses other tensors, draws from its own generator, or depends on values of tensors in Python.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> graph = Graph(lambda x: [x * weight], [weight], [], (torch.ones(2),))
        >>> _ = weight.data.fill_(3)
        >>> graph.run(torch.full((2,), 5.0))
        [tensor([15., 15.])]
    """

    def __init__(
        self,
        function: Callable[..., list[Tensor]],
        parameters: Sequence[Tensor],
        buffers: Sequence[Tensor],
        batch: Sequence[Tensor],
    ) -> None:
        recorder = _Recorder([*parameters, *buffers], batch)
        self.devices = recorder.devices  # the CPU first, then others of its tensors
        with recorder:
            results = function(*batch)
        graph, self._tensors, values = recorder.finish(results)
        nodes = list(graph.nodes)
        _refuse(nodes, {id(buffer) for buffer in buffers}, self._tensors)
        writes = [node for node in nodes if written_nodes(node)]
        self.writes = bool(writes)  # whether it writes in place, into buffers or its own intermediates
        self.draws = any(is_random(node) for node in nodes)
        drop_unused(graph)
        self._places: list[int] = []
        self._views: list[Tensor] = []  # views of the tensors, valid as long as their addresses are `_places`
        self._make_views: Callable[..., Any] | None = None
        if not writes:
            simplify(graph, values)
            self._tensors += lift_constants(graph)
            self._make_views = lift_views(graph)
        clone_shared_outputs(graph)
        run: Callable[..., Any] | None = None
        # TorchScript merges equal calls of operations whose schemas declare no writes
        if not any(map(undeclared_writes, nodes)):
            # uses private functions of torch, which other versions may lack
            with contextlib.suppress(RefusedError, RuntimeError, AttributeError, TypeError):
                run = script(graph, values)
        self.scripted = run is not None
        self._run = run or fx.GraphModule({}, graph)

    def run(self, *batch: Tensor) -> list[Tensor]:
        """Compute the function for another batch."""
        gradients, optimized = torch.is_grad_enabled(), torch._C._get_graph_executor_optimize()
        try:  # what `torch.no_grad` and `torch.jit.optimized_execution` do, without their overhead
            torch._C._set_grad_enabled(False)
            torch._C._set_graph_executor_optimize(False)  # optimization could round differently
            views = self._views
            if self._make_views is not None and self._places != (places := list(map(Tensor.data_ptr, self._tensors))):
                views = self._views = self._make_views(*self._tensors)
                self._places = places
            results = self._run(*self._tensors, *views, *batch)
        finally:
            torch._C._set_grad_enabled(gradients)
            torch._C._set_graph_executor_optimize(optimized)
        return results if self.scripted else list(results)


# ---- recording
class _Recorder(TorchDispatchMode):
    """Dispatch mode that records every operation, below autograd and vmap.

    If something cannot be recorded, the reason is kept until `finish`: an error during the recording could be handled by the recorded code.

    Args:
        known: tensors that may be used in addition to the batch.
        batch: the inputs.
    """

    def __init__(self, known: Sequence[Tensor], batch: Sequence[Tensor]) -> None:
        super().__init__()
        self.devices = tuple(dict.fromkeys((CPU, *(tensor.device for tensor in (*known, *batch)))))
        self._graph = fx.Graph()
        self._known = {id(tensor): tensor for tensor in known}
        self._held: list[Tensor] = []  # the known tensors that are used
        self._nodes: dict[int, fx.Node] = {}
        # weak references, whose callbacks remove the nodes of dead tensors, since ids are reused
        self._alive: dict[int, Any] = {}
        self._values: dict[fx.Node, Any] = {}
        # nodes that depend on no input, so that their values are constant, with the storage of their results
        self._constants: dict[fx.Node, int] = {}
        self._refusal = ""
        for i, tensor in enumerate(batch):
            self._note(self._graph.placeholder(f"batch_{i}"), tensor)
        self._first = next(iter(self._graph.nodes))
        self._random = random_states(self.devices)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True makes torch import its compiler, which takes two seconds

    def _note(self, node: fx.Node, tensor: Tensor) -> None:
        place = id(tensor)
        if place not in self._nodes:  # a tensor that was written in place keeps its node
            self._nodes[place] = node
            self._alive[place] = weakref.ref(tensor, lambda _: self._nodes.pop(place, None))
        self._values[node] = tensor.shape, tensor.stride(), tensor.dtype
        if tensor.device not in self.devices:
            self._refusal = self._refusal or f"a tensor is on {tensor.device}, where no parameter, buffer or input is"

    def _node(self, tensor: Tensor) -> Any:
        if id(tensor) not in self._nodes:
            if id(tensor) not in self._known:
                self._refusal = (
                    self._refusal or "a tensor is used that is neither a parameter nor a buffer, nor in the batch"
                )
                return None
            with self._graph.inserting_before(self._first):
                self._note(self._graph.placeholder(f"held_{len(self._held)}"), tensor)
            self._held.append(tensor)
        return self._nodes[id(tensor)]

    def _with_nodes(self, value: Any) -> Any:
        """Return an argument with tensors replaced by their nodes."""
        if isinstance(value, list | tuple):
            return type(value)(map(self._with_nodes, value))
        if isinstance(value, torch.device) and value.index is None and value not in self.devices:
            module = torch.get_device_module(value)
            if module.device_count() > 1:
                self._refusal = self._refusal or f"the device {value} is whichever is the current one"
        if isinstance(value, torch.UntypedStorage):
            self._refusal = self._refusal or "a tensor is made from the memory of another one"
        return self._node(value) if isinstance(value, Tensor) else value

    def _check_draws(self) -> None:
        if any(not generator.get_state().equal(state) for generator, state in self._random):
            self._refusal = self._refusal or "random draws start anew within a step"

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        draws = isinstance(function, _OpOverload) and torch.Tag.nondeterministic_seeded in function.tags
        if draws:
            self._check_draws()
        result = call_in_mode(function, args, kwargs)
        if draws:
            self._random = random_states(self.devices)
        if not isinstance(function, _OpOverload):
            self._refusal = self._refusal or f"{function} is no operation of torch"
        if self._refusal or function in _DTYPE_OPS:
            return result
        options = {name: self._with_nodes(value) for name, value in kwargs.items()}
        node = self._graph.call_function(function, self._with_nodes(args), options)
        constant = not draws and "empty" not in function.name() and self._constants.keys() >= {*node.all_input_nodes}
        if written_nodes(node):
            written = {_memory(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
            self._constants = {node: memory for node, memory in self._constants.items() if memory not in written}
        elif constant and isinstance(result, Tensor):
            self._constants[node] = _memory(result)
        if isinstance(result, Tensor):
            self._note(node, result)
        elif isinstance(result, list | tuple):
            self._values[node] = len(result)
            for i, item in enumerate(result):
                if isinstance(item, Tensor):
                    self._note(self._graph.call_function(operator.getitem, (node, i)), item)
        elif result is not None and constant:
            self._graph.erase_node(node)
        elif result is not None:
            self._refusal = f"{function} gives numbers to Python"
        return result

    def finish(self, results: Sequence[Tensor]) -> tuple[fx.Graph, list[Tensor], dict[fx.Node, Any]]:
        """End the recording.

        Returns:
            The graph; the tensors that are its inputs before the batch; and, by node, (shape, strides, dtype) or the length of a list.

        Raises:
            RefusedError: if something could not be recorded.
        """
        self._check_draws()
        if not self._refusal:
            self._graph.output([self._node(tensor) for tensor in results])
        self._alive.clear()
        if self._refusal:
            raise RefusedError(self._refusal)
        return self._graph, self._held, self._values


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _refuse(nodes: Sequence[fx.Node], buffers: set[int], tensors: Sequence[Tensor]) -> None:
    inputs = [node for node in nodes if node.op == "placeholder"]
    writable = {node for node, tensor in zip(inputs, tensors, strict=False) if id(tensor) in buffers}
    changing = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    for node in nodes:
        if node.op in ("placeholder", "output") or node.target is operator.getitem:
            continue
        target: Any = node.target
        if changing & set(target.tags):
            raise RefusedError(f"{node.target} looks at numbers")
        if any(isinstance(value, torch.Generator) for value in (*node.args, *node.kwargs.values())):
            raise RefusedError(f"{node.target} draws from a generator of its own")
        for target in written_nodes(node):
            root = root_of(target)
            if root.op == "placeholder" and root not in writable:
                raise RefusedError(f"{node.target} writes into the batch or into a parameter")


def share_memory(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether a tensor in `some` shares memory with another one in `some`, or with one in `others`."""
    places = [place for tensor in some if (place := tensor.untyped_storage().data_ptr())]
    return len({*places}) < len(places) or not {*places}.isdisjoint(
        tensor.untyped_storage().data_ptr() for tensor in others
    )


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether two tensors have equal shapes and elements, where NaN counts as equal to NaN."""
    if a is None or b is None:
        return a is b
    if torch.equal(a, b):
        return True
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


__all__ = ["Graph", "RefusedError", "same", "share_memory"]
