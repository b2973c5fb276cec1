"""Batch norms that take their statistics from inputs of another place."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from workbench.calibration.base import batches_of_rows, check_model, innermost
from workbench.core.batches.call_arguments import opened
from workbench.core.batches.graphs import is_graph
from workbench.core.batches.labelled import paired
from workbench.core.method import evaluating
from workbench.engine.effects.private_random import own_random
from workbench.engine.tree import flatten, tensors

Model = TypeVar("Model", bound=nn.Module)


def adapt_batch_norm(model: Model, inputs: Any, *, prior: float = 0, batch_size: int = 1024, seed: int = 0) -> Model:
    """A copy of a model whose batch norms have the statistics of these inputs, which need no targets (AdaBN; Li et al. 2017).

    Mean and variance of every batch norm become

        (prior * old + n * new) / (prior + n),

    with those of the n given rows as the new ones (Schneider et al. 2020), averaged over batches; every voter has its own. Blur, contrast and
    light move these statistics, and a network that is given the right ones is often as good as it can be there without training. Scores of
    another place are then like those of held-out rows only if the model was calibrated in the same way: adapt it to the inputs of the held-out
    rows, calibrate, and adapt what is calibrated to those of the new place.

    Args:
        model: what a wrapper made of a model, or a calibrated model; it stays as it is.
        inputs: of the place, tensor [n, ...], or as `calibrate` takes them; as many as can be had, of all classes as they occur.
        prior: how many rows (of graphs: nodes) the statistics of the training count as.
        batch_size: rows asked for at once; a DataLoader has its own. A last row that is left alone has no variance, and does not count.
        seed: of random draws on the way; the global random state is left alone.

    Raises:
        TypeError: the model is not wrapped, or inputs is something else.
        ValueError: no batch norm has statistics, prior is negative, or there is no row.

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
    if not prior >= 0:
        raise ValueError(f"prior must be 0 or more rows; found {prior!r}")
    adapted = copy.deepcopy(model)
    norms = [m for m in adapted.modules() if isinstance(m, _BatchNorm) and isinstance(m.running_mean, Tensor)]
    if not norms:
        raise ValueError("the model has no batch norm with running statistics, and nothing else is adapted")
    momenta = [norm.momentum for norm in norms]
    like = next((p for p in adapted.parameters() if p.is_floating_point()), torch.empty(0))
    wrapped, rows, largest = innermost(adapted), 0, 0
    with own_random(seed, like.device), torch.no_grad(), evaluating(adapted, whole=True):
        for batch in batches_of_rows(paired(wrapped, inputs, targets=False), like, batch_size, targets=False):
            args, kwargs = opened(wrapped, batch.x)
            count = _rows_in((args, kwargs))
            if not count or count == 1 < largest:
                continue
            rows, largest = rows + count, max(largest, count)
            for norm in norms:
                # the running mean over all rows so far
                norm.momentum, norm.training = count / (prior + rows), True
            wrapped(*args, **kwargs)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum, norm.training = momentum, False
    if not rows:
        raise ValueError("inputs: there is no row")
    return adapted


def _rows_in(inputs: Any) -> int:
    graphs = [leaf for leaf in flatten(inputs)[0] if is_graph(leaf)]
    return int(graphs[0].num_nodes) if graphs else len(next(leaf for leaf in tensors(inputs) if leaf.dim()))


__all__ = ["adapt_batch_norm"]
