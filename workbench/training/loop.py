"""Training loop: epochs, validation, early stopping, best weights, resumption."""

from __future__ import annotations

import math
import operator
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from workbench.console import progress_bar
from workbench.core.additions import extra
from workbench.core.batches.graphs import bad_graphs, is_graph_batch
from workbench.core.batches.rows import Batch, bad_rows
from workbench.core.calls.model_by_model import DETACHED, backward
from workbench.core.method import Method
from workbench.core.outputs.meanings import IGNORED
from workbench.core.wrapped import Wrapped
from workbench.engine.effects.private_random import generators_of, own_random
from workbench.engine.surroundings import Surroundings
from workbench.engine.tree import tensors
from workbench.errors import WorkbenchWarning
from workbench.introspect.source_lines import user_stacklevel
from workbench.training.augmentation import Augmentation, augmented
from workbench.training.batches import Batches, Pairs
from workbench.training.checkpoint import Checkpoint
from workbench.training.checks import FROZEN
from workbench.training.copied_state import copied_state
from workbench.training.flat_steps import refuse_flat
from workbench.training.history import History
from workbench.training.lost_voters import VoterWatch
from workbench.training.progress import Callback, Progress, Stopped, call_back
from workbench.training.running_loss import WITHOUT_CLASS, RunningLoss
from workbench.training.traced_step import TracedStep
from workbench.training.unshadowed import unshadowed


