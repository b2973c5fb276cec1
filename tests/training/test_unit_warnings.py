"""Warnings about numbers from which a model can learn little: compared with the same training in other units."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from workbench import compose, fit, sculpt, vote
from workbench.data import Data
from workbench.data.reader import data_of
from workbench.errors import WorkbenchWarning

N = 128
X = np.random.default_rng(0).normal(size=(N, 2))
Y = X @ [[1.0], [2.0]]


def wrapped_mlp() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    return compose(vote.Wrapper(2), sculpt.Wrapper(n_layers=1))(model)


def share_explained(wrapped: Any, x: np.ndarray, y: np.ndarray) -> float:
    like = next(wrapped.parameters())
    with torch.no_grad():
        prediction = wrapped(torch.tensor(x, dtype=like.dtype)).double().numpy()
    return 1 - float(((prediction - y) ** 2).mean() / y.var())


@pytest.mark.slow
@pytest.mark.parametrize("moved", ["x", "y"])
def test_differences_that_float32_cannot_hold_are_told_and_learned_in_float64(moved: str) -> None:
    x, y = (X + 1e9, Y) if moved == "x" else (X, Y + 1e9)
    wrapped = wrapped_mlp()
    with pytest.warns(WorkbenchWarning, match=rf"{moved}\[:, 0\].* up to 1e\+09 .*steps of float32 are 119"):
        fit(wrapped, (x, y), epochs=40, progress=False)
    assert share_explained(wrapped, x, y) < 0.5  # which is why
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(precise := wrapped_mlp(), (x, y), epochs=40, progress=False, dtype=torch.float64)
    assert share_explained(precise, x, y) > 0.9


@pytest.mark.parametrize(
    "make",
    [
        lambda seconds: Data.from_arrays(np.stack([seconds, X[:, 0]], 1), Y),
        lambda seconds: Data.from_arrays(X, seconds),
        lambda seconds: Data.from_dataframe(pd.DataFrame({"t": seconds, "y": Y[:, 0]}), "y"),
        lambda seconds: data_of((seconds[:, None], Y)),
    ],
)
def test_a_data_says_that_it_holds_float32(make: Callable[[np.ndarray], Any]) -> None:
    with pytest.warns(WorkbenchWarning, match="steps of float32 are 203 there, .* subtract the mean of the column"):
        make(1.7e9 + np.arange(N))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(1.7e9 + 1e5 * np.arange(N))  # days apart
        make(np.full(N, 1.7e9) * (1 + np.random.default_rng(0).uniform(-1e-15, 1e-15, N)))  # constant but for rounding


@pytest.mark.parametrize(
    "make",
    [
        lambda ids: Data.from_dataframe(pd.DataFrame({"id": ids, "y": Y[:, 0]}), "y"),
        lambda ids: Data.from_dataframe(pd.DataFrame({"id": ids, "y": Y[:, 0]}).astype({"id": "Int64"}), "y"),
        lambda ids: Data.from_arrays(X, ids, task="regression"),
        lambda ids: data_of((ids[:, None], Y)),
    ],
)
@pytest.mark.parametrize("start", [0, 1_700_000_000, 2**60])
def test_whole_numbers_that_become_equal_are_told(make: Callable[[np.ndarray], Any], start: int) -> None:
    """From 2^53 on, they are equal in float64 already."""
    ids = start + np.arange(N, dtype=np.int64)
    expected = pytest.warns(WorkbenchWarning, match="steps of float32 are") if start else nullcontext()
    with warnings.catch_warnings():
        warnings.simplefilter("error", WorkbenchWarning)
        with expected:
            make(ids)


@pytest.mark.slow
def test_outliers_beside_which_all_else_is_equal_are_told() -> None:
    x = X.copy()
    x[0, 1] = 1e7  # such as a number that stands for what is missing
    with pytest.warns(
        WorkbenchWarning, match=r"x\[:, 1\] goes from -[\d.]+ to 1e\+07, and half of its numbers lie between"
    ):
        fit(wrapped := wrapped_mlp(), (x, Y), epochs=40, progress=False)
    assert share_explained(wrapped, x[1:], Y[1:]) < 0.5
    skewed = np.exp(2 * X)  # lognormal amounts, indicators and what hardly ever varies are usual
    rare = np.stack([X[:, 0] > 2, X[:, 0]], 1).astype(float)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for usual in (skewed, rare):
            fit(wrapped_mlp(), (usual, Y), epochs=1, progress=False)


@pytest.mark.slow
def test_rows_of_a_loader_in_units_far_from_the_model_are_told() -> None:
    x, y = torch.tensor(X).float(), torch.tensor(5e4 + 1000 * Y).float()
    loader = DataLoader(TensorDataset(x, y), 32)
    with pytest.warns(
        WorkbenchWarning, match=r"DataLoaders are not standardized.* y has mean 5\.\d+e\+04 .* wrapped\.scale\(x_mean"
    ):
        fit(wrapped := wrapped_mlp(), loader, validation=0, epochs=20, progress=False)
    assert share_explained(wrapped, X, y.double().numpy()) < 0.5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ready = wrapped_mlp()
        ready.scale(y_mean=y.mean(), y_scale=y.std())  # what the warning says
        fit(ready, loader, validation=0, epochs=20, progress=False)
        near = DataLoader(TensorDataset(x, torch.tensor(Y).float()), 32)
        fit(wrapped_mlp(), near, validation=0, epochs=1, progress=False)
        fit(ready, TensorDataset(x, y), epochs=1, progress=False)
    assert share_explained(ready, X, y.double().numpy()) > 0.9


def test_a_model_that_was_trained_in_these_units_gets_no_warning() -> None:
    x, y = torch.tensor(X).float(), torch.tensor(5e4 + 1000 * Y).float()

    class Trained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 5e4 + 1000 * self.layer(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(
            vote.Wrapper(2, finetune=True)(Trained()),
            DataLoader(TensorDataset(x, y), 32),
            validation=0,
            epochs=1,
            progress=False,
        )


@pytest.mark.slow
def test_series_in_other_units_are_told_and_learned_with_scales_of_their_own() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.tensor([0.1, 2.0])
    x = torch.randn(400, 4, 2, generator=generator) * 10 * noise + torch.tensor([0.0, 50.0])
    y = x[:, :2] + noise * torch.randn(400, 2, 2, generator=generator)

    def forecaster() -> Any:
        torch.manual_seed(0)
        return sculpt.Wrapper(n_layers=1)(nn.Sequential(nn.Flatten(), nn.Linear(8, 4), nn.Unflatten(1, (2, 2))))

    def errors(wrapped: Any) -> torch.Tensor:
        return (wrapped(x) - y).detach().square().mean((0, 1)).sqrt()

    with pytest.warns(WorkbenchWarning, match=r"y \[n, 2, 2\] have one scale, 29\.7, and y\[..., 0\] varies by 0\.9"):
        fit(common := forecaster(), (x, y), epochs=60, progress=False)
    assert errors(common)[0] > 3 * noise[0]  # which is why
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped = forecaster()
        moments = {
            f"{name}_{k}": v
            for name, t in (("x", x), ("y", y))
            for k, v in (("mean", t.mean((0, 1))), ("scale", t.std((0, 1))))
        }
        wrapped.scale(**moments)
        fit(wrapped, (x, y), epochs=60, progress=False)
        fit(forecaster(), (x / noise, y / noise), epochs=1, progress=False)
    torch.testing.assert_close(errors(wrapped), noise, rtol=0.1, atol=0)
