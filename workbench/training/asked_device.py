"""The device that trains whatever is not told where: for notebooks and scripts that were written for a CPU."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch import nn

P = ParamSpec("P")
R = TypeVar("R")


def on_asked_device(train: Callable[P, R]) -> Callable[P, R]:
    """Train where the environment variable WORKBENCH_DEVICE says, unless the call says it, and bring the model back.

    Args:
        train: train(wrapped, ..., device=None).
    """

    @functools.wraps(train)
    def there(*args: P.args, **kwargs: P.kwargs) -> R:
        asked, wrapped = os.environ.get("WORKBENCH_DEVICE"), args[0] if args else kwargs.get("wrapped")
        if not asked or kwargs.get("device") is not None or not isinstance(wrapped, nn.Module):
            return train(*args, **kwargs)
        device: Any = next((tensor.device for tensor in (*wrapped.parameters(), *wrapped.buffers())), "cpu")
        try:
            kwargs["device"] = asked
            return train(*args, **kwargs)
        finally:
            wrapped.to(device)

    return there
