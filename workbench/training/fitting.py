"""`fit`: train any wrapped model with one call."""

from __future__ import annotations

import hashlib
import itertools
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from workbench.core.additions import MARK
from workbench.core.batches.arrays import check_index
from workbench.core.batches.labelled import paired
from workbench.core.batches.rows import Source, TensorRows, first_weight, place
from workbench.core.crossfit import seat
from workbench.core.outputs.options import has_detections
from workbench.core.outputs.transformed_losses import refuse_transformed
from workbench.core.refusals import words_of_plain
from workbench.core.saving.savepoint import Savepoint
from workbench.core.saving.training_data import note_training
from workbench.core.sharded import WHOLE, refuse_sharded
from workbench.core.standardize import fits
from workbench.core.wrapped import Wrapped, is_wrapped
from workbench.data import Data
from workbench.data.loading import load
from workbench.data.provenance import facts
from workbench.engine.effects.private_random import own_random
from workbench.errors import as_seed
from workbench.trackers.base import Tracker
from workbench.trackers.delivery import tracker_of
from workbench.training.augmentation import Augmentation, augmentations
from workbench.training.batches import Batches
from workbench.training.checkpoint import Checkpoint
from workbench.training.checks import LR, check_modes, check_numbers, check_objects, sole_likelihood, warn_of_untrained
from workbench.training.class_weights import Weights
from workbench.training.copied_state import copied_state
from workbench.training.ddp import check_agreement, join
from workbench.training.default_losses import Criterion
from workbench.training.defaults import (
    default_batch_size,
    make_optimizer,
    move,
    resolve_device,
)
from workbench.training.described_settings import CODE, checksum, describe_optimizer, described_settings
from workbench.training.epoch_choice import lengths_of
from workbench.training.exclusive import one_at_a_time
from workbench.training.first_batch import criterion_of, try_first_batch
from workbench.training.fold_layout import lay_out, pair_settings
from workbench.training.function_code import fingerprint
from workbench.training.history import History
from workbench.training.named_arguments import naming_arguments
from workbench.training.one_sided_losses import refuse_one_sided
from workbench.training.progress import Callback
from workbench.training.requested_device import on_requested_device
from workbench.training.runs import Run
from workbench.training.standardization import choose_standardization, keeps_standardization, warn_about_bytes
from workbench.training.starting_priors import settle_priors
from workbench.training.starting_values import start_at_targets
from workbench.training.tracking import TrainingLog
from workbench.training.unit_warnings import warn_about_columns
from workbench.training.unshadowed import unshadowed
from workbench.training.validation import read_and_hold_out


