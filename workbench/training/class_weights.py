"""Class weights for the losses of `fit`: given explicitly, or balanced by class frequency."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from workbench.core.batches.rows import Source, TensorRows, rows_loader, split_batch
from workbench.core.batches.target_forms import with_class_numbers
from workbench.core.calls.risks import pair_of
from workbench.core.outputs.class_scores import Binary, Classes
from workbench.core.outputs.meanings import IGNORED
from workbench.core.wrapped import Wrapped
from workbench.training.default_losses import LossByMeaning
from workbench.training.unshadowed import unshadowed

Weights = Literal["balanced"] | Tensor | Sequence[float] | Mapping[int, float]
CHUNK = 64  # number of rows counted at once


def weighted_criterion(
    wrapped: Wrapped, class_weight: Weights | Mapping[str, Weights], prediction: Any, y: Any, train: Source
) -> LossByMeaning:
    """Return the default loss with class weights.

    Args:
        wrapped: the model.
        class_weight: as for `fit`.
        prediction, y: prediction and targets of a batch.
        train: training rows, which are counted for "balanced".

    Raises:
        ValueError: no output has classes, the weights do not match the classes, or a method has a likelihood of its own.
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
            f"class_weight: no output with a target holds class scores (output={output!r}); leave it out, or pass "
            'output="logits" when wrapping'
        )
    weight_by_output: Any = class_weight
    if _is_by_class(weight_by_output) or not isinstance(weight_by_output, Mapping):
        if len(classes) > 1:
            raise ValueError(
                f"class_weight: the outputs {', '.join(map(repr, classes))} have classes; give a dict from names of outputs to weights"
            )
        weight_by_output = {next(iter(classes)): weight_by_output}
    weights = {}
    for name, weight in ((name, _in_class_order(weight, name)) for name, weight in weight_by_output.items()):
        if name not in classes:
            raise ValueError(
                f"class_weight: {name!r} is not an output with classes and targets; these are {', '.join(map(repr, classes))}"
            )
        meaning, scores = classes[name]
        shape = [meaning.log_scores(scores).shape[-1]]
        labels = scores.shape[1] if isinstance(meaning, Binary) and scores.dim() == 2 else 1
        if isinstance(weight, str) and weight == "balanced":
            weights[name] = balanced(_counts(loss, prediction, name, train, [labels, *shape] if labels > 1 else shape))
        else:
            allowed = [shape, [labels, *shape]] if labels > 1 else [shape]
            weights[name] = _check_weights(weight, f"class_weight[{name!r}]" if name else "class_weight", allowed)
    weighted = LossByMeaning(output, weights)
    weighted(prediction, y)
    return weighted


def _is_by_class(weight: Any) -> bool:
    """Return whether the keys of a dict are class numbers, as in scikit-learn and Keras."""
    return isinstance(weight, Mapping) and bool(weight) and all(isinstance(key, int | np.integer) for key in weight)


def _in_class_order(weight: Any, name: str) -> Any:
    """Return a dict or Series from class numbers to weights as a list in the order of the classes; anything else unchanged."""
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
    """Return the weights n / (classes * count) of scikit-learn's "balanced" (King & Zeng 2001); absent classes get 1 and are not counted.

    Args:
        counts: number of rows of each class [..., classes].

    Example:
        >>> balanced(torch.tensor([6.0, 2.0, 0.0]))
        tensor([0.6667, 2.0000, 1.0000], dtype=torch.float64)
    """
    counts = counts.double()
    present = counts > 0
    weights = counts.sum(-1, keepdim=True) / (present.sum(-1, keepdim=True) * counts)
    return weights.where(present, 1.0)


def _check_methods(wrapped: Wrapped) -> None:
    """Raise ValueError if a method learns the classes through its own likelihood, which has no class weights."""
    record = wrapped._workbench
    pair = pair_of(record, unshadowed(wrapped, "methods"))
    fitted = (
        method
        for method in record.methods
        if method.needs_fit and not (method.own_pass or method.collects or method.refines)
    )
    if (method := pair or next(fitted, None)) is not None:
        raise ValueError(
            f"class_weight: {method.name} learns the classes by its own likelihood, which has no class weights; leave class_weight out, or "
            f"wrap without {method.name}"
        )
    if record.says_distributions:
        raise ValueError(
            "class_weight: the model returns distributions and is trained by their likelihood; leave class_weight out"
        )


def _check_weights(weight: Any, what: str, allowed: list[list[int]]) -> Tensor:
    """Return the weights as a float64 tensor if they are valid."""
    if isinstance(weight, str):
        raise ValueError(f'{what} must be "balanced" or a weight for each class, not {weight!r}')
    try:
        weights = torch.as_tensor(weight).detach().double().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f'{what}: found {type(weight).__name__}; give "balanced" or a weight for each class') from error
    if list(weights.shape) not in allowed:
        raise ValueError(
            f"{what} has shape {list(weights.shape)}, but the classes need {' or '.join(map(str, allowed))}"
        )
    if not bool((weights.isfinite() & (weights >= 0)).all()) or not bool((weights > 0).any(-1).all()):
        raise ValueError(
            f"{what} holds {weights.flatten().tolist()[:10]}; weights are finite, 0 or more, and not all 0"
        )
    return weights


def _counts(loss: LossByMeaning, prediction: Any, name: str, train: Source, shape: list[int]) -> Tensor:
    """Return the number of targets of each class, float64 of this shape; soft targets count by their probabilities."""
    counts = torch.zeros(shape, dtype=torch.float64)
    for y in _targets(train):
        loss.check_labels(prediction, y)
        meaning, target = next((meaning, target) for n, meaning, _, target in loss.matched(prediction, y) if n == name)
        if isinstance(meaning, Binary):
            positive = target.double().reshape(len(target), -1 if target.numel() else 0)
            counts += torch.stack([1 - positive, positive], -1).sum(0 if len(shape) > 1 else (0, 1)).cpu()
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
    """Yield the targets of all rows in chunks."""
    if isinstance(train, TensorRows):
        yield from (rows.y for rows in train.batches(CHUNK))
    elif isinstance(train, DataLoader):
        raise ValueError(
            'class_weight="balanced": the rows of a DataLoader can\'t be counted in advance; give a weight for each class'
        )
    else:
        for batch in rows_loader(train, batch_size=CHUNK):
            yield with_class_numbers(split_batch(batch)[1])


__all__ = ["Weights", "balanced", "weighted_criterion"]
