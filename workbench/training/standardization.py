"""Choice of the means and scales by which inputs and targets are standardized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from workbench.core.batches.rows import Source, TensorRows
from workbench.core.outputs.options import has_classes
from workbench.core.single_warnings import warn_once
from workbench.core.standardize import Key, items_of
from workbench.core.wrapped import Wrapped
from workbench.training.checks import allows_standardization
from workbench.training.default_losses import Criterion
from workbench.training.target_range import Limits, Range, warn_out_of_range
from workbench.training.unit_warnings import FAR, is_far
from workbench.training.unshadowed import unshadowed

# non-floating-point dtypes that can be scaled, and their largest values
MAX_VALUES = {torch.uint8: 255.0, torch.bool: 1.0}


def choose_standardization(
    wrapped: Wrapped,
    train: Source,
    criterion: Criterion | None,
    standardize: bool | None,
    learns: bool,
    converted: Mapping[Key, torch.dtype],
    limits: Limits,
) -> dict[str, Any] | None:
    """Return the standardization to set, as arguments of `Wrapped.scale`; empty to remove the current one, None to leave it unchanged.

    Args:
        wrapped: the model.
        train: the training rows.
        criterion, standardize: as for `fit`.
        learns: whether the prediction can be trained.
        converted: inputs that are bytes or booleans but must be passed to the model as floating-point numbers.
        limits: what the model can predict.
    """
    if keeps_standardization(wrapped, standardize) or (standardize is None and not (learns or converted)):
        return None
    if standardize and not isinstance(train, TensorRows):
        raise ValueError(
            f"standardize: this needs tensors or arrays, not a {type(train).__name__}, whose rows are not in memory"
        )
    if standardize is False or not isinstance(train, TensorRows):
        if not converted:
            return {} if standardize is False else None
        return _scaling_of_inputs(wrapped, dict.fromkeys(converted), converted)
    inputs = _scaling_of_inputs(wrapped, dict(items_of(train.x)), converted)
    return inputs | _scaling_of_targets(wrapped, train.y, criterion, limits, always=bool(standardize))


def _scaling_of_inputs(wrapped: Wrapped, rows: dict[Key, Any], converted: Mapping[Key, torch.dtype]) -> dict[str, Any]:
    """Return x_mean, x_scale and, where inputs are converted, x_dtype; empty if no input is standardized."""
    if any(getattr(module, "standardizes_inputs", False) for module in nn.Module.modules(wrapped)):
        rows = _bytes_only(wrapped, rows, converted)
    moments_by_key = {
        key: _input_moments(leaf, converted.get(key), several=None not in rows) for key, leaf in rows.items()
    }
    if not any(moments_by_key.values()):
        return {}
    kinds: dict[str, dict[Key, Any]] = {
        "x_mean": {key: pair and pair[0] for key, pair in moments_by_key.items()},
        "x_scale": {key: pair and pair[1] for key, pair in moments_by_key.items()},
    }
    if converted:
        kinds["x_dtype"] = {key: converted.get(key) for key in moments_by_key}
    return {name: entries.get(None, entries) for name, entries in kinds.items()}


def _scaling_of_targets(
    wrapped: Wrapped, y: Any, criterion: Criterion | None, limits: Limits, always: bool
) -> dict[str, Any]:
    """Return y_mean and y_scale; empty if targets keep their units.

    `always` standardizes values even if the criterion or the range of the predictions speaks against it.
    """
    if not always and criterion is None and not isinstance(y, Tensor):
        _warn_about_units(wrapped, y)
    methods = wrapped._workbench.methods
    keeps_units = any(not getattr(method.distribution, "standardizable", True) for method in methods)
    if keeps_units or wrapped._workbench.says_distributions:  # counts and shares
        return {}
    if not isinstance(y, Tensor) or not y.is_floating_point() or has_classes(wrapped._workbench.output):
        return {}
    if always:
        mean, scale = moments(y, unshadowed(wrapped, "_location_scale"))
        return {"y_mean": mean, "y_scale": scale}
    if not allows_standardization(criterion):
        return {}
    warn_out_of_range(wrapped, limits.ends, y)
    if min(limits.ranges) == Range.FIXED:
        return {}
    mean, scale = moments(y, unshadowed(wrapped, "_location_scale"))
    # each column as far as its range lets it
    ranges = torch.tensor(limits.ranges, device=y.device).reshape(scale.shape)
    mean = mean.where(ranges == Range.FREE, 0.0)
    scale = scale.where(ranges == Range.FREE, moments(y, centre=False)[1]).where(ranges != Range.FIXED, 1.0)
    _warn_about_series(wrapped, y, scale)
    return {"y_mean": mean, "y_scale": scale}


def _bytes_only(wrapped: Wrapped, rows: dict[Key, Any], converted: Mapping[Key, torch.dtype]) -> dict[Key, Any]:
    """Return only the inputs that must be converted to floating point, for models with a layer that standardizes inputs itself.

    With several inputs it is unknown which of them this layer takes, so none is standardized; a warning says so once.
    """
    if len(rows) > 1:
        warn_once(
            wrapped,
            "own units",
            "fit: a layer of the model standardizes inputs (standardizes_inputs = True), so none of the inputs "
            f"({', '.join(map(repr, rows))}) is standardized here; standardize those that do not enter that layer yourself",
        )
    return {key: leaf for key, leaf in rows.items() if key in converted}


def _warn_about_units(wrapped: Wrapped, targets: Any) -> None:
    """Warn once about which of several targets, none of which is standardized, are far from mean 0 and standard deviation 1."""
    for key, target in items_of(targets):
        if not (isinstance(target, Tensor) and target.is_floating_point()):
            continue
        scale, mean = torch.std_mean(target.double(), correction=0)
        if is_far(mean, scale):
            warn_once(
                wrapped,
                "units",
                f"fit: of several targets none is standardized, and y[{key!r}] has mean {mean:.3g} and standard deviation {scale:.3g}, which "
                f"takes a model long to learn: train on (y[{key!r}] - mean) / scale, or wrap a function that returns this output alone",
            )


def _warn_about_series(wrapped: Wrapped, y: Tensor, scale: Tensor) -> None:
    """Warn once about columns of targets [n, steps, k], such as series in other units, that vary by less than a tenth of the common scale."""
    if y.dim() != 3:
        return
    spread = y.double().flatten(0, 1).std(0, correction=0)
    small = ((spread > 0) & (spread * FAR < scale)).nonzero()[:, 0].tolist()
    if small:
        warn_once(
            wrapped,
            "series",
            f"fit: all numbers of y [n, {y.shape[1]}, {y.shape[2]}] have one scale, {scale:.3g}, and y[..., {small[0]}] varies by "
            f"{spread[small[0]]:.3g}, which is hardly learned, and its risk is too large. If the last dimension holds series, give each its own "
            "scale before fit: wrapped.scale(x_mean=x.mean((0, 1)), x_scale=x.std((0, 1)), y_mean=y.mean((0, 1)), y_scale=y.std((0, 1))); "
            "standardize=True keeps the common one without this warning",
        )


def warn_about_bytes(wrapped: Wrapped, values: Mapping[str, Any]) -> None:
    """Warn once about how bytes are scaled before they enter the model."""
    for key, dtype in items_of(values.get("x_dtype")):
        if dtype is torch.uint8:
            mean, scale = (dict(items_of(values[moment]))[key] for moment in ("x_mean", "x_scale"))
            name = "x" if key is None else f"x[{key!r}]"
            how = (
                "divided by 255"
                if float(scale.max()) == 255 and not mean.any()
                else "standardized by their mean and scale"
            )
            warn_once(
                wrapped,
                "bytes",
                f"fit: {name} is uint8, which the model does not take as it is: the bytes are {how}, here and whenever wrapped(x) is called "
                "with uint8. To scale them otherwise give floating-point numbers",
            )


def keeps_standardization(wrapped: Wrapped, standardize: bool | None) -> bool:
    """Return whether the model keeps its current standardization."""
    return standardize is None and unshadowed(wrapped, "scaling") is not None


def _input_moments(leaf: Tensor | None, converted: torch.dtype | None, several: bool) -> tuple[Tensor, Tensor] | None:
    """Return mean and scale of an input; None for one that is not standardized: integers, and one of several inputs that may be a mask."""
    if converted is not None and (leaf is None or converted is torch.bool):
        return torch.zeros(()), torch.tensor(MAX_VALUES[converted])
    if leaf is None or not (leaf.is_floating_point() or converted is not None):
        return None
    if several and (leaf.unique().numel() <= 2 or not bool(leaf.isfinite().all())):
        return None
    return moments(leaf)


def moments(values: Tensor, centre: bool = True) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation over the rows: per column of [n, d], or one for all numbers of other shapes.

    Args:
        values: [n, ...], at least 2 rows.
        centre: whether to subtract the mean; False sets it to 0, and the scale is then the root mean square.

    Returns:
        (mean, scale), float64 [d] or []; the scale of a constant column is 1.

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
