"""Train any wrapped model with one call, `fit`."""

from __future__ import annotations

import copy
import hashlib
import itertools
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from workbench.core.batches.labelled import paired
from workbench.core.batches.rows import Batch, Source, TensorRows, place
from workbench.core.calls.risks import pair_of
from workbench.core.crossfit import seat
from workbench.core.outputs.options import has_detections
from workbench.core.outputs.said_distributions import nll
from workbench.core.saving.savepoint import Savepoint
from workbench.core.saving.training_data import note_training
from workbench.core.standardize import Key
from workbench.core.wrapped import Wrapped, is_wrapped
from workbench.data.loading import load
from workbench.data.provenance import facts
from workbench.engine.effects.private_random import own_random
from workbench.trackers.base import Tracker
from workbench.trackers.delivery import tracker_of
from workbench.training.asked_device import on_asked_device
from workbench.training.augmentation import Augmentation, augmentations, changed
from workbench.training.batches import Batches
from workbench.training.checkpoint import Checkpoint, checksum, describe
from workbench.training.checks import LR, check_numbers, trained_alone, try_batch
from workbench.training.class_weights import Weights, weighted_criterion
from workbench.training.cross_fitting import CrossFit
from workbench.training.ddp import ParallelLoop, agree, join
from workbench.training.default_losses import Criterion, LossByMeaning, cross_entropy_of_probs, default_criterion
from workbench.training.defaults import (
    default_batch_size,
    make_optimizer,
    move,
    one_cycle,
    resolve_device,
)
from workbench.training.epoch_choice import lengths_of, train_lengths
from workbench.training.exclusive import one_at_a_time
from workbench.training.fold_layout import FoldedRows, lay_out, pair_settings
from workbench.training.history import History
from workbench.training.loop import Loop
from workbench.training.lost_voters import VoterWatch
from workbench.training.progress import Callback
from workbench.training.standardization import choose_standardization, keeps_present, tell_of_bytes
from workbench.training.starting_priors import settle_priors
from workbench.training.starting_values import start_at_targets
from workbench.training.told_units import tell_of_batch, tell_of_columns
from workbench.training.traced_step import TracedStep
from workbench.training.tracking import TrainingLog, logged
from workbench.training.unshadowed import unshadowed
from workbench.training.validation import read_and_hold_out

MEANS = (None, F.mse_loss, F.l1_loss, F.cross_entropy, cross_entropy_of_probs)  # criteria that are means over rows


