"""Ranking numbers, one for each row with several positions, columns or labels.

Only positions with a target count, not those with class number -100 (void, padding, tokens left out).

- Entropies and vacuitic risk of positions: the mean over positions, in nats; vacuitic risk has no unit.
- Standard deviations: the root mean square over positions. Columns [n, k] may differ in unit, so each is first divided by the standard
  deviation of its training targets; "total of NAME" ranks by one column, in its own unit.
- A risk with one number per row is used as it is.
- "confidence": the mean of 1 - the highest probability; for a label, the higher of yes and no.
- "error": the mean of -log p(truth) in nats for classes and labels, of |prediction - target| for values, with columns divided as above.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.calibration.answers import log_probabilities
from workbench.calibration.models import ask, ask_as_given, record_of
from workbench.calibration.one_output import one_meaning
from workbench.core.batches.rows import first_weight, place
from workbench.core.outputs.options import form_of, meaning_of
from workbench.data import Data
from workbench.data.targets import VOID

OF = " of "  # between the names of a ranking and of its column


def predict_positions(wrapped: Any, data: Data, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Predict values [n, ...], probabilities of classes [n, ..., classes] or of labels [n, labels], and risks, on the CPU.

    The caller sets random state, gradients and evaluation mode.

    Raises:
        ValueError: if shapes or meaning do not fit the targets, or numbers are not finite.
    """
    like = first_weight(wrapped)
    meaning = output_meaning(wrapped)
    form = form_of(meaning)
    answer = ask_as_given if form == "binary" else ask
    y, risks = answer(wrapped, place(x, like.device, like.dtype), True)
    y, risk = _without_channel(y.cpu()), {name: _without_channel(risks[name].cpu()) for name in risks.names()}
    shape = [len(x), *_without_channel(data.train.y[:1]).shape[1:]]
    expected, forms = {
        "labels": (shape, ("binary",)),
        "classification": ([*shape, data.n_outputs], ("logits", "probs")),
    }.get(str(data.task), (shape, ("values",)))
    if list(y.shape) != expected or form not in forms:
        remedy = f"wrap it with output={forms[0]!r}, for maps output=Logits(dim=1), or wrap a function that returns only one output"
        if form == "binary":
            remedy = "if each target is a yes or no, give y.bool(), or task='labels' to Data.from_arrays"
        raise ValueError(
            f"the model gives {form} {list(y.shape)} (classes last) for {len(x)} rows of {data.name}; needed are "
            f"{' or '.join(forms)} {expected}: {remedy}"
        )
    if form == "binary":
        y = y.sigmoid() if getattr(meaning_of(meaning), "logits", True) else y
    elif form != "values":
        y = log_probabilities(y, form).exp()
    for name, value in (("prediction", y), *risk.items()):
        if not bool(value.isfinite().all()):
            raise ValueError(f"the {name} of the model is NaN or infinite for some of the rows")
        if name != "prediction" and list(value.shape) not in (shape, [len(x)]):
            raise ValueError(
                f"the {name} risk is {list(value.shape)} for targets {shape}; it must have that shape, or be [{len(x)}]"
            )
    return y, risk


def output_meaning(wrapped: Any) -> Any:
    """Return the meaning of the explored output, also of a model with several outputs."""
    output = record_of(wrapped).output
    return one_meaning(output) if isinstance(output, Mapping) else output


def _without_channel(maps: Tensor) -> Tensor:
    """Convert maps [n, 1, height, width] to [n, height, width]."""
    return maps[:, 0] if maps.ndim == 4 and maps.shape[1] == 1 else maps


def targets_of(data: Data, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return targets in the shape of the outputs of `predict_positions`, and whether each is known, bool."""
    y = _without_channel(y)
    return y, (y != VOID if data.classes is not None or data.task == "labels" else torch.ones_like(y, dtype=torch.bool))


def scales_of(data: Data) -> Tensor:
    """Return the divisors of values before ranking: the standard deviations of the training targets [k] for columns, else 1."""
    if data.classes is not None or data.task == "labels" or data.train.y.ndim != 2:
        return torch.ones(())
    spread = data.train.y.double().std(0, correction=0)
    return spread.where(spread > 0, 1.0)


def errors(data: Data, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each position [n, ...] the error used for ranking, and the one used for abstention: 0 or 1 for classes, the same for values.

    Errors of positions without a class are meaningless.
    """
    if data.task == "labels":
        yes = target == 1
        of_truth = torch.where(yes, y, 1 - y)
        return -of_truth.clamp_min(1e-12).log(), ((y > 0.5) != yes).double()
    if data.classes is not None:
        of_truth = y.gather(-1, target.clamp_min(0)[..., None])[..., 0]
        return -of_truth.clamp_min(1e-12).log(), (y.argmax(-1) != target).double()
    difference = (y - target).abs()
    return difference, difference


def mean_known(values: Tensor, known: Tensor) -> Tensor:
    """Return the mean over positions with a target, float64 [n]; NaN for rows without any."""
    values = values.double().masked_fill(~known, 0.0).flatten(1)
    return values.sum(1) / known.flatten(1).sum(1)


def row_numbers(
    data: Data, y: Tensor, risk: Mapping[str, Tensor], target: Tensor, scales: Tensor, names: Sequence[str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the ranking numbers of rows, and their errors for abstention, each float64 [n].

    Args:
        data: data set of the rows.
        y: predictions, see `predict_positions`.
        risk: risks by name, [n] or [n, ...].
        target: targets [n, ...].
        scales: see `scales_of`.
        names: names of the columns or labels with rankings of their own; may be empty.

    Returns:
        Numbers by ranking, and errors by column ("" for all of them).
    """
    target, known = targets_of(data, target)
    of_values = data.classes is None and data.task != "labels"
    by_position = {name: value for name, value in risk.items() if value.ndim > 1}
    ranking: dict[str, Tensor] = {}
    for name, value in risk.items():
        if value.ndim == 1:
            ranking[name] = value.double()
        elif of_values and name != "vacuitic":
            ranking[name] = mean_known((value / scales).square(), known).sqrt()
        else:
            ranking[name] = mean_known(value, known)
    if not of_values:
        by_position["confidence"] = 1 - (torch.maximum(y, 1 - y) if data.task == "labels" else y.amax(-1))
        ranking["confidence"] = mean_known(by_position["confidence"], known)
    by_position["error"], counted = errors(data, y, target)
    ranking["error"] = mean_known(by_position["error"] / scales, known)
    wrong = {"": mean_known(counted / scales, known)}
    for i, column in enumerate(names):
        ranking |= {f"{name}{OF}{column}": value[:, i].double() for name, value in by_position.items()}
        wrong[column] = counted[:, i].double()
    return ranking, wrong


__all__ = [
    "OF",
    "errors",
    "mean_known",
    "output_meaning",
    "predict_positions",
    "row_numbers",
    "scales_of",
    "targets_of",
]
