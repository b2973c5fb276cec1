"""Call sites: calls of torch functions that mix data with parameters, intercepted by a TorchFunctionMode wherever they are made."""

from __future__ import annotations

import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from ..introspect.parameter_writes import IN_PLACE
from .tensor_facts import TensorFacts
from .tree import flatten, is_float

_functorch = torch._C._functorch

# by name, since one operation has several functions (F.linear, Tensor.matmul, @, torch.mm, ...)
CONTRACTIONS = frozenset(
    [
        *("linear", "bilinear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv"),
        *("addmm", "addmv", "addbmm", "baddbmm", "einsum", "tensordot", "inner", "dot", "vdot", "vecdot"),
        *("multi_dot", "chain_matmul", "linear_cross_entropy"),
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
        *("_native_multi_head_attention", "_transformer_encoder_layer_fwd"),
    ]
)
# code of functions without their decorators, kept since each site may ask for that of some hundred functions
_CODES: weakref.WeakKeyDictionary[types.FunctionType, types.CodeType | None] = weakref.WeakKeyDictionary()
_IN_PLACE = frozenset(f"{name}_" for name in CONTRACTIONS)
_SPELLINGS = CONTRACTIONS.union(  # torch.linalg.matmul, Tensor.addmm_, torch.ops.aten.mm.default
    _IN_PLACE, *((f"linalg_{name}", f"{name}.default") for name in CONTRACTIONS)
)
METADATA = frozenset(  # they do not read the values of a tensor
    [
        "__get__",
        "__set__",
        "__len__",
        "__repr__",
        "__format__",
        "__hash__",
        "size",
        "dim",
        "numel",
        "stride",
        "element_size",
        "data_ptr",
        "storage_offset",
        "untyped_storage",
        "is_floating_point",
        "is_complex",
        "is_contiguous",
        "requires_grad_",
        "get_device",
        "backward",
        "register_hook",
    ]
)
_ARRAYS = frozenset(["numpy", "__array__"])  # calls with which the values of a tensor leave torch
_NUMBERS = frozenset(["tolist", "item"])  # the same, as Python numbers
_FROM_NUMBERS = frozenset(["tensor", "as_tensor", "asarray", "new_tensor"])  # calls that make tensors of these
# operations that select from their first tensor by the others
CHOOSING = frozenset(["__getitem__", "index_select", "gather", "masked_select", "take_along_dim"])

_CONTROL_FLOW = frozenset(["cond", "while_loop", "scan", "associative_scan", "map_impl"])

_PLAIN = frozenset([int, float, bool, str, type(None)])


def tensors_among(values: Sequence[Any]) -> list[Tensor]:
    """Return the tensors among the arguments of a call; only arguments that are neither tensors nor scalars are flattened."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif type(value) not in _PLAIN:
            tensors.extend(leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor))
    return tensors


def _flat(args: tuple, kwargs: dict[str, Any]) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return `flatten((args, kwargs))`, faster for calls whose tuples (sizes, strides) hold no tensors."""
    values = [*args, *kwargs.values()]
    if all(isinstance(v, Tensor) or type(v) in _PLAIN or (type(v) is tuple and not tensors_among(v)) for v in values):
        n = len(args)
        return values, lambda leaves: (tuple(leaves[:n]), dict(zip(kwargs, leaves[n:], strict=True)))
    return flatten((args, kwargs))


def _code_of_functions() -> set[int]:
    """Return the ids of code whose frames are inside a `torch.autograd.Function`.

    It is that of `apply`, or of the forward of every such class where a newer version of torch has `apply` in C++.
    """
    if code := getattr(torch.autograd.Function.apply, "__code__", None):
        return {id(code)}
    classes = [torch.autograd.Function]
    for cls in classes:
        classes += cls.__subclasses__()
    return {id(_code_of(cls.forward)) for cls in classes if isinstance(cls.forward, types.FunctionType)}


def _code_of(function: types.FunctionType) -> types.CodeType | None:
    """Return the code of a function without its decorators."""
    if function not in _CODES:
        _CODES[function] = getattr(inspect.unwrap(function), "__code__", None)
    return _CODES[function]


