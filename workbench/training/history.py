"""Course of a training: the losses of each epoch, and the results of cross-fitting."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from workbench.core.fitted_weights import FittedWeights
from workbench.core.outputs.meanings import IGNORED
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
    """Predictions of a cross-fitted model for training rows by the voters that have not seen them, in the order of the rows.

    Args:
        prediction: [n, ...], in original units; probabilities for classes.
        risk: standard deviations of the same shape; empty for classes.
        target: [n, ...].
        fold: int64 [n], the fold of each row.
        decisions: the decisions based on these predictions.
        weights: the weights of the model when its training ended; None if an earlier version trained it.
    """

    prediction: Tensor
    risk: Risk
    target: Tensor
    fold: Tensor
    decisions: Decisions
    weights: FittedWeights | None = None

    @property
    def nll(self) -> float:
        """Mean negative log density (for classes: log probability) of the targets, in nats; class numbers of -100 do not count.

        Less than for new rows, the more the fewer rows there are, since these rows chose epoch, noise and settings.
        """
        log_prob, target = self.decisions.log_prob, self.target
        if not target.is_floating_point() and target.numel() == log_prob.numel():
            log_prob = log_prob[(target != IGNORED).reshape(log_prob.shape)]
        return -float(log_prob.mean())


@dataclass(frozen=True, eq=False)
class History:
    """The course of a training.

    Args:
        records: one tuple (epoch, loss, validation_loss, lr, seconds) per finished epoch; epochs count from 1.
        best_epoch: the epoch whose weights the model has now: that of the smallest validation loss, or the last one
            without validation; 0 if the model has the weights of no finished epoch.
        interrupted: whether the training was ended early, by Ctrl-C or by the callback.
        out_of_fold: for a cross-fitted model (`folds=`), the predictions of its voters for rows that they have not seen.

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
        """DataFrame with one row per epoch: losses (means over rows), learning rate of the last step, and duration in seconds.

        The losses are those that were minimized, of standardized targets if targets were standardized. `validation_loss`
        is NaN without validation.
        """
        kinds = {name: int if name == "epoch" else float for name in COLUMNS}
        return require("pandas").DataFrame(self.records, columns=list(COLUMNS)).astype(kinds)

    @property
    def seconds(self) -> float:
        """Total duration of all epochs in seconds, including those before a resumption."""
        return sum(record[-1] for record in self.records)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot the losses over the epochs, see `workbench.plots.history`.

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
            parts.append(f"out-of-fold nll {self.out_of_fold.nll:.4g}")
        elif self.best_epoch:
            _, loss, validation, _, _ = self.records[self.best_epoch - 1]
            shown = f", validation loss {validation:.4g}" if validation == validation else ""
            parts.append(f"best epoch {self.best_epoch}: loss {loss:.4g}{shown}")
        if self.interrupted:
            parts.append("interrupted")
        return f"History({', '.join(parts)})"
