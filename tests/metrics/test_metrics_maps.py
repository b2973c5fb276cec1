"""Metrics of maps and tokens: void and masks act like plain indexing, and computing in pieces changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch
import torchmetrics.functional as theirs
from torch import Tensor

from workbench import metrics
from workbench.distributions import Laplace
from workbench.metrics import _pieces

GENERATOR = torch.Generator().manual_seed(0)
LOGITS = 2 * torch.randn(3, 5, 6, 7, generator=GENERATOR)
LOGITS[:, 3] -= 20  # a class that is never chosen
PROBS = LOGITS.softmax(1)
LABELS = torch.randint(0, 3, (3, 6, 7), generator=GENERATOR)
VOID = torch.rand(3, 6, 7, generator=GENERATOR) < 0.3
TARGET = LABELS.masked_fill(VOID, 255)
MASK = torch.rand(3, 6, 7, generator=GENERATOR) < 0.5
DEPTH, DISTANCE = torch.rand(2, 3, 6, 7, generator=GENERATOR)
RISK = torch.rand(3, 6, 7, generator=GENERATOR) + 0.1
DRAWS = torch.randn(4, 3, 6, 7, generator=GENERATOR)

CLASSES = ("accuracy", "mean_iou", "categorical_nll", "brier", "ece", "max_ece", "adaptive_ece", "classwise_ece")
VALUES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    **{name: (getattr(metrics, name), (DEPTH, DISTANCE)) for name in ("rmse", "mae")},
    **{
        name: (getattr(metrics, name), (DEPTH, RISK, DISTANCE))
        for name in ("nll", "crps", "calibration_error", "quantile_calibration_error", "picp", "interval_score",
                     "risk_error_correlation")
    },
    "nll of Laplace": (lambda *a, **k: metrics.nll(*a, distribution=Laplace, **k), (DEPTH, RISK, DISTANCE)),
    "winkler_score": (metrics.winkler_score, (DEPTH - RISK, DEPTH + RISK, DISTANCE)),
    "crps_samples": (metrics.crps_samples, (DRAWS, DISTANCE)),
    "mixture_nll": (metrics.mixture_nll, (DRAWS, DRAWS.abs() + 1, DISTANCE)),
    "mixture_crps": (metrics.mixture_crps, (DRAWS, DRAWS.abs() + 1, DISTANCE)),
}  # fmt: skip
RANKED = ("aurc", "augrc", "aurg", "ause")


def rows_of(scores: Tensor, keep: Tensor) -> Tensor:
    """[kept, classes] of [n, classes, height, width]."""
    return torch.stack([scores[i, :, j, k] for i, j, k in keep.nonzero().tolist()])


@pytest.mark.parametrize("numbers", [2**18, 40, 1])  # one piece, some, one for each pixel
@pytest.mark.parametrize("name", CLASSES)
def test_maps_are_the_rows_of_pixels_that_count(name: str, numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    function = getattr(metrics, name)
    cases = ((~VOID, {"void": 255}), (MASK, {"mask": MASK}), (~VOID & MASK, {"mask": MASK.int(), "void": 255}))
    for keep, options in cases:
        expected = function(rows_of(PROBS, keep), LABELS[keep])
        target = TARGET if "void" in options else LABELS
        with monkeypatch.context() as patch:
            patch.setattr(_pieces, "PIECE_SIZE", numbers)
            for scores, dim in ((PROBS, 1), (PROBS, -3), (PROBS.movedim(1, -1), -1), (PROBS.movedim(1, -1), None)):
                value = function(scores, target, dim=dim, **options)
                torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    noisy = PROBS.masked_fill(VOID[:, None], float("nan"))  # whatever is where nothing counts
    torch.testing.assert_close(function(noisy, TARGET, dim=1, void=255), function(PROBS, TARGET, dim=1, void=255))


@pytest.mark.parametrize("name", ["accuracy", "categorical_nll", "brier"])
def test_terms_keep_the_order_of_the_pixels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function = getattr(metrics, name)
    expected = function(rows_of(PROBS, ~VOID), LABELS[~VOID], reduction="none")
    monkeypatch.setattr(_pieces, "PIECE_SIZE", 30)
    assert torch.equal(function(PROBS, TARGET, "none", dim=1, void=255), expected)


def test_maps_against_other_packages() -> None:
    flat, labels = rows_of(PROBS, ~VOID), LABELS[~VOID]
    iou = sklearn.metrics.jaccard_score(labels, flat.argmax(-1), average=None, labels=[0, 1, 2, 4])
    each = metrics.mean_iou(PROBS, TARGET, "none", dim=1, void=255)
    np.testing.assert_allclose(each[[0, 1, 2, 4]], iou)
    assert each[3].isnan()  # neither there nor chosen
    assert metrics.mean_iou(PROBS, TARGET, dim=1, void=255).item() == pytest.approx(iou.mean())
    jaccard = theirs.jaccard_index(PROBS, TARGET, "multiclass", num_classes=5, ignore_index=255)
    accuracy = theirs.accuracy(PROBS, TARGET, "multiclass", num_classes=5, ignore_index=255, average="micro")
    calibration = theirs.calibration_error(PROBS, TARGET, "multiclass", num_classes=5, ignore_index=255)
    assert metrics.mean_iou(LOGITS, TARGET, dim=1, void=255).item() == pytest.approx(jaccard.item(), rel=1e-6)
    assert metrics.accuracy(LOGITS, TARGET, dim=1, void=255).item() == pytest.approx(accuracy.item(), rel=1e-6)
    assert metrics.ece(PROBS, TARGET, dim=1, void=255).item() == pytest.approx(calibration.item(), rel=1e-5)
    nll = torch.nn.functional.cross_entropy(LOGITS.double(), TARGET, ignore_index=255)
    assert metrics.categorical_nll(PROBS, TARGET, dim=1, void=255).item() == pytest.approx(nll.item(), rel=1e-6)


def test_tokens_with_the_label_of_other_packages() -> None:
    logits, lengths = torch.randn(4, 9, 11, generator=GENERATOR), [9, 3, 1, 5]
    labels = torch.randint(0, 11, (4, 9), generator=GENERATOR)
    inside = torch.arange(9) < torch.tensor(lengths)[:, None]
    rows = [(logits[i, t], labels[i, t]) for i, n in enumerate(lengths) for t in range(n)]
    expected = metrics.categorical_nll(torch.stack([r for r, _ in rows]).softmax(-1), torch.stack([y for _, y in rows]))
    probs = logits.softmax(-1)
    for nll in (
        metrics.categorical_nll(probs, labels.masked_fill(~inside, -100), void=-100),
        metrics.categorical_nll(probs, labels, mask=inside),
        metrics.categorical_nll(probs, labels, mask=inside.long().numpy()),  # as an attention mask
        metrics.categorical_nll(probs, labels.masked_fill(~inside, -100).to(torch.int8), void=-100),
    ):
        torch.testing.assert_close(nll, expected)


def test_a_void_that_the_dtype_cannot_hold_is_not_wrapped_into_a_class() -> None:
    scores = torch.eye(200)[[156, 3]]
    labels = torch.tensor([156, 4], dtype=torch.uint8)  # -100 among bytes would be 156
    assert metrics.accuracy(scores, labels, void=-100) == 0.5


@pytest.mark.parametrize("numbers", [2**18, 42, 1])
@pytest.mark.parametrize("name", VALUES)
def test_values_are_those_that_count(name: str, numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    function, arguments = VALUES[name]
    plain = function(*arguments)
    chosen = function(*(a[..., MASK] for a in arguments))
    monkeypatch.setattr(_pieces, "PIECE_SIZE", numbers)
    torch.testing.assert_close(function(*arguments), plain, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(function(*arguments, mask=MASK), chosen, rtol=1e-12, atol=1e-12)
    for void in (0.0, float("nan"), -1):
        target = arguments[-1].masked_fill(~MASK, void)
        torch.testing.assert_close(function(*arguments[:-1], target, void=void), chosen, rtol=1e-12, atol=1e-12)


def test_widths_and_curves_of_what_counts() -> None:
    for function, arguments in ((metrics.mpiw, (DEPTH, RISK)), (metrics.sharpness, (RISK,))):
        torch.testing.assert_close(function(*arguments, mask=MASK), function(*(a[MASK] for a in arguments)))
    curve = metrics.coverage_curve(DEPTH, RISK, DISTANCE.masked_fill(~MASK, 0), void=0)
    torch.testing.assert_close(curve, metrics.coverage_curve(DEPTH[MASK], RISK[MASK], DISTANCE[MASK]))
    bins = metrics.reliability_curve(PROBS, TARGET, dim=1, void=255)
    assert bins.rows.sum() == (~VOID).sum()
    assert metrics.mae(DEPTH, DISTANCE, "none").shape == DEPTH.shape
    torch.testing.assert_close(metrics.mae(DEPTH, DISTANCE, "none", mask=MASK), (DEPTH - DISTANCE).abs()[MASK].double())


@pytest.mark.parametrize("name", RANKED)
def test_rankings_of_pixels(name: str) -> None:
    function, error = getattr(metrics, name), (DEPTH - DISTANCE).abs()
    spoiled = RISK.masked_fill(~MASK, float("nan"))
    torch.testing.assert_close(function(spoiled, error, mask=MASK), function(RISK[MASK], error[MASK]))
    curve = metrics.risk_coverage_curve(RISK, error, mask=MASK)
    assert len(curve.error) == MASK.sum()


def test_errors_of_pixels_against_sklearn() -> None:
    entropy = torch.special.entr(PROBS).sum(1)
    wrong = PROBS.argmax(1) != LABELS
    expected = sklearn.metrics.roc_auc_score(wrong[~VOID], entropy[~VOID])
    assert metrics.error_auroc(entropy, wrong, mask=~VOID).item() == pytest.approx(expected)
    with pytest.raises(ValueError, match=r"1 \(wrong\) or 0 \(right\), found 0.5"):
        metrics.error_auroc([0.1, 0.2], [0.5, 1.0])
    with pytest.raises(ValueError, match="found 0 wrong of 2"):
        metrics.error_auroc([0.1, 0.2], [0.0, 0.0])


@pytest.mark.slow
def test_sparsification_against_random_removal() -> None:
    generator = np.random.default_rng(0)
    error, risk = generator.uniform(size=40) ** 3, generator.uniform(size=40)
    left = lambda order: [error[order[: 40 - k]].mean() / error.mean() for k in range(40)]  # noqa: E731
    random = np.mean([left(generator.permutation(40)) for _ in range(3000)], 0)
    curve = metrics.sparsification_curve(risk, error)
    np.testing.assert_allclose(curve.random, random, atol=0.06)
    by_risk, oracle = np.array(left(np.argsort(risk))), np.array(left(np.argsort(error)))
    assert metrics.ause(risk, error).item() == pytest.approx((by_risk - oracle).mean())
    assert metrics.ause(risk, error, "random").item() == pytest.approx((by_risk - oracle).mean() / (1 - oracle).mean())
    assert metrics.aurg(risk, error).item() == pytest.approx((1 - by_risk).mean())
    assert metrics.ause(error, error, "random") == 0
    assert metrics.ause(np.ones(40), error, "random").item() == pytest.approx(1)
    with pytest.raises(ValueError, match="all 3 errors are equal"):
        metrics.ause([1.0, 2.0, 3.0], [2.0, 2.0, 2.0], "random")


def test_pieces_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pieces, "PIECE_SIZE", 100)
    for scores, dim in ((PROBS, 1), (PROBS.movedim(1, -1), -1)):
        pieces = list(_pieces.class_pieces(scores, TARGET, "probabilities", dim, 255))
        assert max(rows.numel() for rows, _ in pieces) <= 100
        assert sum(len(rows) for rows, _ in pieces) == (~VOID).sum()
    assert {len(piece) for (piece,) in _pieces.value_pieces(risk=RISK)} == {2, 1}  # 42 numbers a row


def test_classes_take_batches_with_void_and_without_any_label() -> None:
    cases = (
        (metrics.Accuracy(dim=1, void=255), metrics.accuracy), (metrics.Brier(dim=1, void=255), metrics.brier),
        (metrics.ECE(dim=1, void=255), metrics.ece), (metrics.MeanIoU(5, dim=1, void=255), metrics.mean_iou),
        (metrics.ClasswiseECE(5, dim=1, void=255), metrics.classwise_ece),
        (metrics.AdaptiveECE(dim=1, void=255), metrics.adaptive_ece),
    )  # fmt: skip
    for metric, function in cases:
        for i in range(3):
            metric.update(PROBS[i : i + 1], TARGET[i : i + 1])
            metric.update(PROBS[i : i + 1], torch.full((1, 6, 7), 255))
        torch.testing.assert_close(metric.compute(), function(PROBS, TARGET, dim=1, void=255))
    depth, ranked = metrics.RMSE(void=0), metrics.AURC()
    for i in range(3):
        depth.update(DEPTH[i], DISTANCE[i].masked_fill(~MASK[i], 0))
        depth.update(DEPTH[i], torch.zeros(6, 7))
        ranked.update(RISK[i], DEPTH[i], mask=MASK[i])
        ranked.update(RISK[i], DEPTH[i], mask=torch.zeros(6, 7, dtype=torch.bool))
    torch.testing.assert_close(depth.compute(), metrics.rmse(DEPTH[MASK], DISTANCE[MASK]))
    torch.testing.assert_close(ranked.compute(), metrics.aurc(RISK[MASK], DEPTH[MASK]))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: metrics.accuracy(LOGITS, LABELS), ValueError, r"target has shape \(3, 6, 7\).*pass dim=1"),
        (
            lambda: metrics.accuracy(torch.randn(2, 4, 4, 4), torch.zeros(2, 4, 4).long()),
            ValueError,
            "pass dim=1 or dim=2 or dim=3",
        ),
        (lambda: metrics.accuracy(LOGITS, LABELS, dim=4), ValueError, "dim=4, but scores has 4 dimensions"),
        (lambda: metrics.accuracy(LOGITS, LABELS, dim="1"), TypeError, "dim must be the dimension"),
        (
            lambda: metrics.accuracy(LOGITS, TARGET, dim=1),
            ValueError,
            r"labels must lie in \[0, 5\), found 0 to 255.*void=",
        ),
        (lambda: metrics.accuracy(LOGITS, TARGET, dim=1, void=254), ValueError, "found 0 to 255"),
        (lambda: metrics.accuracy(LOGITS, TARGET, dim=1, void=2.5), TypeError, "void must be the class number"),
        (lambda: metrics.accuracy(LOGITS, TARGET, dim=1, void=True), TypeError, "void must be the class number"),
        (lambda: metrics.rmse(DEPTH, DISTANCE, void="0"), TypeError, "void must be the number"),
        (lambda: metrics.brier(PROBS, TARGET, dim=1, void=255, mask=VOID), ValueError, "no target is left"),
        (lambda: metrics.mean_iou(PROBS, TARGET, dim=1, void=255, mask=VOID), ValueError, "no target is left"),
        (lambda: metrics.ece(PROBS, TARGET, dim=1, void=255, mask=VOID), ValueError, "no target is left"),
        (lambda: metrics.adaptive_ece(PROBS, TARGET, dim=1, void=255, mask=VOID), ValueError, "no target is left"),
        (lambda: metrics.crps(DEPTH, RISK, DISTANCE, mask=MASK & False), ValueError, "no target is left"),
        (lambda: metrics.calibration_error(DEPTH, RISK, DISTANCE, mask=MASK & False), ValueError, "no target is left"),
        (lambda: metrics.aurc(RISK, DEPTH, mask=MASK & False), ValueError, "no target is left"),
        (
            lambda: metrics.accuracy(LOGITS, LABELS, dim=1, mask=MASK[0]),
            ValueError,
            r"mask has shape \(6, 7\).*\(3, 6, 7\)",
        ),
        (lambda: metrics.rmse(DEPTH, DISTANCE, mask=MASK.float()), ValueError, "mask must hold booleans"),
        (lambda: metrics.rmse(DEPTH, DISTANCE, mask=2 * MASK), ValueError, "mask must hold booleans"),
        (lambda: metrics.ause(RISK, DEPTH, "oracle"), ValueError, "'mean' or 'random', found 'oracle'"),
        (lambda: metrics.winkler_score(DEPTH + 1, DEPTH, DEPTH), ValueError, "126 of 126 intervals"),
    ],
)
def test_bad_input_says_what_was_found(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_square_batch_is_rows_of_classes() -> None:
    assert metrics.accuracy(torch.eye(4), torch.arange(4)) == 1
    assert metrics.accuracy(torch.eye(4)[:, [1, 0, 2, 3]], torch.arange(4), dim=0) == 0.5


def test_several_labels_are_scored_as_the_error_says() -> None:
    p, labels = torch.tensor([[0.9, 0.2], [0.4, 0.7]]), torch.tensor([[1, 1], [0, 1]])
    with pytest.raises(
        ValueError, match=r"multi-label targets .*, pass torch\.stack\(\[1 - p, p\], -1\) .*, with dim=2"
    ):
        metrics.accuracy(p, labels)
    assert metrics.accuracy(torch.stack([1 - p, p], -1), labels, dim=2) == 0.75
