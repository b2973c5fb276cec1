"""Private random draws: seeded, and without effect on any other random draws, even if several threads compute at once.

torch has one generator per device, which all threads share. The main thread borrows it: the generator is seeded, and its state is restored
afterwards. Another thread, such as that of a widget's training, must not do so, since notebook cells run meanwhile; there, each operation that
would draw from torch's generator is given a private one. On the CPU a seed gives the same numbers either way, to the last bit.

These operations are intercepted in torch's dispatcher, by kernels for a dispatch key that nothing else uses and that is enabled in such threads
only. This catches all draws, including those inside `nn.LSTM`, attention and `torch.vmap`; operations that draw nothing are not slowed down.
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, library

from ...errors import WorkbenchWarning, as_seed
from ..surroundings import Reverted

KEY = "Fake"  # dispatched between autograd and the devices; reserved for external tools, so that torch has no kernels for it
CPU = torch.device("cpu")


class own_random(Reverted):  # lower case, since it is used like a function
    """Context manager: draws of this thread on the CPU and the given devices start at a seed; the previous states are restored at the end.

    In threads other than the main one this applies to draws on all devices.

    Args:
        seed: seed of each device's generator.
        devices: devices in addition to the CPU.
    """

    def __init__(self, seed: int, *devices: torch.device) -> None:
        self._seed, self._devices = as_seed(seed), devices
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


def private_stream(devices: Iterable[torch.device]) -> AbstractContextManager[None]:
    """Context manager for a private random stream that does not overlap with what the user draws afterwards."""
    seed = int(torch.randint(2**62, (), generator=generator_of(CPU).clone_state(), device="cpu").item())
    return own_random(seed, *sorted(set(devices), key=str))


def call_in_mode(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call an operation inside `__torch_dispatch__` of a dispatch mode, so that this thread's draws are private there too.

    Before torch 2.13 the kernels that make them private are hidden there.
    """
    if _thread_generators() is None or not torch._C._dispatch_tls_is_dispatch_key_excluded(KEY):
        return function(*args, **kwargs)
    torch._C._dispatch_tls_set_dispatch_key_excluded(KEY, False)
    try:
        return function(*args, **kwargs)
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(KEY, True)


def has_generator(device: torch.device) -> bool:
    """Return whether draws on the device use a generator whose state can be set: on the CPU and on GPUs other than Apple's."""
    return device.type == "cpu" or hasattr(getattr(torch, device.type, None), "default_generators")


def generator_of(device: torch.device) -> torch.Generator:
    """Return the generator that this thread's draws on a device come from.

    Example:
        >>> with own_random(3):
        ...     state = generator_of(CPU).get_state()
        ...     first = torch.rand(2)
        ...     _ = generator_of(CPU).set_state(state)
        ...     torch.equal(torch.rand(2), first)
        True
    """
    private = _thread_generators()
    return _shared(device) if private is None else private[_with_index(device)]


def generators_of(device: torch.device) -> dict[str, torch.Generator]:
    """Return the generators of the CPU and of a device by device type, for saving random states."""
    return {place.type: generator_of(place) for place in (CPU, device) if has_generator(place)}


def random_states(devices: Iterable[torch.device]) -> list[tuple[torch.Generator, Tensor]]:
    """Return the generators that this thread's draws on devices come from, with their states."""
    return [(generator, generator.get_state()) for generator in map(generator_of, devices)]


def restore_random(states: Iterable[tuple[torch.Generator, Tensor]]) -> None:
    """Restore the states that `random_states` returned."""
    for generator, state in states:
        generator.set_state(state)


