"""Comparisons of a graph's answers with eager ones, without waiting for the device that computes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...engine.traced_graph import same


class Verdict:
    """Whether a graph's answer is the same as an eager one.

    On the CPU, all bits must be. On other devices, half of the digits must be: a kernel may add in another order in each run (by atomic
    additions, or as the place of its operands in memory suggests), so that eager answers differ from each other. Graphs are recorded and
    simplified by the same code for all devices.

    Args:
        results: tensors of the graph's answer.
        others: those of the eager one.
        run: number of the graph's run.
    """

    def __init__(self, results: Sequence[Tensor], others: Sequence[Tensor], run: int) -> None:
        self.run = run
        self._flag: Tensor | None = None
        self._event: torch.Event | None = None
        self._is_same = len(results) == len(others) and all(map(_have_same_form, results, others))
        if not self._is_same:
            return
        device = next((tensor.device for tensor in others if not tensor.is_cpu), None)
        if device is None:
            self._is_same = all(map(same, results, others))
            return
        with torch.no_grad():
            flags = [_are_close(*pair).to(device, non_blocking=True) for pair in zip(results, others, strict=True)]
            self._flag = torch.empty((), dtype=torch.bool, pin_memory=device.type == "cuda")
            self._flag.copy_(torch.stack(flags).all(), non_blocking=True)
        self._event = torch.get_device_module(device).current_stream(device).record_event()

    def is_known(self) -> bool:
        """Return whether the device has computed it."""
        return self._event is None or self._event.query()

    def is_same(self) -> bool:
        """Return the verdict, which must be known."""
        return self._is_same and (self._flag is None or bool(self._flag))


def _have_same_form(a: Tensor, b: Tensor) -> bool:
    return a.dtype is b.dtype and a.shape == b.shape and a.stride() == b.stride() and a.device == b.device


def _are_close(a: Tensor, b: Tensor) -> Tensor:
    """Return whether two tensors of the same form differ by rounding at most, NaN counting as equal to NaN."""
    if not (a.is_floating_point() or a.is_complex()) or not a.numel():
        return (a == b).all()
    if a.element_size() < 4:  # whose differences would be rounded
        a, b = a.float(), b.float()
        eps = torch.finfo(torch.bfloat16).eps
    else:
        eps = torch.finfo(a.dtype).eps
    largest = b.abs().nan_to_num(0.0, 0.0, 0.0).max()
    return ((a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= eps**0.5 * largest)).all()


__all__ = ["Verdict"]
