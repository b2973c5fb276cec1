"""Training of wrapped Keras models: compared with plain copies trained one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import keras_models
from helpers.keras_models import X, Y, by_hand, k, nll, sequential, subclassed

import workbench
from workbench import compose, sculpt, vote
from workbench.errors import WorkbenchWarning

seeded_keras = keras_models.seeded_keras


@pytest.mark.parametrize("make", [sequential, subclassed])
def test_a_step_of_fit_trains_each_voter_on_its_rows(make: Callable[[], Any]) -> None:
    plain = make()
    plain.compile(k.optimizers.SGD(0.1), "mse")
    wrapped = vote.Wrapper(3)(plain)
    copies = by_hand(wrapped, plain, 3)
    torch.manual_seed(5)
    dealt = wrapped(X, training=True).detach()
    each = torch.stack([voter(X) for voter in copies])
    voter_of_row = (each - dealt).abs().sum(-1).argmin(0)
    assert sorted(torch.bincount(voter_of_row).tolist()) == [4, 4, 4]
    torch.manual_seed(5)
    loss = wrapped.train_on_batch(X, Y)
    total = torch.stack([(copies[i](X[r : r + 1]) - torch.as_tensor(Y[r])) ** 2 for r, i in enumerate(voter_of_row)])
    assert loss == pytest.approx(total.mean().item(), rel=1e-5)
    total.mean().backward()
    for copied, trained in zip(copies, wrapped.voters(), strict=True):
        for mine, theirs in zip(copied.trainable_variables, trained.trainable_variables, strict=True):
            torch.testing.assert_close(theirs.value, mine.value - 0.1 * mine.value.grad)


def test_batch_norm_and_dropout_train_as_in_the_plain_model() -> None:
    plain = sequential(k.layers.BatchNormalization(), k.layers.Dropout(0.3))
    copied = k.models.clone_model(plain)
    copied.set_weights(plain.get_weights())
    wrapped = compose()(plain)
    wrapped.compile(k.optimizers.SGD(0.1), "mse")
    wrapped.evaluate(X, Y, verbose=0)
    torch.manual_seed(1)
    for _ in range(2):
        wrapped.train_on_batch(X, Y)
    torch.manual_seed(1)
    optimizer = torch.optim.SGD([v.value for v in copied.trainable_variables], 0.1)
    for _ in range(2):
        loss = ((copied(X, training=True) - torch.as_tensor(Y)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for mine, theirs in zip(copied.weights, plain.weights, strict=True):
        torch.testing.assert_close(theirs.value, mine.value)


def test_each_voter_has_statistics_of_its_own() -> None:
    plain = k.Sequential([k.Input((4,)), k.layers.BatchNormalization(momentum=0.5), k.layers.Dense(1)])
    plain.compile(k.optimizers.SGD(0.0), "mse")
    wrapped = vote.Wrapper(2)(plain)
    copies = by_hand(wrapped, plain, 2)
    torch.manual_seed(3)
    wrapped.train_on_batch(X, Y)
    means = wrapped.as_torch().state_dict()["batch_normalization.moving_mean@vote"]
    halves = [m / 0.5 for m in means]  # of each voter's rows
    torch.testing.assert_close(torch.stack(halves).mean(0), torch.as_tensor(X).mean(0))
    assert not torch.allclose(halves[0], halves[1])
    assert bool((plain.layers[0].moving_mean.value == 0).all())
    for copied, voter in zip(copies, wrapped.voters(), strict=True):
        assert torch.equal(copied.layers[1].kernel.value, voter.layers[1].kernel.value)


def test_own_train_steps_see_the_wrapped_model() -> None:
    steps = []

    class Own(k.Model):
        def __init__(self) -> None:
            super().__init__()
            self.out = k.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.out(x)

        def train_step(self, data: Any) -> Any:
            x, y = data
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred)
            self.zero_grad()
            loss.backward()
            steps.append(len(self.trainable_weights))
            with torch.no_grad():
                self.optimizer.apply([v.value.grad for v in self.trainable_weights], self.trainable_weights)
            return {"loss": loss}

    wrapped = vote.Wrapper(2)(Own())
    wrapped.compile(k.optimizers.SGD(0.1), "mse")
    wrapped.fit(X, Y, epochs=1, verbose=0)
    before = [v.get_weights() for v in wrapped.voters()]
    wrapped.fit(X, Y, epochs=1, verbose=0)
    after = [v.get_weights() for v in wrapped.voters()]
    assert steps == [2, 2]
    assert all(not np.array_equal(a[0], b[0]) for a, b in zip(before, after, strict=True))


def test_regularizers_and_constraints_hold_for_each_voter() -> None:
    plain = k.Sequential(
        [k.Input((4,)), k.layers.Dense(1, kernel_regularizer=k.regularizers.L2(0.5), kernel_constraint="non_neg")]
    )
    wrapped = vote.Wrapper(3)(plain)
    wrapped.compile(k.optimizers.SGD(0.01), "mse")
    with pytest.warns(WorkbenchWarning, match="regularizer"):
        expected = sum((0.5 * voter.weights[0].value ** 2).sum().item() for voter in by_hand(wrapped, plain, 3)) / 3
    assert sum(wrapped.losses).item() == pytest.approx(expected, rel=1e-5)
    wrapped.train_on_batch(X, Y)
    with pytest.warns(WorkbenchWarning, match="regularizer"):
        assert float(wrapped.as_torch().state_dict()["dense.kernel@vote"].min()) >= 0


def test_frozen_layers_stay() -> None:
    plain = sequential()
    plain.layers[0].trainable = False
    plain.compile(k.optimizers.SGD(0.5), "mse")
    wrapped = vote.Wrapper(2)(plain)
    before = plain.layers[0].get_weights()
    wrapped.fit(X, Y, epochs=1, verbose=0)
    for voter in wrapped.voters():
        assert all(map(np.array_equal, voter.layers[0].get_weights(), before))
    assert len(wrapped.trainable_variables) == 2


def test_the_fit_of_workbench_trains_the_same_variables() -> None:
    plain = sequential()
    wrapped = vote.Wrapper(2)(plain)
    before = [voter.get_weights()[0] for voter in wrapped.voters()]
    workbench.fit(wrapped.as_torch(), (torch.as_tensor(X), torch.as_tensor(Y)), epochs=2, progress=False)
    after = wrapped.trainable_variables
    assert not np.array_equal(before[0], after[0].numpy()[0])


def test_the_likelihood_joins_the_compiled_loss() -> None:
    plain = sequential()
    plain.compile(k.optimizers.Adam(0.05), "mse", metrics=["mae"])
    wrapped = sculpt.Wrapper()(plain)
    y_hat, risk = wrapped(X, return_risk=True)
    mse, mae = float(((y_hat - torch.as_tensor(Y)) ** 2).mean()), float((y_hat - torch.as_tensor(Y)).abs().mean())
    loss, metric = wrapped.evaluate(X, Y, verbose=0)
    assert loss == pytest.approx(mse + nll(Y, y_hat, risk), rel=1e-4)
    assert metric == pytest.approx(mae, rel=1e-4)
    prediction, spread = wrapped.predict(X, verbose=0)
    torch.testing.assert_close(torch.as_tensor(prediction), y_hat.detach())
    torch.testing.assert_close(torch.as_tensor(spread), risk.detach())
    before = nll(Y, y_hat, risk)
    wrapped.fit(X, Y[:, 0], epochs=5, verbose=0)
    assert nll(Y, *wrapped(X, return_risk=True)) < before
    weights = np.arange(12, dtype="float32")
    y_hat, risk = wrapped(X, return_risk=True)
    losses = (y_hat - torch.as_tensor(Y)) ** 2 - torch.distributions.Normal(y_hat, risk).log_prob(torch.as_tensor(Y))
    expected = float((losses[:, 0] * torch.as_tensor(weights)).mean())
    assert wrapped.test_on_batch(X, Y, sample_weight=weights)[0] == pytest.approx(expected, rel=1e-4)


def test_a_loss_by_hand_gets_prediction_and_risk() -> None:
    plain = sequential()
    plain.compile(optimizer="adam")
    with pytest.warns(WorkbenchWarning, match=r"(?s)\.compile\(loss=your_loss\).*Normal\.loss_function"):
        wrapped = sculpt.Wrapper()(plain)
    with pytest.raises(ValueError, match=r"model\.compute_loss"):
        wrapped.train_on_batch(X, Y)

    def compute_loss(
        x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: Any = None
    ) -> Any:
        y_hat, risk = y_pred
        return k.ops.mean((y - y_hat) ** 2) + sculpt.Normal.loss_function(y, y_hat, risk)

    wrapped.compute_loss = compute_loss
    y_hat, risk = wrapped(X, return_risk=True)
    expected = float(((y_hat - torch.as_tensor(Y)) ** 2).mean()) + nll(Y, y_hat, risk)
    assert wrapped.train_on_batch(X, Y) == pytest.approx(expected, rel=1e-4)


def test_heads_of_voters_train_on_their_rows() -> None:
    plain = sequential()
    plain.compile(k.optimizers.Adam(0.02), "mse")
    wrapped = compose(vote.Wrapper(2), sculpt.Wrapper())(plain)
    first = wrapped.fit(X, Y, epochs=1, verbose=0).history["loss"][0]
    last = wrapped.fit(X, Y, epochs=10, verbose=0).history["loss"][-1]
    assert last < first
    y, risk = wrapped(X, return_risk=True)
    assert risk.names() == ("aleatoric", "epistemic", "total")
    prediction, risks = wrapped.predict(X, verbose=0)
    torch.testing.assert_close(torch.as_tensor(prediction), y.detach())
    torch.testing.assert_close(torch.as_tensor(risks["epistemic"]), risk.epistemic.detach())
    first = wrapped.evaluate(X, Y, verbose=0)
    expected = float(((y - torch.as_tensor(Y)) ** 2).mean()) + nll(Y, y, risk.aleatoric)
    assert first == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("by", ["name", "variable", "name, scaled"])
def test_weights_left_out_of_the_decay_stay_so(by: str) -> None:
    plain = k.Sequential([k.Input((4,)), k.layers.Dense(3, name="bias_of_all", bias_initializer="ones")])
    optimizer = k.optimizers.AdamW(0.1, weight_decay=0.5)
    bias = plain.weights[1]
    if by == "variable":
        optimizer.exclude_from_weight_decay(var_list=[bias])
    else:
        optimizer.exclude_from_weight_decay(var_names=["bias"])
    plain.compile(k.optimizers.LossScaleOptimizer(optimizer) if "scaled" in by else optimizer, "mse")
    wrapped = vote.Wrapper(2, finetune=True)(plain)
    assert [v.name for v in wrapped.trainable_variables] == ["kernel", "bias"]
    before = [v.numpy() for v in wrapped.trainable_variables]
    targets = wrapped(X).detach().numpy()
    wrapped.fit(X, targets, epochs=1, batch_size=12, verbose=0)  # no gradient
    after = [v.numpy() for v in wrapped.trainable_variables]
    np.testing.assert_allclose(after[1], before[1], atol=1e-4)
    np.testing.assert_allclose(after[0], 0.95 * before[0], atol=1e-4)


def test_batches_too_small_for_statistics_are_answered_by_all_voters() -> None:
    plain = k.Sequential([k.Input((4,)), k.layers.BatchNormalization(momentum=0.0), k.layers.Dense(1)])
    plain.compile(k.optimizers.SGD(0.0), "mse")
    wrapped = vote.Wrapper(3)(plain)
    with pytest.warns(WorkbenchWarning, match="too small to deal 2 to each of 3 voters"):
        wrapped.train_on_batch(X[:5], Y[:5])
    variances = wrapped.as_torch().state_dict()["batch_normalization.moving_variance@vote"]
    torch.testing.assert_close(variances, torch.as_tensor(X[:5]).var(0, correction=0).expand(3, 4))
    plain.layers[0].trainable = False
    wrapped(X[:3], training=True)  # which needs no statistics: one row each, and no warning
