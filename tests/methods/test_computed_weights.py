"""Voters and heads of layers whose weights are computed from other tensors, by parametrizations or by torch's older hooks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from workbench import sample, sculpt, vote
from workbench.core.additions import extra
from workbench.core.prior import NAME as PRIOR

VOTERS = 3


def old(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, but models made with it live on
        return norm(nn.Linear(8, 16))


class Scaled(nn.Module):
    """A layer without an initialization of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class Doubled(nn.Module):
    """A parametrization that says no inverse."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def without_inverse() -> nn.Module:
    layer = nn.Linear(8, 16)
    parametrize.register_parametrization(layer, "weight", Doubled())
    return layer


def orthogonal(**options: Any) -> nn.Module:
    return parametrizations.orthogonal(nn.Linear(8, 16), **options)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Linear(8, 16),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(8, 16)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(8, 16)),
    "householder": lambda: orthogonal(orthogonal_map="householder"),
    "householder, no base": lambda: orthogonal(orthogonal_map="householder", use_trivialization=False),
    "matrix exponential": lambda: orthogonal(orthogonal_map="matrix_exp"),
    "old weight norm": lambda: old(nn.utils.weight_norm),
    "old spectral norm": lambda: old(nn.utils.spectral_norm),
    "pruned": lambda: prune.random_unstructured(nn.Linear(8, 16), "weight", 0.25),
    "of its own": lambda: parametrizations.orthogonal(Scaled()),
    "no inverse": without_inverse,
}
NEAR = {"of its own", "no inverse"}  # voters start near the given weights


def model_of(name: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), LAYERS[name]())
    model(torch.zeros(1, 8))
    return model.eval()


def weights_of(models: list[Any]) -> list[Tensor]:
    """The weights [16, 8] of their last layers, as the layers compute them."""
    x = torch.cat([torch.zeros(1, 8), torch.eye(8)])
    with torch.no_grad():
        answers = [model[2](x) for model in models]
    return [(answer[1:] - answer[0]).mT for answer in answers]


def assert_computed(name: str, weight: Tensor) -> None:
    """That a weight is what its layer promises."""
    values = torch.linalg.svdvals(weight)
    if name in ("householder", "householder, no base", "matrix exponential", "of its own"):
        torch.testing.assert_close(values, torch.ones(8), rtol=1e-4, atol=1e-4)
    if "spectral" in name:
        torch.testing.assert_close(values[0], torch.tensor(1.0), rtol=0.05, atol=0)
    if name == "pruned":
        assert (weight.abs() < 1e-6).sum() >= 32


@pytest.mark.parametrize("share", [None, 1], ids=["all", "last layer"])
@pytest.mark.parametrize("name", LAYERS)
def test_voters_start_apart_with_weights_as_their_layer_computes_them(name: str, share: Any) -> None:
    torch.manual_seed(0)
    model = model_of(name)
    before = copy.deepcopy(model.state_dict())
    wrapped: Any = vote.Wrapper(VOTERS, share=share)(model).eval()
    voters = wrapped.voters()
    weights = weights_of(voters)
    for weight in weights:
        assert_computed(name, weight)
    distance = (weights[0] - weights[1]).norm() / weights[0].norm()
    assert distance > 0.02 if name in NEAR else 1 < distance < 2, "as far as two draws are"
    assert not torch.equal(voters[0][2].bias, voters[1][2].bias)
    x = torch.randn(5, 8)
    answers = torch.stack([voter(x) for voter in voters])
    y, risk = wrapped(x, return_risk=True)
    torch.testing.assert_close(y, answers.mean(0))
    torch.testing.assert_close(risk, answers.std(0, correction=0))
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    fresh: Any = vote.Wrapper(VOTERS, share=share)(model_of(name)).eval()
    fresh.load_state_dict(wrapped.state_dict())
    torch.testing.assert_close(fresh(x, return_risk=True)[1], risk)


@pytest.mark.parametrize(
    "name", [name for name in LAYERS if name not in ("old weight norm", "old spectral norm", "pruned")]
)
def test_prior_functions_are_of_weights_as_their_layer_computes_them(name: str) -> None:
    """Those of weights that hooks compute are refused."""
    torch.manual_seed(0)
    model = model_of(name)
    prior: Any = extra(vote.Wrapper(VOTERS, prior=2.0)(model), PRIOR)
    untrained = [copy.deepcopy(model) for _ in range(VOTERS)]
    for number, plain in enumerate(untrained):
        state = plain.state_dict()
        state.update({slot: prior.value(slot)[number] for slot in prior.drawn})
        plain.load_state_dict(state | {slot: prior.value(slot) for slot in prior.shared})
    weights = weights_of(untrained)
    for weight in weights:
        assert_computed(name, weight)
    assert (weights[0] - weights[1]).norm() > 0.02 * weights[0].norm()


@pytest.mark.parametrize("name", LAYERS)
def test_a_risk_head_has_weight_and_bias_of_its_own(name: str) -> None:
    wrapped: Any = sculpt.Wrapper(n_layers=1)(model_of(name)).train()
    prediction = wrapped(torch.randn(5, 8))
    _, risk = wrapped(torch.randn(5, 8), return_risk=True)
    base = {id(parameter) for parameter in wrapped.base_parameters()}
    wrapped.zero_grad()
    risk.sum().backward()
    risk_keys = [key for key, parameter in wrapped.named_parameters() if id(parameter) not in base]
    assert any(key.startswith("2.bias") for key in risk_keys)
    assert prediction.shape == risk.shape
    assert wrapped[2].bias.grad is None or not wrapped[2].bias.grad.any(), "the prediction's bias is not the risk's"


@pytest.mark.parametrize(
    "wrapper", [vote.Wrapper(VOTERS, share="rank1"), sample.Wrapper(where="weights")], ids=["rank1", "noise"]
)
def test_signs_of_householder_reflections_are_neither_multiplied_nor_disturbed(wrapper: Any) -> None:
    with pytest.raises(ValueError, match=r"2\.parametrizations\.weight\.original .*matrix_exp"):
        wrapper(model_of("householder"))
    wrapper(model_of("matrix exponential"))
