"""fit's callback: when it is called and with what, that it can end the training, and that inspecting the model changes nothing."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from workbench import compose, laplace, neo, sample, sculpt, swag, vote
from workbench.calibration import calibrate
from workbench.core.method import evaluating
from workbench.errors import WorkbenchWarning
from workbench.training import History, Progress, fit
from workbench.training import checkpoint as checkpoint_module

quiet = functools.partial(fit, progress=False)


def rows(n: int = 60) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 2, generator=generator)
    return x, x.sum(1, keepdim=True) + 0.1 * torch.randn(n, 1, generator=generator)


def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))


def plain() -> Any:
    return compose()(net())


def made(wrapper: Any) -> Any:
    """Wrapped with the same draws each time."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        return wrapper(net())


def values(wrapped: Any) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in wrapped.state_dict().items() if isinstance(t, Tensor)}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


class Seen(list):
    """A callback that keeps what it is told, and ends the training where `until` says so."""

    def __init__(self, until: Callable[[Progress], Any] = lambda progress: False) -> None:
        super().__init__()
        self.until = until

    def __call__(self, progress: Progress) -> Any:
        self.append(progress)
        return self.until(progress)


# ---- what it is told
def test_each_step_and_each_epoch_is_told() -> None:
    seen, wrapped = Seen(), plain()
    history = quiet(wrapped, rows(), epochs=3, batch_size=20, callback=seen)  # 54 rows to train on: 3 steps
    assert [p.epoch_ended for p in seen] == [False, False, False, True] * 3
    assert [p.epoch for p in seen] == [1] * 4 + [2] * 4 + [3] * 4
    assert [p.step for p in seen] == [1, 2, 3, 3, 4, 5, 6, 6, 7, 8, 9, 9]
    assert {(p.epochs, p.steps) for p in seen} == {(3, 9)}
    assert all(p.wrapped is wrapped for p in seen)
    assert seen[-1].fraction == 1.0
    assert seen[0].fraction == 1 / 9

    ends = [p for p in seen if p.epoch_ended]
    assert [p.loss for p in ends] == list(history.frame["loss"])
    assert [p.validation_loss for p in ends] == list(history.frame["validation_loss"])
    steps = [p for p in seen if not p.epoch_ended]
    assert all(type(p.loss) is float for p in steps)
    assert math.isnan(steps[0].validation_loss)
    assert steps[3].validation_loss == ends[0].validation_loss
    # 54 rows in batches of 20, 20 and 14
    assert ends[0].loss == pytest.approx(sum(p.loss * n for p, n in zip(steps, (20, 20, 14), strict=False)) / 54)


def test_the_loss_is_that_of_the_step() -> None:
    seen, (x, y) = Seen(), rows(20)
    model = nn.Linear(2, 1)
    expected = F.mse_loss(model(x), y).item()
    quiet(compose()(model), (x, y), epochs=1, batch_size=20, validation=0, standardize=False, callback=seen)
    assert seen[0].loss == pytest.approx(expected)
    assert math.isnan(seen[-1].validation_loss)


def test_the_model_is_as_the_step_has_left_it() -> None:
    weights, modes = [], []

    def look(progress: Progress) -> None:
        weights.append(progress.wrapped[0].weight.detach().clone())
        modes.append(progress.wrapped.training)

    wrapped = plain()
    before = wrapped[0].weight.detach().clone()
    quiet(wrapped, rows(), epochs=1, batch_size=27, validation=0.1, callback=look)
    assert modes[:2] == [True, True]
    assert not torch.equal(weights[0], before)
    assert not torch.equal(weights[1], weights[0])
    assert torch.equal(weights[2], weights[1])  # no step between the last one and the end of the epoch


def test_cross_fitting_tells_as_well() -> None:
    seen = Seen()
    history = quiet(made(vote.Wrapper(2)), rows(), epochs=4, batch_size=10, folds=2, callback=seen)
    assert [p.epoch_ended for p in seen] == [False, False, False, True] * 4  # 30 rows each
    assert [p.step for p in seen if not p.epoch_ended] == list(range(1, 13))
    assert {p.steps for p in seen} == {12}
    assert [p.loss for p in seen if p.epoch_ended] == list(history.frame["loss"])
    means = torch.tensor([float(p.loss) for p in seen if not p.epoch_ended]).reshape(4, 3).mean(1)
    assert means.tolist() == pytest.approx(list(history.frame["loss"]), rel=1e-5)


