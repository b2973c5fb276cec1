"""Training losses of a wrapped object: of all models at once, of one model, and the terms that methods add."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...engine.combine import Ragged
from ...engine.run import Branched
from ...engine.state import BranchedState
from ...engine.tree import children, is_float, names, tensors
from ..additions import extra
from ..batches.row_weights import weighed
from ..joint_loss import joined
from ..method import Call, split_heads
from ..outputs.meanings import Values
from ..outputs.resolution import resolve, targets_of
from ..outputs.slips import listening, refuse_class_numbers, warn_unsaid
from ..outputs.transformed_losses import refuse_transformed
from ..ownership import engine_of, table_of
from .predict import plan_of, run
from .risks import pair_of, refuse_without_numbers


def loss(
    wrapped: Any, criterion: Callable[[Any, Any], Tensor] | None, args: tuple, kwargs: dict[str, Any], y: Any
) -> Tensor:
    """See `Wrapped.loss`."""
    check_criterion(criterion)
    if (scaling := extra(wrapped, "scaling")) is not None:
        (args, kwargs), y = scaling.inputs(args, kwargs), scaling.targets(y)
    branched, _ = run(wrapped, plan_of(wrapped, Call(wrapped.training, True, loss=True)), args, kwargs)
    return loss_of_branches(wrapped, branched, criterion, args, kwargs, y)


def loss_of_branches(
    wrapped: Any,
    branched: Branched,
    criterion: Callable[[Any, Any], Tensor] | None,
    args: tuple,
    kwargs: dict[str, Any],
    y: Any,
) -> Tensor:
    """Return the loss of the outputs of all branches for these inputs; see `Wrapped.loss`."""
    together = False
    if not torch.compiler.is_compiling():  # compiled separate calls are as fast, and Dynamo cannot trace these checks
        dispatcher = engine_of(wrapped).dispatcher
        together = dispatcher.in_one_pass or dispatcher.is_little(tensors((args, kwargs)))
    losses = losses_of_models(wrapped, branched, criterion, args, kwargs, y, together)
    total = losses.mean() if losses.dim() else losses
    record = wrapped._workbench
    for method in record.methods:
        if (term := method.regularizer(table_of(wrapped), record.rows)) is not None:
            total = total + term
    return total


def losses_of_models(
    wrapped: Any,
    branched: Branched,
    criterion: Callable[[Any, Any], Tensor] | None,
    args: tuple,
    kwargs: dict[str, Any],
    y: Any,
    together: bool = False,
    first: int = 0,
) -> Tensor:
    """Return the losses [models], whose mean is the loss without regularizers.

    Args:
        wrapped: the wrapped object.
        branched: outputs of the branches of some models.
        criterion, args, kwargs, y: as for `loss`.
        together: whether one call of the criterion may give the mean [] instead.
        first: position of the first of these models along the outermost axis.
    """
    record, axes = wrapped._workbench, branched.axes
    if not any(isinstance(leaf, Tensor | Ragged) for leaf in branched.leaves):
        refuse_without_numbers(branched.rebuild(branched.leaves), branched.leaves)
    if criterion is not None:
        refuse_transformed(wrapped, criterion, axes)
    pair = pair_of(record, axes)
    refuse_class_numbers(wrapped, pair, y, branched.leaves, len(axes))
    warn_unsaid(wrapped, criterion, y, branched.leaves, len(axes))
    leaves = weighed(wrapped, axes, branched.leaves, (args, kwargs), y, first)
    if pair is None and criterion is None:
        raise ValueError(
            "criterion: without sculpt there is no likelihood to train by; give criterion(prediction, target)"
        )
    if pair is not None and axes[-1] != pair.name:
        raise RuntimeError(
            f"{pair.name} has an axis with own_first, which must be the innermost one (its `order` the highest)"
        )
    sizes = branched.sizes()
    models = sizes[:-1] if pair is not None else sizes
    joint = joined(record, models, leaves, criterion, y, pair) if together else None
    # wrapped after `joined`, which would not recognize the wrapped criterion
    criterion = listening(wrapped, criterion, y)
    if joint is not None:
        rows, targets = joint
        return loss_of_model(record, branched.rebuild, [rows], criterion, targets, pair)
    losses = _losses(record, branched.rebuild, models, leaves, criterion, y, pair)
    if record.losses is not None:
        record.losses.append((dict(zip(axes, models, strict=False)), losses.detach()))
    return losses


def _losses(
    record: Any,
    rebuild: Callable[[list[Any]], Any],
    models: Sequence[int],
    leaves: Sequence[Any],
    criterion: Any,
    y: Any,
    pair: Any,
) -> Tensor:
    """Return the losses of all models, in their order."""
    answers = [_of_models(leaf, models) for leaf in leaves]
    terms = [
        loss_of_model(record, rebuild, [of_leaf[k] for of_leaf in answers], criterion, y, pair)
        for k in range(math.prod(models))
    ]
    return torch.stack(terms)


def _of_models(leaf: Any, models: Sequence[int]) -> Sequence[Any]:
    """Split a leaf [*models, ...] into one leaf per model.

    By one `unbind`, since the backward pass of a `select` per model would fill a tensor as large as those of all models.
    """
    if isinstance(leaf, Ragged):
        return leaf.items
    if not isinstance(leaf, Tensor):
        return [leaf] * math.prod(models)
    # cloned, since a criterion may write into its arguments and torch forbids writes into views of unbind
    return [answer.clone() for answer in leaf.reshape(math.prod(models), *leaf.shape[len(models) :]).unbind(0)]


def loss_of_model(
    record: Any, rebuild: Callable[[list[Any]], Any], leaves: list[Any], criterion: Any, y: Any, pair: Any
) -> Tensor:
    """Return the training loss of one model: the criterion plus the negative log-likelihood of its risk heads.

    Args:
        record: the record of the wrapping.
        rebuild: function from leaves to an output of the model's structure.
        leaves: leaves of the output, with the axis of the heads in front if there is a pair.
        criterion: `criterion(prediction, target)`, None for the likelihood alone.
        y: the target.
        pair: the method of the risk heads, None if there is none.
    """
    if pair is None:
        return _tensor_of(criterion(rebuild(leaves), y))
    if y is None:
        raise ValueError(
            f"{pair.name}: the risk heads are trained by the likelihood of a target, and y is None: give the target of the output that has a "
            "risk (for an autoencoder the input), as in wrapped.loss(criterion, x, y), and compute the rest of the loss in the criterion"
        )
    split = [split_heads(leaf, 0) if is_float(leaf) else (leaf, leaf) for leaf in leaves]
    predictions = [leaf[0] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    prediction = rebuild(predictions)
    tree_names = names(prediction)
    meanings = resolve(record.output, lambda: tree_names, predictions, 0)
    same_structure = children(y) is not None or children(prediction) is None  # otherwise y is the target of one output
    all_values = same_structure and all(meaning is None or isinstance(meaning, Values) for meaning in meanings)
    if all_values and not any(isinstance(leaf, BranchedState) for leaf in leaves):
        likelihood = pair.likelihood(y, prediction, rebuild([heads for _, heads in split]))
    else:
        targets = targets_of(y, tree_names, meanings)
        if all(target is None for target in targets):
            raise ValueError(
                f"{pair.name}: y holds a target for none of the outputs, and nothing would train the risk heads; the outputs are "
                f"{', '.join(map(repr, tree_names))}"
            )
        terms = [
            pair.likelihood(target, *pairs, meaning)
            for target, pairs, meaning in zip(targets, split, meanings, strict=True)
            if target is not None
        ]
        likelihood = torch.stack(terms).mean()
    if criterion is None:
        return likelihood
    scored = [
        pair.prediction(*heads) if isinstance(meaning, Values) else leaf
        for heads, meaning, leaf in zip(split, meanings, predictions, strict=True)
    ]
    return _tensor_of(criterion(rebuild(scored), y)) + likelihood


def check_criterion(criterion: Any) -> None:
    """Raise TypeError if a criterion is no function of prediction and target, or a class of losses instead of an object of it."""
    if isinstance(criterion, type) and issubclass(criterion, nn.Module):
        raise TypeError(
            f"criterion: found the class {criterion.__name__}; give an object of it, {criterion.__name__}()"
        )
    if criterion is not None and not callable(criterion):
        code = f"a {type(criterion).__name__}" if isinstance(criterion, Tensor) else f"{criterion!r:.100}"
        raise TypeError(
            f"criterion: found {code}; give a function of prediction and target, as in wrapped.loss(nn.MSELoss(), x, y)"
        )


def _tensor_of(loss: Any) -> Tensor:
    """Return the loss; a number would add to the likelihood without a gradient."""
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"criterion: it returned {type(loss).__name__}; it must return the loss as a tensor, without .item()"
        )
    return loss
