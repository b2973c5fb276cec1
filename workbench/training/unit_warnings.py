"""Warnings about numbers that are hard to learn from: too fine for their dtype, squeezed by outliers, or far from the scale of the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workbench.core.batches.column_spread import coarse_columns, squeezed_columns
from workbench.core.batches.rows import Batch, Source, TensorRows
from workbench.core.outputs.options import has_classes
from workbench.core.single_warnings import warn_once
from workbench.core.standardize import items_of
from workbench.core.wrapped import Wrapped
from workbench.engine.tree import is_float
from workbench.training.checks import allows_standardization
from workbench.training.default_losses import Criterion

FAR = 10.0  # mean, or factor of the standard deviation, above which numbers are far from mean 0 and deviation 1


def is_far(mean: Tensor, scale: Tensor) -> bool:
    """Return whether numbers are far from mean 0 and standard deviation 1."""
    return bool(mean.abs() > FAR or not (scale == 0 or 1 / FAR < scale < FAR))


def warn_about_columns(wrapped: Wrapped, train: Source, dtype: torch.dtype) -> None:
    """Warn once about columns whose differences vanish in the model's dtype or next to outliers.

    Args:
        wrapped: the model.
        train: the training rows, as given.
        dtype: dtype of the training.
    """
    if not isinstance(train, TensorRows):
        return
    for root, tree in (("x", train.x), ("y", train.y)):
        for key, leaf in items_of(tree):
            if not is_float(leaf):  # whole numbers are not cast
                continue
            name = root if key is None else f"{root}[{key!r}]"
            if problem := coarse_columns(leaf, name, dtype):
                remedy = "subtract the mean of the column first, or train and predict in dtype=torch.float64"
                warn_once(
                    wrapped, f"coarse {name}", f"fit: {problem}, so that the model can't tell rows apart: {remedy}"
                )
            elif problem := squeezed_columns(leaf, name):
                warn_once(
                    wrapped,
                    f"squeezed {name}",
                    f"fit: {problem}, less than a thousandth of the standard deviation, so that these differences are hardly learned. If the "
                    "outliers are errors or stand for missing values, leave these rows out; otherwise take the logarithm, or clip the column",
                )


def warn_about_batch(wrapped: Wrapped, first: Batch, prediction: Any, criterion: Criterion | None) -> None:
    """Warn once that rows from a Dataset or DataLoader are not standardized, if the targets are far from the predictions.

    Args:
        wrapped: the model, which has no standardization.
        first: the first batch.
        prediction: prediction of the model for this batch.
        criterion: as for `fit`.
    """
    y, record = first.y, wrapped._workbench
    keeps_units = any(not getattr(method.distribution, "standardizable", True) for method in record.methods)
    if (
        keeps_units
        or record.says_distributions
        or has_classes(record.output)
        or not allows_standardization(criterion)
        or len(first) < 2
    ):
        return
    if not isinstance(y, Tensor) or not isinstance(prediction, Tensor) or prediction.shape != y.shape:
        return
    if not y.is_floating_point() or not prediction.is_floating_point():
        return
    scale, mean = torch.std_mean(y.double(), correction=0)
    rmse = (prediction.detach().double() - y).square().mean().sqrt()
    if is_far(mean, scale) and rmse > 3 * scale:  # not for a model that was trained elsewhere
        warn_once(
            wrapped,
            "units of batches",
            f"fit: the rows of Datasets and DataLoaders are not standardized, as tensors and arrays are, and y has mean {mean:.3g} and standard "
            f"deviation {scale:.3g} in the first batch, which takes a model long to learn. Give (x, y) as tensors if they fit in memory; or set "
            f"the units first, wrapped.scale(x_mean=..., x_scale=..., y_mean={mean:.3g}, y_scale={scale:.3g})",
        )


__all__ = ["is_far", "warn_about_batch", "warn_about_columns"]
