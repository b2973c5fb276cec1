"""Choose the means and scales that inputs and targets are standardized by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from workbench.core.batches.dealing import tell
from workbench.core.batches.rows import Source, TensorRows
from workbench.core.outputs.options import has_classes
from workbench.core.standardize import Key, items_of
from workbench.core.wrapped import Wrapped
from workbench.training.checks import keeps_meaning
from workbench.training.default_losses import Criterion
from workbench.training.told_units import is_far
from workbench.training.unshadowed import unshadowed

# what is no floating-point number but can be made one, and its largest value
BYTES = {torch.uint8: 255.0, torch.bool: 1.0}


def choose_standardization(
    wrapped: Wrapped,
    train: Source,
    criterion: Criterion | None,
    standardize: bool | None,
    learns: bool,
    converted: Mapping[Key, torch.dtype],
) -> dict[str, Any] | None:
    """The standardization to set, as `Wrapped.scale` takes it; empty to remove the present one, None to leave all as it is.

    Args:
        wrapped: the model.
        train: the rows to train on.
        criterion, standardize: as `fit` takes them.
        learns: whether the prediction can be trained.
        converted: which inputs are bytes or truth values that the model wants as floating-point numbers.
    """
    if keeps_present(wrapped, standardize) or (standardize is None and not (learns or converted)):
        return None
    if standardize and not isinstance(train, TensorRows):
        raise ValueError(
            f"standardize: it takes tensors or arrays, not a {type(train).__name__}, whose rows can't be seen at once"
        )
    seen = isinstance(train, TensorRows) and standardize is not False
    if not seen and not converted:
        return {} if standardize is False else None
    values: dict[str, Any] = {}
    rows = dict(items_of(train.x)) if seen else dict.fromkeys(converted)  # type: ignore[union-attr]
    if any(getattr(module, "standardizes_inputs", False) for module in nn.Module.modules(wrapped)):
        rows = _left_alone(wrapped, rows, converted)
    chosen = {key: _of_input(leaf, converted.get(key), several=None not in rows) for key, leaf in rows.items()}
    if any(moments_ is not None for moments_ in chosen.values()):
        kinds: dict[str, dict[Key, Any]] = {
            "x_mean": {key: None if both is None else both[0] for key, both in chosen.items()},
            "x_scale": {key: None if both is None else both[1] for key, both in chosen.items()},
        }
        if converted:
            kinds["x_dtype"] = {key: converted.get(key) for key in chosen}
        values.update({name: entries.get(None, entries) for name, entries in kinds.items()})
    if not seen:
        return values
    y = train.y  # type: ignore[union-attr]
    if standardize is None and criterion is None and not isinstance(y, Tensor):
        _tell_of_units(wrapped, y)
    of_values = isinstance(y, Tensor) and y.is_floating_point() and not has_classes(wrapped._workbench.output)
    methods = wrapped._workbench.methods
    kept = any(not getattr(method.distribution, "standardizable", True) for method in methods)
    if kept or wrapped._workbench.says_distributions:
        return values  # counts and shares stay what they are
    if of_values and (standardize or keeps_meaning(criterion)):
        values["y_mean"], values["y_scale"] = moments(y, centre=unshadowed(wrapped, "_location_scale"))
    return values


def _left_alone(wrapped: Wrapped, rows: dict[Key, Any], converted: Mapping[Key, torch.dtype]) -> dict[Key, Any]:
    """The inputs that are to be made floating-point numbers, where a layer of the model standardises with numbers of its own.

    Of several inputs it is not known which the layer takes, so that all keep their units; say so once.
    """
    if len(rows) > 1:
        tell(
            wrapped,
            "own units",
            "fit: a layer of the model standardises inputs (standardizes_inputs = True), so that none of the several inputs "
            f"({', '.join(map(repr, rows))}) is standardised; standardise those that do not enter that layer yourself",
        )
    return {key: leaf for key, leaf in rows.items() if key in converted}


def _tell_of_units(wrapped: Wrapped, targets: Any) -> None:
    """Say once which of several targets are far from mean 0 and standard deviation 1, for which nothing is done."""
    for key, target in items_of(targets):
        if not (isinstance(target, Tensor) and target.is_floating_point()):
            continue
        scale, mean = torch.std_mean(target.double(), correction=0)
        if is_far(mean, scale):
            tell(
                wrapped,
                "units",
                f"fit: of several targets none is standardised, and y[{key!r}] has mean {mean:.3g} and standard deviation {scale:.3g}, which "
                f"takes a model long to learn: train on (y[{key!r}] - mean) / scale, or wrap a function that returns this output alone",
            )


def tell_of_bytes(wrapped: Wrapped, values: Mapping[str, Any]) -> None:
    """Say once how bytes enter the model."""
    for key, dtype in items_of(values.get("x_dtype")):
        if dtype is torch.uint8:
            mean, scale = (dict(items_of(values[name]))[key] for name in ("x_mean", "x_scale"))
            what = "x" if key is None else f"x[{key!r}]"
            how = (
                "divided by 255"
                if float(scale.max()) == 255 and not mean.any()
                else "standardised by their mean and scale"
            )
            tell(
                wrapped,
                "bytes",
                f"fit: {what} is uint8, which the model does not take as it is: the bytes are {how}, here and whenever wrapped(x) is called "
                "with uint8. To scale them otherwise give floating-point numbers",
            )


def keeps_present(wrapped: Wrapped, standardize: bool | None) -> bool:
    """Whether the model works with the standardization that it has."""
    return standardize is None and unshadowed(wrapped, "scaling") is not None


def _of_input(leaf: Tensor | None, converted: torch.dtype | None, several: bool) -> tuple[Tensor, Tensor] | None:
    """Mean and scale of an input, None for one that stays as it is: whole numbers, and one of several that may be a mask."""
    if converted is not None and (leaf is None or converted is torch.bool):
        return torch.zeros(()), torch.tensor(BYTES[converted])
    if leaf is None or not (leaf.is_floating_point() or converted is not None):
        return None
    if several and (leaf.unique().numel() <= 2 or not bool(leaf.isfinite().all())):
        return None
    return moments(leaf)


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
