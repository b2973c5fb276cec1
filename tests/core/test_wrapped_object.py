"""The wrapped object behaves as an object of the user's class in every respect, and can be unwrapped again."""

from __future__ import annotations

import abc
import contextlib
import copy
import inspect
import pickle
import warnings
from collections.abc import Sized
from typing import Any, Generic, TypeVar

import pytest
import torch
from helpers.wrapped_models import MAKERS, Net, answer, every_wrapper, wrap
from torch import Tensor, nn

from workbench import WorkbenchWarning, Wrapped, compose, is_wrapped, sculpt, unwrap, vote

Item = TypeVar("Item")


# ---- class, attributes, modules --------------------------------------------------------------------------------------


@every_wrapper
def test_it_is_an_instance_of_the_users_class(name: str) -> None:
    model = Net()
    wrapped = wrap(name, model)
    assert isinstance(wrapped, Net)
    assert isinstance(wrapped, Wrapped)
    assert is_wrapped(wrapped)
    assert not is_wrapped(model)
    assert type(wrapped).__name__ == "Net"
    assert (wrapped.kind, wrapped.width, wrapped.size, wrapped.tags) == ("small", 8, 8, {"a": 1})
    assert inspect.getdoc(type(wrapped)) == inspect.getdoc(Net)


class Scored(abc.ABC):
    """An interface without attributes, as those of knowledge graph embeddings and policies."""

    __slots__ = ()

    @abc.abstractmethod
    def score(self, x: Tensor) -> Tensor: ...


class Abstract(abc.ABC, Net): ...


class Scoring(Scored, Net):
    def score(self, x: Tensor) -> Tensor:
        return super().forward(x).sum(-1)


class Of(Generic[Item], Net): ...


class Shaped(Sized, Net):
    def __len__(self) -> int:
        return 3


class Slotted(Of[int]):
    """The interface is not the first base of the class itself."""


@pytest.mark.parametrize("cls", [Abstract, Scoring, Of, Of[int], Shaped, Slotted])
def test_a_class_whose_first_base_is_an_interface(cls: Any) -> None:
    x, model = torch.randn(4, 3), cls().eval()
    assert is_wrapped(vote.Wrapper(2)(nn.Sequential(cls()), at="0")[0])
    for wrapper in (vote.Wrapper(3), compose(vote.Wrapper(3), sculpt.Wrapper())):
        wrapped: Any = wrapper(copy.deepcopy(model))
        assert isinstance(wrapped, type(model))
        assert isinstance(wrapped, Wrapped)
        assert type(wrapped).__mro__[1] is Wrapped
        answers = torch.stack([voter(x) for voter in wrapped.voters()])
        torch.testing.assert_close(wrapped(x, return_risk=True)[0], answers.mean(0))
        again = pickle.loads(pickle.dumps(wrapped))
        assert torch.equal(again(x), wrapped(x))
        assert torch.equal(copy.deepcopy(wrapped)(x), wrapped(x))
        assert type(unwrap(wrapped)) is type(model)
        later = type("Later", (type(wrapped),), {})  # as torch makes one for parametrizations of the whole
        assert later.__mro__[1:] == type(wrapped).__mro__


@every_wrapper
def test_methods_that_call_the_object_get_the_wrapped_prediction(name: str) -> None:
    wrapped = wrap(name, Net())
    x = torch.randn(4, 3)
    torch.manual_seed(7)
    y = wrapped(x)
    torch.manual_seed(7)
    assert torch.equal(wrapped.doubled(x), 2 * y)


@every_wrapper
def test_it_has_the_modules_of_the_model_under_their_names(name: str) -> None:
    model = Net()
    wrapped = wrap(name, model)
    types = {path: type(module) for path, module in wrapped.named_modules() if path and "@" not in path}
    assert types == {path: type(module) for path, module in model.named_modules() if path}
    assert wrapped.layers[0] is wrapped.fc1
    assert wrapped.layers[0] is not model.fc1


@every_wrapper
def test_the_given_model_stays_as_it_was_and_shares_what_no_method_took(name: str) -> None:
    model = Net().eval()
    x = torch.randn(5, 3)
    before, state = model(x), copy.deepcopy(model.state_dict())
    keys = list(model.__dict__)
    wrapped: Any = MAKERS[name]()(model)
    wrapped.train()
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrapped(torch.randn(12, 3))
    assert list(model.__dict__) == keys
    assert type(model) is Net
    assert not model.training
    shared = dict(wrapped.named_base_parameters())
    for key, parameter in model.named_parameters():
        assert (key in shared) == (key in wrapped.state_dict())
        if key in shared:
            assert shared[key] is parameter
    if name in ("vote", "composed"):
        assert torch.equal(model(x), before)
    assert model.state_dict().keys() == state.keys()


