"""Collection of a model's answers for rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from workbench.calibration.answers import Answers, check_finite
from workbench.calibration.binary import class_numbers
from workbench.calibration.models import ask, binary_of, check_model, innermost, offsets_of
from workbench.calibration.rows import batches_of_rows
from workbench.calibration.support import REAL, support_of
from workbench.core.batches.call_arguments import as_arguments
from workbench.core.batches.labelled import paired
from workbench.core.batches.rows import first_weight
from workbench.core.method import evaluating
from workbench.core.outputs.class_scores import at_least_float32
from workbench.core.outputs.slips import warn_unsaid
from workbench.core.saving.training_data import facts_of, today
from workbench.engine.effects.private_random import generator_of, own_random
from workbench.errors import as_count
from workbench.risk import Risk


def collect(
    model: Any,
    data: Any,
    *,
    risk: bool = True,
    targets: bool = True,
    offsets: bool = False,
    batch_size: int = 1024,
    seed: int = 0,
    of_inputs: Mapping[str, Callable[[Any, int], Tensor]] | None = None,
    check: Callable[[Answers], object] | None = None,
) -> Answers:
    """Return the answers of a model for rows, in their order.

    Args:
        model: a wrapped or calibrated model.
        data: a pair (x, y), a Split, a Dataset or a DataLoader of pairs; without targets also a tensor or batches of inputs.
        risk: whether to compute risks.
        targets: whether targets are needed; without them `Answers.target` is empty.
        offsets: whether to compute the quantiles of quantile heads.
        batch_size: rows per call of the model.
        seed: seed of the model's random draws; the global random state is not touched.
        of_inputs: functions by name of a batch of inputs and its number of rows, which return one number per row.
        check: called with the answers for each batch; raises if they can't be used, before the model is run over all rows.

    Raises:
        TypeError: data is something else, or the model does not return a tensor.
        ValueError: there are no rows, they are the training rows of a Data, or predictions or targets are not finite.
    """
    check_model(model)
    batch_size = as_count("batch_size", batch_size)
    parameter = first_weight(model)
    parts: list[tuple[Tensor, Risk, Tensor]] = []
    offset_parts: list[Tensor] = []
    n_rows = 0
    values_of_inputs: dict[str, list[Tensor]] = {name: [] for name in of_inputs or {}}
    with own_random(seed, parameter.device), torch.no_grad(), evaluating(model, whole=True):
        generator_state = generator_of(parameter.device).get_state()
        for batch in batches_of_rows(paired(innermost(model), data, targets=targets), parameter, batch_size, targets):
            y, risks = ask(model, batch.x, risk)
            if y.dim() == 0 or (targets and len(batch.y) != len(y)):
                rows = f"a batch of {len(batch.y)} rows" if targets else "a batch"
                raise ValueError(f"the model gives {list(y.shape)} for {rows}; it must give one row for each")
            batch_targets = batch.y.to(y.device) if targets else y[:0]
            if targets and binary_of(model) is not None:
                batch_targets = class_numbers(batch_targets, y)
            elif targets:
                warn_unsaid(innermost(model), None, batch_targets, [y])
            check_finite(y, risks, batch_targets, n_rows)
            if check is not None:
                check(Answers(y, risks, batch_targets))
            n_rows += len(y)
            parts.append((y, risks, batch_targets))
            for name, row_values in values_of_inputs.items():
                row_values.append((of_inputs or {})[name](batch.x, len(y)))
            if offsets:
                offset_parts.append(offsets_of(model, batch.x, y))
        draws_randomly = not torch.equal(generator_state, generator_of(parameter.device).get_state())
        support = support_of(innermost(model), *as_arguments(model, batch.x)) if parts and targets else REAL
    if not n_rows:
        raise ValueError("data: there are no rows")
    if len(shapes := {tuple(part[0].shape[1:]) for part in parts}) > 1:
        first, other = (["rows", *shape] for shape in sorted(shapes)[:2])
        raise ValueError(
            f"data: the model gives {first} for one batch and {other} for another; pad all rows to one length, and mark the padding in the "
            "targets by class number -100"
        )
    y = torch.cat([part[0] for part in parts])
    batch_targets = torch.cat([part[2] for part in parts])
    risks = Risk(**{name: torch.cat([part[1][name] for part in parts]) for name in parts[0][1].names()})
    return Answers(
        y,
        risks,
        at_least_float32(batch_targets) if batch_targets.is_floating_point() else batch_targets,
        torch.cat(offset_parts, 1) if offset_parts else None,
        {name: torch.cat(row_values) for name, row_values in values_of_inputs.items()},
        draws_randomly,
        {**facts_of(data), "rows": len(y), "date": today()},
        support,
    )
