"""Course of a training: its losses, epoch by epoch, and what cross-fitting found out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from workbench.errors import require

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from torch import Tensor

    from workbench.risk import Risk
    from workbench.training.fold_decisions import Decisions

COLUMNS = ("epoch", "loss", "validation_loss", "lr", "seconds")


@dataclass(frozen=True, eq=False)
class OutOfFold:
    """What the voters of a cross-fitted model say about training rows that they have not seen, in the order of the rows.

    Args:
        prediction: [n, ...], in original units; probabilities for classes.
        risk: standard deviations of the same shape; empty for classes.
        target: [n, ...].
        fold: int64 [n], the fold of each row.
        decisions: what was decided by these predictions.
    """

    prediction: Tensor
    risk: Risk
    target: Tensor
    fold: Tensor
    decisions: Decisions


@dataclass(frozen=True, eq=False)
class History:
    """The course of a training.

    Args:
        records: one tuple (epoch, loss, validation_loss, lr, seconds) for each finished epoch; epochs count from 1.
        best_epoch: the epoch whose weights the model has now, that of the least validation loss (the last one where
            there was no validation); 0 if the model has no finished epoch's weights.
        interrupted: whether Ctrl-C ended the training.
        out_of_fold: of a cross-fitted model (`folds=`), what its voters say about rows that they have not seen.

    Example:
        >>> history = History([(1, 2.0, 1.5, 0.01, 0.1), (2, 1.0, 1.25, 0.0, 0.1)], best_epoch=2)
        >>> history
        History(2 epochs in 0.2 s, best epoch 2: loss 1, validation loss 1.25)
        >>> list(history.frame)
        ['epoch', 'loss', 'validation_loss', 'lr', 'seconds']
    """

    records: list[tuple[int, float, float, float, float]]
    best_epoch: int
    interrupted: bool = False
    out_of_fold: OutOfFold | None = None

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row for each epoch: losses (means over rows), learning rate of the last step, and seconds it took.

        The losses are what was minimised: of standardised targets where targets were standardised. `validation_loss`
        is NaN where there was no validation.
        """
        kinds = {name: int if name == "epoch" else float for name in COLUMNS}
        return require("pandas").DataFrame(self.records, columns=list(COLUMNS)).astype(kinds)

    @property
    def seconds(self) -> float:
        """Seconds that all epochs took, those before a resumption included."""
        return sum(record[-1] for record in self.records)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the losses over the epochs, see `workbench.plots.history`.

        Args:
            ax: Axes to draw on; a new figure if None.

        Returns:
            The Axes.
        """
        from workbench import plots

        return plots.history(self.frame, ax)

    def __repr__(self) -> str:
        n = len(self.records)
        parts = [f"{n} epoch{'' if n == 1 else 's'} in {self.seconds:.1f} s"]
        if self.out_of_fold is not None:
            parts.append(f"out-of-fold nll {-float(self.out_of_fold.decisions.log_prob.mean()):.4g}")
        elif self.best_epoch:
            _, loss, validation, _, _ = self.records[self.best_epoch - 1]
            shown = f", validation loss {validation:.4g}" if validation == validation else ""
            parts.append(f"best epoch {self.best_epoch}: loss {loss:.4g}{shown}")
        if self.interrupted:
            parts.append("interrupted")
        return f"History({', '.join(parts)})"