def _written_by(name: str, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that a call writes into."""
    if name not in IN_PLACE and "out" not in kwargs:
        return []
    return tensors_among((kwargs.get("out"), *(args[:1] if name in IN_PLACE else ())))


def _is_list(name: str, out: Any) -> bool:
    """Return whether a call has made a tensor of several numbers from Python numbers."""
    return name in _FROM_NUMBERS and is_float(out) and out.dim() > 0


def _storage(tensor: Tensor) -> int | None:
    """Return an identifier of a tensor's storage; None if it has none."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # sparse, lazy and other tensors
        return None


class CheckpointedSite(RuntimeError):
    """Raised if activation checkpointing would run a call site again in the backward pass, without its intervention."""


@functools.cache
def transparent(function: types.FunctionType) -> types.FunctionType:
    """Return a copy of a torch function without its own `__torch_function__` dispatch, so that a mode sees the calls inside it."""
    blind = dict.fromkeys(
        ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), lambda *_: False
    )
    copied = types.FunctionType(
        function.__code__,
        {**function.__globals__, **blind},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


class Sites(TorchFunctionMode):
    """Function mode that calls `at_site` wherever a contraction (matrix product, convolution, ...) is applied to a parameter.

    Args:
        parameters: the parameters with their slot names. Tensors computed from parameters alone count as the parameter; where they meet data,
            so do those computed from parameters and constants, such as masked, pruned or normalized weights, and the matrices that data
            select from a stack of them, such as those of experts.
        state: tensors that are no data (buffers), unless data are written into them.
        inputs: input tensors of the model. They, and tensors computed without any parameter, are "raw" data. None: raw data are not
            distinguished, which is faster.
        at_site: function (slot names, flattened arguments, indices of the data among them that are not raw, indices of raw data) -> flattened
            arguments to use.
        contractions: whether only contractions count; False: every call that mixes data with parameters, for models without contractions.
        wanted: names of the only parameters that matter, if `at_site` does no more than look at the data that meet them: layers that run
            without this mode may `tell` of these instead. None: every operation must be intercepted.
    """

    in_function = False  # whether a site lay inside the forward of a `torch.autograd.Function`
    follows_constants = True  # whether tensors computed from parameters and constants may count as parameters

    def __init__(
        self,
        parameters: Sequence[tuple[Tensor, str]],
        state: Sequence[Tensor],
        inputs: list[Tensor] | None,
        at_site: Callable[..., list[Any]],
        contractions: bool = True,
        wanted: Collection[str] | None = None,
    ) -> None:
        super().__init__()
        self._names = TensorFacts((tensor, frozenset((name,))) for tensor, name in parameters)
        self._state = TensorFacts((tensor, True) for tensor in state)
        # names of the parameters behind tensors that were computed from parameters and constants
        self._computed = TensorFacts()
        # tensors that data selected from parameters: names of these, and whether matrices (weights of experts) or vectors (embeddings)
        self._selected = TensorFacts()
        # tensors computed without any parameter: whether from an input, or else from constants
        self._raw = TensorFacts((tensor, True) for tensor in inputs or ())
        self._traces = inputs is not None
        self._follows = self.follows_constants and inputs is not None and len(inputs) > 0
        self._parameters = parameters
        self.without_data: set[str] = set()  # names of the parameters in calls that see no data
        self._of_parameters: set[int | None] | None = None
        # storages that data were written into, with a tensor that keeps each alive
        self._written: dict[int, Tensor] = {}
        self._filled: dict[int, Tensor] = {}  # the same for inputs of the model
        # whether data have left torch, so that arrays and numbers may hold data, and whether inputs have left it as numbers
        self._holds_arrays = self._holds_numbers = self._holds_inputs = False
        self._at_site = at_site
        self._contractions = contractions
        self.wanted = wanted
        self._grad = torch.is_grad_enabled()

    def __torch_function__(self, function: Any, kinds: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in METADATA:
            out = function(*args, **kwargs)
            if isinstance(out, Tensor) and args:  # attributes such as `weight.T` return tensors
                self._mark_view(args[0], out)
            return out
        if name == "multi_head_attention_forward":
            with self:
                return transparent(F.multi_head_attention_forward)(*args, **kwargs)
        if name in _CONTROL_FLOW and isinstance(function, torch._ops.HigherOrderOperator):
            raise RuntimeError(
                f"layers inside torch's operator {name} cannot be seen: write it as a condition or loop of Python"
            )
        tensors = tensors_among((*args, *kwargs.values()))
        known = [names for names in map(self._names_of, tensors) if names is not None]
        if known and len(known) == len(tensors):
            out = function(*args, **kwargs)
            names = frozenset().union(*known)
            self.without_data |= names
            self._mark(out, self._names, names)
            return out
        computed = [names for names in map(self._computed_of, tensors) if names is not None]
        fixed = self._follows and bool(known or computed) and all(map(self._is_fixed, tensors))
        names = frozenset().union(*known, *(() if fixed else computed))
        if not names and not fixed and not (names := self._selecting(name, tensors)):
            return self._call_on_data(function, name, tensors, args, kwargs)
        if names and name == "custom_function_call":
            raise RuntimeError("under vmap the layer inside a torch.autograd.Function cannot be seen")
        if names and (not self._contractions or name in _SPELLINGS):
            args, kwargs, fixed = self._change_at_site(names, name, tensors, fixed, args, kwargs)
        out = function(*args, **kwargs)
        if fixed:
            self._mark((out, _written_by(name, args, kwargs)), self._computed, frozenset().union(*known, *computed))
        else:
            self._note_writes(name, args, kwargs)
            self._note_selected(name, tensors, out)
        return out

    def _call_on_data(self, function: Any, name: str, tensors: list[Tensor], args: tuple, kwargs: dict) -> Any:
        """Call a function whose arguments hold no parameter, and note what they and its result hold."""
        if not self._traces:
            return function(*args, **kwargs)
        raw = all(self._is_raw(leaf) or self._is_state(leaf) for leaf in tensors)
        from_array = any(type(value).__module__ == "numpy" for value in args)
        constant = raw and not from_array and all(map(self._is_fixed, tensors))
        out = function(*args, **kwargs)
        if not raw:
            self._holds_arrays |= name in _ARRAYS
            self._holds_numbers |= name in _NUMBERS and is_float(tensors[0])
            self._note_writes(name, args, kwargs)
            self._note_selected(name, tensors, out)
        elif not ((self._holds_arrays and from_array) or (self._holds_numbers and _is_list(name, out))):
            self._holds_inputs |= name in _NUMBERS and not constant and is_float(tensors[0])
            constant &= not (self._holds_inputs and _is_list(name, out))
            self._mark(out, self._raw, not constant)
            if not constant:
                self._note_inputs(_written_by(name, args, kwargs))
        return out

    def _change_at_site(
        self, names: frozenset[str], name: str, tensors: list[Tensor], fixed: bool, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any], bool]:
        """Return the arguments of a call at a site as `at_site` has changed them, and whether they still depend on no data."""
        self._look_for_functions()
        leaves, rebuild = _flat(args, kwargs)
        written = tensors_among((kwargs.get("out"), *(args[:1] if name in _IN_PLACE else ())))
        data = [
            i
            for i, leaf in enumerate(leaves)
            if is_float(leaf)
            and self._names_of(leaf) is None
            and (fixed or self._computed_of(leaf) is None)
            and not self._is_state(leaf)
            and not any(leaf is tensor for tensor in written)
        ]
        if self._selecting(name, tensors):
            data = [i for i in data if self._selected.get(leaves[i]) is None]
        live = [i for i in data if not self._is_raw(leaves[i])]
        of_inputs = [i for i in data if not fixed and self._is_raw(leaves[i])]
        args, kwargs = rebuild(self._at_site(names, leaves, live, of_inputs))
        return args, kwargs, fixed and not live

    def notify(self, parameters: Iterable[Tensor], data: Tensor) -> None:
        """Call `at_site` for a contraction of data and parameters that this mode does not intercept."""
        if names := self.names_among(parameters):
            self._at_site(names, [data], [0], [])

    def names_among(self, tensors: Iterable[Tensor]) -> frozenset[str]:
        """Return the names of the parameters among these tensors."""
        return frozenset().union(*filter(None, map(self._names_of, tensors)))

    def _names_of(self, tensor: Tensor) -> frozenset[str] | None:
        names = self._names.get(tensor)
        return None if names is not None and self._is_written(tensor) else names

    def _computed_of(self, tensor: Tensor) -> frozenset[str] | None:
        names = self._computed.get(tensor)
        return None if names is not None and self._is_written(tensor) else names

    def _is_state(self, tensor: Tensor) -> bool:
        return bool(self._state.get(tensor)) and not self._is_written(tensor)

    def _is_raw(self, tensor: Tensor) -> bool:
        return self._raw.get(tensor) is not None and self._computed.get(tensor) is None and not self._is_written(tensor)

    def _is_fixed(self, tensor: Tensor) -> bool:
        """Return whether a tensor depends on parameters, buffers and constants alone."""
        if self._is_state(tensor) or self._names_of(tensor) is not None or self._computed_of(tensor) is not None:
            return True
        if self._raw.get(tensor) is not False or self._is_written(tensor):
            return False
        return not self._filled or _storage(tensor) not in self._filled

    def _is_written(self, tensor: Tensor) -> bool:
        return bool(self._written) and _storage(tensor) in self._written

    def _note_writes(self, name: str, args: tuple, kwargs: dict[str, Any]) -> None:
        """Note that a call on data has written into tensors that held none, such as `torch.zeros(n)`, or into views of these."""
        for tensor in _written_by(name, args, kwargs):
            for facts in (self._raw, self._names, self._computed, self._state):
                if facts.get(tensor) is None or self._is_written(tensor):
                    continue
                if torch.compiler.is_dynamo_compiling():  # which does not know storages
                    facts.forget(tensor)
                elif (storage := _storage(tensor)) is not None and storage not in self._storages_of_parameters():
                    self._written[storage] = tensor

    def _note_inputs(self, written: list[Tensor]) -> None:
        """Note that inputs of the model were written into constants, or into views of these."""
        for tensor in written:
            if torch.compiler.is_dynamo_compiling():
                self._raw.forget(tensor)
                self._mark(tensor, self._raw, True)
            elif (storage := _storage(tensor)) is not None:
                self._filled[storage] = tensor

    def _storages_of_parameters(self) -> set[int | None]:
        if self._of_parameters is None:
            self._of_parameters = {_storage(tensor) for tensor, _ in self._parameters}
        return self._of_parameters

    def _selecting(self, name: str, tensors: list[Tensor]) -> frozenset[str]:
        """Return the names of the parameters of which data have selected matrices that meet other data in this call."""
        if not self._selected or name not in _SPELLINGS:
            return frozenset()
        selected = [self._selected.get(tensor) for tensor in tensors]
        meets_data = any(
            entry is None and is_float(tensor) and not self._is_fixed(tensor)
            for entry, tensor in zip(selected, tensors, strict=True)
        )
        return frozenset().union(*(entry[0] for entry in selected if entry and entry[1])) if meets_data else frozenset()

    def _note_selected(self, name: str, tensors: list[Tensor], out: Any) -> None:
        """Note that data have selected from parameters, or that a call has changed the form of such a selection."""
        if not self._follows or not (self._selected or name in CHOOSING):
            return
        selected = [entry for entry in map(self._selected.get, tensors) if entry]
        if selected and all(self._selected.get(tensor) or self._is_fixed(tensor) for tensor in tensors):
            names = frozenset().union(*(entry[0] for entry in selected))
            self._mark(out, self._selected, (names, any(entry[1] for entry in selected)))
        elif name in CHOOSING and (names := self._names_of(tensors[0]) or self._computed_of(tensors[0]) or frozenset()):
            dims = [tensors[0].dim(), *(tensor.dim() for tensor, name in self._parameters if name in names)]
            self._mark(out, self._selected, (names, max(dims) >= 3))

    def _mark(self, out: Any, facts: TensorFacts, fact: Any) -> None:
        for leaf in tensors_among((out,)):
            if not self._state.get(leaf):
                facts.set(leaf, fact)

    def _mark_view(self, tensor: Any, view: Tensor) -> None:
        if (names := self._names_of(tensor)) is not None:
            self._mark(view, self._names, names)
        elif (names := self._computed_of(tensor)) is not None:
            self._mark(view, self._computed, names)
        elif (entry := self._selected.get(tensor)) is not None:
            self._mark(view, self._selected, entry)
        elif self._traces and (self._is_raw(tensor) or self._is_state(tensor)):
            self._mark(view, self._raw, not self._is_fixed(tensor))

    def _look_for_functions(self) -> None:
        """Note whether a site lies inside a `torch.autograd.Function`, whose backward pass does not know what `at_site` changes.

        Raises:
            CheckpointedSite: under reentrant checkpointing, which runs the site again in the backward pass, without this mode.
        """
        if not self._grad or torch.is_grad_enabled():
            return
        inside = _code_of_functions()
        frame = sys._getframe()
        while frame := frame.f_back:  # type: ignore[assignment]
            self.in_function = self.in_function or id(frame.f_code) in inside
            if frame.f_code is CheckpointFunction.forward.__code__:
                raise CheckpointedSite(
                    "the model recomputes activations in the backward pass (torch.utils.checkpoint), where the wrapper's changes to them "
                    'would be missing: switch checkpointing off, or, for sample, use sample.Wrapper(where="weights")'
                )
