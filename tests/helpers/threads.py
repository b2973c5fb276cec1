"""Helpers for tests of random numbers in threads: calls in a thread, the global state, and a model with constant weights."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn


def in_thread(function: Callable[[], Any]) -> Any:
    """Return the result of a function in a new thread, or raise its error."""
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append((function(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


def in_threads(function: Callable[[], Any], n: int) -> None:
    """Call a function in n threads at once, and raise the error of any of them."""
    with ThreadPoolExecutor(n) as pool:
        for future in [pool.submit(function) for _ in range(n)]:
            future.result()


def state() -> bytes:
    return torch.get_rng_state().numpy().tobytes()


def seeded(module: nn.Module) -> nn.Module:
    """Set the weights of a module to values from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return module
