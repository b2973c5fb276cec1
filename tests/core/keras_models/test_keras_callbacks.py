"""Keras callbacks during the training of wrapped models, and batched evaluation and prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import keras_models
from helpers.keras_models import X, Y, k, sequential

from workbench import compose, neo, sculpt, vote

seeded_keras = keras_models.seeded_keras


def compiled() -> Any:
    model = sequential()
    model.compile(k.optimizers.Adam(0.05), "mse", metrics=["mae"])
    return compose(vote.Wrapper(2), sculpt.Wrapper(n_layers=1))(model)


def train(model: Any, epochs: int = 3, **options: Any) -> Any:
    torch.manual_seed(1)
    return model.fit(X, Y, epochs=epochs, batch_size=5, shuffle=False, verbose=0, **options)


def values(model: Any) -> list[np.ndarray]:
    return [v.numpy() for v in model.weights]


def alike(one: Any, other: Any) -> bool:
    return all(map(np.array_equal, values(one), values(other)))


def twins() -> tuple[Any, Any]:
    """Two wrapped models of the same weights."""
    one, other = compiled(), compiled()
    other.load_state_dict(one.state_dict())
    return one, other


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


def test_early_stopping_gives_back_the_weights_of_the_best_epoch() -> None:
    wrapped = compiled()
    seen: list[list[np.ndarray]] = []
    losses: list[float] = []

    class Keep(k.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append(values(self.model))
            losses.append(logs["val_loss"])
            self.model.optimizer.learning_rate = 3.0  # from the first epoch on it gets worse

    stop = k.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
    train(wrapped, 6, validation_data=(X, Y), callbacks=[Keep(), stop])
    best = int(np.argmin(losses))
    assert best < len(losses) - 1
    assert all(map(np.array_equal, values(wrapped), seen[best]))


@pytest.mark.parametrize("wrapper", [neo.Wrapper(), compose(sculpt.Wrapper(), neo.Wrapper())])
def test_weights_whose_shape_is_learned_are_restored(wrapper: Any) -> None:
    plain = sequential()
    plain.compile(k.optimizers.Adam(0.05), "mse")
    wrapped = wrapper(plain)
    wrapped.fit(X, Y, epochs=1, verbose=0)
    before = values(wrapped)
    stop = k.callbacks.EarlyStopping("loss", restore_best_weights=True)
    wrapped.fit(X, Y, epochs=2, verbose=0, callbacks=[stop])
    assert [tuple(v.shape) for v in wrapped.weights] == [v.shape for v in values(wrapped)]
    wrapped.set_weights(before)
    assert all(map(np.array_equal, values(wrapped), before))


@pytest.mark.slow
@pytest.mark.parametrize("weights_only", [False, True])
def test_a_checkpoint_goes_on_where_it_was_and_changes_no_training(weights_only: bool, tmp_path: Path) -> None:
    with_files, without = twins()
    pattern = str(tmp_path / ("{epoch}.weights.h5" if weights_only else "{epoch}.keras"))
    keep = k.callbacks.ModelCheckpoint(pattern, save_weights_only=weights_only)
    train(with_files, 2, callbacks=[keep])
    train(without, 2)
    assert alike(with_files, without)
    if weights_only:
        restored = compiled()
        restored.load_weights(pattern.format(epoch=2))
    else:
        restored = k.saving.load_model(pattern.format(epoch=2))
    assert alike(restored, without)
    train(restored, 2)
    train(without, 2)
    assert alike(restored, without)  # with the moments of the optimizer


def test_an_interrupted_fit_resumes(tmp_path: Path) -> None:
    whole, halved = twins()
    torch.manual_seed(2)
    whole.fit(X, Y, epochs=4, batch_size=12, shuffle=False, verbose=0)

    class Interrupt(k.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise KeyboardInterrupt

    backup = k.callbacks.BackupAndRestore(str(tmp_path), delete_checkpoint=False)
    torch.manual_seed(2)
    with pytest.raises(KeyboardInterrupt):
        halved.fit(X, Y, epochs=4, batch_size=12, shuffle=False, verbose=0, callbacks=[backup, Interrupt()])
    state = torch.get_rng_state()
    again = compiled()
    torch.set_rng_state(state)
    again.fit(X, Y, epochs=4, batch_size=12, shuffle=False, verbose=0, callbacks=[backup])
    assert alike(again, whole)


def test_the_rate_is_reduced_on_a_plateau() -> None:
    wrapped = compiled()
    reduce = k.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=100.0)
    rates = train(wrapped, 4, callbacks=[reduce]).history["learning_rate"]
    assert rates == pytest.approx([0.05, 0.05, 0.025, 0.0125])
    assert float(wrapped.optimizer.learning_rate) == pytest.approx(0.00625)


def test_averaged_weights_are_those_of_every_voter() -> None:
    model = sequential()
    wrapped = vote.Wrapper(2)(model)
    wrapped.compile(k.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5), "mse")
    before = values(wrapped)
    history: list[list[np.ndarray]] = []

    class Keep(k.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            history.append(values(self.model))

    wrapped.fit(X, Y, epochs=3, batch_size=12, verbose=0, callbacks=[Keep(), k.callbacks.SwapEMAWeights()])
    averaged = before
    for step, now in enumerate(history):
        averaged = now if step == 0 else [0.5 * old + 0.5 * new for old, new in zip(averaged, now, strict=True)]
    for mine, theirs in zip(values(wrapped), averaged, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)


def test_batches_make_no_difference_to_predictions_and_scores() -> None:
    wrapped = compiled()
    whole, risk = wrapped.predict(X, verbose=0)
    parts, risks = wrapped.predict(X, batch_size=5, verbose=0)
    np.testing.assert_allclose(parts, whole, rtol=1e-6)
    assert risk.keys() == risks.keys()
    for name in risk:
        np.testing.assert_allclose(risks[name], risk[name], rtol=1e-5)
    batches = [wrapped.predict_on_batch(X[rows : rows + 5])[0] for rows in (0, 5, 10)]
    np.testing.assert_allclose(np.concatenate(batches), whole, rtol=1e-6)
    scores = wrapped.evaluate(X, Y, batch_size=5, verbose=0, return_dict=True)
    y, doubt = (torch.as_tensor(part) for part in (whole, risk["aleatoric"]))
    target = torch.as_tensor(Y)
    expected = ((y - target) ** 2).mean() - torch.distributions.Normal(y, doubt).log_prob(target).mean()
    assert scores["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert scores["mae"] == pytest.approx(float((y - target).abs().mean()), rel=1e-5)
    assert wrapped.test_on_batch(X, Y, return_dict=True)["loss"] == pytest.approx(scores["loss"], rel=1e-5)


def test_weights_of_rows_and_classes_count_in_fit() -> None:
    one, other = twins()
    labels = (Y > 0).astype("float32")
    weights = np.where(labels[:, 0] == 1, 3.0, 1.0).astype("float32")
    for model, options in ((one, {"class_weight": {0: 1.0, 1: 3.0}}), (other, {"sample_weight": weights})):
        torch.manual_seed(1)
        model.fit(X, labels, epochs=2, batch_size=6, shuffle=False, verbose=0, **options)
    for mine, theirs in zip(values(one), values(other), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)
