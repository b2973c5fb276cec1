"""fit: repeatable, in original units, with the best weights, stoppable, resumable, and clear about bad input."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from workbench import compose, data, neo, sample, sculpt, vote
from workbench.errors import WorkbenchWarning
from workbench.training import History, fit
from workbench.training import checkpoint as checkpoint_module
from workbench.training.fitting import cross_entropy_of_probs, one_cycle
from workbench.training.rows import Batches, Rows, cut, moments

quiet = functools.partial(fit, progress=False)
WRAPPERS: dict[str, Callable[[], Any]] = {
    "plain": lambda: compose(),
    "sculpt": lambda: sculpt.Wrapper(n_layers=1),
    "sample": lambda: sample.Wrapper(n_samples=2),
    "vote": lambda: vote.Wrapper(n_voters=2),
    "neo": lambda: neo.Wrapper(),
    "vote of sculpt": lambda: compose(vote.Wrapper(2), sculpt.Wrapper(n_layers=1)),
    "vote and neo": lambda: compose(vote.Wrapper(2), neo.Wrapper()),
}


def net(inputs: int = 2, outputs: int = 1, seed: int = 0, dropout: float = 0.0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(inputs, 12), nn.Tanh(), nn.Dropout(dropout), nn.Linear(12, outputs))


def plain(**kwargs: Any) -> Any:
    return compose()(net(**kwargs))


def plane(n: int = 80, noise: float = 0.1, scale: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=generator)
    y = x @ torch.tensor([[1.0], [-2.0]]) + noise * torch.randn(n, 1, generator=generator)
    return x, scale * y


def options(**kwargs: Any) -> dict[str, Any]:
    return {"epochs": 2, **kwargs}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Interrupt:
    """A criterion that raises at its n-th call."""

    def __init__(self, call: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.calls, self.call, self.error = 0, call, error

    def __call__(self, prediction: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.call:
            raise self.error
        return F.mse_loss(prediction, y)


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
    for parameter in wrapped.base_parameters().values():
        parameter.requires_grad_(False)
    x, y = plane(100)
    expected, before = wrapped.eval()(x, return_risk=True)
    quiet(wrapped, (x, y), epochs=20)
    found, after = wrapped(x, return_risk=True)
    assert torch.equal(found, expected)
    assert not torch.equal(after, before)


def test_a_model_with_nothing_to_train_keeps_its_units() -> None:
    model = net().requires_grad_(False)
    x, y = plane()
    expected = model(x)
    wrapped = neo.Wrapper(density="flow")(model)
    with pytest.raises(ValueError, match=r"nothing to train|depends on no parameter"):
        quiet(wrapped, (x, 1e6 * y), epochs=1)
    assert torch.equal(wrapped(x), expected)


# ---- against an independent computation ------------------------------------------------------------------------------
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


# ---- units -----------------------------------------------------------------------------------------------------------
def test_predictions_and_risks_are_in_original_units() -> None:
    x, y = plane(300, noise=0.5)
    small, large = (sculpt.Wrapper(n_layers=1)(net()) for _ in range(2))
    large.load_state_dict(small.state_dict())
    quiet(small, (x, y), epochs=60, lr=0.02)
    quiet(large, (1e3 * x - 7e3, 1e6 * y + 3e6), epochs=60, lr=0.02)
    (y0, s0), (y1, s1) = small(x, return_risk=True), large(1e3 * x - 7e3, return_risk=True)
    torch.testing.assert_close(y1, 1e6 * y0 + 3e6, rtol=0.02, atol=3e4)
    torch.testing.assert_close(s1, 1e6 * s0, rtol=0.02, atol=1e4)
    assert 0.35 < s0.median().item() < 0.65


def test_the_standardisation_is_of_the_rows_trained_on() -> None:
    x, y = plane(50)
    x[:, 1] = 4.0
    wrapped = plain()
    quiet(wrapped, (x, y), epochs=1, validation=0.2, seed=3)
    kept, held = cut(Rows(x, y), 0.2, 3)
    assert isinstance(kept, Rows)
    assert (len(kept), len(held)) == (40, 10)  # type: ignore[arg-type]
    scaling = wrapped.scaling
    np.testing.assert_allclose(scaling.x_mean, kept.x.numpy().mean(0), rtol=1e-5)  # type: ignore[union-attr]
    np.testing.assert_allclose(scaling.x_scale, [kept.x.numpy()[:, 0].std(), 1.0], rtol=1e-5)  # type: ignore[union-attr]
    np.testing.assert_allclose(scaling.y_scale, kept.y.numpy().std(0), rtol=1e-5)


def test_moments_of_images_are_of_all_pixels_and_may_be_uncentred() -> None:
    values = torch.rand(5, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    mean, scale = moments(values)
    assert (mean.item(), scale.item()) == pytest.approx((values.numpy().mean(), values.numpy().std()), rel=1e-5)
    mean, scale = moments(torch.tensor([[3.0], [4.0]]), centre=False)
    assert (mean.item(), scale.item()) == (0, pytest.approx(12.5**0.5))


def test_positive_targets_of_a_lognormal_are_scaled_but_not_shifted() -> None:
    from workbench.distributions import LogNormal

    x, y = plane(60)
    wrapped: Any = sculpt.Wrapper(LogNormal, n_layers=1)(nn.Sequential(*net(), nn.Softplus()))
    quiet(wrapped, (x, y.exp()), epochs=1, validation=0)
    assert wrapped.scaling.y_mean == 0
    assert wrapped.scaling.y_scale.item() == pytest.approx(y.exp().square().mean().sqrt().item(), rel=1e-5)


def test_who_decides_about_standardisation() -> None:
    binary = (plane()[0], (plane()[1] > 0).float())
    wrapped = plain()
    quiet(wrapped, binary, epochs=1, criterion=F.binary_cross_entropy_with_logits)  # 0 and 1 must stay 0 and 1
    assert wrapped.scaling.y_mean is None
    assert wrapped.scaling.x_mean is not None
    quiet(wrapped, plane(scale=9.0), epochs=1, criterion=nn.L1Loss())  # what is there stays
    assert wrapped.scaling.y_mean is None
    quiet(wrapped, plane(scale=9.0), epochs=1, criterion=F.huber_loss, standardize=True)
    assert wrapped.scaling.y_scale > 9
    quiet(wrapped, plane(), epochs=1, standardize=False)
    assert wrapped.scaling is None
    labels = (plane()[0], torch.arange(80) % 3)
    wrapped = plain(outputs=3)
    quiet(wrapped, labels, epochs=1)
    assert wrapped.scaling.y_mean is None


# ---- validation and best weights -------------------------------------------------------------------------------------
def test_the_best_weights_come_back_and_patience_ends_the_training() -> None:
    x, y = plane(40)
    seen: list[dict[str, Tensor]] = []

    class Worse(nn.Module):
        """A validation loss that is least in epoch 3, whatever the model does."""

        def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
            if not prediction.requires_grad:
                seen.append(weights(wrapped))
                return torch.tensor([5.0, 4.0, 1.0, 2.0, 3.0, 2.5, 2.0][len(seen) - 1])
            return F.mse_loss(prediction, target)

    wrapped = plain()
    history = quiet(wrapped, (x, y), epochs=7, criterion=Worse(), patience=3)
    assert history.best_epoch == 3
    assert list(history.frame.epoch) == [1, 2, 3, 4, 5, 6]
    assert same(weights(wrapped), seen[2])
    assert not same(seen[2], seen[5])


def test_validation_rows_are_never_trained_on() -> None:
    x, y = plane(40)
    y[7] = 1e4

    class Seen(nn.Module):
        def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
            parts[prediction.requires_grad].append(target.detach().clone())
            return F.mse_loss(prediction, target)

    parts: dict[bool, list[Tensor]] = {True: [], False: []}
    quiet(plain(), (x, y), epochs=1, criterion=Seen(), standardize=False, validation=0.25)
    trained, held = (torch.cat(parts[kind]).flatten().tolist() for kind in (True, False))
    assert len(held) == 10
    assert sorted(trained + held) == sorted(y.flatten().tolist())


def test_the_cut_is_stratified_and_copes_with_a_class_of_one_row() -> None:
    y = torch.tensor([0] * 60 + [1] * 30 + [2] * 9 + [3])
    kept, held = cut(Rows(torch.arange(100.0)[:, None], y), 0.2, seed=0)
    assert isinstance(kept, Rows)
    assert isinstance(held, Rows)
    counts = torch.bincount(held.y, minlength=4)
    assert len(held) == 20
    assert (counts - 0.2 * torch.bincount(y)).abs().max() <= 1
    assert sorted([*kept.args[0].flatten().tolist(), *held.args[0].flatten().tolist()]) == list(range(100))
    others: list[Any] = [cut(kept, 0.2, seed)[1] for seed in (1, 2)]
    assert not torch.equal(others[0].x, others[1].x)


def test_no_batch_has_a_single_row_and_each_row_comes_once() -> None:
    for n, size in itertools.product((2, 3, 16, 17, 33, 40), (2, 8, 16, 64)):
        rows = Rows(torch.arange(float(n))[:, None], torch.zeros(n, 1))
        batches = Batches(rows, size, torch.device("cpu"), torch.float32, torch.Generator().manual_seed(0))
        first, second = ([batch.x.flatten().tolist() for batch in batches] for _ in range(2))
        assert min(map(len, first)) >= 2
        assert len(first) == len(batches)
        assert max(map(len, first)) <= size + 1
        assert sorted(itertools.chain(*first)) == list(range(n)) == sorted(itertools.chain(*second))


# ---- stopping and resuming -------------------------------------------------------------------------------------------
def test_ctrl_c_leaves_a_usable_model_with_its_best_weights() -> None:
    wrapped, other = plain(), plain()
    x, y = plane(40)  # 2 batches and a validation: 3 losses an epoch
    with pytest.warns(WorkbenchWarning, match="interrupted after 2 of 9 epochs"):
        history = quiet(wrapped, (x, y), epochs=9, criterion=Interrupt(8), batch_size=18)
    assert history.interrupted
    assert "interrupted" in repr(history)
    assert len(history.frame) == 2
    assert not wrapped.training

    states: list[dict[str, Tensor]] = []

    def spy(prediction: Tensor, target: Tensor) -> Tensor:
        if not prediction.requires_grad:
            states.append(weights(other))
        return F.mse_loss(prediction, target)

    quiet(other, (x, y), epochs=9, criterion=spy, batch_size=18)
    assert same(weights(wrapped), states[history.best_epoch - 1])
    with pytest.warns(WorkbenchWarning, match="after 0 of 9 epochs"):
        assert quiet(plain(), (x, y), epochs=9, criterion=Interrupt(2), batch_size=18).best_epoch == 0


@pytest.mark.parametrize("name", ["plain", "sample", "vote of sculpt", "neo"])
def test_a_resumed_training_ends_in_the_same_bits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "EVERY", 0.0)
    x, y = plane(60)
    first = WRAPPERS[name]()(net(dropout=0.2))
    start = weights(first)
    whole = quiet(first, (x, y), epochs=5, batch_size=16, validation=0.2)

    def model(garbled: bool) -> Any:
        wrapped = WRAPPERS[name]()(net(dropout=0.2, seed=9 if garbled else 0))
        if not garbled:
            wrapped.load_state_dict(start)
        return wrapped

    path = tmp_path / "folder" / "state.pt"
    written, write = itertools.count(1), checkpoint_module.Checkpoint.write

    def stop(self: Any, state: Any, force: bool = False) -> None:
        write(self, state, force)
        if next(written) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_module.Checkpoint, "write", stop)
    with pytest.warns(WorkbenchWarning, match="interrupted after 3 of 5"):
        quiet(model(False), (x, y), epochs=5, batch_size=16, validation=0.2, checkpoint=path)
    resumed = model(True)  # other weights: the file has the right ones
    history = quiet(resumed, (x, y), epochs=5, batch_size=16, validation=0.2, checkpoint=path)
    assert history.frame.drop(columns="seconds").equals(whole.frame.drop(columns="seconds"))
    assert same(weights(resumed), weights(first))
    again = model(True)
    assert len(quiet(again, (x, y), epochs=5, batch_size=16, validation=0.2, checkpoint=path).frame) == 5
    assert same(weights(again), weights(first))
    assert [file.name for file in path.parent.iterdir()] == ["state.pt"]


def test_going_on_with_the_interrupted_object_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "EVERY", 0.0)
    path = tmp_path / "state.pt"
    wrapped, straight = plain(), plain()
    criterion = Interrupt(8)
    with pytest.warns(WorkbenchWarning, match="interrupted after 2"):
        quiet(wrapped, plane(40), epochs=4, batch_size=18, checkpoint=path, criterion=criterion, standardize=True)
    quiet(wrapped, plane(40), epochs=4, batch_size=18, checkpoint=path, criterion=criterion, standardize=True)
    quiet(straight, plane(40), epochs=4, batch_size=18, standardize=True)
    assert same(weights(wrapped), weights(straight))


def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    quiet(plain(), plane(40), epochs=2, checkpoint=path)
    x, y = plane(40)
    wrapped = plain()
    start = weights(wrapped)
    for kwargs, rows, message in (
        ({"epochs": 3}, (x, y), "epochs: there 2, here 3"),
        ({"seed": 1}, (x, y), "seed: there 0, here 1"),
        ({"lr": 0.1}, (x, y), "optimizer"),
        ({}, (x, y + 1), "data"),
    ):
        with pytest.raises(ValueError, match=message):
            quiet(wrapped, rows, **options(checkpoint=path, **kwargs))
    with pytest.raises(ValueError, match="another model"):
        quiet(compose()(nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 1))), (x, y), epochs=2, checkpoint=path)
    assert same(weights(wrapped), start)
    path.write_text("something else")
    with pytest.raises(ValueError, match="no checkpoint"):
        quiet(wrapped, (x, y), epochs=2, checkpoint=path)
    assert path.read_text() == "something else"


# ---- what goes wrong -------------------------------------------------------------------------------------------------
def test_a_nan_loss_names_epoch_and_step_and_keeps_the_best_weights() -> None:
    class Breaks(nn.Module):
        def __init__(self, call: int) -> None:
            super().__init__()
            self.calls, self.call = 0, call

        def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
            self.calls += 1
            return F.mse_loss(prediction, target) * (math.nan if self.calls == self.call else 1)

    x, y = plane(40)
    wrapped = plain()
    with pytest.raises(FloatingPointError, match=r"nan at epoch 3, step 2 .*lr.*standardize=True.*weights of epoch \d"):
        quiet(wrapped, (x, y), epochs=9, criterion=Breaks(8), batch_size=18)
    assert not wrapped.training
    assert wrapped(x).isfinite().all()

    wrapped = plain()
    start = weights(wrapped)
    with pytest.raises(FloatingPointError, match=r"epoch 1, step 1 .*weights it had before"):
        quiet(wrapped, (x, y), epochs=9, criterion=Breaks(1))
    assert same(weights(wrapped), start)
    assert wrapped.scaling is None
    with pytest.raises(FloatingPointError, match="validation of epoch 1"):
        quiet(wrapped, (x, y), epochs=9, criterion=Breaks(3), batch_size=18)


def test_a_nan_that_a_loader_brings_is_told_by_row() -> None:
    x, y = plane(20)
    x[13] = math.nan
    loader = DataLoader(TensorDataset(x, y), batch_size=10)
    with pytest.raises(FloatingPointError, match=r"step 2 .*x holds NaN or infinite numbers in rows of the batch 3"):
        quiet(plain(), loader, epochs=1, validation=0)


def test_a_rate_that_is_too_high_ends_in_an_error_and_finite_weights() -> None:
    wrapped = plain()
    sgd = functools.partial(torch.optim.SGD, lr=1e30)
    with pytest.raises(FloatingPointError, match="epoch 1"):
        quiet(wrapped, plane(), epochs=5, optimizer=sgd)
    assert wrapped(plane()[0]).isfinite().all()


def nan_rows(part: int, value: float = math.nan) -> tuple[Tensor, Tensor]:
    rows = plane(20)
    rows[part][[3, 8]] = value
    return rows


class Text(Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> str:
        return "abc"


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(list(zip(*plane(20), strict=True)))


x20, y20 = plane(20)
BAD: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (nan_rows(0), {}, ValueError, "x holds NaN or infinite numbers in 2 of 20 rows, first in row 3"),
    (nan_rows(1), {}, ValueError, "y holds NaN or infinite numbers in 2 of 20 rows, first in row 3"),
    (nan_rows(1, math.inf), {}, ValueError, "y holds NaN or infinite"),
    ((x20, y20[:, 0]), {}, ValueError, r"targets are \[n\], but the model gives \[n, 1\].*y\[:, None\]"),
    ((x20, y20[:, 0]), {"criterion": F.huber_loss}, ValueError, r"targets are \[n\]"),
    ((x20, torch.cat([y20, y20], 1)), {}, ValueError, r"targets are \[n, 2\], but the model gives \[n, 1\]"),
    ((x20, y20[:-1]), {}, ValueError, "x has 20 rows and y has 19"),
    ((x20, torch.arange(20)), {}, ValueError, "class numbers go from 0 to 19, but the model gives 1 scores"),
    ((x20, torch.zeros(20, 1, dtype=torch.int64)), {}, ValueError, r"class numbers are \[n, 1\]"),
    ((x20[:1], y20[:1]), {"validation": 0}, ValueError, "found 1 rows"),
    ((x20[:2], y20[:2]), {}, ValueError, "2 rows are too few"),
    ((np.array(["a", "b"]), y20[:2]), {}, TypeError, "x is .*can't be made a tensor"),
    ((x20, 3.0), {}, ValueError, "y is a single number"),
    (x20, {}, TypeError, "found a tensor.*workbench Data"),
    ((x20, x20, y20), {}, TypeError, "found a tuple of 3"),
    (TensorDataset(x20, x20, y20), {}, TypeError, "TensorDataset of 3"),
    (Text(), {}, TypeError, r"must give a pair \(x, y\)"),
    (Stream(), {}, TypeError, "give it in a DataLoader"),
    (DataLoader(TensorDataset(x20, y20)), {}, ValueError, "validation: the rows of a DataLoader can't be cut"),
    (DataLoader(TensorDataset(x20, y20)), {"validation": 0, "batch_size": 4}, ValueError, "batch_size"),
    (DataLoader(TensorDataset(x20, y20)), {"validation": 0, "standardize": True}, ValueError, "standardize: it takes"),
    (DataLoader(Stream(), batch_size=4), {"validation": 0}, TypeError, "no length"),
    ((x20, y20), {"validation": 1.0}, ValueError, "validation must be a share"),
    ((x20, y20), {"validation": -0.1}, ValueError, "validation must be a share"),
    ((x20, y20), {"validation": (x20[:, :1], y20)}, ValueError, "validation: its rows have shapes"),
    ((x20, y20), {"validation": (x20[:0], y20[:0])}, ValueError, "validation: there is no row"),
    ((x20, y20), {"validation": 0, "patience": 3}, ValueError, "patience: without validation rows"),
    ((x20, y20), {"patience": 0}, ValueError, "patience must be"),
    ((x20, y20), {"epochs": 0}, ValueError, "epochs must be a whole number of at least 1; found 0"),
    ((x20, y20), {"batch_size": 1}, ValueError, "batch_size must be a whole number of at least 2"),
    ((x20, y20), {"lr": 0.0}, ValueError, "lr must be above 0"),
    ((x20, y20), {"lr": math.nan}, ValueError, "lr must be above 0"),
    ((x20, y20), {"weight_decay": -1.0}, ValueError, "weight_decay must be"),
    ((x20, y20), {"dtype": torch.int64}, ValueError, "dtype must be a floating-point type"),
    ((x20, y20), {"optimizer": torch.optim.SGD([torch.zeros(1)], lr=1.0)}, TypeError, "give a callable"),
    ((x20, y20), {"optimizer": lambda parameters: None}, TypeError, "must give a torch Optimizer"),
    ((x20, y20), {"optimizer": torch.optim.SGD, "lr": 0.1}, ValueError, "lr and weight_decay are of the default"),
    ((x20, y20), {"criterion": lambda p, t: t.mean()}, ValueError, "depends on no parameter"),
]


@pytest.mark.parametrize(
    ("rows", "kwargs", "error", "message"), BAD, ids=[f"{i}-{row[3][:24]}" for i, row in enumerate(BAD)]
)
def test_bad_input_gets_a_clear_error_and_changes_nothing(
    rows: Any, kwargs: dict[str, Any], error: type[Exception], message: str
) -> None:
    wrapped = plain()
    start = weights(wrapped)
    state = torch.get_rng_state()
    with pytest.raises(error, match=message):
        quiet(wrapped, rows, **options(**kwargs))
    assert same(weights(wrapped), start)
    assert wrapped.scaling is None
    assert torch.equal(torch.get_rng_state(), state)


def test_an_error_leaves_every_layer_in_its_mode() -> None:
    wrapped = plain()
    wrapped[2].eval()
    with pytest.raises(ValueError, match="targets are"):
        quiet(wrapped, (x20, y20[:, 0]))
    assert [layer.training for layer in wrapped] == [True, True, False, True]
    assert wrapped.training


def test_what_is_not_wrapped_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Sequential is not wrapped; compose\(\)\(model\)"):
        quiet(net(), plane())
    function: Any = F.relu
    with pytest.raises(TypeError, match="found function"):
        quiet(function, plane())
    frozen = compose()(net().requires_grad_(False))
    with pytest.raises(ValueError, match="nothing to train"):
        quiet(frozen, plane())


# ---- forms of data ---------------------------------------------------------------------------------------------------
def test_all_forms_of_the_same_rows_give_the_same_weights() -> None:
    x, y = plane(40)

    class Pairs(Dataset):
        def __len__(self) -> int:
            return 40

        def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
            return x[i], y[i]

    class Holder:
        train = data.Split(x, y)

    forms = [(x, y), (x.numpy(), y.double().numpy()), TensorDataset(x, y), Holder(), data.Split(x, y), Pairs(), [x, y]]
    results = []
    for form in forms:
        wrapped = plain()
        quiet(wrapped, form, epochs=2, standardize=False, batch_size=8)
        results.append(weights(wrapped))
    assert all(same(result, results[0]) for result in results[1:])


def test_a_loader_is_used_as_it_is_and_repeats() -> None:
    rows, held = TensorDataset(*plane(40)), TensorDataset(*plane(20, seed=1))
    results = []
    for _ in range(2):
        wrapped = plain()
        loader = DataLoader(rows, batch_size=8, shuffle=True)
        history = quiet(wrapped, loader, epochs=2, validation=DataLoader(held, batch_size=8))
        assert history.frame.validation_loss.notna().all()
        results.append(weights(wrapped))
        torch.rand(3)
    assert same(*results)
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    assert len(quiet(plain(), DataLoader(Stream(), batch_size=4), epochs=2, validation=0, optimizer=sgd).frame) == 2


def test_classes_of_a_data_set_are_learned() -> None:
    moons = data.load("moons", n_train=200)
    wrapped = vote.Wrapper(2, output="logits")(net(outputs=2))
    quiet(wrapped, moons, epochs=60, lr=0.03)
    right = (wrapped(moons.test.x).argmax(1) == moons.test.y).float().mean()
    assert right > 0.8
    probs = compose(sample.Wrapper(2, output="probs"))(nn.Sequential(*net(outputs=2), nn.Softmax(1)))
    history = quiet(probs, moons, epochs=20, lr=0.03)
    assert history.frame.loss.iloc[-1] < 0.5 < history.frame.loss.iloc[0]


class Two(nn.Module):
    """Two inputs, one of them of whole numbers, and names that are also those of a wrapped model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(5, 3), nn.Linear(4, 1)
        self.scale = 1.0

    def loss(self) -> str:
        return "mine"

    def forward(self, number: Tensor, kind: Tensor) -> Tensor:
        return self.out(torch.cat([number, self.embed(kind)], 1))