@one_at_a_time
@on_asked_device
def fit(
    wrapped: nn.Module,
    data: Any,
    *,
    epochs: int | Sequence[int] = 100,
    batch_size: int | None = None,
    lr: float | Sequence[float] = LR,
    weight_decay: float | Sequence[float] = 0.0,
    criterion: Criterion | None = None,
    optimizer: Callable[..., Optimizer] | None = None,
    validation: Any = None,
    folds: int | Tensor | None = None,
    patience: int | None = None,
    standardize: bool | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    progress: bool = True,
    checkpoint: str | os.PathLike[str] | None = None,
    callback: Callback | None = None,
    strategy: str | None = None,
    augment: Augmentation | Sequence[Augmentation] | None = None,
    class_weight: Weights | Mapping[str, Weights] | None = None,
    log_to: str | Tracker | None = None,
) -> History:
    """Train a wrapped model with the loss of its methods; it ends with the best weights, in eval mode.

    The same seed, data and settings give the same weights to the last bit on one machine (on CUDA as far as the
    model's own operations repeat), and the global random state is left alone. Ctrl-C ends the training early with a
    usable model.

    Args:
        wrapped: what a wrapper made of a model; `compose()(model)` is the plain baseline.
        data: a workbench Data (its training rows) or the name of one, a pair (x, y) of tensors or arrays with x [n, ...] (or a
            tuple of positional or a dict of keyword arguments) and y float [n, outputs] or integer class numbers [n], a
            torch Dataset of pairs (x, y), or a DataLoader, which is used as it is. Rows and batches may be dicts with "labels".
        epochs: passes over the rows. With folds several numbers may be given, such as (100, 300, 900): each is a training from the start, and
            the next one is tried as long as the last was better, on rows that its voters have not seen, by more than the standard error.
            The best is kept; with a checkpoint, each has a file of its own.
        batch_size: rows in a step, at least 2; None: the power of two next to n / 16, between 32 and 256.
        lr: peak learning rate (with folds: rates) of Adam (Kingma & Ba 2015), with linear warm-up over the first 5 % of the steps and a
            cosine to zero after it (Loshchilov & Hutter 2017).
        weight_decay: decoupled from the gradient (Loshchilov & Hutter 2019), on weights only (`wrapped.parameter_groups`); with folds several
            as for lr.
        criterion: criterion(prediction, target) -> scalar. None: mean squared error for float targets, cross entropy
            for class numbers; with folds, the likelihood of the risk heads alone where there are any.
        optimizer: optimizer(parameters) -> torch Optimizer, instead of Adam and the schedule.
        validation: what the best epoch is chosen by, never trained on: a share of the training rows (stratified for
            class numbers), rows as for `data`, or 0 for none (the last epoch then is the best). None: 0.1, none with folds. Three voters or
            more that share nothing are looked at one by one: those that lose their way are told, and get the weights of their own best epoch.
        folds: cross-fitting, the recommended way to train voters: each of them trains without one of so many folds of the rows (or of the
            folds [n] that you number, such as those of groups that belong together), so that what it says there decides, without a look at
            other rows: when predictions and noise are taken from the training (ten averages of the weights are kept), how wide the noise is
            and how heavy its tails (a factor, and Student's t if the distribution is Normal), and, where lr or weight_decay name several
            settings, how much the voters of each count. The number of voters must be a multiple of folds x settings; two for each let the
            spread of an ensemble be seen. `History.out_of_fold` keeps the predictions, of which `workbench.calibrate(wrapped, history)` makes
            CV+ intervals. Units are those of all rows.
        patience: epochs without a smaller validation loss after which to stop; None goes on to the end.
        standardize: whether the model works on inputs and targets of mean 0 and standard deviation 1 over the rows
            trained on; predictions and risks are in original units all the same. One mean and scale per column, or one
            for all pixels of images; of several inputs each floating-point one by itself, but for masks (at most two different
            numbers, or infinite ones). Whole numbers stay as they are; but bytes (uint8) that the model does not take so are
            scaled, and truth values made 0 and 1. None: inputs, and float targets unless a criterion of your own is given (but for
            mean squared and mean absolute error it could change what is asked for); counts and positive values under a class of
            torch.distributions stay as they are, and raw outputs start at their mean and variance instead (the bias of the last layer moves
            there, if predictions are away by more than a factor of e); a model that has a
            standardisation keeps it, and one whose prediction is frozen gets none. A model with a module that says
            `standardizes_inputs = True`, such as those of `workbench.models.tabular`, gets its inputs as they are. Say False for a model that
            was trained in original units elsewhere.
        seed: of the choice of validation rows, of the order of rows, and of all random draws of torch.
        device: where to train; None: where the model is; "auto": CUDA if there is any, else CPU. The model stays there. The environment
            variable WORKBENCH_DEVICE takes the place of None, and the model comes back after the training.
        dtype: floating-point type of model and rows; None: the model's.
        progress: whether to show a bar, if the training takes more than two seconds.
        checkpoint: file to keep the state in, every few seconds after an epoch. If it exists, training goes on from
            there and ends in the weights that it would have had without a break. Rows of a Dataset or DataLoader are
            only counted, not compared.
        callback: callback(progress) is called after each step and each epoch with a `Progress`. If it returns something true, the training
            ends there as by Ctrl-C, without a warning. It may predict with the model; the training is the same with and without it.
        strategy: "ddp" trains one model in all processes that torchrun has started (`torchrun --nproc-per-node=4 train.py`), or of the group
            that torch.distributed is in. Each is given the same model, rows and settings, and takes its share of each batch (batch_size counts
            all); gradients are averaged, the result is the same in all of them. With device="auto" each has a GPU of its own. The callback of
            the first process is called, and its bar shown. None takes the steps of small models on the CPU by a graph of all branches, made
            once in a long training, where that is sure to give the same numbers to the last bit; "eager" makes no such graph.
        augment: augment(x, y, generator) -> (x, y), or several in this order: changes the rows of each batch that is trained on, in their own
            units, so that an image moves together with its map; `workbench.training.RandomFlip` and `RandomCrop` are such functions. All
            draws repeat with the seed, those of the generator (on the CPU) and those of torch. Rows to validate on, and what a method
            fits in closed form, stay as they are.
        class_weight: weights of the classes in the default criterion: one for each [classes] (of `Binary` [2] for no and yes, or
            [labels, 2]), as in torch's `CrossEntropyLoss(weight=)`, or {class number: weight}; "balanced" for n / (classes * count) over the
            training rows as in scikit-learn (void pixels and tokens count nowhere, classes that do not occur have weight 1); or a dict of these
            by the name of an output. The model then says probabilities in proportion to weight times frequency: these are not calibrated on
            rows as they come, and one temperature does not undo it. To undo it, divide the probabilities by the weights and normalise them.
        log_to: "tensorboard" (in the folder runs), "mlflow" or "wandb", or a `workbench.trackers.Tracker`: settings, the losses and the learning
            rate of each epoch as they come, and how it ended go into the active run, which stays open, or else into a run of their own, which
            a training from a checkpoint goes on with. A tracker that fails costs a warning. Of several processes the first one logs.

    Returns:
        The course of the training, see `History`.

    Raises:
        TypeError: wrapped is not wrapped, or data is nothing that can be trained on.
        ValueError: an argument is out of range, rows hold NaN, shapes do not fit, or checkpoint is of another training.
        ModuleNotFoundError: the package of log_to is not installed.
        RuntimeError: another thread is training the model, or one that shares parameters with it.
        FloatingPointError: the loss became NaN or infinite; the model has the best weights so far.

    Example:
        >>> from workbench import sculpt
        >>> x = torch.linspace(0, 1, 64)[:, None]
        >>> wrapped = sculpt.Wrapper()(nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)))
        >>> history = fit(wrapped, (x, 1000 * x), epochs=5)
        >>> y, risk = wrapped(x, return_risk=True)
    """
    wrapped = _checked(wrapped)
    if has_detections(wrapped._workbench.output) and (criterion is None or folds is not None):
        raise ValueError(
            "wrapped: it gives detections, and a detector knows its losses itself: train it in a loop of your own, "
            "sum(wrapped(images, targets).values()).backward(), or give criterion=... without folds"
        )
    changes = augmentations(augment)
    parallel = None if strategy == "eager" else strategy
    _check_combination(folds, changes, class_weight, criterion, parallel)
    rates, decays = pair_settings(lr, weight_decay, folds)
    lengths = lengths_of(epochs, folds)
    for length, rate, decay in itertools.product(lengths, rates, decays):
        check_numbers(length, batch_size, rate, decay, optimizer, patience, dtype)
    seed = operator.index(seed)
    tracker = None if log_to is None else tracker_of(log_to)
    if folds is not None and (family := trained_alone(wrapped)) is not None:
        raise ValueError(
            f"folds: cross-fitting widens a standard deviation by a factor, and {family} has no such parameter; leave folds out"
        )
    if folds is not None:
        _check_that_folds_decide(validation, optimizer, patience)
        validation = 0
    if parallel is not None:
        device = join(parallel, folds, device)
    if isinstance(data, str):
        data = load(data)
    rows = paired(wrapped, data, mask="train_mask")
    validation_rows = 0.1 if validation is None else paired(wrapped, validation, mask="val_mask")
    train, valid = read_and_hold_out(rows, validation_rows, batch_size, seed)
    cut = None if folds is None else lay_out(wrapped, train, folds, len(rates), seed)
    if patience is not None and valid is None:
        raise ValueError("patience: without validation rows nothing tells when to stop; give validation=0.1")
    known = facts(data, train, valid)
    like = next((p for p in wrapped.parameters() if p.is_floating_point()), torch.empty(0))
    present = keeps_present(wrapped, standardize)
    savepoint = Savepoint(wrapped)
    try:
        first, learns, converted, weighted, structured = _try_first_batch(
            wrapped, train, valid, criterion, like, seed, present, changes, class_weight
        )
    except BaseException as error:
        savepoint.restore(error)
        raise
    scaling = choose_standardization(wrapped, train, criterion, standardize, learns, converted)
    target, dtype = resolve_device(device, like.device), dtype or like.dtype
    if not present:
        tell_of_columns(wrapped, train, dtype)
    size = batch_size or default_batch_size(train)
    batches = Batches(train, size, target, dtype, torch.Generator().manual_seed(seed))

    try:
        move(wrapped, target, dtype)
        criterion = criterion or weighted or _default_criterion(wrapped, first, structured, has_folds=cut is not None)
        settings = {
            "wrapped": wrapped._workbench_name(),
            "epochs": str(epochs),
            "batch size": str(size),
            "patience": str(patience),
            "standardize": str(standardize),
            "seed": str(seed),
            "device": target.type,
            "dtype": str(dtype),
            **({} if checkpoint is None else {"data": checksum(train), "validation": checksum(valid)}),
            "criterion": "likelihood" if criterion is None else describe(criterion),
            **({"augment": ", ".join(map(_describe_change, changes))} if changes else {}),
            **({} if weighted is None else {"class weight": _describe_weights(weighted)}),
        }
        if cut is None:
            steps_with, scheduler = make_optimizer(wrapped, optimizer, rates[0], decays[0], batches, lengths[0])
            settings["optimizer"] = _describe_optimizer(steps_with, scheduler is not None)
        else:
            settings["folds"] = hashlib.sha256(cut[0].numpy().tobytes()).hexdigest()
            settings["optimizer"] = f"StackedAdam, lr {rates}, weight decay {decays}"
        if parallel is not None:
            agree(train, valid, settings, callback is not None)

        start = copy.deepcopy(wrapped.state_dict())
        _reset(wrapped, scaling, train, target, dtype)
        note_training(wrapped, known, "workbench.fit")
        if learns and not present and standardize is not False:
            start_at_targets(wrapped, train, size, seed)
        settle_priors(wrapped, train)
    except BaseException as error:
        savepoint.restore(error)
        raise
    del savepoint  # the loop keeps states of its own
    keeper = None if checkpoint is None else Checkpoint(checkpoint, settings)
    log = None
    if tracker is not None:
        name = getattr(data, "name", None)
        tracked: dict[str, Any] = {
            **settings,
            "epochs": lengths[0] if len(lengths) == 1 else lengths,
            "batch size": size,
            "seed": seed,
        }
        tracked |= {"data": name} if isinstance(name, str) else {}
        tracked |= {} if cut is None else {"folds": len(cut[0].unique())}
        if optimizer is None:  # whose settings are these two
            tracked |= {"lr": lr, "weight decay": weight_decay, "optimizer": "AdamW"}
        log = callback = TrainingLog(tracker, tracked, callback, keeper)
    if cut is not None and isinstance(train, TensorRows):
        fold, layout = cut
        on_device = train.to(target, dtype)

        def make(length: int) -> CrossFit:
            kept = keeper if len(lengths) == 1 or keeper is None else keeper.beside(f".{length}", epochs=str(length))
            if log is not None:
                log.epochs_before = sum(shorter for shorter in lengths if shorter < length)
            cross_fit = CrossFit(
                wrapped=wrapped,
                rows=on_device,
                parts=[FoldedRows(torch.arange(len(train)), fold)],
                layout=layout,
                lr=rates,
                weight_decay=decays,
                criterion=criterion,
                whole=criterion in MEANS,
                epochs=length,
                batch_size=size,
                schedule=one_cycle,
                seed=seed,
                progress=progress,
                checkpoint=kept,
                callback=callback,
            )
            if strategy is None:
                cross_fit.traced = TracedStep(wrapped, criterion, cross_fit.loss)
            return cross_fit

        with logged(log) as ended:
            return ended(train_lengths(wrapped, lengths, make))
    loop = (Loop if parallel is None else ParallelLoop)(
        wrapped=wrapped,
        criterion=criterion,
        optimizer=steps_with,
        scheduler=scheduler,
        train=batches,
        valid=None if valid is None else Batches(valid, 4 * size, target, dtype),
        epochs=lengths[0],
        patience=patience,
        seed=seed,
        progress=progress,
        checkpoint=keeper,
        best=start,
        callback=callback,
        augment=changes,
        # of a stream of its own: the order of the rows has the seed's
        changes=torch.Generator().manual_seed(seed ^ 0x5DEECE66D) if changes else None,
    )
    if strategy is None:
        loop.traced = TracedStep(wrapped, criterion, loop._loss)
    if parallel is None and not isinstance(valid, DataLoader):  # which may draw other rows each time
        loop.watch = VoterWatch.of(wrapped)
    with logged(log) as ended:
        return ended(loop.run())


