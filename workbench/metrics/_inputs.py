"""Checks of the inputs of metrics, and their conversion to float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.core.batches.arrays import check_columns, check_index, numbers_of
from workbench.distributions import Distribution


def tensor_of(value: Any, name: str = "input") -> Tensor:
    """Return any array as a tensor; lists of Python floats keep their full precision."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            raise TypeError(
                f"{name} must be a dense tensor of numbers, found {value.layout} of {value.dtype} on {value.device}"
            )
        return value
    if value is None:  # such as the total of a Risk that was made without one
        raise TypeError(f"{name} must be a tensor or an array of numbers, found None")
    try:
        return torch.tensor(numbers_of(value))
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(
            f"{name} must be a tensor or an array of numbers, found {type(value).__name__} ({error})"
        ) from error


def real(name: str, value: Any) -> Tensor:
    """Return the value as a non-empty tensor of real numbers in its own dtype."""
    tensor = tensor_of(value, name)
    if tensor.is_complex():
        raise ValueError(f"{name} must be real, found {tensor.dtype}")
    if tensor.numel() == 0:
        raise ValueError(f"{name} is empty (shape {tuple(tensor.shape)}); a metric needs at least one row")
    return tensor


def numbers(name: str, value: Any, finite: bool = True, full: Tensor | None = None) -> Tensor:
    """Return the value as a non-empty float64 tensor without NaN (and without infinity).

    Args:
        name: name of the value in error messages.
        value: any array.
        finite: whether infinity is an error.
        full: the tensor that the value is a piece of, for error messages.
    """
    tensor = real(name, value)
    # Apple's mps devices have no float64
    tensor = tensor.to("cpu" if tensor.device.type == "mps" else tensor.device, torch.float64)
    bad = ~tensor.isfinite() if finite else tensor.isnan()
    if bad.any():
        kinds = "NaN or infinite" if finite else "NaN"
        shape = tuple((tensor if full is None else full).shape)
        raise ValueError(f"{name} has {int(bad.sum())} {kinds} values of {tensor.numel()} (shape {shape})")
    return tensor


def same_shape(**tensors: Tensor) -> None:
    """Raise unless all named tensors have the same shape; nothing is broadcast."""
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"shapes must be equal (nothing is broadcast), found {shapes}")


def same_rows(**values: Any) -> None:
    """Raise if pandas series or frames have different indices, or the same index or columns in another order."""
    (first, reference), *others = values.items()
    for name, other in others:
        check_index(reference, other, "metric", (first, name))
        check_columns(reference, other, "metric", name)


def risks(risk: Any, positive: bool = False, full: Tensor | None = None) -> Tensor:
    """Return risks >= 0 (or > 0); the total of a composed risk (an object with the attribute `total`). `full` as in `numbers`."""
    risk = numbers("risk", getattr(risk, "total", risk), full=full)
    if (risk <= 0).any() if positive else (risk < 0).any():
        bound = "> 0 (there is no density at 0; add a minimum noise)" if positive else ">= 0"
        shape = tuple((risk if full is None else full).shape)
        raise ValueError(f"risk is a standard deviation and must be {bound}, found {risk.min().item()} (shape {shape})")
    return risk


def predicted(prediction: Any, risk: Any, target: Any, positive: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return prediction, risk and target, checked to have the same shape."""
    prediction, target = numbers("prediction", prediction), numbers("target", target)
    risk = risks(risk, positive)
    same_shape(prediction=prediction, risk=risk, target=target)
    return prediction, risk, target


def level_in_unit(name: str, level: Any) -> None:
    """Raise unless 0 < level < 1."""
    try:
        inside = bool(0 < level < 1)
    except (TypeError, ValueError, RuntimeError):
        inside = False
    if not inside:
        raise ValueError(f"{name} must lie strictly between 0 and 1, found {level!r:.100}")


def check_integer(name: str, value: Any, minimum: int = 1, maximum: int = 1_000_000) -> None:
    """Raise unless the value is an integer in this range."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be a whole number, found {value!r:.100}")
    if not minimum <= value <= maximum:
        raise ValueError(
            f"{name} must be at {f'least {minimum}' if value < minimum else f'most {maximum:,}'}, found {value}"
        )


def family_of(distribution: Any) -> Any:
    """Return the distribution, a class or an instance, if it is one."""
    if isinstance(distribution, Distribution):
        return distribution
    if isinstance(distribution, type) and issubclass(distribution, Distribution):
        return distribution
    raise TypeError(
        f"distribution must be a Distribution, such as Normal or StudentT(df=4), found {distribution!r:.100}"
    )


def integer_labels(target: Any) -> Tensor:
    """Return the target as a tensor of class numbers."""
    target = tensor_of(target, "target")
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise ValueError(
            f"target must hold integer class labels, found {target.dtype} of shape {tuple(target.shape)}; "
            "convert it with .long()"
        )
    return target


def labels(target: Any, classes: Tensor, name: str) -> Tensor:
    """Return integer labels [rows] that fit scores [..., classes], flattened."""
    target = integer_labels(target)
    if classes.ndim < 2 or classes.shape[-1] < 2:
        raise ValueError(f"{name} must have shape [rows, classes >= 2], found {tuple(classes.shape)}")
    if target.shape != classes.shape[:-1]:
        raise ValueError(
            f"target has shape {tuple(target.shape)} but {name} has shape {tuple(classes.shape)}; "
            f"expected a target of shape {tuple(classes.shape[:-1])}"
        )
    target = target.to(torch.int64)  # some integer types don't support comparison
    if target.min() < 0 or target.max() >= classes.shape[-1]:
        raise ValueError(
            f"labels must lie in [0, {classes.shape[-1]}), found {int(target.min())} to {int(target.max())} "
            f"(target {tuple(target.shape)}, {name} {tuple(classes.shape)})"
        )
    return target.to(classes.device, torch.int64).flatten()
