"""Random numbers of every kind inside a model: "different", "same" or "error" across branches, as in `torch.func`."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.reference_from_copies import VOTERS, inputs
from torch import Tensor, nn

from workbench import sample, sculpt, vote

STRATEGIES = ("loop", "vmap", "auto")


class Noisy(nn.Module):
    """Adds a random number, as `add_noise` does on the page about randomness."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.source = source
        self.torch_generator = torch.Generator().manual_seed(1)
        self.numpy_generator = np.random.default_rng(1)
        self.python_generator = random.Random(1)

    def draw(self) -> Any:
        return {
            "torch": lambda: torch.randn(()),
            "numpy": lambda: float(np.random.randn()),  # noqa: NPY002 - users draw from the global state
            "python": lambda: random.gauss(0, 1),
            "torch.Generator": lambda: torch.randn((), generator=self.torch_generator),
            "numpy.Generator": lambda: float(self.numpy_generator.normal()),
            "random.Random": lambda: self.python_generator.gauss(0, 1),
        }[self.source]()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + self.draw()

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        self.torch_generator.manual_seed(seed)
        self.numpy_generator.bit_generator.state = np.random.default_rng(seed).bit_generator.state
        self.python_generator.seed(seed)


SOURCES = ("torch", "numpy", "python", "torch.Generator", "numpy.Generator", "random.Random")
UNDER_VMAP = ("torch", "torch.Generator")  # the others would draw once for all


@pytest.fixture(autouse=True)
def random_states() -> Iterator[None]:
    """All global streams at seed 0 during the test, and as they were afterwards."""
    numpys, pythons = np.random.get_state(), random.getstate()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        random.seed(0)
        yield
    np.random.set_state(numpys)  # noqa: NPY002
    random.setstate(pythons)


def sampled(source: str, randomness: str, strategy: str = "auto") -> Any:
    """Three samples without any noise but the model's own."""
    wrapper = sample.Wrapper(3, sample.Normal(0), where="weights", randomness=randomness, strategy=strategy)
    return wrapper(Noisy(source)).eval()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("source", SOURCES)
def test_different_draws_for_each_branch(source: str, strategy: str) -> None:
    same: Any = vote.Wrapper(VOTERS, finetune=True, share=1, strategy=strategy)(Noisy(source)).eval()
    for wrapped in (sampled(source, "different", strategy), same):
        if strategy == "vmap" and source not in UNDER_VMAP:
            with pytest.raises(RuntimeError, match=r'(?s)Noisy.*strategy="loop"'):
                wrapped(inputs(), return_risk=True)
        else:
            _, risk = wrapped(inputs(), return_risk=True)
            assert bool((risk > 1e-3).all())


@pytest.mark.parametrize("strategy", ["loop", "auto"])
@pytest.mark.parametrize("source", SOURCES)
def test_the_same_draws_for_each_branch(source: str, strategy: str) -> None:
    wrapped = sampled(source, "same", strategy)
    first, risk = wrapped(inputs(), return_risk=True)
    assert bool((risk == 0).all())
    second, _ = wrapped(inputs(), return_risk=True)
    assert not torch.allclose(first, second)  # another call draws others


@pytest.mark.parametrize("source", SOURCES)
def test_draws_are_refused_in_error_mode(source: str) -> None:
    wrapped = sampled(source, "error")
    with pytest.raises(RuntimeError, match=r'randomness="error" forbids; use randomness="different" .* "same"'):
        wrapped(inputs(), return_risk=True)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("source", SOURCES)
def test_both_heads_of_sculpt_see_the_same_draws(source: str, strategy: str) -> None:
    wrapped: Any = sculpt.Wrapper(n_layers=1, strategy=strategy)(Noisy(source)).eval()
    state = wrapped.state_dict()
    wrapped.load_state_dict({name: state[name.removesuffix("@sculpt")] for name in state})
    y, risk = wrapped(inputs(), return_risk=True)
    torch.testing.assert_close(risk, F.softplus(y), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["different", "same"])
@pytest.mark.parametrize("source", SOURCES)
def test_a_seed_repeats_every_kind_of_draw(source: str, kind: str) -> None:
    wrapped = sampled(source, kind)
    answers = []
    for _ in range(2):
        wrapped.seed(5)
        answers.append(wrapped(inputs(), return_risk=True))
    assert torch.equal(answers[0][0], answers[1][0])
    assert torch.equal(answers[0][1], answers[1][1])


@pytest.mark.parametrize("source", SOURCES)
def test_a_seed_gives_the_draws_of_plain_calls_one_after_another(source: str) -> None:
    plain = Noisy(source)
    wrapped: Any = vote.Wrapper(VOTERS, finetune=True, strategy="loop")(copy.deepcopy(plain)).eval()
    wrapped.seed(5)
    y, risk = wrapped(inputs(), return_risk=True)
    plain.seed(5)
    answers = torch.stack([plain(inputs()) for _ in range(VOTERS)])
    torch.testing.assert_close(y, answers.mean(0))
    torch.testing.assert_close(risk, answers.std(0, correction=0))
