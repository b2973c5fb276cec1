"""Which embedding of the columns helps, judged on training rows: by kernel regression on few rows, by short trainings on many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from workbench.console import progress_bar
from workbench.core.wrapper import compose
from workbench.engine.threads import torch_threads
from workbench.models.relevance import MAX_ROWS as RELEVANCE_ROWS
from workbench.models.relevance import MIN_ROWS_PER_COLUMN, column_factors
from workbench.training import fit

if TYPE_CHECKING:
    from workbench.data import Data

C = TypeVar("C", bound=tuple[Any, ...])
MIN_TRAINED_ROWS, MAX_TRAINED_ROWS = 4000, 20_000
# epochs for 20,000 rows, and for 6,000 rows or fewer: with fewer epochs, the embeddings that learn fastest look best
EPOCHS, MAX_EPOCHS = 30, 100

MAX_ROWS = 800  # rows used; the cost grows with their cube
MIN_ROWS = 8
WIDTHS = (0.3, 1.0, 3.0)  # squared widths of the kernel, relative to the median squared distance of two rows
NOISES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # noise variances, relative to the variance of a target


def chosen_rows(x: Tensor) -> Tensor:
    """Return the indices of at most `MAX_ROWS` distinct rows of x [n, k], evenly spread."""
    distinct: dict[bytes, int] = {}
    for number, row in enumerate(x.cpu().numpy()):
        distinct.setdefault(row.tobytes(), number)
    numbers = torch.tensor(list(distinct.values()))
    return numbers[torch.linspace(0, len(numbers) - 1, min(len(numbers), MAX_ROWS)).round().long()]


def left_out_error(x: Tensor, y: Tensor) -> float:
    """Return the leave-one-out mean squared error of kernel ridge regression, with the best width and noise.

    The leave-one-out residual of row i is `a_i / (K + s I)^-1_ii` with `a = (K + s I)^-1 y` (Rasmussen & Williams 2006, 5.4.2); the kernel is
    Gaussian.

    Args:
        x: inputs [n, k], float64.
        y: targets [n, outputs], float64, of mean 0 and variance 1.

    Example:
        >>> x = torch.linspace(-1, 1, 40, dtype=torch.float64)[:, None]
        >>> left_out_error(x, 1.4 * (3 * x).sin()) < 1e-4
        True
    """
    squared = torch.cdist(x, x).square()
    positive = squared[squared > 0]
    if not len(positive):
        return float(y.square().mean())
    best = float("inf")
    for width in WIDTHS:
        values, vectors = torch.linalg.eigh(torch.exp(-squared / (2 * width * positive.median())))
        rotated = vectors.mT @ y
        for noise in NOISES:
            inverse = 1 / (values.clamp_min(0) + noise)
            residual = (vectors @ (inverse[:, None] * rotated)) / (vectors.square() @ inverse)[:, None]
            best = min(best, float(residual.square().mean()))
    return best


def targets_of(y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of the rows that have a target, and these targets [n, outputs], float64, of mean 0 and variance 1.

    Args:
        y: values [n, outputs], class numbers [n] (rows with a negative one are left out), or labels [n, labels].
    """
    has_class = y >= 0 if y.dim() == 1 and not y.is_floating_point() else torch.ones(len(y), dtype=torch.bool)
    kept = has_class.nonzero()[:, 0]
    y = y[kept]
    targets = (y if y.is_floating_point() or y.dim() > 1 else torch.nn.functional.one_hot(y)).double()
    targets = targets.reshape(len(y), -1)
    spread = targets.std(0, correction=0)
    return kept, ((targets - targets.mean(0)) / spread)[:, spread > 0]


def factors_of(x: Tensor, y: Tensor, relevance: bool | None) -> Tensor | None:
    """Return a factor for each column (`column_factors`); None without relevance, or if there are too few rows.

    Args:
        x: standardized rows [n, columns].
        y: targets, as for `targets_of`.
        relevance: True: of any number of rows; None: only of enough rows for each column; False: never.
    """
    kept, targets = targets_of(y)
    enough = 2 if relevance else max(MIN_ROWS, MIN_ROWS_PER_COLUMN * x.shape[1])
    if relevance is False or min(len(kept), RELEVANCE_ROWS) < enough or not targets.shape[1]:
        return None
    with torch_threads(1):
        return column_factors(x[kept].double(), targets)


def best_judged(
    plain: Tensor, embedded: Tensor, columns: Tensor, y: Tensor, factors: Tensor | None, relevance: bool | None
) -> tuple[bool, Tensor | None]:
    """Return whether embedded rows predict the targets of left-out rows better than plain rows, and the factors of the columns if these help.

    Args:
        plain: rows without embeddings [n, k].
        embedded: the same rows with embeddings [n, k'].
        columns: number of the column that each input of the embedded rows stands for [k'].
        y: targets, as for `targets_of`.
        factors: a factor for each column [k]; None: there are none.
        relevance: True: the factors are used in any case.
    """
    kept, targets = targets_of(y)
    if len(kept) < MIN_ROWS or not targets.shape[1]:
        return False, factors
    plain, embedded = plain[kept].double(), embedded[kept].double()
    candidates: list[tuple[bool, Tensor | None]] = [(False, None), (True, None)]
    if factors is not None:
        weighted: list[tuple[bool, Tensor | None]] = [(False, factors), (True, factors)]
        candidates = weighted if relevance else candidates + weighted
    errors = []
    # on such small matrices several threads are slower, by a factor of hundreds if other processes occupy a core
    with torch_threads(1):
        for is_embedded, factor in candidates:
            rows = embedded if is_embedded else plain
            if factor is not None:
                rows = rows * (factor[columns] if is_embedded else factor)
            errors.append(left_out_error(rows, targets))
    return candidates[errors.index(min(errors))]


def best_trained(candidates: Sequence[C], build: Callable[..., nn.Module], data: Data) -> C:
    """Return the candidate whose network has the smallest validation loss after a short training.

    With few rows, this would favour no embedding and say little about an embedding that is trained on many rows.

    Args:
        candidates: tuples of arguments for `build`.
        build: function that builds a network for the rows of the data.
        data: data set; at most `MAX_TRAINED_ROWS` of its training rows are drawn, a quarter of them for validation.
    """
    rows = data.train.load()
    order = torch.randperm(len(rows.x), generator=torch.Generator().manual_seed(0))
    kept = order if rows.y.is_floating_point() or rows.y.dim() > 1 else order[(rows.y >= 0).cpu()[order]]
    drawn = kept[:MAX_TRAINED_ROWS]
    pair, losses = (rows.x[drawn], rows.y[drawn]), []
    epochs = min(MAX_EPOCHS, EPOCHS * MAX_TRAINED_ROWS // len(drawn))
    with torch.random.fork_rng(devices=[]):
        for candidate in progress_bar(candidates, desc="embedding of columns", delay=2, leave=False):
            torch.manual_seed(0)
            history = fit(compose()(build(*candidate)), pair, epochs=epochs, validation=0.25, progress=False)
            losses.append(min(record[2] for record in history.records))
    return candidates[min(range(len(losses)), key=losses.__getitem__)]


__all__ = ["best_judged", "best_trained", "chosen_rows", "factors_of", "left_out_error", "targets_of"]
