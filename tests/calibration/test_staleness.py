"""A model that is trained after something was fitted to its answers, and all that is no training."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import compose, fit, load, neo, save, sculpt, vote
from workbench.calibration import adapt_batch_norm, calibrate, selective
from workbench.errors import WorkbenchWarning


def rows(n: int = 60, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(seed))
    return x, x.sum(1, keepdim=True).sin()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


@pytest.fixture
def wrapped() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = compose(vote.Wrapper(2), sculpt.Wrapper())(net())
    fit(model, rows(), epochs=2)
    return model


FITTED: dict[str, Any] = {
    "variance": lambda model: calibrate(model, rows(seed=1)),
    "isotonic": lambda model: calibrate(model, rows(seed=1), "isotonic"),
    "normalized": lambda model: calibrate(model, rows(seed=1), "conformal"),
    "absolute": lambda model: calibrate(model, rows(seed=1), "conformal", score="absolute"),
    "predictor": lambda model: selective(model, rows(seed=1)).predictor(coverage=0.5),
}


def answer(fitted: Any) -> Any:
    x = rows(seed=1)[0]
    return fitted.interval(x, 0.8) if hasattr(fitted, "interval") else fitted(x)


def train(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.train()
    x, y = rows()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    model.eval()


@contextmanager
def told(what: str) -> Iterator[None]:
    with pytest.warns(WorkbenchWarning, match=rf"weights of the model have changed, such as .*{what}"):
        yield


@contextmanager
def silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("name", FITTED)
@pytest.mark.parametrize("how", [train, lambda model: fit(model, rows(seed=2), epochs=1)])
def test_a_model_that_is_trained_further_is_told_once(wrapped: Any, name: str, how: Any) -> None:
    fitted = FITTED[name](wrapped)
    with silent():
        answer(fitted)
    how(wrapped)
    with told("Choose it again" if name == "predictor" else "Calibrate again"):
        answer(fitted)
    with silent():
        answer(fitted)
        answer(FITTED[name](wrapped))


def test_a_call_tells_too(wrapped: Any) -> None:
    calibrated = calibrate(wrapped, rows(seed=1))
    train(wrapped)
    with told("Calibrate again"):
        calibrated(rows()[0], return_risk=True)


def test_intervals_of_a_cross_fitted_model_that_was_trained_again_are_told() -> None:
    model = compose(vote.Wrapper(2), sculpt.Wrapper())(net())
    calibrated = calibrate(model, fit(model, rows(), folds=2, epochs=2))
    with silent():
        calibrated.interval(rows()[0], 0.8)
    fit(model, rows(seed=2), folds=2, epochs=2)
    with told("Calibrate again"):
        calibrated.interval(rows()[0], 0.8)


def test_a_history_of_an_earlier_training_is_refused() -> None:
    model = compose(vote.Wrapper(2), sculpt.Wrapper())(net())
    first = fit(model, rows(), folds=2, epochs=2)
    before = copy.deepcopy(model)
    second = pickle.loads(pickle.dumps(fit(model, rows(seed=2), folds=2, epochs=2)))
    with pytest.raises(ValueError, match=r"this history is of another training.*have changed, such as"):
        calibrate(model, first)
    with pytest.raises(ValueError, match="this history is of another training"):
        calibrate(before, second.out_of_fold)
    with silent():
        answer(calibrate(before, first))
        answer(calibrate(model, second))
        answer(calibrate(model, second.out_of_fold))


@pytest.mark.parametrize("name", FITTED)
def test_what_is_no_training_is_not_told(wrapped: Any, name: str, tmp_path: Path) -> None:
    fitted = FITTED[name](wrapped)
    save(fitted, tmp_path / "fitted.safetensors")
    state = copy.deepcopy(wrapped.state_dict())
    with silent():
        wrapped.load_state_dict(state)
        answer(fitted)
        wrapped.train().eval()
        wrapped.requires_grad_(False).requires_grad_(True)
        answer(fitted)
        answer(copy.deepcopy(fitted))
        answer(pickle.loads(pickle.dumps(fitted)))
        answer(load(tmp_path / "fitted.safetensors", net()))
        answer(fitted.double().float())
        fitted.bfloat16()
        fitted(rows()[0].bfloat16())


def test_a_state_of_other_weights_brings_its_own_calibration(wrapped: Any) -> None:
    first, other = calibrate(wrapped, rows(seed=1)), copy.deepcopy(wrapped)
    train(other)
    second = calibrate(other, rows(seed=1))
    first.load_state_dict(second.state_dict())
    with silent():
        answer(first)
    predictor = selective(other, rows(seed=1)).predictor(coverage=0.5)
    train(other)
    state = selective(other, rows(seed=1)).predictor(coverage=0.5).state_dict()
    predictor.load_state_dict(state)
    with silent():
        answer(predictor)


def test_other_statistics_of_batch_norms_are_no_training(wrapped: Any) -> None:
    calibrated = calibrate(wrapped, rows(seed=1))
    with silent():
        answer(adapt_batch_norm(calibrated, rows(seed=2)[0]))


def test_a_density_that_is_fitted_later_is_no_training() -> None:
    model = compose(vote.Wrapper(2), neo.Wrapper(density="gaussian"))(net())
    model.train()(rows()[0])
    calibrated = calibrate(model.eval(), rows(seed=1), "conformal", score="absolute")
    model.fit([rows()])
    with silent():
        answer(calibrated)
