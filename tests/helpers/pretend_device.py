"""A simulated device: its tensors live in CPU memory but report another device, and cannot be mixed with CPU tensors, as on a GPU.

Importing this registers it with torch, for the whole process.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, library
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
aten = torch.ops.aten
CPU, THERE = 1, 12  # device types of DLPack: kDLCPU, kDLExtDev
KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
DOUBLE = {float: torch.float64, complex: torch.complex128}
# operations that have synchronized with the device: they read values, or copied them in a blocking way
WAITS: list[str] = []
# operations that read values on a GPU, for example to know the size of their result
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
    """The device module, as torch.cuda is for "cuda", with the functions that torch and workbench use."""

    def __init__(self) -> None:
        self.default_generators = (torch.Generator().manual_seed(0),)
        self.captures = False  # whether a graph of the device is being captured
        self.arrives = True  # whether the device has computed everything that it was asked for

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

    def is_current_stream_capturing(self) -> bool:
        return self.captures

    def current_stream(self, device: Any = None) -> Module:
        return self  # the only one, and its own events

    def record_event(self) -> Module:
        return self

    def query(self) -> bool:
        return self.arrives

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return 2**30, 2**30

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        self.default_generators[0].manual_seed(seed)

    def get_rng_state(self, device: Any = 0) -> Tensor:
        return self.default_generators[0].get_state()

    def set_rng_state(self, state: Tensor, device: Any = 0) -> None:
        self.default_generators[0].set_state(state)


def _across(x: Tensor, side: int) -> Tensor:
    """Return a tensor of another device type on the same memory."""
    capsule = torch._C._to_dlpack(x)
    ctypes.c_int32.from_address(_pointer(capsule, b"dltensor") + 8).value = side  # dl_tensor.device.device_type
    return torch._C._from_dlpack(capsule)


def here(x: Any) -> Any:
    """Return a tensor of the device as one of the CPU, and anything else unchanged."""
    return _across(x, CPU) if isinstance(x, Tensor) and x.device.type == NAME else x


def there(x: Any) -> Any:
    """Return a tensor of the CPU as one of the device, and anything else unchanged."""
    return _across(x, THERE) if isinstance(x, Tensor) and x.device.type == "cpu" else x


class _Kernel:
    """The device kernel of an operation, which runs the CPU kernel on the same memory."""

    def __init__(self, op: Any) -> None:
        schema = op._schema
        self.op, self.names = op, [a.name for a in schema.arguments]
        self.positional = [a.name for a in schema.arguments if not a.kwarg_only]
        self.keywords = [a.name for a in schema.arguments if a.kwarg_only]
        self.numbers = [a.name for a in schema.arguments if str(a.type) == "Tensor"]
        writes = [a for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        # list arguments have no alias set
        written = {min(a.alias_info.before_set): a.name for a in writes if a.alias_info.before_set}
        aliases = [value.alias_info for value in schema.returns]
        views = any(alias and not alias.is_write for alias in aliases)
        self.returns = [written[min(alias.before_set)] if alias and not views else None for alias in aliases]
        self.outs = [a.name for a in schema.arguments if a.kwarg_only and a.alias_info]
        self.valueless = views or "Storage" in {str(a.type) for a in schema.arguments}
        self.generator = "generator" in self.keywords
        self.waits = schema.name.removeprefix("aten::") in LOOK and schema.overload_name not in ("dim", "dim_values")
        self.draws = torch.Tag.nondeterministic_seeded in op.tags and not self.generator

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.valueless:
            return self.op.redispatch(KEYS, *args, **kwargs)
        named = dict(zip(self.names, args, strict=False)) | kwargs
        if self.waits or any(
            isinstance(i, Tensor) and (i.dtype is torch.bool or i.is_cpu) for i in named.get("indices", ())
        ):
            WAITS.append(str(self.op))
        places: set[str] = set()
        cpu_arguments = {
            # a GPU accepts indices on the CPU, too
            name: _taken(value, places if name != "indices" else set())
            for name, value in named.items()
        }
        if len(places) > 1:
            raise RuntimeError(f"Expected all tensors to be on the same device, but {self.op} got {NAME}:0 and cpu")
        for name in self.numbers:  # an operation called by name takes numbers as tensors
            if isinstance(number := cpu_arguments.get(name), bool | int | float | complex):
                cpu_arguments[name] = torch.tensor(number, dtype=DOUBLE.get(type(number)))
        for name in self.outs:  # the operation may resize them
            cpu_arguments[name] = torch.empty(0, dtype=named[name].dtype)
        if self.generator and cpu_arguments.get("generator") is None:
            cpu_arguments["generator"] = MODULE.default_generators[0]
        with _lent() if self.draws else nullcontext():
            result = self.op(
                *(cpu_arguments[name] for name in self.positional if name in cpu_arguments),
                **{name: cpu_arguments[name] for name in self.keywords if name in cpu_arguments},
            )
        for name in self.outs:
            if named[name].shape != cpu_arguments[name].shape:
                _resize(named[name], cpu_arguments[name].shape)
            here(named[name]).copy_(cpu_arguments[name])
        if not self.returns:
            return None
        out = [
            named[same] if same else _each(there, value)
            for same, value in zip(self.returns, result if len(self.returns) > 1 else (result,), strict=True)
        ]
        return tuple(out) if len(out) > 1 else out[0]


def _each(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to an argument or result, or to each item of lists, the only nesting in schemas; much faster than pytree."""
    return type(value)(_each(function, item) for item in value) if type(value) in (list, tuple) else function(value)


