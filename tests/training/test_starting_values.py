"""Heads that start at the scale of counts and positive targets: compared with a generalized linear model, closed forms and plain copies."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributions as families
from sklearn.linear_model import PoissonRegressor
from torch import Tensor, nn

import workbench
from workbench import compose, sample, sculpt, vote
from workbench.distributions import FromTorch

SLOPES = torch.tensor([[0.2], [-0.1], [0.15]])


def network(outputs: int = 1, last: nn.Module | None = None) -> nn.Sequential:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, outputs), *([last] if last else []))


def counts(level: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, 3, generator=generator)
    return x, torch.poisson(level * torch.exp(x @ SLOPES), generator=generator)


def glm_loss(x: Tensor, y: Tensor) -> float:
    """Negative log-likelihood of a Poisson regression by scikit-learn."""
    rate = PoissonRegressor(alpha=0).fit(x.numpy(), y[:, 0].numpy()).predict(x.numpy())
    return -families.Poisson(torch.as_tensor(rate)).log_prob(y[:, 0].double()).mean().item()


def loss_after(wrapped: Any, x: Tensor, y: Tensor, **options: Any) -> float:
    workbench.fit(wrapped, (x, y), progress=False, **options)
    return -wrapped.eval().predictive(x).log_prob(y).mean().item()


def start_of(wrapped: Any, x: Tensor, y: Tensor, **options: Any) -> Any:
    """The model as `fit` starts it: nothing is learned at a rate this small."""
    workbench.fit(wrapped, (x, y), epochs=1, lr=1e-12, validation=0, progress=False, **options)
    return wrapped.eval()


@pytest.mark.slow
@pytest.mark.parametrize("level", [150.0, 0.05])
@pytest.mark.parametrize("family", [families.Poisson, families.NegativeBinomial])
def test_a_few_epochs_come_near_a_poisson_regression(family: type, level: float) -> None:
    x, y = counts(level)
    assert loss_after(sculpt.Wrapper(family)(network()), x, y, epochs=10) < glm_loss(x, y) + 0.2


@pytest.mark.parametrize(
    "method", [vote.Wrapper(2), vote.Wrapper(2, share=1), vote.Wrapper(2, share="rank1"), sample.Wrapper(2)], ids=repr
)
def test_every_voter_and_sample_starts_there(method: Any) -> None:
    x, y = counts(150.0)
    wrapped = start_of(compose(method, sculpt.Wrapper(families.NegativeBinomial))(network()), x, y)
    torch.testing.assert_close(wrapped(x).mean(), y.mean(), rtol=0.4, atol=0)
    if method == vote.Wrapper(2):
        rates = [voter((x - x.mean(0)) / x.std(0, correction=0)).exp() for voter in wrapped.voters()]  # times its r
        for rate, r in zip(rates, wrapped.predictive(x).risk[0].exp(), strict=True):
            torch.testing.assert_close((rate * r).mean(), y.mean(), rtol=0.4, atol=0)


STARTS = {
    "Poisson": lambda mean: families.Poisson(mean),
    "Geometric": lambda mean: families.Geometric(1 / (1 + mean)),
    "NegativeBinomial": lambda mean: families.NegativeBinomial(torch.full_like(mean, 5.0), logits=(mean / 5).log()),
    "Exponential": lambda mean: families.Exponential(1 / mean),
    "Gamma": lambda mean: families.Gamma(torch.full_like(mean, 4.0), 4 / mean),
    "HalfNormal": lambda mean: families.HalfNormal(mean * (torch.pi / 2) ** 0.5),
    "LogNormal": lambda mean: families.LogNormal(mean.log() - 0.5 * 0.3**2, torch.full_like(mean, 0.3)),
    "Weibull": lambda mean: families.Weibull(mean / families.Weibull(1.0, 2.0).mean, torch.full_like(mean, 2.0)),
}


@pytest.mark.parametrize("name", STARTS)
def test_raw_outputs_by_moments_give_these_moments(name: str) -> None:
    expected = STARTS[name](torch.tensor([0.05, 150.0], dtype=torch.float64))
    raw = FromTorch(name).start(expected.mean, expected.variance)
    started = FromTorch(name).at(raw[0], raw[1:])
    torch.testing.assert_close(started.mean, expected.mean)
    torch.testing.assert_close(started.stddev, expected.stddev, rtol=0.02, atol=0)  # Weibull's is an approximation


@pytest.mark.parametrize("name", STARTS)
def test_each_column_starts_at_its_own_scale(name: str) -> None:
    x, _ = counts(1.0)
    levels = torch.tensor([0.05, 1.0, 400.0])
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        y = STARTS[name](levels.expand(600, 3).clone()).sample()
    mean = start_of(sculpt.Wrapper(getattr(families, name))(network(3)), x, y)(x).mean(0)
    torch.testing.assert_close(mean[[0, 2]], y.mean(0)[[0, 2]], rtol=0.5, atol=0)


def test_what_is_near_is_left_to_the_last_bit() -> None:
    x, y = counts(1.0)
    wrapped, plain = (sculpt.Wrapper(families.Poisson)(network()) for _ in range(2))
    start_of(wrapped, x, y)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(wrapped.state_dict()[name], value, rtol=0, atol=1e-8)


@pytest.mark.parametrize("options", [{"standardize": False}, {}], ids=["in original units", "trained before"])
def test_a_trained_model_is_left_where_it_is(options: dict[str, Any]) -> None:
    x, y = counts(150.0)
    wrapped = sculpt.Wrapper(families.Poisson)(network())
    if not options:
        start_of(wrapped, x, y / 150 // 1)
    before = copy.deepcopy(wrapped.state_dict())
    start_of(wrapped, x, y, **options)
    torch.testing.assert_close(wrapped.state_dict()["2.bias"], before["2.bias"], rtol=0, atol=1e-8)


class Doubled(nn.Module):
    def forward(self, raw: Tensor) -> Tensor:
        return 2 * raw


class Swapped(nn.Module):
    """Its last registered layer is not the last to run."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(16, 1), nn.Linear(3, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


