"""Embeddings of the numeric columns of a table (Gorishniy et al. 2022, On embeddings for numerical features in tabular deep learning)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn


class Standardization(nn.Module):
    """Standardize each column, (x - mean) / scale, with statistics of the training rows that are saved with the model.

    `workbench.fit` does not standardize the inputs of a model that has such a layer, so that it is not done twice.

    Args:
        mean: mean of each column [features].
        scale: standard deviation of each column [features], above 0.

    Example:
        >>> Standardization(torch.tensor([1.0]), torch.tensor([2.0]))(torch.tensor([[5.0]]))
        tensor([[2.]])
    """

    standardizes_inputs = True
    mean: Tensor
    scale: Tensor

    def __init__(self, mean: Tensor, scale: Tensor) -> None:
        super().__init__()
        if mean.shape != scale.shape or not bool((scale > 0).all()):
            raise ValueError(
                f"mean and scale must have the same shape, and the scale must be above 0; found {list(mean.shape)} and {list(scale.shape)}, "
                f"smallest scale {float(scale.min()):g}"
            )
        self.register_buffer("mean", mean.to(torch.get_default_dtype()))
        self.register_buffer("scale", scale.to(torch.get_default_dtype()))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.scale

    def extra_repr(self) -> str:
        return f"{len(self.mean)}"


MAX_SLOPE = 4.0  # beyond the outermost edges, relative to the slope of a bin of mean width


class PiecewiseLinear(nn.Module):
    """Piecewise linear encoding of each number: for each bin of its column 0 below the bin, 1 above it, and linear within.

    `e_t(x) = min(1, max(0, (x - b_{t-1}) / (b_t - b_{t-1})))` for the edges `b_0 < ... < b_T` of a column. Beyond the outermost edges, the
    outermost bins continue with their slope, as in the paper, but no steeper than a bin of a quarter of the column's mean bin width, since
    quantiles may lie next to each other. So rows outside the training range differ from all training rows, and voters disagree about them.

    Args:
        edges: edges of each column, at least two, ascending; see `quantile_edges`. A column with fewer bins than another is padded with zeros.

    Raises:
        ValueError: if the edges of a column are fewer than two, not ascending, or not finite.

    Example:
        >>> PiecewiseLinear([torch.tensor([0.0, 1.0, 3.0])])(torch.tensor([[0.5], [2.0], [9.0]]))
        tensor([[[0.5000, 0.0000]],
        <BLANKLINE>
                [[1.0000, 0.5000]],
        <BLANKLINE>
                [[1.0000, 4.0000]]])
    """

    start: Tensor
    width: Tensor
    end: Tensor
    below: Tensor
    above: Tensor

    def __init__(self, edges: Sequence[Tensor]) -> None:
        super().__init__()
        for number, column in enumerate(edges):
            if column.dim() != 1 or len(column) < 2 or not bool((column.diff() > 0).all() & column.isfinite().all()):
                raise ValueError(
                    f"edges of column {number} must be two or more ascending finite numbers; found {column.tolist()}"
                )
        # bins that a column lacks have an infinite width, which encodes every number as 0
        start = torch.zeros(len(edges), max((len(column) - 1 for column in edges), default=0))
        width = torch.full_like(start, math.inf)
        # slopes of the outermost bins beyond the edges; 0 for the other bins
        below, above = torch.zeros_like(start), torch.zeros_like(start)
        end = torch.zeros(len(edges))
        for number, column in enumerate(edges):
            bins, widths = len(column) - 1, column.diff()
            start[number, :bins] = column[:-1]
            width[number, :bins] = widths
            below[number, 0], above[number, bins - 1] = 1 / widths[[0, -1]].clamp_min(widths.mean() / MAX_SLOPE)
            end[number] = column[-1]
        for name, buffer in {"start": start, "width": width, "end": end, "below": below, "above": above}.items():
            self.register_buffer(name, buffer)

    def forward(self, x: Tensor) -> Tensor:
        """Return the encoding [..., columns, bins] of x [..., columns]."""
        inside = ((x[..., None] - self.start) / self.width).clamp(0, 1)
        before, after = (x - self.start[:, 0]).clamp_max(0), (x - self.end).clamp_min(0)
        return inside + before[..., None] * self.below + after[..., None] * self.above

    def extra_repr(self) -> str:
        return f"columns={self.start.shape[0]}, bins={self.start.shape[1]}"


class Periodic(nn.Module):
    """Sines and cosines of each number, `sin(2 pi c_k x)` and `cos(2 pi c_k x)`, with learned frequencies `c_k`.

    Args:
        columns: number of columns.
        frequencies: number of frequencies per column.
        spread: standard deviation of the initial frequencies, in periods per unit of x.

    Example:
        >>> Periodic(columns=3, frequencies=4)(torch.zeros(2, 3)).shape
        torch.Size([2, 3, 8])
    """

    def __init__(self, columns: int, frequencies: int = 6, spread: float = 0.5) -> None:
        super().__init__()
        self.spread = spread
        self.frequency = nn.Parameter(torch.empty(columns, frequencies))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new frequencies."""
        nn.init.normal_(self.frequency, std=self.spread)

    def forward(self, x: Tensor) -> Tensor:
        """Return sines and cosines [..., columns, 2 frequencies] of x [..., columns]."""
        angle = 2 * math.pi * x[..., None] * self.frequency
        return torch.cat([angle.sin(), angle.cos()], -1)

    def extra_repr(self) -> str:
        return f"columns={self.frequency.shape[0]}, frequencies={self.frequency.shape[1]}, spread={self.spread}"


