"""Distributed data-parallel training, as started by torchrun: each process takes its share of every batch, and gradients are averaged."""

from __future__ import annotations

import atexit
import gc
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from workbench.core.batches.labelled import kind_of
from workbench.core.batches.rows import Batch, Source
from workbench.core.calls.model_by_model import DETACHED
from workbench.core.method import evaluating
from workbench.core.outputs.meanings import IGNORED
from workbench.engine.effects.private_random import own_random
from workbench.engine.tree import map_tensors
from workbench.training.batches import Batches
from workbench.training.checkpoint import Checkpoint
from workbench.training.checks import FROZEN
from workbench.training.described_settings import checksum
from workbench.training.flat_steps import refuse_flat
from workbench.training.history import History
from workbench.training.loop import Loop, identified
from workbench.training.progress import Stopped
from workbench.training.unshadowed import unshadowed

LAUNCH = "torchrun --nproc-per-node=2 train.py"
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def join(strategy: str, folds: Any, device: str | torch.device | None) -> str | torch.device | None:
    """Join the process group, which is created if torchrun has started this process.

    Args:
        strategy: "ddp".
        folds: as for `fit`; must be None.
        device: as for `fit`.

    Returns:
        The device; with several GPUs, the one of this process.

    Raises:
        ValueError: the strategy is unknown, folds are given, or there is no process group.
    """
    if strategy != "ddp":
        raise ValueError(f'strategy must be None, "eager" or "ddp", not {strategy!r}')
    if folds is not None:
        raise ValueError("strategy: with folds all voters train at once in one process; leave folds or strategy out")
    if not dist.is_available():
        raise ValueError("strategy: this build of torch has no torch.distributed; leave strategy out")
    if not dist.is_initialized():
        if missing := [name for name in TORCHRUN if name not in os.environ]:
            raise ValueError(
                f"strategy: this process belongs to no group of processes ({', '.join(missing)} not set); start the script by {LAUNCH}, or call "
                "torch.distributed.init_process_group before"
            )
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        atexit.register(_leave)
    if str(device) in ("auto", "cuda") and torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_RANK", dist.get_rank() % torch.cuda.device_count()))
        torch.cuda.set_device(local)
        return torch.device("cuda", local)
    return device


def _leave() -> None:
    """Destroy the process group; reference cycles are collected first, since they may hold threads that must not outlive the interpreter."""
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def check_agreement(train: Source, valid: Source | None, settings: dict[str, str], has_callback: bool) -> None:
    """Check that all processes are about to run the same training.

    Raises:
        ValueError: they differ (raised in every process).
        TypeError: the rows come from a DataLoader (raised in every process).
    """
    kinds = [kind_of(source) for source in (train, valid)]
    rows = {"data": checksum(train), "validation": checksum(valid)}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, ({**settings, **rows, "device": "", "callback": str(has_callback)}, kinds))
    if any("DataLoader" in kind for _, kinds in gathered for kind in kinds):
        raise TypeError(
            "strategy: each process takes its share of every batch itself; give tensors, arrays or a torch Dataset rather than a DataLoader"
        )
    for rank, (others, _) in enumerate(gathered):
        if differing := [name for name, value in gathered[0][0].items() if others.get(name) != value]:
            raise ValueError(
                f"strategy: processes 0 and {rank} were given different {', '.join(differing)}; give all the same, each takes its share itself"
            )


class _Training(nn.Module):
    """The module that DistributedDataParallel wraps: its forward computes the loss."""

    def __init__(self, wrapped: Any, criterion: Any) -> None:
        super().__init__()
        self.wrapped, self.criterion = wrapped, criterion

    def forward(self, x: Any, y: Any, source: Any) -> Tensor:
        with identified(self.wrapped, source):
            return unshadowed(self.wrapped, "loss")(self.criterion, x, y)


