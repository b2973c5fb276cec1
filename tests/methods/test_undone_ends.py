"""Which ends of limited range risk heads undo: those of several outputs, and none that the source does not show."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench import sculpt
from workbench.introspect.ends import ends_of

X = torch.randn(12, 2, generator=torch.Generator().manual_seed(0))
Y = torch.rand(12, 1, generator=torch.Generator().manual_seed(1))


class Several(nn.Module):
    """Outputs with and without an end, a positive one nested in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.line, self.share, self.size = (
            nn.Linear(2, 4),
            nn.Linear(4, 1),
            nn.Linear(4, 1),
            nn.Linear(4, 1),
        )

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.trunk(x)
        return {"line": self.line(h), "parts": (torch.sigmoid(self.share(h)), F.relu(self.size(h))[:, 0])}


class Moments(NamedTuple):
    mean: Tensor
    scale: Tensor


class Tupled(Several):
    def forward(self, x: Tensor) -> Any:
        named = super().forward(x)
        share, _ = named["parts"]
        return Moments(scale=share, mean=named["line"])


def test_each_of_several_outputs_has_its_own_end() -> None:
    torch.manual_seed(0)
    wrapped: Any = sculpt.Wrapper(example=X)(Several()).eval()
    state = wrapped.state_dict()
    h = X @ state["trunk.weight@sculpt"].T + state["trunk.bias@sculpt"]
    z = {
        name: h @ state[f"{name}.weight@sculpt"].T + state[f"{name}.bias@sculpt"] for name in ("line", "share", "size")
    }
    y, risk = wrapped(X, return_risk=True)
    torch.testing.assert_close(risk["line"], F.softplus(z["line"]))
    torch.testing.assert_close(
        risk["parts"][0], F.softplus(z["share"].sinh().where(z["share"] > 0, z["share"])), rtol=1e-4, atol=1e-6
    )
    torch.testing.assert_close(risk["parts"][1], F.softplus(z["size"] - 16)[:, 0], rtol=1e-4, atol=1e-6)
    targets = {"line": Y, "parts": (Y, Y[:, 0])}
    losses = [
        -torch.distributions.Normal(loc, scale + 1e-9).log_prob(target).mean()
        for loc, scale, target in (
            (y["line"], risk["line"], Y),
            (y["parts"][0], risk["parts"][0], Y),
            (y["parts"][1], risk["parts"][1], Y[:, 0]),
        )
    ]
    torch.testing.assert_close(wrapped.loss(None, X, targets), torch.stack(losses).mean(), rtol=1e-5, atol=1e-6)
    assert {name: end.function for name, end in ends_of(Tupled()).items()} == {"scale": "sigmoid"}


class Unclear(nn.Module):
    """Ends that the source does not show, or that are followed by arithmetic."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.last, self.kind = nn.Linear(2, 1), kind

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(x)
        if self.kind == "scaled":
            return 2 * F.softplus(y)
        if self.kind == "either":
            return F.softplus(y)
        return y


class Reused(nn.Module):
    """A relu inside, whose result the last layer reads and forward returns."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(2, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(self.inner(x))
        return self.last(h), h


def hooked(path: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 1), nn.Sigmoid())
    model.get_submodule(path).register_forward_hook(lambda module, args, output: output - 3)
    return model


class Written(nn.Module):
    """A sigmoid that is written into under another name, or that an expression assigns anew."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(2, 1)


class Multiplied(Written):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.last(x))
        same = y
        same.mul_(3)
        return y


class Added(Written):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.last(x)).clone()
        same = y
        same += 3
        return y


class Assigned(Written):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.last(x)).clone()
        same = y
        same[:] = 3 * y
        return y


class Walrus(Written):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.last(x))
        if (y := 3 * y).isfinite().all():
            return y
        return y


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(2, 1),
        nn.Sequential(nn.ReLU(), nn.Linear(2, 1)),
        nn.Sequential(nn.Linear(2, 1), nn.Softplus(beta=2)),
        Unclear("scaled"),
        Unclear("either"),
        hooked("1"),
        hooked(""),
        Multiplied(),
        Added(),
        Assigned(),
        Walrus(),
    ],
    ids=lambda model: type(model).__name__,
)
def test_other_models_stay_as_they_are(model: nn.Module) -> None:
    wrapped: Any = sculpt.Wrapper()(model).eval()
    assert not wrapped._workbench.methods[0].ends
    alone = copy.deepcopy(model).eval()
    state = {name.removesuffix("@sculpt"): value for name, value in wrapped.state_dict().items() if "@sculpt" in name}
    alone.load_state_dict(state)
    torch.testing.assert_close(wrapped(X, return_risk=True)[1], F.softplus(alone(X)))


@pytest.mark.parametrize("example", [None, X])
def test_a_relu_inside_is_not_raised(example: Tensor | None) -> None:
    wrapped: Any = sculpt.Wrapper(example=example)(Reused())
    assert "1" not in wrapped._workbench.methods[0].ends
    assert wrapped.state_dict()["inner.bias@sculpt"].abs().max() < 2
