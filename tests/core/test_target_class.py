"""A wrapper applied to a class, one of its methods or one of its parts: instances are wrapped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.models import mlp
from helpers.target_models import Coder, Outer, answers, used
from torch import Tensor, nn

from workbench import is_wrapped, sample, vote


@vote.Wrapper(3)
class Decorated(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@vote.Wrapper  # type: ignore[arg-type]  # a checker wants the parentheses
class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


ByMethod: Any = vote.Wrapper(3)(Coder, method="encode")
ByPart: Any = vote.Wrapper(3)(Outer, at="backbone.decoder")


@sample.Wrapper(3)
@dataclass(eq=False)
class AsDataclass(nn.Module):
    width: int = 4

    def __post_init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, self.width), nn.Tanh(), nn.Linear(self.width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@pytest.mark.parametrize("cls", [Decorated, Bare, AsDataclass])
def test_instances_of_decorated_classes_give_risk_and_are_what_they_are(cls: Any) -> None:
    net = cls().eval()
    x = torch.randn(5, 3)
    assert isinstance(net, cls)
    assert is_wrapped(net)
    _, risk = net(x, return_risk=True)
    assert bool((risk > 0).any())
    twin = cls()
    twin.load_state_dict(net.state_dict())
    torch.manual_seed(1)
    expected = net(x)
    torch.manual_seed(1)
    assert torch.equal(twin.eval()(x), expected)
    if cls is AsDataclass:
        assert (net.width, cls(width=6).net[0].out_features) == (4, 6)


def test_a_class_wrapped_in_a_method_or_a_part_builds_such_instances() -> None:
    x = torch.randn(5, 3)
    coder = ByMethod().eval()
    assert issubclass(type(coder), Coder)
    code, risk = coder.encode(x, return_risk=True)
    assert torch.allclose(code, answers(coder, lambda voter: voter.encode(x)).mean(0), atol=1e-6)
    assert risk.shape == (5, 2)
    assert torch.allclose(coder(x), coder.decode(code), atol=1e-6)
    assert used(coder) == {n for n in Coder().state_dict() if n.startswith(("first", "norm", "code"))}
    outer = ByPart().eval()
    assert issubclass(type(outer), Outer)
    assert not is_wrapped(outer)
    assert outer.backbone.decoder(code, return_risk=True)[1].shape == (5, 3)
    assert outer(x).shape == (5, 1)
    with pytest.raises(ValueError, match="nearest: encode"):
        vote.Wrapper()(Coder, method="encoding")()
