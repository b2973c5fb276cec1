"""Embeddings of numeric columns: compared with `numpy.interp`, explicit formulas and single layers."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from helpers.bins import through_bins
from sklearn.decomposition import PCA
from torch import Tensor, nn

from workbench.models import (
    ColumnLinear,
    Periodic,
    PiecewiseLinear,
    PrincipalComponents,
    Standardization,
    quantile_edges,
    whitening,
)


def by_interpolation(x: Tensor, edges: list[Tensor]) -> np.ndarray:
    """[n, columns, bins], with zeros for the bins that a column lacks."""
    out = np.zeros((len(x), len(edges), max(map(len, edges)) - 1))
    for column, b in enumerate(edges):
        out[:, column, : len(b) - 1] = through_bins(x[:, column].numpy(), b.numpy())
    return out


def test_piecewise_linear_is_interpolation_bin_by_bin() -> None:
    edges = [torch.tensor([-1.0, 0.0, 0.5, 3.0]).double(), torch.tensor([2.0, 7.0]).double()]
    x = torch.cat([6 * torch.randn(200, 2), torch.tensor([[-1.0, 2.0], [0.5, 7.0], [3.0, 4.5]])]).double()
    embedded = PiecewiseLinear(edges).double()(x)
    np.testing.assert_allclose(embedded.numpy(), by_interpolation(x, edges), rtol=1e-6, atol=1e-7)
    assert not embedded[:, 1, 1:].any()  # bins that this column lacks
    # and together they are a strictly ascending code of x within the edges: sum of widths come through
    widths, inside = torch.tensor([1.0, 0.5, 2.5]).double(), (x[:, 0] >= -1) & (x[:, 0] <= 3)
    torch.testing.assert_close(embedded[inside, 0] @ widths - 1, x[inside, 0])


def test_gradients_are_one_over_the_width_and_beyond_the_edges_four_times_that_of_a_mean_bin_at_most() -> None:
    layer = PiecewiseLinear([torch.tensor([0.0, 0.25, 1.0, 6.0]), torch.tensor([0.0, 2.0])]).double()
    x = torch.tensor([[0.5, 1.0], [3.0, -4.0], [9.0, 4.0], [-1.0, 1.0]], dtype=torch.float64, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    # the first bin, of width 0.25, is narrower than a quarter of the mean, 0.5; the last is not
    expected = torch.tensor([[4 / 3, 0.5], [0.2, 0.5], [0.2, 0.5], [2.0, 0.5]], dtype=torch.float64)
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize(
    "edges",
    [[1.0], [1.0, 1.0], [2.0, 1.0], [0.0, math.nan], [0.0, math.inf]],
    ids=["one", "equal", "falling", "nan", "infinite"],
)
def test_edges_that_make_no_bins_are_refused(edges: list[float]) -> None:
    with pytest.raises(ValueError, match="edges of column 1 must be two or more ascending finite numbers"):
        PiecewiseLinear([torch.tensor([0.0, 1.0]), torch.tensor(edges)])


def test_not_a_number_stays_one() -> None:
    layer = PiecewiseLinear([torch.tensor([0.0, 1.0, 2.0])])
    assert layer(torch.tensor([[math.nan]])).isnan().all()


@pytest.mark.parametrize("bins", [1, 3, 8])
def test_edges_are_quantiles_with_as_many_rows_in_each_bin(bins: int) -> None:
    values = torch.randn(801).double()
    edges = quantile_edges(values, bins)
    torch.testing.assert_close(edges, torch.quantile(values, torch.linspace(0, 1, bins + 1).double()))
    counts, _ = np.histogram(values.numpy(), edges.numpy())
    assert counts.max() - counts.min() <= 1


def test_ties_make_fewer_bins_and_few_numbers_are_the_edges_themselves() -> None:
    tied = torch.cat([torch.zeros(900), torch.arange(1.0, 101.0)])
    edges = quantile_edges(tied, 20)
    assert bool((edges.diff() > 0).all())
    assert edges[0] == 0
    assert edges[-1] == 100
    assert quantile_edges(torch.tensor([3.0, 1.0, 1.0, 8.0]), 20).tolist() == [1.0, 3.0, 8.0]
    assert quantile_edges(torch.full((5,), 2.0), 20).tolist() == [2.0]


@pytest.mark.parametrize("place", [0.0, 50.5, 200.0])
def test_a_number_that_most_rows_share_leaves_bins_to_the_others(place: float) -> None:
    others = torch.arange(1.0, 102.0)
    edges = quantile_edges(torch.cat([torch.full((900,), place), others]), 8)
    expected = sorted([place, *np.quantile(others.numpy(), np.linspace(0, 1, 8))])
    np.testing.assert_allclose(edges, expected)


def test_periodic_is_sine_and_cosine_of_learned_frequencies() -> None:
    layer = Periodic(columns=2, frequencies=3, spread=0.7).double()
    x = torch.randn(5, 2).double()
    embedded = layer(x).detach()
    for column in range(2):
        for k in range(3):
            angle = 2 * math.pi * float(layer.frequency.detach()[column, k]) * x[:, column].numpy()
            np.testing.assert_allclose(embedded[:, column, k].numpy(), np.sin(angle), atol=1e-12)
            np.testing.assert_allclose(embedded[:, column, 3 + k].numpy(), np.cos(angle), atol=1e-12)
    many = Periodic(100, 100, spread=0.7).frequency
    assert abs(float(many.detach().std()) - 0.7) < 0.02


def test_column_linear_is_one_linear_layer_for_each_column() -> None:
    layer, x = ColumnLinear(3, 4, 2), torch.randn(6, 3, 4)
    for column in range(3):
        linear = nn.Linear(4, 2)
        with torch.no_grad():
            linear.weight.copy_(layer.weight[column].T)
            linear.bias.copy_(layer.bias[column])
        torch.testing.assert_close(layer(x)[:, column], linear(x[:, column]))
    assert layer.weight.abs().max() <= 0.5


def test_layers_move_with_their_model_and_are_copied_and_saved_whole() -> None:
    model = nn.Sequential(
        Standardization(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 4.0])),
        PiecewiseLinear([torch.tensor([0.0, 1.0]), torch.tensor([-1.0, 0.0, 1.0])]),
    )
    assert {tensor.dtype for tensor in copy.deepcopy(model).double().state_dict().values()} == {torch.float64}
    assert {tensor.device.type for tensor in copy.deepcopy(model).to("meta").state_dict().values()} == {"meta"}
    other = nn.Sequential(
        Standardization(torch.zeros(2), torch.ones(2)),
        PiecewiseLinear([torch.tensor([0.0, 2.0, 3.0]), torch.tensor([5.0, 6.0])]),
    )
    other.load_state_dict(model.state_dict())
    x = torch.randn(7, 2)
    assert torch.equal(other(x), model(x))


def test_a_scale_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="scale must be above 0"):
        Standardization(torch.zeros(2), torch.tensor([1.0, 0.0]))


def test_components_are_those_of_scikit_learn_without_what_rounding_makes() -> None:
    rows = torch.randn(200, 3).double() @ torch.randn(3, 3).double()
    x = torch.cat([rows, rows[:, :1] + 1e-6 * torch.randn(200, 1).double()], 1)  # a column that is there twice
    x = x - x.mean(0)
    projection, condition = whitening(x)
    pca = PCA(3, whiten=True).fit(x.numpy())
    assert projection.shape == (4, 3)
    assert condition == pytest.approx(pca.explained_variance_[0] / pca.explained_variance_[2], rel=1e-6)
    inputs = torch.cat([torch.ones(200, 1).double(), x], 1)
    appended = PrincipalComponents([1, 2, 3, 4], projection).double()(inputs)
    assert torch.equal(appended[:, :5], inputs)
    expected = pca.transform(x.numpy()) * math.sqrt(200 / 199)  # scikit-learn divides by n - 1
    np.testing.assert_allclose(appended[:, 5:].abs(), np.abs(expected), rtol=1e-4, atol=1e-4)  # signs are arbitrary