def _checked(wrapped: Any) -> Wrapped:
    if isinstance(wrapped, Wrapped):
        return wrapped
    if isinstance(wrapped, nn.Module) and not is_wrapped(wrapped):  # which says what to give for a wrapped Keras model
        raise TypeError(f"{type(wrapped).__name__} is not wrapped; compose()(model) makes the plain baseline of it")
    raise TypeError(f"wrapped: found {type(wrapped).__name__}; give what a wrapper made of a model")


def _default_criterion(wrapped: Wrapped, batch: Batch, structured: bool, has_folds: bool) -> Criterion | None:
    """The likelihood of the risk heads alone (None) for a family that has nothing else to be trained by, and with folds where there are any."""
    if wrapped._workbench.says_distributions:
        return nll
    if trained_alone(wrapped) is not None or (
        has_folds and pair_of(wrapped._workbench, unshadowed(wrapped, "methods")) is not None
    ):
        return None
    return default_criterion(wrapped, batch.y, structured)


def _check_that_folds_decide(validation: Any, optimizer: Any, patience: Any) -> None:
    for name, value in (("validation", validation), ("optimizer", optimizer), ("patience", patience)):
        if value is not None:
            raise ValueError(f"{name}: with folds the rows that a voter has not seen decide; leave {name} out")


