"""Losses and gradients for training loops of one's own, by a graph where that is sure to give the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from workbench.core.batches.rows import Batch
from workbench.core.wrapped import Wrapped
from workbench.engine.tree import tree_map
from workbench.training.traced_step import TracedStep
from workbench.training.unshadowed import unshadowed

PER_STEP = 4  # steps that are to come, for each so far: how long a loop of one's own is going to be, nobody says


class Backward:
    """`wrapped.loss(criterion, x, y).backward()` for a training loop of one's own, taken by a graph as the steps of `fit` are.

    Loss, gradients, buffers and random draws are those of that line to the last bit. A graph is made after some tens of calls; whatever could
    differ from call to call is computed by that line. Between two calls the loop may do what it wants: optimizer, schedule, clipping.

    Args:
        wrapped: the model, in training mode.
        criterion: criterion(prediction, target) -> scalar; None for the likelihood of the risk heads alone.

    Example:
        >>> import torch
        >>> from workbench import vote
        >>> wrapped = vote.Wrapper(5)(torch.nn.Linear(2, 1)).train()
        >>> optimizer = torch.optim.Adam(wrapped.parameters())
        >>> backward = Backward(wrapped, torch.nn.functional.mse_loss)
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     loss = backward(torch.ones(4, 2), torch.ones(4, 1))
        ...     optimizer.step()
        >>> loss.requires_grad
        False
    """

    def __init__(self, wrapped: Wrapped, criterion: Callable[[Any, Any], Tensor] | None) -> None:
        self._wrapped, self._criterion, self._calls = wrapped, criterion, 0
        self._traced = TracedStep(wrapped, criterion, self._loss)

    def __call__(self, x: Any, y: Any) -> Tensor:
        """Add the gradients of one batch to those of the parameters.

        Args:
            x, y: as for `wrapped.loss`.

        Returns:
            The loss [], without gradients.
        """
        self._calls += 1
        # a copy, since a model that writes into its input would do so once more while a graph is made
        copied = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, x)
        step = self._traced.take(Batch(None, copied, y), PER_STEP * self._calls)
        if step is not None:
            step.backward()
            return step.loss
        loss = self._loss(Batch(None, x, y))
        loss.backward()
        return loss.detach()

    def _loss(self, batch: Batch) -> Tensor:
        return unshadowed(self._wrapped, "loss")(self._criterion, batch.x, batch.y)


__all__ = ["Backward"]
