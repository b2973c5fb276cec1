"""One scale for the pictures of all models of a comparison, so that they can be compared by eye."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from workbench.plots._scales import TYPICAL, beyond, scale

from ..common.predictions import CAUSES, Predictions

Scales: TypeAlias = Mapping[str, tuple[float, float]]


def columns_of(view: Any, answers: Predictions) -> dict[str, Tensor]:
    """What pictures show of one model: maps and planes values and risks in colours, a curve its band of two standard deviations."""
    if view.kind == "curve":
        none = torch.zeros_like(answers.y)
        band = 2 * torch.hypot(answers.risk.get("epistemic", none), answers.risk.get("aleatoric", none))
        return {"prediction": torch.cat([answers.y - band, answers.y + band])}
    names = [name for name in CAUSES if name in answers.risk] or ["total"]
    risks = {name: answers.risk[name] for name in names if name in answers.risk}
    risks = {name: risk for name, risk in risks.items() if risk.shape == answers.y.shape}
    return risks if view.data.classes is not None else {"prediction": answers.y, **risks}


def shared(view: Any, answers: Sequence[Predictions]) -> Scales:
    """For each column of the pictures the ends of one scale for all models, which an outlier among them does not stretch; of curves the axis.

    Args:
        view: a `PanelData`; other kinds than maps, planes and curves have no scale.
        answers: of the models that are compared.
    """
    if view.kind not in ("maps", "plane", "curve") or not answers:
        return {}
    said = [columns_of(view, a) for a in answers]
    names = dict.fromkeys(name for columns in said for name in columns)
    values = {name: [c[name].double().flatten().numpy() for c in said if name in c] for name in names}
    if view.kind == "maps" and "prediction" in values:
        values["prediction"].append(view.data.test.y[view.rows].double().flatten().numpy())
    scales = {}
    for name, numbers in values.items():
        bottom = None if name in ("prediction", "vacuitic") else 0.0
        scales[name] = scale(numbers, bottom=bottom, typical=1.0 if name == "prediction" else TYPICAL)
    if view.kind == "curve":  # what was observed is seen, whatever the models say
        observed = [*view.data.train.y.flatten().tolist(), *scales["prediction"]]
        scales["prediction"] = min(observed), max(observed)
    if view.kind == "plane":
        scales.pop("vacuitic", None)  # which is in standard deviations, on the same scale everywhere
    return scales


def further(values: Tensor, low: float, high: float) -> str:
    """How far one model reaches beyond a scale, in words for its picture; "" if it does not."""
    return beyond([""], [values.double().flatten().numpy()], low, high).strip()


__all__ = ["Scales", "columns_of", "further", "shared"]
