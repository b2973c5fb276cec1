"""Metrics of object detection: average precision, and the calibration of scores and of the spread of boxes.

Predictions and targets are lists with one dict per image, as in torchvision: `boxes` [k, 4] as x1, y1, x2, y2, `scores` [k] and `labels` [k]
(without labels, all objects are of one class). Target objects with a true `iscrowd` [k] are ignored as in COCO: detections there are
neither right nor wrong. In order of their scores, detections are matched to the unmatched object of their label that they overlap most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from workbench.metrics._inputs import check_integer, numbers, tensor_of
from workbench.metrics.classification import bin_edges
from workbench.metrics.registry import metric
from workbench.metrics.regression import calibration_error

IOU = tuple(round(0.5 + 0.05 * i, 2) for i in range(10))  # thresholds of COCO
GEOMETRY = ("x", "y", "width", "height")
_ROUNDING = 1e-10  # an overlap that equals the threshold up to rounding reaches it


class AveragePrecision(NamedTuple):
    """Average precision of each class, float64.

    Args:
        classes: labels that have objects [classes].
        iou: thresholds of the overlap [thresholds].
        precision: [classes, thresholds].
    """

    classes: Tensor
    iou: Tensor
    precision: Tensor


class MatchedBoxes(NamedTuple):
    """Detected boxes, their spread and the boxes of their objects, each [matches, 4], float64; arguments for metrics of values."""

    prediction: Tensor
    risk: Tensor
    target: Tensor


@dataclass(frozen=True)
class _Objects:
    """Objects or detections of one image: boxes [k, 4], labels [k], scores [k] of detections and crowd [k] of targets."""

    boxes: Tensor
    labels: Tensor
    scores: Tensor
    crowd: Tensor


def average_precision(
    predictions: Any, targets: Any, iou: float | Sequence[float] = IOU, max_detections: int = 100
) -> AveragePrecision:
    """Average precision of each class and overlap: mean over 101 recall levels of the best precision at that recall or above.

    As in COCO for boxes of all sizes (Lin et al. 2014).

    Args:
        predictions: One dict per image with boxes [k, 4], scores [k] and labels [k].
        targets: One dict per image with boxes [k, 4], labels [k] and, optionally, iscrowd [k].
        iou: Minimum intersection over union of a detection with its object: one threshold or several, in (0, 1].
        max_detections: Maximum number of detections of a class per image, those of the highest scores.

    Returns:
        classes, iou and precision [classes, thresholds].

    Example:
        >>> box, other = [0.0, 0.0, 10.0, 10.0], [20.0, 0.0, 30.0, 10.0]
        >>> prediction = {"boxes": [box, other], "scores": [0.9, 0.8], "labels": [1, 1]}
        >>> average_precision([prediction], [{"boxes": [box], "labels": [1]}], iou=0.5).precision
        tensor([[1.]], dtype=torch.float64)
    """
    check_integer("max_detections", max_detections)
    thresholds = numbers("iou", iou).flatten().cpu()
    if ((thresholds <= 0) | (thresholds > 1)).any():
        raise ValueError(f"iou must lie in (0, 1], found {thresholds.tolist()}")
    images = _images(predictions, targets)
    present = [truth.labels[~truth.crowd] for _, truth in images]
    classes = torch.cat(present).unique()
    if not len(classes):
        raise ValueError(f"average precision needs objects, found none in {len(images)} targets")
    precision = torch.stack(
        [
            torch.stack([_class_precision(images, label, float(t), max_detections) for t in thresholds])
            for label in classes
        ]
    )
    return AveragePrecision(classes, thresholds, precision)


@metric("max", 0, 1)
def mean_average_precision(
    predictions: Any, targets: Any, iou: float | Sequence[float] = IOU, max_detections: int = 100
) -> Tensor:
    """Mean average precision (mAP) over classes and overlaps 0.50, 0.55, ... 0.95; higher is better (COCO, Lin et al. 2014).

    The mean of `average_precision`; `iou=0.5` is AP50.

    Args:
        predictions: One dict per image with boxes [k, 4], scores [k] and labels [k].
        targets: One dict per image with boxes [k, 4], labels [k] and, optionally, iscrowd [k].
        iou: Minimum intersection over union of a detection with its object: one threshold or several, in (0, 1].
        max_detections: Maximum number of detections of a class per image, those of the highest scores.

    Example:
        >>> prediction = {"boxes": [[0.0, 0.0, 10.0, 8.0]], "scores": [0.9], "labels": [1]}
        >>> mean_average_precision([prediction], [{"boxes": [[0.0, 0.0, 10.0, 10.0]], "labels": [1]}])
        tensor(0.7000, dtype=torch.float64)
    """
    return average_precision(predictions, targets, iou, max_detections).precision.mean()


@metric("min", 0, 1)
def detection_ece(
    predictions: Any,
    targets: Any,
    iou: float = 0.5,
    n_bins: int = 20,
    by: Sequence[str] = (),
    sizes: Any = None,
    min_score: float = 0.0,
) -> Tensor:
    """Detection expected calibration error: mean over detections of |precision - score| of their bin; lower is better.

    D-ECE (Kueppers et al. 2020): a score is calibrated if it is the share of correct detections among those that have it. Detections are binned
    by score only, or by score and position and size of the box, each with `n_bins` of equal width, since detectors may be calibrated in the
    middle of images but not at their edges. Missed objects have no influence: see `mean_average_precision` as well.

    Args:
        predictions: One dict per image with boxes [k, 4], scores [k] in [0, 1] and labels [k].
        targets: One dict per image with boxes [k, 4], labels [k] and, optionally, iscrowd [k].
        iou: Minimum intersection over union of a correct detection with its object, in (0, 1].
        n_bins: Number of bins per variable; 5 is a good choice for several.
        by: Variables to bin by besides the score: "x", "y" (of the centre), "width" and "height", relative to the image.
        sizes: Height and width of each image [images, 2], or of all of them [2]; needed with `by`.
        min_score: Detections with a lower score do not count.

    Example:
        >>> box, other = [0.0, 0.0, 10.0, 10.0], [20.0, 0.0, 30.0, 10.0]
        >>> prediction = {"boxes": [box, other], "scores": [0.9, 0.9], "labels": [1, 1]}
        >>> detection_ece([prediction], [{"boxes": [box], "labels": [1]}])
        tensor(0.4000, dtype=torch.float64)
    """
    check_integer("n_bins", n_bins)
    by = (by,) if isinstance(by, str) else by
    if not isinstance(by, Sequence) or any(name not in GEOMETRY for name in by) or len(set(by)) < len(by):
        raise ValueError(f"by must name some of {', '.join(GEOMETRY)}, found {by!r:.100}")
    lowest_score = float(numbers("min_score", min_score).reshape(-1)[0])
    threshold = _threshold(iou)
    images = _images(predictions, targets)
    extents = _extents(sizes, len(images)) if by else torch.ones(len(images), 2, dtype=torch.float64)
    all_scores, bins, right = [], [], []
    for image, (detected, truth), (height, width) in zip(predictions, images, extents.tolist(), strict=True):
        if ((detected.scores < 0) | (detected.scores > 1)).any():
            raise ValueError(
                f"scores must lie in [0, 1], found {detected.scores.min():.6g} to {detected.scores.max():.6g}"
            )
        match, ignored = _matches(detected, truth, threshold)
        keep = ~ignored & (detected.scores >= lowest_score)
        x1, y1, x2, y2 = detected.boxes[keep].unbind(-1)
        geometry = {
            "x": (x1 + x2) / 2 / width,
            "y": (y1 + y2) / 2 / height,
            "width": (x2 - x1) / width,
            "height": (y2 - y1) / height,
        }
        scores, places = detected.scores[keep], [geometry[name] for name in by]
        # bins (k / n, (k + 1) / n] as in `ece`
        of_scores = torch.bucketize(scores, bin_edges(n_bins, image["scores"]))
        bins.append(
            torch.stack([of_scores, *(torch.bucketize(place, bin_edges(n_bins, place)) for place in places)], -1)
        )
        all_scores.append(scores)
        right.append(match[keep] >= 0)
    score, hit = torch.cat(all_scores), torch.cat(right).double()
    if not len(hit):
        raise ValueError(f"no detection is left to score in {len(images)} images")
    _, index = torch.cat(bins).unique(dim=0, return_inverse=True)
    gaps = torch.zeros(int(index.max()) + 1, dtype=torch.float64).index_add(0, index, hit - score)
    return gaps.abs().sum() / len(hit)


def matched_boxes(predictions: Any, targets: Any, spread: Any, iou: float = 0.5) -> MatchedBoxes:
    """Corners of the detections that match an object, their spread, and the corners of the objects.

    For metrics of values: `nll(*matched_boxes(...))`, `calibration_error`, `coverage_curve`. Only correct detections are included: the closer
    `iou` is to 1, the smaller the remaining errors.

    Args:
        predictions: One dict per image with boxes [k, 4], scores [k] and labels [k].
        targets: One dict per image with boxes [k, 4], labels [k] and, optionally, iscrowd [k].
        spread: Per image, the standard deviations of the corners [k, 4] in pixels, or a dict with them as its `boxes`, as risks of
            `Detections` are.
        iou: Minimum intersection over union of a correct detection with its object, in (0, 1].

    Returns:
        prediction, risk and target, each [matches, 4].

    Example:
        >>> prediction = {"boxes": [[0.0, 0.0, 10.0, 8.0]], "scores": [0.9], "labels": [1]}
        >>> target = {"boxes": [[0.0, 0.0, 10.0, 10.0]], "labels": [1]}
        >>> matched_boxes([prediction], [target], [[[1.0, 1.0, 1.0, 2.0]]]).risk
        tensor([[1., 1., 1., 2.]], dtype=torch.float64)
    """
    threshold = _threshold(iou)
    images = _images(predictions, targets)
    spread = [spread] if isinstance(spread, Mapping) else spread
    if not isinstance(spread, Sequence | Tensor) or isinstance(spread, str | bytes) or len(spread) != len(images):
        raise ValueError(f"spread must have an entry for each of {len(images)} images, found {type(spread).__name__}")
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    for i, (detected, truth) in enumerate(images):
        risk = spread[i]
        risk = risk.get("boxes") if isinstance(risk, Mapping) else risk
        risk = _column(risk, f"spread of image {i}", 4)
        if risk.shape != detected.boxes.shape:
            raise ValueError(
                f"spread of image {i} has shape {tuple(risk.shape)}, and its boxes {tuple(detected.boxes.shape)}"
            )
        match, _ = _matches(detected, truth, threshold)
        hit = match >= 0
        rows.append((detected.boxes[hit], risk[hit], truth.boxes[match[hit]]))
    prediction, risk, target = (torch.cat(column) for column in zip(*rows, strict=True))
    return MatchedBoxes(prediction, risk, target)


@metric("min", 0, 1)
def box_calibration_error(predictions: Any, targets: Any, spread: Any, iou: float = 0.5) -> Tensor:
    """Mean absolute gap between expected and observed coverage of the corners' intervals; lower is better.

    `calibration_error` of a Normal for each corner of the detections that match an object, with their spread as standard deviation.

    Args:
        predictions: One dict per image with boxes [k, 4], scores [k] and labels [k].
        targets: One dict per image with boxes [k, 4], labels [k] and, optionally, iscrowd [k].
        spread: Per image, the standard deviations of the corners [k, 4] in pixels, or a dict with them as its `boxes`.
        iou: Minimum intersection over union of a correct detection with its object, in (0, 1].

    Example:
        >>> box = {"boxes": [[0.0, 0.0, 10.0, 10.0]], "scores": [0.9], "labels": [1]}
        >>> box_calibration_error([box], [box], [[[1.0, 1.0, 1.0, 1.0]]])  # far too wide
        tensor(0.5000, dtype=torch.float64)
    """
    matched = matched_boxes(predictions, targets, spread, iou)
    if not len(matched.target):
        raise ValueError(f"no detection overlaps an object of its label by {iou}, so there are no corners to compare")
    return calibration_error(*matched)


# ---- reading
def _images(predictions: Any, targets: Any) -> list[tuple[_Objects, _Objects]]:
    """Return the checked detections and objects of each image."""
    lists = []
    for name, value in (("predictions", predictions), ("targets", targets)):
        value = [value] if isinstance(value, Mapping) else value
        if not isinstance(value, Sequence) or not all(isinstance(image, Mapping) for image in value):
            raise TypeError(f"{name} must be a list with a dict for each image, found {type(value).__name__}")
        lists.append(value)
    first, second = lists
    if len(first) != len(second) or not first:
        raise ValueError(f"expected a prediction and a target for each image, found {len(first)} and {len(second)}")
    pairs = []
    for i, (prediction, target) in enumerate(zip(first, second, strict=True)):
        if ("labels" in prediction) != ("labels" in target):
            raise ValueError(
                f"image {i} has labels only in the prediction or only in the target; give them in both or neither"
            )
        pairs.append(
            (_objects(prediction, f"prediction of image {i}", True), _objects(target, f"target of image {i}", False))
        )
    return pairs


def _objects(image: Mapping[str, Any], name: str, scored: bool) -> _Objects:
    needed = ("boxes", "scores") if scored else ("boxes",)
    if missing := [key for key in needed if key not in image]:
        raise ValueError(f"{name} has no {' and no '.join(missing)}; it has {', '.join(map(str, image)) or 'nothing'}")
    boxes = _column(image["boxes"], f"boxes of {name}", 4)
    if (boxes[:, 2:] < boxes[:, :2]).any():
        raise ValueError(f"boxes of {name} must be corners x1 <= x2, y1 <= y2, found {boxes.tolist()!r:.200}")
    k = len(boxes)
    none = torch.zeros(k, dtype=torch.float64)
    columns = [
        _column(image[key], f"{key} of {name}") if wanted and key in image else none
        for key, wanted in (("scores", scored), ("labels", True), ("iscrowd", not scored))
    ]
    for key, column in zip(("scores", "labels", "iscrowd"), columns, strict=True):
        if len(column) != k:
            raise ValueError(f"{name} has {k} boxes and {len(column)} {key}")
    scores, labels, crowd = columns
    if (labels != labels.round()).any():
        raise ValueError(f"labels of {name} must be class numbers, found {labels.tolist()!r:.200}")
    return _Objects(boxes, labels.long(), scores, crowd != 0)


def _column(value: Any, name: str, width: int = 0) -> Tensor:
    """Return numbers [k], or [k, width], in float64 on the CPU; k may be 0."""
    tensor = tensor_of(value, name)
    shape = (0, width) if width else (0,)
    if tensor.numel() == 0 and tensor.shape[:1] in ((), (0,)):
        return torch.zeros(shape, dtype=torch.float64)
    if tensor.ndim != len(shape) or (width and tensor.shape[1] != width):
        raise ValueError(f"{name} must have shape {'[k, 4]' if width else '[k]'}, found {tuple(tensor.shape)}")
    return numbers(name, tensor).detach().cpu()


def _threshold(iou: Any) -> float:
    value = numbers("iou", iou)
    if value.numel() != 1 or not 0 < value.item() <= 1:
        raise ValueError(f"iou must be one overlap in (0, 1], found {iou!r:.100}")
    return float(value.item())


def _extents(sizes: Any, n_images: int) -> Tensor:
    """Return height and width of each image, [images, 2]."""
    if sizes is None:
        raise ValueError("binning by position or size of boxes needs sizes=, the height and width of each image")
    extents = numbers("sizes", sizes).cpu()
    if extents.shape not in ((2,), (n_images, 2)) or (extents <= 0).any():
        raise ValueError(
            f"sizes must be heights and widths > 0 of shape (2,) or ({n_images}, 2), found {tuple(extents.shape)}"
        )
    return extents.expand(n_images, 2)


# ---- matching
def _overlaps(detected: Tensor, truth: Tensor, crowd: Tensor) -> Tensor:
    """Return intersection over union [detections, objects]; for crowds, intersection over the area of the detection."""
    low = torch.maximum(detected[:, None, :2], truth[:, :2])
    high = torch.minimum(detected[:, None, 2:], truth[:, 2:])
    intersection = (high - low).clamp_min(0).prod(-1)
    area, others = ((boxes[:, 2:] - boxes[:, :2]).prod(-1) for boxes in (detected, truth))
    union = area[:, None] + torch.where(crowd, 0, others - intersection)
    return intersection / union.where(union > 0, 1)


def _matches(detected: _Objects, truth: _Objects, iou: float) -> tuple[Tensor, Tensor]:
    """Return the object of each detection, -1 for none, and whether it lies in a crowd and is ignored, each [detections]."""
    match = torch.full((len(detected.boxes),), -1)
    ignored = torch.zeros(len(match), dtype=torch.bool)
    overlap = _overlaps(detected.boxes, truth.boxes, truth.crowd)
    same = detected.labels[:, None] == truth.labels
    overlap = overlap.where(same & (overlap >= iou - _ROUNDING), -1)
    if not overlap.numel():
        return match, ignored
    free = overlap.masked_fill(truth.crowd, -1)
    for i in detected.scores.argsort(descending=True, stable=True).tolist():
        best = len(truth.boxes) - 1 - int(free[i].flip(0).argmax())  # ties go to the last one, as in COCO
        if free[i, best] >= 0:
            match[i] = best
            free[:, best] = -1
        else:
            ignored[i] = bool((overlap[i, truth.crowd] >= 0).any())
    return match, ignored


def _class_precision(images: list[tuple[_Objects, _Objects]], label: Tensor, iou: float, max_detections: int) -> Tensor:
    """Return the average precision of one class at one overlap."""
    scores, right, n_objects = [], [], 0
    for detected, truth in images:
        chosen = (detected.labels == label).nonzero().squeeze(-1)
        chosen = chosen[detected.scores[chosen].argsort(descending=True, stable=True)[:max_detections]]
        top = _Objects(
            *(column[chosen] for column in (detected.boxes, detected.labels, detected.scores, detected.crowd))
        )
        match, ignored = _matches(top, truth, iou)
        scores.append(top.scores[~ignored])
        right.append(match[~ignored] >= 0)
        n_objects += int(((truth.labels == label) & ~truth.crowd).sum())
    order = torch.cat(scores).argsort(descending=True, stable=True)
    hits = torch.cat(right)[order].double().cumsum(0)
    if not len(hits):
        return torch.zeros((), dtype=torch.float64)
    precision = hits / torch.arange(1, len(hits) + 1)
    best = precision.flip(0).cummax(0).values.flip(0)  # at this recall or above
    # the same floats as in pycocotools, where a recall of 0.58 may be slightly below its threshold
    at = torch.searchsorted(hits / n_objects, torch.from_numpy(np.linspace(0, 1, 101)))
    return torch.cat([best, best.new_zeros(1)])[at].mean()
