"""Settings out of range, of an unknown name or for another model are refused, and the model is left as it was."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.model_facts import facts
from helpers.models import mlp
from torch import nn

import workbench
from workbench import compose, neo, sample, sculpt, vote
from workbench.methods import BUILT_IN


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: vote.Wrapper(0), "n_voters.*at least 1.*0"),
        (lambda: vote.Wrapper(-2), "n_voters.*at least 1.*-2"),
        (lambda: vote.Wrapper(2.5), "n_voters.*2.5"),  # type: ignore[arg-type]
        (lambda: vote.Wrapper(True), "n_voters.*True"),
        (lambda: vote.Wrapper(3, share="rank2"), "share.*rank1.*'rank2'"),
        (lambda: vote.Wrapper(3, share=0), "share.*0"),
        (lambda: vote.Wrapper(3, alpha=-1), "alpha.*-1"),
        (lambda: sample.Wrapper(0), "n_samples.*at least 1.*0"),
        (lambda: sample.Wrapper(1.0), "n_samples.*1.0"),  # type: ignore[arg-type]
        (lambda: sample.Wrapper(where="outputs"), "where.*activations, weights, inputs.*'outputs'"),
        (lambda: sample.Wrapper(randomness="equal"), "randomness.*different.*'equal'"),
        (lambda: sample.Bernoulli(1.0), r"p must lie in \[0, 1\).*1.0"),
        (lambda: sample.Bernoulli(-0.1), r"p must lie in \[0, 1\).*-0.1"),
        (lambda: sample.Bernoulli(float("nan")), r"p must lie in \[0, 1\).*nan"),
        (lambda: sample.Normal(-1.0), "scale.*-1.0"),
        (lambda: sample.Normal(float("nan")), "scale.*nan"),
        (lambda: vote.Wrapper(2**70), "n_voters must be at most 1,048,576"),
        (lambda: sculpt.Wrapper(n_layers=0), "n_layers.*at least 1.*0"),
        (lambda: sculpt.Wrapper(n_layers=1.5), "n_layers.*1.5"),  # type: ignore[arg-type]
        (lambda: neo.Wrapper(density="gausian"), "density.*gaussian.*'gausian'"),
        (lambda: vote.Wrapper(output="classes"), "output must be .*'classes'"),
        (lambda: vote.Wrapper(strategy="fast"), "strategy.*auto, vmap, rescue, replay, loop, tune.*'fast'"),
    ],
)
def test_settings_out_of_range_are_refused(build: Callable[[], Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build()


@pytest.mark.parametrize("wrong", ["Normal", 3, int])
def test_an_unknown_distribution_is_refused_with_the_known_ones(wrong: Any) -> None:
    with pytest.raises(TypeError, match="distribution must be Normal, Laplace"):
        sculpt.Wrapper(wrong)
    with pytest.raises(TypeError, match=r"distribution must be Bernoulli"):
        sample.Wrapper(3, wrong)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: sculpt.Wrapper(n_layers=3), "n_layers=3.*has 2 layers"),
        (lambda: vote.Wrapper(3, share=3), "share=3.*has 2 layers"),
        (lambda: neo.Wrapper(layers="trunk"), "no module 'trunk'"),
        (lambda: neo.Wrapper(layers=["0", "7"]), "no module '7'"),
    ],
)
def test_more_layers_than_the_model_has_are_refused(build: Callable[[], Any], says: str) -> None:
    model = mlp()
    before = facts(model)
    with pytest.raises(ValueError, match=says):
        build()(model)
    assert facts(model) == before


def test_by_default_sculpt_takes_as_many_layers_as_there_are() -> None:
    for model in (nn.Linear(3, 1), mlp()):
        risk = sculpt.Wrapper()(model)(torch.randn(4, 3), return_risk=True)[1]
        assert risk.shape == (4, 1)


def test_compose_takes_wrappers_only_and_settings_that_agree() -> None:
    with pytest.raises(TypeError, match="compose takes wrappers"):
        compose(vote.Wrapper(3), mlp())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=re.escape("not the class vote.Wrapper: write vote.Wrapper()")):
        compose(vote.Wrapper, sculpt.Wrapper)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=re.escape("not the module vote: write vote.Wrapper()")):
        compose(vote, sculpt)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="different output"):
        compose(vote.Wrapper(3, output="logits"), sculpt.Wrapper(sculpt.LogitNormal, output="probs"))
    with pytest.raises(ValueError, match="different strategy"):
        compose(vote.Wrapper(3, strategy="loop"), sculpt.Wrapper(strategy="vmap"))


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_module_that_is_called_like_its_wrapper_says_so(name: str) -> None:
    module = getattr(workbench, name)
    with pytest.raises(TypeError, match=f"^{name} is a module; its wrapper is {name}.Wrapper"):
        module(5)
    assert pickle.loads(pickle.dumps(module)) is module
