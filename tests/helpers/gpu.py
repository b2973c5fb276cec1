"""What tests on a GPU share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"
MOST = ["plain", "vote", "vote last layer", "sculpt", "sample", "neo", "vote of sculpt, with neo"]


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    """Convolutions in float32, as matrix products are: tf32 has three digits, of which whitening a signature loses some."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@contextmanager
def no_wait() -> Iterator[None]:
    """An error where the program would wait for the device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
