"""What a model adds to what its last layer gives is part of the raw numbers of risk heads as well: that is told."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import WorkbenchWarning, compose, fit, sculpt, vote
from workbench.data.reader import data_of
from workbench.models import tabular

pytestmark = pytest.mark.usefixtures("seeded")


class Skip(nn.Module):
    """A forecaster of the next values: the latest one, and what a network adds to it."""

    def __init__(self, share: float = 1.0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        return self.share * x[:, -1:] + self.net(x - x[:, -1:])


class Unit(Skip):
    """Changes in units that the window says: nothing is added."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x - x[:, -1:]) * x.std(1, keepdim=True)


class Within(nn.Module):
    """A residual block before the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.block(x).relu())


def rows() -> tuple[Tensor, Tensor]:
    series = torch.randn(200).cumsum(0)
    x = series.unfold(0, 10, 1)
    return x[:, :8].contiguous(), x[:, 8:].contiguous()


def said(model: nn.Module, wrapper: Any, given: Any = None) -> list[str]:
    wrapped = wrapper(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(wrapped, given or rows(), epochs=1, progress=False)
    return [str(warning.message) for warning in caught if issubclass(warning.category, WorkbenchWarning)]


@pytest.mark.parametrize(
    "wrapper", [sculpt.Wrapper(), sculpt.Wrapper(n_layers=1), compose(vote.Wrapper(2), sculpt.Wrapper())]
)
def test_what_is_added_behind_the_last_layer_is_told_once(wrapper: Any) -> None:
    (message,) = said(Skip(), wrapper)
    assert "net.2" in message
    assert "add it outside" in message


@pytest.mark.parametrize("model", [Unit(), Within(), nn.Linear(8, 2), Skip(share=0.0)], ids=lambda m: type(m).__name__)
def test_all_else_is_silent(model: nn.Module) -> None:
    assert said(model, sculpt.Wrapper()) == []


def test_models_without_risk_heads_and_tables_are_silent() -> None:
    assert said(Skip(), vote.Wrapper(2)) == []
    x, y = torch.randn(100, 3), torch.randn(100, 1)
    table = data_of((x, y))
    assert said(tabular(table), sculpt.Wrapper(), table) == []


def test_nothing_is_changed_by_the_look() -> None:
    model = Skip()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    wrapped: Any = sculpt.Wrapper()(model)
    with pytest.warns(WorkbenchWarning, match="added behind it"):
        wrapped._workbench.methods[0].check(wrapped, (rows()[0],), {})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
