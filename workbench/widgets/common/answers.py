"""What a model says about rows, in the one form that tables and pictures of every task and wrapper read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.calibration.abstention import row_risk
from workbench.calibration.base import collect, log_probabilities
from workbench.errors import NotFittedError
from workbench.risk import Risk

CAUSES = ("aleatoric", "epistemic", "vacuitic")


@dataclass(frozen=True, eq=False)
class Answers:
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


def ask(wrapped: Any, x: Tensor, output: str, *, noise: float | None = None, seed: int = 0) -> Answers:
    """What a wrapped model says about inputs, in evaluation mode and with random draws of its own.

    Args:
        wrapped: what a wrapper made of a model; one that is not fitted yet answers without risk.
        x: inputs [n, ...].
        output: "values", "logits" or "probs".
        noise: standard deviation to assume where no aleatoric risk is measured, for values; None assumes none.
        seed: of the draws.

    Returns:
        The answers, on the CPU.

    Raises:
        ValueError: a prediction or risk is not finite.
    """
    try:
        found = collect(wrapped, x, targets=False, seed=seed)
    except NotFittedError:
        found = collect(wrapped, x, targets=False, risk=False, seed=seed)
    y = found.y.detach().cpu()
    named: Risk = found.risk.map(lambda value: value.detach().cpu())
    risk = {name: row_risk(y, named, name, output).detach() for name in named.names()}
    if output != "values":
        probs = log_probabilities(y, output).exp()
        risk.setdefault("total", torch.special.entr(probs).sum(-1))
        return Answers(probs.argmax(-1), risk, probs)
    measured = "total" in risk
    if "aleatoric" not in risk and noise is not None:
        epistemic = risk.get("epistemic", torch.zeros(len(y)))
        risk["total"] = (epistemic.square() + noise**2).sqrt()
        measured = False
    return Answers(y.reshape(len(y), -1)[:, 0], risk, None, measured)
