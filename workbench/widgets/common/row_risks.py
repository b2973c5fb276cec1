"""What a wrapped model says about rows of a data set, one number for each row and risk, and how to rank them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from workbench.calibration.abstention import row_risk
from workbench.calibration.base import collect, log_probabilities, output_of
from workbench.data import Data
from workbench.widgets.common.answers import Answers


def ask(wrapped: Any, data: Data, x: Tensor, seed: int = 0) -> Answers:
    """What a model says about rows, in evaluation mode and with random draws of its own.

    Args:
        wrapped: what a wrapper made of a model, or a calibrated model.
        data: what the rows are of.
        x: inputs [n, ...].
        seed: of the draws; with the same seed two single rows are asked under the same noise.

    Raises:
        NotFittedError: a method has seen no training data yet.
        ValueError: the model does not give one number, or one score for each class, for each row; or what it gives is not finite.
    """
    output = output_of(wrapped)
    found = collect(wrapped, x, targets=False, seed=seed)
    y = found.y.cpu()
    wanted = [(len(x), 1), (len(x),)] if data.classes is None else [(len(x), data.n_outputs)]
    if tuple(y.shape) not in wanted or (data.classes is None and output != "values"):
        raise ValueError(
            f"the model gives {output} {list(y.shape)} for {len(x)} rows of {data.name}; cases need {list(wanted[0])}: one number for each "
            "row, or one score for each class. Wrap a model that picks one output"
        )
    named = found.risk.map(lambda risk: risk.cpu())
    risk = {name: row_risk(y, named, name, output) for name in named.names()}
    if data.classes is None:
        return Answers(y.reshape(-1), risk)
    probs = log_probabilities(y, output).exp()
    return Answers(probs.argmax(-1), risk, probs)


def per_row(answers: Answers, by: str, target: Tensor) -> Tensor:
    """One number for each row to rank it by [n]: a risk, "confidence" or "error".

    The error is |prediction - target| for values, and for classes -log p(true class) in nats, so that confident mistakes come first.
    Confidence ranks as elsewhere by 1 - the highest class probability.

    Args:
        answers: of the rows.
        by: the name.
        target: values [n, 1] or class numbers [n].
    """
    if by == "error":
        if answers.probs is None:
            return (answers.y - target.reshape(-1)).abs()
        return -answers.probs.gather(1, target[:, None])[:, 0].clamp_min(1e-12).log()
    if by == "confidence" and answers.probs is not None:
        return 1 - answers.probs.amax(-1)
    if by not in answers.risk:
        raise ValueError(f"by={by!r}: the model measures no such risk; there are {', '.join(rankings(answers))}")
    return answers.risk[by]


def rankings(answers: Answers) -> tuple[str, ...]:
    """What rows can be ranked by."""
    return (*answers.risk, *(("confidence",) if answers.probs is not None else ()), "error")


def taken(answers: Answers, rows: Tensor) -> Answers:
    """The answers for these rows."""
    risk = {name: value[rows] for name, value in answers.risk.items()}
    return Answers(answers.y[rows], risk, None if answers.probs is None else answers.probs[rows])


def risk_unit(data: Data, output: str, by: str = "total") -> str:
    """The unit of a risk: that of the target, nats for class outputs, none for vacuitic risk."""
    if by in ("vacuitic", "confidence"):
        return ""
    if data.classes is None:
        return data.target.unit
    return "" if output == "values" and by != "error" else "nats"


__all__ = ["Answers", "ask", "per_row", "rankings", "risk_unit", "taken"]