@every_wrapper
def test_repr_names_the_methods_and_hides_what_they_added(name: str) -> None:
    wrapped = wrap(name, Net())
    text = repr(wrapped)
    assert text.startswith("Net[")
    assert "(fc1): Linear(in_features=3, out_features=8, bias=True)" in text
    assert all(method in text.splitlines()[0] for method in wrapped.methods)


def told_about_layers(name: str) -> Any:
    """Layers that voters took over answer as the first voter when they are called by themselves, and say so once."""
    return (
        pytest.warns(WorkbenchWarning, match="first voter only")
        if name in ("vote", "rank1", "composed")
        else contextlib.nullcontext()
    )


def test_sequential_models_index_count_and_iterate_over_their_own_layers() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    for name in MAKERS:
        wrapped = wrap(name, model)
        assert len(wrapped) == 3
        assert [type(layer) for layer in wrapped] == [nn.Linear, nn.Tanh, nn.Linear]
        assert wrapped[-1] is wrapped._modules["2"]
        assert len(wrapped[:2]) == 2
        with told_about_layers(name):
            assert wrapped[:2](torch.randn(4, 3)).shape == (4, 4)


@every_wrapper
def test_the_signature_of_forward_shows_the_models_arguments(name: str) -> None:
    wrapped = wrap(name, Net())
    parameters = inspect.signature(wrapped.forward).parameters
    assert list(parameters)[:2] == ["x", "gain"]
    assert parameters["gain"].default == 1.0
    x = torch.randn(4, 3)
    torch.manual_seed(7)
    y = wrapped(x)
    torch.manual_seed(7)
    assert torch.allclose(wrapped(x, gain=2.0), 2 * y)
    torch.manual_seed(7)
    assert torch.allclose(wrapped(x=x), y)


def test_the_models_own_names_win() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 1)
            self.scaling = 0.5
            self.methods = nn.Linear(1, 1)
            self.register_buffer("needs_fit", torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.scaling * self.methods(self.fc(x)) * self.needs_fit

        def loss(self, x: Tensor) -> str:
            return "my loss"

        def voters(self) -> str:
            return "my voters"

        def fit(self, x: Tensor, y: Tensor) -> str:
            return "my fit"

        def scale(self) -> str:
            return "my scale"

    x = torch.randn(6, 3)
    for name in ("vote", "sample", "sculpt", "composed"):
        wrapped: Any = MAKERS[name]()(Named()).eval()
        assert wrapped.loss(x) == "my loss"
        assert wrapped.voters() == "my voters"
        assert wrapped.fit(x, x) == "my fit"
        assert wrapped.scale() == "my scale"
        assert wrapped.scaling == 0.5
        assert isinstance(wrapped.methods, nn.Linear)
        assert isinstance(wrapped.needs_fit, Tensor)
        assert answer(wrapped, x)[0].shape == (6, 1)
        assert torch.isfinite(Wrapped.loss(wrapped, nn.MSELoss(), x, torch.zeros(6, 1)))
        plain = wrapped.unwrap()
        assert plain(x).shape == (6, 1)
        assert len(Wrapped.voters(wrapped)) == (3 if "vote" in repr(wrapped) else 1)


def test_a_decorated_class_may_set_names_of_ours() -> None:
    @vote.Wrapper()
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 1)
            self.scaling = 0.5
            self.methods = ["a"]

        def forward(self, x: Tensor) -> Tensor:
            return self.scaling * self.fc(x)

    net: Any = Named()
    _, risk = net.eval()(torch.randn(4, 3), return_risk=True)
    assert bool((risk > 0).all())
    assert (net.scaling, net.methods) == (0.5, ["a"])


