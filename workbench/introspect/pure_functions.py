"""Pure methods, recognized by their bytecode: they only compute with tensors, so running them again with equal inputs does the same again."""

from __future__ import annotations

import builtins
import collections
import dataclasses
import dis
import functools
import math
import types
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .objects import ATOMS

# instructions that neither assign outside the function nor define another one; those of later versions of Python count as unsafe
_SAFE = """RESUME NOP CACHE PRECALL EXTENDED_ARG PUSH_NULL POP_TOP COPY SWAP NOT_TAKEN POP_ITER
    LOAD_FAST LOAD_FAST_CHECK LOAD_FAST_LOAD_FAST LOAD_FAST_BORROW LOAD_FAST_BORROW_LOAD_FAST_BORROW LOAD_CONST LOAD_SMALL_INT
    STORE_FAST STORE_FAST_STORE_FAST STORE_FAST_LOAD_FAST DELETE_FAST LOAD_ATTR LOAD_METHOD LOAD_GLOBAL
    CALL CALL_KW CALL_FUNCTION_EX KW_NAMES BUILD_TUPLE BUILD_LIST BUILD_SLICE BUILD_MAP BUILD_CONST_KEY_MAP LIST_EXTEND LIST_APPEND
    UNPACK_SEQUENCE BINARY_OP BINARY_SUBSCR BINARY_SLICE UNARY_NEGATIVE UNARY_NOT UNARY_INVERT COMPARE_OP IS_OP CONTAINS_OP TO_BOOL
    GET_ITER FOR_ITER END_FOR JUMP_FORWARD JUMP_BACKWARD RETURN_VALUE RETURN_CONST
    POP_JUMP_IF_TRUE POP_JUMP_IF_FALSE POP_JUMP_IF_NONE POP_JUMP_IF_NOT_NONE JUMP_IF_TRUE_OR_POP JUMP_IF_FALSE_OR_POP
    POP_JUMP_FORWARD_IF_TRUE POP_JUMP_FORWARD_IF_FALSE POP_JUMP_FORWARD_IF_NONE POP_JUMP_FORWARD_IF_NOT_NONE
    POP_JUMP_BACKWARD_IF_TRUE POP_JUMP_BACKWARD_IF_FALSE"""
_INSTRUCTIONS = frozenset(_SAFE.split())
_BUILTINS = frozenset(
    {"len", "range", "zip", "enumerate", "isinstance", "tuple", "list", "reversed", "int", "float", "max", "min"}
)
# attributes of tensors that leave torch, expose memory, call Python, or read or change how gradients are computed
_IMPURE = """item tolist numpy data_ptr storage untyped_storage register_hook register_post_accumulate_grad_hook backward retain_grad grad
    grad_fn apply_ map_ map2_ set_ resize_ resize_as_ share_memory_ requires_grad_ record_stream data is_leaf output_nr volatile"""
_IMPURE_ATTRIBUTES = frozenset(_IMPURE.split())
_TENSOR_ATTRIBUTES = frozenset(name for name in dir(Tensor) if not name.startswith("_")) - _IMPURE_ATTRIBUTES
_TORCH_MODULES = [
    torch._C._VariableFunctions,
    *(getattr(torch._C, name) for name in ("_nn", "_special", "_linalg", "_fft")),
    math,  # for numbers; applied to a tensor, it would read the value, which recording the call notices
]
_LIST_METHODS = frozenset({"append"})
_READERS = frozenset({"from_file", "from_numpy"})  # functions of torch that read files or foreign memory
Global = tuple[dict[str, Any], str, Any]  # (dict of globals, name, value)


class ImpureError(Exception):
    """A function may behave differently when it runs again; the message says why."""


