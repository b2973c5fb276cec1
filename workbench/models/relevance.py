"""How much each column of a table counts for the targets, by automatic relevance determination."""

from __future__ import annotations

import torch
from torch import Tensor, nn

MAX_ROWS = 400  # rows used; the cost grows with their cube
MIN_ROWS_PER_COLUMN = 10  # of the rows used; below, relevances are found by chance
STEPS, LR = 40, 0.3  # of Adam on logarithms: a precision changes by a factor of exp(12) at most
NOISE = 0.13  # noise variance at the start, relative to that of the function
MIN_NOISE = 1e-8
MIN_NOISE_SHARE = 1e-3  # added to squared residuals, relative to their mean, so that no logarithm is an outlier
MAX_FACTOR = 3.0


def relevances(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inverse squared length scale of each column in the kernel of a Gaussian process fitted to the rows, and its residuals.

    The kernel is `exp(-1/2 sum_j r_j (x_j - x'_j)^2)` (automatic relevance determination: MacKay 1994; Rasmussen & Williams 2006, 5.1); the
    relevances r_j and the noise maximize the marginal likelihood, with the variance of the function at its optimum.

    Args:
        x: rows [n, columns], float64.
        y: targets [n, outputs], float64, of mean 0; the outputs have the same kernel.

    Returns:
        (relevances [columns], residual of each row when it is left out [n, outputs]), float64.

    Example:
        >>> x = torch.linspace(-1, 1, 60, dtype=torch.float64)[:, None]
        >>> relevant, irrelevant = relevances(torch.cat([x, (97 * x).sin()], 1), (3 * x).sin())[0]
        >>> bool(relevant > 100 * irrelevant)
        True
    """
    squared = torch.cdist(x, x).square()
    positive = squared[squared > 0]
    if not len(positive):
        return torch.ones_like(x[0]), y
    start = torch.full_like(x[0], 1 / float(positive.median()))
    log = torch.cat([start, start.new_tensor([NOISE])]).log()
    optimizer = torch.optim.Adam([log], lr=LR)
    best, best_cost = log.clone(), float("inf")
    for _ in range(STEPS):
        cost, log.grad = negative_log_likelihood(x, y, log)
        if cost < best_cost:
            best, best_cost = log.clone(), cost
        optimizer.step()
    inverse = torch.cholesky_inverse(_cholesky(x, best)[1])
    return best[:-1].exp(), (inverse @ y) / inverse.diagonal()[:, None]


def _cholesky(x: Tensor, log: Tensor) -> tuple[Tensor, Tensor]:
    """Return the kernel matrix, and the Cholesky factor of its sum with the noise."""
    scaled = x * (0.5 * log[:-1]).exp()
    kernel = (-0.5 * torch.cdist(scaled, scaled).square()).exp()
    return kernel, torch.linalg.cholesky(kernel + (log[-1].exp() + MIN_NOISE) * torch.eye(len(x)).to(kernel))


def negative_log_likelihood(x: Tensor, y: Tensor, log: Tensor) -> tuple[float, Tensor]:
    """Return the negative log marginal likelihood per row and output, up to a constant, and its gradient.

    Args:
        x, y: as for `relevances`.
        log: logarithms of the relevances and of the noise variance relative to that of the function [columns + 1].
    """
    n = len(x)
    kernel, lower = _cholesky(x, log)
    inverse = torch.cholesky_inverse(lower)
    weights = inverse @ y
    fit = (y * weights).sum(0).clamp_min(1e-300)
    cost = 0.5 * (fit / n).log().mean() + lower.diagonal().log().mean()
    # with respect to the kernel matrix, then along sum_ik g_ik (x_ij - x_kj)^2 = 2 sum_i (x_ij^2 sum_k g_ik - x_ij (g x)_ij)
    by_kernel = 0.5 * (inverse / n - (weights / fit) @ weights.mT / y.shape[1])
    product = by_kernel * kernel
    distances = 2 * (x.square() * product.sum(1, keepdim=True) - x * (product @ x)).sum(0)
    by_log = torch.cat([-0.5 * log[:-1].exp() * distances, (by_kernel.trace() * log[-1].exp())[None]])
    return float(cost), by_log


def column_factors(x: Tensor, y: Tensor) -> Tensor:
    """Return a factor for each column that grows with its relevance; their mean square is 1 unless one reaches `MAX_FACTOR`.

    The factor is the fourth root of the relevance, halfway between no weighting and the kernel's, since a column that acts linearly has a
    small relevance too. Columns may tell the noise rather than the targets: a second Gaussian process is fitted to the logarithms of the
    squared residuals, and its squared factors are added, times the share of the variance that it explains of rows that are left out.

    Args:
        x, y: as for `relevances`; at most `MAX_ROWS` of the rows are used, evenly spread.
    """
    chosen = torch.linspace(0, len(x) - 1, min(len(x), MAX_ROWS)).round().long()
    x, y = x[chosen], y[chosen]
    relevance, residual = relevances(x, y)
    squared = _mean_one(relevance.sqrt())
    noise = residual.square().mean(1, keepdim=True)
    noise = (noise + MIN_NOISE_SHARE * noise.mean()).log()
    noise = noise - noise.mean()
    if bool(noise.any()):
        relevance, residual = relevances(x, noise)
        explained = 1 - float(residual.square().sum() / noise.square().sum())
        squared = squared + max(explained, 0.0) * _mean_one(relevance.sqrt())
    return _mean_one(squared).sqrt().clamp_max(MAX_FACTOR)


def _mean_one(values: Tensor) -> Tensor:
    return values / values.mean()


class ColumnFactors(nn.Module):
    """Multiply each input by a fixed factor that is saved with the model.

    Args:
        factor: factor of each input [features].

    Example:
        >>> ColumnFactors(torch.tensor([2.0, 0.5]))(torch.tensor([[1.0, 1.0]]))
        tensor([[2.0000, 0.5000]])
    """

    factor: Tensor

    def __init__(self, factor: Tensor) -> None:
        super().__init__()
        self.register_buffer("factor", factor.to(torch.get_default_dtype()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor

    def extra_repr(self) -> str:
        return f"{len(self.factor)}"


__all__ = ["ColumnFactors", "column_factors", "negative_log_likelihood", "relevances"]