@naming_arguments
@one_at_a_time
@torch.inference_mode(False)  # also enables gradients, where a notebook has turned them off
@on_requested_device
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
    folds: int | Tensor | Sequence[Any] | np.ndarray | None = None,
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
    """Train a wrapped model with the loss of its methods, and leave it with its best weights, in eval mode.

    The same seed, data and settings give bitwise equal weights on one machine (on CUDA up to rounding; to the last bit with strategy="eager" and
    as far as the model's own operations are deterministic), and the global random state is not touched. Ctrl-C ends the training early and
    leaves a usable model.

    Args:
        wrapped: a model wrapped by one of the wrappers; `compose()(model)` is the plain baseline.
        data: a workbench Data (its training rows are used) or the name of one, a pair (x, y) of tensors or arrays with x [n, ...] (or a
            tuple of positional or a dict of keyword arguments) and y float [n, outputs] or integer class numbers [n], a
            torch Dataset of pairs (x, y), or a DataLoader, which is used as it is. Rows and batches may be dicts with "labels".
        epochs: number of passes over the rows. With folds, a sequence of increasing numbers such as (100, 300, 900): each is trained from
            scratch, and the next is tried as long as the last one improved the out-of-fold log density by more than its standard error.
            The best is kept; with a checkpoint, each has its own file.
        batch_size: rows per step, at least 2; None: the power of two closest to n / 16, between 32 and 256.
        lr: peak learning rate of Adam (Kingma & Ba 2015), with linear warm-up over the first 5 % of the steps followed by a cosine decay
            to zero (Loshchilov & Hutter 2017). With folds, several rates may be given.
        weight_decay: decoupled weight decay (Loshchilov & Hutter 2019), applied to weights only (`wrapped.parameter_groups`). With folds,
            several values may be given, paired with those of lr.
        criterion: criterion(prediction, target) -> scalar. None: mean squared error for float targets, cross entropy
            for class numbers; with folds, only the likelihood of the risk heads if there are any and it trains the prediction (all but
            `Quantiles`).
        optimizer: optimizer(parameters) -> torch Optimizer, instead of Adam and its schedule. The loss is the mean of those of the voters, so
            that n voters need n times the learning rate of a single model with SGD; Adam does not depend on the scale of gradients.
        validation: rows that select the best epoch and are never trained on: a share of the training rows (stratified for class numbers; the
            latest of a Data of windows), rows in any form that `data` takes, or 0 for none (the last epoch is then the best). None: 0.1, or
            none with folds. If the model has three or more voters that share no trained parameter, each voter is monitored as well: those that
            diverge are reported, and get the weights of their own best epoch.
        folds: cross-fitting, the recommended way to train voters: the number of folds (drawn at random; periods for a Data of windows), or the
            fold of each row [n], a tensor, array or Series of whole numbers or names (for example, to keep groups together). Each voter trains
            without one fold, and its predictions on that fold decide, without further held-out rows, the epoch from which predictions and
            noise are taken (ten averages of the weights are kept), the scale of the noise (a factor) and its tails (Student's t if the
            distribution is Normal), and, where lr or weight_decay name several settings, how much the voters of each setting count. The number
            of voters must be a multiple of folds x settings; with two voters per fold and setting, the spread of an ensemble can be estimated.
            `History.out_of_fold` keeps the predictions, from which `workbench.calibrate(wrapped, history)` makes CV+ intervals.
            Standardization uses all rows.
        patience: number of epochs without a smaller validation loss after which training stops; None never stops early.
        standardize: whether the model works on inputs and targets of mean 0 and standard deviation 1 over the training rows;
            predictions and risks are in original units in any case. Tables get one mean and scale per column, images one
            for all pixels. With several inputs, each floating-point one is standardized separately, except masks (at most two distinct
            values, or infinite ones). Integers are not standardized, but bytes (uint8) that the model does not accept are
            scaled, and booleans are converted to 0 and 1. None: inputs are standardized, and float targets, unless a custom criterion is
            given whose optimum this could change (any but mean squared and mean absolute error). Counts and positive values under a
            class of torch.distributions keep their units; instead, the bias of the last layer is shifted so that predictions start at the mean
            and variance of the targets, if they are off by more than a factor of e. Targets of a model that ends in a function of limited
            range, such as sigmoid, keep their units as well, and with softplus, relu or exp they are only divided; where a model joins columns
            at its end (torch.cat, torch.stack), each by its own end. A model that already has a standardization keeps it, and one whose
            prediction is frozen gets none. The inputs of a model with a module whose
            `standardizes_inputs` is True, such as those of `workbench.models.tabular`, are left as they are. Pass False for a model that
            was trained elsewhere in original units.
        seed: seed of the choice of validation rows, of the order of rows, and of all random draws of torch.
        device: device to train on; None: the model's device; "auto": CUDA if available, else CPU. The model stays there. If the environment
            variable WORKBENCH_DEVICE is set, it replaces None, and the model is moved back after the training.
        dtype: floating-point dtype of model and rows; None: the model's.
        progress: whether to show a progress bar if the training takes more than two seconds.
        checkpoint: file in which the training state is saved, at most every few seconds, after an epoch. If it exists, training resumes from
            it and ends with the weights of an uninterrupted training. Of a Dataset or DataLoader, only the number of rows is
            compared, not their contents; functions are compared by name, code, and the numbers in their closures. If it can't be written
            later on, as when a disk is full, a warning says so, and the training goes on.
        callback: callback(progress), called after each step and each epoch with a `Progress`. If it returns something true, the training
            ends there, as with Ctrl-C but without a warning. It may predict with the model; it does not change the training.
        strategy: None, "eager" or "ddp". "ddp" trains one model in all processes started by torchrun (`torchrun --nproc-per-node=4 train.py`),
            or of the current torch.distributed process group. Every process is given the same model, rows and settings, and takes its share of
            each batch (batch_size counts all of them); gradients are averaged, and the result is the same in every process. With device="auto"
            each process has its own GPU. Only the first process calls the callback and shows the bar. With None, long trainings of small models
            replay their steps from a graph of all branches, wherever this is certain to give equal numbers: on the CPU to the last bit, on CUDA
            up to rounding; "eager" never records such a graph.
        augment: augment(x, y, generator) -> (x, y), or a sequence of such functions applied in order: changes the rows of each training batch,
            in original units, so that an image and its map are transformed together; see `workbench.training.RandomFlip` and `RandomCrop`. All
            draws are determined by the seed, both those of the generator (on the CPU) and those of torch. Validation rows, and the rows from
            which a method is fitted in closed form, are not changed.
        class_weight: weights of the classes in the default criterion: one per class [classes] (for `Binary` [2] for no and yes, or
            [labels, 2]), as in torch's `CrossEntropyLoss(weight=)`, or {class number: weight}; "balanced" for n / (classes * count) over the
            training rows as in scikit-learn (void pixels and tokens are not counted, classes that do not occur have weight 1); or a dict from
            names of outputs to these. The predicted probabilities are then proportional to weight times frequency: they are not calibrated
            on the original rows, which a temperature cannot repair. To undo it, divide the probabilities by the weights and normalize them.
            As in torch, the loss of each batch is divided by the weights of its rows: a class with few rows per batch counts somewhat less.
        log_to: "tensorboard" (in the folder runs), "mlflow" or "wandb", or a `workbench.trackers.Tracker`: logs the settings, the losses and
            learning rate of each epoch, and how the training ended, to the active run, which stays open, or else to a new run, which is
            continued when training resumes from a checkpoint. A failing tracker causes a warning only. Only the first of several processes logs.

    Returns:
        The course of the training, see `History`.

    Raises:
        TypeError: wrapped is not wrapped, or data cannot be trained on.
        ValueError: an argument is out of range, rows hold NaN, shapes do not match, or checkpoint is of another training.
        ModuleNotFoundError: the package of log_to is not installed.
        RuntimeError: another thread, or the fit whose callback this is, trains the model or one that shares parameters with it.
        FloatingPointError: the loss became NaN or infinite; the model has the best weights so far.

    Example:
        >>> from workbench import sculpt
        >>> x = torch.linspace(0, 1, 64)[:, None]
        >>> wrapped = sculpt.Wrapper()(nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)))
        >>> history = fit(wrapped, (x, 1000 * x), epochs=5)
        >>> y, risk = wrapped(x, return_risk=True)
    """
    wrapped = _checked(wrapped)
    check_modes(wrapped)
    refuse_sharded(wrapped, WHOLE)
    _refuse_detector(wrapped, criterion, folds)
    refuse_transformed(wrapped, criterion, unshadowed(wrapped, "methods"), folds is not None)
    transforms = augmentations(augment)
    parallel = None if strategy == "eager" else strategy
    _check_combination(folds, transforms, class_weight, criterion, parallel)
    rates, decays = pair_settings(lr, weight_decay, folds)
    lengths = lengths_of(epochs, folds)
    for length, rate, decay in itertools.product(lengths, rates, decays):
        check_numbers(length, batch_size, rate, decay, optimizer, patience, dtype)
    check_objects(standardize, criterion, callback, checkpoint)
    seed = as_seed(seed)
    batch_size = None if batch_size is None else operator.index(batch_size)
    tracker = None if log_to is None else tracker_of(log_to)
    if folds is not None:
        _check_folds(wrapped, data, folds, validation, optimizer, patience)
        validation = 0
    if parallel is not None:
        device = join(parallel, folds, device)

    if isinstance(data, str):
        data = load(data)
    rows = paired(wrapped, data, mask="train_mask")
    validation_rows = 0.1 if validation is None else paired(wrapped, validation, mask="val_mask")
    train, valid = read_and_hold_out(rows, validation_rows, batch_size, seed)
    in_time = isinstance(data, Data) and data.horizon is not None
    fold_layout = None if folds is None else lay_out(wrapped, train, folds, len(rates), seed, in_time)
    if patience is not None and valid is None:
        raise ValueError("patience: there are no validation rows to decide when to stop; give validation=0.1")
    data_facts = facts(data, train, valid)

    parameter = first_weight(wrapped)
    keeps_scaling = keeps_standardization(wrapped, standardize)
    with Savepoint(wrapped):  # ends before the training, which keeps its own copies of the state
        first = try_first_batch(
            wrapped, train, valid, criterion, parameter, seed, keeps_scaling, transforms, class_weight, batch_size
        )
        if folds is not None and not isinstance(first.prediction, Tensor):
            raise TypeError(
                f"folds: the model returns a {type(first.prediction).__name__}; cross-fitting needs one tensor of predictions"
            )
        with own_random(seed, parameter.device):
            refuse_one_sided(wrapped, criterion, first.prediction, first.batch.y, has_folds=folds is not None)
        scaling = choose_standardization(
            wrapped, train, criterion, standardize, first.trainable, first.converted, first.limits
        )
        _check_scaling(scaling, first.prediction)
        device, dtype = resolve_device(device, parameter.device), dtype or parameter.dtype
        if not keeps_scaling:
            warn_about_columns(wrapped, train, dtype)
        size = batch_size or default_batch_size(train)
        batches = Batches(train, size, device, dtype, torch.Generator().manual_seed(seed))

        move(wrapped, device, dtype)
        criterion = (
            criterion
            or first.weighted_loss
            or criterion_of(
                wrapped,
                [first.batch, train, valid],
                structured=not isinstance(first.prediction, Tensor),
                has_folds=folds is not None,
            )
        )
        settings = described_settings(
            wrapped,
            criterion,
            transforms,
            first.weighted_loss,
            epochs=epochs,
            batch_size=size,
            patience=patience,
            standardize=standardize,
            seed=seed,
            device=device.type,
            dtype=dtype,
        )
        if checkpoint is not None:
            settings |= {"data": checksum(train), "validation": checksum(valid)}
            settings[CODE] = fingerprint((criterion, *transforms))
        if fold_layout is None:
            resolved_optimizer, scheduler = make_optimizer(wrapped, optimizer, rates[0], decays[0], batches, lengths[0])
            settings["optimizer"] = describe_optimizer(resolved_optimizer, scheduler is not None)
            trained = [p for group in resolved_optimizer.param_groups for p in group["params"]]
        else:
            settings["folds"] = hashlib.sha256(fold_layout[0].numpy().tobytes()).hexdigest()
            settings["optimizer"] = f"StackedAdam, lr {rates}, weight decay {decays}"
            trained = list(wrapped.parameters())
        warn_of_untrained(criterion, trained)
        if parallel is not None:
            check_agreement(train, valid, settings, callback is not None)

        initial_state = copied_state(wrapped)
        _reset(wrapped, scaling, train, device, dtype)
        note_training(wrapped, data_facts, "workbench.fit")
        if first.trainable and not keeps_scaling and standardize is not False:
            start_at_targets(wrapped, train, size, seed)
        settle_priors(wrapped, train)

    checkpoint_file = None if checkpoint is None else Checkpoint(checkpoint, settings)
    log = None
    if tracker is not None:
        logged_settings: dict[str, Any] = {
            **settings,
            "epochs": lengths[0] if len(lengths) == 1 else lengths,
            "batch size": size,
            "seed": seed,
            **({"data": data.name} if isinstance(getattr(data, "name", None), str) else {}),
            **({} if fold_layout is None else {"folds": len(fold_layout[0].unique())}),
            # these settings are of the default optimizer only
            **({} if optimizer else {"lr": lr, "weight decay": weight_decay, "optimizer": "AdamW"}),
        }
        log = callback = TrainingLog(tracker, logged_settings, callback, checkpoint_file)
    run = Run(
        wrapped=wrapped,
        train=train,
        criterion=criterion,
        batch_size=size,
        seed=seed,
        device=device,
        dtype=dtype,
        progress=progress,
        strategy=strategy,
        start=initial_state,
        checkpoint=checkpoint_file,
        callback=callback,
        log=log,
    )
    if fold_layout is not None and isinstance(train, TensorRows):
        return run.train_folds(train, *fold_layout, lengths, rates, decays)
    return run.train_whole(valid, lengths[0], patience, resolved_optimizer, scheduler, batches, transforms)


