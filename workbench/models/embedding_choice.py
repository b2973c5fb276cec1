"""Which embedding of the columns helps, judged on training rows: by kernel regression on few rows, by short trainings on many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from workbench.core.wrapper import compose
from workbench.training import fit

if TYPE_CHECKING:
    from workbench.data import Data

C = TypeVar("C", bound=tuple[Any, ...])
MIN_TRAINED_ROWS, MAX_TRAINED_ROWS = 4000, 20_000
# epochs of 20,000 and of 6,000 rows or fewer: after fewer, the embeddings that learn fastest look best
EPOCHS, MAX_EPOCHS = 30, 100

MOST_ROWS = 800  # that are asked; the cost grows with their cube
FEWEST = 8
WIDTHS = (0.3, 1.0, 3.0)  # of the kernel, squared, in medians of the squared distance of two rows
NOISES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # variance of the noise, the variance of a target being 1


def chosen_rows(x: Tensor) -> Tensor:
    """Numbers of at most `MOST_ROWS` rows of x [n, k], evenly over them, none of which is there twice."""
    different: dict[bytes, int] = {}
    for number, row in enumerate(x.cpu().numpy()):
        different.setdefault(row.tobytes(), number)
    numbers = torch.tensor(list(different.values()))
    return numbers[torch.linspace(0, len(numbers) - 1, min(len(numbers), MOST_ROWS)).round().long()]


def left_out_error(x: Tensor, y: Tensor) -> float:
    """Mean squared error of rows that kernel ridge regression has not seen, one at a time, with the best width and noise.

    The residual of row i when it is left out is `a_i / (K + s I)^-1_ii` with `a = (K + s I)^-1 y` (Rasmussen & Williams 2006, 5.4.2); the
    kernel is Gaussian.

    Args:
        x: [n, k], float64.
        y: [n, outputs], float64, of mean 0 and variance 1.

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
        turned = vectors.mT @ y
        for noise in NOISES:
            inverse = 1 / (values.clamp_min(0) + noise)
            residual = (vectors @ (inverse[:, None] * turned)) / (vectors.square() @ inverse)[:, None]
            best = min(best, float(residual.square().mean()))
    return best


def helps(plain: Tensor, embedded: Tensor, y: Tensor) -> bool:
    """Whether rows with their embeddings tell the targets of rows left out better than without.

    Args:
        plain, embedded: the same rows, [n, k] each.
        y: values [n, outputs], class numbers [n], of which those below 0 are left out, or labels [n, labels].
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
    if len(plain) < FEWEST or not targets.shape[1]:
        return False
    with _one_thread():
        return left_out_error(embedded.double(), targets) < left_out_error(plain.double(), targets)


def best_trained(candidates: Sequence[C], build: Callable[..., nn.Module], data: Data) -> C:
    """The candidate whose network has the least validation loss after a short training.

    Few rows tell little about an embedding that many rows will train, and favour none.

    Args:
        candidates: arguments of `build`.
        build: makes a network for the rows of the data.
        data: of whose training rows at most `MAX_TRAINED_ROWS` are drawn, a quarter of them for validation.
    """
    from tqdm.auto import tqdm

    rows = data.train.load()
    order = torch.randperm(len(rows.x), generator=torch.Generator().manual_seed(0))
    kept = order if rows.y.is_floating_point() or rows.y.dim() > 1 else order[(rows.y >= 0).cpu()[order]]
    drawn = kept[:MAX_TRAINED_ROWS]
    pair, losses = (rows.x[drawn], rows.y[drawn]), []
    epochs = min(MAX_EPOCHS, EPOCHS * MAX_TRAINED_ROWS // len(drawn))
    with torch.random.fork_rng(devices=[]):
        for candidate in tqdm(candidates, desc="embedding of columns", delay=2, leave=False):
            torch.manual_seed(0)
            history = fit(compose()(build(*candidate)), pair, epochs=epochs, validation=0.25, progress=False)
            losses.append(min(record[2] for record in history.records))
    return candidates[min(range(len(losses)), key=losses.__getitem__)]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Several threads are slower on such small matrices, by hundreds of times where other processes keep a core from one of them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


__all__ = ["best_trained", "chosen_rows", "helps", "left_out_error"]
