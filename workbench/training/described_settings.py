"""Settings and rows of a training as text, by which a checkpoint recognizes them."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence, Sized
from dataclasses import fields, is_dataclass
from typing import Any, cast

import torch
from torch.optim import Optimizer

from workbench.core.batches.labelled import kind_of
from workbench.core.batches.rows import Source, TensorRows
from workbench.core.method import Method
from workbench.core.settings import Settings, settings_of
from workbench.core.wrapped import Wrapped
from workbench.training.augmentation import Augmentation
from workbench.training.default_losses import Criterion, LossByMeaning

WRAPPERS, CODE = "wrapper settings", "code of functions"
OPTIONS = bool | int | float | str | tuple | None  # types whose repr says all


def described_settings(
    wrapped: Wrapped,
    criterion: Criterion | None,
    augment: Sequence[Augmentation],
    weighted_loss: LossByMeaning | None,
    **values: Any,
) -> dict[str, str]:
    """Return the settings of a training by name, as text.

    Args:
        wrapped: the model.
        criterion: the loss; None for the likelihood of the risk heads.
        augment: changes of the training rows.
        weighted_loss: the loss with class weights, None without.
        values: other settings; underscores in their names stand for spaces.
    """
    return {
        "wrapped": wrapped._workbench_name(),
        WRAPPERS: ", ".join(filter(None, map(_describe_wrapper, wrapped._workbench.methods))) or "defaults",
        **{name.replace("_", " "): str(value) for name, value in values.items()},
        "criterion": "likelihood" if criterion is None else describe(criterion),
        **({"augment": ", ".join(map(describe_augmentation, augment))} if augment else {}),
        **({} if weighted_loss is None else {"class weight": describe_class_weight(weighted_loss)}),
    }


def _describe_wrapper(method: Method) -> str:
    """Describe the settings that change the training and differ from their defaults; "" if there are none."""
    changed = method.wrapper.changed() if isinstance(method.wrapper, Settings) else {}
    named = [s.name for s in settings_of(type(method.wrapper)) if s.trains and s.name in changed]
    return f"{method.name}({', '.join(f'{name}={_describe_option(changed[name])}' for name in named)})" if named else ""


def _describe_option(value: Any) -> str:
    """Describe a value, of a distribution its options; those that are learned or random generators change while a training runs."""
    if not is_dataclass(value):
        return repr(value) if isinstance(value, OPTIONS) else type(value).__name__
    options = {field.name: getattr(value, field.name) for field in fields(value)}
    texts = [f"{name}={option!r}" for name, option in options.items() if isinstance(option, OPTIONS)]
    return f"{type(value).__name__}({', '.join(texts)})"


def describe(value: Any) -> str:
    """Describe a setting by a text that is the same in every process (without memory addresses).

    Example:
        >>> describe(functools.partial(torch.nn.functional.huber_loss, delta=2.0))
        'huber_loss(delta=2.0)'
        >>> describe(torch.nn.MSELoss())
        'MSELoss()'
    """
    if isinstance(value, functools.partial):
        arguments = [*map(describe, value.args), *(f"{name}={describe(v)}" for name, v in value.keywords.items())]
        return f"{describe(value.func)}({', '.join(arguments)})"
    if callable(value) and not isinstance(value, torch.nn.Module):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return repr(value)


def checksum(source: Source | None) -> str:
    """Return a fingerprint of rows: sha256 of rows in memory, otherwise their kind and number."""
    if not isinstance(source, TensorRows):
        return "none" if source is None else f"{kind_of(source)} of {len(cast(Sized, source))}"
    total = hashlib.sha256()
    for leaf in (*source.inputs, *source.targets):
        total.update(f"{leaf.dtype} {tuple(leaf.shape)}\n".encode())
        total.update(leaf.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()


def describe_augmentation(augmentation: Augmentation) -> str:
    """Describe a change of the training rows: a dataclass by its fields, a function by its name."""
    return repr(augmentation) if is_dataclass(augmentation) else describe(augmentation)


def describe_class_weight(loss: LossByMeaning) -> str:
    """Describe the class weights of each output."""
    return str({name: weights.tolist() for name, weights in (loss.class_weight or {}).items()})


def describe_optimizer(optimizer: Optimizer, has_schedule: bool) -> str:
    """Describe an optimizer by its settings, regardless of how its steps are computed (fused or not)."""
    settings = {**optimizer.defaults, "fused": None} if has_schedule else optimizer.defaults
    groups = ", biases and norms not decayed" if has_schedule and len(optimizer.param_groups) > 1 else ""
    return f"{type(optimizer).__name__}{sorted(settings.items())}, schedule {has_schedule}{groups}"
