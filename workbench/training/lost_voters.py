"""Voters that lose their way in a training, while the others find theirs, get the weights of their own best epoch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from workbench.core.ownership import MARK
from workbench.methods.vote import NAME as VOTERS
from workbench.training.fold_layout import shared_by_voters

LEAST = 3  # voters, since most of them say what a training can do
# shares of the loss at the start: where most voters have gained something, and where they have not
FAR, FAR_WITHOUT_GAIN = 0.05, 0.5


class VoterWatch:
    """The validation losses of each voter, and the weights with which its own was the least.

    A voter is lost if it has gained less than half of what most voters have, and stands far from the better half of them and from its own
    best: by three times their range, and a twentieth of the loss at the start (half of it where most have gained nothing). One peak of its
    gradient can do that, since the steps of Adam are too small for long after it.

    Args:
        wrapped: the model; its voters share nothing that is trained.
        n_voters: how many there are.
    """

    def __init__(self, wrapped: Any, n_voters: int) -> None:
        self.wrapped, self.n_voters = wrapped, n_voters
        unknown = torch.full((n_voters,), math.nan, dtype=torch.float64)
        self.start, self.latest, self.chosen, self.least = unknown, unknown, unknown, unknown
        self.epoch = torch.zeros(n_voters, dtype=torch.int64)  # that of the least loss
        self.best: dict[str, Tensor] = {}
        self._sums: list[tuple[Tensor, int]] = []

    @classmethod
    def of(cls, wrapped: Any) -> VoterWatch | None:
        """None where there are too few voters, they share what is trained, or a method collects weights of all epochs."""
        vote = next((method.wrapper for method in wrapped._workbench.methods if method.name == VOTERS), None)
        if vote is None or vote.n_voters < LEAST or shared_by_voters(wrapped) is not None:
            return None
        return None if any(method.collects for method in wrapped._workbench.methods) else cls(wrapped, vote.n_voters)

    @contextmanager
    def listening(self, n_rows: int) -> Iterator[None]:
        """Around the loss of so many rows that validate."""
        record = self.wrapped._workbench
        heard: list[tuple[dict[str, int], Tensor]] = []
        record.losses = heard
        try:
            yield
        finally:
            record.losses = None
        self._sums += [(mean_of_voters(*losses) * n_rows, n_rows) for losses in heard]

    def see(self, epoch: int) -> None:
        """Keep the weights of those voters that were never better; epoch 0 is before the training."""
        if not self._sums:
            return
        totals, rows = zip(*self._sums, strict=True)
        self._sums = []
        self.latest = torch.stack(totals).sum(0).cpu() / sum(rows)
        if epoch == 0:
            self.start = self.latest
        better = ~(self.latest >= self.least)  # any loss is better than none
        present = self._rows()
        if not self.best:
            self.best = {name: tensor.clone() for name, tensor in present.items()}
        for name, tensor in present.items():
            self.best[name][better] = tensor[better]
        self.least, self.epoch = self.latest.where(better, self.least), self.epoch.where(~better, epoch)

    def choose(self) -> None:
        """The epoch that was seen last is the best of all voters together."""
        self.chosen = self.latest

    def bring_back(self) -> str:
        """Give lost voters the weights of their own best epoch.

        Returns:
            What to say of them; "" if there is none.
        """
        lost = self._lost()
        if not lost.any():
            return ""
        for name, tensor in self._rows().items():
            tensor[lost] = self.best[name][lost]
        each = "; ".join(
            f"voter {k} had a validation loss of {self.start[k]:.3g} before the training and {self.chosen[k]:.3g} after it, and was given back "
            f"its weights of epoch {self.epoch[k]} ({self.least[k]:.3g})"
            for k in lost.nonzero()[:, 0].tolist()
        )
        return (
            f"{int(lost.sum())} of {self.n_voters} voters lost their way in the training, where the others have come to "
            f"{self.chosen[~lost].mean():.3g}: {each}. Train with a smaller lr, such as a third of it"
        )

    def _lost(self) -> Tensor:
        gain = self.start - self.chosen
        most, level = gain.median(), float(self.start.median().abs())
        better = gain >= most
        if not better.any():  # nothing is known of them
            return better
        others = self.chosen[better]
        far = max(3 * float(others.max() - others.min()), (FAR if most > 0 else FAR_WITHOUT_GAIN) * level)
        return (gain < most.abs() / 2) & (self.chosen - others.max() > far) & (self.chosen - self.least > far)

    def _rows(self) -> dict[str, Tensor]:
        """The present values of what each voter has a row of."""
        tensors = [*self.wrapped.named_parameters(), *self.wrapped.named_buffers()]
        return {name: tensor.detach() for name, tensor in tensors if f"{MARK}{VOTERS}" in name}

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {name: getattr(self, name) for name in ("start", "latest", "chosen", "least", "epoch", "best")}

    def load(self, state: dict[str, Any], device: torch.device) -> None:
        """Take up the state of a checkpoint."""
        for name, value in state.items():
            setattr(self, name, value)
        self.best = {name: tensor.to(device) for name, tensor in self.best.items()}


def mean_of_voters(n_models: dict[str, int], losses: Tensor) -> Tensor:
    """Means [voters] of the losses of all models, of which there are so many along each axis, the last fastest."""
    by_axis = losses.double().reshape(*n_models.values(), -1)
    return by_axis.movedim(list(n_models).index(VOTERS), 0).flatten(1).mean(1)


__all__ = ["VoterWatch", "mean_of_voters"]
