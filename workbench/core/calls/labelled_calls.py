"""Training calls of models that compute a loss from `labels`, as the Trainer of transformers makes them: they train risk heads too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...engine.tree import flatten, is_float, names
from ..additions import extra
from ..batches.call_arguments import positional_names
from ..batches.own_loss import LABELS, OTHERS, Pairing, pairing_of, refuse_others
from ..method import Call, Method
from ..outputs.meanings import IGNORED
from ..single_warnings import warn_once
from . import predict as calling
from .feedback import mark_means
from .risks import reduced
from .training_losses import loss_of_branches

ITEMS = "num_items_in_batch"  # of all batches of one step; transformers divides the summed loss by it


def predict(wrapped: Any, args: tuple, kwargs: dict[str, Any], return_risk: bool, tile_and_reduce: bool | None) -> Any:
    """Return the result of `calls.predict.predict`; if the model computes its own training loss, the likelihood of its risk heads is added.

    Otherwise nothing would train the heads, since the model's own loss does not depend on them.
    """
    heads = _heads(wrapped) if wrapped.training and not return_risk and tile_and_reduce is not False else None
    if heads is None or not torch.is_grad_enabled():
        return calling.predict(wrapped, args, kwargs, return_risk, tile_and_reduce)
    compiling = torch.compiler.is_dynamo_compiling()  # Dynamo cannot read the names of a function's parameters
    named = kwargs if compiling else {**dict(zip(positional_names(wrapped), args, strict=False)), **kwargs}
    if not any(isinstance(named.get(name), Tensor) for name in (LABELS, *OTHERS)):
        return calling.predict(wrapped, args, kwargs, return_risk, tile_and_reduce)
    if compiling:  # the kind of labels is determined from their values
        from ...engine.executors import graph_break

        return graph_break.outside(predict, wrapped, args, kwargs, return_risk, tile_and_reduce)
    batch = {name: value for name, value in named.items() if isinstance(value, Tensor) and name != ITEMS}
    pairing = _pairing(wrapped, batch)
    if isinstance(pairing, str):
        y = calling.predict(wrapped, args, kwargs, return_risk, tile_and_reduce)
        if _loss_among(y) is not None:  # otherwise labels are an ordinary input
            warn_once(wrapped, "labels", _NOT_TRAINED.format(heads.name, pairing))
        return y
    plan = calling.plan_of(wrapped, Call(wrapped.training, True, loss=True))
    branched, _ = calling.run(wrapped, plan, args, kwargs)
    y, _ = reduced(wrapped, branched, False, None)
    mark_means(wrapped, plan, y)
    x, target = pairing.pair(batch)
    likelihood = loss_of_branches(wrapped, branched, None, (), x, target)
    if (items := kwargs.get(ITEMS)) is not None:
        likelihood = likelihood * ((target != IGNORED).sum() / items)
    leaves, rebuild = flatten(y)
    at = _loss_among(y)
    leaves[at] = leaves[at] + likelihood.to(leaves[at].dtype)
    return rebuild(leaves)


_NOT_TRAINED = (
    "{0}: the loss that the model computes from its labels does not train the risk heads, which keep their initial values, and the targets of "
    "the heads cannot be derived from it. Train by wrapped.loss(criterion, x, y), or leave {0} out. {1}"
)


def _heads(wrapped: Any) -> Method | None:
    """Return the method with auxiliary heads, which are trained by their likelihood, None if there is none."""
    for method in wrapped._workbench.methods:
        axis = method.axis(Call(True, True))
        if axis is not None and axis.own_first:
            return method
    return None


def _pairing(wrapped: Any, batch: Mapping[str, Any]) -> Pairing | str:
    """Return how labels become targets of the heads, or the reason why this is unknown."""
    pairings, labels = wrapped.__dict__["_engine"].pairings, batch.get(LABELS)
    kind = None if labels is None else (labels.dim(), labels.is_floating_point())
    if kind not in pairings:
        try:
            refuse_others(batch)
            if extra(wrapped, "scaling") is not None:
                raise ValueError(
                    "The model computes in standardized units, and its labels are in original units (wrapped.unscale())"
                )
            with torch.autocast(batch[LABELS].device.type, enabled=False):
                pairings[kind] = pairing_of(wrapped, batch)
        except ValueError as error:
            pairings[kind] = str(error)
    return pairings[kind]


def _loss_among(y: Any) -> Any:
    """Return the leaf index of the loss in a model's output, None if there is none."""
    leaves, paths = flatten(y)[0], names(y)
    numbers = [i for i, leaf in enumerate(leaves) if is_float(leaf) and leaf.dim() == 0]
    return next((i for i in numbers if paths[i] == "loss"), numbers[0] if numbers else None)


__all__ = ["predict"]