def _shared(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    if hasattr(module, "init"):  # the generators exist after initialization only
        module.init()
    return module.default_generators[_with_index(device).index]


def draws_privately() -> bool:
    """Return whether draws of this thread come from private generators."""
    return _thread_generators() is not None


def is_shared(generator: Any) -> bool:
    """Return whether a generator is one of torch's default generators, each of which can have several Python objects."""
    shared: list[Any] = [torch.default_generator, *torch.cuda.default_generators]
    return generator._cdata in [one._cdata for one in shared]


def _with_index(device: torch.device) -> torch.device:
    if device.index is None and device.type != "cpu":
        return torch.device(device.type, torch.get_device_module(device).current_device())
    return device


# ---- in other threads
class _Private(dict):
    """Generators of one `own_random` block by device, created on first use."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def __missing__(self, device: torch.device) -> torch.Generator:
        self[device] = torch.Generator(device).manual_seed(self.seed)
        return self[device]


_LOCAL = threading.local()


def _thread_generators() -> _Private | None:
    return getattr(_LOCAL, "private", None)


@contextmanager
def _private(seed: int) -> Iterator[None]:
    _install()
    outer = _thread_generators()
    _LOCAL.private = _Private(seed)
    torch._C._dispatch_tls_set_dispatch_key_included(KEY, True)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_included(KEY, outer is not None)
        _LOCAL.private = outer


_LOCK, _BORROW_LOCK = threading.RLock(), threading.RLock()  # reentrant, so that a thread never waits for itself
_LIBRARIES: list[Any] = []  # keeps the registered kernels alive
Kernel = Callable[..., Any]


@functools.cache
def _keys_below() -> Any:
    """Return the dispatch keys after `KEY`."""
    return torch._C._dispatch_keyset_full_after(KEY)


def _install() -> None:
    """Register, once, kernels for the operations that draw, and a fallthrough for all others."""
    with _LOCK:
        if _LIBRARIES:
            return
        others = torch._C._dispatch_library("IMPL", "_", KEY, __file__, 0)
        others.fallback_fallthrough(KEY)
        libraries: dict[str, Any] = {}
        for name in torch._C._dispatch_get_all_op_names():
            if (make := _kernel_maker(name)) is not None:
                namespace = name.partition("::")[0]
                if namespace not in libraries:
                    libraries[namespace] = library.Library(namespace, "IMPL")
                op = _operation(name)
                libraries[namespace].impl(op, make(op), KEY, with_keyset=True)
        _LIBRARIES.extend([others, *libraries.values()])


def _operation(name: str) -> Any:
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def _kernel_maker(name: str) -> Callable[[Any], Kernel] | None:
    """Return the factory of the kernel for an operation; None if it draws nothing, or draws through other operations."""
    packet, _, overload = name.partition(".")
    types = [str(argument.type) for argument in torch._C._get_schema(packet, overload).arguments]
    if "Optional[Generator]" in types:  # factories without a tensor argument draw through an in-place operation
        return _kernel_with_generator if any("Tensor" in kind for kind in types) else None
    if name == "aten::native_dropout":
        return _kernel_of_dropout
    on_cuda = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
    return _kernel_that_borrows if on_cuda and torch.Tag.nondeterministic_seeded in _operation(name).tags else None


def _generators_for(op: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[_Private | None, torch.device]:
    """Return the private generators and the device of an operation.

    The generators are None where nothing is drawn yet: tensors without values, or a dispatch mode that will call the operation again.
    """
    device = next((value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), CPU)
    if device.type == "meta" or torch._C._len_torch_dispatch_stack():
        return None, device
    if torch._C._current_graph_task_id() != -1 and _recomputes():
        raise RuntimeError(
            f"the backward pass recomputes an operation that drew random numbers ({op}), by torch.utils.checkpoint, which can repeat draws in "
            "the main thread only: train there (workbench.fit in a cell of its own, or block=True), or switch checkpointing or the dropout in "
            "it off"
        )
    private = _thread_generators()
    if private is None:  # torch passes enabled dispatch keys on to its own threads, which have no private generators
        raise RuntimeError(
            f"{op} draws in a thread that torch has started, such as that of the backward pass on a GPU, during a training outside the main "
            "thread: train in the main thread (workbench.fit in a cell of its own, or block=True)"
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
    """Return a kernel that passes the private generator to an operation, unless the model passes one of its own."""
    position = [argument.name for argument in op._schema.arguments].index("generator")  # the last one, or by keyword

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        private, device = _generators_for(op, args, kwargs)
        if private is not None:
            generator = args[position] if len(args) > position else kwargs.get("generator")
            if generator is None or is_shared(generator):
                args, kwargs = args[:position], {**kwargs, "generator": private[device]}
        return op.redispatch(keys & _keys_below(), *args, **kwargs)

    return kernel


def _kernel_of_dropout(op: Any) -> Kernel:
    """Return a kernel for dropout: on CUDA it takes no generator, but `_fused_dropout` does and draws the same numbers."""

    def kernel(keys: Any, input: Tensor, p: float, train: bool | None) -> Any:
        private, device = _generators_for(op, (input,), {})
        if private is None or device.type != "cuda" or train is False or not 0 < p < 1:
            return op.redispatch(keys & _keys_below(), input, p, train)
        out, mask = torch.ops.aten._fused_dropout(input, 1 - p, private[device])
        return out, mask.bool()

    return kernel


def _kernel_that_borrows(op: Any) -> Kernel:
    """Return a kernel for operations that can only draw from a GPU's shared generator, such as fused attention with dropout.

    It sets the shared generator to the private state while the operation runs.
    """
    warned = False

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal warned
        private, device = _generators_for(op, args, kwargs)
        if private is None or not has_generator(device):
            return op.redispatch(keys & _keys_below(), *args, **kwargs)
        generator, shared = private[device], _shared(device)
        with _BORROW_LOCK:
            shared_state, private_state = shared.get_state(), generator.get_state()
            try:
                shared.set_state(private_state)
                out = op.redispatch(keys & _keys_below(), *args, **kwargs)
                new_state = shared.get_state()
            finally:
                shared.set_state(shared_state)
        if torch.equal(private_state, new_state):  # nothing was drawn, or only through other intercepted operations
            return out
        generator.set_state(new_state)
        if not warned:
            warned = True
            message = (
                f"{op} draws from the generator that all threads share: draws of other cells at the same time can change this training, and "
                "this training can change theirs. Attention draws nothing with dropout=0"
            )
            warnings.warn(message, WorkbenchWarning, stacklevel=2)
        return out

    return kernel


__all__ = [
    "CPU",
    "call_in_mode",
    "draws_privately",
    "generator_of",
    "generators_of",
    "has_generator",
    "is_shared",
    "own_random",
    "private_stream",
    "random_states",
    "restore_random",
]
