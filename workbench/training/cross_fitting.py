"""Cross-fitting: each voter trains without one fold of the rows, so that its predictions on that fold are out-of-sample."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from workbench.console import progress_bar
from workbench.core import members
from workbench.core.additions import EXTRAS, MARK
from workbench.core.batches.rows import Batch, TensorRows
from workbench.core.calls.risks import pair_of
from workbench.core.crossfit import Committee, seat
from workbench.core.outputs.class_scores import Binary, Probs
from workbench.core.outputs.meanings import IGNORED
from workbench.core.outputs.options import has_classes, meaning_of
from workbench.core.runtime import untie
from workbench.distributions.base import wide_dtype
from workbench.engine.effects.private_random import generators_of, own_random
from workbench.engine.plan import Split
from workbench.engine.surroundings import Surroundings
from workbench.engine.tree import map_tensors
from workbench.errors import WorkbenchWarning
from workbench.introspect.source_lines import user_stacklevel
from workbench.methods.vote import NAME as VOTERS
from workbench.risk import Risk
from workbench.training.batches import Batches, Pairs
from workbench.training.checkpoint import Checkpoint
from workbench.training.default_losses import labelled_share
from workbench.training.flat_steps import refuse_flat
from workbench.training.fold_decisions import Decisions, decide, decide_classes, log_likelihoods
from workbench.training.fold_layout import FoldedRows, Layout
from workbench.training.history import History, OutOfFold
from workbench.training.lost_voters import lost_in_folds
from workbench.training.progress import Callback, Progress, Stopped, call_back
from workbench.training.running_loss import WITHOUT_CLASS
from workbench.training.stacked_adam import StackedAdam
from workbench.training.traced_step import TracedStep
from workbench.training.unshadowed import unshadowed

# shares of all steps after which averaged weights are kept
SNAPSHOT_SHARES = (0.02, 0.04, 0.08, 0.15, 0.25, 0.4, 0.55, 0.7, 0.85, 1.0)


@dataclass
class CrossFit:
    """One cross-fitted training: `run` trains, `decide` evaluates the out-of-fold predictions, and `settle` applies the decisions to the model.

    Args:
        wrapped: the model, on the device and in the dtype of the rows.
        rows: the rows of all parts, in original units.
        parts: subsets of the rows and their folds.
        layout: part, setting, fold and repeat of each voter.
        lr, weight_decay: one value for each setting.
        criterion: criterion(prediction, target) -> scalar; None: only the likelihood of the risk heads.
        whole: whether the criterion is a mean over rows.
        epochs: passes of each voter over its rows.
        batch_size: rows of each voter per step.
        schedule: schedule(step, steps) -> share of the peak learning rate.
        seed: seed of all random draws.
        progress: whether to show a progress bar.
        start: state of the model before `fit` standardized anything, which a failure leaves.
        checkpoint: where the state is saved; None: nowhere.
        callback: called after each step and each epoch, see `fit`.
        traced: replays the steps that it can from a graph; None: all steps run eagerly.
    """

    wrapped: Any
    rows: TensorRows
    parts: Sequence[FoldedRows]
    layout: Layout
    lr: Sequence[float]
    weight_decay: Sequence[float]
    criterion: Callable[[Any, Any], Tensor] | None
    whole: bool
    epochs: int
    batch_size: int
    schedule: Callable[[int, int], float]
    seed: int
    progress: bool
    start: dict[str, Any]
    checkpoint: Checkpoint | None = None
    callback: Callback | None = None
    traced: TracedStep | None = None
    records: list[tuple[int, float, float, float, float]] = field(default_factory=list)
    snapshots: list[dict[str, Tensor]] = field(default_factory=list)
    answers: list[tuple[list[Tensor], list[Tensor] | None]] = field(default_factory=list)
    interrupted: bool = False
    stopped: bool = False

    def __post_init__(self) -> None:
        self.train = [self.parts[p].rows[self.parts[p].fold != k] for p, _, k, _ in self.layout]
        self.held_out = [self.parts[p].rows[self.parts[p].fold == k] for p, _, k, _ in self.layout]
        self.padded_rows = nn.utils.rnn.pad_sequence(self.train, batch_first=True, padding_value=-1)
        self.steps_per_epoch = max(1, min(map(len, self.train)) // self.batch_size)
        self.size = min(self.batch_size, min(map(len, self.train)))
        self.steps = self.epochs * self.steps_per_epoch
        self.snapshot_steps = sorted({max(1, round(self.steps * share)) for share in SNAPSHOT_SHARES})
        device = self.rows.device
        setting_of_voter = torch.tensor([s for _, s, _, _ in self.layout])
        self.optimizer = StackedAdam(
            [p for name, p in self.wrapped.named_parameters() if p.requires_grad and not name.startswith(EXTRAS)],
            torch.tensor(self.lr, dtype=torch.float64)[setting_of_voter].to(device),
            torch.tensor(self.weight_decay, dtype=torch.float64)[setting_of_voter].to(device),
            horizon=0.01 * self.steps,
            steps=self.steps,
        )
        self.order = torch.Generator().manual_seed(self.seed)
        like = next(p for p in self.wrapped.parameters() if p.is_floating_point())
        self.placement = like.device, like.dtype

    # ---- training
    def run(self) -> None:
        """Train all voters, and keep snapshots of their averaged weights and predictions for the rows that they have not seen."""
        with own_random(self.seed, self.rows.device):
            surroundings = Surroundings()
            try:
                self._resume()
                self._epochs()
                if self.checkpoint is not None:
                    self.checkpoint.write(self._state(), force=True)
            except KeyboardInterrupt as error:
                surroundings.restore(error)
                self.interrupted = True
            except Stopped:
                self.stopped = True
            except BaseException:
                self.wrapped.load_state_dict(self.start)
                raise
            finally:
                self.wrapped.eval()

    def _epochs(self) -> None:
        bar = progress_bar(
            total=self.steps,
            initial=self.optimizer.steps,
            desc=f"training {len(self.train)} voters",
            unit="step",
            delay=2,
            disable=not self.progress,
        )
        with bar:
            for epoch in range(len(self.records) + 1, self.epochs + 1):
                start, total, weight = time.perf_counter(), *torch.zeros(2, device=self.rows.device)
                order = self._order().to(total.device)  # one transfer per epoch, since each one waits for the GPU
                self.wrapped.train()
                for numbers in order[:, : self.steps_per_epoch * self.size].split(self.size, 1):
                    losses, share = self._step(numbers)
                    loss, step_weight = (losses * share).sum(), share.mean()
                    total, weight = total + loss, weight + step_weight
                    bar.update()
                    if self.optimizer.steps in self.snapshot_steps:
                        self._keep_snapshot()
                    self._call_back(epoch, self._mean(loss, step_weight))
                mean = self._mean(total, weight).item()
                if not math.isfinite(mean):
                    y = self.rows.y
                    unlabelled = not y.is_floating_point() and bool((y == IGNORED).any())
                    cause = f"the cause may be {WITHOUT_CLASS}. Otherwise " if unlabelled else ""
                    raise FloatingPointError(
                        f"the loss is {mean} in epoch {epoch}: {cause}try a smaller lr or standardize=True. "
                        "The model has the weights from before the training"
                    )
                self.records.append((epoch, mean, math.nan, self._current_lr(), time.perf_counter() - start))
                if self.checkpoint is not None:
                    self.checkpoint.write(self._state())
                bar.set_postfix({"loss": mean}, refresh=False)
                self._call_back(epoch, mean, epoch_ended=True)

    def _call_back(self, epoch: int, loss: float | Tensor, epoch_ended: bool = False) -> None:
        if self.callback is not None:
            done, steps = self.optimizer.steps, self.steps
            progress = Progress(
                epoch, self.epochs, done, steps, loss, math.nan, self._current_lr(), epoch_ended, self.wrapped
            )
            call_back(self.callback, progress, self.seed, self.rows.device)

    def _mean(self, total: Tensor, weight: Tensor) -> Tensor:
        """Return the mean over voters and rows; 0 if no row has a class."""
        return total / weight.where(weight > 0, 1.0) / len(self.train)

    def _current_lr(self) -> float:
        return max(self.lr) * self.schedule(self.optimizer.steps - 1, self.steps)

    def _order(self) -> Tensor:
        """Return the rows of each voter in a new order [voters, n], cut to the number of rows of the voter with the fewest."""
        keys = torch.rand(self.padded_rows.shape, generator=self.order)
        keys[self.padded_rows < 0] = 2  # sorts the padding to the end
        return self.padded_rows.gather(1, keys.argsort(1)[:, : min(map(len, self.train))])

    def _step(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Take one step of all voters on rows [voters, size]; return `loss`, and the share of labelled rows in each of its entries."""
        rows = self.rows.take(numbers.flatten())
        batch = Batch(None, rows.x, rows.y)
        traced_step = None if self.traced is None else self.traced.take(batch, self.steps - self.optimizer.steps)
        if traced_step is None:
            loss = self.loss(batch)
            if not self.optimizer.steps:
                refuse_flat(loss)
            loss.sum().backward()
        else:
            loss = traced_step.loss
            traced_step.backward()
        self.optimizer.step(self.schedule(self.optimizer.steps, self.steps))
        loss = loss.detach()
        return loss, labelled_share(batch.y, loss)

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of each voter [voters], or their sum [1]; the batch holds equally many rows of each, one voter after another."""
        args, y = TensorRows(batch.x, batch.y).args, batch.y
        if (scaling := unshadowed(self.wrapped, "scaling")) is not None:
            args, y = scaling.inputs(args, {})[0], scaling.targets(y)
        rows_of_voters = torch.arange(len(self.train) * self.size).reshape(-1, self.size)
        return members.loss(self.wrapped, self.criterion, args, y, rows_of_voters, self.whole)

    def _keep_snapshot(self) -> None:
        """Keep the averaged weights, and their predictions for the rows that the voters have not seen."""
        state = dict([*self.wrapped.named_parameters(), *self.wrapped.named_buffers()])
        with torch.no_grad():
            current = [p.detach().clone() for p in self.optimizer.parameters]
            torch._foreach_copy_(self.optimizer.parameters, self.optimizer.average)
            try:
                snapshot, answers = {name: t.detach().clone() for name, t in state.items()}, self._predict_held_out()
                self.snapshots.append(snapshot)
                self.answers.append(answers)
            finally:
                torch._foreach_copy_(self.optimizer.parameters, current)
                self.wrapped.train()

    def _predict_held_out(self) -> tuple[list[Tensor], list[Tensor] | None]:
        self.wrapped.eval()
        max_rows = max(map(len, self.held_out))
        padded = torch.stack([torch.cat([rows, rows[:1].expand(max_rows - len(rows))]) for rows in self.held_out])
        padded = padded.to(self.rows.device)
        answers: list[tuple[Tensor, Tensor | None]] = []
        for numbers in padded.split(4 * self.batch_size, 1):
            y, risk = self.predict_voters(self.rows.take(numbers.flatten()).args, numbers.shape[1])
            answers.append((y, risk))
        loc = torch.cat([y for y, _ in answers], 1)
        risk = None if answers[0][1] is None else torch.cat([r for _, r in answers if r is not None], 1)
        lengths = [len(rows) for rows in self.held_out]
        return (
            [values[:n] for values, n in zip(loc, lengths, strict=True)],
            None if risk is None else [values[:n] for values, n in zip(risk, lengths, strict=True)],
        )

    def predict_voters(self, args: tuple[Any, ...], each: int) -> tuple[Tensor, Tensor | None]:
        """Return predictions and noise [voters, each, ...], where every voter gets `each` rows of its own, one voter after another."""
        rows_of_voters = torch.arange(len(self.train) * each).reshape(-1, each)
        y, risk = members.answers(self.wrapped, args, rows_of_voters)
        assert isinstance(y, Tensor)  # `fit` refuses others
        noise = None if self._has_classes() else risk.aleatoric
        return y.unflatten(0, (-1, each)), None if noise is None else noise.unflatten(0, (-1, each))

    # ---- deciding
    def finish(self) -> History:
        """Decide, and apply the decisions to the model."""
        if self.interrupted:
            state = "decisions use the snapshots so far" if self.snapshots else "the weights are those of the last step"
            warnings.warn(
                f"training was interrupted after {len(self.records)} of {self.epochs} epochs; {state}, and the model can be used",
                WorkbenchWarning,
                stacklevel=user_stacklevel(),
            )
        if not self.snapshots:
            return History(self.records, 0, self.interrupted or self.stopped)
        if warning := lost_in_folds(self._losses().cpu()):
            warnings.warn(warning, WorkbenchWarning, stacklevel=user_stacklevel())
        decisions = self.decide()
        self.settle([decisions])
        if unshadowed(self.wrapped, "needs_fit"):
            order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(self.seed))
            with own_random(self.seed, self.rows.device):
                unshadowed(self.wrapped, "fit")(
                    Pairs(Batches(self.rows.take(order), 4 * self.batch_size, *self.placement))
                )
        return History(self.records, len(self.records), self.interrupted or self.stopped, self.summarize(decisions))

    def out_of_fold(self, part: int = 0) -> tuple[Tensor, Tensor | None]:
        """Return predictions and noise of the voters that have not seen a row: [snapshots, settings, repeats, n, ...] for the rows `judged`."""
        fold = self.parts[part].fold
        position = torch.cumsum(fold < self.layout.folds, 0) - 1  # of each row among the judged ones

        def gathered(answers: list[list[Tensor]]) -> Tensor:
            like = answers[0][0]
            shape = (len(answers), self.layout.settings, self.layout.repeats, len(self.judged(part)), *like.shape[1:])
            out = like.new_empty(shape)
            for v, (p, s, k, r) in enumerate(self.layout):
                if p == part:
                    for t, values in enumerate(answers):
                        out[t, s, r, position[fold == k]] = values[v]
            return out

        risks = [risk for _, risk in self.answers if risk is not None]
        return gathered([y for y, _ in self.answers]), gathered(risks) if risks else None

    def judged(self, part: int = 0) -> Tensor:
        """Return the numbers of the rows of a part that some voter has not seen: all of them, if every fold is held out in turn."""
        return self.parts[part].rows[self.parts[part].fold < self.layout.folds]

    def decide(self, part: int = 0) -> Decisions:
        """Return the decisions based on the out-of-fold predictions of a part."""
        loc, risk = self.out_of_fold(part)
        y = self._labels(loc, part)
        if self._has_classes():
            return decide_classes(self._log_probs(loc), y)
        return decide(loc, risk, y, members.family(self.wrapped), self.layout.folds * self.layout.repeats)

    def _labels(self, loc: Tensor, part: int) -> Tensor:
        """Return the targets of the judged rows of a part; for class scores, class numbers or probabilities."""
        output, y = self.wrapped._workbench.output, self.rows.y[self.judged(part)]
        if not has_classes(output):
            return y
        like = loc[0, 0, 0].reshape(y.shape) if isinstance(meaning_of(output), Binary) else loc[0, 0, 0]
        return meaning_of(output).labels(y, like)

    def _losses(self) -> Tensor:
        """Return the loss of each voter for the rows that it has not seen, [snapshots, settings, folds, repeats]."""
        loc, _ = self.out_of_fold()
        y, fold = self._labels(loc, 0), self.parts[0].fold
        classes = self._has_classes()
        losses = -log_likelihoods(self._log_probs(loc), y) if classes else (loc - y.reshape(loc.shape[3:])).square()
        kept = torch.ones(losses.shape[3:], dtype=torch.bool, device=y.device)
        if not y.is_floating_point():
            kept = y != IGNORED
        losses, fold = losses.where(kept, 0.0), fold[fold < self.layout.folds].to(y.device)
        sums = [losses[:, :, :, fold == k].flatten(3).sum(3) for k in range(self.layout.folds)]
        return torch.stack([total.double() / kept[fold == k].sum().clamp_min(1) for k, total in enumerate(sums)], 2)

    def _has_classes(self) -> bool:
        return has_classes(self.wrapped._workbench.output) or not self.rows.y.is_floating_point()

    def _log_probs(self, scores: Tensor) -> Tensor:
        """Return log probabilities [snapshots, settings, repeats, n, classes, ...] of the model's scores."""
        output = self.wrapped._workbench.output
        if not has_classes(output):
            return scores.log_softmax(4)
        meaning = meaning_of(output)
        if isinstance(meaning, Binary):
            scores = scores.reshape(*scores.shape[:4], *self.rows.y.shape[1:])
        log_probs = meaning.at_end(scores.dim() - 3).log_scores(scores)
        if not isinstance(meaning, Probs):
            log_probs = log_probs.log_softmax(-1)
        return log_probs.movedim(-1, 4)

    def settle(self, decisions: Sequence[Decisions]) -> None:
        """Apply the decisions for each part to the model."""
        decided = [(decisions[p], s) for p, s, _, _ in self.layout]  # for each voter
        snapshots_differ = any(d.mean_at[s] != d.scale_at[s] for d, s in decided)
        sculpt = pair_of(self.wrapped._workbench, unshadowed(self.wrapped, "methods"))
        tied = sculpt is not None and not all(
            isinstance(rule, Split) for rule in self.wrapped._workbench.rules.values()
        )
        if snapshots_differ and tied:
            untie(self.wrapped, sculpt.name)
        self._take_from_snapshots(decided, None if sculpt is None else f"{MARK}{sculpt.name}")
        weights = torch.tensor([d.weights[s] for d, s in decided], dtype=torch.float64) / (
            self.layout.folds * self.layout.repeats
        )
        factor = torch.tensor([d.factor[s] for d, s in decided], dtype=torch.float64)
        fold = torch.tensor([k for _, _, k, _ in self.layout])
        seat(self.wrapped, Committee(weights / weights.sum(), factor, decisions[0].df, fold))

    @torch.no_grad()
    def _take_from_snapshots(self, decided: Sequence[tuple[Decisions, int]], noise: str | None) -> None:
        """Give each voter the weights of its chosen snapshots; noise parameters (names containing the mark `noise`) have one of their own."""
        device = self.rows.device
        mean_at = torch.tensor([d.mean_at[s] for d, s in decided], device=device)
        scale_at = torch.tensor([d.scale_at[s] for d, s in decided], device=device)
        for name, tensor in [*self.wrapped.named_parameters(), *self.wrapped.named_buffers()]:
            if f"{MARK}{VOTERS}" not in name:
                continue
            is_noise = noise is not None and noise in name
            # parameters that have just been untied are missing in the snapshots
            source = name if name in self.snapshots[0] or noise is None else name.replace(noise, "")
            for t, snapshot in enumerate(self.snapshots):
                chosen = (scale_at if is_noise else mean_at) == t
                tensor[chosen] = snapshot[source][chosen]

    def summarize(self, decisions: Decisions) -> OutOfFold:
        """Return the out-of-fold predictions of the first part according to the decisions."""
        loc, risk = self.out_of_fold()
        # in float64, as the decisions: squares of tiny or huge risks leave the range of float32
        dtype, wide = loc.dtype, wide_dtype(loc)
        loc, risk = loc.to(wide), None if risk is None else risk.to(wide)
        shares = torch.tensor(decisions.weights, dtype=loc.dtype, device=loc.device)
        share_weights = shares.reshape(-1, *[1] * (loc.dim() - 2))

        def chosen(values: Tensor, times: Sequence[int]) -> Tensor:
            return torch.stack([values[t, s] for s, t in enumerate(times)])

        y = chosen(loc, decisions.mean_at)
        classes = self._has_classes()
        if classes:
            y = self._log_probs(y[None])[0].exp()
        mean = (y * share_weights).sum(0).mean(0)
        uncertainty = Risk()
        if not classes:
            variance = {"epistemic": ((y - mean).square() * share_weights).sum(0).mean(0)}
            factor = torch.tensor(decisions.factor, dtype=loc.dtype, device=loc.device).reshape(share_weights.shape)
            # without risk heads, one factor can't be the noise of several outputs
            if risk is not None or mean[0].numel() == 1:
                noise = factor.expand_as(y) if risk is None else chosen(risk, decisions.scale_at) * factor
                variance["aleatoric"] = (noise.square() * share_weights).sum(0).mean(0)
            variance["total"] = torch.stack(list(variance.values())).sum(0)
            uncertainty = Risk(**{name: value.sqrt().to(dtype) for name, value in variance.items()})
        fold = self.parts[0].fold
        return OutOfFold(
            mean.to(dtype), uncertainty, self.rows.y[self.judged()], fold[fold < self.layout.folds], decisions
        )

    # ---- checkpoints
    def _state(self) -> dict[str, Any]:
        return {
            "model": self.wrapped.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generators": {name: generator.get_state() for name, generator in self._generators().items()},
            "records": self.records,
            "snapshots": self.snapshots,
            "said": self.answers,
        }

    def _generators(self) -> dict[str, torch.Generator]:
        return {"order": self.order, **generators_of(self.rows.device)}

    def _resume(self) -> None:
        state = None if self.checkpoint is None else self.checkpoint.read()
        if self.checkpoint is None or state is None:
            return
        device = self.rows.device
        with self.checkpoint.resuming():
            self.wrapped.load_state_dict(state["model"])
            self.wrapped.to(device)
            self.optimizer.load_state_dict(state["optimizer"])
            for name, generator in self._generators().items():
                generator.set_state(state["generators"][name])
            self.records, (self.snapshots, self.answers) = (
                list(state["records"]),
                map_tensors(lambda t: t.to(device), (state["snapshots"], state["said"])),
            )


__all__ = ["CrossFit"]
