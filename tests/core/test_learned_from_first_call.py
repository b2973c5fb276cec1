"""What the first call in a mode reveals about a model, on which later calls rely."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.reference_from_copies import ROWS, VOTERS
from torch import Tensor, nn

from workbench import sculpt, vote
from workbench.core.calls.predict import plan_of
from workbench.core.method import Call
from workbench.core.ownership import engine_of


class Norms(nn.Module):
    """Writes into the statistics of its batch norm, in evaluation mode, when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(3), nn.Linear(3, 1)

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        y = self.head(self.norm(x))
        if shift:
            self.norm.running_mean.add_(shift)
        return y


@pytest.mark.parametrize("strategy", ["loop", "replay"])
def test_statistics_are_written_once_for_all_branches(strategy: str) -> None:
    """Evaluation mode copies no statistics of torch's own layers, but for models that were seen to change them there."""
    with torch.no_grad():
        wrapped: Any = vote.Wrapper(VOTERS, share=1, strategy=strategy)(Norms()).eval()
        wrapped(torch.randn(ROWS, 3), 0.5)
        torch.testing.assert_close(wrapped.norm.running_mean, torch.full((3,), 0.5))
        wrapped(torch.randn(ROWS, 3), 0.25)
        torch.testing.assert_close(wrapped.norm.running_mean, torch.full((3,), 0.75))


def test_statistics_that_a_later_call_changes_are_not_taken_for_the_same() -> None:
    with torch.no_grad():
        wrapped: Any = vote.Wrapper(VOTERS, share=1, strategy="loop")(Norms()).eval()
        x = torch.randn(ROWS, 3)
        wrapped(x)
        with pytest.raises(RuntimeError, match=r"buffer norm\.running_mean, which it did not do in its first call"):
            wrapped(x, 0.5)


def test_heads_see_the_same_numbers_also_of_generators_that_torch_does_not_know() -> None:
    """A risk head stands beside the model's own: with noise of numpy's, drawn in every call, both get the same."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x) + float(np.random.normal())  # noqa: NPY002

    state = np.random.get_state()  # noqa: NPY002
    try:
        wrapped: Any = sculpt.Wrapper(n_layers=1, strategy="loop")(Noisy()).eval()
        with torch.no_grad():
            for parameter in wrapped.parameters():
                parameter.zero_()
            for _ in range(2):
                branched, _ = engine_of(wrapped).run(
                    plan_of(wrapped, Call(training=False, return_risk=True)), (torch.zeros(ROWS, 3),), {}
                )
                head, risk_head = branched.leaves[0]
                assert torch.equal(head, risk_head)
                assert bool(head.any())
    finally:
        np.random.set_state(state)  # noqa: NPY002
