"""Metrics of class probabilities: compared with scikit-learn, torchmetrics and brute force."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch
import torchmetrics.functional.classification as theirs
from torch import Tensor

from workbench import metrics

GENERATOR = torch.Generator().manual_seed(0)
LOGITS = 2 * torch.randn(500, 4, generator=GENERATOR)
PROBS = LOGITS.softmax(-1)
TARGET = torch.multinomial((LOGITS / 2).softmax(-1), 1, generator=GENERATOR).squeeze(-1)
NUMPY = PROBS.double().numpy()


def check(actual: Tensor, expected: Any, rel: float = 1e-6) -> None:
    assert (actual.dtype, actual.ndim) == (torch.float64, 0)
    assert actual.item() == pytest.approx(float(expected), rel=rel)


def calibration_gaps(confidence: np.ndarray, hit: np.ndarray, n_bins: int) -> list[tuple[int, float]]:
    """Number of rows and gap of every bin that is not empty, by a plain loop."""
    gaps = []
    for k in range(n_bins):
        rows = (confidence > k / n_bins) & (confidence <= (k + 1) / n_bins)
        if rows.any():
            gaps.append((int(rows.sum()), abs(float(hit[rows].mean() - confidence[rows].mean()))))
    return gaps


def test_accuracy_nll_and_brier_against_sklearn() -> None:
    labels = TARGET.numpy()
    for scores in (LOGITS, PROBS):
        check(metrics.accuracy(scores, TARGET), sklearn.metrics.accuracy_score(labels, LOGITS.argmax(-1)))
    exact = NUMPY / NUMPY.sum(1, keepdims=True)
    check(metrics.categorical_nll(PROBS, TARGET), sklearn.metrics.log_loss(labels, exact, labels=range(4)))
    check(metrics.brier(PROBS, TARGET), ((NUMPY - np.eye(4)[labels]) ** 2).sum(1).mean())
    two = torch.stack([1 - PROBS[:, 0], PROBS[:, 0]], -1)
    binary = (TARGET == 0).long()
    check(metrics.brier(two, binary), 2 * sklearn.metrics.brier_score_loss(binary.numpy(), NUMPY[:, 0]))


@pytest.mark.parametrize("n_bins", [1, 10, 15])
def test_calibration_errors_against_torchmetrics_and_loops(n_bins: int) -> None:
    ours, reference = (metrics.ece, metrics.max_ece), ("l1", "max")
    for function, norm in zip(ours, reference, strict=True):
        expected = theirs.multiclass_calibration_error(PROBS, TARGET, 4, n_bins=n_bins, norm=norm)  # type: ignore[arg-type]
        check(function(PROBS, TARGET, n_bins), expected.item(), rel=1e-4)
    hit = (NUMPY.argmax(1) == TARGET.numpy()).astype(float)
    gaps = calibration_gaps(NUMPY.max(1), hit, n_bins)
    check(metrics.ece(PROBS, TARGET, n_bins), sum(n * gap for n, gap in gaps) / 500)
    check(metrics.max_ece(PROBS, TARGET, n_bins), max(gap for _, gap in gaps))
    classwise = [
        sum(n * gap for n, gap in calibration_gaps(NUMPY[:, k], (TARGET.numpy() == k).astype(float), n_bins)) / 500
        for k in range(4)
    ]
    check(metrics.classwise_ece(PROBS, TARGET, n_bins), np.mean(classwise))
    order = np.argsort(NUMPY.max(1))
    adaptive = [abs(np.sum(hit[rows] - NUMPY.max(1)[rows])) for rows in np.array_split(order, n_bins)]
    check(metrics.adaptive_ece(PROBS, TARGET, n_bins), np.sum(adaptive) / 500)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("n_bins", [5, 10])
def test_shares_of_voters_are_in_the_same_bins_in_every_precision(n_bins: int, dtype: torch.dtype) -> None:
    # votes of ten voters for class 1: each share lies on an edge of ten bins
    votes = torch.arange(5, 10).repeat_interleave(8)
    hit = torch.arange(len(votes)) % 8 < torch.tensor([1, 7, 2, 6, 3]).repeat_interleave(8)
    probs = torch.stack([10 - votes, votes], -1).double().div(10).to(dtype)
    gaps = []
    for k in range(n_bins):
        rows = (votes * n_bins > 10 * k) & (votes * n_bins <= 10 * (k + 1))  # in whole numbers, without rounding
        if rows.any():
            gaps.append((int(rows.sum()), (hit[rows].double() - votes[rows] / 10).mean().abs().item()))
    chosen = torch.where(votes == 5, 0, 1)  # argmax takes the first of equal probabilities
    target = torch.where(hit, chosen, 1 - chosen)
    rounding = 0.01 if dtype == torch.bfloat16 else 1e-6
    assert metrics.max_ece(probs, target, n_bins).item() == pytest.approx(max(gap for _, gap in gaps), abs=rounding)
    expected = sum(n * gap for n, gap in gaps) / len(votes)
    assert metrics.ece(probs, target, n_bins).item() == pytest.approx(expected, abs=rounding)
    box, miss = [0.0, 0.0, 10.0, 10.0], [20.0, 0.0, 30.0, 10.0]
    images = [
        {"boxes": [box if h else miss], "scores": (v.double() / 10).to(dtype)[None], "labels": [1]}
        for h, v in zip(hit, votes, strict=True)
    ]
    ece = metrics.detection_ece(images, [{"boxes": [box], "labels": [1]}] * len(votes), n_bins=n_bins)
    assert ece.item() == pytest.approx(expected, abs=rounding)


def test_reliability_curve() -> None:
    curve = metrics.reliability_curve(PROBS, TARGET, n_bins=10)
    hit = NUMPY.argmax(1) == TARGET.numpy()
    for k in range(10):
        rows = (NUMPY.max(1) > k / 10) & (NUMPY.max(1) <= (k + 1) / 10)
        assert curve.rows[k] == rows.sum()
        if rows.any():
            assert curve.accuracy[k].item() == pytest.approx(hit[rows].mean())
            assert curve.confidence[k].item() == pytest.approx(NUMPY.max(1)[rows].mean())
        else:
            assert curve.accuracy[k].isnan()
            assert curve.confidence[k].isnan()
    assert curve.rows[0] == 0  # the largest of four is never below a quarter


def test_images_half_precision_and_other_extremes() -> None:
    image, labels = PROBS.reshape(5, 10, 10, 4), TARGET.reshape(5, 10, 10)
    for function in (metrics.accuracy, metrics.categorical_nll, metrics.brier, metrics.ece, metrics.classwise_ece):
        assert torch.equal(function(image, labels), function(PROBS, TARGET))
    for dtype in (torch.float16, torch.bfloat16):
        check(metrics.brier(LOGITS.to(dtype).softmax(-1), TARGET), metrics.brier(PROBS, TARGET), rel=0.05)
    certain = torch.eye(3)
    check(metrics.categorical_nll(certain, torch.arange(3)), 0.0)
    assert metrics.categorical_nll(certain, torch.tensor([1, 0, 0])).item() == float("inf")
    check(metrics.brier(certain, torch.tensor([1, 0, 0])), 2.0)
    check(metrics.ece(certain, torch.arange(3)), 0.0)
    check(metrics.ece(certain[:1], torch.tensor([2])), 1.0)
    check(metrics.adaptive_ece(certain[:1], torch.tensor([2])), 1.0)
    check(metrics.accuracy(torch.tensor([[-float("inf"), 0.0]]), torch.tensor([1])), 1.0)
    check(metrics.brier(NUMPY, TARGET.numpy()), metrics.brier(PROBS, TARGET))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.brier(PROBS, TARGET[:3]), r"target has shape \(3,\) but probabilities has shape \(500, 4\)"),
        (lambda: metrics.brier(PROBS, TARGET.unsqueeze(-1)), r"shape \(500, 1\)"),
        (lambda: metrics.ece(LOGITS, TARGET), "sum to one.*softmax"),
        (lambda: metrics.ece(PROBS * 1.01, TARGET), "sum of 1.01"),
        (lambda: metrics.ece(torch.tensor([[1.5, -0.5]]), torch.tensor([0])), "least value of -0.5"),
        (lambda: metrics.categorical_nll(PROBS * float("nan"), TARGET), "2000 NaN"),
        (lambda: metrics.accuracy(LOGITS * float("nan"), TARGET), "scores has 2000 NaN"),
        (lambda: metrics.accuracy(LOGITS, TARGET.float()), "integer class labels, found torch.float32"),
        (lambda: metrics.accuracy(LOGITS, TARGET + 1), r"labels must lie in \[0, 4\), found 1 to 4"),
        (lambda: metrics.accuracy(LOGITS[:, :1], TARGET), r"classes >= 2\], found \(500, 1\)"),
        (lambda: metrics.accuracy(LOGITS[:0], TARGET[:0]), r"scores is empty \(shape \(0, 4\)\)"),
        (lambda: metrics.ece(PROBS, TARGET, n_bins=0), "n_bins must be at least 1, found 0"),
        (lambda: metrics.adaptive_ece(PROBS, TARGET, n_bins=0), "n_bins"),
    ],
)
def test_bad_input_says_what_was_found(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_the_order_of_rows_of_equal_confidence_does_not_matter() -> None:
    """Rows sorted by their class are common; with an edge among ties, a calibrated constant would get an error of 0.4."""
    constant = torch.tensor([[0.6, 0.4]], dtype=torch.float64).expand(10, 2)
    target = torch.tensor([0] * 6 + [1] * 4)
    for labels in (target, target.flip(0), target[torch.arange(10) * 3 % 10]):
        check(metrics.adaptive_ece(constant, labels, n_bins=2), 0.0)
    confidence = torch.tensor([0.6] * 4 + [0.7] * 3 + [0.9] * 2, dtype=torch.float64)
    hit = torch.tensor([1, 0, 0, 1, 1, 1, 0, 1, 0])
    # bins of three rows: three of the four at 0.6; the fourth, and two of the three at 0.7; the third, and both at 0.9
    expected = (3 * abs(0.5 - 0.6) + abs((0.5 - 0.6) + 2 * (2 / 3 - 0.7)) + abs((2 / 3 - 0.7) + (1 - 1.8))) / 9
    probabilities = torch.stack([confidence, 1 - confidence], 1)
    for order in (torch.arange(9), torch.arange(9).flip(0), torch.arange(9) * 2 % 9):
        check(metrics.adaptive_ece(probabilities[order], 1 - hit[order], n_bins=3), expected)


def test_the_classwise_error_of_two_classes_is_the_binary_one() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(500, generator=generator, dtype=torch.float64)
    yes = (torch.rand(500, generator=generator) < p**2).long()
    expected = theirs.binary_calibration_error(p, yes, n_bins=10, norm="l1").item()
    check(metrics.classwise_ece(torch.stack([1 - p, p], -1), yes, n_bins=10), expected, rel=1e-4)
