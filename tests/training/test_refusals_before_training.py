"""What a wrapper learns after training is refused before it, where the first rows show that it cannot be learned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import fit, laplace, neo
from workbench.outputs import Logits

X, LABELS = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3


class SumOfLayers(nn.Module):
    """Class scores that no single layer computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        return self.a(h) + self.b(h).tanh()


def mlp(activation: nn.Module, outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), activation, nn.Linear(8, outputs))


@pytest.mark.parametrize(
    ("wrapper", "model", "y", "says"),
    [
        (
            laplace.Wrapper(),
            mlp(nn.ReLU()),
            LABELS,
            r'laplace takes the outputs \[n, 3\] for values, .*output="logits"',
        ),
        (neo.Wrapper(density="auto"), mlp(nn.ReLU(), 1), X[:, :1], r"no output \[rows, classes\] .*another density\n"),
        (neo.Wrapper(density="energy"), mlp(nn.ReLU()), X[:, :3], r"the targets are values of shape \[\d+, 3\]"),
        (neo.Wrapper(density="vim", output="logits"), SumOfLayers(), LABELS, "must end in a linear layer"),
        (neo.Wrapper(density="ash", output="logits"), mlp(nn.Tanh()), LABELS, "which must not be negative"),
        (neo.Wrapper(per="image"), mlp(nn.ReLU()), X[:, :3], "the output has no positions"),
    ],
    ids=["class numbers", "no scores", "values", "no last layer", "negative features", "no positions"],
)
@pytest.mark.filterwarnings("ignore:the targets are class numbers")
def test_it_is_refused_before_training(wrapper: Any, model: nn.Module, y: Tensor, says: str) -> None:
    wrapped = wrapper(model)
    before = {name: value.clone() for name, value in wrapped.state_dict().items()}
    with pytest.raises(ValueError, match=says):
        fit(wrapped, (X, y), epochs=1, progress=False)
    after = wrapped.state_dict()
    assert {name: after[name] for name in before if not torch.equal(after[name], before[name])} == {}
    assert after.keys() == before.keys()


def test_class_numbers_are_refused_after_training_of_ones_own() -> None:
    with pytest.raises(ValueError, match=r'laplace takes the outputs \[n, 3\] for values, .*output="logits"'):
        laplace.Wrapper()(mlp(nn.ReLU())).fit([(X, LABELS)])


def test_what_the_first_rows_show_is_forgotten() -> None:
    wrapped = neo.Wrapper(density="ash", output="logits", example=X[:2])(mlp(nn.ReLU()))
    (method,) = wrapped._workbench.methods
    assert method.sites == []
    fit(wrapped, (X, LABELS), epochs=1, progress=False)
    assert method.sites == ["2.weight"]


def test_maps_are_trained_and_learned() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    images = torch.rand(20, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    wrapped = neo.Wrapper(per="image", density="energy", output=Logits(dim=1))(model)
    fit(wrapped, (images, (images[:, 0] > 0.5).long()), epochs=1, progress=False)
    assert wrapped.eval()(images, return_risk=True)[1].shape == (20,)
