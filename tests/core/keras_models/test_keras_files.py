"""Files of wrapped Keras models: weights only, and whole models."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import keras_models
from helpers.keras_models import KINDS, X, Y, functional, k, net_class, sequential, subclassed

import workbench
from workbench import compose, neo, sample, sculpt, vote
from workbench.calibration import calibrate, selective

seeded_keras = keras_models.seeded_keras


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


WRAPPERS: dict[str, Callable[[], Any]] = {
    "vote": lambda: vote.Wrapper(3),
    "rank1": lambda: vote.Wrapper(3, share="rank1", alpha=0.5),
    "share": lambda: vote.Wrapper(2, share=1),
    "sample": lambda: sample.Wrapper(3, sample.Normal(0.2), where="weights"),
    "sculpt": lambda: sculpt.Wrapper(sculpt.Laplace, n_layers=1),
    "neo": neo.Wrapper,
    "all": lambda: compose(vote.Wrapper(2), sculpt.Wrapper(n_layers=1), neo.Wrapper()),
}


def answers(model: Any) -> list[torch.Tensor]:
    """Prediction and risks, with the same random numbers each time."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(7)
        y, risk = model(X, return_risk=True)
    return [y, *([risk] if isinstance(risk, torch.Tensor) else [risk[name] for name in risk.names()])]


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(answers(one), answers(other), strict=True))


def trained(make: Callable[[], Any], kind: str) -> Any:
    plain = make()
    plain.compile(k.optimizers.Adam(0.05), "mse", metrics=["mae"])
    wrapped = WRAPPERS[kind]()(plain)
    wrapped.fit(X, Y, epochs=2, verbose=0)
    return wrapped


def load(path: Any) -> Any:
    with k.saving.custom_object_scope({"Net": net_class()}):
        return k.saving.load_model(path)


@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("make", KINDS)
@pytest.mark.filterwarnings("ignore:the weights of the model have changed")
def test_a_whole_model_comes_back_to_the_last_bit(make: Callable[[], Any], kind: str, tmp_path: Path) -> None:
    wrapped = trained(make, kind)
    drawn = random.getstate(), torch.get_rng_state()
    wrapped.save(tmp_path / "model.keras")
    assert random.getstate() == drawn[0]
    assert torch.equal(torch.get_rng_state(), drawn[1])
    restored = load(tmp_path / "model.keras")
    assert type(restored) is type(wrapped)
    assert restored.as_torch().methods == wrapped.as_torch().methods
    assert same(restored, wrapped)
    assert [path.name for path in tmp_path.iterdir()] == ["model.keras"]
    for one, other in zip(restored.voters(), wrapped.voters(), strict=True):
        assert all(map(np.array_equal, one.get_weights(), other.get_weights()))
    for one, other in zip(restored.unwrap_shared().weights, wrapped.unwrap_shared().weights, strict=True):
        assert torch.equal(one.value, other.value)
    if kind != "neo":  # optimizer, losses and metrics go on where they were
        losses = []
        for model in (wrapped, restored):
            torch.manual_seed(3)
            losses.append(model.train_on_batch(X, Y))
        assert losses[0] == losses[1]
        assert same(restored, wrapped)


