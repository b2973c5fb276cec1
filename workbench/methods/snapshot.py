"""Snapshot: epistemic risk from the disagreement of voters saved at the end of each cycle of one training."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.method import Method
from ..core.ownership import table_of
from ..core.settings import setting
from ..core.wrapper import Wrapper as _Wrapper
from .weight_sets import WeightSets, collect_from

if TYPE_CHECKING:
    from ..core.ownership import Table


class Wrapper(_Wrapper):
    """Epistemic risk from the disagreement of snapshots of one training (Huang et al. 2017).

    `workbench.fit` trains in as many cycles as there are voters, in each of which the learning rate falls along half a cosine from the peak to
    zero, and saves the weights at the end of each cycle, so that one training yields all voters. In a custom training loop, call
    `snapshot.collect(wrapped)` at the end of each cycle; the latest n_voters are kept.

    Example:
        >>> import torch
        >>> from workbench import fit
        >>> x = torch.linspace(-1, 1, 64)[:, None]
        >>> model = Wrapper(n_voters=3)(torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)))
        >>> history = fit(model, (x, x**2), epochs=6)
        >>> y, risk = model(x, return_risk=True)
        >>> len(model.voters())
        3
    """

    n_voters: int = setting(default=5, least=2, saved=True, help="number of cycles and voters, at least 2.")

    def make(self) -> list[Method]:
        return [Snapshot(self)]


def collect(wrapped: Any) -> int:
    """Keep the current weights and buffers of a model wrapped by `snapshot.Wrapper` as a voter, in place of the oldest one.

    Args:
        wrapped: the wrapped model, at the end of a cycle of its training.

    Returns:
        Number of voters collected so far.

    Raises:
        TypeError: if the model is not wrapped by snapshot.
        ValueError: if a weight is NaN or infinite; what was collected before stays.

    Example:
        >>> import torch
        >>> model = Wrapper(n_voters=2)(torch.nn.Linear(1, 1))
        >>> collect(model), collect(model)
        (1, 2)
    """
    return collect_from(wrapped, "snapshot")


def take(wrapped: Any) -> int:
    """Deprecated alias of `collect`."""
    warnings.warn("snapshot.take is now snapshot.collect", DeprecationWarning, stacklevel=2)
    return collect(wrapped)


class Snapshot(WeightSets):
    """Method behind `Wrapper`, for one model."""

    name, order = "snapshot", 10
    remedy = "call snapshot.collect(wrapped) to keep the new weights as a voter, in place of the oldest"

    def __init__(self, wrapper: Wrapper) -> None:
        super().__init__(wrapper, wrapper.n_voters)

    def repeats(self, training: bool) -> bool:
        return training  # predictions depend on whether weights were collected

    @torch.no_grad()
    def gather(self, wrapped: Any) -> int:
        """Keep the current weights as a voter; see `snapshot.collect`."""
        table = table_of(wrapped)
        self.check_collecting(table)
        for name in self.names(table, [*self._parameters, *self._buffers]):
            rows, value = table.get(f"{name}@snapshot"), table.get(name)
            rows.copy_(torch.cat([rows[1:], value[None]]))
        count = self.flag(table, "count").add_(1)
        self.flag(table, "ready").copy_(count >= self.size)
        return int(count)

    def latest(self, table: Table, name: str) -> Tensor:
        return table.get(f"{name}@snapshot")[-1]

    def missing(self, count: int) -> str:
        return (
            f"snapshot has collected {count} of {self.size} voters: train with workbench.fit, or call snapshot.collect(wrapped) at the end of "
            "each cycle of your own training"
        )

    # ---- within `workbench.fit`
    def _cycle_ends(self, epochs: int) -> list[int]:
        """Return the last epoch of each cycle."""
        if epochs < self.size:
            raise ValueError(f"snapshot: {epochs} epochs are too few for {self.size} cycles; give at least as many")
        return [round(cycle * epochs / self.size) for cycle in range(1, self.size + 1)]

    def pace(self, at: float, epochs: int) -> float:
        ends = [0, *self._cycle_ends(epochs)]
        cycle = next((i for i in range(1, len(ends)) if at < ends[i]), len(ends) - 1)
        return 0.5 * (1 + math.cos(math.pi * (at - ends[cycle - 1]) / (ends[cycle] - ends[cycle - 1])))

    def collect(self, wrapped: Any, epoch: int, epochs: int) -> None:
        if epoch == 1:
            self.forget(table_of(wrapped))
        if epoch in self._cycle_ends(epochs):
            self.gather(wrapped)


__all__ = ["Snapshot", "Wrapper", "collect"]
