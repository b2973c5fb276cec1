"""Adam for stacked voters, each with its own learning rate and weight decay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

BETAS = (0.9, 0.99)
EPSILON = 1e-8


class StackedAdam:
    """Adam (Kingma & Ba 2015) with decoupled weight decay (Loshchilov & Hutter 2019) on tensors that have one row per voter.

    Unlike torch's, it has one learning rate and weight decay per voter. Weight decay applies to weights (rows of two or more dimensions), not to
    biases and norms. It keeps an exponential moving average of the parameters (Polyak & Juditsky 1992).

    Args:
        parameters: tensors [voters, ...].
        lr: peak learning rates [voters].
        weight_decay: weight decays [voters].
        horizon: approximate number of steps over which the average extends.
        steps: number of steps of the whole training; if it is below `EVERY`, the average is updated in every step.
    """

    EVERY = 8  # steps between updates of the average, each of which costs a pass over all parameters

    def __init__(
        self, parameters: Sequence[Tensor], lr: Tensor, weight_decay: Tensor, horizon: float, steps: int
    ) -> None:
        self.parameters = list(parameters)
        self.first = [torch.zeros_like(p) for p in self.parameters]
        self.second = [torch.zeros_like(p) for p in self.parameters]
        self.average = [p.detach().clone() for p in self.parameters]
        self.lr = [self._along(lr, p) for p in self.parameters]
        self.decay = [self._along(lr * weight_decay, p) if p.dim() > 2 else None for p in self.parameters]
        self.keep = 1 - self.EVERY / max(2.5 * self.EVERY, horizon)
        self.every = self.EVERY if steps >= self.EVERY else 1
        self.steps = 0

    @staticmethod
    def _along(values: Tensor, like: Tensor) -> Tensor:
        return values.to(like).reshape(-1, *[1] * (like.dim() - 1))

    @torch.no_grad()
    def step(self, share: float) -> None:
        """Take one step along the gradients, and set them to None.

        Args:
            share: share of the peak learning rate.
        """
        self.steps += 1
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        beta1, beta2 = BETAS
        torch._foreach_lerp_(self.first, gradients, 1 - beta1)
        torch._foreach_mul_(self.second, beta2)
        torch._foreach_addcmul_(self.second, gradients, gradients, 1 - beta2)
        denominators = torch._foreach_sqrt(self.second)
        torch._foreach_div_(denominators, math.sqrt(1 - beta2**self.steps))
        torch._foreach_add_(denominators, EPSILON)
        updates = torch._foreach_mul(self.first, self.lr)
        for parameter, decay in zip(self.parameters, self.decay, strict=True):
            if decay is not None:
                parameter.mul_(1 - share * decay)
        torch._foreach_addcdiv_(self.parameters, updates, denominators, -share / (1 - beta1**self.steps))
        for parameter in self.parameters:
            parameter.grad = None
        if self.steps % self.every == 0:
            # follow closely at first, since the initial values carry no information
            torch._foreach_lerp_(self.average, self.parameters, 1 - self.keep if self.steps > 200 else 0.5)

    def state_dict(self) -> dict[str, Any]:
        """Return the state needed to resume: moments, average, number of steps."""
        return {"first": self.first, "second": self.second, "average": self.average, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state from `state_dict`."""
        for name in ("first", "second", "average"):
            for tensor, stored in zip(getattr(self, name), state[name], strict=True):
                tensor.copy_(stored)
        self.steps = state["steps"]
