"""Scores and labels, in the argument order of other packages, where the risks of two splits are expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from workbench import metrics
from workbench.errors import WorkbenchWarning

SCORES, LABELS = torch.linspace(0.05, 0.95, 8), torch.arange(8) > 4


@pytest.mark.parametrize("metric", [metrics.auroc, metrics.aupr, metrics.fpr95])
@pytest.mark.parametrize("kind", [torch.Tensor.bool, torch.Tensor.long, torch.Tensor.numpy, torch.Tensor.tolist])
def test_labels_are_refused_in_either_place(metric: Callable[..., Any], kind: Callable[[Any], Any]) -> None:
    for first, second, name in ((SCORES, kind(LABELS), "risk_out"), (kind(LABELS), SCORES, "risk_in")):
        with pytest.raises(ValueError, match=rf"{name} .*like labels.*risk\[~is_out\], risk\[is_out\]"):
            metric(first, second)


def test_numbers_that_are_0_and_1_may_be_risks() -> None:
    with pytest.warns(WorkbenchWarning, match="risk_out .*like labels"):
        metrics.auroc(SCORES, LABELS.float())
    assert metrics.auroc(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])) == 0.5
    assert metrics.auroc(torch.tensor([0, 1]), torch.tensor([1, 1])) == 0.75
    assert metrics.auroc(SCORES, LABELS.long()[:7]) == pytest.approx(16 / 56)


def test_the_class_sees_it_too() -> None:
    metric = metrics.AUROC()
    with pytest.raises(ValueError, match="like labels"):
        metric.update(SCORES, LABELS)