# ---- parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [None, "rank1", 1])
@pytest.mark.parametrize("head", [False, True], ids=["", "sculpt"])
def test_a_function_that_is_applied_writes_into_every_voter(share: Any, head: bool) -> None:
    """Initializations do so; what all share is written once, and what writes nothing is called once."""
    wrapper: Any = compose(vote.Wrapper(3, share=share), *[sculpt.Wrapper()] * head)
    wrapped = wrapper(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
    expected = wrapped.voters()
    seen: list[nn.Module] = []

    def change(module: nn.Module) -> None:
        seen.append(module)
        if isinstance(module, nn.Linear):
            module.weight.data.mul_(2)
            nn.init.constant_(module.bias, 3.0)
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean.add_(1)

    assert wrapped.apply(change) is wrapped
    for voter, plain in zip(wrapped.voters(), expected, strict=True):
        plain.apply(change)
        for (name, tensor), other in zip(voter.state_dict().items(), plain.state_dict().values(), strict=True):
            torch.testing.assert_close(tensor, other, msg=name)
    assert torch.equal(wrapped[2].bias, wrapped.voters()[0][2].bias), "the first is shown again"
    wrapped.apply(lambda module: nn.init.normal_(module.weight) if isinstance(module, nn.Linear) else None)
    first, second = wrapped.voters()[:2]
    assert not torch.equal(first[2].weight, second[2].weight)
    seen.clear()
    wrapped.apply(seen.append)
    assert len(seen) == 4


@every_wrapper
def test_unwrap_gives_a_plain_model_of_the_class(name: str) -> None:
    model = Net().eval()
    wrapped = wrap(name, model)
    plain = wrapped.unwrap()
    x = torch.randn(5, 3)
    assert type(plain) is Net
    assert not is_wrapped(plain)
    assert plain.state_dict().keys() == model.state_dict().keys()
    assert list(dict(plain.named_parameters())) == list(dict(model.named_parameters()))
    assert not [key for key in plain.__dict__ if "workbench" in key or "@" in key]
    expected = wrapped.voters()[0] if "vote" in wrapped.methods else model
    assert torch.allclose(plain(x), expected(x), atol=1e-6)
    assert torch.equal(unwrap(wrapped)(x), plain(x))
    if name != "rank1":  # there every tensor of a voter is a product
        shared = dict(wrapped.named_base_parameters())
        assert all(p is shared[key] for key, p in plain.named_parameters() if key in shared)


@every_wrapper
def test_voters_are_plain_models_with_tensors_of_their_own(name: str) -> None:
    wrapped = wrap(name, Net())
    voters = wrapped.voters()
    x = torch.randn(5, 3)
    assert len(voters) == (3 if "vote" in wrapped.methods else 1)
    held = {id(p) for p in wrapped.parameters()}
    for voter in voters:
        assert type(voter) is Net
        assert not is_wrapped(voter)
        assert not held & {id(p) for p in voter.parameters()}
        assert all(p.requires_grad for p in voter.parameters())
    if "vote" in wrapped.methods:
        answers = torch.stack([voter(x) for voter in voters])
        assert torch.allclose(wrapped(x), answers.mean(0), atol=1e-6)
        assert float((answers[0] - answers[1]).detach().abs().max()) > 1e-4


def test_every_parameter_of_every_voter_differs_after_wrapping() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.scale_ = nn.Parameter(torch.ones(4))
            self.shift = nn.Parameter(torch.zeros(4))
            self.norm = nn.LayerNorm(4)
            self.lstm = nn.LSTM(4, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.attention(x, x, x)[0] * self.scale_ + self.shift
            return self.lstm(self.norm(x))[0]

    wrapped: Any = vote.Wrapper(3)(Mixed()).eval()
    for key, *values in zip(
        dict(wrapped.voters()[0].named_parameters()), *(voter.parameters() for voter in wrapped.voters()), strict=True
    ):
        for i, j in ((0, 1), (0, 2), (1, 2)):
            assert not torch.equal(values[i], values[j]), key
    x = torch.randn(2, 5, 4)
    answers = torch.stack([voter(x) for voter in wrapped.voters()])
    assert torch.allclose(wrapped(x), answers.mean(0), atol=1e-5)


@every_wrapper
def test_risk_and_base_parameters_part_all_parameters(name: str) -> None:
    model = Net()
    wrapped = wrap(name, model)
    risk, base = dict(wrapped.named_risk_parameters()), dict(wrapped.named_base_parameters())
    assert all(p is q for p, q in zip(wrapped.risk_parameters(), risk.values(), strict=True))
    assert all(p is q for p, q in zip(wrapped.base_parameters(), base.values(), strict=True))
    everything = dict(wrapped.named_parameters())
    assert risk.keys() | base.keys() == everything.keys()
    assert not risk.keys() & base.keys()
    assert bool(base) == (name not in ("vote", "composed"))
    with torch.random.fork_rng():
        torch.manual_seed(99)
        other = wrap(name, model)
    other.set_risk_parameters(risk)
    assert all(torch.equal(p, risk[key]) for key, p in other.named_risk_parameters())