def _try_first_batch(
    wrapped: Wrapped,
    train: Source,
    valid: Source | None,
    criterion: Criterion | None,
    like: Tensor,
    seed: int,
    scaled: bool,
    augment: Sequence[Augmentation],
    class_weight: Weights | Mapping[str, Weights] | None,
) -> tuple[Batch, bool, dict[Key, torch.dtype], LossByMeaning | None, bool]:
    """A first batch, which the model is tried with, and what it shows.

    Returns:
        The batch, whether the prediction can be trained, which inputs the model wants as floating-point, the loss with class weights, and
        whether the prediction is a structure of tensors.
    """
    with own_random(seed, like.device):
        first = next(iter(Batches(train, 32, like.device, like.dtype)), None)
        if first is None:
            raise ValueError("data: the DataLoader gives no batch")
        in_memory = [source for source in (train, valid) if isinstance(source, TensorRows)]
        if augment:
            if valid is not None:  # whose rows are not changed
                try_batch(wrapped, first, criterion, in_memory, scaled)
            first = changed(first, augment, torch.Generator().manual_seed(seed))
        learns, converted, prediction = try_batch(wrapped, first, criterion, in_memory, scaled)
        if learns and not scaled and not isinstance(train, TensorRows):
            tell_of_batch(wrapped, first, prediction, criterion)
        weighted = None
        if class_weight is not None:
            weighted = weighted_criterion(wrapped, class_weight, prediction, first.y, train)
        return first, learns, converted, weighted, not isinstance(prediction, Tensor)


