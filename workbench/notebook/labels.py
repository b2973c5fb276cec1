"""Recorded names as people say them: "vote_sculpt_ood_auroc" is the OOD AUROC of vote+sculpt."""

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
    """A recorded name in words, with the names of metrics that reports have elsewhere.

    Example:
        >>> spoken("vote_sculpt_ood_auroc"), spoken("rmse"), spoken("accuracy_vote_neo"), spoken("neo_picp90")
        ('OOD AUROC, vote+sculpt', 'RMSE', 'accuracy, vote+neo', 'in 90 % interval, neo')
        >>> spoken("rows_train"), spoken("error_of_answered")
        ('rows train', 'error of answered')
    """
    from ..experiments.directions import metric_of

    of, metric = metric_of(name) or ("", "")
    label = _metric(metric)
    if label is None:
        return name.replace("_", " ")
    parts = of.split("_")
    whose = "+".join(parts) if all(part in _WRAPPERS for part in parts) else of.replace("_", " ")
    return f"{label}, {whose}" if whose else label


def _metric(name: str) -> str | None:
    """The label of a metric; None of what is no metric, or is said by a word that may mean anything else."""
    outside = name.startswith("ood_")
    base = name.removeprefix("ood_")
    interval = re.fullmatch(r"(picp|mpiw)(\d+)", base)
    if interval:
        label: str | None = f"{'width of' if interval[1] == 'mpiw' else 'in'} {interval[2]} % interval"
    else:
        label = "accuracy" if base == "accuracy" else LABELS.get(base)
    return f"OOD {label}" if outside and label else label


__all__ = ["LABELS", "spoken"]
