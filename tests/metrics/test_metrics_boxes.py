"""Metrics of detections: compared with cases by hand, plain loops and numbers of pycocotools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from workbench import metrics

BOX, SHIFTED, FAR = [0.0, 0.0, 10.0, 10.0], [0.0, 0.0, 10.0, 8.0], [50.0, 50.0, 60.0, 70.0]


def image(*rows: tuple[list[float], float, int]) -> dict[str, Any]:
    return {"boxes": [r[0] for r in rows], "scores": [r[1] for r in rows], "labels": [r[2] for r in rows]}


def truth(*rows: tuple[list[float], int], crowd: list[int] | None = None) -> dict[str, Any]:
    extra = {} if crowd is None else {"iscrowd": crowd}
    return {"boxes": [r[0] for r in rows], "labels": [r[1] for r in rows], **extra}


def scene(seed: int, crowd: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Images with objects of three classes, found well, found badly, found twice and missed."""
    g = np.random.default_rng(seed)
    predictions, targets = [], []
    for _ in range(12):
        k = g.integers(0, 6)
        low, size = g.integers(0, 60, (k, 2)), g.integers(5, 40, (k, 2))
        boxes, labels = np.c_[low, low + size].astype(float), g.integers(0, 3, k)
        is_crowd = (g.random(k) < 0.2).astype(int) if crowd else np.zeros(k, int)
        rows, scores, names = [], [], []
        for box, label in zip(boxes, labels, strict=True):
            for _ in range(g.integers(0, 3)):
                rows.append(box + np.r_[g.integers(-4, 1, 2), g.integers(0, 5, 2)])
                names.append(label if g.random() < 0.85 else g.integers(0, 3))
                scores.append(round(g.random(), 1))
        for _ in range(g.integers(0, 3)):
            corner = g.integers(0, 60, 2)
            rows.append(np.r_[corner, corner + g.integers(5, 30, 2)].astype(float))
            names.append(g.integers(0, 3))
            scores.append(round(g.random(), 1))
        predictions.append(
            {"boxes": np.array(rows).reshape(-1, 4), "scores": np.array(scores, float), "labels": np.array(names, int)}
        )
        targets.append({"boxes": boxes, "labels": labels, "iscrowd": is_crowd})
    return predictions, targets


# COCOeval of pycocotools 2.0.11 on these scenes, all areas
COCO: dict[tuple[int, bool, int], float] = {
    (3, False, 100): 0.2114422108015585,
    (3, False, 2): 0.213991542011344,
    (3, True, 100): 0.15409461737701083,
    (3, True, 2): 0.13812678886936314,
    (7, False, 100): 0.20362160025526363,
    (7, False, 2): 0.1857026416927407,
    (7, True, 100): 0.18731731945124339,
    (7, True, 2): 0.16153648698203155,
    (12, False, 100): 0.15965390668621515,
    (12, False, 2): 0.14191744174417442,
    (12, True, 100): 0.15512472859007512,
    (12, True, 2): 0.1431220979240781,
    (15, False, 100): 0.19537361148310478,
    (15, False, 2): 0.1553882219723804,
    (15, True, 100): 0.13987674316882237,
    (15, True, 2): 0.14114245948404364,
    (33, False, 100): 0.16454988355978453,
    (33, False, 2): 0.13115682996871117,
    (33, True, 100): 0.10170163444915918,
    (33, True, 2): 0.09818481848184817,
}


@pytest.mark.parametrize(("seed", "crowd", "most"), COCO)
def test_mean_average_precision_is_that_of_pycocotools(seed: int, crowd: bool, most: int) -> None:
    average_precision = metrics.mean_average_precision(*scene(seed, crowd), max_detections=most)
    assert average_precision.item() == pytest.approx(COCO[seed, crowd, most], abs=1e-12)