@dataclass
class Loop:
    """One training of one model; call `run`.

    Args:
        wrapped: the model, on the device and in the dtype of the batches.
        criterion: criterion(prediction, target) -> scalar; None: only the likelihood of the risk heads.
        optimizer: optimizer of the model's parameters.
        scheduler: stepped after each batch; None: a constant learning rate.
        train: training batches, in a new order each epoch.
        valid: batches that select the best epoch; None: the last epoch is the best.
        epochs: maximum number of epochs.
        patience: number of epochs without a better validation loss after which to stop; None: never.
        seed: seed of all random draws.
        progress: whether to show a progress bar.
        checkpoint: where the state is saved; None: nowhere.
        best: best state so far; before the first epoch has finished, the initial state.
        callback: called after each step and each epoch, see `fit`.
        augment: augmentations of each training batch, in order.
        changes: random generator for the augmentations.
        traced: replays the steps that it can from a graph; None: all steps run eagerly.
        watch: monitors each voter and restores those that diverge; None: voters are not monitored one by one.
    """

    wrapped: Wrapped
    criterion: Callable[[Any, Any], Tensor] | None
    optimizer: Optimizer
    scheduler: LRScheduler | None
    train: Batches
    valid: Batches | None
    epochs: int
    patience: int | None
    seed: int
    progress: bool
    checkpoint: Checkpoint | None
    best: dict[str, Any]
    callback: Callback | None = None
    augment: tuple[Augmentation, ...] = ()
    changes: torch.Generator | None = None
    traced: TracedStep | None = None
    watch: VoterWatch | None = None
    records: list[tuple[int, float, float, float, float]] = field(default_factory=list)
    best_epoch: int = 0
    best_loss: float = math.inf
    lr: float = math.nan  # learning rate of the last step
    steps: int = 0  # number of steps so far
    lost_voters: str = ""  # warning about voters that diverged; "" if none did

    def run(self) -> History:
        """Train, and leave the model with its best weights, in eval mode."""
        surroundings = Surroundings()
        try:
            interrupted, stopped = self._run()
        except BaseException as error:
            surroundings.restore(error)
            raise
        if self.lost_voters:
            warnings.warn(self.lost_voters, WorkbenchWarning, stacklevel=user_stacklevel())
        if interrupted:
            best = self.best_epoch
            weights = f"the weights of epoch {best} are kept" if best else "the weights stay as they are"
            warnings.warn(
                f"training was interrupted after {len(self.records)} of {self.epochs} epochs; {weights}, and the model can be used",
                WorkbenchWarning,
                stacklevel=user_stacklevel(),
            )
        return History(self.records, self.best_epoch, interrupted or stopped)

    def _run(self) -> tuple[bool, bool]:
        """Train, and return whether the training was interrupted and whether the callback stopped it."""
        interrupted = stopped = False
        with own_random(self.seed, self.train.device):
            surroundings = Surroundings()
            try:
                self._resume()
                if self.watch is not None and self.valid is not None and not self.records:
                    self._validate(0, self.valid)
                self._epochs()
                if self.checkpoint is not None:
                    self.checkpoint.write(self._state(), force=True)
            except KeyboardInterrupt as error:
                surroundings.restore(error)
                interrupted = True
            except Stopped:
                stopped = True
            except BaseException:
                self.optimizer.zero_grad()
                self._finish()
                raise
            # if no epoch has finished, the weights of the unfinished one are kept; tried again if Ctrl-C hits the first attempt
            try:
                self._finish(restore_best=self.best_epoch > 0)
            except BaseException:
                self._finish(restore_best=self.best_epoch > 0)
                raise
            if self.watch is not None and self.best_epoch > 0:
                self.lost_voters = self.watch.restore_lost()
            self._fit_in_closed_form()
        return interrupted, stopped

    def _fit_in_closed_form(self) -> None:
        """Fit what methods learn from the training rows in closed form, and tune it on the validation rows."""
        if not unshadowed(self.wrapped, "needs_fit"):
            return
        unshadowed(self.wrapped, "fit")(Pairs(self.train))  # in random order, since it may use the first rows only
        if self.valid is not None:
            for method in self.wrapped._workbench.methods:
                method.tune(self.wrapped, Pairs(self.valid))

    def _finish(self, restore_best: bool = True) -> None:
        if restore_best:
            self.wrapped.load_state_dict(self.best)
        self.wrapped.eval()

    def _epochs(self) -> None:
        # short trainings show no bar: it would disappear at once
        bar = progress_bar(
            total=self.epochs,
            initial=len(self.records),
            desc="training",
            unit="epoch",
            delay=2,
            disable=not self.progress,
        )
        with bar:
            for epoch in range(len(self.records) + 1, self.epochs + 1):
                if self.patience is not None and epoch - 1 - self.best_epoch >= self.patience:
                    break
                start = time.perf_counter()
                loss = self._train(epoch)
                validation = math.nan if self.valid is None else self._validate(epoch, self.valid)
                for method in self._collectors():
                    method.collect(self.wrapped, epoch, self.epochs)
                if self.valid is None or self._collectors() or validation < self.best_loss:
                    self.best = copied_state(self.wrapped)
                    self.best_epoch, self.best_loss = epoch, validation
                    if self.watch is not None:
                        self.watch.mark_best()
                self.records.append((epoch, loss, validation, self.lr, time.perf_counter() - start))
                if self.checkpoint is not None:
                    self.checkpoint.write(self._state())
                losses = {"loss": loss} if self.valid is None else {"loss": loss, "validation_loss": validation}
                bar.set_postfix(losses, refresh=False)
                bar.update()
                self._call_back(epoch, loss, epoch_ended=True)

    def _train(self, epoch: int) -> float:
        self.wrapped.train()
        losses = RunningLoss(self._not_finite, self.criterion)
        for step, batch in enumerate(self.train, 1):
            self.optimizer.zero_grad()
            if self.changes is not None:
                batch = augmented(batch, self.augment, self.changes)
            traced_step = (
                None if self.traced is None else self.traced.take(batch, max(self._total_steps() - self.steps, 0))
            )
            loss = self._backward(batch) if traced_step is None else traced_step.loss
            value = losses.add(self._mean(loss), f"epoch {epoch}, step {step}", batch)
            if traced_step is not None:
                traced_step.backward()
            self._pace(epoch - 1, step - 1)
            self.lr = self.optimizer.param_groups[0]["lr"]
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            self.steps += 1
            self._call_back(epoch, value)
        mean = losses.mean()
        if not losses.rows:
            raise ValueError(f"data: there was no batch in epoch {epoch}; can the loader be iterated only once?")
        return mean

    def loss(self, batch: Batch) -> Tensor:
        """Return the training loss of a batch."""
        return self._of_batch(unshadowed(self.wrapped, "loss"), batch)

    def _backward(self, batch: Batch) -> Tensor:
        """Accumulate the gradients of a batch, and return its loss."""
        return self._of_batch(partial(backward, self.wrapped, check=None if self.steps else refuse_flat), batch)

    def _of_batch(self, function: Callable[[Any, Any, Any], Tensor], batch: Batch) -> Tensor:
        """Return function(criterion, x, y), with clearer messages."""
        try:
            with identified(self.wrapped, batch.source):
                return function(self.criterion, batch.x, batch.y)
        except (IndexError, ValueError) as error:
            if (advice := _advice(batch, error)) is not None:
                raise ValueError(advice) from error
            raise

    def _total_steps(self) -> int:
        """Return the number of steps of the whole training; 0 for a loader without a length."""
        try:
            return self.epochs * len(self.train)
        except TypeError:
            return 0

    def _mean(self, loss: Tensor) -> Tensor:
        return loss

    def _call_back(self, epoch: int, loss: float | Tensor, epoch_ended: bool = False) -> None:
        if self.callback is None:
            return
        validation = self.records[-1][2] if self.records else math.nan
        total = self._total_steps()
        progress = Progress(epoch, self.epochs, self.steps, total, loss, validation, self.lr, epoch_ended, self.wrapped)
        call_back(self.callback, progress, self.seed, self.train.device)

    def _collectors(self) -> list[Method]:
        return [method for method in self.wrapped._workbench.methods if method.collects]

    def _pace(self, epochs: int, steps: int) -> None:
        """Set the learning rate that methods that collect weights ask for; a user's own optimizer keeps its rate."""
        for method in self._collectors() if self.scheduler is not None else ():
            share = method.pace(epochs + steps / len(self.train), self.epochs)
            for group in self.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * share

    @torch.no_grad()
    def _validate(self, epoch: int, batches: Batches) -> float:
        """Return the validation loss after an epoch; epoch 0, before the training, is seen by `watch` only."""
        self.wrapped.eval()
        losses = RunningLoss(self._not_finite, self.criterion)
        # the same draws in every epoch, so that the losses of two epochs differ only because of the weights
        with own_random(self.seed, batches.device):
            for batch in batches:
                with self._watching(losses, batch):
                    loss = self._mean(self.loss(batch))
                if epoch:
                    losses.add(loss, f"the validation of epoch {epoch}", batch)
            mean = losses.mean()
        if self.watch is not None:
            self.watch.update(epoch)
        if epoch and not losses.rows:
            raise ValueError("validation: there was no batch; can the loader be iterated only once?")
        if epoch and not losses.weight:
            raise ValueError(
                f"validation: no row has a class, all class numbers are {IGNORED} or of weight 0; give rows with classes, or validation=0"
            )
        return mean

    def _watching(self, losses: RunningLoss, batch: Batch) -> AbstractContextManager[None]:
        if self.watch is None:
            return nullcontext()
        return self.watch.recording(losses.weight_of(batch, self.train.device))

    def _not_finite(self, value: float, place: str, batch: Batch) -> str:
        """Return the error message for a loss that is not finite."""
        if self.traced is not None and self.traced.replays:
            # a graph does not check the targets; if they are the cause, an eager step raises a more specific error
            self.loss(batch)
        causes = []
        for name, values in (("x", batch.x), ("y", batch.y)):
            bad = sorted({int(row) for leaf in tensors(values) for row in bad_rows(leaf)})
            bad = bad_graphs(values) if is_graph_batch(values) else bad
            if bad:
                causes.append(f"{name} holds NaN or infinite numbers in {batch.name_rows(bad)}")
        if isinstance(batch.y, Tensor) and bool((batch.y == IGNORED).all()):
            causes.append(WITHOUT_CLASS)
        weights = [name for name, p in self.wrapped.named_parameters() if not p.isfinite().all()]
        if weights:
            causes.append(f"the weights are not finite either, {weights[0]} is the first of {len(weights)}")
        lr = self.optimizer.param_groups[0]["lr"]
        units = "standardize=True"
        if extra(self.wrapped, "scaling") is not None:
            units = "standardize=False if an input must keep its units, such as a length"
        kept = f"of epoch {self.best_epoch}" if self.best_epoch else "from before the training"
        return (
            f"the loss is {value} at {place} (learning rate {lr:.3g}): "
            f"{'; '.join(causes) or 'inputs, targets and weights are finite'}. Try a smaller lr or {units}, and "
            f"check these rows. The model has the weights {kept}"
        )

    def _state(self) -> dict[str, Any]:
        generators = {name: generator.get_state() for name, generator in self._generators().items()}
        return {
            "model": self.wrapped.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "generators": generators,
            "records": self.records,
            "steps": self.steps,
            "best": self.best,
            "best_epoch": self.best_epoch,
            "best_loss": self.best_loss,
            **({} if self.watch is None else {"voters": self.watch.state()}),
        }

    def _generators(self) -> dict[str, torch.Generator]:
        loader_generator = getattr(self.train.source, "generator", None)
        generators = {
            "order": self.train.generator,
            "loader": loader_generator,
            "changes": self.changes,
            **generators_of(self.train.device),
        }
        return {name: generator for name, generator in generators.items() if generator is not None}

    def _resume(self) -> None:
        state = None if self.checkpoint is None else self.checkpoint.read()
        if self.checkpoint is None or state is None:
            return
        with self.checkpoint.resuming():
            if not isinstance(state["best"], dict) or not isinstance(state["steps"], int):
                raise TypeError("the best weights are not a state_dict, or the number of steps is not an int")
            self.wrapped.load_state_dict(state["model"])
            self.wrapped.to(self.train.device)  # the standardization read from the file is on the CPU
            self.optimizer.load_state_dict(state["optimizer"])
            if self.scheduler is not None:
                self.scheduler.load_state_dict(state["scheduler"])
            for name, generator in self._generators().items():
                generator.set_state(state["generators"][name])
            self.records = [
                (operator.index(epoch), float(loss), float(validation), float(lr), float(seconds))
                for epoch, loss, validation, lr, seconds in state["records"]
            ]
            self.steps = state["steps"]
            if self.watch is not None and "voters" in state:
                self.watch.load(state["voters"], self.train.device)
            self.best, self.best_epoch, self.best_loss = state["best"], state["best_epoch"], state["best_loss"]


