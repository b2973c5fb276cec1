"""Tracers for one run of a model: which torch functions read values, and which lines change values."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from ..engine.tree import flatten, is_float
from ..introspect.locations import NOWHERE, Location, locate_frame, model_frames
from ..introspect.parameter_writes import IN_PLACE
from ..introspect.source_lines import is_torch_layer, is_user_code

# flags for what a value is computed from: floating-point inputs, parameters, other inputs
DATA, PARAMETER, OTHER = 1, 2, 4

READS = {
    **dict.fromkeys(("__bool__", "is_nonzero", "equal", "allclose", "__contains__"), "control_flow"),
    **dict.fromkeys(("item", "__int__", "__float__", "__index__", "tolist", "numpy", "__array__"), "item"),
    **dict.fromkeys(
        ("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "_unique2", "bincount"),
        "dynamic_shape",
    ),
}
HOW_READ = {  # descriptions of functions whose name does not explain itself
    "__bool__": "a tensor as a condition",
    "__contains__": "a tensor as a condition",
    "__getitem__": "a boolean mask as an index",
    "__setitem__": "a boolean mask as an index",
    "__int__": "by int()",
    "__float__": "by float()",
    "__index__": "a tensor as a whole number",
    "__array__": "by numpy",
    "numpy": "by .numpy()",
    "item": "by .item()",
    "tolist": "by .tolist()",
    "where": "by where() with one argument",
}
SQUASHING = ("softmax", "log_softmax", "sigmoid", "logsigmoid", "softmin", "gumbel_softmax", "expit", "sigmoid_")
_FACTS = frozenset(["size", "dim", "numel", "stride", "__len__", "is_floating_point", "is_complex", "element_size"])
_PASSING = frozenset(  # functions whose output holds the same values as the input, in another shape or type
    [
        *("squeeze", "unsqueeze", "view", "reshape", "flatten", "unflatten", "permute", "transpose", "__getitem__"),
        *("contiguous", "clone", "float", "double", "to", "detach", "__get__", "expand", "select", "narrow"),
    ]
)


class Read(NamedTuple):
    """A call that takes values out of tensors."""

    kind: str
    name: str
    location: Location
    sources: int


class Maker(NamedTuple):
    """The call that made a tensor, and the id of its first input."""

    name: str
    location: Location
    source: int


class CallTracer(TorchFunctionMode):
    """Trace the calls of torch functions in one run of a model.

    Args:
        paths: id of a module -> its path.
        inputs: leaves of the inputs.
        parameters: parameters of the model.
        without_dropout: whether to skip dropout.
        record: whether to keep the values computed from inputs, in order.
    """

    def __init__(
        self,
        paths: Mapping[int, str],
        inputs: list[Any],
        parameters: list[Tensor],
        without_dropout: bool,
        record: bool,
    ) -> None:
        super().__init__()
        self.reads: list[Read] = []
        self.grads: list[tuple[str, Location]] = []
        self.makers: dict[int, Maker] = {}
        self.values: list[tuple[str, Location, Tensor]] = []
        self.gradient_stop: tuple[str, Location] = ("", NOWHERE)  # the last call that passed no gradient on
        self._paths, self._without_dropout, self._record = paths, without_dropout, record
        self._sources: dict[int, int] = {}
        self._alive: list[Tensor] = []  # ids stay unique for as long as their tensors live
        for leaf in inputs:
            self._mark(leaf, DATA if is_float(leaf) else OTHER)
        for parameter in parameters:
            self._mark(parameter, PARAMETER)

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in _FACTS:
            return function(*args, **kwargs)
        if self._without_dropout and "dropout" in name and args and isinstance(args[0], Tensor):
            return args[0]
        inputs = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        sources = self._sources_of(inputs)
        caller = sys._getframe(1)
        if sources:
            self._note_read(caller, name, args, kwargs, inputs)
        if name == "requires_grad_" or (name == "__set__" and function.__self__.__name__ == "requires_grad"):
            self.grads.append(("requires_grad", locate_frame(caller, self._paths)))
        out = function(*args, **kwargs)
        if sources and not (name.endswith("_like") or name.startswith("new_")):
            location = locate_frame(caller, self._paths) if name != "__get__" else NOWHERE
            if name in IN_PLACE:
                self._mark(args[0], sources)
            outputs = [leaf for leaf in flatten((out, kwargs.get("out")))[0] if isinstance(leaf, Tensor)]
            self._note_outputs(name, location, inputs, outputs, sources)
        return out

    def _note_read(
        self, caller: FrameType, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor]
    ) -> None:
        """Record a call that takes values out of tensors, unless one of torch's own layers makes it."""
        kind = _kind_of_read(name, args, kwargs)
        if kind is not None and not is_torch_layer(caller.f_code.co_filename):
            read = [leaf for leaf in inputs if leaf.dtype == torch.bool] if name.endswith("item__") else inputs
            self.reads.append(Read(kind, name, locate_frame(caller, self._paths), self._sources_of(read)))

    def _note_outputs(
        self, name: str, location: Location, inputs: list[Tensor], outputs: list[Tensor], sources: int
    ) -> None:
        """Record which call made tensors, and what they are computed from."""
        if any(leaf.requires_grad for leaf in inputs) and not any(leaf.requires_grad for leaf in outputs):
            self.gradient_stop = (name, location)
        for leaf in outputs:
            if name != "__get__" or id(leaf) not in self.makers:
                self.makers[id(leaf)] = Maker(name, location, id(inputs[0]))
            self._mark(leaf, sources)
            if self._record and sources & (DATA | OTHER) and is_float(leaf):
                self.values.append((name, location, leaf.detach().clone()))

    def maker(self, tensor: Tensor) -> Maker | None:
        """Return the call that computed a tensor, looking through calls that only changed its shape or type."""
        maker = self.makers.get(id(tensor))
        while maker is not None and maker.name in _PASSING and maker.source in self.makers:
            maker = self.makers[maker.source]
        return maker

    def _sources_of(self, tensors: list[Tensor]) -> int:
        sources = 0
        for tensor in tensors:
            sources |= self._sources.get(id(tensor), 0)
        return sources

    def _mark(self, leaf: Any, sources: int) -> None:
        if isinstance(leaf, Tensor):
            self._sources[id(leaf)] = self._sources.get(id(leaf), 0) | sources
            self._alive.append(leaf)


