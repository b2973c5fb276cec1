"""Average of the losses of batches, computed without waiting for a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from workbench.core.batches.rows import Batch
from workbench.core.outputs.meanings import IGNORED
from workbench.engine.tree import tensors
from workbench.training.default_losses import LossByMeaning, labelled_share

Sent = tuple[Tensor, torch.cuda.Event | None]
Added = tuple[Tensor, str, Batch]  # loss, place, rows
GROUP = 16  # losses that are copied from a GPU at a time, since each copy takes Python about as long as the backward pass of a layer
GROUP_BYTES = 2**26  # rows that may be kept, for the error message, until their losses are read


WITHOUT_CLASS = (
    f"a batch without any class (all are {IGNORED}), of which a criterion that takes the mean makes NaN: leave criterion out, which counts "
    "it as 0, or train with a larger batch_size"
)


class RunningLoss:
    """Mean over rows of the losses of batches; a loss that is not finite ends the training.

    Class numbers of -100 do not count; with class weights, the others count by their weight.

    Reading a number from a GPU waits until all queued work is done. So losses are copied asynchronously, in groups, and read after the next
    group has been started: the GPU is never idle, and a loss that is not finite is detected some batches later.

    Args:
        refusal: refusal(loss, place, batch) -> error message for a loss that is not finite.
        criterion: the loss of the training, which may have class weights.
    """

    def __init__(self, refusal: Callable[[float, str, Batch], str], criterion: Any = None) -> None:
        self.refusal = refusal
        weighted = isinstance(criterion, LossByMeaning) and criterion.class_weight is not None
        self.mean_weight: Callable[[Any, Tensor], Tensor] = criterion.mean_weight if weighted else labelled_share
        self.total, self.weight, self.rows = 0.0, 0.0, 0
        self._group: list[Added] = []
        self._group_bytes = 0
        self._sent: list[tuple[Sent, list[Added]]] = []

    def add(self, loss: Tensor, place: str, batch: Batch) -> float | Tensor:
        """Add the loss of a batch.

        Args:
            loss: [].
            place: where the loss was computed, in words, for the error message.
            batch: the rows.

        Returns:
            The loss, as a number if it has been read.

        Raises:
            FloatingPointError: this loss, or an earlier one, is not finite.
        """
        loss = loss.detach()
        self._group.append((loss.to(torch.promote_types(loss.dtype, torch.float32)), place, batch))
        if not loss.is_cpu:
            self._group_bytes += sum(leaf.nbytes for leaf in tensors((batch.x, batch.y, batch.source)))
            if len(self._group) < GROUP and self._group_bytes < GROUP_BYTES:
                return loss
        if not self._send_group():
            return self._wait_for_first()
        if len(self._sent) > 1:
            self._wait_for_first()
        return loss

    def _send_group(self) -> bool:
        """Start copying the losses of a group and their weights; return whether they come later."""
        group, self._group, self._group_bytes = self._group, [], 0
        losses, targets = [loss for loss, _, _ in group], [batch.y for _, _, batch in group]
        forms = {(target.shape, target.dtype) if isinstance(target, Tensor) else None for target in targets}
        if len(group) > 1 and len(forms) == 1 and None not in forms and self.mean_weight is labelled_share:
            stacked = torch.stack(losses)  # all at once, in a few operations
            shares = labelled_share(targets[0] if targets[0].is_floating_point() else torch.cat(targets), stacked)
            sent = send(torch.cat([stacked, shares]))
        else:
            sent = send(torch.stack([*losses, *map(self.mean_weight, targets, losses)]))
        self._sent.append((sent, group))
        return sent[1] is not None

    def weight_of(self, batch: Batch, device: torch.device) -> Tensor:
        """Return the weight [] of a batch in the mean: the number of its rows that count."""
        return len(batch) * self.mean_weight(batch.y, torch.zeros((), dtype=torch.float64, device=device))

    def mean(self) -> float:
        """Return the mean over all rows; NaN if there were none, 0 if none has a class."""
        if self._group:
            self._send_group()
        while self._sent:
            self._wait_for_first()
        return self.total / (self.weight or 1.0) if self.rows else math.nan

    def _wait_for_first(self) -> float:
        (copy, copied), group = self._sent.pop(0)
        if copied is not None:
            copied.synchronize()
        numbers = copy.tolist()
        for (_, place, batch), value, weight in zip(group, numbers, numbers[len(group) :], strict=False):
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
