"""Measure passes: time, memory, and a lower bound of the time from operations and bytes."""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

# Not torch.utils.benchmark: its Timer measures one statement after another, in wall-clock time. To resolve a ratio of 1.05, passes are sampled
# in turn, in processor time of this process or in GPU time, and divided within each round.
Pass = Callable[[], object]
SHORTEST = 2e-3  # minimum seconds of one sample
ROUNDS = (9, 25)  # minimum number of rounds, and maximum while they take less than ENOUGH seconds together
ENOUGH = 0.3
WARM_UP_CALLS = 80  # enough for small models to record a graph
SETTLED_CALLS = 25  # longer calls record it after 15, and compare it in the next 4 ...
SETTLED = 2.0  # ... unless they take more than so many seconds


# ---- time
def timed(passes: Mapping[str, Pass], device: str) -> dict[str, list[float]]:
    """Return the seconds of each pass, sampled in turn, so that all are measured under the same conditions.

    Args:
        passes: passes by name; each is called as often as needed for a sample of 2 ms.
        device: "cpu" for processor time of this process; "cuda" for the time between two events on the GPU.

    Returns:
        For each name, one number per round.
    """
    clock = _cuda if device == "cuda" else _cpu
    repeats = {}
    for name, run in passes.items():
        # first calls choose an executor, allocate, compile, and on a GPU record graphs
        clock(run, 4 if device == "cuda" else 2)
        _warm_up(run)
        repeats[name] = max(1, int(SHORTEST / max(clock(run, 1), 1e-7)) + 1)
    samples: dict[str, list[float]] = {name: [] for name in passes}
    names = list(passes)
    start = time.perf_counter()
    with _uncollected():
        while _needs_more(len(samples[names[0]]), time.perf_counter() - start):
            names = [*names[1:], names[0]]  # rotates, so that no pass is always first
            for name in names:
                samples[name].append(clock(passes[name], repeats[name]) / repeats[name])
    return samples


def _warm_up(run: Pass) -> None:
    """Call a pass until its graph is recorded and compared, unless that takes long."""
    start, calls = time.perf_counter(), 0
    while calls < WARM_UP_CALLS and time.perf_counter() - start < (SETTLED if calls < SETTLED_CALLS else ENOUGH):
        run()
        calls += 1


def _needs_more(rounds: int, seconds: float) -> bool:
    return rounds < ROUNDS[0] or (rounds < ROUNDS[1] and seconds < ENOUGH)


def _cpu(run: Pass, repeats: int) -> float:
    start = time.process_time_ns()
    for _ in range(repeats):
        run()
    return (time.process_time_ns() - start) / 1e9


def _cuda(run: Pass, repeats: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


@contextmanager
def _uncollected() -> Iterator[None]:
    """Collect garbage once, and disable collection during the block."""
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def middle(values: list[float]) -> tuple[float, float, float]:
    """Return median and quartiles.

    Example:
        >>> middle([1.0, 2.0, 3.0, 4.0, 5.0])
        (3.0, 2.0, 4.0)
    """
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return median, low, high


@torch.no_grad()
def cost_in_passes(net: nn.Module, predict: Callable[[Tensor], object], x: Tensor, repeats: int) -> float:
    """Return processor time relative to a pass of the plain network: median over consecutive pairs."""
    ratios = []
    for _ in range(repeats):
        start = time.process_time()
        net(x)
        after_plain = time.process_time()
        predict(x)
        ratios.append((time.process_time() - after_plain) / (after_plain - start))
    return statistics.median(ratios)


# ---- memory
def peak(run: Pass, device: str) -> float:
    """Return the peak memory of tensors in a pass, in excess of that before it, in MiB."""
    if device == "cuda":
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with _uncollected(), torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
        run()
    # all allocations and releases in order; the public tables have sums only
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most / 2**20


def size(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of tensors, each counted once."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    # tensors in a graph that is being traced have symbolic sizes
    return sum(count for count in storages.values() if isinstance(count, int))


def alive() -> int:
    """Return the bytes of all tensors in this process."""
    gc.collect()
    return size(value for value in gc.get_objects() if issubclass(type(value), Tensor))


# ---- floor
def operations(model: nn.Module, x: Tensor, backward: bool) -> dict[str, int]:
    """Count the floating-point operations of a pass on the meta device: all under "", and those of each module under its name.

    Args:
        model: the model, which is not changed.
        x: input, of which only shape and dtype matter.
        backward: whether to count the backward pass as well.
    """
    from torch.func import functional_call
    from torch.utils.flop_counter import FlopCounterMode

    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shadows = {
        name: torch.empty_like(value, device="meta", requires_grad=value.requires_grad)
        for name, value in tensors.items()
    }
    with FlopCounterMode(display=False) as counter, torch.enable_grad():
        y = functional_call(model, shadows, (x.to("meta"),))
        if backward:
            y.sum().backward()
    root = f"{type(model).__name__}."
    counts = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    return {"": counts["Global"], **{n.removeprefix(root): c for n, c in counts.items() if n.startswith(root)}}


@functools.cache
def operations_a_second(device: str, dtype: torch.dtype) -> float:
    """Return the best rate of several matrix products and convolutions, which on a CPU come from different libraries."""
    rates = []
    with torch.no_grad():
        for n in (2048, 4096, 8192) if device == "cuda" else (256, 512, 1024):
            a = torch.ones(n, n, device=device, dtype=dtype)
            rates.append(2 * n**3 / min(timed({"mm": lambda a=a: a @ a}, device)["mm"]))
        for channels, size in ((64, 32), (256, 16)):
            x = torch.ones(256 if device == "cuda" else 4, channels, size, size, device=device, dtype=dtype)
            w = torch.ones(channels, channels, 3, 3, device=device, dtype=dtype)
            seconds = min(timed({"conv": lambda x=x, w=w: torch.conv2d(x, w, padding=1)}, device)["conv"])
            # products with the padding are not counted
            rates.append(2 * len(x) * channels**2 * (3 * size - 2) ** 2 / seconds)
    return max(rates)


def bytes_a_second(device: str, size: int) -> float:
    """Return the best rate of several copies of about this many bytes, counting bytes read and written."""
    return _bytes_a_second(device, 1 << max(20, min(28, int(size).bit_length())))


@functools.cache
def _bytes_a_second(device: str, size: int) -> float:
    a, b = torch.zeros(2, size // 2, dtype=torch.uint8, device=device)
    return size / min(timed({"copy": lambda: b.copy_(a)}, device)["copy"])