def _kind_of_read(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """The kind of finding for a call that takes values out of tensors, None for other calls."""
    if name in READS:
        return READS[name]
    if name == "where" and len(args) + len(kwargs) == 1:
        return "dynamic_shape"
    if name == "repeat_interleave" and any(isinstance(a, Tensor) for a in (*args[1:], *kwargs.values())):
        return "dynamic_shape"
    if name in ("__getitem__", "__setitem__"):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        if any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) and i.dim() for i in index):
            return "dynamic_shape"
    return None


# ---- lines
def _codes_to_report() -> dict[CodeType, tuple[str, str]]:
    """Code objects of functions whose calls are reported -> (kind, name of the function)."""
    named = {
        "checkpoint": (checkpoint.checkpoint, checkpoint.checkpoint_sequential),
        "reentrant": (checkpoint.CheckpointFunction.forward,),
        "autograd": (
            *(torch.autograd.grad, torch.autograd.backward, torch.func.grad, torch.func.vjp, torch.func.jvp),
            *(torch.func.jacrev, torch.func.jacfwd, torch.func.hessian),
        ),
    }
    return {
        inspect.unwrap(function).__code__: (kind, function.__name__)
        for kind, functions in named.items()
        for function in functions
    }


class LineTracer:
    """Trace the lines of the user's code in one run of a model, and find those that change a value.

    Args:
        paths: id of a module -> its path.
        probes: key -> function that returns a value, which is compared after every line.
    """

    def __init__(self, paths: Mapping[int, str], probes: Mapping[Any, Callable[[], Any]] | None) -> None:
        self.events: list[tuple[str, str, Location]] = []  # (kind, name of the function, location of the call)
        self.changes: dict[Any, list[Location]] = {}
        self._paths, self._probes = paths, dict(probes or {})
        self._codes = _codes_to_report()
        self._values: dict[Any, Any] = {}
        # frame and line that ran last; the frame itself may have moved on
        self._position: tuple[FrameType | None, int] = (None, 0)

    def __enter__(self) -> LineTracer:
        self._values = {key: probe() for key, probe in self._probes.items()}
        self._previous_tracer = sys.gettrace()
        sys.settrace(self._trace_call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._previous_tracer)
        self._compare()

    def _trace_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code in self._codes:
            self.events.append((*self._codes[frame.f_code], locate_frame(frame.f_back, self._paths)))
        if not self._probes or not is_user_code(frame.f_code.co_filename):
            return None
        self._compare()
        self._position = (frame, frame.f_lineno)
        return self._trace_line

    def _trace_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event in ("line", "return"):
            self._compare()
            self._position = (frame, frame.f_lineno)
        if event == "return":
            callers = (each for each in model_frames(frame.f_back) if is_user_code(each.f_code.co_filename))
            caller = next(callers, None)
            self._position = (caller, caller.f_lineno if caller is not None else 0)
        return self._trace_line

    def _compare(self) -> None:
        """Record the line that ran last for each value that has changed."""
        for key, probe in self._probes.items():
            value = probe()
            if value != self._values[key]:
                self._values[key] = value
                location = locate_frame(self._position[0], self._paths, self._position[1])
                locations = self.changes.setdefault(key, [])
                if location not in locations:
                    locations.append(location)
