"""Progress of a training, as passed to callbacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.engine.effects.private_random import own_random


class Stopped(Exception):
    """Raised when a callback ends a training."""


@dataclass(frozen=True, eq=False)
class Progress:
    """State of a training, passed to `fit(..., callback=)` after each step of the optimizer and after each epoch.

    Args:
        epoch: current epoch, counted from 1.
        epochs: maximum number of epochs.
        step: number of steps so far in all epochs.
        steps: number of steps of all epochs; 0 for a DataLoader without a length.
        loss: loss of this step; after an epoch, the mean over its rows. On a GPU, and with folds (where it is the mean over the voters), the
            loss of a step is a tensor [] on the device of the model, since reading it would make the GPU wait.
        validation_loss: validation loss of the last validated epoch; NaN if there is none.
        lr: learning rate of the last step; with folds, the largest one.
        epoch_ended: True after an epoch, False after a step.
        wrapped: the model in its current state, in training mode after a step. To predict with it:
            `with workbench.core.method.evaluating(wrapped, whole=True), torch.no_grad(): ...`. Random draws of the callback do not change the
            training.
    """

    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float | Tensor
    validation_loss: float
    lr: float
    epoch_ended: bool
    wrapped: Any

    @property
    def fraction(self) -> float:
        """Share of the training that is done, between 0 and 1."""
        if self.steps:
            return min(1.0, self.step / self.steps)
        return (self.epoch if self.epoch_ended else self.epoch - 1) / self.epochs


Callback = Callable[[Progress], Any]


def call_back(callback: Callback, progress: Progress, seed: int, device: torch.device) -> None:
    """Call the callback with its own random state, restore the model's mode, and raise `Stopped` if the callback returns something true."""
    training = progress.wrapped.training
    with own_random(seed, device):
        stop = callback(progress)
    if progress.wrapped.training is not training:
        progress.wrapped.train(training)
    if stop:
        raise Stopped


__all__ = ["Callback", "Progress", "Stopped", "call_back"]
