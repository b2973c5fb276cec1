"""The calls shown in the Keras pages of the interface, verbatim except for the import.

What TensorFlow alone has (`tf.GradientTape`, `tf.function`, `set_capsa_variables`) is written as Keras 3 has it on torch.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import keras_models
from helpers.keras_models import X, Y, k, nll, sequential

from workbench import sculpt, vote
from workbench.errors import WorkbenchWarning

seeded_keras = keras_models.seeded_keras
x, y = X, Y


def mean_of_voters(wrapped: Any, inputs: Any) -> Any:
    return torch.stack([voter(inputs) for voter in wrapped.voters()]).mean(0)


# ---- "Initializing and wrapping a Keras3 model"
def test_a_compiled_model_is_wrapped_called_and_used_by_the_api_of_keras() -> None:
    model = sequential()
    model.compile(optimizer="adam", loss="mse")
    plain = len(model.trainable_variables)
    # wrap with capsa
    model = vote.Wrapper()(model)
    # now can optionally return risk
    out, risk = model(x, return_risk=True)
    # contains both original and capsa added variables
    n_voters = len(model.voters())
    assert len(model.trainable_variables) == plain
    assert all(v.shape[0] == n_voters for v in model.trainable_variables)
    torch.testing.assert_close(out, mean_of_voters(model, x))
    torch.testing.assert_close(risk, torch.stack([v(x) for v in model.voters()]).std(0, correction=0))
    # use keras API as usual
    model.fit(x, y, verbose=0)
    loss = model.evaluate(x, y, verbose=0)
    predicted = model.predict(x, verbose=0)
    torch.testing.assert_close(torch.as_tensor(predicted), mean_of_voters(model, x).detach(), rtol=1e-4, atol=1e-6)
    assert loss == pytest.approx(float(((predicted - y) ** 2).mean()), rel=1e-4)


# ---- "Saving / Loading a Keras3 model"
def test_weights_are_saved_and_loaded(tmp_path: Path) -> None:
    model = sequential()
    model.compile("adam", "mse")
    model = vote.Wrapper()(model)
    # after training your model with e.g., .fit, .train_on_batch, or your custom training function
    model.train_on_batch(x, y)
    model.train_step((x, y))
    filepath = str(tmp_path / "model.weights.h5")
    model.save_weights(filepath)

    restored_model = sequential()
    restored_model.compile("adam", "mse")
    restored_model = vote.Wrapper()(restored_model)
    # call your model on inputs before loading the weights
    restored_model(x)
    # now can load the saved variables
    restored_model.load_weights(filepath)
    # we get same loss as before saving/loading
    assert restored_model.evaluate(x, y, verbose=0) == model.evaluate(x, y, verbose=0)


# ---- "Using Sculpt wrapper"
def test_the_compiled_loss_is_combined_with_that_of_sculpt() -> None:
    model = sequential()
    model.compile(optimizer="adam", loss="mse")
    # capsa automatically combines your MSE loss with sculpt.Normal.loss_function
    model = sculpt.Wrapper()(model)
    y_hat, risk = model(x, return_risk=True)
    expected = ((y_hat - torch.as_tensor(y)) ** 2).mean().item() + nll(y, y_hat, risk)
    assert model.evaluate(x, y, verbose=0) == pytest.approx(expected, rel=1e-4)


def test_the_loss_is_combined_by_hand() -> None:
    model = sequential()
    model.compile(optimizer="adam")
    # the warning will be printed
    with pytest.warns(WorkbenchWarning, match=r"requires the loss function to be modified(?s:.)*model\.compute_loss"):
        model = sculpt.Wrapper()(model)

    my_custom_loss = k.losses.MeanSquaredError()

    def compute_loss(
        x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: Any = None
    ) -> Any:
        # you need to unpack y_pred to get risk values
        y_hat, risk = y_pred
        # then feed these risk values to the sculpt wrapper's loss function
        capsa_loss = sculpt.Normal.loss_function(y, y_hat, risk)
        # use your custom loss function
        usr_loss = my_custom_loss(y, y_hat)
        # manually combine the two
        return k.ops.mean(k.ops.stack([capsa_loss, usr_loss]))

    # assign the above to this attribute of the wrapped model
    model.compute_loss = compute_loss
    y_hat, risk = model(x, return_risk=True)
    expected = (((y_hat - torch.as_tensor(y)) ** 2).mean().item() + nll(y, y_hat, risk)) / 2
    assert model.train_on_batch(x, y) == pytest.approx(expected, rel=1e-4)


def test_the_methods_of_keras_run_with_risk() -> None:
    model = sequential()
    model.compile("adam", "mse")
    model = sculpt.Wrapper()(model)
    before = model.evaluate(x, y, verbose=0)
    model.train_step((x, y))
    model.train_on_batch(x, y)
    model.fit(x, y, verbose=0)
    model.test_step((x, y))
    assert model.test_on_batch(x, y) != before
    model.evaluate(x, y, verbose=0)
    y_hat, risk = model(x, return_risk=True)
    for prediction, spread in (model.predict_step((x,)), model.predict_on_batch(x), model.predict(x, verbose=0)):
        torch.testing.assert_close(torch.as_tensor(prediction), y_hat, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(torch.as_tensor(spread), risk, rtol=1e-4, atol=1e-6)


# ---- "For Sequential and Functional models, you can capsa-decorate any function which calls the original model"
def test_a_decorated_function_calls_a_wrapped_model_and_leaves_the_original() -> None:
    images = np.random.default_rng(0).random((3, 28, 28, 1), "float32")
    model = k.models.Sequential(
        [
            k.layers.Input((28, 28, 1)),
            k.layers.Conv2D(16, 3, activation="tanh"),
            k.layers.Conv2D(8, 3, activation="tanh"),
            k.layers.Flatten(),
            k.layers.Dense(10, activation="tanh"),
        ]
    )
    original = model(images).detach()

    @vote.Wrapper()
    def wrapped_model(x: Any) -> Any:
        logits = model(x, training=False)
        return logits

    # calls `model` forward that has been wrapped
    out, risk = wrapped_model(torch.as_tensor(images), return_risk=True)
    assert out.shape == risk.shape == (3, 10)
    assert not torch.allclose(out, original)
    # but calling `model` itself will call the original unmodified `model`
    assert torch.equal(model(images), original)


# ---- "For subclassed models": there the class is decorated, as a method inside of it is no model
def test_a_subclassed_model_is_decorated_as_a_class() -> None:
    with pytest.raises(TypeError, match=r"of Keras models, which answer as a whole, Wrapper\(\)\(Net\)"):

        class Net(k.Model):  # type: ignore[misc]
            @vote.Wrapper()
            def call(self, inputs: Any) -> Any:
                return self.out(inputs)

    @vote.Wrapper()
    class Decorated(k.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.out = k.layers.Dense(1)

        def call(self, inputs: Any) -> Any:
            return self.out(inputs)

    out, risk = Decorated()(x, return_risk=True)
    assert out.shape == risk.shape == (12, 1)


# ---- "Do not wrap backward pass", "Initializing an Optimizer"
def test_only_the_forward_pass_is_wrapped_and_an_optimizer_applies_the_gradients() -> None:
    wrapper = vote.Wrapper()
    wrapped_model = wrapper(sequential())
    opt = k.optimizers.Adam(learning_rate=1e-4)
    # Call wrapped model with inputs
    out = wrapped_model(x)
    loss = ((out - torch.as_tensor(y)) ** 2).mean()
    trainable_vars = wrapped_model.trainable_variables
    loss.backward()
    gradients = [v.value.grad for v in trainable_vars]
    before = [v.numpy().copy() for v in trainable_vars]
    with torch.no_grad():
        opt.apply_gradients(zip(gradients, trainable_vars, strict=True))
    assert all(not np.array_equal(a, v.numpy()) for a, v in zip(before, trainable_vars, strict=True))


# ---- "Nested tf.function"
def test_a_function_is_wrapped_only_inside_of_the_decorated_one() -> None:
    layer = k.layers.Dense(1)
    layer(x)

    def inner_fn(x: Any) -> Any:
        return layer(x)

    @vote.Wrapper
    def outer_fn(x: Any) -> Any:
        return inner_fn(x)

    inputs = torch.as_tensor(x)
    plain = inner_fn(inputs).detach()
    _, risk = outer_fn(inputs, return_risk=True)
    assert bool((risk > 0).all())
    assert torch.equal(inner_fn(inputs), plain)


# ---- "Saving model weights"
def test_variables_are_pickled_and_given_to_a_model_that_is_wrapped_alike(tmp_path: Path) -> None:
    wrapper = vote.Wrapper()
    wrapped_model = wrapper(sequential())
    with open(tmp_path / "variables", "wb") as f:
        pickle.dump([v.numpy() for v in wrapped_model.trainable_variables], f)

    with open(tmp_path / "variables", "rb") as f:
        restored = pickle.load(f)
    restored_wrapped_model = wrapper(sequential())
    for variable, value in zip(restored_wrapped_model.trainable_variables, restored, strict=True):
        variable.assign(value)
    out, risk = restored_wrapped_model(x, return_risk=True)
    expected = wrapped_model(x, return_risk=True)
    assert torch.equal(out, expected[0])
    assert torch.equal(risk, expected[1])


# ---- the page of sculpt
def test_sculpt_is_wrapped_called_and_trained_in_two_ways() -> None:
    # note: you don't need to instantiate an object, just pass the class itself to the wrapper
    dist = sculpt.Normal
    original_loss_fn = k.losses.MeanSquaredError()
    wrapper = sculpt.Wrapper(dist, n_layers=3)
    with pytest.warns(WorkbenchWarning, match="requires the loss function"):
        wrapped_model = wrapper(sequential(k.layers.Dense(4)))
    with pytest.warns(WorkbenchWarning, match="requires the loss function"):
        model = sculpt.Wrapper(distribution=dist, n_layers=3)(sequential(k.layers.Dense(4)))
    prediction = wrapped_model(x)
    prediction, uncertainty = wrapped_model(x, return_risk=True)
    assert prediction.shape == uncertainty.shape
    y_true = torch.as_tensor(y)
    y_hat, y_risk = model(x, return_risk=True)
    loss = original_loss_fn(y_hat, y_true) + dist.loss_function(y_true, y_hat, y_risk)
    assert loss.item() == pytest.approx(((y_hat - y_true) ** 2).mean().item() + nll(y, y_hat, y_risk), rel=1e-4)
    y_hat_and_risk = model(x, return_risk=True)
    y_hat_sampled = dist.sample(y_hat_and_risk)
    loss = original_loss_fn(y_hat_sampled, y_true)
    loss.backward()
    assert any("sculpt" in v.path and v.value.grad is not None for v in model.trainable_variables)