def _taken(value: Any, places: set[str]) -> Any:
    """Return an argument as the CPU takes it, and add the devices of its tensors, other than numbers on the CPU, to `places`."""
    if isinstance(value, Tensor):
        place = value.device.type
        if place == NAME or value.dim():
            places.add(place)
        return _across(value, CPU) if place == NAME else value
    if type(value) in (list, tuple):
        return type(value)(_taken(item, places) for item in value)
    return torch.device("cpu") if isinstance(value, torch.device) else value


_kernel_of = functools.cache(_Kernel)


def _any(op: Any, *args: Any, **kwargs: Any) -> Any:
    return _kernel_of(op)(*args, **kwargs)


@contextmanager
def _lent() -> Iterator[None]:
    """Lend the state of the device's generator to the CPU's, for operations that can only draw from the latter."""
    device_generator, cpu_state = MODULE.default_generators[0], torch.default_generator.get_state()
    _set_unseen(torch.default_generator, device_generator.get_state())
    try:
        yield
        _set_unseen(device_generator, torch.default_generator.get_state())
    finally:
        _set_unseen(torch.default_generator, cpu_state)


def _set_unseen(generator: torch.Generator, state: Tensor) -> None:
    """Set a generator's state without a profiler, which would take it for a model that seeds itself: no real device does this."""
    profiler = sys.getprofile()
    sys.setprofile(None)
    try:
        generator.set_state(state)
    finally:
        sys.setprofile(profiler)


def _copy(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not non_blocking and "cpu" in (self.device.type, source.device.type):
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
    """Clone a storage, on which deep copies of tensors rely."""
    if self.device.type != NAME:
        return _CLONE(self)
    return torch.empty(0, dtype=torch.uint8, device=NAME).set_(self).clone().untyped_storage()


def _convolve(*args: Any) -> Tensor:
    return there(aten.convolution(*map(here, args)))


def _convolve_backward(slope: Tensor, x: Tensor, weight: Tensor, *args: Any) -> tuple[Tensor, ...]:
    gradients = aten.convolution_backward(here(slope), here(x), here(weight), [slope.shape[1]], *args)
    return tuple(map(there, gradients))


MODULE = Module()
_setup_privateuseone_for_python_backend(NAME, MODULE)
_CLONE = torch.UntypedStorage.clone
torch.UntypedStorage.clone = _clone
_EVERYTHING = library.Library("_", "IMPL")
_EVERYTHING.fallback(_any, "PrivateUse1")
_EVERYTHING.fallback(library.fallthrough_kernel, "AutocastPrivateUse1")  # autocast changes nothing
_SOME = library.Library("aten", "IMPL")
for _name, _kernel in {
    "copy_": _copy,
    "_local_scalar_dense": _scalar,
    "resize_": _resize,
    "convolution_overrideable": _convolve,
    "convolution_backward_overrideable": _convolve_backward,
}.items():
    _SOME.impl(_name, _kernel, "PrivateUse1")
