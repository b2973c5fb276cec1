"""Private random draws: they start at a seed and leave those of everybody else alone, also where several threads compute at once.

torch has one generator for each device, which all threads share. The main thread borrows it: seeded, and set back afterwards. Any other thread,
such as that of a widget's training, borrows nothing, since cells run meanwhile; there, each operation that would draw from torch's generator is
given a private one. On the CPU a seed gives the same numbers either way, to the last bit.

The operations are met inside torch's dispatcher, under a dispatch key that nothing else uses and that only such threads have switched on. So all
draws come by, those inside `nn.LSTM`, attention and `torch.vmap` as well; and what draws nothing takes the same way as ever, at the same speed.
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, library

from ...errors import WorkbenchWarning
from ..surroundings import Reverted

KEY = "Fake"  # between autograd and the devices; reserved for a tool outside torch, so that torch has no kernel for it
CPU = torch.device("cpu")


class own_random(Reverted):  # called as a function is
    """Random draws of this thread on the CPU and these devices start at the seed; afterwards all are as they were before.

    In threads other than the main one this holds for draws on all devices.

    Args:
        seed: of each device.
        devices: beside the CPU.
    """

    def __init__(self, seed: int, *devices: torch.device) -> None:
        self._seed, self._devices = seed, devices
        self._before: list[tuple[torch.Generator, Tensor]] = []
        self._private: AbstractContextManager[None] | None = None

    def begin(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            self._private = _private(self._seed)
            self._private.__enter__()
            return
        shared = [_shared(device) for device in dict.fromkeys((CPU, *self._devices)) if has_generator(device)]
        self._before = [(generator, generator.get_state()) for generator in shared]
        for generator in shared:  # torch.manual_seed would also seed those of other devices
            generator.manual_seed(self._seed)

    def revert(self) -> None:
        for generator, state in self._before:
            generator.set_state(state)
        if (private := self._private) is not None:
            self._private = None
            private.__exit__(None, None, None)


def has_generator(device: torch.device) -> bool:
    """Whether draws on the device come from a generator whose state can be set: the CPU, and GPUs but for Apple's."""
    return device.type == "cpu" or hasattr(getattr(torch, device.type, None), "default_generators")


def generator_of(device: torch.device) -> torch.Generator:
    """The generator that this thread's draws on a device come from.

    Example:
        >>> with own_random(3):
        ...     state = generator_of(CPU).get_state()
        ...     first = torch.rand(2)
        ...     _ = generator_of(CPU).set_state(state)
        ...     torch.equal(torch.rand(2), first)
        True
    """
    private = _of_this_thread()
    return _shared(device) if private is None else private[_numbered(device)]


def generators_of(device: torch.device) -> dict[str, torch.Generator]:
    """Those of the CPU and of this device by the names of their types, for a state from which draws can go on."""
    return {place.type: generator_of(place) for place in (CPU, device) if has_generator(place)}