def _checked(wrapped: Any) -> Wrapped:
    if isinstance(wrapped, Wrapped):
        if (empty := next((name for name, p in wrapped.named_parameters() if p.is_meta), None)) is not None:
            raise ValueError(
                f"wrapped: its parameter {empty.partition(MARK)[0]} is on the device 'meta', which holds no numbers; make the model on another "
                "device, or model.to_empty(device=...) and load its weights, before wrapping it"
            )
        tensors = itertools.chain(wrapped.named_parameters(), wrapped.named_buffers())
        if (fixed := next((name for name, tensor in tensors if tensor.is_inference()), None)) is not None:
            raise ValueError(
                f"wrapped: its {fixed.partition(MARK)[0]} was made inside torch.inference_mode(), and torch can't change it outside; make and "
                "wrap the model outside"
            )
        return wrapped
    if isinstance(wrapped, nn.Module) and not is_wrapped(wrapped):  # which raises for a wrapped Keras model
        raise TypeError(words_of_plain(wrapped))
    raise TypeError(f"wrapped: found {type(wrapped).__name__}; give a wrapped model, such as vote.Wrapper(5)(model)")


def _refuse_detector(wrapped: Wrapped, criterion: Criterion | None, folds: Any) -> None:
    if has_detections(wrapped._workbench.output) and (criterion is None or folds is not None):
        raise ValueError(
            "wrapped: a detector computes its losses itself; train it in your own loop, "
            "sum(wrapped(images, targets).values()).backward(), or give criterion=... without folds"
        )