def _check_combination(folds: Any, changes: Any, class_weight: Any, criterion: Any, strategy: Any) -> None:
    if folds is not None and (changes or class_weight is not None):
        name = "augment" if changes else "class_weight"
        raise ValueError(f"{name}: cross-fitting trains and decides on the rows as they are; leave {name} or folds out")
    if class_weight is not None and criterion is not None:
        raise ValueError("class_weight is of the default criterion; give your own the weights, or leave it out")
    if class_weight is not None and strategy is not None:
        raise ValueError(
            "class_weight: with strategy each process takes the weighted mean of its own rows, and the mean of those is another number; leave "
            "class_weight out, or train in one process"
        )


def _describe_change(augmentation: Augmentation) -> str:
    return repr(augmentation) if is_dataclass(augmentation) else describe(augmentation)


def _describe_weights(loss: LossByMeaning) -> str:
    return str({name: weights.tolist() for name, weights in (loss.class_weight or {}).items()})


def _describe_optimizer(optimizer: Optimizer, has_schedule: bool) -> str:
    """Its settings; however its steps are computed, it is the same training: checkpoints of another way go on."""
    settings = {**optimizer.defaults, "fused": None} if has_schedule else optimizer.defaults
    groups = ", biases and norms not decayed" if has_schedule and len(optimizer.param_groups) > 1 else ""
    return f"{type(optimizer).__name__}{sorted(settings.items())}, schedule {has_schedule}{groups}"


def _reset(
    wrapped: Wrapped, scaling: dict[str, Any] | None, train: Source, device: torch.device, dtype: torch.dtype
) -> None:
    """Set the standardization, and forget what an earlier training found out about other weights."""
    seat(wrapped, None)
    if scaling is not None:
        unshadowed(wrapped, "unscale")()
    if scaling:
        unshadowed(wrapped, "scale")(**place(scaling, device, dtype))
        tell_of_bytes(wrapped, scaling)
    wrapped._workbench.rows = len(train) if isinstance(train, TensorRows) else None
