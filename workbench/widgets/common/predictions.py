"""Predictions and risks of rows, in one form for all tasks and wrappers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.calibration.answers import log_probabilities
from workbench.calibration.collection import collect
from workbench.calibration.models import output_of
from workbench.calibration.ranked_rows import row_risk
from workbench.data import Data
from workbench.errors import NotFittedError
from workbench.risk import Risk
from workbench.widgets.common.inputs import rows_at_once

CAUSES = ("aleatoric", "epistemic", "vacuitic")


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions and risks of rows.

    Args:
        y: predicted values or class numbers [n].
        risk: the measured risks and the total by name, each [n]: standard deviations for values, entropies in nats for
            classes; vacuitic risk is standardized.
        probs: class probabilities [n, classes]; None for values.
        measured: whether the total is measured, not the sum of epistemic risk and an assumed constant noise.
    """

    y: Tensor
    risk: dict[str, Tensor]
    probs: Tensor | None = None
    measured: bool = True

    @property
    def causes(self) -> tuple[str, ...]:
        """The measured risks by cause."""
        return tuple(name for name in CAUSES if name in self.risk)

    @property
    def kind(self) -> str:
        """The risk that best estimates the error: the total if measured, else the first by cause, else the total."""
        if self.measured and "total" in self.risk:
            return "total"
        return next(iter(self.causes), "total")

    @property
    def novelty(self) -> str | None:
        """The risk that best detects unknown rows: vacuitic, else epistemic, else a measured total; None without these."""
        known = [name for name in ("vacuitic", "epistemic") if name in self.risk]
        return known[0] if known else "total" if self.measured and "total" in self.risk else None

    def take(self, rows: Tensor) -> Predictions:
        """Return the predictions at some indices."""
        risk = {name: values[rows] for name, values in self.risk.items()}
        return Predictions(self.y[rows], risk, None if self.probs is None else self.probs[rows], self.measured)


def predict(wrapped: Any, x: Tensor, output: str, *, noise: float | None = None, seed: int = 0) -> Predictions:
    """Predict in evaluation mode, without touching the global random state; the model need not measure risks.

    Args:
        wrapped: wrapped model; one that is not fitted yet predicts without risk.
        x: inputs [n, ...].
        output: "values", "logits" or "probs".
        noise: for values, standard deviation assumed if no aleatoric risk is measured; nothing is assumed if None.
        seed: seed of random draws.

    Returns:
        The predictions, on the CPU.

    Raises:
        ValueError: if a prediction or risk is not finite.
    """
    try:
        collected = collect(wrapped, x, targets=False, seed=seed)
    except NotFittedError:
        collected = collect(wrapped, x, targets=False, risk=False, seed=seed)
    y = collected.y.detach().cpu()
    risks: Risk = collected.risk.map(lambda value: value.detach().cpu())
    risk = {name: row_risk(y, risks, name, output).detach() for name in risks.names()}
    if output != "values":
        probs = log_probabilities(y, output).exp()
        risk.setdefault("total", torch.special.entr(probs).sum(-1))
        return Predictions(probs.argmax(-1), risk, probs)
    measured = "total" in risk
    if "aleatoric" not in risk and noise is not None:
        epistemic = risk.get("epistemic", torch.zeros(len(y)))
        risk["total"] = (epistemic.square() + noise**2).sqrt()
        measured = False
    return Predictions(y.reshape(len(y), -1)[:, 0], risk, None, measured)


def predict_cases(wrapped: Any, data: Data, x: Tensor) -> Predictions:
    """Predict rows of a data set, one number or one score for each class, in evaluation mode.

    Random draws are seeded, so that two single rows are predicted under the same noise.

    Args:
        wrapped: wrapped or calibrated model.
        data: data set of the rows.
        x: inputs [n, ...].

    Raises:
        NotFittedError: if a method has not seen training data yet.
        ValueError: if the model does not give one number, or one score for each class, for each row, or gives numbers that are not finite.
    """
    output = output_of(wrapped)
    collected = collect(wrapped, x, targets=False, batch_size=rows_at_once(x, 1024))
    y = collected.y.cpu()
    expected = [(len(x), 1), (len(x),)] if data.classes is None else [(len(x), data.n_outputs)]
    if tuple(y.shape) not in expected or (data.classes is None and output != "values"):
        raise ValueError(
            f"the model gives {output} {list(y.shape)} for {len(x)} rows of {data.name}; cases need {list(expected[0])}: one number for each "
            f"row, or one score for each class. {_remedy(data, y, output)}"
        )
    risks = collected.risk.map(lambda risk: risk.cpu())
    risk = {name: row_risk(y, risks, name, output) for name in risks.names()}
    if data.classes is None:
        return Predictions(y.reshape(-1), risk)
    probs = log_probabilities(y, output).exp()
    return Predictions(probs.argmax(-1), risk, probs)


def _remedy(data: Data, y: Tensor, output: str) -> str:
    """Return what to do if an output does not fit the targets."""
    one = y.shape[1:].numel() == 1
    if data.classes is None and output != "values":
        return "The targets are values: for class numbers give y.long(), and for values a model wrapped without output"
    if data.classes is None or not one:
        return "Wrap a model that returns only that output, and give targets of the same classes"
    if len(data.classes) == 2:
        return 'If that number is the score of yes, wrap the model with output="binary"'
    return "If the targets are values or counts, and no class numbers, give y.float()"


def per_row(predictions: Predictions, by: str, target: Tensor) -> Tensor:
    """Return the numbers that rank rows [n], by a risk, "confidence" or "error".

    The error is |prediction - target| for values, and -log p(true class) in nats for classes, which puts confident mistakes first.
    Confidence ranks by 1 - the highest class probability.

    Args:
        predictions: predictions of the rows.
        by: name of the ranking.
        target: values [n, 1] or class numbers [n].
    """
    if by == "error":
        if predictions.probs is None:
            return (predictions.y - target.reshape(-1)).abs()
        return -predictions.probs.gather(1, target[:, None])[:, 0].clamp_min(1e-12).log()
    if by == "confidence" and predictions.probs is not None:
        return 1 - predictions.probs.amax(-1)
    if by not in predictions.risk:
        raise ValueError(
            f"by={by!r}: the model measures no such risk; choose one of {', '.join(rankings(predictions))}"
        )
    return predictions.risk[by]


def rankings(predictions: Predictions) -> tuple[str, ...]:
    """Return the names that `per_row` can rank rows by."""
    return (*predictions.risk, *(("confidence",) if predictions.probs is not None else ()), "error")


def risk_unit(data: Data, output: str, by: str = "total") -> str:
    """Return the unit of a risk: that of the target for values, nats for classes, none for vacuitic risk."""
    if by in ("vacuitic", "confidence"):
        return ""
    if data.classes is None:
        return data.target.unit
    return "" if output == "values" and by != "error" else "nats"
