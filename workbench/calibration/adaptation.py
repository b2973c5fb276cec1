"""Adaptation of batch norm statistics to inputs from another source."""

from __future__ import annotations

import copy
import math
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from workbench.calibration.models import check_model, innermost
from workbench.calibration.rows import batches_of_rows
from workbench.core.batches.call_arguments import answering, as_arguments
from workbench.core.batches.graphs import is_graph
from workbench.core.batches.labelled import paired
from workbench.core.batches.rows import first_weight
from workbench.core.method import evaluating
from workbench.engine.effects.private_random import own_random
from workbench.engine.tree import flatten, tensors
from workbench.errors import as_count

Model = TypeVar("Model", bound=nn.Module)


def adapt_batch_norm(model: Model, inputs: Any, *, prior: float = 0, batch_size: int = 1024, seed: int = 0) -> Model:
    """Return a copy of a model whose batch norms have the statistics of these inputs, which need no targets (AdaBN; Li et al. 2017).

    Mean and variance of each batch norm become

        (prior * old + n * new) / (prior + n),

    where the new statistics are those of the n given rows, averaged over batches (Schneider et al. 2020); each voter has its own. Blur, contrast
    and brightness shift these statistics, and with the right ones a network is often as good as it can be without training. Scores of
    new rows are then like those of held-out rows only if the model was calibrated in the same way: adapt it to the held-out inputs,
    calibrate it, and adapt the calibrated model to the new inputs.

    Args:
        model: a model wrapped by one of the wrappers, or a calibrated model; it is not changed.
        inputs: inputs from the new source, tensor [n, ...], or as for `calibrate`; as many as possible, with the classes as they occur.
        prior: number of rows (for graphs: nodes) that the statistics of the training count as.
        batch_size: rows per call of the model; a DataLoader has its own batch size. A last batch of one row has no variance, and is ignored.
        seed: seed of the model's random draws; the global random state is not touched.

    Raises:
        TypeError: the model is not wrapped, or inputs is something else.
        ValueError: no batch norm has running statistics, prior is negative, or there are no rows.

    Example:
        >>> from workbench import calibrate, vote
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        >>> wrapped = vote.Wrapper(3, output="logits")(net)
        >>> held_out, new = (torch.randn(99, 2), torch.arange(99) % 3), 0.2 * torch.randn(500, 2)
        >>> here = calibrate(adapt_batch_norm(wrapped, held_out[0]), held_out, "conformal", score="lac")
        >>> there = adapt_batch_norm(here, new)
        >>> there.predict_set(new, coverage=0.9).shape
        torch.Size([500, 3])
    """
    check_model(model)
    if not hasattr(prior, "__float__") or not 0 <= prior < math.inf:
        raise ValueError(f"prior must be 0 or more rows; found {prior!r}")
    batch_size = as_count("batch_size", batch_size)
    adapted = copy.deepcopy(model)
    norms = [m for m in adapted.modules() if isinstance(m, _BatchNorm) and isinstance(m.running_mean, Tensor)]
    if not norms:
        raise ValueError("the model has no batch norm with running statistics, and nothing else is adapted")
    momenta = [norm.momentum for norm in norms]
    parameter = first_weight(adapted)
    wrapped, rows, largest = innermost(adapted), 0, 0
    with own_random(seed, parameter.device), torch.no_grad(), evaluating(adapted, whole=True):
        for batch in batches_of_rows(paired(wrapped, inputs, targets=False), parameter, batch_size, targets=False):
            args, kwargs = as_arguments(wrapped, batch.x)
            count = _rows_in((args, kwargs))
            if not count or count == 1 < largest:
                continue
            rows, largest = rows + count, max(largest, count)
            for norm in norms:
                # momentum that gives the running mean over all rows so far
                norm.momentum, norm.training = count / (prior + rows), True
            answering(wrapped)(*args, **kwargs)
            if not all(buffer.isfinite().all() for norm in norms for buffer in norm.buffers()):
                raise ValueError(
                    f"inputs: NaN or infinite statistics after {rows} rows; drop rows with such numbers, or fill the gaps"
                )
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum, norm.training = momentum, False
    if not rows:
        raise ValueError("inputs: there are no rows")
    return adapted


def _rows_in(inputs: Any) -> int:
    graphs = [leaf for leaf in flatten(inputs)[0] if is_graph(leaf)]
    return int(graphs[0].num_nodes) if graphs else len(next(leaf for leaf in tensors(inputs) if leaf.dim()))


__all__ = ["adapt_batch_norm"]
