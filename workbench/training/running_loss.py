"""Average the losses of batches without waiting for a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from workbench.core.batches.rows import Batch

Sent = tuple[Tensor, torch.cuda.Event | None]


class RunningLoss:
    """The mean over rows of the losses of batches; one that is not finite ends the training.

    Reading a number from a GPU waits until all its work is done. So its losses are copied in the order of its work, and read when the next batch
    has been started: it always has something to do, and a loss that is not finite is found one batch later.

    Args:
        refusal: refusal(loss, place, batch) -> what to say of a loss that is not finite.
    """

    def __init__(self, refusal: Callable[[float, str, Batch], str]) -> None:
        self.refusal = refusal
        self.total, self.rows = 0.0, 0
        self._sent: list[tuple[Sent, str, Batch]] = []

    def add(self, loss: Tensor, place: str, batch: Batch) -> float | Tensor:
        """Count the loss of one more batch.

        Args:
            loss: [].
            place: where it came about, in words.
            batch: its rows.

        Returns:
            The loss, as a number if it was read.

        Raises:
            FloatingPointError: this loss is not finite, or the one before.
        """
        loss = loss.detach()
        sent = send(loss)
        self._sent.append((sent, place, batch))
        if sent[1] is None:
            return self._wait_for_first()
        if len(self._sent) > 1:
            self._wait_for_first()
        return loss

    def mean(self) -> float:
        """Over all rows; NaN if there were none."""
        while self._sent:
            self._wait_for_first()
        return self.total / self.rows if self.rows else math.nan

    def _wait_for_first(self) -> float:
        (loss, copied), place, batch = self._sent.pop(0)
        if copied is not None:
            copied.synchronize()
        value = loss.item()
        if not math.isfinite(value):
            raise FloatingPointError(self.refusal(value, place, batch))
        rows = len(batch)
        self.total += value * rows
        self.rows += rows
        return value


def send(loss: Tensor) -> Sent:
    """A loss on its way from a GPU, with the event of its arrival; elsewhere the loss itself."""
    if not loss.is_cuda:
        return loss, None
    copy = loss.to("cpu", non_blocking=True)
    return copy, torch.cuda.current_stream(loss.device).record_event()


__all__ = ["RunningLoss"]
