"""Environment variable for the training device, so that notebooks and scripts written for a CPU can train on another device."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch import nn

P = ParamSpec("P")
R = TypeVar("R")


def on_requested_device(train: Callable[P, R]) -> Callable[P, R]:
    """Train on the device in the environment variable WORKBENCH_DEVICE, unless the call names one, and move the model back.

    Args:
        train: train(wrapped, ..., device=None).
    """

    @functools.wraps(train)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        requested, wrapped = os.environ.get("WORKBENCH_DEVICE"), args[0] if args else kwargs.get("wrapped")
        if not requested or kwargs.get("device") is not None or not isinstance(wrapped, nn.Module):
            return train(*args, **kwargs)
        device: Any = next((tensor.device for tensor in (*wrapped.parameters(), *wrapped.buffers())), "cpu")
        try:
            kwargs["device"] = requested
            return train(*args, **kwargs)
        finally:
            wrapped.to(device)

    return wrapper
