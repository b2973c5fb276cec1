"""The number of threads of torch's CPU operations, for one thread of Python at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set the number of threads for torch's CPU operations called from this thread only."""
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    _set_threads(count, before)
    try:
        yield
    finally:
        _set_threads(before, before)


def _set_threads(count: int, elsewhere: int) -> None:
    torch.set_num_threads(count)
    if "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return
    # OpenMP keeps the number per thread, but torch also applies the last one set to threads that have not computed anything yet
    torch.get_num_threads()  # marks this thread as one that has
    other = threading.Thread(target=torch.set_num_threads, args=(elsewhere,))
    other.start()
    other.join()


__all__ = ["torch_threads"]
