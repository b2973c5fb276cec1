"""fit: trains every wrapper, is reproducible to the last bit, equals computations by hand, and shows its progress."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.training_models import WRAPPERS, Interrupt, net, plain, plane, quiet, same, weights
from torch import nn
from torch.nn import functional as F

from workbench import compose, neo, sample, sculpt, vote
from workbench.training import History, fit
from workbench.training.default_losses import cross_entropy_of_probs
from workbench.training.defaults import one_cycle

# ---- every wrapper ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRAPPERS)
def test_every_wrapper_learns_a_plane_and_leaves_eval_mode(name: str) -> None:
    x, y = plane(200, scale=50.0)
    wrapped = WRAPPERS[name]()(net())
    history = quiet(wrapped, (x, y), epochs=40, lr=0.03)
    assert not wrapped.training
    assert history.frame.validation_loss.iloc[-1] < 0.5 * history.frame.validation_loss.iloc[0]
    with torch.no_grad():
        error = (wrapped(x) - y).square().mean().sqrt()
    assert error < 0.35 * y.std()
    assert wrapped(x).shape == (200, 1)


@pytest.mark.parametrize("name", WRAPPERS)
def test_every_wrapper_repeats_to_the_last_bit(name: str) -> None:
    first, second = (WRAPPERS[name]()(net(dropout=0.2)) for _ in range(2))
    second.load_state_dict(first.state_dict())
    histories = []
    for wrapped in (first, second):
        before = torch.get_rng_state()
        histories.append(quiet(wrapped, plane(), epochs=3, seed=5).frame.drop(columns="seconds"))
        assert torch.equal(torch.get_rng_state(), before)
        torch.rand(7)  # another place in the global stream for the second run
    assert same(weights(first), weights(second))
    assert histories[0].equals(histories[1])


def test_validation_draws_the_same_noise_in_every_epoch() -> None:
    sgd = functools.partial(torch.optim.SGD, lr=0.0)
    history = quiet(sample.Wrapper(2)(net()), plane(), epochs=3, optimizer=sgd)
    assert history.frame.validation_loss.nunique() == 1
    assert history.frame.loss.nunique() == 3


def test_the_global_generator_is_as_before_even_after_an_error() -> None:
    for criterion in (None, Interrupt(2, RuntimeError)):
        before = torch.get_rng_state()
        try:
            quiet(plain(dropout=0.5), plane(), epochs=2, criterion=criterion)
        except RuntimeError:
            assert criterion is not None
        assert torch.equal(torch.get_rng_state(), before)


def test_another_seed_gives_other_weights() -> None:
    models = [plain(), plain()]
    for seed, model in enumerate(models):
        quiet(model, plane(), epochs=1, seed=seed)
    assert not same(weights(models[0]), weights(models[1]))


def test_neo_is_fitted_on_the_rows_trained_on() -> None:
    x, y = plane(300)
    wrapped = neo.Wrapper()(net())
    quiet(wrapped, (x, y), epochs=1, validation=0)
    risk = wrapped(torch.cat([x, 100 + x]), return_risk=True)[1]
    assert abs(risk[:300].mean()) < 0.5
    assert risk[300:].min() > risk[:300].max()


def test_a_model_whose_prediction_is_frozen_keeps_it_while_its_risk_is_trained() -> None:
    wrapped: Any = sculpt.Wrapper(n_layers=1)(net())
    for parameter in wrapped.base_parameters():
        parameter.requires_grad_(False)
    x, y = plane(100)
    expected, before = wrapped.eval()(x, return_risk=True)
    quiet(wrapped, (x, y), epochs=20)
    prediction, after = wrapped(x, return_risk=True)
    assert torch.equal(prediction, expected)
    assert not torch.equal(after, before)


def test_a_model_with_nothing_to_train_keeps_its_units() -> None:
    model = net().requires_grad_(False)
    x, y = plane()
    expected = model(x)
    wrapped = neo.Wrapper(density="flow")(model)
    with pytest.raises(ValueError, match=r"nothing to train|depends on no trainable parameter"):
        quiet(wrapped, (x, 1e6 * y), epochs=1)
    assert torch.equal(wrapped(x), expected)


# ---- against an independent computation ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_linear_model_reaches_least_squares() -> None:
    x, y = plane(120, scale=300.0)
    wrapped = compose()(nn.Linear(2, 1))
    quiet(wrapped, (x, y), epochs=150, lr=0.05, validation=0)
    design = np.c_[x.numpy(), np.ones(120)]
    exact = design @ np.linalg.lstsq(design, y.numpy(), rcond=None)[0]
    np.testing.assert_allclose(wrapped(x).detach().numpy(), exact, atol=0.01 * float(y.std()))


def test_one_step_of_sgd_is_the_gradient_by_hand() -> None:
    x, y = plane(10)
    wrapped = compose()(nn.Linear(2, 1))
    w, b = (p.detach().clone() for p in wrapped.parameters())
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    history = quiet(wrapped, (x, y), epochs=1, optimizer=sgd, validation=0, standardize=False)
    residual = x @ w.T + b - y
    torch.testing.assert_close(wrapped.weight, w - 0.1 * 2 * residual.T @ x / 10)
    torch.testing.assert_close(wrapped.bias, b - 0.1 * 2 * residual.mean(0))
    assert history.frame.loss[0] == pytest.approx(residual.square().mean().item())
    assert history.frame.lr[0] == 0.1


def test_losses_are_means_over_rows_also_where_batches_differ() -> None:
    x, y = plane(50)
    wrapped = plain()
    sgd = functools.partial(torch.optim.SGD, lr=0.0)
    history = quiet(
        wrapped, (x, y), epochs=1, optimizer=sgd, batch_size=16, validation=plane(37, seed=1), standardize=False
    )
    for column, rows in (("loss", (x, y)), ("validation_loss", plane(37, seed=1))):
        assert history.frame[column][0] == pytest.approx(F.mse_loss(wrapped(rows[0]), rows[1]).item(), rel=1e-5)


def test_the_schedule_rises_for_a_twentieth_and_falls_to_zero() -> None:
    factors = [one_cycle(step, 200) for step in range(201)]
    assert factors[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert factors[10:] == pytest.approx([0.5 + 0.5 * math.cos(math.pi * i / 190) for i in range(191)])
    assert quiet(plain(), plane(), epochs=4, lr=0.02).frame.lr.is_monotonic_decreasing


def test_probabilities_get_the_cross_entropy_of_their_logits() -> None:
    logits = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0, 1, 2, 2, 1, 0])
    torch.testing.assert_close(cross_entropy_of_probs(logits.softmax(1), y), F.cross_entropy(logits, y))


# ---- what is shown ---------------------------------------------------------------------------------------------------


def test_history_columns_repr_and_plot() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    history = quiet(plain(), plane(), epochs=3)
    assert list(history.frame) == ["epoch", "loss", "validation_loss", "lr", "seconds"]
    assert list(history.frame.epoch) == [1, 2, 3]
    assert history.seconds == pytest.approx(history.frame.seconds.sum())
    assert repr(history).startswith("History(3 epochs in ")
    assert f"best epoch {history.best_epoch}" in repr(history)
    assert history.best_epoch == history.frame.validation_loss.argmin() + 1
    figure, ax = plt.subplots()
    assert history.plot(ax) is ax
    plt.close(figure)
    none = quiet(plain(), plane(), epochs=2, validation=0)
    assert none.frame.validation_loss.isna().all()
    assert none.best_epoch == 2
    assert "validation" not in repr(none)
    assert len(History([], 0).frame) == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["plain", "vote of sculpt"])
def test_gradients_that_are_turned_off_around_a_fit_change_nothing(mode: Any, name: str) -> None:
    first, second = (WRAPPERS[name]()(net()) for _ in range(2))
    quiet(first, plane(), epochs=2)
    with mode():
        quiet(second, plane(), epochs=2)  # whose rows are tensors of inference mode as well
        assert not torch.is_grad_enabled()
        assert torch.is_inference_mode_enabled() is (mode is torch.inference_mode)
    assert same(weights(first), weights(second))


def test_weights_that_torch_cannot_change_are_refused() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(2, 1))
    with pytest.raises(ValueError, match=r"0.weight was made inside torch.inference_mode\(\).*wrap the model outside"):
        quiet(compose()(model), plane())


def test_the_bar_is_silent_when_short_or_not_wanted(capfd: pytest.CaptureFixture[str]) -> None:
    fit(plain(), plane(), epochs=2)
    quiet(plain(), plane(), epochs=2)
    out, err = capfd.readouterr()
    assert (out, err.strip()) == ("", "")


class MovesToDevices(nn.Linear):
    """A layer whose own `to` takes a device only, as that of published Kolmogorov-Arnold networks."""

    def to(self, device: Any) -> Any:
        return super().to(device)


def test_a_model_with_another_to_is_trained() -> None:
    wrapped = vote.Wrapper(2)(MovesToDevices(3, 1))
    x = torch.randn(40, 3)
    losses = [record[1] for record in fit(wrapped, (x, x[:, :1]), epochs=20, lr=0.1, progress=False).records]
    assert losses[-1] < 0.1 * losses[0]
