"""Models that seed their random numbers in forward, as those with fixed random projections or hashes do (Reformer)."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.threads import in_thread
from torch import Tensor, nn

from workbench import compose, fit, sample, sculpt, vote


class Seeded(nn.Module):
    """Draws the same numbers in each call, as models with fixed random projections or hashes do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.fc, self.how = nn.Linear(3, 3), how
        self.generator = torch.Generator()

    def draw(self, x: Tensor) -> Tensor:
        if self.how == "seed":
            torch.manual_seed(0)
            return torch.randn(x.shape)
        if self.how == "fork":
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(0)
                return torch.randn(x.shape)
        if self.how == "held":
            return torch.randn(x.shape, generator=self.generator.manual_seed(1))
        return torch.randn(x.shape, generator=torch.Generator())

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x + self.draw(x))


SEEDED = ("seed", "fork", "held", "new")


@pytest.mark.parametrize("share", [None, 1])
@pytest.mark.parametrize("how", SEEDED)
def test_a_model_that_seeds_itself_draws_the_same_in_every_voter(how: str, share: int | None) -> None:
    wrapped: Any = vote.Wrapper(3, share=share)(Seeded(how)).eval()
    copies = wrapped.voters()
    for x in torch.randn(3, 4, 3):
        torch.manual_seed(0)  # the state that the model itself sets, so that it seems unchanged
        y, risk = wrapped(x, return_risk=True)
        answers = torch.stack([copy(x) for copy in copies])
        torch.testing.assert_close(y, answers.mean(0))
        torch.testing.assert_close(risk, answers.std(0, correction=0))


@pytest.mark.parametrize("how", SEEDED)
def test_vmap_refuses_a_model_that_seeds_itself(how: str) -> None:
    with pytest.raises(RuntimeError, match="the model"):
        vote.Wrapper(3, strategy="vmap")(Seeded(how)).eval()(torch.randn(4, 3), return_risk=True)


class SeededAround(Seeded):
    """The layer, too, runs while the model's own seed is set."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            return self.fc(x + torch.randn(x.shape))


NOISY = {**{how: partial(Seeded, how) for how in SEEDED}, "around": partial(SeededAround, "fork")}


@pytest.mark.parametrize("where", ["activations", "weights", "inputs"])
@pytest.mark.parametrize("how", NOISY)
def test_noise_on_a_model_that_seeds_itself_has_its_known_spread(how: str, where: Any) -> None:
    """One layer on values v with noise of scale s has the variance s^2 sum (v w)^2, or s^2 sum w^2 for noise on the inputs."""
    torch.manual_seed(1)
    model, x = NOISY[how]().eval(), torch.randn(4, 3)
    wrapped: Any = sample.Wrapper(100, sample.Normal(0.1), where=where)(model)
    values = torch.ones_like(x) if where == "inputs" else x + model.draw(x)
    expected = 0.1 * (values.square() @ model.fc.weight.square().T).sqrt()
    risks = [wrapped(x, return_risk=True)[1].detach() for _ in range(2)]
    for risk in risks:
        torch.testing.assert_close(risk, expected.detach(), rtol=0.25, atol=0)
    assert not torch.equal(*risks)


@pytest.mark.parametrize("where", ["activations", "weights", "inputs"])
@pytest.mark.parametrize("how", NOISY)
def test_a_model_that_seeds_itself_is_trained_with_other_noise_in_each_call(how: str, where: Any) -> None:
    wrapped: Any = sample.Wrapper(3, sample.Normal(0.1), where=where)(NOISY[how]()).train()
    x = torch.ones(4, 3)
    assert len({wrapped(x).sum().item() for _ in range(8)}) == 8


def test_a_seed_outside_repeats_the_noise_of_a_model_that_seeds_itself() -> None:
    wrapped: Any = sample.Wrapper(3, sample.Normal(0.1))(Seeded("seed")).eval()
    x = torch.ones(4, 3)

    def risks(draws: int) -> list[Tensor]:
        torch.manual_seed(0)  # which the model sets as well
        torch.randn(draws)
        return [wrapped(x, return_risk=True)[1] for _ in range(3)]

    wrapped(x, return_risk=True)
    first, again, other = risks(0), risks(0), risks(1)
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, other))


def test_epochs_of_a_model_that_seeds_itself_have_different_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    factors: list[float] = []
    plain = sample.Normal.apply

    def noted(self: Any, value: Tensor, *rest: Any) -> Tensor:
        noisy = plain(self, value, *rest)
        if not torch.is_inference_mode_enabled() and torch.is_grad_enabled():
            factors.append((noisy / value).flatten()[0].item())
        return noisy

    monkeypatch.setattr(sample.Normal, "apply", noted)
    wrapped: Any = sample.Wrapper(3, sample.Normal(0.1))(Seeded("seed"))
    factors.clear()
    fit(wrapped, (torch.ones(20, 3), torch.randn(20, 3)), epochs=3, batch_size=5, progress=False)
    of_steps = factors[-12:]  # the calls before them try the first batch, with the seed of the training
    assert len(set(of_steps)) == len(of_steps) == 12


def test_both_heads_see_the_same_noise_of_a_model_that_seeds_itself() -> None:
    """If both heads have the same weights, the risk is the softplus of the prediction."""

    class TwoHeads(Seeded):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc(torch.tanh(super().forward(x)))

    wrapped: Any = compose(sample.Wrapper(1, sample.Normal(0.3)), sculpt.Wrapper(n_layers=1))(TwoHeads("seed")).eval()
    with torch.no_grad():
        for name, parameter in wrapped.named_risk_parameters():
            parameter.copy_(wrapped.get_parameter(name.partition("@")[0]))
    x = torch.randn(4, 3)
    answers = [wrapped(x, return_risk=True) for _ in range(2)]
    for y, risk in answers:
        torch.testing.assert_close(risk.aleatoric, F.softplus(y))
    assert not torch.equal(answers[0][0], answers[1][0])


def test_in_a_thread_a_model_that_seeds_itself_is_refused() -> None:
    def train() -> None:
        fit(vote.Wrapper(2)(Seeded("seed")), (torch.ones(20, 3), torch.ones(20, 3)), epochs=1, progress=False)

    with pytest.raises(RuntimeError, match="train in the main thread"):
        in_thread(train)
