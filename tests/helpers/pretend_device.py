"""A simulated device: its tensors live in CPU memory but report another device, and cannot be mixed with CPU tensors, as on a GPU.

Importing this registers it with torch, for the whole process.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, library
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
aten = torch.ops.aten
CPU, THERE = 1, 12  # of DLPack: kDLCPU, kDLExtDev
KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
DOUBLE = {float: torch.float64, complex: torch.complex128}
# the operations at which a program waited for the device: values were read, or copied while the program stood still
WAITS: list[str] = []
# those that read values on a GPU, be it to know how large their answer is
LOOK = frozenset(
    (
        *("nonzero", "masked_select", "equal", "nanmedian", "bincount", "multinomial", "repeat_interleave"),
        *(
            "_unique2",
            "unique_dim",
            "unique_consecutive",
            "linalg_cholesky",
            "linalg_qr",
            "_linalg_eigh",
            "_linalg_svd",
        ),
    )
)

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


class Module:
    """What torch.cuda is for "cuda", as far as torch and workbench ask."""

    def __init__(self) -> None:
        self.default_generators = (torch.Generator().manual_seed(0),)

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        self.default_generators[0].manual_seed(seed)

    def get_rng_state(self, device: Any = 0) -> Tensor:
        return self.default_generators[0].get_state()

    def set_rng_state(self, state: Tensor, device: Any = 0) -> None:
        self.default_generators[0].set_state(state)


def _across(x: Tensor, side: int) -> Tensor:
    """The same memory on the other side."""
    capsule = torch._C._to_dlpack(x)
    ctypes.c_int32.from_address(_pointer(capsule, b"dltensor") + 8).value = side  # dl_tensor.device.device_type
    return torch._C._from_dlpack(capsule)


def here(x: Any) -> Any:
    """A tensor of the device as one of the CPU; anything else as it is."""
    return _across(x, CPU) if isinstance(x, Tensor) and x.device.type == NAME else x


def there(x: Any) -> Any:
    """A tensor of the CPU as one of the device; anything else as it is."""
    return _across(x, THERE) if isinstance(x, Tensor) and x.device.type == "cpu" else x


class _Kernel:
    """What stands for an operation's kernel on the device: the CPU's on the same memory."""

    def __init__(self, op: Any) -> None:
        schema = op._schema
        self.op, self.arguments = op, [(a.name, a.kwarg_only) for a in schema.arguments]
        self.numbers = [a.name for a in schema.arguments if str(a.type) == "Tensor"]
        writes = [a for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        written = {min(a.alias_info.before_set): a.name for a in writes if a.alias_info.before_set}  # lists have none
        aliases = [value.alias_info for value in schema.returns]
        views = any(alias and not alias.is_write for alias in aliases)
        self.returns = [written[min(alias.before_set)] if alias and not views else None for alias in aliases]
        self.outs = [a.name for a in schema.arguments if a.kwarg_only and a.alias_info]
        self.valueless = views or "Storage" in {str(a.type) for a in schema.arguments}
        self.generator = ("generator", True) in self.arguments
        self.waits = schema.name.removeprefix("aten::") in LOOK and schema.overload_name not in ("dim", "dim_values")
        self.draws = torch.Tag.nondeterministic_seeded in op.tags and not self.generator

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.valueless:
            return self.op.redispatch(KEYS, *args, **kwargs)
        named = dict(zip((name for name, _ in self.arguments), args, strict=False)) | kwargs
        checked = [value for name, value in named.items() if name != "indices"]  # a GPU takes those of the CPU, too
        if self.waits or any(
            isinstance(i, Tensor) and (i.dtype is torch.bool or i.is_cpu) for i in named.get("indices", ())
        ):
            WAITS.append(str(self.op))
        tensors = [value for value in _leaves(checked) if isinstance(value, Tensor)]
        if len({x.device.type for x in tensors if x.device.type == NAME or x.dim()}) > 1:
            raise RuntimeError(f"Expected all tensors to be on the same device, but {self.op} got {NAME}:0 and cpu")
        given = {name: _each(_unwrapped, value) for name, value in named.items()}
        for name in self.numbers:  # an operation that is called by name takes them as tensors
            if isinstance(number := given.get(name), bool | int | float | complex):
                given[name] = torch.tensor(number, dtype=DOUBLE.get(type(number)))
        for name in self.outs:  # they may take another size
            given[name] = torch.empty(0, dtype=named[name].dtype)
        if self.generator and given.get("generator") is None:
            given["generator"] = MODULE.default_generators[0]
        with _lent() if self.draws else nullcontext():
            found = self.op(
                *(given[name] for name, alone in self.arguments if not alone and name in given),
                **{name: given[name] for name, alone in self.arguments if alone and name in given},
            )
        for name in self.outs:
            if named[name].shape != given[name].shape:
                _resize(named[name], given[name].shape)
            here(named[name]).copy_(given[name])
        if not self.returns:
            return None
        out = [
            named[same] if same else _each(there, value)
            for same, value in zip(self.returns, found if len(self.returns) > 1 else (found,), strict=True)
        ]
        return tuple(out) if len(out) > 1 else out[0]


def _each(function: Callable[[Any], Any], value: Any) -> Any:
    """Of an argument or a result, each by itself if it is a list: all that a schema knows, at a fraction of what pytree costs."""
    return type(value)(_each(function, item) for item in value) if type(value) in (list, tuple) else function(value)


def _leaves(values: Any) -> Iterator[Any]:
    for value in values:
        if type(value) in (list, tuple):
            yield from _leaves(value)
        else:
            yield value


def _unwrapped(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else here(value)


_kernel_of = functools.cache(_Kernel)


def _any(op: Any, *args: Any, **kwargs: Any) -> Any:
    return _kernel_of(op)(*args, **kwargs)


@contextmanager
def _lent() -> Iterator[None]:
    """The CPU's generator is at the state of ours, for operations that can draw from no other."""
    ours, before = MODULE.default_generators[0], torch.default_generator.get_state()
    torch.default_generator.set_state(ours.get_state())
    try:
        yield
        ours.set_state(torch.default_generator.get_state())
    finally:
        torch.default_generator.set_state(before)


