"""Voters of models whose constructor draws the weights start in the scale that it gives them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from workbench import compose, sculpt, vote
from workbench.methods.drawn_weights import looks_drawn

INITIALIZATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "default": lambda weight: nn.init.kaiming_uniform_(weight, a=math.sqrt(5)),
    "He": lambda weight: nn.init.kaiming_normal_(weight, nonlinearity="relu"),
    "Xavier": nn.init.xavier_uniform_,
    "orthogonal": nn.init.orthogonal_,
    "normal": lambda weight: nn.init.normal_(weight, std=0.02),
    "truncated": lambda weight: nn.init.trunc_normal_(weight, std=0.02),
}


class Sine(nn.Module):
    """Layer of a SIREN (Sitzmann et al. 2020), whose constructor draws weights that are 30 times smaller than those of nn.Linear."""

    def __init__(self, inputs: int, outputs: int, bound: float) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(30 * self.linear(x))


def siren(seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        bound = math.sqrt(6 / 64) / 30
        last = nn.Linear(64, 1)
        nn.init.uniform_(last.weight, -bound, bound)
        return nn.Sequential(Sine(2, 64, 1 / 2), Sine(64, 64, bound), Sine(64, 64, bound), last).to(dtype)


def spread(*models: nn.Module) -> float:
    x = torch.rand(200, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        return float(torch.stack([model(x) - model(x).mean() for model in models]).std())


@pytest.fixture(autouse=True)
def seeded() -> object:
    with torch.random.fork_rng([]):
        torch.manual_seed(1)
        yield


@pytest.mark.parametrize(
    "shape", [(1, 8), (64, 1), (64, 64), (256, 8), (64, 16, 3, 3), (10, 128), (3, 2), (1, 1), (24, 1, 3, 3)]
)
@pytest.mark.parametrize("name", INITIALIZATIONS)
def test_weights_of_any_initialization_look_drawn(name: str, shape: tuple[int, ...]) -> None:
    assert all(looks_drawn(INITIALIZATIONS[name](torch.empty(shape))) for _ in range(10))


def test_a_row_of_padding_is_left_out() -> None:
    assert looks_drawn(nn.Embedding(40, 32, padding_idx=0).weight)


def test_trained_weights_do_not_look_drawn() -> None:
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer, x = torch.optim.Adam(net.parameters(), 1e-2), torch.randn(256, 8)
    assert all(looks_drawn(weight) for weight in net.parameters() if weight.dim() > 1)
    for _ in range(150):
        optimizer.zero_grad()
        (net(x) - x[:, :1] * x[:, 1:2]).square().mean().backward()
        optimizer.step()
    assert not all(looks_drawn(weight) for weight in net.parameters() if weight.dim() > 1)


def test_filters_that_are_smooth_or_of_several_sizes_do_not_look_drawn() -> None:
    weight = torch.randn(32, 16, 3, 3)
    assert not looks_drawn(weight + torch.randn(32, 1, 1, 1)), "means of filters"
    assert not looks_drawn(weight * torch.linspace(0.1, 2, 16)[:, None, None]), "some inputs matter more"
    assert not looks_drawn(weight**3), "heavy tails"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("wrapper", [vote.Wrapper(5), compose(vote.Wrapper(5), sculpt.Wrapper())])
def test_voters_start_in_the_scale_of_the_model(wrapper: vote.Wrapper, dtype: torch.dtype) -> None:
    wrapped = wrapper(siren(0, dtype))
    for voter in wrapped.voters():
        for drawn, weight in zip(voter.parameters(), siren(0).parameters(), strict=True):
            if weight.dim() > 1:
                assert drawn.std().item() == pytest.approx(weight.std().item(), rel=0.35)
                assert not torch.equal(drawn, weight)
    assert spread(*wrapped.float().voters()) == pytest.approx(spread(*map(siren, range(1, 6))), rel=0.7)


def test_priors_have_the_scale_of_the_model() -> None:
    prior = vote.Wrapper(5, prior=1.0)(siren(0))
    without = vote.Wrapper(5)(siren(0))
    assert spread(*prior.voters()) < 4 * spread(*without.voters())


def test_zero_biases_and_forget_gates_stay() -> None:
    net = nn.ModuleDict({"rnn": nn.LSTM(4, 8), "head": nn.Linear(8, 1)})
    for name, parameter in net.named_parameters():
        if "bias" in name:
            nn.init.zeros_(parameter)
    nn.init.ones_(net["rnn"].bias_ih_l0.data[8:16])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            return self.net["head"](self.net["rnn"](x)[0])

    for voter in vote.Wrapper(3)(Model()).voters():
        for name, parameter in voter.named_parameters():
            if "bias" in name:  # the default is uniform within 1 / sqrt(8); what is constant gets noise of a tenth
                assert (parameter - net.get_parameter(name.removeprefix("net."))).square().mean().sqrt() < 0.1


def test_trained_models_are_drawn_by_their_layers_alone() -> None:
    layer = nn.Linear(16, 32)
    with torch.no_grad():
        layer.weight.mul_(torch.linspace(0, 9, 16))
        layer.bias.zero_()
    wrapped = vote.Wrapper(3)(layer)
    for voter in wrapped.voters():
        assert voter.weight.abs().max() <= 1 / 4  # the bound of nn.Linear, 1 / sqrt(16)
        assert voter.bias.any()


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0])
def test_rank_one_voters_of_a_deep_model_start_with_outputs_of_its_size(alpha: float) -> None:
    layers = [layer for _ in range(12) for layer in (nn.Linear(64, 64, bias=False), nn.ReLU())]
    for layer in layers[::2]:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    model = nn.Sequential(*layers)
    wrapped = vote.Wrapper(40, alpha=alpha, share="rank1")(model)
    x = torch.randn(20, 64)
    with torch.no_grad():
        outputs = torch.stack([voter(x) for voter in wrapped.voters()])
        assert 0.1 < (outputs.square().mean() / model(x).square().mean()).item() < 10
    for name, factors in wrapped.named_parameters():
        if "@vote" in name:
            assert factors.square().mean().item() == pytest.approx(1, rel=0.1)
            assert (factors.std() / factors.mean()).item() == pytest.approx(alpha, rel=0.15)
