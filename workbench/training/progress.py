"""Progress of a training, for callbacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.engine.effects.private_random import own_random


class Stopped(Exception):
    """Whoever watches a training has ended it."""


@dataclass(frozen=True, eq=False)
class Progress:
    """What `fit(..., callback=)` says after each step of the optimizer and after each epoch.

    Args:
        epoch: the present epoch, counted from 1.
        epochs: how many there are at most.
        step: steps made so far in all epochs.
        steps: steps of all epochs; 0 if a DataLoader without a length does not say.
        loss: of this step, after an epoch the mean over its rows. On a GPU, and with folds, where it is the mean over the voters, that of a step
            is a tensor [] on the device of the model, since to look at it makes the GPU wait.
        validation_loss: of the last epoch that was validated, NaN if none was.
        lr: the learning rate of the last step; with folds the largest.
        epoch_ended: whether this is said after an epoch, not after a step.
        wrapped: the model as it is at this moment, in training mode after a step. To predict with it:
            `with workbench.core.method.evaluating(wrapped, whole=True), torch.no_grad(): ...`. What is drawn meanwhile does not change the
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
        """The share of the training that is done, between 0 and 1."""
        if self.steps:
            return min(1.0, self.step / self.steps)
        return (self.epoch if self.epoch_ended else self.epoch - 1) / self.epochs


Callback = Callable[[Progress], Any]


def call_back(callback: Callback, progress: Progress, seed: int, device: torch.device) -> None:
    """Call it, with random draws of its own and the model's mode as it was afterwards; `Stopped` is raised if it says so."""
    training = progress.wrapped.training
    with own_random(seed, device):
        stop = callback(progress)
    if progress.wrapped.training is not training:
        progress.wrapped.train(training)
    if stop:
        raise Stopped


__all__ = ["Callback", "Progress", "Stopped", "call_back"]
