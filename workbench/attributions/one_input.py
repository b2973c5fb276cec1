"""Which of several inputs of a model is changed, and the others beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from workbench.core.batches.rows import bad_rows


def one_input(x: Any, of: int | str | None, what: str) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """The input that is changed, and what makes inputs of the model of a changed one.

    Args:
        x: a tensor [n, ...]; or a tuple of positional, or a dict of keyword inputs, each with n rows.
        of: which of several: a place or a name; None of a single one.
        what: what it must be, for errors.

    Returns:
        The tensor, and a function of tensors of k * n rows, the rows one after another k times, beside which the others are repeated.

    Raises:
        TypeError: it is no tensor.
        ValueError: `of` names none of them, or is missing, the inputs differ in their rows, or one holds NaN.
    """
    if not isinstance(x, tuple | list | Mapping):
        if of is not None:
            raise ValueError(f"of={of!r}: x is a single input; leave it out")
        if not isinstance(x, Tensor):
            raise TypeError(f"x: expected a tensor of {what}, or a tuple or dict of inputs; found {type(x).__name__}")
        return x, lambda changed: changed
    named: dict[Any, Any] = dict(x) if isinstance(x, Mapping) else dict(enumerate(x))
    known = ", ".join(map(repr, named)) or "none"
    if of is None or isinstance(of, bool) or of not in named:
        raise ValueError(f"of={of!r}: the model has several inputs; say which is changed, of {known}")
    for name, value in named.items():
        if not isinstance(value, Tensor) or not value.ndim:
            raise TypeError(f"x[{name!r}]: expected a tensor with a row for each case; found {type(value).__name__}")
        if len(value) != len(named[of]):
            raise ValueError(f"x[{name!r}] has {len(value)} rows, and x[{of!r}] {len(named[of])}")
        if len(bad := bad_rows(value)):
            raise ValueError(
                f"x[{name!r}] is NaN or infinite in {len(bad)} of {len(value)} rows, first in row {int(bad[0])}"
            )

    def beside(changed: Tensor) -> Any:
        times = len(changed) // len(named[of])
        whole = {
            name: changed if name == of else value.repeat(times, *[1] * (value.ndim - 1))
            for name, value in named.items()
        }
        return whole if isinstance(x, Mapping) else tuple(whole.values())

    return named[of], beside


def alone(inputs: Any) -> Any:
    """Inputs as `collect` takes them without targets: two in a tuple would look like rows and their targets."""
    return (inputs, torch.zeros(len(inputs[0]))) if isinstance(inputs, tuple) else inputs


__all__ = ["alone", "one_input"]
