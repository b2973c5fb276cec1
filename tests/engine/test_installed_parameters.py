"""What the code of a model asks of its parameters and of gradients: branches answer as the plain model does."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import Wrapped, compose, sample, sculpt, vote

WRAPPERS: dict[str, Callable[[], Any]] = {
    "loop": functools.partial(vote.Wrapper, 3, strategy="loop"),
    "vmap": functools.partial(vote.Wrapper, 3, strategy="vmap"),
    "share": functools.partial(vote.Wrapper, 3, share=1),
    "rank1": functools.partial(vote.Wrapper, 3, share="rank1"),
    "sculpt": sculpt.Wrapper,
    "weights": lambda: sample.Wrapper(3, sample.Normal(0.0), where="weights"),
    "both": lambda: compose(vote.Wrapper(3, share=1), sculpt.Wrapper()),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.c, self.scale = nn.Linear(5, 8), nn.Linear(8, 2), nn.Parameter(torch.full((2,), 0.5))
        self.scale.gain = 3.0  # type: ignore[attr-defined]

    def head(self, h: Tensor) -> Tensor:
        return self.c(h) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.a(x)))


class Asks(Net):
    def head(self, h: Tensor) -> Tensor:
        y = super().head(h)
        return y * self.scale.exp() if isinstance(self.scale, nn.Parameter) else y


class Finds(Net):
    def head(self, h: Tensor) -> Tensor:
        return super().head(h) + self.get_parameter("c.weight").square().sum()


class Marked(Net):
    def head(self, h: Tensor) -> Tensor:
        return super().head(h) * getattr(self.scale, "gain", 1.0)


def plain_mean(wrapped: Any, build: Callable[[], nn.Module], x: Tensor) -> Tensor:
    """Return the mean of newly built models with the weights of the voters."""
    answers = []
    for voter in Wrapped.voters(wrapped) or [Wrapped.unwrap(wrapped)]:
        model = build().eval()
        model.load_state_dict(voter.state_dict())
        answers.append(model(x))
    return torch.stack(answers).mean(0)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("build", [Asks, Finds, Marked])
def test_parameters_of_branches_are_parameters(build: Callable[[], nn.Module], name: str, gradients: bool) -> None:
    x = torch.randn(6, 5)
    with torch.set_grad_enabled(gradients):
        wrapped = WRAPPERS[name]()(build()).eval()
        expected = plain_mean(wrapped, build, x)
        for y in (wrapped(x), wrapped(x), wrapped(x, return_risk=True)[0]):
            torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("share", [None, 1])
def test_attributes_of_parameters_are_those_of_the_voters(share: Any) -> None:
    wrapped: Any = vote.Wrapper(3, share=share)(Net())
    wrapped.load_state_dict(wrapped.state_dict())
    name = "scale@vote" if share is None else "scale"
    # as optimizers' groups are made
    marked = [key for key, parameter in wrapped.named_parameters() if hasattr(parameter, "gain")]
    assert marked == [name]
    assert all(voter.scale.gain == 3.0 for voter in Wrapped.voters(wrapped))
    assert wrapped.scale.gain == Wrapped.unwrap(wrapped).scale.gain == 3.0


def test_an_attribute_that_changes_between_calls_is_seen() -> None:
    x, wrapped = torch.randn(6, 5), vote.Wrapper(3)(Marked()).eval()
    y = wrapped(x)
    wrapped.scale.gain = 6.0
    torch.testing.assert_close(wrapped(x), 2 * y)


class Adapts(Net):
    """Predicts with a copy of its layer after a step of gradient descent, as methods of adaptation at test time do."""

    def head(self, h: Tensor) -> Tensor:
        layer = copy.deepcopy(self.c)
        with torch.enable_grad():
            gradients = torch.autograd.grad(layer(h.detach()).square().sum(), list(layer.parameters()))
        torch.optim.SGD(layer.parameters(), 0.1)
        with torch.no_grad():
            for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
                parameter.sub_(0.1 * gradient)
        return super().head(h) + layer(h)


@pytest.mark.parametrize("name", ["loop", "share", "sculpt"])
def test_layers_can_be_copied_in_forward(name: str) -> None:
    x, wrapped = torch.randn(6, 5), WRAPPERS[name]()(Adapts()).eval()
    torch.testing.assert_close(wrapped(x), plain_mean(wrapped, Adapts, x))
    torch.testing.assert_close(wrapped(x, return_risk=True)[0], plain_mean(wrapped, Adapts, x))


class Factors(nn.Module):
    """A matrix of two factors, of which some rows are a new module of the same class, as in libraries of factorized tensors."""

    def __init__(self, left: Tensor, right: Tensor) -> None:
        super().__init__()
        for name, factor in (("left", left), ("right", right)):
            if isinstance(factor, nn.Parameter):
                self.register_parameter(name, factor)
            else:
                self.register_buffer(name, factor)

    def __getitem__(self, rows: slice) -> "Factors":
        return type(self)(self.left[rows], self.right)

    def forward(self) -> Tensor:
        return self.left @ self.right


class Factorized(Net):
    def __init__(self) -> None:
        super().__init__()
        self.factors = Factors(nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(3, 8)))

    def head(self, h: Tensor) -> Tensor:
        return super().head(h) + self.factors[:2]() @ h.mean(0)


@pytest.mark.parametrize("name", WRAPPERS)
def test_modules_of_parameters_can_be_made_in_forward(name: str) -> None:
    x, wrapped = torch.randn(6, 5), WRAPPERS[name]()(Factorized()).eval()
    expected = plain_mean(wrapped, Factorized, x)
    for y in (wrapped(x), wrapped(x, return_risk=True)[0]):
        torch.testing.assert_close(y, expected)
    with torch.no_grad():
        torch.testing.assert_close(wrapped(x), expected)


@pytest.mark.parametrize("name", ["loop", "vmap", "share"])
def test_modules_of_parameters_pass_gradients_on(name: str) -> None:
    x, wrapped = torch.randn(6, 5), WRAPPERS[name]()(Factorized())
    voters = Wrapped.voters(wrapped)
    wrapped(x, tile_and_reduce=True).square().sum().backward()
    torch.stack([voter(x) for voter in voters]).mean(0).square().sum().backward()
    named = dict(wrapped.named_parameters())
    for factor in ("factors.left", "factors.right"):
        expected = torch.stack([voter.get_parameter(factor).grad for voter in voters])
        gradient = named[f"{factor}@vote"].grad if f"{factor}@vote" in named else named[factor].grad
        torch.testing.assert_close(gradient, expected if f"{factor}@vote" in named else expected.sum(0))


class MakesLayer(Net):
    def head(self, h: Tensor) -> Tensor:
        layer = nn.Linear(8, 2)
        layer.weight = self.c.weight
        return layer(h)


def test_a_layer_made_of_parameters_is_refused_with_what_to_write() -> None:
    wrapped: Any = vote.Wrapper(3)(MakesLayer()).eval()
    with pytest.raises(
        RuntimeError, match=r"instead of a new layer .* use the function, such as torch\.nn\.functional\.linear"
    ):
        wrapped(torch.randn(6, 5))


# ---- gradients that the model asks about: under vmap no tensor says that it requires them
class ClipsGradient(Net):
    def head(self, h: Tensor) -> Tensor:
        y = super().head(h)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return y


class DependsOnLeaf(Net):
    def head(self, h: Tensor) -> Tensor:
        y = super().head(h)
        return y if y.is_leaf else 2 * y


def with_backward_hook() -> nn.Module:
    model = Net()
    model.c.register_full_backward_pre_hook(lambda layer, gradients: tuple(0.3 * g for g in gradients))
    return model


@pytest.mark.parametrize("share", [None, 1])
@pytest.mark.parametrize("build", [ClipsGradient, DependsOnLeaf, with_backward_hook])
def test_gradients_that_the_model_asks_about_are_those_of_plain_copies(build: Any, share: Any) -> None:
    x, wrapped = torch.randn(6, 5), vote.Wrapper(3, share=share)(build())
    models = [build() for _ in range(3)]
    for model, voter in zip(models, Wrapped.voters(wrapped), strict=True):
        model.load_state_dict(voter.state_dict())
    for _ in range(2):
        for model in (wrapped, *models):
            model.zero_grad()
        y = wrapped(x, tile_and_reduce=True)
        expected = torch.stack([model(x) for model in models]).mean(0)
        torch.testing.assert_close(y, expected)
        y.square().sum().backward()
        expected.square().sum().backward()
        gradient = torch.stack([model.c.weight.grad for model in models])
        torch.testing.assert_close(wrapped.get_parameter("c.weight@vote").grad, gradient)


@pytest.mark.parametrize("build", [ClipsGradient, DependsOnLeaf])
def test_vmap_is_refused_where_it_would_hide_gradients(build: Any) -> None:
    wrapped = vote.Wrapper(3, strategy="vmap")(build())
    with pytest.raises(RuntimeError, match="asks whether a tensor requires gradients"):
        wrapped(torch.randn(6, 5), tile_and_reduce=True)
