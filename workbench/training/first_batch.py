"""What `fit` learns from a first batch before it changes anything: whether the model can be trained on the rows, and by which loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workbench.core.batches.rows import Batch, Source, TensorRows
from workbench.core.calls.bounded_ends import warn_of_bounded_end
from workbench.core.calls.risks import pair_of
from workbench.core.outputs.meanings import IGNORED
from workbench.core.outputs.returned_distributions import nll
from workbench.core.standardize import Key
from workbench.core.wrapped import Wrapped
from workbench.engine.effects.private_random import own_random
from workbench.engine.tree import flatten, map_tensors, names
from workbench.training.augmentation import Augmentation, augmented
from workbench.training.batches import Batches
from workbench.training.checks import sole_likelihood, try_batch
from workbench.training.class_weights import Weights, weighted_criterion
from workbench.training.default_losses import Criterion, LossByMeaning, default_criterion
from workbench.training.target_range import Limits, Range, limits_of, with_graph
from workbench.training.unit_warnings import warn_about_batch
from workbench.training.unshadowed import unshadowed

ROWS = 32  # of the batch that is tried


class FirstBatch(NamedTuple):
    """A batch, and what the model made of it.

    Attributes:
        batch: the batch.
        trainable: whether the prediction can be trained.
        converted: inputs to convert to floating point, with their dtypes.
        weighted_loss: the loss with class weights, None without.
        prediction: the prediction, without a graph.
        limits: what the model can predict.
    """

    batch: Batch
    trainable: bool
    converted: dict[Key, torch.dtype]
    weighted_loss: LossByMeaning | None
    prediction: Any
    limits: Limits


def try_first_batch(
    wrapped: Wrapped,
    train: Source,
    valid: Source | None,
    criterion: Criterion | None,
    parameter: Tensor,
    seed: int,
    keeps_scaling: bool,
    augment: Sequence[Augmentation],
    class_weight: Weights | Mapping[str, Weights] | None,
    batch_size: int | None,
) -> FirstBatch:
    """Try the model on a first batch, and warn of what its prediction shows.

    Args:
        wrapped: the model.
        train, valid: training rows, and validation rows, None if there are none.
        criterion: the loss that was given, None for the default.
        parameter: a parameter, for device and dtype.
        seed: seed of what the model and the augmentations draw.
        keeps_scaling: whether the units of an earlier training stay.
        augment: changes of the training rows.
        class_weight: weights of classes, None for none.
        batch_size: number of rows per step, which may be all that fit into memory; None: not given.

    Raises:
        TypeError, ValueError: the model or the criterion cannot take the batch.
    """
    with own_random(seed, parameter.device):
        rows = min(ROWS, batch_size or ROWS)
        batch = next(iter(Batches(train, rows, parameter.device, parameter.dtype)), None)
        if batch is None:
            raise ValueError("data: the DataLoader yields no batch")
        in_memory = [source for source in (train, valid) if isinstance(source, TensorRows)]
        if augment:
            if valid is not None:  # validation rows are not augmented
                try_batch(wrapped, batch, criterion, in_memory, keeps_scaling)
            batch = augmented(batch, augment, torch.Generator().manual_seed(seed))
        trainable, converted, prediction = try_batch(wrapped, batch, criterion, in_memory, keeps_scaling)
        if trainable and not keeps_scaling and not isinstance(train, TensorRows):
            warn_about_batch(wrapped, batch, prediction, criterion)
        leaves = flatten(prediction)[0]
        warn_of_bounded_end(wrapped, leaves, lambda: names(prediction), 0, unshadowed(wrapped, "methods"))
        weighted_loss = None
        if class_weight is not None:
            weighted_loss = weighted_criterion(wrapped, class_weight, prediction, batch.y, train)
        limits = limits_of(leaves, batch.y)
        if max(limits.ranges) != Range.FREE:
            probe = Batch(batch.numbers, with_graph(batch.x), batch.y)
            with suppress(RuntimeError):  # of models that do not take inputs with a graph
                leaves = flatten(try_batch(wrapped, probe, criterion, in_memory, keeps_scaling)[2])[0]
                limits = limits_of(leaves, batch.y)
        return FirstBatch(
            batch, trainable, converted, weighted_loss, map_tensors(lambda t: t.detach(), prediction), limits
        )


def criterion_of(wrapped: Wrapped, rows: Sequence[Any], structured: bool, has_folds: bool) -> Criterion | None:
    """Return the default loss; None (the likelihood of the risk heads) if the family has no other, or with folds if it trains the prediction.

    Args:
        wrapped: the model.
        rows: the first batch, and all rows, those in memory of which are searched for class numbers of -100.
        structured: whether the prediction is a structure of tensors.
        has_folds: whether the model is cross-fitted.
    """
    if wrapped._workbench.says_distributions:
        return nll
    pair = pair_of(wrapped._workbench, unshadowed(wrapped, "methods"))
    suffices = pair is not None and getattr(pair.distribution, "trains_prediction", True)
    if sole_likelihood(wrapped) is not None or (has_folds and suffices):
        return None
    targets = [part.y for part in rows if isinstance(part, Batch | TensorRows)]
    unlabelled = any(isinstance(y, Tensor) and bool((y == IGNORED).any()) for y in targets)
    return default_criterion(wrapped, targets[0], structured, unlabelled)


__all__ = ["FirstBatch", "criterion_of", "try_first_batch"]
