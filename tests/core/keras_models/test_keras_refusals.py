"""Refusals of what cannot be right for wrapped Keras models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import keras_models
from helpers.keras_models import X, Y, functional, k, net_class, sequential, subclassed

import workbench
from workbench import NotFittedError, augment, laplace, sample, sculpt, snapshot, swag, vote
from workbench.errors import WorkbenchWarning

seeded_keras = keras_models.seeded_keras


def test_what_cannot_be_right_is_refused(tmp_path: Path) -> None:
    wrapped = vote.Wrapper(2)(sequential())
    with pytest.raises(NotImplementedError, match="as_torch"):
        wrapped.export(tmp_path / "model")
    with pytest.raises(NotImplementedError, match=r"workbench\.load"):
        copy.deepcopy(wrapped)
    with pytest.raises(TypeError, match="Keras layer, not a model"):
        vote.Wrapper(2)(k.layers.Dense(1))
    with pytest.raises(ValueError, match="torch module Linear"):
        vote.Wrapper(2)(k.Sequential([k.Input((4,)), k.layers.TorchModuleWrapper(torch.nn.Linear(4, 1))]))
    with pytest.raises(ValueError, match="laplace needs a last layer"):
        laplace.Wrapper()(sequential())
    with pytest.raises(ValueError, match="statistics of batch_normalization"):
        swag.Wrapper()(sequential(k.layers.BatchNormalization()))
    with pytest.raises(ValueError, match="channels_last"):
        augment.Wrapper("flip")(sequential())
    with pytest.raises(ValueError, match="whole model"):
        vote.Wrapper(2)(sequential(), at="dense")
    for wrapper in (swag.Wrapper(), snapshot.Wrapper()):
        gathering = wrapper(sequential())
        gathering.compile("adam", "mse")
        with pytest.raises(
            ValueError, match=rf"{wrapper.make()[0].name} collects weights.*workbench\.fit\(model\.as_torch\(\)"
        ):
            gathering.fit(X, Y)
        gathering.train_on_batch(X, Y)  # which gathers nothing
        with pytest.raises(NotFittedError, match=r"train with workbench\.fit"):
            gathering(X, return_risk=True)
    unbuilt = vote.Wrapper(2)(subclassed(build=False))
    with pytest.raises(RuntimeError, match="no weights yet"):
        unbuilt.as_torch()
    with pytest.raises(TypeError, match=r"give model\.as_torch\(\)"):
        workbench.fit(wrapped, (X, Y), epochs=1)
    with pytest.raises(TypeError, match="is a Keras layer"):
        vote.Wrapper(2)(torch.nn.Sequential(torch.nn.Linear(4, 4), sequential()))
    wrapped.compile("adam", "mse", jit_compile=True)
    with pytest.raises(ValueError, match="jit_compile"):
        wrapped.fit(X, Y, verbose=0)
    with pytest.raises(ValueError, match="wrapped already"):
        sample.Wrapper()(k.Sequential([k.Input((4,)), wrapped, k.layers.Dense(1)]))


def test_layers_that_change_after_wrapping_are_refused() -> None:
    wrapped = vote.Wrapper(2)(sequential())
    for act in (lambda: wrapped.add(k.layers.Dense(1)), wrapped.pop):
        with pytest.raises(NotImplementedError, match="Change the plain model"):
            act()
    wrapped.layers[0].enable_lora(2)
    wrapped.compile("sgd", "mse")
    with pytest.raises(RuntimeError, match="lora_kernel_a"):
        wrapped.fit(X, Y, verbose=0)
    for use in (lambda: wrapped(X), wrapped.voters, wrapped.as_torch):
        with pytest.raises(RuntimeError, match="lora_kernel_a"):
            use()
    plain = sequential()
    plain.layers[0].enable_lora(2)
    plain.compile("sgd", "mse")
    adapted = vote.Wrapper(2)(plain)
    adapted.fit(X, Y, verbose=0)
    torch.testing.assert_close(adapted(X), torch.stack([voter(X) for voter in adapted.voters()]).mean(0))


def test_what_would_change_the_given_model_is_refused() -> None:
    plain = functional()
    wrapped = vote.Wrapper(2)(plain)
    before = [variable.numpy() for variable in plain.weights]
    with pytest.raises(NotImplementedError, match="quantize a plain model"):
        wrapped.quantize("int8")
    with pytest.raises(NotImplementedError, match="set_dtype_policy"):
        wrapped.double()
    assert wrapped.to("cpu") is wrapped
    for variable, value in zip(plain.weights, before, strict=True):
        assert variable.value.dtype == torch.float32
        assert np.array_equal(variable.numpy(), value)


def test_other_tensors_and_other_models_are_refused() -> None:
    wrapped = vote.Wrapper(2)(functional())
    zeros = {name: torch.zeros_like(parameter) for name, parameter in wrapped.as_torch().named_parameters()}
    with pytest.raises(NotImplementedError, match=r"torch\.func\.functional_call\(model\.as_torch\(\)"):
        wrapped.stateless_call([*zeros.values()], [], X)
    answer = torch.func.functional_call(wrapped.as_torch(), zeros, torch.as_tensor(X))
    assert torch.equal(answer, torch.zeros(12, 1))
    with pytest.warns(WorkbenchWarning, match="voters"), pytest.raises(NotImplementedError, match="wrap the clone"):
        k.models.clone_model(wrapped)


def test_states_between_calls_that_branches_would_share_are_refused() -> None:
    recurrent = k.Sequential([k.Input(batch_shape=(4, 3, 2)), k.layers.Bidirectional(k.layers.LSTM(5, stateful=True))])
    with pytest.raises(ValueError, match=r"ward_lstm.* is stateful.*wrap with state="):
        vote.Wrapper(2)(recurrent)

    class Counter(k.layers.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.hidden = _Hidden(k.Variable(0.0, trainable=False, name="count"))

        def call(self, x: Any) -> Any:
            self.hidden.variable.assign(self.hidden.variable + 1)
            return x * self.hidden.variable

    plain = sequential(Counter())
    with pytest.raises(RuntimeError, match=r"assigns to the variable count.*add_weight\(trainable=False\)"):
        vote.Wrapper(2)(plain)(X)
    assert float(plain.layers[1].hidden.variable.value) == 0


def test_a_layer_that_assigns_to_its_kernel_predicts_and_does_not_train() -> None:
    plain = sequential(k.layers.SpectralNormalization(k.layers.Dense(6)))
    plain.compile("sgd", "mse")
    wrapped = vote.Wrapper(2)(plain)
    torch.testing.assert_close(wrapped(X), torch.stack([voter(X) for voter in wrapped.voters()]).mean(0))
    before = [variable.numpy() for variable in wrapped.weights]
    with pytest.raises(RuntimeError, match=r"assigns to its weight spectral_normalization\.kernel"):
        wrapped.fit(X, Y, verbose=0)
    assert all(map(np.array_equal, (variable.numpy() for variable in wrapped.weights), before))


class _Hidden:
    """Holder in which Keras does not find a variable."""

    def __init__(self, variable: Any) -> None:
        self.variable = variable


class Past:
    """A train_step that calls layers and never the model."""

    def train_step(self: Any, data: Any) -> Any:
        x, y = data
        loss = k.ops.mean((self.out(x) - y) ** 2)
        self.zero_grad()
        loss.backward()
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in self.trainable_weights], self.trainable_weights)
        return {"loss": loss}


@pytest.mark.parametrize("wrapper", [vote.Wrapper(2), sculpt.Wrapper()])
def test_steps_that_never_call_the_model_are_refused(wrapper: Any) -> None:
    class Own(Past, k.Model):
        def __init__(self) -> None:
            super().__init__()
            self.out = k.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.out(x)

    plain = Own()
    plain(X)
    plain.compile("sgd", "mse")
    with pytest.raises(RuntimeError, match="never the model itself"):
        wrapper(plain).fit(X, Y, epochs=1, verbose=0)


def test_own_steps_of_a_risk_head_are_told_of_the_pair() -> None:
    class Own(k.Model):
        def __init__(self) -> None:
            super().__init__()
            self.out = k.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.out(x)

        def test_step(self, data: Any) -> Any:
            x, y = data
            return {"error": k.ops.mean(k.ops.square(self(x, training=False) - y))}

    plain = Own()
    plain(X)
    plain.compile("sgd", "mse")
    wrapped = sculpt.Wrapper()(plain)
    with pytest.raises(TypeError) as caught:
        wrapped.evaluate(X, Y, verbose=0)
    assert "returns the pair (prediction, risk)" in caught.value.__notes__[0]
    wrapped.fit(X, Y, verbose=0)


def test_an_optimizer_whose_config_leaves_something_out_is_refused() -> None:
    class Scaled(k.optimizers.SGD):  # type: ignore[misc]
        def __init__(self, factor: float = 1.0, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.factor = factor

    for factor in (2.0, 1.0):
        plain = sequential()
        plain.compile(Scaled(factor=factor), "mse")
        if factor == 1.0:
            assert vote.Wrapper(2)(plain).optimizer is not plain.optimizer
            continue
        with pytest.raises(TypeError, match="does not include its factor"):
            vote.Wrapper(2)(plain)


def test_labels_of_classes_are_no_targets_of_a_likelihood() -> None:
    plain = k.Sequential([k.Input((4,)), k.layers.Dense(3)])
    plain.compile("sgd", k.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(ValueError, match=r'\[12\] for predictions of shape \[12, 3\].*output="logits"'):
        sculpt.Wrapper()(plain).train_on_batch(X, np.arange(12) % 3)


@pytest.mark.parametrize("target", ["model", "class"])
def test_other_backends_are_refused(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    model = sequential() if target == "model" else net_class()
    monkeypatch.setattr(k.backend, "backend", lambda: "tensorflow")
    with pytest.raises(TypeError, match=r"on the tensorflow backend.*KERAS_BACKEND=torch"):
        vote.Wrapper(model) if target == "class" else vote.Wrapper(2)(model)