class ColumnLinear(nn.Module):
    """Separate linear layer for each column.

    Args:
        columns: number of columns.
        in_features: number of inputs per column.
        out_features: number of outputs per column.

    Example:
        >>> ColumnLinear(3, 8, 5)(torch.zeros(2, 3, 8)).shape
        torch.Size([2, 3, 5])
    """

    def __init__(self, columns: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(columns, in_features, out_features))
        self.bias = nn.Parameter(torch.empty(columns, out_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize as `torch.nn.Linear` does."""
        bound = 1 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., columns, out_features] for x [..., columns, in_features]."""
        return (x[..., None, :] @ self.weight)[..., 0, :] + self.bias

    def extra_repr(self) -> str:
        columns, inputs, outputs = self.weight.shape
        return f"columns={columns}, in_features={inputs}, out_features={outputs}"


class NumericColumns(nn.Module):
    """Append the embeddings of some columns to each row, [..., features + columns * numbers].

    Args:
        columns: indices of the columns to embed.
        embedding: module from [..., columns] to [..., columns, numbers].
    """

    columns: Tensor

    def __init__(self, columns: Sequence[int], embedding: nn.Module) -> None:
        super().__init__()
        self.register_buffer("columns", torch.tensor(list(columns), dtype=torch.int64))
        self.embedding = embedding

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., features] with the embeddings appended."""
        return torch.cat([x, self.embedding(x.index_select(-1, self.columns)).flatten(-2)], -1)


class PrincipalComponents(nn.Module):
    """Append the principal components of some columns, each scaled to variance 1, [..., features + components].

    If columns are nearly collinear, small differences between them, which may tell the target, become inputs of the same scale as the columns.

    Args:
        columns: indices of the columns.
        projection: matrix from these columns to the components [columns, components]; see `whitening`.

    Example:
        >>> PrincipalComponents([0, 2], torch.tensor([[1.0], [-1.0]]))(torch.tensor([[5.0, 7.0, 3.0]]))
        tensor([[5., 7., 3., 2.]])
    """

    columns: Tensor
    projection: Tensor

    def __init__(self, columns: Sequence[int], projection: Tensor) -> None:
        super().__init__()
        self.register_buffer("columns", torch.tensor(list(columns), dtype=torch.int64))
        self.register_buffer("projection", projection.to(torch.get_default_dtype()))

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., features] with the components appended."""
        return torch.cat([x, x.index_select(-1, self.columns) @ self.projection], -1)

    def extra_repr(self) -> str:
        return f"columns={self.projection.shape[0]}, components={self.projection.shape[1]}"


MIN_VARIANCE = 1e-7  # of a component, relative to the largest; smaller ones would be made of float32's rounding


def whitening(x: Tensor) -> tuple[Tensor, float]:
    """Return the matrix that maps columns of mean 0 to their principal components of variance 1, and the condition number of the covariance.

    Components with less than 1e-7 of the largest variance are left out, of the condition number as well.

    Args:
        x: rows [n, columns], of mean 0.

    Returns:
        (projection [columns, components], float64, the largest variance first; largest variance divided by the smallest)

    Example:
        >>> x = torch.tensor([[1.0, 1.0], [-1.0, -1.0], [0.1, -0.1], [-0.1, 0.1]])
        >>> projection, condition = whitening(x)
        >>> round(condition), torch.cov((x.double() @ projection).T, correction=0).round(decimals=6).tolist()
        (100, [[1.0, 0.0], [0.0, 1.0]])
    """
    x = x.double()
    variances, directions = (each.flip(-1) for each in torch.linalg.eigh(x.mT @ x / len(x)))
    kept = variances > MIN_VARIANCE * variances[0]
    return directions[:, kept] / variances[kept].sqrt(), float(variances[0] / variances[kept][-1])


def quantile_edges(values: Tensor, bins: int) -> Tensor:
    """Return edges of bins with about equally many training rows: the quantiles 0, 1/bins, ..., 1.

    If a column has at most bins + 1 distinct numbers, these are the edges. A number shared by so many rows that it would be several edges, such
    as the zero of most people's capital gains, is one edge, and the other edges are quantiles of the rows without it.

    Args:
        values: column of the training rows [n], finite.
        bins: maximum number of bins.

    Returns:
        Ascending edges [at most bins + 1]; a single one if the column is constant.

    Example:
        >>> quantile_edges(torch.arange(101.0), bins=4)
        tensor([  0.,  25.,  50.,  75., 100.])
        >>> quantile_edges(torch.tensor([1.0, 1.0, 1.0, 2.0, 5.0]), bins=4)
        tensor([1., 2., 5.])
        >>> quantile_edges(torch.cat([torch.zeros(900), torch.arange(1.0, 102.0)]), bins=5)
        tensor([  0.,   1.,  26.,  51.,  76., 101.])
    """
    distinct = values.unique()
    if len(distinct) <= bins + 1:
        return distinct
    numbers = values.double().cpu().numpy()
    edges, counts = np.unique(np.quantile(numbers, np.linspace(0, 1, bins + 1)), return_counts=True)
    if (shared := edges[counts > 1]).size:
        others = numbers[~np.isin(numbers, shared)]
        edges = np.concatenate([shared, np.quantile(others, np.linspace(0, 1, bins + 1 - len(shared)))])
    return torch.from_numpy(edges).to(values).unique()


__all__ = [
    "ColumnLinear",
    "NumericColumns",
    "Periodic",
    "PiecewiseLinear",
    "PrincipalComponents",
    "Standardization",
    "quantile_edges",
    "whitening",
]