@pytest.mark.parametrize("name", ["plain", "vote", "neo"])
def test_several_inputs_whole_numbers_and_clashing_names(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    number, kind = torch.rand(60, 1, generator=generator), torch.randint(5, (60,), generator=generator)
    wrapped = WRAPPERS[name]()(Two())
    history = quiet(wrapped, ((number, kind), number + kind[:, None]), epochs=30, lr=0.05)
    assert history.frame.loss.iloc[-1] < 0.3 * history.frame.loss.iloc[0]
    assert wrapped.loss() == "mine"


def test_dtype_and_device() -> None:
    wrapped = plain()
    quiet(wrapped, plane(), epochs=1, dtype=torch.float64, device="cpu")
    assert {p.dtype for p in wrapped.parameters()} == {torch.float64}
    assert wrapped(plane()[0].double()).dtype == torch.float64
    with pytest.raises(RuntimeError, match="Expected one of"):
        quiet(wrapped, plane(), epochs=1, device="nowhere")


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


def test_the_bar_is_silent_when_short_or_not_wanted(capfd: pytest.CaptureFixture[str]) -> None:
    fit(plain(), plane(), epochs=2)
    quiet(plain(), plane(), epochs=2)
    out, err = capfd.readouterr()
    assert (out, err.strip()) == ("", "")
