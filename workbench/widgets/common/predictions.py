"""Predictions and risks of rows, in the one form that tables and pictures of every task and wrapper read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.calibration.abstention import row_risk
from workbench.calibration.answers import log_probabilities
from workbench.calibration.base import collect, output_of
from workbench.data import Data
from workbench.errors import NotFittedError
from workbench.risk import Risk

CAUSES = ("aleatoric", "epistemic", "vacuitic")


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions and risks of rows.

    Args:
        y: predicted values [n]; of classes the class numbers.
        risk: by name, each [n]; those that were measured, and the total. For values standard deviations, for classes
            entropies in nats; vacuitic risk is standardised.
        probs: class probabilities [n, classes]; None for values.
        measured: whether the total is a measured risk, not a constant noise that was lent to a model without one.
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
        """The risk that is the best guess of the error: total if it was measured, else the first by cause, else total."""
        if self.measured and "total" in self.risk:
            return "total"
        return next(iter(self.causes), "total")

    @property
    def novelty(self) -> str | None:
        """The risk made to tell unknown rows: vacuitic, else epistemic, else a measured total."""
        known = [name for name in ("vacuitic", "epistemic") if name in self.risk]
        return known[0] if known else "total" if self.measured and "total" in self.risk else None

    def take(self, rows: Tensor) -> Predictions:
        """Those of some rows, by their places."""
        risk = {name: values[rows] for name, values in self.risk.items()}
        return Predictions(self.y[rows], risk, None if self.probs is None else self.probs[rows], self.measured)


def predict(wrapped: Any, x: Tensor, output: str, *, noise: float | None = None, seed: int = 0) -> Predictions:
    """Predict in evaluation mode, with random draws that touch no others; a model without risks is fine.

    Args:
        wrapped: what a wrapper made of a model; one that is not fitted yet predicts without risk.
        x: inputs [n, ...].
        output: "values", "logits" or "probs".
        noise: standard deviation to assume where no aleatoric risk is measured, for values; None assumes none.
        seed: of the draws.

    Returns:
        The predictions, on the CPU.

    Raises:
        ValueError: a prediction or risk is not finite.
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


def predict_cases(wrapped: Any, data: Data, x: Tensor, seed: int = 0) -> Predictions:
    """Predict rows of a data set, one number or one score for each class, in evaluation mode.

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
    collected = collect(wrapped, x, targets=False, seed=seed)
    y = collected.y.cpu()
    wanted = [(len(x), 1), (len(x),)] if data.classes is None else [(len(x), data.n_outputs)]
    if tuple(y.shape) not in wanted or (data.classes is None and output != "values"):
        raise ValueError(
            f"the model gives {output} {list(y.shape)} for {len(x)} rows of {data.name}; cases need {list(wanted[0])}: one number for each "
            "row, or one score for each class. Wrap a model that picks one output"
        )
    risks = collected.risk.map(lambda risk: risk.cpu())
    risk = {name: row_risk(y, risks, name, output) for name in risks.names()}
    if data.classes is None:
        return Predictions(y.reshape(-1), risk)
    probs = log_probabilities(y, output).exp()
    return Predictions(probs.argmax(-1), risk, probs)


def per_row(predictions: Predictions, by: str, target: Tensor) -> Tensor:
    """One number for each row to rank it by [n]: a risk, "confidence" or "error".

    The error is |prediction - target| for values, and for classes -log p(true class) in nats, so that confident mistakes come first.
    Confidence ranks as elsewhere by 1 - the highest class probability.

    Args:
        predictions: of the rows.
        by: the name.
        target: values [n, 1] or class numbers [n].
    """
    if by == "error":
        if predictions.probs is None:
            return (predictions.y - target.reshape(-1)).abs()
        return -predictions.probs.gather(1, target[:, None])[:, 0].clamp_min(1e-12).log()
    if by == "confidence" and predictions.probs is not None:
        return 1 - predictions.probs.amax(-1)
    if by not in predictions.risk:
        raise ValueError(f"by={by!r}: the model measures no such risk; there are {', '.join(rankings(predictions))}")
    return predictions.risk[by]


def rankings(predictions: Predictions) -> tuple[str, ...]:
    """What rows can be ranked by."""
    return (*predictions.risk, *(("confidence",) if predictions.probs is not None else ()), "error")


def risk_unit(data: Data, output: str, by: str = "total") -> str:
    """The unit of a risk: that of the target, nats for class outputs, none for vacuitic risk."""
    if by in ("vacuitic", "confidence"):
        return ""
    if data.classes is None:
        return data.target.unit
    return "" if output == "values" and by != "error" else "nats"
