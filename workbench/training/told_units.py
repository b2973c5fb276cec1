"""Say where a training can learn little of numbers: too fine for their type, squeezed by outliers, or far from those of the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workbench.core.batches.column_spread import coarse_columns, squeezed_columns
from workbench.core.batches.dealing import tell
from workbench.core.batches.rows import Batch, Source, TensorRows
from workbench.core.outputs.options import has_classes
from workbench.core.standardize import items_of
from workbench.core.wrapped import Wrapped
from workbench.training.checks import keeps_meaning
from workbench.training.default_losses import Criterion

FAR = 10.0  # from mean 0 and standard deviation 1


def is_far(mean: Tensor, scale: Tensor) -> bool:
    """Whether numbers are far from mean 0 and standard deviation 1."""
    return bool(mean.abs() > FAR or not (scale == 0 or 1 / FAR < scale < FAR))


def tell_of_columns(wrapped: Wrapped, train: Source, dtype: torch.dtype) -> None:
    """Say once which columns of inputs and targets in memory lose their differences in the type of the model or beside their outliers.

    Args:
        wrapped: the model.
        train: the rows to train on, as they were given.
        dtype: what they are trained in.
    """
    if not isinstance(train, TensorRows):
        return
    for what, tree in (("x", train.x), ("y", train.y)):
        for key, leaf in items_of(tree):
            if not isinstance(leaf, Tensor):
                continue
            name = what if key is None else f"{what}[{key!r}]"
            if said := coarse_columns(leaf, name, dtype):
                remedy = "subtract the mean of the column first, or train and predict in dtype=torch.float64"
                tell(wrapped, f"coarse {name}", f"fit: {said}, so that the model can't tell rows apart: {remedy}")
            elif said := squeezed_columns(leaf, name):
                tell(
                    wrapped,
                    f"squeezed {name}",
                    f"fit: {said}, less than a thousandth of the standard deviation: what these say is hardly learned. If the outermost stand "
                    "for what is missing, or are slips, leave these rows out; otherwise give a logarithm, or clip the column",
                )


def tell_of_batch(wrapped: Wrapped, first: Batch, prediction: Any, criterion: Criterion | None) -> None:
    """Say once that rows which come batch by batch are not standardised, where targets are far from what the model says.

    Args:
        wrapped: the model, which has no standardisation.
        first: the first batch.
        prediction: of the model for it.
        criterion: as `fit` takes it.
    """
    y, record = first.y, wrapped._workbench
    kept = any(not getattr(method.distribution, "standardizable", True) for method in record.methods)
    if (
        kept
        or record.says_distributions
        or has_classes(record.output)
        or not keeps_meaning(criterion)
        or len(first) < 2
    ):
        return
    if not isinstance(y, Tensor) or not isinstance(prediction, Tensor) or prediction.shape != y.shape:
        return
    if not y.is_floating_point() or not prediction.is_floating_point():
        return
    scale, mean = torch.std_mean(y.double(), correction=0)
    off = (prediction.detach().double() - y).square().mean().sqrt()
    if is_far(mean, scale) and off > 3 * scale:  # a model that was trained elsewhere is nearer
        tell(
            wrapped,
            "units of batches",
            f"fit: the rows of Datasets and DataLoaders are not standardised, as tensors and arrays are, and y has mean {mean:.3g} and standard "
            f"deviation {scale:.3g} in the first batch, which takes a model long to learn. Give (x, y) as tensors if they fit in memory; or say "
            f"the units first, wrapped.scale(x_mean=..., x_scale=..., y_mean={mean:.3g}, y_scale={scale:.3g})",
        )


__all__ = ["is_far", "tell_of_batch", "tell_of_columns"]