class ParallelLoop(Loop):
    """The training loop in each of the processes; losses, decisions and weights are the same in all of them at any time."""

    def run(self) -> History:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.progress = self.progress and self.rank == 0
        if self.checkpoint is not None:
            self.checkpoint = _FirstProcessCheckpoint(self.checkpoint)
        training = _Training(self.wrapped, self.criterion)
        places = None if self.train.device.type == "cpu" else [self.train.device]
        self.parallel = DistributedDataParallel(
            training, device_ids=places, find_unused_parameters=self._leaves_parameters_out()
        )
        history = super().run()
        del self.parallel
        if not history.interrupted:
            _broadcast(self.wrapped)  # each process has fitted the closed-form methods by itself
        return history

    def _leaves_parameters_out(self) -> bool:
        """Return whether the loss ignores some of the parameters, which DDP then has to detect in each step."""
        train = self.train
        batch = next(iter(Batches(train.source, train.size, train.device, train.dtype)))
        parameters = [parameter for parameter in self.wrapped.parameters() if parameter.requires_grad]
        # eval mode leaves running statistics alone; recurrent layers have a backward pass there only without cuDNN
        flags = torch.backends.cudnn.flags(enabled=False)
        with evaluating(self.wrapped, whole=True), own_random(self.seed, train.device), flags:
            loss = super().loss(batch)
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True) if loss.requires_grad else [None]
        return any(gradient is None for gradient in gradients)

    def _train(self, epoch: int) -> float:
        # noise differs between processes, as between rows of one batch, and does not depend on when the training was resumed
        with own_random(hash((self.seed, epoch, self.rank)) % 2**62, self.train.device):
            return super()._train(epoch)

    def loss(self, batch: Batch) -> Tensor:
        n = len(batch)
        own_rows = list(range(self.rank, n, self.world))
        index = torch.tensor(own_rows or [0], device=self.train.device)
        # so that the average over processes is the mean over rows, of class numbers over those that are not -100
        weight: Any = len(own_rows) * self.world / n
        if isinstance(batch.y, Tensor) and not batch.y.is_floating_point() and batch.y.numel():
            labelled = (batch.y != IGNORED).reshape(n, -1).double().sum(1)
            weight = labelled[index].sum() * bool(own_rows) * self.world / labelled.sum().clamp_min(1)
        x, y, source = (map_tensors(lambda t: t[index], tree) for tree in (batch.x, batch.y, batch.source))
        training = self.parallel if torch.is_grad_enabled() else self.parallel.module
        loss = training(x, y, source)
        return (weight.to(loss.dtype) if isinstance(weight, Tensor) else weight) * loss

    def _backward(self, batch: Batch) -> Tensor:
        loss = self.loss(batch)  # of all models, since DDP waits for the gradients of one backward pass
        if not loss.requires_grad:
            raise ValueError(f"{DETACHED}{FROZEN}")
        if not self.steps:
            refuse_flat(loss)
        loss.backward()
        return loss

    def _mean(self, loss: Tensor) -> Tensor:
        mean = loss.detach().double() / self.world
        dist.all_reduce(mean)
        return mean

    def _call_back(self, epoch: int, loss: float | Tensor, epoch_ended: bool = False) -> None:
        """Call the callback in the first process only; if it stops the training, all processes stop."""
        if self.callback is None:
            return
        stop = torch.zeros((), device=self.train.device)
        try:
            if self.rank == 0:
                super()._call_back(epoch, loss, epoch_ended)
        except BaseException:
            stop.fill_(1)
            raise
        finally:
            dist.broadcast(stop, 0)
        if stop:
            raise Stopped


class _FirstProcessCheckpoint(Checkpoint):
    """A checkpoint that only the first process reads and writes."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint.path, checkpoint.settings)
        self.runs = checkpoint.runs

    def read(self) -> dict[str, Any] | None:
        state_and_error: list[Any] = [None, None]
        if dist.get_rank() == 0:
            try:
                state_and_error[0] = super().read()
            except ValueError as error:
                state_and_error[1] = str(error)
        dist.broadcast_object_list(state_and_error, 0)
        state, message = state_and_error
        if message is not None:
            raise ValueError(message)
        return state

    def write(self, state: Any, force: bool = False) -> None:
        if dist.get_rank() == 0:
            super().write(state, force)


@torch.no_grad()
def _broadcast(wrapped: Any) -> None:
    """Copy the tensors of the first process to all others."""
    for tensor in (*wrapped.parameters(), *wrapped.buffers()):
        first = tensor.detach().to(torch.uint8 if tensor.dtype is torch.bool else tensor.dtype).contiguous()
        dist.broadcast(first, 0)
        tensor.copy_(first)


__all__ = ["ParallelLoop", "check_agreement", "join"]
