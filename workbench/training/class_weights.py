"""Weights of classes for the losses of `fit`: given, or balanced by how often each class occurs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from workbench.core.batches.rows import Source, TensorRows, rows_loader, split_batch, with_class_numbers
from workbench.core.calls.risks import pair_of
from workbench.core.outputs.class_scores import Binary, Classes
from workbench.core.outputs.meanings import IGNORED
from workbench.core.outputs.options import form_of
from workbench.core.wrapped import Wrapped
from workbench.training.default_losses import LossByMeaning
from workbench.training.unshadowed import unshadowed

Weights = Literal["balanced"] | Tensor | Sequence[float] | Mapping[int, float]
PIECE = 64  # rows that are counted at once


def weighted_criterion(
    wrapped: Wrapped, class_weight: Weights | Mapping[str, Weights], prediction: Any, y: Any, train: Source
) -> LossByMeaning:
    """The default loss with weights for classes.

    Args:
        wrapped: the model.
        class_weight: as `fit` takes it.
        prediction, y: of a batch.
        train: the rows that are counted for "balanced".

    Raises:
        ValueError: no output has classes, the weights do not fit those that have, or a method has a likelihood of its own.
    """
    _check_methods(wrapped)
    output = wrapped._workbench.output
    if output is None and isinstance(y, Tensor) and not y.is_floating_point() and y.dim() == 1:
        output = "logits"
    loss = LossByMeaning(output)
    classes = {
        name: (meaning, scores)
        for name, meaning, scores, _ in loss.matched(prediction, y)
        if isinstance(meaning, Classes)
    }
    if not classes:
        raise ValueError(
            f'class_weight: the model gives {form_of(output)}, which have no classes; leave it out, or say output="logits" where it is wrapped'
        )
    given: Any = class_weight
    if _is_by_class(given) or not isinstance(given, Mapping):
        if len(classes) > 1:
            raise ValueError(
                f"class_weight: the outputs {', '.join(map(repr, classes))} have classes; give a dict from some of them to their weights"
            )
        given = {next(iter(classes)): given}
    weights = {}
    for name, weight in ((name, _of_classes(weight, name)) for name, weight in given.items()):
        if name not in classes:
            raise ValueError(
                f"class_weight: {name!r} is no output with classes and targets; those are {', '.join(map(repr, classes))}"
            )
        meaning, scores = classes[name]
        shape = [meaning.log_scores(scores).shape[-1]]
        labels = scores.shape[1] if isinstance(meaning, Binary) and scores.dim() == 2 else 1
        if isinstance(weight, str) and weight == "balanced":
            weights[name] = balanced(_counts(loss, prediction, name, train, [labels, *shape] if labels > 1 else shape))
        else:
            allowed = [shape, [labels, *shape]] if labels > 1 else [shape]
            weights[name] = _checked(weight, f"class_weight[{name!r}]" if name else "class_weight", allowed)
    weighted = LossByMeaning(output, weights)
    weighted(prediction, y)
    return weighted


def _is_by_class(weight: Any) -> bool:
    """Whether a dict goes from class numbers to weights, as those of scikit-learn and Keras do."""
    return isinstance(weight, Mapping) and bool(weight) and all(isinstance(key, int | np.integer) for key in weight)


def _of_classes(weight: Any, name: str) -> Any:
    """Weights in the order of the classes, of a dict or Series from class numbers to weights; anything else as it is."""
    if hasattr(weight, "iloc") and hasattr(weight, "to_dict"):
        weight = weight.to_dict()
    if not isinstance(weight, Mapping):
        return weight
    if not _is_by_class(weight) or sorted(map(int, weight)) != list(range(len(weight))):
        what = f"class_weight[{name!r}]" if name else "class_weight"
        raise ValueError(
            f"{what} has the classes {', '.join(map(repr, weight))}; give a weight for each class by its number, {{0: 1.0, 1: 5.0}}"
        )
    return [weight[number] for number in range(len(weight))]


def balanced(counts: Tensor) -> Tensor:
    """The weights n / (classes * count), as scikit-learn's "balanced" (King & Zeng 2001); classes that do not occur have 1 and are not counted.

    Args:
        counts: [..., classes].

    Example:
        >>> balanced(torch.tensor([6.0, 2.0, 0.0]))
        tensor([0.6667, 2.0000, 1.0000], dtype=torch.float64)
    """
    counts = counts.double()
    occur = counts > 0
    weights = counts.sum(-1, keepdim=True) / (occur.sum(-1, keepdim=True) * counts)
    return weights.where(occur, 1.0)


def _check_methods(wrapped: Wrapped) -> None:
    """Raise where a method learns from the classes by a likelihood of its own, which has no weights."""
    record = wrapped._workbench
    pair = pair_of(record, unshadowed(wrapped, "methods"))
    fitted = (
        method
        for method in record.methods
        if method.needs_fit and not (method.own_pass or method.collects or method.refines)
    )
    if (method := pair or next(fitted, None)) is not None:
        raise ValueError(
            f"class_weight: {method.name} learns from the classes by a likelihood of its own, which has no weights; leave class_weight out, or "
            f"wrap without {method.name}"
        )
    if record.says_distributions:
        raise ValueError("class_weight: the model says distributions and is trained by their likelihood; leave it out")


def _checked(weight: Any, what: str, allowed: list[list[int]]) -> Tensor:
    """Weights that fit, float64."""
    if isinstance(weight, str):
        raise ValueError(f'{what} must be "balanced" or a weight for each class, not {weight!r}')
    try:
        weights = torch.as_tensor(weight).detach().double().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f'{what}: found {type(weight).__name__}; give "balanced" or a weight for each class') from error
    if list(weights.shape) not in allowed:
        raise ValueError(
            f"{what} has shape {list(weights.shape)}, and the classes want {' or '.join(map(str, allowed))}"
        )
    if not bool((weights.isfinite() & (weights >= 0)).all()) or not bool((weights > 0).any(-1).all()):
        raise ValueError(
            f"{what} holds {weights.flatten().tolist()[:10]}; weights are finite, 0 or more, and not all 0"
        )
    return weights


def _counts(loss: LossByMeaning, prediction: Any, name: str, train: Source, shape: list[int]) -> Tensor:
    """How often each class occurs in the targets of an output, float64 of this shape; soft targets count by their shares."""
    counts = torch.zeros(shape, dtype=torch.float64)
    for y in _targets(train):
        loss.check_labels(prediction, y)
        meaning, target = next((meaning, target) for n, meaning, _, target in loss.matched(prediction, y) if n == name)
        if isinstance(meaning, Binary):
            yes = target.double().reshape(len(target), -1 if target.numel() else 0)
            counts += torch.stack([1 - yes, yes], -1).sum(0 if len(shape) > 1 else (0, 1)).cpu()
        elif target.is_floating_point():
            dim = getattr(meaning, "dim", None)
            dim = -1 if dim is None else dim
            counts += target.double().movedim(dim, -1).flatten(0, -2).sum(0).cpu()
        else:
            counts += target[target != IGNORED].bincount(minlength=shape[-1]).cpu()
    if not counts.any():
        raise ValueError('class_weight="balanced": no target has a class')
    return counts


def _targets(train: Source) -> Iterator[Any]:
    """The targets of all rows, some at a time."""
    if isinstance(train, TensorRows):
        yield from (rows.y for rows in train.batches(PIECE))
    elif isinstance(train, DataLoader):
        raise ValueError(
            'class_weight="balanced": the rows of a DataLoader can\'t be counted without going through it; give a weight for each class'
        )
    else:
        for batch in rows_loader(train, batch_size=PIECE):
            yield with_class_numbers(split_batch(batch)[1])


__all__ = ["Weights", "balanced", "weighted_criterion"]
