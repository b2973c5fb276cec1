"""Rows that cannot be used for calibration are refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from workbench import vote
from workbench.calibration import calibrate, selective, top_uncertain
from workbench.calibration.abstention import upper_bound
from workbench.calibration.conformal import conformal_quantile
from workbench.calibration.cross import cv_plus
from workbench.calibration.quantiles import fit_recalibration
from workbench.calibration.scaling import fit_temperature, fit_variance_scale

NAN, INF = math.nan, math.inf
LOGITS, LABELS = torch.tensor([[2.0, 0.0, 1.0]] * 4), torch.tensor([0, 0, 1, 2])
LOC, SCALE, SCORES, FOLD = torch.zeros(2, 3), torch.ones(2, 3), torch.arange(1.0, 20.0), torch.arange(19) % 2


def with_one(tensor: torch.Tensor, value: float) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(-1)[0] = value
    return changed


CASES: list[tuple[Callable[..., Any], tuple[Any, ...], str]] = [
    *((fit_temperature, (with_one(LOGITS, value), LABELS), "logits") for value in (NAN, INF)),
    (fit_temperature, (torch.full((4, 3), -INF), LABELS), "logits"),
    (fit_temperature, (LOGITS[:0], LABELS[:0]), "logits is empty"),
    (fit_temperature, (LOGITS, LABELS.float()), "integer class labels"),
    (fit_temperature, (LOGITS, LABELS + 1), "labels must lie in"),
    (fit_temperature, (LOGITS, LABELS[:3]), "shape"),
    (fit_temperature, ("abc", LABELS), "logits"),
    *((conformal_quantile, (with_one(SCORES, value), 0.9), "scores has 1") for value in (NAN, INF, -INF)),
    (conformal_quantile, (SCORES[:0], 0.9), "scores is empty"),
    (conformal_quantile, (torch.tensor(1.0), 0.9), "scores"),
    (conformal_quantile, (SCORES, "much"), "coverage"),
    *((upper_bound, (with_one(torch.zeros(9), value),), "errors") for value in (NAN, INF, -1.0, 2.0)),
    (upper_bound, (torch.zeros(0),), "errors is empty"),
    (upper_bound, (torch.zeros(9), 0.9, NAN), "max_error"),
    (upper_bound, (torch.zeros(9), 0.9, -1.0), "max_error"),
    (upper_bound, (torch.zeros(9), NAN), "confidence"),
    *((fit_recalibration, (with_one(torch.rand(9), value),), "u ") for value in (NAN, INF, -0.1, 1.1)),
    (fit_recalibration, (torch.zeros(0),), "u is empty"),
    *((cv_plus, (with_one(LOC, value), SCALE, SCORES, FOLD, 0.9), "loc has 1") for value in (NAN, INF)),
    *((cv_plus, (LOC, with_one(SCALE, value), SCORES, FOLD, 0.9), "scale") for value in (NAN, INF, -1.0)),
    *((cv_plus, (LOC, SCALE, with_one(SCORES, value), FOLD, 0.9), "scores") for value in (NAN, INF, -1.0)),
    (cv_plus, (LOC, SCALE, SCORES[:0], FOLD[:0], 0.9), "scores is empty"),
    (cv_plus, (LOC, SCALE, SCORES, FOLD + 1, 0.9), "fold"),
    (cv_plus, (LOC, SCALE, SCORES, FOLD - 1, 0.9), "fold"),
    (cv_plus, (LOC, SCALE[:1], SCORES, FOLD, 0.9), "loc and scale must be"),
    (fit_variance_scale, (LOC, SCALE, LOC + 1, "Normal"), "distribution must be"),
    (fit_variance_scale, (LOC, with_one(SCALE, NAN), LOC + 1), "risk"),
]


@pytest.mark.parametrize(("function", "arguments", "message"), CASES)
def test_they_are_refused_by_name(function: Callable[..., Any], arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        function(*arguments)


def test_too_few_or_too_many_inputs_are_told_what_the_model_takes() -> None:
    x = torch.zeros(8, 2)
    wrapped = vote.Wrapper(2)(torch.nn.Linear(2, 1))
    for inputs, count in (((), "no"), ((x, x), "2")):
        with pytest.raises(TypeError, match=rf"x: found a tuple of {count} inputs, but the model takes \(input\)"):
            selective(wrapped, (inputs, x[:, :1]))
    with pytest.raises(TypeError, match=r"x: found one input, but the model takes \(input1, input2\)"):
        selective(vote.Wrapper(2)(torch.nn.Bilinear(2, 2, 1)), (x, x[:, :1]))


def test_a_class_that_is_ruled_out_changes_no_temperature() -> None:
    ruled_out = torch.cat([LOGITS, torch.full((4, 1), -INF)], 1)
    assert fit_temperature(ruled_out, LABELS) == fit_temperature(LOGITS, LABELS)


def test_rows_without_numbers_and_truth_values_that_are_none_are_refused() -> None:
    from workbench.core.batches.rows import read

    with pytest.raises(TypeError, match=r"x is a tensor \[2, 2\] of torch.sparse_coo; give x.to_dense\(\)"):
        read((torch.ones(2, 2).to_sparse(), torch.ones(2, 1)))
    with pytest.raises(TypeError, match=r"y is a tensor \[2\] on the meta device"):
        read((torch.ones(2, 2), torch.ones(2, device="meta")))
    for value in (torch.zeros(2), "mean", 1):
        with pytest.raises(TypeError, match="per_output must be True or False"):
            fit_variance_scale(LOC, SCALE, LOC + 1, per_output=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("function", [calibrate, selective])
def test_whole_numbers_for_a_model_of_values_are_told_what_to_be(function: Any) -> None:
    wrapped = vote.Wrapper(2)(torch.nn.Linear(2, 1)).eval()
    with pytest.raises(ValueError, match=r"for values, such as counts, give y\.float\(\)"):
        function(wrapped, (torch.zeros(20, 2), torch.arange(20)[:, None]))


class OneNumber(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).mean()


@pytest.mark.parametrize(
    "ask", [lambda model, x: top_uncertain(model, x, 2), lambda model, x: calibrate(model, (x, x))]
)
def test_a_single_number_for_a_batch_is_refused(ask: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"gives \[\] for a batch.*; it must give one row for each"):
        ask(vote.Wrapper(2)(OneNumber(2, 1)), torch.zeros(9, 2))


def test_confidence_of_rows_without_classes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'confidence'.* not said to be classes"):
        selective(vote.Wrapper(2)(torch.nn.Linear(1, 1)), (torch.ones(1), torch.ones(1).long()), "confidence")
