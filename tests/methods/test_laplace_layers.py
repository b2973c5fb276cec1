"""Last layers that laplace cannot take, and outputs of others than the one it takes."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from helpers.laplace_models import FEATURES, ROWS, net, normal
from torch import Tensor, nn

from workbench import compose, fit, laplace, vote

X = normal(ROWS, FEATURES)


class LastIsFirst(nn.Module):
    """The layer that is registered last runs before the others."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(8, 2), nn.Linear(FEATURES, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


TWO_OUTPUTS = {"scores": "logits", "size": "values"}


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.scores, self.size = nn.Linear(FEATURES, 8), nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.body(x).tanh()
        return {"scores": self.scores(h), "size": self.size(h)}


@pytest.mark.parametrize(
    ("make", "wrapper", "says"),
    [
        (LastIsFirst, laplace.Wrapper(layer="body"), "depends on it in another way"),
        (LastIsFirst, compose(laplace.Wrapper(layer="body"), vote.Wrapper(2)), "depends on it in another way"),
        (lambda: nn.Sequential(net(), nn.Softplus()), laplace.Wrapper(), "depends on it in another way"),
        (TwoHeads, laplace.Wrapper(output=TWO_OUTPUTS), "the outputs of 'size' are values"),
    ],
)
def test_a_wrong_last_layer_is_refused_before_anything_is_trained(make: Any, wrapper: Any, says: str) -> None:
    model = make().double()
    y = {"scores": torch.arange(ROWS) % 3, "size": X[:, :1]} if isinstance(model, TwoHeads) else X[:, :2].abs()
    with pytest.raises(ValueError, match=says):
        wrapper.with_options(example=X)(model)
    wrapped = wrapper(model)
    before = copy.deepcopy(wrapped.state_dict())
    seen = []
    with pytest.raises(ValueError, match=says):
        fit(wrapped, (X, y), epochs=2, progress=False, callback=seen.append)
    assert not seen
    assert all(torch.equal(value, before[key]) for key, value in wrapped.state_dict().items())


@pytest.mark.parametrize("shared", [False, True])
def test_outputs_of_other_last_layers_are_told(shared: bool) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            h = self.first(x)
            return {"h": h, "y": self.last(h if shared else x)}

    wrapped: Any = laplace.Wrapper(noise=0.5)(Two())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        wrapped.fit(torch.randn(20, 3))
    assert [
        "'h'" in str(warning.message) and "its epistemic risk is 0" in str(warning.message) for warning in told
    ] == ([] if shared else [True])
