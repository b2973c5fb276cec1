"""Checks of the settings and of one batch before a training changes anything."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from workbench.core.additions import add_extra, remove_extra
from workbench.core.batches.call_arguments import answering, as_arguments, check_arguments
from workbench.core.batches.rows import Batch, TensorRows, describe, first_weight
from workbench.core.batches.target_forms import is_one_hot, shape_advice
from workbench.core.outputs.class_scores import Classes
from workbench.core.outputs.meanings import IGNORED, Values
from workbench.core.outputs.resolution import resolve
from workbench.core.single_warnings import warn_once
from workbench.core.standardize import Key, items_of
from workbench.core.wrapped import Wrapped
from workbench.distributions.parametric import Parametric
from workbench.engine.tree import children, flatten, is_float, names, tensors
from workbench.errors import WorkbenchWarning, as_count
from workbench.introspect.source_lines import user_stacklevel
from workbench.training.default_losses import Criterion, LossByMeaning

LR = 0.01  # learning rate of the default optimizer
FROZEN = " (the signature of a frozen model under neo is learned by wrapped.fit(x))"


def check_numbers(
    epochs: int,
    batch_size: int | None,
    lr: float,
    weight_decay: float,
    optimizer: Any,
    patience: int | None,
    dtype: torch.dtype | None,
) -> None:
    """Raise if a setting of `fit` is out of range, or an optimizer is not a callable that makes one."""
    for name, value, minimum in (("epochs", epochs, 1), ("batch_size", batch_size, 2), ("patience", patience, 1)):
        if value is not None or name == "epochs":
            as_count(name, value, minimum)
    for name, number in (("lr", lr), ("weight_decay", weight_decay)):
        if not hasattr(number, "__float__"):
            raise TypeError(f"{name} must be a number; found {number!r}")
    if not (0 < lr < math.inf):
        raise ValueError(f"lr must be above 0 and finite; found {lr!r}")
    if not (0 <= weight_decay < math.inf):
        raise ValueError(f"weight_decay must be 0 or more, and finite; found {weight_decay!r}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype must be a floating-point type such as torch.float64; found {dtype!r}")
    if isinstance(optimizer, Optimizer) or (optimizer is not None and not callable(optimizer)):
        raise TypeError(
            f"optimizer: found an object of type {type(optimizer).__name__}; give a callable that makes one, such as "
            "lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
        )
    if optimizer is not None and (lr != LR or weight_decay):
        raise ValueError(
            "lr and weight_decay apply to the default optimizer only; set those of your own optimizer where it is made"
        )


def warn_of_untrained(criterion: Any, trained: Iterable[Tensor]) -> None:
    """Warn if a criterion has parameters that the training does not change, such as the class centres of an angular margin loss.

    Args:
        criterion: the criterion.
        trained: parameters that the optimizer holds.
    """
    held = set(trained)
    parameters = criterion.named_parameters() if isinstance(criterion, nn.Module) else ()
    names = [name for name, parameter in parameters if parameter.requires_grad and parameter not in held]
    if names:
        warnings.warn(
            f"criterion: this {type(criterion).__name__} has parameters of its own ({', '.join(names[:3])}), which this training does not "
            "change. Give optimizer=lambda parameters: torch.optim.Adam([*parameters, *criterion.parameters()]), without folds; or freeze them "
            "(criterion.requires_grad_(False))",
            WorkbenchWarning,
            stacklevel=user_stacklevel(),
        )


def check_objects(standardize: Any, criterion: Any, callback: Any, checkpoint: Any) -> None:
    """Raise if an argument of `fit` has another type than it takes, before the training begins."""
    if criterion is not None and not callable(criterion):
        raise TypeError(
            f"criterion: found {criterion!r}; give a function criterion(prediction, target), such as torch.nn.MSELoss()"
        )
    if standardize not in (None, True, False):
        raise TypeError(f"standardize must be True, False or None; found {standardize!r}")
    if callback is not None and not callable(callback):
        raise TypeError(f"callback: found {callback!r}; give a function callback(progress)")
    if checkpoint is not None and not isinstance(checkpoint, str | os.PathLike):
        raise TypeError(f"checkpoint: found {checkpoint!r}; give the path of a file")


def check_modes(wrapped: nn.Module) -> None:
    """Raise TypeError if the model has a part that cannot be switched between training and evaluation: one that was exported."""
    for name, module in wrapped.named_modules():
        switch = getattr(module.__dict__.get("train"), "__qualname__", "")
        if switch.startswith("ExportedProgram."):
            what = f"its part {name!r}" if name else "the model"
            raise TypeError(
                f"wrapped: {what} was exported by torch.export, which fixes whether it trains or predicts, so that it cannot be trained; wrap "
                "and train the nn.Module that it was exported from, then export the wrapped model, torch.export.export(wrapped, (x,))"
            )


def try_batch(
    wrapped: Wrapped, batch: Batch, criterion: Criterion | None, in_memory: list[TensorRows], scaled: bool
) -> tuple[bool, dict[Key, torch.dtype], Any]:
    """Predict one batch and check that the targets match the prediction.

    Args:
        wrapped, batch, criterion: model, first batch and criterion of the training.
        in_memory: all rows in memory, whose class numbers are checked as well.
        scaled: whether the current standardization is kept.

    Returns:
        Whether the prediction can be trained, the inputs to convert to floating point with their dtypes, and the prediction.
    """
    check_arguments(wrapped, batch.x)
    modes = [(module, module.training) for module in wrapped.modules()]
    wrapped.eval()
    try:
        with torch.enable_grad():
            prediction, converted = _predict(wrapped, batch.x, scaled)
    except Exception as error:
        inputs = ", ".join(f"{_name(key)} is {describe(leaf)}" for key, leaf in items_of(batch.x))
        error.add_note(f"in fit, when it called the model with the first rows of the data: {inputs}")
        raise
    finally:
        for module, mode in modes:
            module.training = mode
    y, output = batch.y, wrapped._workbench.output
    if (
        criterion is None
        and output is not None
        and not (isinstance(y, Tensor) and isinstance(prediction, Tensor) and output in ("values", "logits", "probs"))
    ):
        loss = LossByMeaning(output)
        for targets in [rows.y for rows in in_memory] or [y]:
            loss.check_labels(prediction, targets)
        loss(prediction, y)
        _warn_of_untrained(wrapped, loss, prediction, y)
    elif isinstance(prediction, Tensor) and isinstance(y, Tensor):
        _check_tensors(wrapped, prediction, y, criterion, in_memory)
    elif criterion is None:
        naming = 'the output they belong to when wrapping, output={"logits": "logits"}'
        if children(y) is not None:
            meanings = ", ".join(f'{name if name.isdecimal() else repr(name)}: "values"' for name in names(y))
            naming = f'each output when wrapping, output={{{meanings}}} (or "logits", "binary")'
        raise TypeError(
            f"criterion: the model gives a {type(prediction).__name__} for targets that are a {type(y).__name__}; name {naming}, or give "
            "criterion(prediction, target) that returns one loss"
        )
    for method in wrapped._workbench.methods:
        method.check_targets(wrapped, prediction, y)
    trainable = any(leaf.requires_grad for leaf in tensors(prediction))
    if converted and not trainable:
        raise TypeError(
            f"{_describe_dtypes(converted)}, which the model does not take, and it is frozen: give floating-point numbers scaled as in its "
            "training"
        )
    return trainable, converted, prediction


def _check_tensors(
    wrapped: Wrapped, prediction: Tensor, y: Tensor, criterion: Criterion | None, in_memory: list[TensorRows]
) -> None:
    """Raise ValueError if one tensor of targets does not fit one tensor of predictions."""
    output = wrapped._workbench.output
    if criterion is None and prediction.is_complex():
        raise TypeError(
            f"the model returns complex numbers ({prediction.dtype}), for which there is no default loss: give criterion(prediction, target), "
            "or let the model return torch.view_as_real of them and give y in the same form"
        )
    family = sole_likelihood(wrapped)
    target_shape = prediction.shape if family is None else family.target_shape(prediction.shape)
    if y.is_floating_point() or family is not None:
        # without this check, such shapes would broadcast to a loss over all pairs of rows
        broadcasts = prediction.numel() == y.numel() and prediction.squeeze().shape == y.squeeze().shape
        if target_shape != y.shape and (allows_standardization(criterion) or broadcasts or family is not None):
            hint = shape_advice(y, prediction)
            if output in ("logits", "probs"):
                hint = f', or, for output="{output}", be class numbers, y.long()'
            raise ValueError(
                f"y: targets are {shape_of_rows(y)}, but the model gives {shape_of_rows(prediction)}; "
                + (
                    f"they must have one shape{hint}"
                    if target_shape == prediction.shape
                    else f"{family} wants [n, times, events]"
                )
            )
    elif criterion is None:
        _check_labels(prediction, y, in_memory)
    if family is not None:
        for targets in [rows.y for rows in in_memory] or [y]:
            family.check_targets(targets)


def _warn_of_untrained(wrapped: Wrapped, loss: LossByMeaning, prediction: Any, y: Any) -> None:
    """Warn once of outputs that have a meaning and could be trained, and no targets."""
    trained = {name for name, *_ in loss.matched(prediction, y)}
    leaves, paths = flatten(prediction)[0], names(prediction)
    meanings = resolve(loss.output, lambda: paths, leaves, 0)
    left_out = [
        repr(name)
        for name, leaf, meaning in zip(paths, leaves, meanings, strict=True)
        if isinstance(meaning, Values | Classes) and name not in trained and leaf.requires_grad
    ]
    if left_out:
        outputs = ", ".join(left_out)
        warn_once(
            wrapped,
            f"untrained {outputs}",
            f"y: there are targets for {', '.join(map(repr, sorted(trained)))}, and none for {outputs}, which no loss trains: prediction and "
            f"risk are those of the layers as they were. Give y={{{left_out[0]}: ..., ...}}; freeze the layers if they were trained elsewhere; "
            "or, if the output is auxiliary, leave it out of output=",
        )


def _predict(wrapped: Wrapped, x: Any, scaled: bool) -> tuple[Any, dict[Key, torch.dtype]]:
    """Return the prediction, and the inputs that had to be converted to floating point for it: bytes, booleans, or both."""
    scaling = remove_extra(wrapped, "scaling") if not scaled else None

    def predict(inputs: Any) -> Any:
        args, kwargs = as_arguments(wrapped, inputs)
        prediction = answering(wrapped)(*args, **kwargs)
        for method in wrapped._workbench.methods:
            method.check(wrapped, args, kwargs)
        return prediction

    integer_dtypes = {key: leaf.dtype for key, leaf in items_of(x) if isinstance(leaf, Tensor) and not is_float(leaf)}
    try:
        try:
            return predict(x), {}
        except Exception as error:
            for dtypes in ({torch.uint8}, {torch.bool}, {torch.uint8, torch.bool}, set(integer_dtypes.values())):
                converted = {key: dtype for key, dtype in integer_dtypes.items() if dtype in dtypes}
                if not converted or not dtypes.issubset(integer_dtypes.values()):
                    continue
                try:
                    prediction = predict(_converted(x, converted, wrapped))
                except Exception:  # the conversion is not the (only) problem: the first error is raised
                    continue
                if dtypes <= {torch.uint8, torch.bool}:
                    return prediction, converted
                raise TypeError(
                    f"{_describe_dtypes(converted)}, which the model does not take ({error}): give x.float() if they are values"
                ) from error
            raise
    finally:
        if scaling is not None:
            add_extra(wrapped, "scaling", scaling)


def _converted(x: Any, keys: Mapping[Key, torch.dtype], wrapped: Wrapped) -> Any:
    like = first_weight(wrapped)
    if isinstance(x, Tensor):
        return x.to(like.dtype)
    new = {key: leaf.to(like.dtype) if key in keys else leaf for key, leaf in items_of(x)}
    return tuple(new.values()) if isinstance(x, tuple) else new


def _describe_dtypes(keys: Mapping[Key, torch.dtype]) -> str:
    """Describe the dtypes of inputs, as in "x is torch.uint8"."""
    return ", ".join(f"{_name(key)} is {dtype}" for key, dtype in keys.items())


def _name(key: Key) -> str:
    return "x" if key is None else f"x[{key!r}]"


def _check_labels(prediction: Tensor, y: Tensor, in_memory: list[TensorRows]) -> None:
    if prediction.dim() < 2 or y.shape != prediction.shape[:1] + prediction.shape[2:]:
        raise ValueError(
            f"y: class numbers are {shape_of_rows(y)}, but the model gives {shape_of_rows(prediction)}; cross entropy wants "
            "class numbers [n] for scores [n, classes]; "
            + (
                "convert one-hot rows to class numbers, y.argmax(1)"
                if is_one_hot(y)
                else "for values rather than classes give y as float [n, outputs]"
            )
        )
    classes = prediction.shape[1]
    for labels in [rows.y for rows in in_memory] or [y]:
        kept = labels[labels != IGNORED]
        if len(kept) and (kept.min() < 0 or kept.max() >= classes):
            raise ValueError(
                f"y: class numbers go from {int(kept.min())} to {int(kept.max())}, but the model gives {classes} scores, "
                f"for classes 0 to {classes - 1}; mark rows to ignore with {IGNORED}"
                + (
                    "; for values rather than classes give y as float [n, 1]"
                    if classes == 1
                    else _renumbering(kept, classes)
                )
            )


def _renumbering(labels: Tensor, classes: int) -> str:
    """Return a hint for labels that have as many classes as there are scores, but other numbers; "" otherwise."""
    if len(labels.unique()) > classes:
        return ""
    return "; torch.unique(y, return_inverse=True)[1] numbers the classes from 0"


def shape_of_rows(tensor: Tensor) -> str:
    return f"[{', '.join(['n', *map(str, tensor.shape[1:])])}]" if tensor.dim() else "one number"


def sole_likelihood(wrapped: Wrapped) -> Parametric | None:
    """Return the distribution whose likelihood is the only loss of the model if no criterion is given; None if there is none."""
    families = (method.distribution for method in wrapped._workbench.methods)
    return next((family for family in families if isinstance(family, Parametric)), None)


def allows_standardization(criterion: Criterion | None) -> bool:
    """Return whether a criterion has the same optimum for standardized targets as for targets in original units."""
    return criterion in (None, F.mse_loss, F.l1_loss) or type(criterion) in (nn.MSELoss, nn.L1Loss)
