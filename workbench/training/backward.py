"""Loss and gradients for custom training loops, in the ways of `fit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from workbench.core.batches.rows import Batch
from workbench.core.calls.model_by_model import backward
from workbench.core.wrapped import Wrapped
from workbench.engine.tree import map_tensors
from workbench.training.traced_step import TracedStep
from workbench.training.unshadowed import unshadowed

PER_STEP = 4  # remaining steps assumed per step so far, since the length of a custom loop is unknown


class Backward:
    """Replacement of `wrapped.loss(criterion, x, y).backward()` in custom training loops that takes the steps of `fit`.

    Voters that share nothing trained are differentiated one after another, so that only the activations of one are in memory; steps of small
    models are replayed from a graph. Loss, gradients, buffers and random draws are those of that line: on the CPU to the last bit, on a GPU up
    to rounding. A graph is recorded after some tens of calls; whatever could differ from call to call runs eagerly. Anything may happen between
    two calls: optimizer, schedule, clipping.

    Args:
        wrapped: the model, in training mode.
        criterion: criterion(prediction, target) -> scalar; None: only the likelihood of the risk heads.

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
        """Accumulate the gradients of one batch in the parameters.

        Args:
            x, y: as for `wrapped.loss`.

        Returns:
            The detached loss [].
        """
        self._calls += 1
        # a copy, since a model that writes into its input would do so again while a graph is recorded
        copied = map_tensors(lambda t: t.clone(), x)
        step = self._traced.take(Batch(None, copied, y), PER_STEP * self._calls)
        if step is not None:
            step.backward()
            return step.loss
        return backward(self._wrapped, self._criterion, x, y)

    def _loss(self, batch: Batch) -> Tensor:
        return unshadowed(self._wrapped, "loss")(self._criterion, batch.x, batch.y)


__all__ = ["Backward"]
