"""`tabular(relevance=)`: its likelihood compared with scikit-learn's Gaussian process, its gradient with finite differences, and its factors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from workbench.data import Data
from workbench.models import NumericColumns, tabular
from workbench.models.relevance import (
    MIN_NOISE,
    NOISE,
    ColumnFactors,
    column_factors,
    negative_log_likelihood,
    relevances,
)


def rows(n: int, columns: int, seed: int = 0) -> Tensor:
    return 4 * torch.rand(n, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 2


def test_the_likelihood_is_that_of_a_gaussian_process_with_the_best_variance() -> None:
    from sklearn.gaussian_process import GaussianProcessRegressor, kernels

    x = rows(25, 3)
    y = torch.stack([x[:, 0].sin(), x[:, 1] * x[:, 2]], 1)
    log = torch.tensor([0.3, -1.0, -4.0, -1.5], dtype=torch.float64)
    relevance, noise = log[:-1].exp().numpy(), float(log[-1].exp()) + MIN_NOISE
    squared = (((x[:, None] - x) ** 2).numpy() * relevance).sum(2)
    expected = []
    for target in y.numpy().T:
        variance = target @ np.linalg.solve(np.exp(-squared / 2) + noise * np.eye(25), target) / 25
        kernel = kernels.ConstantKernel(variance) * kernels.RBF(relevance**-0.5) + kernels.WhiteKernel(variance * noise)
        process = GaussianProcessRegressor(kernel, optimizer=None, alpha=0.0).fit(x.numpy(), target)
        expected.append(-process.log_marginal_likelihood_value_ / 25 - 0.5 - 0.5 * math.log(2 * math.pi))
    assert negative_log_likelihood(x, y, log)[0] == pytest.approx(np.mean(expected), rel=1e-9)


def test_its_gradient_is_that_of_finite_differences() -> None:
    x = rows(25, 3)
    y = torch.stack([x[:, 0].sin(), x[:, 1] * x[:, 2]], 1)
    log, step = torch.tensor([0.3, -1.0, -4.0, -1.5], dtype=torch.float64), 1e-5
    expected = [
        (negative_log_likelihood(x, y, log + shift)[0] - negative_log_likelihood(x, y, log - shift)[0]) / (2 * step)
        for shift in step * torch.eye(4, dtype=torch.float64)
    ]
    assert negative_log_likelihood(x, y, log)[1].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-9)


def test_columns_that_tell_nothing_get_small_factors() -> None:
    x = rows(200, 5)
    y = (2 * x[:, :1]).sin() + x[:, 1:2].square()
    factors = column_factors(x, (y - y.mean()) / y.std())
    assert float(factors[:2].min()) > 3 * float(factors[2:].max())
    assert float(factors.square().mean()) == pytest.approx(1)


def test_equal_rows_leave_all_columns_equally_relevant() -> None:
    assert relevances(torch.ones(9, 2).double(), torch.randn(9, 1).double())[0].tolist() == [1, 1]


def test_the_residuals_are_those_of_a_loop_without_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    # the start is kept: one precision, and the noise `NOISE`
    monkeypatch.setattr("workbench.models.relevance.STEPS", 1)
    x = rows(20, 2)
    y = x.sum(1, keepdim=True).sin()
    relevance, residual = relevances(x, y)
    kernel = (-0.5 * torch.cdist(x, x).square() * relevance[0]).exp()
    for i in range(20):
        rest = [k for k in range(20) if k != i]
        noisy = kernel[rest][:, rest] + (NOISE + MIN_NOISE) * torch.eye(19)
        expected = y[i] - kernel[i, rest] @ torch.linalg.solve(noisy, y[rest])
        assert residual[i].tolist() == pytest.approx(expected.tolist(), rel=1e-6)


def test_a_column_that_tells_the_noise_alone_counts() -> None:
    x = rows(300, 4)
    noise = torch.randn(300, 1, generator=torch.Generator().manual_seed(1)) * (x[:, 3:] > 0).double().add(0.05)
    y = (2 * x[:, :1]).sin() + 0.3 * noise
    factors = column_factors(x, y - y.mean())
    assert float(factors[[0, 3]].min()) > 1.5 * float(factors[1:3].max())


def friedman(n: int = 160, irrelevant: int = 6) -> Data:
    """A smooth function of two columns with noise, beside columns that tell nothing."""
    x = rows(n, 2 + irrelevant).float()
    noise = 0.2 * torch.randn(n, 1, generator=torch.Generator().manual_seed(1))
    return Data.from_arrays(x, (x[:, :1] * x[:, 1:2]).sin() + noise, test=[0])


def test_irrelevant_columns_neither_hide_that_a_target_is_smooth_nor_count_as_much() -> None:
    data, before = friedman(), torch.get_rng_state()
    model = tabular(data, width=4)
    after = torch.get_rng_state()
    assert isinstance(model[1], ColumnFactors)
    assert not any(isinstance(layer, NumericColumns) for layer in model)
    assert float(model[1].factor[:2].min()) > 3 * float(model[1].factor[2:].max())
    torch.set_rng_state(before)
    named = tabular(data, embedding="none", relevance=True, width=4)
    assert all(map(torch.equal, model.state_dict().values(), named.state_dict().values()))
    assert torch.equal(torch.get_rng_state(), after)
    assert any(isinstance(layer, NumericColumns) for layer in tabular(data, relevance=False, width=4))


@pytest.mark.parametrize("options", [{"bins": 3}, {"bins": 3, "embedding_dim": 2}, {"bins": 3, "components": True}])
def test_each_input_has_the_factor_of_its_column(options: dict[str, int]) -> None:
    data = friedman(irrelevant=1)
    model = tabular(data, embedding="piecewise", relevance=True, width=4, **options)
    at = next(number for number, layer in enumerate(model) if isinstance(layer, ColumnFactors))
    factor, inputs = model[at].factor, model[:at](data.train.x)
    n_components = 3 if "components" in options else 0
    each = options.get("embedding_dim") or 3
    assert torch.equal(factor[:3], tabular(data, embedding="none", relevance=True)[1].factor)
    assert factor[3 : 3 + n_components].tolist() == [1] * n_components
    assert torch.equal(factor[3 + n_components :], factor[:3].repeat_interleave(each))
    assert torch.equal(model[: at + 1](data.train.x), inputs * factor)


def test_few_rows_for_each_column_say_nothing_about_relevance() -> None:
    data = friedman(n=79)
    assert not any(isinstance(layer, ColumnFactors) for layer in tabular(data, width=4))
    assert any(isinstance(layer, ColumnFactors) for layer in tabular(data, relevance=True, width=4))


def test_relevance_must_be_a_truth_value() -> None:
    named: Any = "yes"
    with pytest.raises(ValueError, match="relevance must be True, False or None; found 'yes'"):
        tabular(friedman(), relevance=named)
