"""Risk heads of several voters on a CPU: one pass per voter with a shared trunk, equal to one pass per branch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench import compose, sculpt, vote
from workbench.errors import NonTensorOutputError
from workbench.training import fit, traced_step


class Network(nn.Module):
    """Convolutions with statistics and noise, then a head."""

    def __init__(self, norm: bool = True, rate: float = 0.2) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4) if norm else nn.Identity(),
            nn.ReLU(),
            nn.Dropout(rate),
            nn.Flatten(),
            nn.Linear(144, 8),
        )
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.trunk(x)))


class Encoder(nn.Module):
    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=rate, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x.flatten(1, 2)).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x[:, 0])[0][:, -1])


class Branching(Network):
    """Looks at numbers, which vmap refuses."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if float(y.sum()) > 0 else 2 * y


class Counting(Network):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def _wrapped(build: Callable[[], nn.Module], strategy: str = "auto", n_layers: int = 1) -> Any:
    torch.manual_seed(0)
    parts = vote.Wrapper(3, strategy=strategy), sculpt.Wrapper(n_layers=n_layers, strategy=strategy)
    return compose(*parts)(build())


def _rows() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(6, 1, 8, 8, generator=draw), torch.randn(6, 1, generator=draw)


def _step(wrapped: Any) -> list[Tensor]:
    """Loss, gradients, buffers and the state of random draws after a step in training, then an answer with its risks."""
    x, y = _rows()
    torch.manual_seed(2)
    loss = wrapped.train().loss(F.mse_loss, x, y)
    loss.backward()
    state = torch.get_rng_state()
    with torch.no_grad():
        answer, risk = wrapped.eval()(x, return_risk=True)
    gradients = [p.grad for p in wrapped.parameters() if p.grad is not None]
    return [loss.detach(), *gradients, *wrapped.buffers(), answer, risk.aleatoric, risk.epistemic, risk.total, state]


@pytest.mark.parametrize("n_layers", [1, 2])
@pytest.mark.parametrize("build", [Network, Encoder, Recurrent, Branching, Counting])
def test_numbers_and_draws_are_those_of_a_pass_for_each_branch(build: type[nn.Module], n_layers: int) -> None:
    wrapped, looped = _wrapped(build, n_layers=n_layers), _wrapped(build, "loop", n_layers=n_layers)
    ours, theirs = _step(wrapped), _step(looped)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert getattr(wrapped, "calls", 0) == getattr(looped, "calls", 0)


@pytest.mark.parametrize("build", [Network, Encoder, Recurrent])
def test_voters_run_once_each(build: type[nn.Module]) -> None:
    wrapped = _wrapped(build)
    _step(wrapped)
    for row in wrapped.explain().rows:
        assert row[2:4] == ("vmap", "3 passes, and 6 of the last layers")


class Kept:
    """An object with the features of one voter."""

    def __init__(self, features: Tensor) -> None:
        self.features = features


class Saying(Network):
    """Gives out what it makes of the features that both heads share, and no tensor."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = [make]

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        features = F.relu(self.trunk(x))
        return self.head(features), self.make[0](features)


@pytest.mark.parametrize("make", [Kept, lambda features: float(features.detach().sum())])
def test_what_is_no_tensor_is_not_taken_from_one_voter(make: Callable[[Tensor], Any]) -> None:
    wrapped, x = _wrapped(lambda: Saying(make)).eval(), _rows()[0]
    with torch.no_grad(), pytest.raises(NonTensorOutputError):
        wrapped(x, return_risk=True)


class Remembering(Network):
    """Writes into a buffer where features are large, which they are in some voters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        features = F.relu(self.trunk(x))
        if float(features.sum()) > 5:
            self.largest += features.detach().max()
        return self.head(features)


def test_buffers_that_some_voters_write_into_are_those_of_a_pass_for_each_branch() -> None:
    wrapped, looped, x = _wrapped(Remembering).eval(), _wrapped(Remembering, "loop").eval(), _rows()[0]
    with torch.no_grad():
        torch.testing.assert_close(wrapped(x, return_risk=True)[0], looped(x, return_risk=True)[0])
    (largest,) = [buffer for name, buffer in wrapped.named_buffers() if "largest" in name]
    assert (largest > 0).tolist() == [True, False, False]
    assert all(map(torch.equal, wrapped.buffers(), looped.buffers()))


def test_a_model_that_vmap_refuses_runs_as_ever() -> None:
    wrapped = _wrapped(Branching)
    _step(wrapped)
    assert all(row[2] == "loop" for row in wrapped.explain().rows)


def test_answers_and_gradients_are_those_of_networks_by_hand() -> None:
    wrapped, (x, y) = _wrapped(Network).eval(), _rows()
    voters = [copy.deepcopy(voter).eval() for voter in wrapped.voters()]
    answer, risk = wrapped(x, return_risk=True)
    F.mse_loss(answer, y).backward()
    by_hand = torch.stack([voter(x) for voter in voters])
    F.mse_loss(by_hand.mean(0), y).backward()
    torch.testing.assert_close(answer, by_hand.mean(0))
    torch.testing.assert_close(risk.epistemic, by_hand.std(0, correction=0))
    (trained,) = [p for p in wrapped.parameters() if p.shape == (3, 8, 144)]
    torch.testing.assert_close(trained.grad, torch.stack([voter.trunk[5].weight.grad for voter in voters]))


@pytest.mark.slow
def test_steps_with_noise_in_front_of_heads_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced_step, "MIN_STEPS", 2)
    monkeypatch.setattr(traced_step, "MIN_LONG_STEPS", 2)
    monkeypatch.setattr(traced_step, "_faster", lambda recorded: True)
    made: list[traced_step.TracedStep] = []
    init = traced_step.TracedStep.__init__

    def noted(self: traced_step.TracedStep, *args: Any) -> None:
        init(self, *args)
        made.append(self)

    monkeypatch.setattr(traced_step.TracedStep, "__init__", noted)
    draw = torch.Generator().manual_seed(1)
    rows = torch.randn(32, 1, 8, 8, generator=draw), torch.randn(32, 1, generator=draw)
    options: dict[str, Any] = {"epochs": 5, "batch_size": 8, "validation": 0, "progress": False}
    wrapped, eager = _wrapped(lambda: Encoder(0.1)), _wrapped(lambda: Encoder(0.1))
    fit(wrapped, rows, **options)
    fit(eager, rows, strategy="eager", **options)
    assert made[0].off == ""
    assert made[0].replays > 10
    assert all(map(torch.equal, wrapped.state_dict().values(), eager.state_dict().values()))
