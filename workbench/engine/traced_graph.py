"""Graphs of tensor operations: recorded from one run of a Python function, simplified with bitwise equal results, and run without Python."""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .effects.private_random import CPU, call_in_mode, random_states
from .torchscript import RefusedError, script

_aten: Any = torch.ops.aten
_OpOverload = torch._ops.OpOverload
# return an equal tensor if sizes and strides of the result are those of the input
_RESHAPES = (
    _aten.view.default,
    _aten.expand.default,
    _aten.detach.default,
    _aten.alias.default,
    _aten._unsafe_view.default,
    _aten.permute.default,
    _aten.transpose.int,
)
# always return a view of their first argument
_VIEWS = frozenset(
    (
        _aten.transpose.int,
        _aten.t.default,
        _aten.permute.default,
        _aten.view.default,
        _aten.expand.default,
        _aten.unsqueeze.default,
        _aten.select.int,
        _aten.slice.Tensor,
        _aten.detach.default,
        _aten.diagonal.default,
    )
)
# return views that their schemas do not declare
_UNDECLARED_VIEWS = (_aten._unsafe_view.default, _aten._reshape_alias.default)
# write into arguments that their schemas do not declare as written
_UNDECLARED_WRITES = dict.fromkeys(
    (_aten.native_batch_norm.default, _aten.cudnn_batch_norm.default, _aten.miopen_batch_norm.default),
    ("running_mean", "running_var"),
)
# depend on dtypes only, not on values
_DTYPE_OPS = {_aten.promote_types.default, _aten.result_type.Tensor, _aten.result_type.Scalar, _aten.can_cast.default}

MAX_CONSTANT = 2**16  # elements of a constant that a graph holds instead of computing it in each run


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
        writes = [node for node in nodes if _written(node)]
        self.writes = bool(writes)  # whether it writes in place, into buffers or its own intermediates
        self.draws = any(_draws(node) for node in nodes)
        _drop_unused(graph)
        self._places: list[int] = []
        self._views: list[Tensor] = []  # views of the tensors, valid as long as their addresses are `_places`
        self._make_views: Callable[..., Any] | None = None
        if not writes:
            _simplify(graph, values)
            self._tensors += _lift_constants(graph)
            self._make_views = _lift_views(graph)
        _clone_shared_outputs(graph)
        run: Callable[..., Any] | None = None
        # TorchScript merges equal calls of operations whose schemas declare no writes
        if not any(map(_undeclared_writes, nodes)):
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
        if _written(node):
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
        for target in _written(node):
            root = _root(target)
            if root.op == "placeholder" and root not in writable:
                raise RefusedError(f"{node.target} writes into the batch or into a parameter")


def _undeclared_writes(node: fx.Node) -> tuple[str, ...]:
    """Return the arguments that an operation writes without declaring it in its schema; batch norm in evaluation mode writes none."""
    if node.target not in _UNDECLARED_WRITES or node.args[5:6] == (False,):
        return ()
    return _UNDECLARED_WRITES[node.target]


