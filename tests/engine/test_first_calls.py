"""First calls look at the values of a model: inside activation checkpointing, make_fx and FakeTensorMode they must not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.traced_models import mlp
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from workbench import compose, neo, sculpt, vote

WRAPPERS = [
    vote.Wrapper(3),
    vote.Wrapper(3, share=1),
    vote.Wrapper(3, share="rank1"),
    vote.Wrapper(3, prior=2.0),
    sculpt.Wrapper(),
    compose(vote.Wrapper(2), sculpt.Wrapper()),
]


def inputs() -> Tensor:
    return torch.randn(9, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("options", [{}, {"tile_and_reduce": True}, {"return_risk": True}], ids=str)
@pytest.mark.parametrize("wrapper", WRAPPERS, ids=str)
def test_a_first_step_inside_checkpointing_has_the_gradients_of_one_without(wrapper: Any, options: Any) -> None:
    wrapped = wrapper(mlp()).train()
    other = copy.deepcopy(wrapped)

    def gradients(model: Any, call: Any) -> list[Any]:
        x = inputs().requires_grad_()
        torch.manual_seed(1)
        answer = call(model, x, **options)
        prediction = answer[0] if options.get("return_risk") else answer
        prediction.square().sum().backward()
        return [x.grad, *(parameter.grad for parameter in model.parameters())]

    checkpointed = gradients(
        wrapped, lambda model, *args, **kwargs: checkpoint(model, *args, use_reentrant=False, **kwargs)
    )
    torch.testing.assert_close(checkpointed, gradients(other, lambda model, *args, **kwargs: model(*args, **kwargs)))


@pytest.mark.parametrize("wrapper", [*WRAPPERS, neo.Wrapper()], ids=str)
def test_a_first_call_is_recorded_by_make_fx(wrapper: Any) -> None:
    wrapped = wrapper(mlp()).eval()
    if wrapped.needs_fit:
        wrapped.fit([inputs()])

    def answers(x: Tensor) -> list[Tensor]:
        y, risk = wrapped(x, return_risk=True)
        return [y, risk] if isinstance(risk, Tensor) else [y, *(risk[name] for name in risk.names())]

    graph, x = make_fx(answers)(inputs()), inputs() + 1
    torch.testing.assert_close(graph(x), answers(x))


@pytest.mark.parametrize(
    "wrapper", [vote.Wrapper(3), vote.Wrapper(3, share=1), sculpt.Wrapper(), neo.Wrapper()], ids=str
)
def test_a_first_call_without_values_has_the_shapes(wrapper: Any) -> None:
    wrapped = wrapper(mlp()).eval()
    if wrapped.needs_fit:
        wrapped.fit([inputs()])
    y, _ = copy.deepcopy(wrapped)(inputs(), return_risk=True)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake, _ = wrapped(mode.from_tensor(inputs()), return_risk=True)
    assert fake.shape == y.shape