def test_seeds_of_layers_and_statistics_are_kept(tmp_path: Path) -> None:
    plain = sequential(k.layers.BatchNormalization(), k.layers.Dropout(0.5, seed=3))
    plain.compile("adam", "mse")
    wrapped = vote.Wrapper(2)(plain)
    wrapped.fit(X, Y, epochs=2, verbose=0)
    wrapped.save(tmp_path / "model.keras")
    wrapped.save_weights(tmp_path / "model.weights.h5")
    weights = vote.Wrapper(2)(sequential(k.layers.BatchNormalization(), k.layers.Dropout(0.5, seed=3)))
    weights.compile("adam", "mse")
    weights.load_weights(tmp_path / "model.weights.h5")
    losses = []
    for model in (wrapped, load(tmp_path / "model.keras"), weights):
        torch.manual_seed(3)
        losses.append([model.train_on_batch(X, Y) for _ in range(3)])
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.slow
def test_a_new_program_reads_it(tmp_path: Path) -> None:
    wrapped = trained(functional, "all")
    wrapped.save(tmp_path / "model.keras")
    np.save(tmp_path / "x.npy", X)
    program = """
import os, sys
os.environ["KERAS_BACKEND"] = "torch"
import numpy as np, torch, workbench
model = workbench.load(sys.argv[1] + "/model.keras")
y, risk = model(np.load(sys.argv[1] + "/x.npy"), return_risk=True)
np.save(sys.argv[1] + "/y.npy", torch.stack([y, risk.total]).detach().numpy())
import keras
assert model.evaluate(np.load(sys.argv[1] + "/x.npy"), np.zeros((12, 1)), verbose=0)
assert type(keras.saving.load_model(sys.argv[1] + "/model.keras")) is type(model)
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    y, *risks = answers(wrapped)
    # heads of a trained model share a pass, those of a new one run one after another in its first call
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), torch.stack([y, risks[-1]]).numpy(), rtol=1e-6)


def test_a_decorated_class_is_read_as_the_file_says(tmp_path: Path) -> None:
    @k.saving.register_keras_serializable("tests")
    @vote.Wrapper(3)
    class Decorated(k.Model):
        def __init__(self, units: int = 4, **kwargs: Any) -> None:
            super(Decorated, self).__init__(**kwargs)  # noqa: UP008  # the old form finds the decorated class
            self.hidden, self.out = k.layers.Dense(units), k.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.out(self.hidden(x))

    model: Any = Decorated(units=4)
    model(X)
    model.save(tmp_path / "model.keras")
    restored = load(tmp_path / "model.keras")
    assert isinstance(restored, Decorated)
    assert same(restored, model)


def test_states_of_layers_that_are_no_tensors_come_along(tmp_path: Path) -> None:
    table = k.layers.Normalization(axis=-1)
    table.adapt(X)
    plain = k.Sequential([k.Input((4,)), table, k.layers.Dense(1)])
    wrapped = vote.Wrapper(2)(plain)
    wrapped.save(tmp_path / "model.keras")
    assert same(load(tmp_path / "model.keras"), wrapped)


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_is_frozen_stays_so(when: str, tmp_path: Path) -> None:
    plain = subclassed()
    if when == "before":
        plain.hidden.trainable = False
    wrapped = vote.Wrapper(2)(plain)
    plain.hidden.trainable = False
    wrapped.compile("adam", "mse")
    wrapped.fit(X, Y, epochs=1, verbose=0)
    wrapped.save(tmp_path / "model.keras")
    restored = load(tmp_path / "model.keras")
    assert same(restored, wrapped)
    assert len(restored.trainable_variables) == len(wrapped.trainable_variables) == 2
    losses = []
    for model in (wrapped, restored):
        torch.manual_seed(3)
        losses.append([model.train_on_batch(X, Y) for _ in range(2)])
    assert losses[0] == losses[1]
    assert same(restored, wrapped)


def test_a_model_may_come_without_its_optimizer(tmp_path: Path) -> None:
    wrapped = trained(sequential, "all")
    wrapped.save(tmp_path / "model.keras")
    restored = k.saving.load_model(tmp_path / "model.keras", compile=False)
    assert not restored.compiled
    assert same(restored, wrapped)
    torch.testing.assert_close(torch.as_tensor(restored.predict(X, verbose=0)[0]), wrapped(X).detach())


def test_wrappers_of_no_name_are_refused(tmp_path: Path) -> None:
    class Pair(vote.Wrapper):
        """Two voters."""

    wrapped = Pair(2)(sequential())
    with pytest.raises(ValueError, match=r"workbench\.register.*save_weights"):
        wrapped.save(tmp_path / "model.keras")
    assert not [*tmp_path.iterdir()]


def test_scaling_and_what_outputs_mean_come_along(tmp_path: Path) -> None:
    wrapped = vote.Wrapper(2, output="logits")(k.Sequential([k.Input((4,)), k.layers.Dense(3)]))
    wrapped.as_torch().scale(x_mean=torch.ones(4), x_scale=torch.full((4,), 2.0))
    wrapped.save(tmp_path / "model.keras")
    restored = load(tmp_path / "model.keras")
    assert same(restored, wrapped)
    assert answers(restored)[1].shape == (12,)


def test_arguments_that_keras_forgets_are_told(tmp_path: Path) -> None:
    class Given(k.Model):
        def __init__(self, activation: str = "tanh", factor: float = 1.0) -> None:
            super().__init__()
            self.out, self.factor = k.layers.Dense(1, activation=activation), factor

        def call(self, x: Any) -> Any:
            return self.factor * self.out(x)

    for arguments, what in (({"activation": "relu"}, "layers"), ({"factor": 2.0}, "factor")):
        plain = Given(**arguments)
        plain(X)
        wrapped = vote.Wrapper(2)(plain)
        for act in (wrapped.voters, wrapped.unwrap, lambda wrapped=wrapped: wrapped.save(tmp_path / "model.keras")):
            with pytest.raises(RuntimeError, match=f"other {what}.*get_config"):
                act()
    assert not [*tmp_path.iterdir()]
    plain = Given()
    plain(X)
    assert len(vote.Wrapper(2)(plain).voters()) == 2


def test_files_that_cannot_be_right_are_refused(tmp_path: Path) -> None:
    wrapped = vote.Wrapper(2)(sequential())
    for wrong in ("model.h5", "model"):
        with pytest.raises(ValueError, match="save_weights"):
            wrapped.save(tmp_path / wrong)
    wrapped.save(tmp_path / "model.keras")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        wrapped.save(tmp_path / "model.keras", overwrite=False)
    with pytest.raises(NotImplementedError, match=r"model\.save"):
        k.saving.save_model(wrapped, tmp_path / "other.keras")
    with pytest.raises(TypeError, match=r"load\(path\)"):
        workbench.load(tmp_path / "model.keras", sequential())
    with pytest.raises(FileNotFoundError):
        workbench.load(tmp_path / "none.keras")
    sequential().save(tmp_path / "plain.keras")
    with pytest.raises(ValueError, match="plain Keras model"):
        workbench.load(tmp_path / "plain.keras")

    class Needy(k.Model):
        def __init__(self, units: Any) -> None:
            super().__init__()
            self.out = k.layers.Dense(units())

        def call(self, x: Any) -> Any:
            return self.out(x)

        def get_config(self) -> dict[str, Any]:
            return {}

    needy = Needy(lambda: 1)
    needy(X)
    before = (tmp_path / "model.keras").read_bytes()
    with pytest.raises(RuntimeError, match="get_config"):
        vote.Wrapper(2)(needy).save(tmp_path / "model.keras")
    assert (tmp_path / "model.keras").read_bytes() == before


MADE: dict[str, Callable[[Any, Any], Any]] = {
    "variance": lambda model, held_out: calibrate(model, held_out),
    "conformal": lambda model, held_out: calibrate(model, held_out, "conformal"),
    "abstains": lambda model, held_out: selective(calibrate(model, held_out), held_out).predictor(coverage=0.5),
}


def said(made: Any) -> list[torch.Tensor]:
    x = torch.as_tensor(X)
    with torch.no_grad():
        if type(made).__name__ == "SelectivePredictor":
            return [*made(x)]
        y, risk = made(x, return_risk=True)
        return [
            y,
            *(risk[name] for name in risk.names()),
            *(made.interval(x, 0.5) if hasattr(made, "interval") else ()),
        ]


@pytest.mark.parametrize("kind", MADE)
def test_what_was_calibrated_comes_back_with_the_model(kind: str, tmp_path: Path) -> None:
    wrapped = trained(sequential, "all")
    path, held_out = tmp_path / "folder" / "model.keras", (torch.as_tensor(X), torch.as_tensor(Y))
    made = MADE[kind](wrapped.as_torch(), held_out)
    workbench.save(made, path)
    again = workbench.load(path)
    assert type(again) is type(made)
    assert all(torch.equal(a, b) for a, b in zip(said(again), said(made), strict=True))
    assert same(k.saving.load_model(path), wrapped)
    wrapped.save(path)  # alone
    assert same(workbench.load(path), wrapped)


def test_keras_files_of_what_they_cannot_hold_are_refused(tmp_path: Path) -> None:
    wrapped, held_out = trained(sequential, "vote"), (torch.as_tensor(X), torch.as_tensor(Y))
    workbench.save(wrapped, tmp_path / "model.keras")
    assert same(workbench.load(tmp_path / "model.keras"), wrapped)
    with pytest.raises(ValueError, match=r"neither a wrapped Keras model.*\.safetensors"):
        workbench.save(copy.deepcopy(wrapped.as_torch()), tmp_path / "copied.keras")
    with pytest.raises(ValueError, match=r"neither a wrapped Keras model.*\.safetensors"):
        workbench.save(vote.Wrapper(2)(torch.nn.Linear(2, 1)), tmp_path / "torch.keras")
    grouped = calibrate(wrapped.as_torch(), held_out, "conformal", groups=lambda x: (x[:, 0] > 0).long())
    with pytest.raises(ValueError, match=r"functions \(groups=\)"):
        workbench.save(grouped, tmp_path / "grouped.keras")
    assert [path.name for path in tmp_path.iterdir()] == ["model.keras"]
