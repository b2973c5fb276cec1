"""Average of the losses of batches, computed without waiting for a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from workbench.core.batches.rows import Batch
from workbench.core.outputs.meanings import IGNORED
from workbench.training.default_losses import LossByMeaning, labelled_share

Sent = tuple[Tensor, torch.cuda.Event | None]


WITHOUT_CLASS = (
    f"a batch without any class (all are {IGNORED}), of which a criterion that takes the mean makes NaN: leave criterion out, which counts "
    "it as 0, or train with a larger batch_size"
)


class RunningLoss:
    """Mean over rows of the losses of batches; a loss that is not finite ends the training.

    Class numbers of -100 do not count; with class weights, the others count by their weight.

    Reading a number from a GPU waits until all queued work is done. So each loss is copied asynchronously, and read after the next batch
    has been started: the GPU is never idle, and a loss that is not finite is detected one batch later.

    Args:
        refusal: refusal(loss, place, batch) -> error message for a loss that is not finite.
        criterion: the loss of the training, which may have class weights.
    """

    def __init__(self, refusal: Callable[[float, str, Batch], str], criterion: Any = None) -> None:
        self.refusal = refusal
        self.mean_weight = criterion.mean_weight if isinstance(criterion, LossByMeaning) else labelled_share
        self.total, self.weight, self.rows = 0.0, 0.0, 0
        self._sent: list[tuple[Sent, str, Batch]] = []

    def add(self, loss: Tensor, place: str, batch: Batch) -> float | Tensor:
        """Add the loss of a batch.

        Args:
            loss: [].
            place: where the loss was computed, in words, for the error message.
            batch: the rows.

        Returns:
            The loss, as a number if it has been read.

        Raises:
            FloatingPointError: this loss, or the previous one, is not finite.
        """
        loss = loss.detach()
        wide = loss.to(torch.promote_types(loss.dtype, torch.float32))
        sent = send(torch.stack([wide, self.mean_weight(batch.y, wide)]))
        self._sent.append((sent, place, batch))
        if sent[1] is None:
            return self._wait_for_first()
        if len(self._sent) > 1:
            self._wait_for_first()
        return loss

    def weight_of(self, batch: Batch, device: torch.device) -> Tensor:
        """Return the weight [] of a batch in the mean: the number of its rows that count."""
        return len(batch) * self.mean_weight(batch.y, torch.zeros((), dtype=torch.float64, device=device))

    def mean(self) -> float:
        """Return the mean over all rows; NaN if there were none, 0 if none has a class."""
        while self._sent:
            self._wait_for_first()
        return self.total / (self.weight or 1.0) if self.rows else math.nan

    def _wait_for_first(self) -> float:
        (loss, copied), place, batch = self._sent.pop(0)
        if copied is not None:
            copied.synchronize()
        value, weight = loss.tolist()
        if not math.isfinite(value):
            raise FloatingPointError(self.refusal(value, place, batch))
        rows = len(batch)
        self.total += value * (rows * weight)
        self.weight += rows * weight
        self.rows += rows
        return value


def send(loss: Tensor) -> Sent:
    """Start copying a loss from a GPU; return the copy and the event of its arrival, or elsewhere the loss itself and None."""
    if not loss.is_cuda:
        return loss, None
    copy = loss.to("cpu", non_blocking=True)
    return copy, torch.cuda.current_stream(loss.device).record_event()


__all__ = ["RunningLoss"]
