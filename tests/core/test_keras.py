"""Keras models on the torch backend against plain copies of them, called and trained one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import workbench
from workbench import augment, compose, laplace, neo, sample, sculpt, swag, vote
from workbench.errors import WorkbenchWarning

X = np.linspace(-1, 1, 48, dtype="float32").reshape(12, 4)
Y = np.sin(X.sum(1, keepdims=True)).astype("float32")


@pytest.fixture(scope="module", autouse=True)
def keras() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "torch")
        module = pytest.importorskip("keras")
    assert module.backend.backend() == "torch", "another test imported Keras with another backend"
    module.utils.set_random_seed(0)
    globals()["k"] = module
    return module


k: Any = None


def sequential(*extra: Any) -> Any:
    return k.Sequential([k.Input((4,)), k.layers.Dense(8, activation="tanh"), *extra, k.layers.Dense(1)])


def functional() -> Any:
    inputs = k.Input((4,))
    hidden = k.layers.Dense(8, activation="tanh")(inputs)
    return k.Model(inputs, k.layers.Dense(1)(hidden))


def subclassed(build: bool = True) -> Any:
    model = net_class()()
    if build:
        model(X)
    return model


_NETS: list[Any] = []


def net_class() -> Any:
    if not _NETS:

        class Net(k.Model):
            def __init__(self) -> None:
                super().__init__()
                self.hidden = k.layers.Dense(8, activation="tanh")
                self.out = k.layers.Dense(1)

            def call(self, x: Any, training: Any = None) -> Any:
                return self.out(self.hidden(x))

        _NETS.append(Net)
    return _NETS[0]


KINDS: list[Callable[[], Any]] = [sequential, functional, subclassed]


def by_hand(wrapped: Any, plain: Any, n: int) -> list[Any]:
    """Plain copies of a model of layers, with the weights that each voter has in the state of the wrapped module."""
    state, copies = wrapped.as_torch().state_dict(), []
    names = [name for name in state if name.endswith("@vote")]
    for i in range(n):
        copied = k.models.clone_model(plain) if not isinstance(plain, net_class()) else subclassed()
        assert len(names) == len(copied.weights)
        for name, variable in zip(sorted(names, key=lambda name: order(name, plain)), copied.weights, strict=True):
            variable.assign(state[name][i])
        copies.append(copied)
    return copies


def order(name: str, plain: Any) -> int:
    layer, _, rest = name.partition(".")
    layers = [each for each in plain.layers if each.weights]
    stems = {}
    for each in layers:
        base = each.name.rstrip("0123456789").rstrip("_")
        count = sum(s == base or s.rpartition("_")[0] == base for s in stems)
        stems[f"{base}_{count}" if count else base] = each
    if layer not in stems:  # attributes of subclassed models
        raise KeyError(layer, list(stems))
    position = list(stems).index(layer)
    return position * 10 + [v.name for v in stems[layer].weights].index(rest.partition("@")[0])


# ---- predictions
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


def test_voters_start_at_values_of_the_layers_own_initialisers() -> None:
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


# ---- training
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


# ---- sculpt
def nll(y: Any, y_hat: Any, risk: Any) -> float:
    return float(-torch.distributions.Normal(y_hat, risk).log_prob(torch.as_tensor(y)).mean())


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
    labels = np.arange(12) % 3
    classes = k.Sequential([k.Input((4,)), k.layers.Dense(3)])
    classes.compile("sgd", k.losses.SparseCategoricalCrossentropy(from_logits=True))
    for method in ("fit", "evaluate"):
        with pytest.raises(ValueError, match=r"workbench\.fit\(model\.as_torch\(\)"):
            getattr(sculpt.Wrapper(sculpt.LogitNormal, output="logits")(classes), method)(X, labels, verbose=0)


# ---- classes, functions, files
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


@pytest.mark.parametrize("make", [sequential, lambda: k.Sequential([k.layers.Dense(4), k.layers.Dense(1)]), subclassed])
def test_weights_are_saved_and_loaded(make: Callable[[], Any], tmp_path: Path) -> None:
    path = str(tmp_path / "model.weights.h5")
    models = []
    for _ in range(2):
        plain = make()
        plain.compile("adam", "mse")
        models.append(compose(vote.Wrapper(2), sculpt.Wrapper())(plain))
    models[0].fit(X, Y, epochs=1, verbose=0)
    models[0].save_weights(path)
    models[1](X)
    models[1].load_weights(path)
    assert models[1].evaluate(X, Y, verbose=0) == pytest.approx(models[0].evaluate(X, Y, verbose=0), rel=1e-6)
    other = vote.Wrapper(3)(sequential())
    with pytest.raises((RuntimeError, ValueError), match=r"n_voters|sculpt"):
        other.load_weights(path)
    plain = sequential()
    plain.save_weights(path)
    with pytest.raises(ValueError, match="weights of a plain Keras model"):
        vote.Wrapper(3)(sequential()).load_weights(path)


def test_callbacks_restore_and_save(tmp_path: Path) -> None:
    wrapped = vote.Wrapper(2)(sequential())
    wrapped.compile(k.optimizers.SGD(5.0), "mse")
    path = tmp_path / "best.weights.h5"
    stop = k.callbacks.EarlyStopping("loss", patience=1, restore_best_weights=True)
    keep = k.callbacks.ModelCheckpoint(str(path), "loss", save_best_only=True, save_weights_only=True)
    wrapped.fit(X, Y, epochs=4, verbose=0, callbacks=[stop, keep])
    y = wrapped(X)
    wrapped.load_weights(str(path))
    torch.testing.assert_close(wrapped(X), y)


# ---- refusals
def test_what_cannot_be_right_is_refused(tmp_path: Path) -> None:
    wrapped = vote.Wrapper(2)(sequential())
    with pytest.raises(NotImplementedError, match="save_weights"):
        wrapped.save(tmp_path / "model.keras")
    with pytest.raises(TypeError, match="Keras layer and no model"):
        vote.Wrapper(2)(k.layers.Dense(1))
    with pytest.raises(ValueError, match="torch module Linear"):
        vote.Wrapper(2)(k.Sequential([k.Input((4,)), k.layers.TorchModuleWrapper(torch.nn.Linear(4, 1))]))
    with pytest.raises(ValueError, match="laplace knows"):
        laplace.Wrapper()(sequential())
    with pytest.raises(ValueError, match="statistics of batch_normalization"):
        swag.Wrapper()(sequential(k.layers.BatchNormalization()))
    with pytest.raises(ValueError, match="channels_last"):
        augment.Wrapper("flip")(sequential())
    with pytest.raises(ValueError, match="whole model"):
        vote.Wrapper(2)(sequential(), at="dense")
    gathering = swag.Wrapper()(sequential())
    gathering.compile("adam", "mse")
    with pytest.raises(ValueError, match=r"workbench\.fit\(model\.as_torch\(\)"):
        gathering.fit(X, Y)
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
    masking = k.Sequential([k.Input((3,)), k.layers.Embedding(4, 2, mask_zero=True), k.layers.Dense(1)])
    masking.compile("adam", "mse")
    with pytest.raises(NotImplementedError, match="masks its output"):
        vote.Wrapper(2)(masking).train_on_batch(np.ones((4, 3), "int32"), np.ones((4, 3, 1)))
    losses = k.Sequential([k.Input((4,)), k.layers.Dense(1, activity_regularizer="l2")])
    losses.compile("adam", "mse")
    with pytest.raises(NotImplementedError, match="add_loss"):
        vote.Wrapper(2)(losses).train_on_batch(X, Y)


@pytest.mark.parametrize("target", ["model", "class"])
def test_other_backends_are_refused(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    model = sequential() if target == "model" else net_class()
    monkeypatch.setattr(k.backend, "backend", lambda: "tensorflow")
    with pytest.raises(TypeError, match=r"on the tensorflow backend.*KERAS_BACKEND=torch"):
        vote.Wrapper(model) if target == "class" else vote.Wrapper(2)(model)
