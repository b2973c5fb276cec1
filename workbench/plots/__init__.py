"""Figures of predictions and their risk, ready for a paper; every function takes and returns matplotlib Axes.

With ``ax=None`` a function makes a new figure; otherwise it draws only on the Axes it is given. ``rcParams`` are read, never changed.
Inputs are tensors (any device, with or without gradient), arrays or lists.
"""

from __future__ import annotations

from workbench.plots._common import COLOURS
from workbench.plots.boxes import boxes
from workbench.plots.classification import decision_map, reliability
from workbench.plots.curves import bands
from workbench.plots.importance import importance, occlusion_map
from workbench.plots.maps import maps, overlay
from workbench.plots.matrix import matrix
from workbench.plots.out_of_distribution import ood, ood_histogram, roc
from workbench.plots.regression import coverage, predicted_against_true, risk_against_error, targets
from workbench.plots.selective import risk_coverage, sparsification
from workbench.plots.sequences import coverage_by_step, coverage_over_time, fan, tokens
from workbench.plots.summary import history, risk_split

__all__ = [
    "COLOURS",
    "bands",
    "boxes",
    "coverage",
    "coverage_by_step",
    "coverage_over_time",
    "decision_map",
    "fan",
    "history",
    "importance",
    "maps",
    "matrix",
    "occlusion_map",
    "ood",
    "ood_histogram",
    "overlay",
    "predicted_against_true",
    "reliability",
    "risk_against_error",
    "risk_coverage",
    "risk_split",
    "roc",
    "sparsification",
    "targets",
    "tokens",
]
