"""Predictions and risks of wrapped Keras models: compared with plain copies called one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import keras_models
from helpers.keras_models import KINDS, X, Y, by_hand, k, sequential

from workbench import compose, neo, sample, sculpt, vote
from workbench.errors import WorkbenchWarning

seeded_keras = keras_models.seeded_keras


@pytest.mark.parametrize("make", KINDS)
def test_votes_are_the_mean_and_spread_of_plain_models(make: Callable[[], Any]) -> None:
    plain = make()
    before, state = plain(X).detach().clone(), torch.get_rng_state()
    wrapped = vote.Wrapper(3)(plain)
    y, risk = wrapped(X, return_risk=True)
    assert torch.equal(torch.get_rng_state(), state)
    each = torch.stack([voter(X) for voter in by_hand(wrapped, plain, 3)])
    torch.testing.assert_close(y, each.mean(0))
    torch.testing.assert_close(risk, each.std(0, correction=0))
    torch.testing.assert_close(torch.stack([voter(X) for voter in wrapped.voters()]), each)
    torch.testing.assert_close(torch.as_tensor(wrapped.predict(X, verbose=0)), y.detach())
    assert isinstance(wrapped, type(plain))
    assert torch.equal(plain(X), before)


def test_voters_start_at_values_of_the_layers_own_initializers() -> None:
    initializer = k.initializers.RandomUniform(4.0, 5.0, seed=3)
    plain = k.Sequential([k.Input((4,)), k.layers.Dense(16, kernel_initializer=initializer)])
    kernels = vote.Wrapper(3)(plain).as_torch().state_dict()["dense.kernel@vote"]
    assert bool(((kernels >= 4) & (kernels <= 5)).all())
    assert not torch.equal(kernels[0], kernels[1])
    assert not torch.equal(kernels[0], plain.weights[0].value)


@pytest.mark.parametrize("make", KINDS)
def test_sculpt_and_sample_leave_the_prediction_and_say_risk(make: Callable[[], Any]) -> None:
    plain = make()
    with pytest.warns(WorkbenchWarning, match="compile"):
        wrapped = compose(sculpt.Wrapper(), sample.Wrapper(3, where="inputs"))(plain)
    _, risk = wrapped(X, return_risk=True)
    assert risk.names() == ("aleatoric", "epistemic", "total")
    with pytest.warns(WorkbenchWarning, match="compile"):
        alone = sculpt.Wrapper()(plain)
    assert torch.equal(alone(X), plain(X))
    assert alone(X, return_risk=True)[1].shape == (12, 1)


def test_sample_of_fixed_noise_equals_noise_by_hand() -> None:
    plain = sequential()
    wrapped = sample.Wrapper(50, sample.Normal(0.1), where="weights")(plain)
    y, risk = wrapped(X, return_risk=True)
    assert 0 < risk.mean().item() < 1
    assert (y - plain(X)).abs().max().item() < 4 * risk.max().item() / 7


def test_noise_without_a_seed_is_drawn_anew_at_each_call() -> None:
    class Noise(k.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return x + k.random.normal(k.ops.shape(x))

    plain = sequential(Noise())
    wrapped = compose()(plain)
    answers = []
    for model in (wrapped, plain):
        k.utils.set_random_seed(7)
        answers.append(torch.stack([model(X), model(X)]))
    assert not torch.allclose(*answers[0])
    torch.testing.assert_close(answers[0], answers[1])


def test_neo_says_what_it_says_of_the_same_network_in_torch() -> None:
    plain = sequential()
    wrapped = neo.Wrapper()(plain)
    wrapped.fit(X)
    y, risk = wrapped(X, return_risk=True)
    assert torch.equal(y, plain(X))
    network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    with torch.no_grad():
        for parameter, variable in zip(network.parameters(), plain.weights, strict=True):
            parameter.copy_(variable.value.mT if variable.value.dim() > 1 else variable.value)
    same = neo.Wrapper()(network).fit(torch.as_tensor(X)).eval()
    torch.testing.assert_close(risk, same(torch.as_tensor(X), return_risk=True)[1])
    wrapped.compile("sgd", "mse")
    before = [v.numpy().copy() for v in plain.weights]
    assert "loss" in wrapped.fit(X, Y, epochs=1, verbose=0).history
    assert not all(np.array_equal(a, b.numpy()) for a, b in zip(before, plain.weights, strict=True))
    assert torch.equal(wrapped(X), plain(X))


def layered() -> list[tuple[Any, Any]]:
    images, tokens = np.random.default_rng(0).random((6, 8, 8, 3), "float32"), np.arange(30).reshape(6, 5) % 7
    convolutions = [k.layers.Conv2D(4, 3), k.layers.BatchNormalization(), k.layers.MaxPooling2D(), k.layers.Flatten()]
    attended = k.Input((5, 8))
    pooled = k.layers.GlobalAveragePooling1D()(k.layers.MultiHeadAttention(2, 4)(attended, attended))
    named = {"a": k.Input((3,), name="a"), "b": k.Input((2,), name="b")}
    joined = k.layers.Concatenate()([named["a"], named["b"]])
    return [
        (k.Sequential([k.Input((8, 8, 3)), *convolutions, k.layers.Dense(2)]), images),
        (k.Sequential([k.Input((5,)), k.layers.Embedding(7, 4, mask_zero=True), k.layers.LSTM(4)]), tokens),
        (k.Model(attended, k.layers.Dense(1)(pooled)), images.reshape(6, -1)[:, :40].reshape(6, 5, 8)),
        (
            k.Model(named, {"u": k.layers.Dense(1)(joined), "v": k.layers.Dense(2)(joined)}),
            {"a": images[:, 0, 0], "b": images[:, 0, 1, :2]},
        ),
    ]


@pytest.mark.parametrize("i", range(4), ids=["convolutions", "recurrent", "attention", "several"])
def test_layers_of_all_kinds_vote(i: int) -> None:
    plain, x = layered()[i]
    wrapped = vote.Wrapper(2)(plain)
    y, risk = map(k.tree.flatten, wrapped(x, return_risk=True))
    outputs = [k.tree.flatten(voter(x)) for voter in wrapped.voters()]
    for mean, spread, *each in zip(y, risk, *outputs, strict=True):
        torch.testing.assert_close(mean, torch.stack(each).mean(0))
        torch.testing.assert_close(spread, torch.stack(each).std(0, correction=0))
        assert spread.mean().item() > 0


def test_a_decorated_class_builds_wrapped_models() -> None:
    @vote.Wrapper
    class Net(k.Model):
        def __init__(self, units: int = 4) -> None:
            super(Net, self).__init__()  # noqa: UP008  # the old form finds the decorated class
            self.hidden, self.out = k.layers.Dense(units), k.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.out(self.hidden(x))

        def shifted(self, x: Any) -> Any:
            return self.call(x + 3)

    model = Net(units=5)
    model.compile("adam", "mse")
    model.fit(X, Y, epochs=1, verbose=0)
    _, risk = model(X, return_risk=True)
    assert isinstance(model, Net)
    assert float(risk.min()) > 0
    torch.testing.assert_close(model.shifted(torch.as_tensor(X)), model(X + 3))
    assert len(model.trainable_variables) == 4


def test_a_function_that_calls_a_model_is_wrapped() -> None:
    model = sequential()

    @vote.Wrapper()
    def wrapped_model(x: Any) -> Any:
        return 2 * model(x, training=False)

    before = model(X).detach().clone()
    y, risk = wrapped_model(torch.as_tensor(X), return_risk=True)
    state = wrapped_model.state_dict()
    weights = [state[name] for name in state if name.endswith("@vote")]
    each = []
    for i in range(3):
        copied = k.models.clone_model(model)
        copied.set_weights([w[i].numpy() for w in weights])
        each.append(2 * copied(X))
    torch.testing.assert_close(y, torch.stack(each).mean(0))
    torch.testing.assert_close(risk, torch.stack(each).std(0, correction=0))
    assert torch.equal(model(X), before)


def test_layers_that_are_functions_vote_and_are_given_back() -> None:
    inputs = k.Input((4,))
    scaled = k.layers.Lambda(lambda x, by: by * x, arguments={"by": 3.0})
    inner = k.Sequential([k.Input((4,)), k.layers.Dense(2), k.layers.Lambda(lambda x: x[:, :1])])
    plain = k.Model(inputs, scaled(inner(inputs)))
    wrapped = vote.Wrapper(2)(plain)
    torch.testing.assert_close(wrapped(X), torch.stack([voter(X) for voter in wrapped.voters()]).mean(0))
    assert len(plain.layers[-1]._inbound_nodes) == 1


def test_a_wrapped_model_is_built_as_any() -> None:
    wrapped = vote.Wrapper(3)(k.Sequential([k.layers.Dense(2), k.layers.Dense(1)]))
    wrapped.build((None, 4))
    assert [tuple(v.shape) for v in wrapped.weights] == [(3, 4, 2), (3, 2), (3, 2, 1), (3, 1)]
    assert wrapped.count_params() == 3 * 13
    wrapped.summary(print_fn=lambda *args, **kwargs: None)


def test_the_graph_of_layers_is_told_to_be_the_given_models() -> None:
    wrapped = vote.Wrapper(2)(sequential())
    with pytest.warns(WorkbenchWarning, match=r"voters\(\)\[0\]\.inputs"):
        assert wrapped.inputs == wrapped.unwrap_shared().inputs
    first = wrapped.voters()[0]
    features = k.Model(first.inputs[0], first.layers[0].output)
    assert features(X).shape == (12, 8)


@pytest.mark.parametrize("make", KINDS)
def test_voters_are_given_whatever_the_loss(make: Callable[[], Any]) -> None:
    plain = make()
    plain.compile("sgd", lambda y, y_pred: k.ops.mean((y - y_pred) ** 2), metrics=[lambda y, y_pred: y_pred])
    wrapped = vote.Wrapper(2)(plain)
    wrapped.fit(X, Y, epochs=1, verbose=0)
    torch.testing.assert_close(wrapped(X), torch.stack([voter(X) for voter in wrapped.voters()]).mean(0))
    assert plain.compiled
