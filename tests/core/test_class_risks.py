"""Risks of class outputs: entropies, mutual information and their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.models import mlp
from torch import Tensor, nn
from torch.nn import functional as F

from workbench import compose, sample, sculpt, vote
from workbench.outputs import Logits


def entropy(probs: Tensor) -> Tensor:
    return -(probs * probs.log()).sum(-1)


@pytest.mark.parametrize("output", ["logits", "probs"])
def test_class_risks_are_entropies_and_mutual_information(output: str) -> None:
    model: nn.Sequential = mlp(4)
    if output == "probs":
        model.append(nn.Softmax(-1))
    wrapped: Any = vote.Wrapper(3, output=output)(model).eval()
    x = 3 * torch.randn(6, 3)
    scores = torch.stack([voter(x) for voter in wrapped.voters()])
    probs = scores.softmax(-1) if output == "logits" else scores
    y, risk = wrapped(x, return_risk=True)
    mean = probs.mean(0)
    joint = probs / 3  # of voter and class, for each row
    marginal = joint.sum(0, keepdim=True) * joint.sum(-1, keepdim=True)
    information = (joint * (joint / marginal).log()).sum((0, -1))
    assert risk.total.shape == (6,)
    assert torch.allclose(y.softmax(-1) if output == "logits" else y, mean, atol=1e-6)
    assert torch.allclose(risk.total, entropy(mean), atol=1e-5)
    assert torch.allclose(risk.aleatoric, entropy(probs).mean(0), atol=1e-5)
    assert torch.allclose(risk.epistemic, information, atol=1e-5)
    assert torch.allclose(risk.total, risk.aleatoric + risk.epistemic, atol=1e-5)
    torch.testing.assert_close(wrapped(x), y)  # without risk the branches may be run by another strategy


class RulingOut(nn.Module):
    """Class scores, of which some are -inf for all voters or for the one with a positive weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.layer(x)
        scores[:, 3] = torch.where(self.layer.weight[0, 0, 0, 0] > 0, -torch.inf, scores[:, 3])
        return scores.masked_fill((torch.arange(5) == 1)[:, None, None], -torch.inf)


@pytest.mark.parametrize(("size", "chunk"), [(2, None), (300, None), (300, 1)])
@pytest.mark.parametrize("heads", [False, True])
def test_classes_that_all_voters_rule_out_have_no_probability(size: int, chunk: int | None, heads: bool) -> None:
    voters = vote.Wrapper(3, output=Logits(dim=1), chunk=chunk)
    wrapped: Any = (compose(voters, sculpt.Wrapper()) if heads else voters)(RulingOut()).eval()
    x = torch.randn(1, 3, size, size)
    with torch.no_grad():
        mean = torch.stack([voter(x) for voter in wrapped.voters()]).softmax(2).mean(0)
        y, _ = wrapped(x, return_risk=True)
    assert (y[:, 1] == -torch.inf).all()
    assert y[:, [0, 2, 3, 4]].isfinite().all()
    if not heads:
        torch.testing.assert_close(y, mean.log())
    assert F.cross_entropy(y, torch.ones(1, size, size, dtype=torch.int64)) == torch.inf


@pytest.mark.parametrize("size", [20, 300])
def test_logits_are_finite_where_probabilities_round_to_zero(size: int) -> None:
    wrapped: Any = vote.Wrapper(3, output=Logits(dim=1))(nn.Conv2d(3, 5, 1)).eval()
    with torch.no_grad():
        y, risk = wrapped(1e4 * torch.randn(1, 3, size, size), return_risk=True)
    assert (y < -87).any()
    assert y.isfinite().all()
    assert risk.total.isfinite().all()


def test_class_risks_of_certain_scores_are_finite() -> None:
    wrapped: Any = vote.Wrapper(2, output="logits", finetune=True)(linear_classes(1000.0)).eval()
    y, risk = wrapped(torch.ones(3, 1), return_risk=True)
    assert torch.allclose(y.softmax(-1)[:, 0], torch.ones(3))
    assert all(bool((risk[name].abs() < 1e-6).all()) for name in risk)


def linear_classes(scale: float) -> nn.Linear:
    model = nn.Linear(1, 3)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[scale], [0.0], [-scale]]))
        model.bias.zero_()
    return model


@pytest.mark.parametrize("output", ["logits", "probs"])
def test_class_risks_of_sample_alone_add_up(output: str) -> None:
    model = mlp(3)
    if output == "probs":
        model.append(nn.Softmax(-1))
    wrapped: Any = sample.Wrapper(6, sample.Bernoulli(0.3), output=output)(model).eval()
    _, risk = wrapped(torch.randn(8, 3), return_risk=True)
    assert torch.allclose(risk.total, risk.aleatoric + risk.epistemic, atol=1e-5)
    assert float(risk.epistemic.detach().max()) > 1e-4


def test_sculpted_logits_average_the_probabilities_under_their_noise() -> None:
    wrapped: Any = sculpt.Wrapper(sculpt.LogitNormal, output="logits", n_layers=1)(mlp(3)).eval()
    x = torch.randn(5, 3)
    y, risk = wrapped(x, return_risk=True)
    p = dict(wrapped.named_parameters())
    hidden = torch.tanh(wrapped[0](x))
    raw = hidden @ p["2.weight@sculpt"].T + p["2.bias@sculpt"]
    sigma = torch.nn.functional.softplus(raw)
    noise = torch.randn(20_000, 5, 3, generator=torch.Generator().manual_seed(2))
    mean = (wrapped[2](hidden) + sigma * noise).softmax(-1).mean(0)
    assert torch.allclose(risk.total, entropy(mean), atol=0.03)
    assert torch.equal(y.argmax(-1), wrapped(x).argmax(-1))


def test_gradients_of_class_risks_are_finite_where_voters_are_certain_and_agree() -> None:
    wrapped: Any = vote.Wrapper(2, output="logits", finetune=True)(linear_classes(1000.0))
    _, risk = wrapped(torch.ones(3, 1), return_risk=True)
    (risk.total + risk.epistemic + risk.aleatoric).sum().backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in wrapped.parameters())


def test_binary_logits_are_infinite_where_those_of_all_voters_are() -> None:
    class Certain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            logits = self.fc(x)
            infinite = torch.where(self.fc.weight[0, 0] > self.fc.weight[0, 1], torch.inf, -torch.inf).expand(len(x))
            return torch.stack([logits[:, 0], infinite, logits[:, 2] + torch.inf, logits[:, 3] - torch.inf], 1)

    wrapped: Any = vote.Wrapper(3, output="binary")(Certain()).eval()
    x = torch.randn(6, 3)
    with torch.no_grad():
        mean = torch.stack([voter(x) for voter in wrapped.voters()]).sigmoid().mean(0)
        y, risk = wrapped(x, return_risk=True)
    torch.testing.assert_close(y, mean.logit())
    assert y[:, 2:].isinf().all()
    assert risk.total.isfinite().all()
