"""Batch-norm adaptation to another domain: compared with plain copies of the network, and the coverage that it restores."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import calibrate, compose, laplace, neo, sample, snapshot, vote
from workbench.calibration import adapt_batch_norm
from workbench.errors import WorkbenchWarning


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)),
        )


def statistics(model: Any) -> list[Tensor]:
    return [
        value for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) for value in (m.running_mean, m.running_var)
    ]  # fmt: skip


def plain(net: nn.Module, batches: list[Tensor], prior: float) -> list[Tensor]:
    """Mean statistics of the batches in the training mode of a copy, then mixed with those there were."""
    old, total = statistics(net), [torch.zeros_like(value) for value in statistics(net)]
    for batch in batches:
        fresh = copy.deepcopy(net).train()
        for module in fresh.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.momentum = 1.0
        fresh(batch)
        total = [sum_ + len(batch) * value for sum_, value in zip(total, statistics(fresh), strict=True)]
    n = sum(map(len, batches))
    return [(prior * a + b) / (prior + n) for a, b in zip(old, total, strict=True)]


@pytest.mark.parametrize("prior", [0, 30])
@pytest.mark.parametrize(
    "wrapper",
    [compose(output="logits"), *(vote.Wrapper(3, share=share, output="logits") for share in (None, 2, "rank1"))],
    ids=["plain", "voters", "last layers", "rank one"],
)
def test_statistics_are_those_of_a_plain_loop_over_every_voter(wrapper: Any, prior: float) -> None:
    x = 3 * draw(50, 2, 8, 8) + 1
    wrapped = wrapper(network()).eval()
    before = copy.deepcopy(wrapped.state_dict())
    adapted = adapt_batch_norm(wrapped, x, prior=prior, batch_size=20)
    assert all(torch.equal(value, before[key]) for key, value in wrapped.state_dict().items() if "extra" not in key)
    pairs = zip(wrapped.voters(), adapted.voters(), strict=True)
    for voter, moved in pairs:
        torch.testing.assert_close(statistics(moved), plain(voter, [*x.split(20)], prior), rtol=1e-4, atol=1e-5)
    norms = [m for m in adapted.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert {(norm.momentum, norm.training) for norm in norms} == {(0.1, False)}


def test_a_last_row_alone_has_no_variance_and_does_not_count() -> None:
    wrapped, x = vote.Wrapper(2, output="logits")(network()).eval(), draw(21, 2, 8, 8)
    adapted, expected = adapt_batch_norm(wrapped, x, batch_size=10), adapt_batch_norm(wrapped, x[:20], batch_size=10)
    assert all(map(torch.equal, statistics(adapted), statistics(expected)))
    maps = network()[:-3]  # whose rows have a variance over places
    rows: Any = vote.Wrapper(2)(maps).eval()
    for adapted_voter, voter in zip(adapt_batch_norm(rows, x, batch_size=1).voters(), rows.voters(), strict=True):
        torch.testing.assert_close(statistics(adapted_voter), plain(voter, list(x.split(1)), 0))


def test_modes_stay_and_the_random_state_too() -> None:
    wrapped = sample.Wrapper(2, output="logits")(network()).train()
    before = torch.get_rng_state()
    assert all(module.training for module in adapt_batch_norm(wrapped, draw(20, 2, 8, 8)).modules())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "wrapper", [neo.Wrapper(output="logits"), laplace.Wrapper(output="logits"), snapshot.Wrapper(output="logits")]
)
def test_other_wrappers_are_adapted_or_have_what_is_needed(wrapper: Any) -> None:
    """A place without a shift gives the statistics that a network without wrapper has there."""
    x = draw(64, 2, 8, 8)
    wrapped = wrapper(network()).eval()
    adapted = adapt_batch_norm(wrapped, x)
    torch.testing.assert_close(statistics(adapted)[:4], plain(network(), [x], 0)[:4], rtol=1e-4, atol=1e-5)


def test_what_was_calibrated_moves_to_another_place() -> None:
    """Inputs of which every channel has another mean and scale: the first batch norm takes both out again, and coverage comes back."""
    g = torch.Generator().manual_seed(0)
    y = torch.randint(3, (3000,), generator=g)
    x = torch.randn(3000, 2, generator=g) + torch.tensor([[0.0, 2.0], [2.0, -1.0], [-2.0, -1.0]])[y]
    net = nn.Sequential(nn.BatchNorm1d(2, affine=False), nn.Linear(2, 3))
    with torch.no_grad():
        net.train()(x)
        net[1].weight.copy_(torch.tensor([[0.0, 2.0], [2.0, -1.0], [-2.0, -1.0]]))
        net[1].bias.zero_()
    wrapped = compose(output="logits")(net).eval()
    held_out, new, truth = (x[:1000], y[:1000]), 0.2 * x[1000:] + 3, y[1000:]
    here = calibrate(adapt_batch_norm(wrapped, x[:1000]), held_out, "conformal", score="lac")

    def coverage(model: Any) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", WorkbenchWarning)
            return model.predict_set(new, 0.9).gather(1, truth[:, None]).double().mean().item()

    assert coverage(here) < 0.6
    assert coverage(adapt_batch_norm(here, new)) == pytest.approx(0.9, abs=0.025)


def test_what_cannot_be_adapted_is_refused() -> None:
    wrapped = vote.Wrapper(2)(nn.Linear(2, 1))
    with pytest.raises(ValueError, match="no batch norm"):
        adapt_batch_norm(wrapped, draw(9, 2))
    with pytest.raises(TypeError, match="not wrapped"):
        adapt_batch_norm(network(), draw(9, 2, 8, 8))
    with pytest.raises(ValueError, match="prior must be 0 or more"):
        adapt_batch_norm(compose(output="logits")(network()), draw(9, 2, 8, 8), prior=-1)
    with pytest.raises(ValueError, match="there are no rows"):
        adapt_batch_norm(compose(output="logits")(network()), draw(0, 2, 8, 8))
