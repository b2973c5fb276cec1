"""Weights and noise of voters as cross-fitting finds them: how far each is trusted, and how wide the noise really is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .method import Method
from .ownership import add_extra, extra, remove_extra

NAME = "committee"


class Committee(nn.Module):
    """Voters that count differently, with noise of another scale and with heavier tails than their heads say.

    Args:
        weights: [voters], >= 0, summing to one.
        factor: [voters], > 0; what the aleatoric standard deviation of each voter is multiplied by. Without risk heads it is the standard
            deviation of the noise itself, the same everywhere, in the units of the prediction.
        df: degrees of freedom of Student's t distribution, above 2; infinity keeps the distribution that is there.
        fold: int64 [voters], the fold of the training rows that each voter has not seen.

    Attributes:
        axis: the axis of the voters, said by `seat`.
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
        """The noise's standard deviation in its true scale; the voters stand at `dim`."""
        return risk * _along(self.factor, risk, dim)

    def weighed(self, values: Tensor, dim: int) -> Tensor:
        """The values times their voters' weights, so that their plain mean is the weighted one."""
        return values * _along(len(self.weights) * self.weights, values, dim)

    def spread(self, parts: dict[str, Tensor], dim: int) -> dict[str, Tensor]:
        """`method.spread` for voters that count differently."""
        y = parts["y"]
        out = {name: self.weighed(value, dim).mean(dim) for name, value in parts.items()}
        squares = (y - out["y"].unsqueeze(dim)).abs().square()
        out["epistemic"] = out.get("epistemic", 0) + self.weighed(squares, dim).mean(dim)
        return out


def _along(values: Tensor, like: Tensor, dim: int) -> Tensor:
    return values.to(like.real).reshape(-1, *[1] * (like.dim() - dim - 1))


def committee_of(wrapped: Any) -> Committee | None:
    """What cross-fitting has found out about the voters of a wrapped object, None if it was not cross-fitted."""
    return extra(wrapped, NAME)


def members_axis(methods: Iterable[Method]) -> str:
    """The axis of members that are trained at once, each with tensors of its own; "" if there is none."""
    return next((method.name for method in methods if method.member_marks), "")


def seat(wrapped: Any, committee: Committee | None) -> None:
    """Give a wrapped object a committee, or take it away."""
    if committee is None:
        remove_extra(wrapped, NAME)
    else:
        committee.axis = members_axis(wrapped._workbench.methods)
        like = next((p for p in wrapped.parameters() if p.is_floating_point()), None)
        add_extra(wrapped, NAME, committee.to(like.device if like is not None else None))
