"""The time limit of a running notebook, and what is observed of its kernel."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Watch:
    """Time limit of a running notebook, and observations of its kernel.

    Attributes:
        timeout: time limit in seconds for all cells together, None for no limit.
        exits: exit codes of the kernel, if it has died.
        peak_memory: peak memory of the kernel, MiB.
        peak_device_memory: peak of torch's GPU memory, MiB.
        device: name of the kernel's device; "" if the kernel could not be asked.
        data: name -> sha256 of the data sets that the notebook loaded.
        on_picture: called with each picture that a cell shows, a PNG file in base64.
    """

    timeout: float | None = None
    exits: list[int] = field(default_factory=list)
    peak_memory: float | None = None
    peak_device_memory: float | None = None
    device: str = ""
    data: dict[str, str] = field(default_factory=dict)
    on_picture: Callable[[str], object] | None = None

    def begin(self) -> None:
        """Start the time limit."""
        self.deadline = math.inf if self.timeout is None else time.monotonic() + self.timeout

    def left(self) -> float | None:
        """Return the seconds left until the limit, or None."""
        return None if self.timeout is None else max(1e-3, self.deadline - time.monotonic())

    def saw(self, peak_memory: float | None) -> None:
        """Update the peak memory."""
        if peak_memory is not None:
            self.peak_memory = max(self.peak_memory or 0.0, peak_memory)
