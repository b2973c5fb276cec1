"""Forms of targets: class numbers, one-hot rows, and shapes that nearly match the predictions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...engine.tree import tree_map


def shape_advice(target: Tensor, prediction: Tensor) -> str:
    """Return what to write where only a dimension of size one differs, to continue an error; "" for other shapes.

    Example:
        >>> import torch
        >>> shape_advice(torch.zeros(5), torch.zeros(5, 1))
        '; give y as a column: y[:, None] of a tensor or array, y.to_frame() of a pandas Series'
    """
    if prediction.shape == (*target.shape, 1):
        if target.dim() > 1:
            return "; give y[..., None]"
        return "; give y as a column: y[:, None] of a tensor or array, y.to_frame() of a pandas Series"
    if target.shape == (*prediction.shape, 1):
        if prediction.dim() > 1:
            return "; give y[..., 0]"
        return "; give y as a vector: y[:, 0] of a tensor or array, y.iloc[:, 0] of a DataFrame"
    return ""


def is_one_hot(y: Tensor) -> bool:
    """Return whether each row of a tensor [n, classes] is one-hot."""
    if y.dim() != 2 or y.shape[1] < 2 or not y.numel() or y.is_complex():
        return False
    return bool(((y == 0) | (y == 1)).all()) and bool((y.sum(1) == 1).all())


def with_class_numbers(y: Any) -> Any:
    """Convert integer and bool targets to int64 class numbers.

    Raises:
        TypeError: if they are complex, which would lose their imaginary part.
    """

    def converted(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.is_floating_point():
            return leaf
        if leaf.is_complex():
            raise TypeError(
                f"data: y holds complex numbers ({leaf.dtype}); give real ones, torch.view_as_real(y), and let the model return the same: "
                "torch.view_as_real of what it returns now. In your own loop, wrapped.loss(criterion, x, y) takes complex targets"
            )
        return leaf.long()

    return tree_map(converted, y)


__all__ = ["is_one_hot", "shape_advice", "with_class_numbers"]
