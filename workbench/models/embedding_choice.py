"""Which embedding of the columns helps, judged on training rows: by kernel regression on few rows, by short trainings on many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from workbench.console import progress_bar
from workbench.core.wrapper import compose
from workbench.engine.threads import torch_threads
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


def helps(plain: Tensor, embedded: Tensor, y: Tensor) -> bool:
    """Whether embedded rows predict the targets of left-out rows better than plain rows.

    Args:
        plain: rows without embeddings [n, k].
        embedded: the same rows with embeddings [n, k'].
        y: values [n, outputs], class numbers [n] (rows with a negative one are ignored), or labels [n, labels].
    """
    if y.is_floating_point():
        targets = y.double().reshape(len(y), -1)
    elif y.dim() == 1:
        kept = y >= 0
        plain, embedded, y = plain[kept], embedded[kept], y[kept]
        targets = torch.nn.functional.one_hot(y).double()
    else:
        targets = y.double()
    spread = targets.std(0, correction=0)
    targets = ((targets - targets.mean(0)) / spread)[:, spread > 0]
    if len(plain) < MIN_ROWS or not targets.shape[1]:
        return False
    # on such small matrices several threads are slower, by a factor of hundreds if other processes occupy a core
    with torch_threads(1):
        return left_out_error(embedded.double(), targets) < left_out_error(plain.double(), targets)


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


__all__ = ["best_trained", "chosen_rows", "helps", "left_out_error"]
