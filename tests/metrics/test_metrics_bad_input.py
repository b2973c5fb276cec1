"""Metrics on input that they cannot score: an error that names the shapes, never a broadcast or a NaN."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from workbench import Risk, metrics

GENERATOR = torch.Generator().manual_seed(0)
Y, TARGET = torch.randn(2, 5, 2, generator=GENERATOR)
RISK = torch.rand(5, 2, generator=GENERATOR) + 0.1
PROBS, LABELS = torch.randn(5, 3, generator=GENERATOR).softmax(-1), torch.arange(5) % 3
VOTERS = torch.randn(4, 5, generator=GENERATOR)

PAIRS = dict.fromkeys(("rmse", "mae"), (Y, TARGET))
SPLITS = dict.fromkeys(("auroc", "aupr", "fpr95"), (Y, TARGET))
RANKED = {
    **dict.fromkeys(
        ("aurc", "augrc", "aurg", "ause", "risk_coverage_curve", "sparsification_curve"), (RISK, TARGET.abs())
    ),
    "error_auroc": (RISK, (TARGET > 0).double()),
}
WITH_RISK = {
    **dict.fromkeys(("nll", "crps", "calibration_error", "quantile_calibration_error"), (Y, RISK, TARGET)),
    **dict.fromkeys(("coverage_curve", "picp", "interval_score", "risk_error_correlation"), (Y, RISK, TARGET)),
    **dict.fromkeys(("pit", "coverage_by_step"), (Y, RISK, TARGET)),
    "mpiw": (Y, RISK),
    "mixture_nll": (VOTERS, VOTERS.abs() + 1, VOTERS[0]),
    "mixture_crps": (VOTERS, VOTERS.abs() + 1, VOTERS[0]),
}
CLASSES = dict.fromkeys(
    (
        "accuracy",
        "mean_iou",
        "categorical_nll",
        "brier",
        "ece",
        "adaptive_ece",
        "max_ece",
        "classwise_ece",
        "reliability_curve",
    ),
    (PROBS, LABELS),
)
ALL: dict[str, tuple[Tensor, ...]] = {
    **PAIRS, **SPLITS, **RANKED, **WITH_RISK, **CLASSES, "sharpness": (RISK,), "winkler_score": (Y, Y + RISK, TARGET),
    **dict.fromkeys(("crps_samples", "pit_samples", "energy_score"), (VOTERS, VOTERS[0])),
    "path_coverage": (VOTERS.repeat(3, 1), VOTERS[0]),
}  # fmt: skip


def spoiled(name: str) -> Iterator[tuple[str, list[Tensor]]]:
    """Every argument in turn with NaN, without rows, with a row less, with a dimension more, negative or of no class."""
    for i, good in enumerate(ALL[name]):
        others = {"no rows": good[:0]}
        if good.is_floating_point():
            others["NaN"] = good.clone().index_fill_(0, torch.tensor([1]), float("nan"))
        if len(ALL[name]) > 1 and name not in SPLITS:
            others |= {"a row less": good[..., :-1], "a dimension more": good[..., None]}
        for what, bad in others.items():
            yield f"{what} in argument {i}", [*ALL[name][:i], bad, *ALL[name][i + 1 :]]
    if name in WITH_RISK or name == "sharpness":
        at = int(name != "sharpness")
        yield "negative risk", [*ALL[name][:at], -ALL[name][at], *ALL[name][at + 1 :]]
    if name in RANKED:
        yield "negative errors", [ALL[name][0], -ALL[name][1]]
    if name in ("nll", "mixture_nll"):
        yield "no risk", [ALL[name][0], 0 * ALL[name][1], ALL[name][2]]
    if name in CLASSES:
        yield "one class", [torch.ones(5, 1), torch.zeros(5, dtype=torch.int64)]
        yield "labels beyond the classes", [PROBS, LABELS + 1]
        yield "negative labels", [PROBS, LABELS - 1]
        yield "labels that are numbers", [PROBS, LABELS.float()]
    if name in CLASSES and name not in ("accuracy", "mean_iou"):
        yield "a sum above one", [1.1 * PROBS, LABELS]
        yield "logits", [PROBS.log(), LABELS]


def test_every_function_is_here() -> None:
    functions = {name for name in metrics.__all__ if name.islower()} - {"metric"}
    of_boxes = {
        "average_precision",
        "mean_average_precision",
        "detection_ece",
        "matched_boxes",
        "box_calibration_error",
    }
    of_series = {"mase", "pinball", "coverage_over_time"}  # see test_metrics_forecasts.py
    elsewhere = {"disentanglement_error", "nab_score"}  # see test_metrics_disentanglement.py, test_metrics_anomalies.py
    # those of boxes take dicts, see test_metrics_boxes.py
    assert functions == set(ALL) | of_boxes | of_series | elsewhere


@pytest.mark.parametrize("name", ALL)
def test_what_cannot_be_scored_is_an_error_with_the_shapes(name: str) -> None:
    getattr(metrics, name)(*ALL[name])
    for what, arguments in spoiled(name):
        shapes = "|".join(re.escape(str(tuple(argument.shape))) for argument in arguments)
        with pytest.raises(ValueError, match=shapes):
            pytest.fail(f"{what}: gave {getattr(metrics, name)(*arguments)}")


@pytest.mark.parametrize("name", ALL)
def test_complex_numbers_have_no_order_and_are_refused(name: str) -> None:
    for i, good in enumerate(ALL[name]):
        with pytest.raises((TypeError, ValueError), match="complex"):
            getattr(metrics, name)(*ALL[name][:i], good + 0j, *ALL[name][i + 1 :])


@pytest.mark.parametrize("name", ALL)
def test_nothing_is_no_number(name: str) -> None:
    for i in range(len(ALL[name])):
        with pytest.raises(TypeError, match="must be a tensor or an array of numbers, found None"):
            getattr(metrics, name)(*ALL[name][:i], None, *ALL[name][i + 1 :])


def test_a_risk_without_a_total_is_refused_by_name() -> None:
    for score in (metrics.sharpness, lambda risk: metrics.aurc(risk, torch.ones(3))):
        with pytest.raises(TypeError, match="risk must be a tensor or an array of numbers, found None"):
            score(Risk(aleatoric=torch.ones(3)))
