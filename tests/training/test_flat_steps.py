"""Models and losses through which no gradient passes are refused; those that train in part are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.training_models import WRAPPERS, options, plane, quiet, same, weights
from torch import Tensor, nn

from workbench import vote


class End(nn.Module):
    """A linear layer and what follows it."""

    def __init__(self, end: Callable[..., Tensor], hard_in_training: bool = True) -> None:
        super().__init__()
        self.linear, self.end, self.hard_in_training = nn.Linear(2, 1), end, hard_in_training

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return self.end(y) if self.hard_in_training or not self.training else y


class Scaled(End):
    """A factor is trained, though the layer before the rounding is not."""

    def __init__(self) -> None:
        super().__init__(torch.round)
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * super().forward(x)


FLAT: dict[str, Callable[..., Tensor]] = {
    "round": torch.round,
    "floor": lambda z: 2 * torch.floor(z).clamp(-3, 3) + 1,
    "sign": lambda z: torch.cat([z.sign(), z.ceil()], 1).sum(1, keepdim=True),
    "division with rounding_mode": lambda z: torch.div(z, 0.5, rounding_mode="floor"),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", FLAT)
def test_a_model_that_ends_in_a_step_is_refused(name: str, wrapper: str) -> None:
    wrapped = WRAPPERS[wrapper]()(End(FLAT[name]))
    start = weights(wrapped)
    with pytest.raises(ValueError, match=rf"only through .*{name}, whose gradient is zero.*outside the wrapped model"):
        quiet(wrapped, plane(), **options())
    assert same(weights(wrapped), start)


@pytest.mark.parametrize("folds", [None, 2])
def test_a_loss_that_rounds_is_refused(folds: int | None) -> None:
    wrapped: Any = vote.Wrapper(2)(nn.Linear(2, 1))
    start = weights(wrapped)
    with pytest.raises(ValueError, match=r"only through round, whose gradient is zero"):
        quiet(wrapped, plane(), **options(criterion=lambda p, t: (p.round() - t).abs().mean(), folds=folds))
    assert same(weights(wrapped), start)


@pytest.mark.parametrize(
    "model",
    [
        End(lambda z: z + (z.round() - z).detach()),
        End(torch.round, hard_in_training=False),
        End(lambda z: z.frac() + z / 3),
        Scaled(),
    ],
    ids=["straight through", "only in evaluation", "division", "in part"],
)
def test_what_trains_is_trained(model: nn.Module) -> None:
    wrapped: Any = vote.Wrapper(2)(model)
    start = weights(wrapped)
    quiet(wrapped, plane(), **options(validation=0))
    assert not same(weights(wrapped), start)
