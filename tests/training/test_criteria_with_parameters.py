"""Criteria that have parameters of their own, such as learned weights of several terms."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import WorkbenchWarning, fit, vote


class Weighed(nn.Module):
    """Squared errors with a learned variance (Kendall, Gal & Cipolla 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros(()))

    def forward(self, prediction: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(prediction, y) * (-self.log_variance).exp() + self.log_variance


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    return torch.randn(48, 5), torch.randn(48, 1)


@pytest.mark.parametrize("options", [{}, {"folds": 2}])
def test_parameters_that_no_optimizer_holds_are_told(options: Any, data: tuple[Tensor, Tensor]) -> None:
    criterion = Weighed()
    with pytest.warns(
        WorkbenchWarning, match=r"this Weighed has parameters of its own \(log_variance\).*optimizer=lambda"
    ):
        fit(vote.Wrapper(2)(nn.Linear(5, 1)), data, criterion=criterion, epochs=2, progress=False, **options)
    assert criterion.log_variance.item() == 0


@pytest.mark.parametrize("frozen", [False, True])
def test_what_the_warning_says_is_right(frozen: bool, data: tuple[Tensor, Tensor]) -> None:
    criterion = Weighed().requires_grad_(not frozen)
    optimizer = lambda parameters: torch.optim.Adam([*parameters, *criterion.parameters()], 0.1)  # noqa: E731
    options: Any = {} if frozen else {"optimizer": optimizer}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "criterion:")
        fit(vote.Wrapper(2)(nn.Linear(5, 1)), data, criterion=criterion, epochs=2, progress=False, **options)
    assert (criterion.log_variance.item() == 0) is frozen