def _copy(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if self.device.type == "cpu" or (source.device.type == "cpu" and not non_blocking):
        WAITS.append("copy_")
    here(self).copy_(here(source))
    return self


def _scalar(self: Tensor) -> Any:
    WAITS.append("_local_scalar_dense")
    return here(self).item()


def _resize(self: Tensor, size: list[int], memory_format: Any = None) -> Tensor:
    new = there(torch.empty(size, dtype=self.dtype))
    here(new).view(-1)[: self.numel()].copy_(here(self).reshape(-1)[: new.numel()])
    return aten.set_.source_Storage_storage_offset.redispatch(
        KEYS, self, new.untyped_storage(), 0, new.shape, new.stride()
    )


def _clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
    """Of a storage, by which tensors are deep-copied."""
    if self.device.type != NAME:
        return _CLONE(self)
    return torch.empty(0, dtype=torch.uint8, device=NAME).set_(self).clone().untyped_storage()


def _convolve(*args: Any) -> Tensor:
    return there(aten.convolution(*map(here, args)))


def _convolve_backward(slope: Tensor, x: Tensor, weight: Tensor, *args: Any) -> tuple[Tensor, ...]:
    found = aten.convolution_backward(here(slope), here(x), here(weight), [slope.shape[1]], *args)
    return tuple(map(there, found))


MODULE = Module()
_setup_privateuseone_for_python_backend(NAME, MODULE)
_CLONE = torch.UntypedStorage.clone
torch.UntypedStorage.clone = _clone
_EVERYTHING = library.Library("_", "IMPL")
_EVERYTHING.fallback(_any, "PrivateUse1")
_SOME = library.Library("aten", "IMPL")
for _name, _kernel in {
    "copy_": _copy,
    "_local_scalar_dense": _scalar,
    "resize_": _resize,
    "convolution_overrideable": _convolve,
    "convolution_backward_overrideable": _convolve_backward,
}.items():
    _SOME.impl(_name, _kernel, "PrivateUse1")