def test_average_precision_by_hand() -> None:
    targets = [truth((BOX, 1), (FAR, 1)), truth((BOX, 2))]
    predictions = [image((BOX, 0.9, 1), (SHIFTED, 0.8, 1), (FAR, 0.7, 1)), image((BOX, 0.6, 1))]
    table = metrics.average_precision(predictions, targets, iou=[0.5, 0.9])
    assert table.classes.tolist() == [1, 2]
    # right, wrong (found twice), right, wrong (no such object): precision 1 up to recall 1/2, 2/3 up to 1
    assert table.precision[0].tolist() == pytest.approx([(51 * 1 + 50 * 2 / 3) / 101] * 2)
    assert table.precision[1].tolist() == [0, 0]
    assert metrics.mean_average_precision(predictions, targets, 0.5).item() == pytest.approx((51 + 100 / 3) / 202)
    loose = metrics.average_precision([image((SHIFTED, 0.9, 1))], [truth((BOX, 1))], iou=[0.5, 0.8, 0.81]).precision
    assert loose.tolist() == [[1, 1, 0]]


def test_what_is_found_in_a_crowd_does_not_count() -> None:
    predictions = [image((FAR, 0.9, 1), (FAR, 0.8, 1), (BOX, 0.5, 1))]
    targets = [truth((BOX, 1), (FAR, 1), crowd=[0, 1])]
    assert metrics.mean_average_precision(predictions, targets) == 1
    assert metrics.detection_ece(predictions, targets).item() == pytest.approx(0.5)


def plain_matches(prediction: dict[str, Any], target: dict[str, Any], iou: float) -> list[int]:
    """The object of each detection by plain loops, -1 for none."""
    free, match = set(range(len(target["boxes"]))), [-1] * len(prediction["boxes"])
    for i in sorted(range(len(match)), key=lambda i: -prediction["scores"][i]):
        best = iou
        for j in sorted(free):
            a, b = prediction["boxes"][i], target["boxes"][j]
            both = max(0, min(a[2], b[2]) - max(a[0], b[0])) * max(0, min(a[3], b[3]) - max(a[1], b[1]))
            area = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both
            if prediction["labels"][i] == target["labels"][j] and both / area >= best:
                best, match[i] = both / area, j
        free.discard(match[i])
    return match


def test_detection_ece_by_plain_loops() -> None:
    predictions, targets = scene(1, crowd=False)
    rows = []
    for prediction, target in zip(predictions, targets, strict=True):
        match = plain_matches(prediction, target, 0.5)
        for box, score, j in zip(prediction["boxes"], prediction["scores"], match, strict=True):
            rows.append((score, (box[0] + box[2]) / 2 / 100, (box[3] - box[1]) / 80, j >= 0))
    for by, columns in (((), (0,)), (("x", "height"), (0, 1, 2))):
        bins: dict[tuple[int, ...], list[tuple[float, bool]]] = {}
        for row in rows:
            key = tuple(min(4, max(0, int(np.ceil(row[c] * 5 - 1e-12)) - 1)) for c in columns)
            bins.setdefault(key, []).append((row[0], row[3]))
        gaps = [
            abs(np.mean([h for _, h in b]) - np.mean([s for s, _ in b])) * len(b) / len(rows) for b in bins.values()
        ]
        ece = metrics.detection_ece(predictions, targets, n_bins=5, by=by, sizes=(80, 100))
        assert ece.item() == pytest.approx(sum(gaps))
    high = [r for r in rows if r[0] >= 0.5]
    ece = metrics.detection_ece(predictions, targets, n_bins=1, min_score=0.5)
    assert ece.item() == pytest.approx(abs(np.mean([r[3] for r in high]) - np.mean([r[0] for r in high])))