def _check_folds(wrapped: Wrapped, data: Any, folds: Any, validation: Any, optimizer: Any, patience: Any) -> None:
    if (family := sole_likelihood(wrapped)) is not None:
        raise ValueError(
            f"folds: cross-fitting rescales a standard deviation, and {family} has no such parameter; leave folds out"
        )
    for name, value in (("validation", validation), ("optimizer", optimizer), ("patience", patience)):
        if value is not None:
            raise ValueError(f"{name}: with folds, the rows held out from each voter decide; leave {name} out")
    if isinstance(data, tuple | list) and len(data) == 2:
        check_index(data[0], folds, "folds", ("x", "folds"))


def _check_combination(folds: Any, transforms: Any, class_weight: Any, criterion: Any, strategy: Any) -> None:
    if folds is not None and (transforms or class_weight is not None):
        name = "augment" if transforms else "class_weight"
        raise ValueError(
            f"{name}: cross-fitting trains on rows without augmentation or class weights; leave {name} or folds out"
        )
    if class_weight is not None and criterion is not None:
        raise ValueError(
            "class_weight applies to the default criterion only; put the weights into your own criterion, or leave class_weight out"
        )
    if class_weight is not None and strategy is not None:
        raise ValueError(
            "class_weight: with strategy each process takes the weighted mean of its own rows, and the mean of these is not the weighted mean "
            "of the batch; leave class_weight out, or train in one process"
        )


def _check_scaling(scaling: dict[str, Any] | None, prediction: Any) -> None:
    moments = (scaling or {}).get("y_mean")
    if moments is not None and isinstance(prediction, Tensor) and not fits(moments, prediction):
        raise ValueError(
            f"standardize: each of the {len(moments)} columns of y gets its own mean and scale, and the model gives "
            f"{list(prediction.shape)}, which they do not fit. Leave standardize out, and standardize x and y yourself"
        )


def _reset(
    wrapped: Wrapped, scaling: dict[str, Any] | None, train: Source, device: torch.device, dtype: torch.dtype
) -> None:
    """Set the standardization, and discard what an earlier training decided about other weights."""
    seat(wrapped, None)
    if scaling is not None:
        unshadowed(wrapped, "unscale")()
    if scaling:
        unshadowed(wrapped, "scale")(**place(scaling, device, dtype))
        warn_about_bytes(wrapped, scaling)
    wrapped._workbench.rows = len(train) if isinstance(train, TensorRows) else None