def _shared(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    if hasattr(module, "init"):  # without it there are none yet
        module.init()
    return module.default_generators[_numbered(device).index]


def _is_shared(generator: Any) -> bool:
    """Whether it is one of torch's own, which can have several Python objects."""
    shared: list[Any] = [torch.default_generator, *torch.cuda.default_generators]
    return generator._cdata in [one._cdata for one in shared]


def _numbered(device: torch.device) -> torch.device:
    if device.index is None and device.type != "cpu":
        return torch.device(device.type, torch.get_device_module(device).current_device())
    return device


# ---- in other threads
class _Private(dict):
    """The generators of one block by device, made as they are needed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def __missing__(self, device: torch.device) -> torch.Generator:
        self[device] = torch.Generator(device).manual_seed(self.seed)
        return self[device]


_LOCAL = threading.local()


def _of_this_thread() -> _Private | None:
    return getattr(_LOCAL, "private", None)


@contextmanager
def _private(seed: int) -> Iterator[None]:
    _install()
    outer = _of_this_thread()
    _LOCAL.private = _Private(seed)
    torch._C._dispatch_tls_set_dispatch_key_included(KEY, True)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_included(KEY, outer is not None)
        _LOCAL.private = outer


_LOCK, _LENDING = threading.RLock(), threading.RLock()  # which their own thread never waits for
_LIBRARIES: list[Any] = []  # what was registered is there as long as they are
Kernel = Callable[..., Any]


@functools.cache
def _below() -> Any:
    """All dispatch keys that come after ours."""
    return torch._C._dispatch_keyset_full_after(KEY)


def _install() -> None:
    """Once: kernels for the operations that draw; for all others the key is as if it were not there."""
    with _LOCK:
        if _LIBRARIES:
            return
        others = torch._C._dispatch_library("IMPL", "_", KEY, __file__, 0)
        others.fallback_fallthrough(KEY)
        libraries: dict[str, Any] = {}
        for name in torch._C._dispatch_get_all_op_names():
            if (make := _kernel_maker(name)) is not None:
                space = name.partition("::")[0]
                if space not in libraries:
                    libraries[space] = library.Library(space, "IMPL")
                op = _operation(name)
                libraries[space].impl(op, make(op), KEY, with_keyset=True)
        _LIBRARIES.extend([others, *libraries.values()])


def _operation(name: str) -> Any:
    space, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, space), packet), overload or "default")


def _kernel_maker(name: str) -> Callable[[Any], Kernel] | None:
    """What makes a kernel for an operation; None for one that draws nothing, or does so by other operations."""
    packet, _, overload = name.partition(".")
    types = [str(argument.type) for argument in torch._C._get_schema(packet, overload).arguments]
    if "Optional[Generator]" in types:  # those without a tensor make one and draw into it
        return _kernel_with_generator if any("Tensor" in kind for kind in types) else None
    if name == "aten::native_dropout":
        return _kernel_of_dropout
    on_cuda = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
    return _kernel_that_borrows if on_cuda and torch.Tag.nondeterministic_seeded in _operation(name).tags else None


def _source(op: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[_Private | None, torch.device]:
    """Our generators; None where nothing is drawn now: tensors have no values, or a dispatch mode sees the operation and calls it again."""
    device = next((value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), CPU)
    if device.type == "meta" or torch._C._len_torch_dispatch_stack():
        return None, device
    if torch._C._current_graph_task_id() != -1 and _recomputes():
        raise RuntimeError(
            f"the backward pass computes again what drew random numbers ({op}), by torch.utils.checkpoint, which can repeat draws in the main "
            "thread only: train there (workbench.fit in a cell of its own, or block=True), or switch checkpointing or the dropout in it off"
        )
    private = _of_this_thread()
    if private is None:  # torch takes the dispatch key along into threads of its own
        raise RuntimeError(
            f"{op} draws in a thread that torch has started, such as that of the backward pass on a GPU, for a training that is not in the main "
            "thread: train there (workbench.fit in a cell of its own, or block=True)"
        )
    return private, device


def _recomputes() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False


def _kernel_with_generator(op: Any) -> Kernel:
    """An operation that takes a generator is given ours, unless the model brings one of its own."""
    position = [argument.name for argument in op._schema.arguments].index("generator")  # the last one, or by keyword

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        private, device = _source(op, args, kwargs)
        if private is not None:
            generator = args[position] if len(args) > position else kwargs.get("generator")
            if generator is None or _is_shared(generator):
                args, kwargs = args[:position], {**kwargs, "generator": private[device]}
        return op.redispatch(keys & _below(), *args, **kwargs)

    return kernel


def _kernel_of_dropout(op: Any) -> Kernel:
    """On CUDA, dropout is one kernel that takes no generator; it has a sister that does, and draws the same."""

    def kernel(keys: Any, input: Tensor, p: float, train: bool | None) -> Any:
        private, device = _source(op, (input,), {})
        if private is None or device.type != "cuda" or train is False or not 0 < p < 1:
            return op.redispatch(keys & _below(), input, p, train)
        out, mask = torch.ops.aten._fused_dropout(input, 1 - p, private[device])
        return out, mask.bool()

    return kernel


def _kernel_that_borrows(op: Any) -> Kernel:
    """What can only draw from the shared generator of a GPU, such as fused attention with dropout, is lent our state for that moment."""
    warned = False

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal warned
        private, device = _source(op, args, kwargs)
        if private is None or not has_generator(device):
            return op.redispatch(keys & _below(), *args, **kwargs)
        generator, shared = private[device], _shared(device)
        with _LENDING:
            borrowed, before = shared.get_state(), generator.get_state()
            try:
                shared.set_state(before)
                out = op.redispatch(keys & _below(), *args, **kwargs)
                after = shared.get_state()
            finally:
                shared.set_state(borrowed)
        if torch.equal(before, after):  # nothing was drawn, or by operations that we meet
            return out
        generator.set_state(after)
        if not warned:
            warned = True
            message = (
                f"{op} draws from the generator that all threads share: what another cell draws at the same moment can change this training, "
                "and the other way round. Attention draws nothing with dropout=0"
            )
            warnings.warn(message, WorkbenchWarning, stacklevel=2)
        return out

    return kernel


__all__ = ["CPU", "generator_of", "generators_of", "has_generator", "own_random"]
