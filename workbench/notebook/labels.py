"""Readable labels for recorded names: "vote_sculpt_ood_auroc" becomes "OOD AUROC, vote+sculpt"."""

from __future__ import annotations

import re

LABELS = {
    **{name: name.upper() for name in ("rmse", "mae", "nll", "crps", "ece", "auroc", "aupr", "aurc", "ause", "mase")},
    "mse": "MSE",
    "miou": "mean IoU",
    "mean_iou": "mean IoU",
    "brier": "Brier score",
    "fpr95": "FPR at 95 % TPR",
    "calibration_error": "calibration error",
    "error_auroc": "AUROC of errors",
    "mixture_nll": "NLL of the mixture",
}
_WRAPPERS = ("plain", "baseline", "vote", "sample", "sculpt", "neo", "laplace", "swag", "snapshot", "augment")


def spoken(name: str) -> str:
    """Return a recorded name in words, with the display names of metrics.

    Example:
        >>> spoken("vote_sculpt_ood_auroc"), spoken("rmse"), spoken("accuracy_vote_neo"), spoken("neo_picp90")
        ('OOD AUROC, vote+sculpt', 'RMSE', 'accuracy, vote+neo', 'in 90 % interval, neo')
        >>> spoken("rows_train"), spoken("error_of_answered")
        ('rows train', 'error of answered')
    """
    from ..experiments.directions import metric_of

    model, metric = metric_of(name) or ("", "")
    label = _metric(metric)
    if label is None:
        return name.replace("_", " ")
    parts = model.split("_")
    subject = "+".join(parts) if all(part in _WRAPPERS for part in parts) else model.replace("_", " ")
    return f"{label}, {subject}" if subject else label


def _metric(name: str) -> str | None:
    """Return the label of a metric; None for unknown metrics, and for names that are common words."""
    is_ood = name.startswith("ood_")
    base = name.removeprefix("ood_")
    interval = re.fullmatch(r"(picp|mpiw)(\d+)", base)
    if interval:
        label: str | None = f"{'width of' if interval[1] == 'mpiw' else 'in'} {interval[2]} % interval"
    else:
        label = "accuracy" if base == "accuracy" else LABELS.get(base)
    return f"OOD {label}" if is_ood and label else label


__all__ = ["LABELS", "spoken"]
