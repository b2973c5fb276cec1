"""Choose the means and scales that inputs and targets are standardized by."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.core.outputs import has_classes
from workbench.core.rows import Source, TensorRows
from workbench.core.wrapped import Wrapped
from workbench.training.checks import keeps_meaning
from workbench.training.criteria import Criterion
from workbench.training.unshadowed import unshadowed


def choose_standardization(
    wrapped: Wrapped, train: Source, criterion: Criterion | None, standardize: bool | None, learns: bool
) -> dict[str, Tensor] | None:
    """The standardization to set, as `Wrapped.scale` takes it; empty to remove the present one, None to leave all as it is."""
    if standardize is False:
        return {}
    if standardize is None:
        present = unshadowed(wrapped, "scaling") is not None
        if present or not learns or not isinstance(train, TensorRows):
            return None
    if not isinstance(train, TensorRows):
        raise ValueError(
            f"standardize: it takes tensors or arrays, not a {type(train).__name__}, whose rows can't be seen at once"
        )
    values: dict[str, Tensor] = {}
    if isinstance(train.x, Tensor) and train.x.is_floating_point():
        values["x_mean"], values["x_scale"] = moments(train.x)
    of_values = (
        isinstance(train.y, Tensor) and train.y.is_floating_point() and not has_classes(wrapped._workbench.output)
    )
    if of_values and (standardize or keeps_meaning(criterion)):
        values["y_mean"], values["y_scale"] = moments(train.y, centre=unshadowed(wrapped, "_location_scale"))
    return values


def moments(values: Tensor, centre: bool = True) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation over the rows: for each column of [n, d], one for all numbers of other shapes.

    Args:
        values: [n, ...], at least 2 rows.
        centre: False sets the mean to 0; the scale is then the root mean square.

    Returns:
        (mean, scale), float64 [d] or []; a column that never varies has scale 1.

    Example:
        >>> moments(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
        (tensor([2., 5.], dtype=torch.float64), tensor([1., 1.], dtype=torch.float64))
    """
    values = values.double() if values.dim() == 2 else values.double().flatten()
    scale, mean = torch.std_mean(values, 0, correction=0)
    if not centre:
        mean, scale = torch.zeros_like(mean), values.square().mean(0).sqrt()
    constant = values.amin(0) == values.amax(0)  # rounding gives a constant column a spread of about 1e-17, not 0
    return mean, scale.where(~constant & (scale > 0), 1.0)