def test_a_loader_without_a_length_says_how_many_epochs_are_done() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter(zip(*rows(12), strict=True))

    seen, loader = Seen(), DataLoader(Stream(), batch_size=4)
    quiet(plain(), loader, epochs=2, validation=0, optimizer=torch.optim.SGD, callback=seen)
    assert {p.steps for p in seen} == {0}
    assert [p.fraction for p in seen] == [0, 0, 0, 0.5, 0.5, 0.5, 0.5, 1.0]


# ---- ending
def stopped(wrapped: Any, until: Callable[[Progress], Any], **options: Any) -> History:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return quiet(wrapped, rows(), **{"epochs": 30, "batch_size": 20, "callback": Seen(until), **options})


def test_something_true_ends_the_training_without_a_warning_and_keeps_the_best_weights() -> None:
    wrapped, short = plain(), plain()
    history = stopped(wrapped, lambda p: p.epoch_ended and p.epoch == 3)
    assert history.interrupted
    assert len(history.records) == 3
    assert not wrapped.training
    best: dict[str, Any] = {}

    def keep(progress: Progress) -> None:
        if progress.epoch_ended and progress.validation_loss < best.get("loss", math.inf):
            best.update(loss=progress.validation_loss, weights=values(progress.wrapped))

    def until(progress: Progress) -> bool:
        keep(progress)
        return progress.epoch == 3 and progress.epoch_ended

    stopped(short, until)
    assert_same(values(wrapped), best["weights"])


def test_a_stop_in_the_first_epoch_keeps_what_was_learned() -> None:
    wrapped = plain()
    before = values(wrapped)
    history = stopped(wrapped, lambda p: p.step == 2)
    assert history.interrupted
    assert history.records == []
    assert any(not torch.equal(value, before[name]) for name, value in values(wrapped).items() if name in before)
    assert not wrapped.training


@pytest.mark.parametrize("end", [lambda p: p.epoch_ended and p.epoch == 3, lambda p: p.step == 2])
def test_ctrl_c_keeps_what_a_stop_keeps(end: Callable[[Progress], bool]) -> None:
    def interrupt(progress: Progress) -> None:
        if end(progress):
            raise KeyboardInterrupt

    ended, interrupted = plain(), plain()
    stopped(ended, end)
    with pytest.warns(WorkbenchWarning, match="interrupted"):
        quiet(interrupted, rows(), epochs=30, batch_size=20, callback=interrupt)
    assert_same(values(interrupted), values(ended))


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrapper",
    [neo.Wrapper(), laplace.Wrapper(), swag.Wrapper(), compose(vote.Wrapper(2), sculpt.Wrapper())],
    ids=lambda wrapper: repr(wrapper).partition("(")[0] + str(len(repr(wrapper))),
)
def test_a_stopped_model_says_its_risk(wrapper: Any) -> None:
    wrapped = made(wrapper)
    stopped(wrapped, lambda p: p.epoch == 19, epochs=20)
    y, risk = wrapped(rows()[0], return_risk=True)
    risks = [risk] if isinstance(risk, Tensor) else [risk[name] for name in risk.names()]
    assert y.isfinite().all()
    assert all(value.isfinite().all() for value in risks)


def test_cross_fitting_decides_by_what_there_is() -> None:
    early, late = made(vote.Wrapper(4)), made(vote.Wrapper(4))
    assert stopped(early, lambda p: True, folds=2, epochs=100).out_of_fold is None
    history = stopped(late, lambda p: p.epoch == 20, folds=2)
    assert history.interrupted
    assert history.out_of_fold is not None
    assert not late.training


def test_an_error_in_it_ends_the_training_with_a_usable_model() -> None:
    wrapped = plain()

    def fail(progress: Progress) -> None:
        if progress.epoch == 2:
            raise ZeroDivisionError("in the callback")

    with pytest.raises(ZeroDivisionError, match="in the callback"):
        quiet(wrapped, rows(), epochs=5, callback=fail)
    assert not wrapped.training
    assert wrapped(rows()[0]).isfinite().all()