def globals_of_pure(function: types.FunctionType, attributes: Collection[str]) -> Iterator[Global]:
    """Yield the globals that a function reads, as (their dict, name, current value), if it only computes with tensors.

    Args:
        function: a method of a module.
        attributes: names of attributes, other than those of tensors, that it may read.

    Raises:
        ImpureError: if it may do anything else.

    Example:
        >>> def forward(self, x):
        ...     return F.relu(self.fc(x)).mean(1)
        >>> [name for _, name, _ in globals_of_pure(forward, {"fc"})]
        ['F', 'relu']
    """
    code, where = function.__code__, function.__qualname__
    if code.co_freevars or code.co_cellvars or code.co_flags & (0x20 | 0x80 | 0x100 | 0x200):
        raise ImpureError(f"{where} is a closure or a generator")
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    if not all(isinstance(value, ATOMS) and not isinstance(value, types.ModuleType) for value in defaults):
        raise ImpureError(f"{where} has default values that can change")
    if getattr(code, "co_exceptiontable", b""):
        raise ImpureError(f"{where} handles errors or contexts")
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "PRECALL", "EXTENDED_ARG")]
    positions = iter(range(len(steps)))
    for i in positions:
        step = steps[i]
        if step.opname not in _INSTRUCTIONS:
            raise ImpureError(f"{where}: {step.opname}")
        if step.opname == "LOAD_CONST" and isinstance(step.argval, types.CodeType):
            raise ImpureError(f"{where} defines a function")
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            is_allowed = any(step.argval in names for names in (_TENSOR_ATTRIBUTES, _LIST_METHODS, attributes))
            if not is_allowed or step.argval in _IMPURE_ATTRIBUTES:
                raise ImpureError(f"{where} reads {step.argval}")
        if step.opname == "LOAD_GLOBAL":
            binding, value = _global(function, step.argval)
            if binding is not None:
                yield binding
            if is_record(value) and not (step.arg or 0) & 1:  # not called at once: its attributes may be read, or set
                raise ImpureError(f"{where} uses {step.argval}")
            while isinstance(value, types.ModuleType):
                i = next(positions, len(steps) - 1)
                if steps[i].opname not in ("LOAD_ATTR", "LOAD_METHOD") or not hasattr(value, steps[i].argval):
                    raise ImpureError(f"{where} uses {value.__name__}")
                if not value.__name__.startswith("torch") and value is not math:
                    raise ImpureError(f"{where} uses {value.__name__}")
                holder, value = vars(value), getattr(value, steps[i].argval)
                yield holder, steps[i].argval, value
            if not _is_pure(value, steps[i].argval):
                raise ImpureError(f"{where} uses {steps[i].argval}")


def _global(function: types.FunctionType, name: str) -> tuple[Global | None, Any]:
    if name in function.__globals__:
        value = function.__globals__[name]
        return (function.__globals__, name, value), value
    if name in _BUILTINS:
        return None, getattr(builtins, name)
    raise ImpureError(f"{function.__qualname__} uses {name}")


def _is_pure(value: Any, name: str) -> bool:
    """Whether a value, a global or an attribute of a module of torch, is a constant, a record, or a function of tensors that returns tensors."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.memory_format):
        return True
    if (name in _BUILTINS and value is getattr(builtins, name)) or is_record(value):
        return True
    # the function may have been imported under another name
    name = name if hasattr(F, name) else getattr(value, "__name__", name)
    if isinstance(value, types.FunctionType):
        return any(getattr(owner, name, None) is value for owner in (F, torch.functional)) and not name.startswith("_")
    is_builtin = isinstance(value, types.BuiltinFunctionType) and name not in _READERS
    return is_builtin and any(getattr(owner, name, None) == value for owner in _TORCH_MODULES)


def is_record(value: Any) -> bool:
    """Return whether a value is a named tuple or a dataclass without code of the user's, whose constructor only stores its arguments.

    Example:
        >>> import collections
        >>> is_record(collections.namedtuple("Output", "mean scale"))
        True
    """
    if type(value) is not type:
        return False
    contents = vars(value)
    maker: Any
    if value.__bases__ == (tuple,) and "_fields" in contents:
        names, maker = contents["_fields"], value.__new__
    elif value.__bases__ == (object,) and dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        names, maker = [field.name for field in fields], value.__init__
        if "__new__" in contents or not all(f.init and f.default_factory is dataclasses.MISSING for f in fields):
            return False
        # a default value that acts as a property
        if "__slots__" not in contents and any(hasattr(contents.get(name), "__get__") for name in names):
            return False
    else:
        return False
    called = (maker, *(contents[name] for name in _CALLED if name in contents))
    return contents.keys() <= {*_names_of_records(), *names} and all(map(_is_generated, called))


_CALLED = ("__eq__", "__lt__", "__le__", "__gt__", "__ge__", "__setattr__", "__delattr__")


@functools.cache
def _names_of_records() -> frozenset[str]:
    """Return the names that Python defines in named tuples and dataclasses; `copy` adds `__slotnames__`."""
    options: list[dict[str, Any]] = [{}, {"order": True, "frozen": True}, {"slots": True, "frozen": True}]
    records = [collections.namedtuple("Record", ""), *(dataclasses.make_dataclass("Record", [], **o) for o in options)]
    of_classes = """__annotations__ __annotate__ __annotate_func__ __annotations_cache__ __orig_bases__ __qualname__ __firstlineno__
        __static_attributes__ __slotnames__"""
    return frozenset(of_classes.split()).union(*map(vars, records))


def _is_generated(function: Any) -> bool:
    """Return whether `collections` or `dataclasses` has written a function."""
    if not isinstance(function, types.FunctionType) or function.__code__.co_filename != "<string>":
        return False
    return function.__code__.co_qualname.startswith(("<lambda>", "__create_fn__."))


__all__ = ["Global", "ImpureError", "globals_of_pure", "is_record"]
