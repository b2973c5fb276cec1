"""Instruments for one call of a model: which torch functions read values, and which line changes what."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from ..engine.tree import flatten, is_float
from ..introspect.locations import NOWHERE, Location, is_call_of_model, locate_frame
from ..introspect.source_lines import is_torch_layer, is_user_code

DATA, PARAMETER, OTHER = 1, 2, 4  # what a value is computed from: floating inputs, parameters, other inputs

READS = {
    **dict.fromkeys(("__bool__", "is_nonzero", "equal", "allclose", "__contains__"), "control_flow"),
    **dict.fromkeys(("item", "__int__", "__float__", "__index__", "tolist", "numpy", "__array__"), "item"),
    **dict.fromkeys(
        ("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "_unique2", "bincount"),
        "dynamic_shape",
    ),
}
WORDS = {  # of names that are no words
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
_PASSING = frozenset(  # what comes out is what went in, in another shape
    [
        *("squeeze", "unsqueeze", "view", "reshape", "flatten", "unflatten", "permute", "transpose", "__getitem__"),
        *("contiguous", "clone", "float", "double", "to", "detach", "__get__", "expand", "select", "narrow"),
    ]
)


class Read(NamedTuple):
    """A call that takes values out of tensors."""

    kind: str
    name: str
    place: Location
    sources: int


class Maker(NamedTuple):
    """The call that made a tensor, and the tensor that it made it of."""

    name: str
    place: Location
    source: int


class Calls(TorchFunctionMode):
    """Sees the calls of torch functions in one pass.

    Args:
        paths: id of a module -> its path.
        inputs: the leaves of the inputs.
        parameters: those of the model.
        calm: whether dropout is left out.
        record: whether values computed from inputs are kept, in order.
    """

    def __init__(
        self,
        paths: Mapping[int, str],
        inputs: list[Any],
        parameters: list[Tensor],
        calm: bool = False,
        record: bool = False,
    ) -> None:
        super().__init__()
        self.reads: list[Read] = []
        self.grads: list[tuple[str, Location]] = []
        self.makers: dict[int, Maker] = {}
        self.values: list[tuple[str, Location, Tensor]] = []
        self.lost: tuple[str, Location] = ("", NOWHERE)  # the last call that gave no gradient on
        self._paths, self._calm, self._record = paths, calm, record
        self._sources: dict[int, int] = {}
        self._held: list[Tensor] = []  # ids stay unique for as long as their tensors live
        for leaf in inputs:
            self._mark(leaf, DATA if is_float(leaf) else OTHER)
        for parameter in parameters:
            self._mark(parameter, PARAMETER)

    def __torch_function__(
        self, function: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in _FACTS:
            return function(*args, **kwargs)
        if self._calm and "dropout" in name and args and isinstance(args[0], Tensor):
            return args[0]
        leaves = flatten((args, kwargs))[0]
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        sources = self._of(given)
        kind = _reads(name, args, kwargs) if sources else None
        if kind is not None and not is_torch_layer(sys._getframe(1).f_code.co_filename):
            read = [leaf for leaf in given if leaf.dtype == torch.bool] if name.endswith("item__") else given
            self.reads.append(Read(kind, name, self._place(), self._of(read)))
        if name == "requires_grad_" or (name == "__set__" and function.__self__.__name__ == "requires_grad"):
            self.grads.append(("requires_grad", self._place()))
        out = function(*args, **kwargs)
        if name.endswith("_like") or name.startswith("new_") or not sources:
            return out
        place = self._place() if name != "__get__" else NOWHERE
        if (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__":
            self._mark(args[0], sources)
        made = [leaf for leaf in flatten((out, kwargs.get("out")))[0] if isinstance(leaf, Tensor)]
        if any(leaf.requires_grad for leaf in given) and not any(leaf.requires_grad for leaf in made):
            self.lost = (name, place)
        for leaf in made:
            if name != "__get__" or id(leaf) not in self.makers:
                self.makers[id(leaf)] = Maker(name, place, id(given[0]))
            self._mark(leaf, sources)
            if self._record and sources & (DATA | OTHER) and is_float(leaf):
                self.values.append((name, place, leaf.detach().clone()))
        return out

    def maker(self, tensor: Tensor) -> Maker | None:
        """The call that computed a tensor, past what only gave it another shape."""
        found = self.makers.get(id(tensor))
        while found is not None and found.name in _PASSING and found.source in self.makers:
            found = self.makers[found.source]
        return found

    def _place(self) -> Location:
        return locate_frame(sys._getframe(2), self._paths)

    def _of(self, tensors: list[Tensor]) -> int:
        sources = 0
        for tensor in tensors:
            sources |= self._sources.get(id(tensor), 0)
        return sources

    def _mark(self, leaf: Any, sources: int) -> None:
        if isinstance(leaf, Tensor):
            self._sources[id(leaf)] = self._sources.get(id(leaf), 0) | sources
            self._held.append(leaf)


def _reads(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
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
def _codes() -> dict[types.CodeType, tuple[str, str]]:
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


class Lines:
    """Sees the lines of the user's code in one pass, and after which of them a value is another.

    Args:
        paths: id of a module -> its path.
        probes: by key a function that gives a value, to be compared after every line.
    """

    def __init__(self, paths: Mapping[int, str], probes: Mapping[Any, Callable[[], Any]] | None = None) -> None:
        self.events: list[tuple[str, str, Location]] = []  # (kind, name of the function, who called it)
        self.changes: dict[Any, list[Location]] = {}
        self._paths, self._probes = paths, dict(probes or {})
        self._codes = _codes()
        self._values: dict[Any, Any] = {}
        self._at: tuple[types.FrameType | None, int] = (None, 0)

    def __enter__(self) -> Lines:
        self._values = {key: probe() for key, probe in self._probes.items()}
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)
        self._look()

    def _call(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        if frame.f_code in self._codes:
            self.events.append((*self._codes[frame.f_code], locate_frame(frame.f_back, self._paths)))
        if not self._probes or not is_user_code(frame.f_code.co_filename):
            return None
        self._look()
        self._at = (frame, frame.f_lineno)
        return self._step

    def _step(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        if event in ("line", "return"):
            self._look()
            self._at = (frame, frame.f_lineno)
        if event == "return":
            caller = frame.f_back
            while caller is not None and not is_user_code(caller.f_code.co_filename):
                caller = None if is_call_of_model(caller) else caller.f_back
            self._at = (caller, caller.f_lineno if caller is not None else 0)
        return self._step

    def _look(self) -> None:
        for key, probe in self._probes.items():
            value = probe()
            if value != self._values[key]:
                self._values[key] = value
                place = locate_frame(self._at[0], self._paths, self._at[1])
                found = self.changes.setdefault(key, [])
                if place not in found:
                    found.append(place)
