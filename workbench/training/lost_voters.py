"""Detection of voters that diverge while the others converge; they get the weights of their own best epoch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from workbench.core.additions import MARK
from workbench.methods.vote import NAME as VOTERS
from workbench.training.fold_layout import shared_by_voters

MIN_VOTERS = 3  # the majority shows what is attainable
# minimum distance of a lost voter, relative to the initial loss: if most voters have improved, and if they have not
FAR, FAR_WITHOUT_GAIN = 0.05, 0.5


class VoterWatch:
    """Validation losses per voter, and the weights with which each had its smallest loss.

    A voter is lost if its loss has dropped by less than half of the median drop, and is far from both the better half of the voters and its own
    best loss: by more than three times the range of that half and 5 % of the initial loss (50 % if the median voter has not improved). A single
    spike of a voter's gradient can cause this, since Adam's steps stay too small for a long time after it.

    Args:
        wrapped: the model; its voters share no trained parameters.
        n_voters: number of voters.
    """

    def __init__(self, wrapped: Any, n_voters: int) -> None:
        self.wrapped, self.n_voters = wrapped, n_voters
        unknown = torch.full((n_voters,), math.nan, dtype=torch.float64)
        self.start, self.latest, self.chosen, self.least = unknown, unknown, unknown, unknown
        self.epoch = torch.zeros(n_voters, dtype=torch.int64)  # epoch of the smallest loss
        self.best: dict[str, Tensor] = {}
        self._sums: list[tuple[Tensor, Tensor]] = []

    @classmethod
    def of(cls, wrapped: Any) -> VoterWatch | None:
        """Return a watch, or None if there are too few voters, they share trained parameters, or a method collects the weights of all epochs."""
        vote = next((method.wrapper for method in wrapped._workbench.methods if method.name == VOTERS), None)
        if vote is None or vote.n_voters < MIN_VOTERS or shared_by_voters(wrapped) is not None:
            return None
        return None if any(method.collects for method in wrapped._workbench.methods) else cls(wrapped, vote.n_voters)

    @contextmanager
    def recording(self, weight: Tensor) -> Iterator[None]:
        """Record the losses of the voters inside of this context, which computes the validation loss of a batch of this weight []."""
        record = self.wrapped._workbench
        recorded: list[tuple[dict[str, int], Tensor]] = []
        record.losses = recorded
        try:
            yield
        finally:
            record.losses = None
        # the loss of a batch without any class is a mean of nothing
        self._sums += [(torch.where(weight > 0, mean_per_voter(*losses) * weight, 0.0), weight) for losses in recorded]

    def update(self, epoch: int) -> None:
        """Keep the weights of the voters that improved in this epoch; epoch 0 is before the training."""
        if not self._sums:
            return
        totals, weights = zip(*self._sums, strict=True)
        self._sums = []
        self.latest = (torch.stack(totals).sum(0) / torch.stack(weights).sum()).cpu()
        if epoch == 0:
            self.start = self.latest
        better = ~(self.latest >= self.least)  # also true while the smallest loss is still NaN
        current = self._voter_tensors()
        if not self.best:
            self.best = {name: tensor.clone() for name, tensor in current.items()}
        for name, tensor in current.items():
            self.best[name][better] = tensor[better]
        self.least, self.epoch = self.latest.where(better, self.least), self.epoch.where(~better, epoch)

    def mark_best(self) -> None:
        """Note that the latest epoch is the best of all voters together."""
        self.chosen = self.latest

    def restore_lost(self) -> str:
        """Give lost voters the weights of their own best epoch.

        Returns:
            The warning to show; "" if no voter is lost.
        """
        lost = lost_voters(self.start, self.chosen, self.least)
        if not lost.any():
            return ""
        for name, tensor in self._voter_tensors().items():
            tensor[lost] = self.best[name][lost]
        details = "; ".join(
            f"voter {k} had a validation loss of {self.start[k]:.3g} before the training and {self.chosen[k]:.3g} after it, and was reset to "
            f"its weights of epoch {self.epoch[k]} ({self.least[k]:.3g})"
            for k in lost.nonzero()[:, 0].tolist()
        )
        return (
            f"{int(lost.sum())} of {self.n_voters} voters diverged in the training, while the others reached a loss of "
            f"{self.chosen[~lost].mean():.3g}: {details}. Train with a smaller lr, such as a third of it"
        )

    def _voter_tensors(self) -> dict[str, Tensor]:
        """Return the current tensors that have one row per voter."""
        tensors = [*self.wrapped.named_parameters(), *self.wrapped.named_buffers()]
        return {name: tensor.detach() for name, tensor in tensors if f"{MARK}{VOTERS}" in name}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {name: getattr(self, name) for name in ("start", "latest", "chosen", "least", "epoch", "best")}

    def load(self, state: dict[str, Any], device: torch.device) -> None:
        """Load the state of a checkpoint."""
        for name, value in state.items():
            setattr(self, name, value)
        self.best = {name: tensor.to(device) for name, tensor in self.best.items()}


def lost_voters(start: Tensor, chosen: Tensor, least: Tensor) -> Tensor:
    """Return which voters are lost (bool [voters]), by the rule of `VoterWatch`.

    Args:
        start: losses [voters] before the training.
        chosen: losses after it.
        least: the smallest losses.
    """
    gain = start - chosen
    median_gain, level = gain.median(), float(start.median().abs())
    better_half = gain >= median_gain
    if not better_half.any():  # all losses are NaN
        return better_half
    others = chosen[better_half]
    far = max(3 * float(others.max() - others.min()), (FAR if median_gain > 0 else FAR_WITHOUT_GAIN) * level)
    return (gain < median_gain.abs() / 2) & (chosen - others.max() > far) & (chosen - least > far)


def lost_in_folds(losses: Tensor) -> str:
    """Return the warning about voters of a cross-fitted training that are lost; "" if none is.

    Args:
        losses: [times, settings, folds, repeats], for the rows that each voter has not seen, from early in the training to its end.
    """
    by_setting = losses.flatten(2)
    if by_setting.shape[2] < MIN_VOTERS:
        return ""
    first, last, least = by_setting[0], by_setting[-1], by_setting.amin(0)
    lost = torch.stack([lost_voters(*each) for each in zip(first, last, least, strict=True)]).flatten()
    details = "; ".join(
        f"voter {k} had a loss of {first.flatten()[k]:.3g} early in the training and {last.flatten()[k]:.3g} after it"
        for k in lost.nonzero()[:, 0].tolist()
    )
    return details and (
        f"{int(lost.sum())} of {lost.numel()} voters diverged in the training: {details}, for the rows that it has not seen. They still count: "
        "train again with a smaller lr, such as a third of it"
    )


def mean_per_voter(n_models: dict[str, int], losses: Tensor) -> Tensor:
    """Return mean losses [voters] from the losses of all models; `n_models` has the number of models along each axis, the last one fastest."""
    by_axis = losses.double().reshape(*n_models.values(), -1)
    return by_axis.movedim(list(n_models).index(VOTERS), 0).flatten(1).mean(1)


__all__ = ["VoterWatch", "lost_in_folds", "lost_voters", "mean_per_voter"]
