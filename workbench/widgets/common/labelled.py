"""Convert rows in dicts with `labels`, as in transformers, to the Data that an explorer takes: one input tensor and targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from workbench.calibration.models import ask, check_model, innermost, output_of
from workbench.calibration.one_output import one_meaning
from workbench.core.batches.call_arguments import positional_names
from workbench.core.batches.labelled import LabelledLoader, LabelledRows, paired
from workbench.core.batches.rows import TensorRows, first_weight, place
from workbench.core.batches.rows import read as read_rows
from workbench.core.method import evaluating
from workbench.core.outputs.options import form_of
from workbench.data import Data
from workbench.data.targets import is_boolean
from workbench.engine.effects.private_random import own_random

PROBE_ROWS = 4  # rows predicted to find out the output of the model


def explorable(models: nn.Module | Mapping[str, nn.Module], data: Any) -> Any:
    """Convert rows in dicts with labels to a Data, and return data in any other form unchanged.

    Args:
        models: wrapped or calibrated model; of several models, the first decides how labels match scores.
        data: as for `Explorer`.

    Raises:
        ValueError: as `workbench.core.batches.labelled.paired`; or if inputs other than the first differ from row to row, as padding masks do.
    """
    model: Any = next(iter(models.values()), None) if isinstance(models, Mapping) else models
    if isinstance(data, str | DataLoader | Data) or not isinstance(model, nn.Module):
        return data
    pairs = paired(innermost(model), data)
    if pairs is data:
        return data
    if isinstance(pairs, LabelledLoader | LabelledRows):
        parts = list(pairs) if isinstance(pairs, LabelledLoader) else [pairs[i] for i in range(len(pairs))]
        join = torch.cat if isinstance(pairs, LabelledLoader) else torch.stack
        pairs = {name: join([x[name] for x, _ in parts]) for name in parts[0][0]}, join([y for _, y in parts])
    inputs, y = pairs
    like = first_weight(model)
    few = place({name: value[:PROBE_ROWS] for name, value in inputs.items()}, like.device, like.dtype)
    main, scores = _one_input(model, inputs, few)
    classes = None if output_of(model) == "values" else scores.shape[-1]
    task = "regression" if classes is None else "classification"
    return Data.from_arrays(inputs[main], y, task=task, classes=classes)


def task_of(models: nn.Module | Mapping[str, nn.Module], data: Any) -> str | None:
    """Return the task of a pair (x, y) whose dtype says another than the model; None if the dtype is right.

    Whole numbers are values, such as counts, to a model that gives one value a row, and 0 and 1 in floating point are classes to one that
    gives a yes or no.

    Raises:
        ValueError: if the targets are 0 and 1 and nobody said whether the one number that the model gives is a value or the score of yes.
    """
    model: Any = next(iter(models.values()), None) if isinstance(models, Mapping) else models
    if not (isinstance(data, tuple | list) and len(data) == 2 and isinstance(model, nn.Module)):
        return None
    check_model(model)
    try:
        rows = read_rows(data)
    except (TypeError, ValueError):  # raised again where the rows are read
        return None
    if not (isinstance(rows, TensorRows) and isinstance(rows.x, Tensor)) or is_boolean(data[1]):
        return None
    yes_or_no = bool((rows.y == 0).logical_or(rows.y == 1).all())
    output = innermost(model)._workbench.output
    if rows.y.is_floating_point():
        return "classification" if yes_or_no and form_of(one_meaning(output)) == "binary" else None
    if output_of(model) != "values" or not _gives_one(model, rows.x[:PROBE_ROWS]):
        return None
    if yes_or_no and output is None:
        raise ValueError(
            "data: y is 0 or 1, and the model gives one number a row, which can be the logit of 1 or a value: wrap it with "
            'output="binary" if it is the logit, or with output="values" if it is a value'
        )
    return "regression"


def _gives_one(model: nn.Module, x: Tensor) -> bool:
    """Return whether a model gives one number a row; False if it fails, of which the error comes where all rows are predicted."""
    like = first_weight(model)
    try:
        with own_random(0, like.device), torch.no_grad(), evaluating(model, whole=True):
            y = ask(model, place(x, like.device, like.dtype), False)[0]
    except (TypeError, ValueError, RuntimeError):
        return False
    return tuple(y.shape) in ((len(x),), (len(x), 1))


def _one_input(model: nn.Module, inputs: dict[str, Tensor], few: dict[str, Tensor]) -> tuple[str, Tensor]:
    """Return the name of the main input and the predictions for a few rows; refuse other inputs that make a difference."""
    main = next((name for name in positional_names(innermost(model)) if name in inputs), next(iter(inputs)))
    others = [name for name in inputs if name != main]
    differing = [name for name in others if bool((inputs[name] != inputs[name].flatten()[0]).any())]

    def predicted(x: Any) -> Tensor:
        with own_random(0, next(iter(few.values())).device), torch.no_grad(), evaluating(model, whole=True):
            return ask(model, x, False)[0]

    scores = predicted(few)
    if differing or (others and not torch.allclose(scores, predicted((few[main],)), rtol=1e-4, atol=1e-5)):
        raise ValueError(
            f"data: the inputs are {', '.join(inputs)}, and an explorer shows one tensor, but the predictions depend on "
            f"{', '.join(differing or others)} as well: give rows of one length without padding, or use top_uncertain and selective, "
            "which take such batches"
        )
    return main, scores


__all__ = ["explorable", "task_of"]