def _written(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that an operation writes into."""
    if not isinstance(node.target, _OpOverload):
        return []
    undeclared = _undeclared_writes(node)
    if not node.target._schema.is_mutable and not undeclared:
        return []
    written = []
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.name in undeclared or (argument.alias_info is not None and argument.alias_info.is_write):
            value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            written += [
                item for item in (value if isinstance(value, list | tuple) else [value]) if isinstance(item, fx.Node)
            ]
    return written


def _root(node: fx.Node) -> fx.Node:
    """Return the node whose memory a view shares, as far as schemas declare it."""
    while node.op == "call_function" and node.args:
        target: Any = node.target
        is_view = target is operator.getitem or target in _UNDECLARED_VIEWS
        if not is_view:
            is_view = any(value.alias_info is not None for value in target._schema.returns)
        i = node.args[0]
        if not is_view or not isinstance(i, fx.Node):
            break
        node = i
    return node


def _draws(node: fx.Node) -> bool:
    return isinstance(node.target, _OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


# ---- simplification with bitwise equal results
def _drop_unused(graph: fx.Graph) -> None:
    """Remove unused nodes, except writes and random draws, which advance the generator."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not _written(node) and not _draws(node):
            graph.erase_node(node)


def _simplify(graph: fx.Graph, values: Mapping[fx.Node, Any]) -> None:
    """Remove views and copies that change nothing, and repeated computations, from a graph without writes."""
    for node in list(graph.nodes):
        if (node.target in _RESHAPES or _is_times_one(node) or _is_copy(node)) and values[node] == values[node.args[0]]:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    known: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or _draws(node) or "empty" in str(node.target):
            continue
        key = (node.target, _hashable(node.args), _hashable(node.kwargs))
        first = known.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
    _drop_unused(graph)


def _is_times_one(node: fx.Node) -> bool:
    """Return whether a node multiplies by one."""
    return node.target in (_aten.mul.Tensor, _aten.mul.Scalar) and type(node.args[1]) is int and node.args[1] == 1


def _is_copy(node: fx.Node) -> bool:
    """Return whether a node copies a tensor that is no output."""
    return node.target is _aten.clone.default and all(user.op != "output" for user in node.users)


def _lift_constants(graph: fx.Graph) -> list[Tensor]:
    """Turn what depends on no input into inputs: TorchScript cannot write some constants, such as NaN, and a copy to a device would wait for it.

    Scalars always; other tensors if they are small, since they take memory as long as the graph exists.
    """
    constants = []
    batch = next(node for node in graph.nodes if node.op == "placeholder" and node.name.startswith("batch_"))
    known: dict[fx.Node, Tensor] = {}
    for node in list(graph.nodes):
        if (
            not isinstance(node.target, _OpOverload)
            or not known.keys() >= {*node.all_input_nodes}
            or not _is_repeatable(node)
        ):
            continue
        value = node.target(*fx.map_arg(node.args, known.__getitem__), **fx.map_arg(node.kwargs, known.__getitem__))
        if isinstance(value, Tensor) and value.numel() <= MAX_CONSTANT:
            known[node] = value
    for node in [*known]:
        if all(user in known for user in node.users):
            continue
        constants.append(known[node])
        with graph.inserting_before(batch):
            node.replace_all_uses_with(
                graph.placeholder(f"constant_{len(constants)}"), delete_user_cb=lambda user: user not in known
            )
    _drop_unused(graph)
    return constants


def _is_repeatable(node: fx.Node) -> bool:
    """Return whether an operation gives the same numbers each time, in memory of its own or that of its input."""
    return not _draws(node) and not _written(node) and "empty" not in str(node.target)


def _lift_views(graph: fx.Graph) -> Callable[..., list[Tensor]] | None:
    """Turn views of held tensors into inputs after these; return the function that computes the views, None if there are none."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    constants = [node for node in inputs if not node.name.startswith("batch_")]
    # operation, index of its source among held tensors and views, other arguments
    steps: list[tuple[Any, int, tuple[Any, ...], dict[str, Any]]] = []
    known = {node: i for i, node in enumerate(constants)}
    lifted = []
    for node in graph.nodes:
        if node.target in _VIEWS and node.args[0] in known and not any(isinstance(a, fx.Node) for a in node.args[1:]):
            steps.append((node.target, known[node.args[0]], node.args[1:], dict(node.kwargs)))
            known[node] = len(known)
            lifted.append(node)
    for i, node in enumerate(lifted):
        with graph.inserting_before(inputs[len(constants)]):
            node.replace_all_uses_with(graph.placeholder(f"shown_{i}"))
    for node in reversed(lifted):
        graph.erase_node(node)

    def make(*tensors: Tensor) -> list[Tensor]:
        sources = [tensor.detach() for tensor in tensors]
        for operation, i, others, options in steps:
            sources.append(operation(sources[i], *others, **options))
        return sources[len(tensors) :]

    return make if steps else None


def _clone_shared_outputs(graph: fx.Graph) -> None:
    """Clone outputs that share memory with an input or another output."""
    end = next(node for node in graph.nodes if node.op == "output")
    roots: set[fx.Node] = set()
    outputs = []
    for node in end.args[0]:
        root = _root(node)
        if root in roots or root.op == "placeholder":
            with graph.inserting_before(end):
                node = graph.call_function(_aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
        roots.add(root)
        outputs.append(node)
    end.args = (outputs,)


def _hashable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple((key, _hashable(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_hashable, value))
    return type(value), repr(value) if isinstance(value, float) else value  # tells -0.0 from 0.0, and 1 from True


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
