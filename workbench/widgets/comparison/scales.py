"""Scales shared by the pictures of all models of a comparison, so that they can be compared by eye."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from workbench.plots._scales import TYPICAL, beyond, scale

from ..common.predictions import CAUSES, Predictions

Scales: TypeAlias = Mapping[str, tuple[float, float]]


def columns_of(view: Any, answers: Predictions) -> dict[str, Tensor]:
    """Return the quantities in a picture of one model: values and risks of maps and planes, ± two standard deviations of a curve."""
    if view.kind == "curve":
        none = torch.zeros_like(answers.y)
        band = 2 * torch.hypot(answers.risk.get("epistemic", none), answers.risk.get("aleatoric", none))
        return {"prediction": torch.cat([answers.y - band, answers.y + band])}
    names = [name for name in CAUSES if name in answers.risk] or ["total"]
    risks = {name: answers.risk[name] for name in names if name in answers.risk}
    risks = {name: risk for name, risk in risks.items() if risk.shape == answers.y.shape}
    return risks if view.data.classes is not None else {"prediction": answers.y, **risks}


def shared(view: Any, answers: Sequence[Predictions]) -> Scales:
    """Return the limits of a scale for each column of the pictures, or of the axis of curves, shared by all models but outliers.

    Args:
        view: a `PanelData`; kinds other than maps, planes and curves have no scales.
        answers: predictions of the models compared.
    """
    if view.kind not in ("maps", "plane", "curve") or not answers:
        return {}
    by_model = [columns_of(view, a) for a in answers]
    names = dict.fromkeys(name for columns in by_model for name in columns)
    values = {name: [c[name].double().flatten().numpy() for c in by_model if name in c] for name in names}
    if view.kind == "maps" and "prediction" in values:
        values["prediction"].append(view.data.test.y[view.rows].double().flatten().numpy())
    scales = {}
    for name, numbers in values.items():
        bottom = None if name in ("prediction", "vacuitic") else 0.0
        scales[name] = scale(numbers, bottom=bottom, typical=1.0 if name == "prediction" else TYPICAL)
    if view.kind == "curve":  # always show all observations
        observed = [*view.data.train.y.flatten().tolist(), *scales["prediction"]]
        scales["prediction"] = min(observed), max(observed)
    if view.kind == "plane":
        scales.pop("vacuitic", None)  # planes draw it on a fixed scale, as it is in standard deviations
    return scales


def further(values: Tensor, low: float, high: float) -> str:
    """Describe how far one model reaches beyond a scale; "" if it does not."""
    return beyond([("", values.double().flatten().numpy())], low, high).strip()


__all__ = ["Scales", "columns_of", "further", "shared"]
