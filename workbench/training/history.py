"""What a training leaves behind: its losses, epoch by epoch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

COLUMNS = ("epoch", "loss", "validation_loss", "lr", "seconds")


@dataclass(frozen=True, eq=False)
class History:
    """The course of a training.

    Args:
        records: one tuple (epoch, loss, validation_loss, lr, seconds) for each finished epoch; epochs count from 1.
        best_epoch: the epoch whose weights the model has now, that of the least validation loss (the last one where
            there was no validation); 0 if the model has no finished epoch's weights.
        interrupted: whether Ctrl-C ended the training.

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

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row for each epoch: losses (means over rows), learning rate of the last step, and seconds it took.

        The losses are what was minimised: of standardised targets where targets were standardised. `validation_loss`
        is NaN where there was no validation.
        """
        import pandas as pd

        kinds = {name: int if name == "epoch" else float for name in COLUMNS}
        return pd.DataFrame(self.records, columns=list(COLUMNS)).astype(kinds)

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
        if self.best_epoch:
            _, loss, validation, _, _ = self.records[self.best_epoch - 1]
            shown = f", validation loss {validation:.4g}" if validation == validation else ""
            parts.append(f"best epoch {self.best_epoch}: loss {loss:.4g}{shown}")
        if self.interrupted:
            parts.append("interrupted")
        return f"History({', '.join(parts)})"
