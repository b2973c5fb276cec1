"""Wrapped objects under `torch.func`, `torch.export` and their own hooks: equal to plain calls, or refused."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from helpers.wrapped_models import Net, answer, every_wrapper, wrap
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.utils._pytree import tree_leaves, tree_map

from workbench import compose, sculpt, vote
from workbench.errors import UnreachedParametersError

CERTAIN = {
    "vote": lambda: vote.Wrapper(3),
    "share": lambda: vote.Wrapper(3, share=1),
    "rank1": lambda: vote.Wrapper(3, share="rank1"),
    "sculpt": lambda: sculpt.Wrapper(n_layers=1),
    "composed": lambda: compose(vote.Wrapper(3), sculpt.Wrapper(n_layers=1)),
}
every_certain = pytest.mark.parametrize("kind", CERTAIN)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def same(a: Any, b: Any) -> None:
    for left, right in zip(tree_leaves(a), tree_leaves(b), strict=True):
        torch.testing.assert_close(left, right)


@every_wrapper
@pytest.mark.filterwarnings("ignore:the weights of the model have changed")
def test_a_functional_call_may_be_the_first_call(name: str) -> None:
    wrapped = wrap(name, Net())
    twin = copy.deepcopy(wrapped)
    x = torch.randn(4, 3)
    values = {key: 1.5 * p.detach() for key, p in wrapped.named_parameters()}
    before = answer(copy.deepcopy(wrapped), x) if name not in ("sample", "learned") else ()
    torch.manual_seed(2)
    outputs = functional_call(wrapped, values, (x,), {"return_risk": True})
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    torch.manual_seed(2)
    same(outputs, twin(x, return_risk=True))
    if before:
        same(answer(wrapped, x), before)  # its own values are back


@every_certain
def test_values_of_a_first_functional_call_may_be_computed(kind: str) -> None:
    wrapped: Any = CERTAIN[kind]()(mlp()).eval()
    twin, x = copy.deepcopy(wrapped), torch.randn(4, 3)
    values = {key: 1.5 * p for key, p in wrapped.named_parameters()}
    outputs = functional_call(wrapped, values, (x,), {"return_risk": True})
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    expected = twin(x, return_risk=True)
    same(outputs, expected)
    for answers in (outputs, expected):
        torch.stack([leaf.sum() for leaf in tree_leaves(answers)]).sum().backward()
    for computed_from, parameter in zip(wrapped.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(computed_from.grad, 1.5 * parameter.grad)


def test_computed_values_that_the_model_does_not_use_are_refused() -> None:
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.gain = nn.Linear(3, 2), nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.gain.detach() * x

    wrapped: Any = vote.Wrapper(3, share=1)(Detached()).eval()
    values = {key: 1.5 * p for key, p in wrapped.named_parameters()}
    with pytest.raises(UnreachedParametersError, match="no output depends on"):
        functional_call(wrapped, values, (torch.randn(4, 3),))


def test_parameters_under_the_plain_names_are_refused() -> None:
    model = mlp()
    wrapped: Any = vote.Wrapper(3)(model).eval()
    with pytest.raises(RuntimeError, match=r"0\.weight was replaced after wrapping"):
        functional_call(wrapped, dict(model.named_parameters()), (torch.randn(4, 3),))


@every_certain
def test_gradients_and_maps_of_functional_calls(kind: str) -> None:
    models = [CERTAIN[kind]()(mlp()).eval() for _ in range(2)]
    x = torch.randn(4, 3)
    values, buffers = stack_module_state(models)
    outputs = vmap(lambda p, b: functional_call(models[0], (p, b), (x,), {"return_risk": True}))(values, buffers)
    for i, model in enumerate(models):
        same(tree_map(lambda leaf, i=i: leaf[i], outputs), model(x, return_risk=True))
    wrapped = models[0]
    values = {key: p.detach() for key, p in wrapped.named_parameters()}
    each = vmap(grad(lambda p, row: functional_call(wrapped, p, (row[None],)).sum()), in_dims=(None, 0))(values, x)
    wrapped(x[1:2]).sum().backward()
    for key, parameter in wrapped.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(each[key][1], expected)
    same(vmap(lambda row: wrapped(row, return_risk=True))(x), wrapped(x, return_risk=True))


def test_rows_are_not_dealt_inside_vmap() -> None:
    wrapped: Any = vote.Wrapper(3)(mlp())
    x = torch.randn(6, 3)
    with pytest.raises(RuntimeError, match=r"inside torch\.func\.vmap; call with tile_and_reduce=True"):
        vmap(wrapped, randomness="different")(x[:, None])
    assert vmap(lambda row: wrapped(row, tile_and_reduce=True))(x).shape == (6, 2)


def test_the_signature_has_the_models_arguments_and_ours() -> None:
    wrapped: Any = vote.Wrapper(3)(Net())
    parameters = inspect.signature(wrapped.forward).parameters
    assert list(parameters) == ["x", "gain", "return_risk", "tile_and_reduce"]
    assert parameters["return_risk"].kind is inspect.Parameter.KEYWORD_ONLY


class OfDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"y": self.a(batch["u"]) + self.b(batch["v"])}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("inputs", ["tensor", "dict"])
@pytest.mark.parametrize("kind", ["share", "composed"])
@pytest.mark.slow
def test_risk_is_exported(kind: str, inputs: str, strict: bool) -> None:
    x = torch.randn(4, 3)
    batch: Any = x if inputs == "tensor" else {"u": x, "v": 2 * x}
    wrapped: Any = CERTAIN[kind]()(mlp() if inputs == "tensor" else OfDict()).eval()
    expected = wrapped(batch, return_risk=True)
    exported = torch.export.export(wrapped, (batch,), {"return_risk": True}, strict=strict).module()
    same(exported(batch, return_risk=True), expected)


def test_an_export_of_dealt_rows_is_refused_and_the_remedies_work() -> None:
    x, other = torch.randn(7, 3), torch.randn(7, 3)
    wrapped: Any = vote.Wrapper(3)(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))).train()
    with pytest.raises(RuntimeError, match=r"wrapped\.eval\(\).*tile_and_reduce"):
        torch.export.export(wrapped, (x,))
    expected = torch.stack([voter(other) for voter in wrapped.voters()]).mean(0)
    trained = torch.export.export(wrapped, (x,), {"tile_and_reduce": True}).module()
    torch.testing.assert_close(trained(other, tile_and_reduce=True), expected)
    torch.testing.assert_close(torch.export.export(wrapped.eval(), (x,)).module()(other), expected)


@pytest.mark.filterwarnings("ignore")
def test_a_strict_export_before_any_call_is_refused_with_the_remedy() -> None:
    wrapped: Any = vote.Wrapper(3)(mlp()).eval()
    with pytest.raises(Exception, match="call it once before compiling"):
        torch.export.export(wrapped, (torch.randn(4, 3),), {"return_risk": True}, strict=True)


@every_certain
def test_hooks_that_change_the_inputs_reach_the_loss(kind: str) -> None:
    wrapped: Any = CERTAIN[kind]()(mlp()).eval()
    x, y, criterion = torch.randn(4, 3), torch.randn(4, 2), nn.MSELoss()
    expected, at = wrapped.loss(criterion, 2 * x, y), wrapped(2 * x, return_risk=True)
    seen = []
    wrapped.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    wrapped.register_forward_pre_hook(lambda module, args, kwargs: seen.append(len(args)), with_kwargs=True)
    torch.testing.assert_close(wrapped.loss(criterion, x, y), expected)
    assert seen == [1]
    same(wrapped(x, return_risk=True), at)
    if kind == "composed":
        torch.testing.assert_close(wrapped.predictive(x).mean, at[0])


class Derivative(nn.Module):
    """A derivative in the direction of ones, of a function with a parameter; vmap does not take the hook."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.last = nn.Parameter(torch.randn(3)), nn.Linear(3, 2)
        self.last.register_forward_hook(lambda module, args, y: 2 * y)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.func.jvp(lambda z: (z * self.p).tanh(), (x,), (torch.ones_like(x),))[1])


@pytest.mark.parametrize("strategy", ["auto", "loop"])
@pytest.mark.parametrize("enabled", [True, False])
def test_forward_derivatives_of_voters_are_their_own(strategy: Any, enabled: bool) -> None:
    wrapped, x = vote.Wrapper(3, strategy=strategy)(Derivative()), torch.randn(4, 3)
    outputs = torch.stack([voter(x) for voter in wrapped.voters()])
    with torch.set_grad_enabled(enabled):
        torch.testing.assert_close(wrapped.eval()(x, return_risk=True), (outputs.mean(0), outputs.std(0, correction=0)))


def test_forward_derivatives_are_not_replayed() -> None:
    wrapped = vote.Wrapper(3, strategy="replay")(Derivative())
    with pytest.raises(RuntimeError, match="differentiates in its forward pass"):
        wrapped.eval()(torch.randn(4, 3))