def test_what_was_stopped_goes_on_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "WRITE_INTERVAL", 0.0)
    options: dict[str, Any] = {"epochs": 6, "batch_size": 20}
    whole, parts, seen = plain(), plain(), Seen()
    quiet(whole, rows(), **options)
    stopped(parts, lambda p: p.epoch_ended and p.epoch == 3, checkpoint=tmp_path / "state", **options)
    again = plain()
    quiet(again, rows(), checkpoint=tmp_path / "state", callback=seen, **options)
    assert_same(values(again), values(whole))
    assert [p.step for p in seen if p.epoch_ended] == [12, 15, 18]


# ---- looking
def peek(progress: Progress) -> None:
    x = rows()[0]
    torch.manual_seed(3)
    torch.rand(100)
    with evaluating(progress.wrapped, whole=True), torch.no_grad():
        progress.wrapped(x)
        if not any(method.needs_fit or method.collects for method in progress.wrapped._workbench.methods):
            progress.wrapped(x, return_risk=True)


@pytest.mark.parametrize(
    ("wrapper", "options"),
    [
        (compose(), {}),
        pytest.param(vote.Wrapper(2), {}, marks=pytest.mark.slow),  # is in the composition
        (vote.Wrapper(2, strategy="replay"), {}),
        (sample.Wrapper(2), {}),
        (compose(vote.Wrapper(2), sculpt.Wrapper(), neo.Wrapper()), {}),
        (swag.Wrapper(), {}),
        (vote.Wrapper(2), {"folds": 2}),
    ],
    ids=["plain", "vote", "replay", "sample", "composition", "swag", "folds"],
)
def test_predicting_and_drawing_in_it_changes_nothing(wrapper: Any, options: dict[str, Any]) -> None:
    watched, alone = made(wrapper), made(wrapper)
    before = torch.get_rng_state()
    quiet(alone, rows(), epochs=8, batch_size=20, **options)
    quiet(watched, rows(), epochs=8, batch_size=20, callback=peek, **options)
    assert torch.equal(torch.get_rng_state(), before)
    assert_same(values(watched), values(alone))


def test_a_mode_left_behind_is_put_right() -> None:
    watched, alone = plain(), plain()
    quiet(alone, rows(), epochs=2, batch_size=20)
    quiet(watched, rows(), epochs=2, batch_size=20, callback=lambda p: p.wrapped.eval() is None)
    assert_same(values(watched), values(alone))


@pytest.mark.slow
@pytest.mark.parametrize("folds", [None, 2])
def test_a_training_inside_of_its_own_is_refused_and_changes_nothing(folds: int | None) -> None:
    x = torch.linspace(-1, 1, 40)[:, None]

    def trained(inner: Callable[[Progress], Any]) -> Any:
        torch.manual_seed(0)
        wrapped = vote.Wrapper(2)(nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)))
        fit(wrapped, (x, x), epochs=2, folds=folds, progress=False, callback=inner)
        return wrapped

    def again(progress: Progress) -> None:
        before = copy.deepcopy(progress.wrapped.state_dict())
        with pytest.raises(RuntimeError, match=r"is being trained by the fit that called this one, as its callback"):
            fit(progress.wrapped, (x, x), epochs=1, progress=False)
        torch.testing.assert_close(progress.wrapped.state_dict(), before, rtol=0, atol=0, equal_nan=True)

    def of_others(progress: Progress) -> None:
        fit(copy.deepcopy(progress.wrapped), (x, x), epochs=1, progress=False)
        fit(vote.Wrapper(2)(nn.Linear(1, 1)), (x, x), epochs=1, progress=False, callback=lambda _: None)
        with evaluating(progress.wrapped, whole=True), torch.no_grad():
            progress.wrapped(x, return_risk=True)
            calibrate(progress.wrapped, (x, x), "conformal")

    expected = dict(trained(lambda _: None).named_parameters())
    for inner in (again, of_others):
        wrapped = trained(inner)
        torch.testing.assert_close(dict(wrapped.named_parameters()), expected, rtol=0, atol=0)
        fit(wrapped, (x, x), epochs=1, progress=False)  # afterwards it can be trained


def test_a_head_on_a_frozen_trunk_may_be_trained_inside_of_the_training_of_another() -> None:
    x = torch.linspace(-1, 1, 40)[:, None]
    trunk = nn.Linear(1, 4).requires_grad_(False)
    first, second = (vote.Wrapper(2)(nn.Sequential(trunk, nn.Linear(4, 1))) for _ in range(2))
    fit(
        first,
        (x, x),
        epochs=1,
        progress=False,
        callback=lambda _: fit(second, (x, x), epochs=1, progress=False) is None,
    )
