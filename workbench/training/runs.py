"""The two kinds of training that `fit` starts: of the whole model on all rows, and of voters that each leave out a fold of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from workbench.core.batches.rows import Source, TensorRows
from workbench.core.fitted_weights import FittedWeights
from workbench.core.wrapped import Wrapped
from workbench.training.augmentation import Augmentation
from workbench.training.batches import Batches
from workbench.training.checkpoint import Checkpoint
from workbench.training.cross_fitting import CrossFit
from workbench.training.ddp import ParallelLoop
from workbench.training.default_losses import Criterion, cross_entropy_of_probs
from workbench.training.defaults import one_cycle, threads_of_steps
from workbench.training.epoch_choice import train_lengths
from workbench.training.fold_layout import FoldedRows, Layout
from workbench.training.history import History
from workbench.training.loop import Loop
from workbench.training.lost_voters import VoterWatch
from workbench.training.progress import Callback
from workbench.training.traced_step import TracedStep
from workbench.training.tracking import TrainingLog, logged

MEAN_CRITERIA = (None, F.mse_loss, F.l1_loss, F.cross_entropy, cross_entropy_of_probs)  # means over the rows of a batch


@dataclass(frozen=True)
class Run:
    """What both kinds of training need, checked and complete; for the arguments of the same name see `fit`.

    Args:
        wrapped: the model, on its device, in its dtype, and standardized.
        train: the training rows.
        device, dtype: where and in which dtype batches are.
        start: state of the model before it was standardized, which a failure leaves.
        checkpoint: file of the training state; None: no file.
        callback: the user's callback, or the log that calls it.
        log: the log of a tracker, None without.
    """

    wrapped: Wrapped
    train: Source
    criterion: Criterion | None
    batch_size: int
    seed: int
    device: torch.device
    dtype: torch.dtype
    progress: bool
    strategy: str | None
    start: dict[str, Any]
    checkpoint: Checkpoint | None
    callback: Callback | None
    log: TrainingLog | None

    def train_whole(
        self,
        valid: Source | None,
        epochs: int,
        patience: int | None,
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
        batches: Batches,
        augment: tuple[Augmentation, ...],
    ) -> History:
        """Train on all rows, in batches; rows `valid` choose the best epoch."""
        parallel = self.strategy not in (None, "eager")
        loop = (ParallelLoop if parallel else Loop)(
            wrapped=self.wrapped,
            criterion=self.criterion,
            optimizer=optimizer,
            scheduler=scheduler,
            train=batches,
            valid=None if valid is None else Batches(valid, 4 * self.batch_size, self.device, self.dtype),
            epochs=epochs,
            patience=patience,
            seed=self.seed,
            progress=self.progress,
            checkpoint=self.checkpoint,
            best=self.start,
            callback=self.callback,
            augment=augment,
            # a separate random stream: the seed's own one draws the order of the rows
            changes=torch.Generator().manual_seed(self.seed ^ 0x5DEECE66D) if augment else None,
        )
        if self.strategy is None:
            loop.traced = TracedStep(self.wrapped, self.criterion, loop.loss)
        if not parallel and not isinstance(valid, DataLoader):  # a loader may draw different rows each time
            loop.watch = VoterWatch.of(self.wrapped)
        with self._threads(), logged(self.log) as end_log:
            return end_log(loop.run())

    def train_folds(
        self,
        rows: TensorRows,
        fold: Tensor,
        layout: Layout,
        lengths: Sequence[int],
        lr: Sequence[float],
        weight_decay: Sequence[float],
    ) -> History:
        """Cross-fit voters for each number of epochs, as long as the longer training is better.

        Args:
            rows: the training rows.
            fold: fold of each row.
            layout: setting, fold and repeat of each voter.
            lengths: numbers of epochs.
            lr, weight_decay: one value for each setting.
        """
        on_device = rows.to(self.device, self.dtype)

        def cross_fit_of(epochs: int) -> CrossFit:
            checkpoint = self.checkpoint
            if checkpoint is not None and len(lengths) > 1:
                checkpoint = checkpoint.with_suffix(f".{epochs}", epochs=str(epochs))
            if self.log is not None:
                self.log.epochs_before = sum(shorter for shorter in lengths if shorter < epochs)
            cross_fit = CrossFit(
                wrapped=self.wrapped,
                rows=on_device,
                parts=[FoldedRows(torch.arange(len(rows)), fold)],
                layout=layout,
                lr=lr,
                weight_decay=weight_decay,
                criterion=self.criterion,
                whole=self.criterion in MEAN_CRITERIA,
                epochs=epochs,
                batch_size=self.batch_size,
                schedule=one_cycle,
                seed=self.seed,
                progress=self.progress,
                start=self.start,
                checkpoint=checkpoint,
                callback=self.callback,
            )
            if self.strategy is None:
                cross_fit.traced = TracedStep(self.wrapped, self.criterion, cross_fit.loss)
            return cross_fit

        with self._threads(), logged(self.log) as end_log:
            history = end_log(train_lengths(self.wrapped, lengths, cross_fit_of))
        if history.out_of_fold is None:
            return history
        return replace(history, out_of_fold=replace(history.out_of_fold, weights=FittedWeights(self.wrapped)))

    def _threads(self) -> AbstractContextManager[None]:
        return threads_of_steps(self.wrapped, self.train, self.batch_size, self.device)


__all__ = ["MEAN_CRITERIA", "Run"]
