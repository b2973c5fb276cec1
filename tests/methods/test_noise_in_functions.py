"""Sample's noise on layers inside a `torch.autograd.Function`, whose backward pass is written for values without noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import neo, sample, vote


class Product(torch.autograd.Function):
    """A product of matrices; takes its inputs and gradients apart, as old code does."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(h, weight)
        return h @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        h, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ h


class BatchedProduct(torch.autograd.Function):
    """The same in the way that vmap takes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(h: Tensor, weight: Tensor) -> Tensor:
        return h @ weight.T

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    backward = Product.backward


class Recomputed(torch.autograd.Function):
    """Calls a layer again in the backward pass, as reversible networks do (Reformer)."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, layer: nn.Module, weight: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        ctx.layer = layer
        return layer(h)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor]:
        h = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.layer(h)
        of_h, of_weight = torch.autograd.grad(y, (h, ctx.layer.weight), gradient)
        return of_h, None, of_weight


LAYERS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "function": lambda layer, h: Product.apply(h, layer.weight),
    "batched": lambda layer, h: BatchedProduct.apply(h, layer.weight),
    "recomputed": lambda layer, h: Recomputed.apply(h, layer, layer.weight),
    "plain": lambda layer, h: layer(h),
}


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body, self.layer, self.head = nn.Linear(3, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 2)
        self.apply_layer = LAYERS[kind]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.apply_layer(self.layer, torch.tanh(self.body(x)))))


def wrapped(kind: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    return sample.Wrapper(5, sample.Normal(0.3), **settings)(Net(kind))


def asked(model: Any, training: bool) -> tuple[Tensor, Tensor]:
    """Prediction and risk for fixed inputs and noise, of a model that has been called before."""
    x = torch.linspace(-1, 1, 12).reshape(4, 3)
    model.train(training)(x, return_risk=True)
    torch.manual_seed(1)
    return model(x, return_risk=True)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", ["function", "batched", "recomputed"])
def test_noise_enters_as_in_a_plain_layer(kind: str, training: bool) -> None:
    actual, expected = asked(wrapped(kind), training), asked(wrapped("plain", strategy="loop"), training)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", ["function", "batched", "recomputed"])
def test_gradients_that_would_be_wrong_are_refused(kind: str, training: bool) -> None:
    y, risk = asked(wrapped(kind), training)
    for output in (y, risk):
        with pytest.raises(RuntimeError, match=r"autograd\.Function.*where=\"weights\""):
            output.sum().backward(retain_graph=True)


@pytest.mark.parametrize("settings", [{"where": "weights"}, {"where": "inputs"}], ids=str)
@pytest.mark.parametrize("kind", ["function", "batched", "recomputed"])
def test_noise_elsewhere_has_the_gradients_of_a_plain_layer(kind: str, settings: dict[str, Any]) -> None:
    models = [wrapped(name, strategy="loop", **settings) for name in (kind, "plain")]
    for model in models:
        asked(model, training=True)[0].sum().backward()
    for actual, expected in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad)


def test_without_noise_there_is_nothing_to_refuse() -> None:
    models = [wrapped("function"), wrapped("plain")]
    silent = [sample.Wrapper(5, sample.Normal(0))(model.unwrap()) for model in models]
    for model in silent:
        asked(model, training=True)[0].sum().backward()
    for actual, expected in zip(*(model.parameters() for model in silent), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad)


def test_vmap_which_does_not_see_the_layer_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"torch\.autograd\.Function cannot be seen"):
        asked(wrapped("batched", strategy="vmap"), training=False)


def product_after_relu(h: Tensor, weight: Tensor) -> Tensor:
    return torch.relu(h) @ weight.T


class WithFunction(Net):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__("plain")
        self.apply_layer = lambda layer, h: function(h, layer.weight)


@pytest.mark.parametrize("wrapper", [sample.Wrapper(3, sample.Normal(0.3)), neo.Wrapper()], ids=["sample", "neo"])
def test_layers_inside_a_compiled_function_are_seen_in_each_call(wrapper: Any) -> None:
    answers = []
    for function in (product_after_relu, torch.compile(product_after_relu, backend="eager")):
        torch.manual_seed(0)
        model = wrapper(WithFunction(function)).eval()
        if model.needs_fit:
            model.fit([torch.randn(30, 3)])
        answers.append([model(x, return_risk=True) for x in torch.randn(4, 5, 3)])
    torch.testing.assert_close(answers[1], answers[0])


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: self.a(x), lambda x: 2 * self.b(x), (x,))


@pytest.mark.slow
def test_layers_inside_control_flow_of_torch_are_refused_by_name_and_right_for_voters() -> None:
    with pytest.raises(RuntimeError, match="layers inside torch's operator cond"):
        sample.Wrapper(3)(Branching())(torch.ones(4, 3))
    voting: Any = vote.Wrapper(3)(Branching()).eval()
    for x in (torch.ones(4, 3), -torch.ones(4, 3)):
        y = voting(x)
        torch.testing.assert_close(y, torch.stack([voter(x) for voter in voting.voters()]).mean(0))
