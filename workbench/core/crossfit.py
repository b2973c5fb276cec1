"""Weights and noise scales of voters, as estimated by cross-fitting."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .additions import add_extra, extra, remove_extra
from .method import Method

NAME = "committee"


class Committee(nn.Module):
    """Weights of voters, and corrections of the scale and tails of their noise.

    Args:
        weights: [voters], >= 0, summing to one.
        factor: [voters], > 0; multiplies the aleatoric standard deviation of each voter. Without risk heads it is the standard deviation of the
            noise itself, constant, in units of the prediction.
        df: degrees of freedom of Student's t distribution, above 2; infinity keeps the voters' distribution.
        fold: int64 [voters], the fold of training rows held out from each voter.

    Attributes:
        axis: name of the axis of the voters, set by `seat`.
    """

    weights: Tensor
    factor: Tensor
    df: Tensor
    fold: Tensor
    axis = ""
    NAMES = ("weights", "factor", "df", "fold")

    def __init__(self, weights: Tensor, factor: Tensor, df: Tensor | float, fold: Tensor) -> None:
        super().__init__()
        for name, value in zip(self.NAMES, (weights, factor, torch.as_tensor(df), fold), strict=True):
            self.register_buffer(name, value.detach().clone())

    def widened(self, risk: Tensor, dim: int) -> Tensor:
        """Return the standard deviation of the noise multiplied by `factor`; `dim` is the dimension of the voters."""
        return risk * _along(self.factor, risk, dim)

    def weighed(self, values: Tensor, dim: int) -> Tensor:
        """Multiply values by n_voters * weights, so that their mean over voters is the weighted mean."""
        return values * _along(len(self.weights) * self.weights, values, dim)

    def spread(self, parts: dict[str, Tensor], dim: int) -> dict[str, Tensor]:
        """Return the weighted mean and variance over voters, like `method.spread`."""
        y = parts["y"]
        out = {name: self.weighed(value, dim).mean(dim) for name, value in parts.items()}
        squares = (y - out["y"].unsqueeze(dim)).abs().square()
        out["epistemic"] = out.get("epistemic", 0) + self.weighed(squares, dim).mean(dim)
        return out


def _along(values: Tensor, like: Tensor, dim: int) -> Tensor:
    return values.to(like.real).reshape(-1, *[1] * (like.dim() - dim - 1))


def committee_of(wrapped: Any) -> Committee | None:
    """Return the cross-fitting weights of a wrapped object; None if it was not cross-fitted."""
    return extra(wrapped, NAME)


def members_axis(methods: Iterable[Method]) -> str:
    """Return the name of the axis of members that are trained jointly, each with its own tensors; "" if there is none."""
    return next((method.name for method in methods if method.member_marks), "")


def seat(wrapped: Any, committee: Committee | None) -> None:
    """Set the committee of a wrapped object; None removes it."""
    if committee is None:
        remove_extra(wrapped, NAME)
    else:
        committee.axis = members_axis(wrapped._workbench.methods)
        like = next((p for p in wrapped.parameters() if p.is_floating_point()), None)
        add_extra(wrapped, NAME, committee.to(like.device if like is not None else None))
