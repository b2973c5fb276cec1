"""Selection of one of several inputs of a model, to be changed while the others stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from workbench.core.batches.rows import bad_rows


def one_input(x: Any, of: int | str | None, what: str) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Return the input to change, and a function that makes the model's inputs from a changed one.

    Args:
        x: a tensor [n, ...]; or a tuple of positional, or a dict of keyword inputs, each with n rows.
        of: which of several inputs, by position or name; None for a single input.
        what: description of what the input must be, for errors.

    Returns:
        The tensor, and a function that takes a changed tensor of k * n rows (the n rows k times in a row) and repeats the other inputs to match.

    Raises:
        TypeError: if an input is no tensor.
        ValueError: if `of` names none of the inputs, or is missing; if the inputs differ in their number of rows, or one holds NaN.
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

    def with_others(changed: Tensor) -> Any:
        n_repeats = len(changed) // len(named[of])
        inputs = {
            name: changed if name == of else value.repeat(n_repeats, *[1] * (value.ndim - 1))
            for name, value in named.items()
        }
        return inputs if isinstance(x, Mapping) else tuple(inputs.values())

    return named[of], with_others


def alone(inputs: Any) -> Any:
    """Return inputs in the form that `collect` takes without targets: a tuple of two would look like inputs and targets."""
    return (inputs, torch.zeros(len(inputs[0]))) if isinstance(inputs, tuple) else inputs


__all__ = ["alone", "one_input"]
