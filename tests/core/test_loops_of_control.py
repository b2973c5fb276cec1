"""Typical loops of reinforcement learning and generative models: target networks, losses without a target."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.models import mlp
from torch import Tensor, nn
from torch.nn import functional as F

from workbench import compose, sculpt, vote

WRAPPERS = {
    "vote": lambda: vote.Wrapper(3),
    "rank1": lambda: vote.Wrapper(3, share="rank1"),
    "sculpt": sculpt.Wrapper,
    "both": lambda: compose(vote.Wrapper(3), sculpt.Wrapper()),
}


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("share", [0.005, 0.5])
def test_a_target_network_follows_by_means_of_states(name: str, share: float) -> None:
    """The soft update of PyTorch's DQN tutorial: every entry of the state is averaged, that of the settings as well."""
    policy: Any = WRAPPERS[name]()(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    target = copy.deepcopy(policy)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter))
    expected = {
        key: p * share + q * (1 - share) for (key, p), q in zip(_named(policy), target.parameters(), strict=True)
    }
    new, old = policy.state_dict(), target.state_dict()
    for key in new:
        old[key] = new[key] * share + old[key] * (1 - share)
    target.load_state_dict(old)
    for key, parameter in _named(target):
        torch.testing.assert_close(parameter, expected[key])
    target.eval()(torch.randn(4, 3), return_risk=True)


def test_a_mean_of_states_with_other_settings_is_refused() -> None:
    wrapped = vote.Wrapper(3)(mlp())
    state = wrapped.state_dict()
    state["settings@workbench"] = state["settings@workbench"] + 0.5
    with pytest.raises(ValueError, match="holds no valid wrapper settings"):
        wrapped.load_state_dict(state)


def _named(model: nn.Module) -> list[tuple[str, Tensor]]:
    return list(nn.Module.named_parameters(model))


class Autoencoder(nn.Module):
    """Gives its own loss beside the reconstruction."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(3, 2), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        reconstruction = self.decoder(torch.tanh(self.encoder(x)))
        return {"reconstruction": reconstruction, "loss": F.mse_loss(reconstruction, x)}


def test_risk_heads_without_a_target_are_refused_with_what_to_give() -> None:
    wrapped, x = sculpt.Wrapper()(Autoencoder()), torch.randn(6, 3)
    with pytest.raises(ValueError, match=r"sculpt: .* y is None: give the target .* \(for an autoencoder the input\)"):
        wrapped.loss(lambda output, _: output["loss"], x, None)
    with pytest.raises(ValueError, match="y holds a target for none of the outputs"):
        wrapped.loss(lambda output, _: output["loss"], x, {})
    wrapped.loss(lambda output, _: output["loss"], x, x).backward()
    assert all(parameter.grad is not None for parameter in wrapped.parameters())


class Follower(nn.Module):
    """A model with a target that follows by moving averages inside forward (BYOL, Grill et al. 2020)."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.online, self.predictor = nn.Linear(3, 4), nn.Linear(4, 4)
        self.target = copy.deepcopy(self.online).requires_grad_(not frozen)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, other in zip(self.target.parameters(), self.online.parameters(), strict=True):
                mine.data.mul_(0.9).add_(other.data, alpha=0.1)
            target = self.target(b)
        return (2 - 2 * F.cosine_similarity(self.predictor(self.online(a)), target)).mean()


@pytest.mark.filterwarnings("ignore:vote. the model gives a number for all rows")
def test_a_target_inside_follows_in_each_voter_or_is_refused_with_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=r"'target\.weight'.* if it requires a gradient before wrapping"):
        vote.Wrapper(3)(Follower(frozen=True))(torch.randn(6, 3), torch.randn(6, 3))
    wrapped: Any = vote.Wrapper(3)(Follower(frozen=False))
    voters = [copy.deepcopy(voter) for voter in wrapped.voters()]
    optimizers = [
        torch.optim.SGD(model.parameters(), lr) for model, lr in [(wrapped, 0.3), *((v, 0.1) for v in voters)]
    ]
    for _ in range(4):
        views = torch.randn(2, 6, 3)
        for optimizer in optimizers:
            optimizer.zero_grad()
        wrapped.loss(lambda loss, _: loss, tuple(views), None).backward()
        for voter in voters:
            voter(*views).backward()
        for optimizer in optimizers:
            optimizer.step()
    for key, parameter in _named(wrapped):
        torch.testing.assert_close(parameter, torch.stack([v.get_parameter(key.partition("@")[0]) for v in voters]))