def test_the_spread_of_matched_boxes() -> None:
    predictions, targets = scene(2, crowd=False)
    spread = [np.abs(np.sin(p["boxes"])) + 1 for p in predictions]
    expected = []
    for prediction, target, sd in zip(predictions, targets, spread, strict=True):
        for i, j in enumerate(plain_matches(prediction, target, 0.5)):
            if j >= 0:
                expected.append((prediction["boxes"][i], sd[i], target["boxes"][j]))
    matched = metrics.matched_boxes(predictions, targets, [{"boxes": torch.from_numpy(sd)} for sd in spread])
    for column, rows in zip(matched, zip(*expected, strict=True), strict=True):
        np.testing.assert_allclose(column, rows)
    error = metrics.box_calibration_error(predictions, targets, spread)
    torch.testing.assert_close(error, metrics.calibration_error(*map(np.array, zip(*expected, strict=True))))


def test_one_class_without_labels_and_images_without_boxes() -> None:
    nothing = {"boxes": torch.zeros(0, 4), "scores": torch.zeros(0)}
    predictions = [{"boxes": [BOX], "scores": [0.9]}, nothing, nothing]
    targets = [{"boxes": [BOX]}, {"boxes": [FAR]}, {"boxes": []}]
    assert metrics.mean_average_precision(predictions, targets).item() == pytest.approx(51 / 101)
    assert metrics.mean_average_precision([nothing], [{"boxes": [BOX]}]) == 0
    assert metrics.mean_average_precision(predictions[0], targets[0]) == 1  # one image needs no list


ONE = image((BOX, 0.9, 1))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: metrics.mean_average_precision([ONE], []), ValueError, "found 1 and 0"),
        (lambda: metrics.mean_average_precision(torch.zeros(3, 4), [ONE]), TypeError, "list with a dict for each image"),
        (lambda: metrics.mean_average_precision([truth((BOX, 1))], [ONE]), ValueError, "prediction of image 0 has no scores"),
        (lambda: metrics.mean_average_precision([ONE], [{"boxes": [BOX]}]), ValueError, "labels only in the prediction or only in the target"),
        (lambda: metrics.mean_average_precision([ONE], [truth()]), ValueError, "needs objects, found none in 1 targets"),
        (lambda: metrics.mean_average_precision([ONE], [ONE], iou=[0.5, 2]), ValueError, r"iou must lie in \(0, 1\]"),
        (lambda: metrics.average_precision([ONE], [ONE], max_detections=0), ValueError, "max_detections must be at least 1"),
        (lambda: metrics.average_precision([{**ONE, "scores": [0.5, 0.1]}], [ONE]), ValueError, "has 1 boxes and 2 scores"),
        (lambda: metrics.average_precision([image(([10.0, 0.0, 0.0, 5.0], 0.5, 1))], [ONE]), ValueError, "x1 <= x2"),
        (lambda: metrics.average_precision([{**ONE, "boxes": [[0.0, 0.0, 5.0]]}], [ONE]), ValueError, r"\[k, 4\], found \(1, 3\)"),
        (lambda: metrics.average_precision([image((BOX, float("nan"), 1))], [ONE]), ValueError, "scores of prediction of image 0 has 1 NaN"),
        (lambda: metrics.detection_ece([image((BOX, 3.0, 1))], [ONE]), ValueError, r"scores must lie in \[0, 1\]"),
        (lambda: metrics.detection_ece([ONE], [ONE], by=["x"]), ValueError, "needs sizes="),
        (lambda: metrics.detection_ece([ONE], [ONE], by=["cx"]), ValueError, "x, y, width, height"),
        (lambda: metrics.detection_ece([ONE], [ONE], min_score=1.0), ValueError, "no detection is left"),
        (lambda: metrics.matched_boxes([ONE], [ONE], [[[1.0, 1.0]]]), ValueError, r"spread of image 0 must have shape \[k, 4\]"),
        (lambda: metrics.matched_boxes([ONE], [ONE], []), ValueError, "an entry for each of 1 images"),
        (lambda: metrics.box_calibration_error([image((FAR, 0.9, 1))], [ONE], [[[1.0] * 4]]), ValueError, "no detection overlaps"),
        (lambda: metrics.box_calibration_error([ONE], [ONE], [[[-1.0] * 4]]), ValueError, "must be >= 0"),
    ],
)  # fmt: skip
def test_bad_input_says_what_was_found(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
