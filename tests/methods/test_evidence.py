"""Evidence in nats: compared with draws from Dirichlet distributions, and the equation that divides an entropy."""

from __future__ import annotations

import math

import pytest
import torch

from workbench.methods.evidence import ignorance, noise


@pytest.mark.parametrize(("rows", "classes"), [(0.5, 3), (4.0, 3), (30.0, 3), (20.0, 10)])
def test_ignorance_is_the_information_between_a_label_and_drawn_probabilities(rows: float, classes: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        probs = torch.distributions.Dirichlet(torch.full((classes,), rows / classes, dtype=torch.float64)).sample(
            (40000,)
        )
    entropies = torch.special.entr(probs).sum(1)
    information = math.log(classes) - entropies.mean()
    spread = float(entropies.std()) / math.sqrt(len(entropies))
    assert float(ignorance(torch.tensor(1 / rows, dtype=torch.float64), classes)) == pytest.approx(
        float(information), abs=4 * spread
    )


def test_the_entropy_lies_between_noise_and_frequencies_as_far_as_nothing_is_known() -> None:
    classes, prior = 4, torch.tensor(1.2, dtype=torch.float64)
    total, epistemic = torch.rand(2, 100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    left = noise(total, epistemic, prior, classes)
    unknown = epistemic / math.log(classes)
    torch.testing.assert_close((1 - unknown) * left.log() + unknown * prior.log(), total.log())
    assert bool((left <= total).all())


def test_nothing_is_taken_off_noise_and_nothing_is_added() -> None:
    prior, unknown = torch.tensor(0.9), torch.linspace(0, math.log(3), 5)
    torch.testing.assert_close(noise(prior.expand(5), unknown, prior, 3), prior.expand(5))
    torch.testing.assert_close(noise(torch.full((5,), 1.05), unknown, prior, 3), torch.full((5,), 1.05))
    assert torch.equal(noise(torch.zeros(5), unknown, prior, 3), torch.zeros(5))
    assert noise(torch.tensor(0.5), unknown[-1], prior, 3) == 0
    torch.testing.assert_close(noise(torch.tensor(0.5), unknown[0], torch.tensor(0.0), 3), torch.tensor(0.5))
