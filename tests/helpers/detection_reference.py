"""A small detector, and the combined boxes of its branches: matched and averaged by plain loops over all boxes."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn

from helpers.zoo import Case
from workbench.testing.zoo import normal

Box = tuple[int, list[float], float, int]  # branch, corners, score, label


class Detector(nn.Module):
    """A detector with a box around each pixel of score > 0.5; returns a dict per image, as in torchvision."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.size, self.score = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 2, 1), nn.Conv2d(4, 2, 1)

    def forward(self, images: Tensor) -> list[dict[str, Tensor]]:
        h = torch.tanh(self.body(images))
        half = torch.exp(0.3 * self.size(h)).flatten(2).mT
        all_scores = torch.sigmoid(4 * self.score(h)).flatten(2)  # [images, labels, pixels]
        rows, columns = torch.meshgrid(*(torch.arange(n, dtype=h.dtype) for n in h.shape[2:]), indexing="ij")
        centre = 1.5 * torch.stack([columns, rows], -1).flatten(0, 1)
        answers = []
        for scores, size in zip(all_scores, half, strict=True):
            score, label = scores.max(0)
            kept = score > 0.5
            boxes = torch.cat([centre - size, centre + size], 1)[kept]
            answers.append({"boxes": boxes, "scores": score[kept], "labels": label[kept]})
        return answers


def _built() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return Detector()


DETECTOR = Case("detector", _built, normal((1, 3, 3)), frozenset())


def expected_detections(outputs: list[Any], iou: float) -> list[dict[str, Any]]:
    """Return the combined detections per image: boxes, scores, labels, and the risks of boxes and scores, as lists of numbers."""
    answers = []
    for images in zip(*outputs, strict=True):
        boxes = [
            (k, corners.tolist(), score.item(), int(label))
            for k, image in enumerate(images)
            for corners, score, label in zip(image["boxes"], image["scores"], image["labels"], strict=True)
        ]
        objects = [_combined(members, len(images)) for members in _clusters(boxes, iou)]
        objects.sort(key=lambda detection: -detection["scores"])
        answers.append(
            {key: [detection[key] for detection in objects] for key in _combined([(0, [0.0] * 4, 0.5, 0)], 1)}
        )
    return answers


def _clusters(boxes: list[Box], iou: float) -> list[list[Box]]:
    """Join the two clusters with the largest mean overlap until it falls below `iou`."""
    clusters = [[box] for box in boxes]
    while True:
        pairs = [
            (sum(_overlap(p, q) for p in a for q in b) / (len(a) * len(b)), i, j)
            for (i, a), (j, b) in itertools.combinations(enumerate(clusters), 2)
            if a[0][3] == b[0][3] and not {p[0] for p in a} & {q[0] for q in b}
        ]
        best, i, j = max(pairs, default=(0.0, 0, 0))
        if best < iou:
            return clusters
        clusters[i] += clusters.pop(j)


def _overlap(p: Box, q: Box) -> float:
    (left, top, right, bottom), (x, y, x2, y2) = p[1], q[1]
    inside = max(0.0, min(right, x2) - max(left, x)) * max(0.0, min(bottom, y2) - max(top, y))
    return inside / ((right - left) * (bottom - top) + (x2 - x) * (y2 - y) - inside)


def _combined(members: list[Box], n_branches: int) -> dict[str, Any]:
    """Return one object: mean corners over the branches that detect it, mean score over all, spread and entropies."""
    mean = [sum(box[1][c] for box in members) / len(members) for c in range(4)]
    score = sum(box[2] for box in members) / n_branches
    each = sum(_entropy(box[2]) for box in members) / n_branches
    return {
        "boxes": mean,
        "scores": score,
        "labels": members[0][3],
        "spread": [math.sqrt(sum((box[1][c] - mean[c]) ** 2 for box in members) / len(members)) for c in range(4)],
        "seen": len(members) / n_branches,
        "total": _entropy(score),
        "aleatoric": each,
        "epistemic": _entropy(score) - each,
    }


def _entropy(p: float) -> float:
    return -sum(q * math.log(q) for q in (p, 1 - p) if q > 0)
