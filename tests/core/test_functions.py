"""Wrapped functions of tensors: models are found however the function refers to them, and vote only inside it."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from helpers import helper_functions
from helpers.function_models import WAYS, Pipeline, several
from helpers.helper_functions import predict
from helpers.models import mlp
from torch import Tensor, nn
from torch.nn import functional as F

from workbench import Risk, compose, is_wrapped, neo, sample, sculpt, vote

_shared_net = nn.Linear(3, 1)
_count = 0


# ---- every way to refer to a model -----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_voters_answer_as_the_function_itself_with_their_weights(way: str) -> None:
    function, _ = WAYS[way]()
    twin, models = WAYS[way]()  # never wrapped: it gets the weights of each voter in turn
    x = torch.randn(5, 3)
    before = function(x)
    wrapped: Any = vote.Wrapper(3)(function).eval()
    owner = {id(p): (model, key) for model in models for key, p in model.named_parameters()}
    places = {name: owner[id(p)] for name, p in compose()(twin).named_parameters()}
    assert len(places) == len(owner)
    expected = []
    for voter in wrapped.voters():
        assert dict(voter.named_parameters()).keys() == places.keys()
        with torch.no_grad():
            for name, p in voter.named_parameters():
                places[name][0].get_parameter(places[name][1]).copy_(p)
        expected.append(twin(x))
    y, risk = wrapped(x, return_risk=True)
    assert torch.allclose(y, torch.stack(expected).mean(0), atol=1e-6)
    assert torch.allclose(risk, torch.stack(expected).std(0, correction=0), atol=1e-6)
    assert bool((risk > 0).any())
    assert torch.equal(function(x), before)


@pytest.mark.parametrize("way", WAYS)
def test_other_wrappers_leave_the_prediction_of_a_function_alone(way: str) -> None:
    function, models = WAYS[way]()
    x = torch.randn(5, 3)
    before = function(x)
    for wrapper in (compose(), sculpt.Wrapper(n_layers=1, example=x), neo.Wrapper(), vote.Wrapper(1, finetune=True)):
        wrapped: Any = wrapper(function)
        assert torch.allclose(wrapped.eval()(x), before, atol=1e-6)
    sampled: Any = sample.Wrapper(4)(function)
    assert {id(p) for p in sampled.parameters()} == {id(p) for model in models for p in model.parameters()}
    assert sampled.eval()(x, return_risk=True)[1].shape == (5, 1)


# ---- globals, helpers, other files -----------------------------------------------------------------------------------


def _global_helper(x: Tensor) -> Tensor:
    return _shared_net(x)


def _global_model(x: Tensor) -> Tensor:
    global _count
    _count += 1
    return F.softplus(_global_helper(x))


def test_functions_that_reach_modules_by_globals_and_helpers() -> None:
    wrapped: Any = vote.Wrapper(3)(_global_model)
    x = torch.randn(5, 3)
    answers = torch.stack([voter(x) for voter in wrapped.eval().voters()])
    y, risk = wrapped(x, return_risk=True)
    assert torch.allclose(y, answers.mean(0), atol=1e-6)
    assert bool((risk > 0).all())
    assert torch.equal(_global_model(x), F.softplus(_shared_net(x)))
    rows = zip(*wrapped.risk_parameters(), strict=True)
    expected = torch.stack([F.softplus(F.linear(x, weight, bias)) for weight, bias in rows])
    assert torch.allclose(y, expected.mean(0), atol=1e-6)


def test_a_helper_of_another_file_and_a_model_of_another_file() -> None:
    x = torch.randn(5, 3)

    def model(x: Tensor) -> Tensor:
        return predict(x) + helper_functions.other(x)

    wrapped: Any = vote.Wrapper(3)(model)
    weights = dict(wrapped.named_risk_parameters())
    assert len(weights) == 4
    expected = [torch.tanh(voter.net(x)) + voter.other(x) for voter in wrapped.voters()]
    assert torch.allclose(wrapped.eval()(x), torch.stack(expected).mean(0), atol=1e-6)
    assert torch.equal(model(x), torch.tanh(helper_functions.net(x)) + helper_functions.other(x))


def test_assignments_to_globals_and_variables_outside_are_kept() -> None:
    net = nn.Linear(3, 1)
    calls, scale = 0, 1.0
    history: list[int] = []

    def scaled(x: Tensor) -> Tensor:
        return x * scale

    def model(x: Tensor) -> Tensor:
        nonlocal calls, scale
        calls += 1
        scale = 3.0
        history.append(calls)
        return scaled(net(x))

    x = torch.randn(4, 3)
    wrapped: Any = sculpt.Wrapper()(model)
    assert torch.equal(wrapped(x), 3 * net(x))
    assert (calls, history) == (1, [1])
    before = _count
    sculpt.Wrapper()(_global_model)(x)
    assert _count == before + 1
    pipeline = Pipeline()
    held: Any = sculpt.Wrapper()(lambda x: pipeline.predict(x))
    assert torch.equal(held(x), pipeline.predict(x))
    assert pipeline.calls == 2


def test_what_cannot_be_followed_is_refused() -> None:
    class Held:
        net = nn.Linear(3, 1)  # an attribute of a class

    net = nn.Linear(3, 1)

    def model(x: Tensor) -> Tensor:
        return net(x) + Held.net(x)

    wrapped: Any = vote.Wrapper(2)(model)
    with pytest.raises(
        RuntimeError, match="model calls a Linear that it does not refer to in a way that can be followed"
    ):
        wrapped(torch.randn(4, 3))
    with pytest.raises(RuntimeError, match="a way that can be followed"):
        wrapped(torch.randn(4, 3), return_risk=True)

    def harmless(x: Tensor) -> Tensor:
        return nn.Sequential(nn.ReLU(), nn.Softplus())(net(x))  # no parameters

    assert bool((vote.Wrapper(2)(harmless)(torch.randn(4, 3), return_risk=True)[1] > 0).any())


def test_functions_that_train_are_refused() -> None:
    net = nn.Linear(3, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)

    def backward(x: Tensor) -> Tensor:
        loss = net(x).sum()
        loss.backward()
        return loss

    def stepping(x: Tensor) -> Tensor:
        opt.step()
        return net(x)

    for function, what in ((backward, "calls backward"), (stepping, "optimizer SGD")):
        with pytest.raises(TypeError, match=f"{function.__name__} .*{what}.*wrap only the forward"):
            vote.Wrapper()(function)


def no_modules(x: Tensor) -> Tensor:
    return x + 1


@pytest.mark.parametrize("function", [no_modules, functools.partial(no_modules), torch.relu, len, lambda: 3])
def test_functions_without_models_are_refused(function: Any) -> None:
    with pytest.raises(TypeError, match=r"uses no nn\.Module.*(wrap the module itself|method=)"):
        vote.Wrapper()(function)


def test_methods_are_refused_with_a_remedy() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 1)

        def encode(self, x: Tensor) -> Tensor:
            return self.fc(x)

    with pytest.raises(TypeError, match=r"Net\.encode is a method of a module.*method='encode'"):
        vote.Wrapper()(Net().encode)
    with pytest.raises(TypeError, match=r"wrap the class, Wrapper\(\)\(Net, method='encode'\)"):
        vote.Wrapper()(Net.encode)


# ---- what a wrapped function is --------------------------------------------------------------------------------------


def test_functions_keep_name_doc_and_arguments() -> None:
    net = nn.Linear(3, 1)

    @vote.Wrapper(3)
    def model(x: Tensor, gain: float = 2.0) -> Tensor:
        """Predict from x."""
        return net(x) * gain

    assert model.__name__ == "model"
    assert model.__doc__ == "Predict from x."
    x = torch.randn(4, 3)
    assert torch.allclose(model.eval()(x, gain=4.0), 2 * model(x))
    assert len(model.state_dict()) == 3  # weight, bias, settings


@vote.Wrapper  # type: ignore[arg-type]  # a checker wants the parentheses
def bare(x: Tensor) -> Tensor:
    return 2 * _global_helper(x)


def test_a_bare_decorator_is_one_with_the_defaults() -> None:
    x = torch.randn(4, 3)
    wrapped: Any = bare
    voters = wrapped.eval().voters()
    assert len(voters) == 3
    assert torch.allclose(wrapped(x), torch.stack([voter(x) for voter in voters]).mean(0), atol=1e-6)
    plain: Any = vote.Wrapper
    for target in (_global_model, mlp(), functools.partial(_global_model), Pipeline().predict):
        assert is_wrapped(plain(target))
    assert issubclass(plain(nn.Linear), nn.Linear)


def test_a_part_of_a_function() -> None:
    first, second = nn.Linear(3, 4), nn.Linear(4, 1)

    def model(x: Tensor) -> Tensor:
        return second(torch.tanh(first(x)))

    x = torch.randn(5, 3)
    wrapped: Any = vote.Wrapper(3)(model, at="first")
    hidden = torch.stack([voter(x) for voter in wrapped.eval().first.voters()])
    assert torch.allclose(wrapped.first(x, return_risk=True)[1], hidden.std(0, correction=0), atol=1e-6)
    assert torch.allclose(wrapped(x), second(torch.tanh(hidden.mean(0))), atol=1e-6)
    assert torch.equal(model(x), second(torch.tanh(first(x))))


def test_a_decorated_function_is_copied_trained_and_composed() -> None:
    function, _ = several()
    both: Any = compose(vote.Wrapper(3), sculpt.Wrapper(n_layers=1))(function)
    x, y = torch.randn(12, 3), torch.rand(12, 1)
    risk = both.eval()(x, return_risk=True)[1]
    assert isinstance(risk, Risk)
    assert torch.allclose(risk.total**2, risk.aleatoric**2 + risk.epistemic**2)
    twin = copy.deepcopy(both)
    assert torch.equal(twin(x), both(x))
    opt = torch.optim.Adam(both.train().parameters(), lr=0.05)
    losses = []
    for _ in range(30):
        opt.zero_grad()
        loss = both.loss(nn.MSELoss(), x, y)
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert not torch.equal(twin(x), both.eval()(x))
    unwrapped = both.unwrap()
    assert torch.equal(unwrapped(x), both.voters()[0](x))


def test_a_wrapped_function_of_a_file_can_be_pickled() -> None:
    wrapped: Any = vote.Wrapper(3)(_global_model).eval()
    x = torch.randn(4, 3)
    loaded: Any = pickle.loads(pickle.dumps(wrapped))
    assert torch.equal(loaded(x), wrapped(x))
    with torch.no_grad():
        for p in loaded.parameters():
            p.zero_()
    assert torch.equal(loaded(x), F.softplus(torch.zeros(4, 1)))
    assert not torch.equal(wrapped(x), loaded(x))


def test_a_global_that_is_assigned_anew_does_not_change_the_wrapped_function(monkeypatch: Any) -> None:
    wrapped: Any = sculpt.Wrapper()(_global_model)
    x = torch.randn(4, 3)
    before = wrapped(x)
    monkeypatch.setitem(globals(), "_shared_net", nn.Linear(3, 1))
    assert torch.equal(wrapped(x), before)