class Frozen(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
        self[2].bias.requires_grad_(False)


@pytest.mark.parametrize(
    "model",
    [
        network(last=Doubled()),
        network(last=nn.Softplus()),
        Swapped(),
        Frozen(),
        nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1, bias=False)),
    ],
    ids=["doubled", "softplus", "swapped", "frozen", "no bias"],
)
def test_other_last_layers_are_left_as_they_are(model: nn.Module) -> None:
    x, y = counts(150.0)
    for distribution in (families.Poisson, families.NegativeBinomial):
        wrapped = sculpt.Wrapper(distribution)(copy.deepcopy(model))
        before = copy.deepcopy(wrapped.state_dict())
        start_of(wrapped, x, y)
        for name, value in before.items():
            torch.testing.assert_close(wrapped.state_dict()[name], value, rtol=0, atol=1e-8)


@pytest.mark.parametrize("family", [families.Beta, families.Dirichlet, sculpt.Normal])
def test_other_distributions_are_left_as_they_are(family: type) -> None:
    x, _ = counts(1.0)
    y = torch.softmax(torch.cat([x @ SLOPES, x @ SLOPES - 4, x @ SLOPES - 4], 1), 1)
    wrapped, plain = (sculpt.Wrapper(family)(network(3)) for _ in range(2))
    start_of(wrapped, x, y)
    for name in ("2.bias", "2.weight"):
        torch.testing.assert_close(wrapped.state_dict()[name], plain.state_dict()[name], rtol=0, atol=1e-8)


def test_counts_of_nothing_and_rows_out_of_sight_train_as_ever() -> None:
    x, y = counts(150.0)
    wrapped = sculpt.Wrapper(families.Poisson)(network())
    workbench.fit(wrapped, (x, torch.zeros_like(y)), epochs=1, progress=False)
    wrapped = sculpt.Wrapper(families.Poisson)(network())
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=64)
    workbench.fit(wrapped, loader, epochs=1, lr=1e-12, validation=0, progress=False)
    torch.testing.assert_close(wrapped.state_dict()["2.bias"], network().state_dict()["2.bias"], rtol=0, atol=1e-8)


def test_maps_of_counts_start_at_their_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(64, 2, 6, 6, generator=generator)
    y = torch.poisson(300 * x.mean(1, keepdim=True), generator=generator)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 1))
    wrapped = start_of(sculpt.Wrapper(families.NegativeBinomial)(model), x, y)
    torch.testing.assert_close(wrapped(x).mean(), y.mean(), rtol=0.4, atol=0)


@pytest.mark.slow
def test_files_and_checkpoints_go_on_from_there(tmp_path: Path) -> None:
    x, y = counts(150.0)

    def made() -> Any:
        return compose(vote.Wrapper(2), sculpt.Wrapper(families.NegativeBinomial))(network())

    class Break(Exception):
        pass

    def stop(progress: Any) -> None:
        if progress.epoch == 2:
            raise Break

    whole, broken = made(), made()
    workbench.fit(whole, (x, y), epochs=4, progress=False)
    with pytest.raises(Break):
        workbench.fit(broken, (x, y), epochs=4, progress=False, checkpoint=tmp_path / "state", callback=stop)
    resumed = made()
    workbench.fit(resumed, (x, y), epochs=4, progress=False, checkpoint=tmp_path / "state")
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
    workbench.save(whole, tmp_path / "model.safetensors")
    again = workbench.load(tmp_path / "model.safetensors", network()).eval()
    assert torch.equal(again(x), whole.eval()(x))