@contextmanager
def identified(wrapped: Wrapped, source: tuple[Any, Any] | None) -> Iterator[None]:
    """Context manager in which rows are known by `source`, those before augmentation, to voters that start from shared weights."""
    record = wrapped._workbench
    record.source = source
    try:
        yield
    finally:
        record.source = None


def _advice(batch: Batch, error: Exception) -> str | None:
    """Return a clearer message for an error caused by rows of a Dataset or DataLoader, which can't be checked in advance, or None."""
    if str(error) == DETACHED:
        return f"{error}{FROZEN}"
    if len(batch) == 1 and "more than 1 value per channel" in str(error):
        return "data: a batch has only one row, from which batch norm can't compute statistics: use DataLoader(..., drop_last=True)"
    labels = isinstance(batch.y, Tensor) and not batch.y.is_floating_point()
    if isinstance(error, IndexError) and labels and "out of bounds" in str(error):
        number = re.search(r"Target (-?\d+)", str(error))
        rows = (
            []
            if number is None
            else (batch.y.reshape(len(batch), -1) == int(number[1])).any(1).nonzero()[:, 0].tolist()
        )
        where = f", in {batch.name_rows(rows)}" if rows else ""
        return (
            f"data: class numbers of a batch go from {int(batch.y.min())} to {int(batch.y.max())}, and the model has no score for one of "
            f"them{where} ({error}); mark rows to ignore with {IGNORED}"
        )
    return None
