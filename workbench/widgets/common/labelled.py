"""Convert rows in dicts with `labels`, as in transformers, to the Data that an explorer takes: one input tensor and targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from workbench.calibration.base import ask, innermost, output_of
from workbench.core.batches.call_arguments import positional_names
from workbench.core.batches.labelled import LabelledLoader, LabelledRows, paired
from workbench.core.batches.rows import place
from workbench.core.method import evaluating
from workbench.data import Data
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
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    few = place({name: value[:PROBE_ROWS] for name, value in inputs.items()}, like.device, like.dtype)
    main, scores = _one_input(model, inputs, few)
    classes = None if output_of(model) == "values" else scores.shape[-1]
    task = "regression" if classes is None else "classification"
    return Data.from_arrays(inputs[main], y, task=task, classes=classes)


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


__all__ = ["explorable"]
