"""Combination of the detections of several branches: matching of boxes, mean predictions and risks."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...engine.combine import Ragged
from ...engine.effects.random import values_unavailable
from ...engine.tree import children, replace_node
from ..method import sqrt
from .class_scores import at_least_float32
from .meanings import Detections
from .options import Output, has_detections
from .resolution import detections_at

_NEVER = -torch.inf  # overlap assigned to pairs of boxes that must not be merged


@dataclass(frozen=True)
class Image:
    """Positions of the leaves of an output that hold the detections of one image.

    Args:
        meaning: the option.
        name: dotted name of their container, "" for the whole output.
        boxes, scores, labels: positions of these leaves; labels are None for a detector of one class.
        others: positions of other leaves with a row per box, such as masks.
    """

    meaning: Detections
    name: str
    boxes: int
    scores: int
    labels: int | None
    others: tuple[int, ...]


def ragged_leaves(output: Output) -> Any:
    """Return a function that finds the leaves whose number of rows differs between branches, for `Plan.ragged`; None if there are none."""
    return functools.partial(_ragged, output) if has_detections(output) else None


def _ragged(output: Output, names: list[str]) -> Collection[int]:
    return detections_at(output, names)


def images_of(output: Output, names: Sequence[str], leaves: Sequence[Any], depth: int) -> list[Image]:
    """Find the detections in an output.

    Args:
        output: the option.
        names: dotted names of the leaves.
        leaves: leaves of all branches; tensors have `depth` leading dimensions of branches.
        depth: number of leading dimensions.

    Raises:
        ValueError: if boxes, scores or labels are missing under their names.
    """
    members = {i: m for i, m in detections_at(output, names).items() if _has_rows(leaves[i], depth)}
    places = {name: i for i, name in enumerate(names)}
    images: list[Image] = []
    for i, meaning in members.items():
        key = str(meaning.boxes)
        if names[i] != key and not names[i].endswith(f".{key}"):
            continue
        prefix = names[i][: -len(key)]
        roles = {role: getattr(meaning, role) for role in ("scores", "labels")}
        full_names = {role: f"{prefix}{key}" for role, key in roles.items() if key is not None}
        if missing := [name for name in full_names.values() if places.get(name) not in members]:
            raise ValueError(_missing_message(meaning, missing, names, members))
        positions = {role: places[name] for role, name in full_names.items()}
        images.append(Image(meaning, prefix.rstrip("."), i, positions["scores"], positions.get("labels"), ()))
    taken = {i for image in images for i in (image.boxes, image.scores, image.labels)}
    complete: list[Image] = []
    for image in images:
        prefix = f"{image.name}." if image.name else ""
        others = [i for i in members if i not in taken and names[i].startswith(prefix)]
        taken.update(others)
        complete.append(replace(image, others=tuple(others)))
    if remaining := [i for i in members if i not in taken]:
        raise ValueError(_missing_message(members[remaining[0]], [str(members[remaining[0]].boxes)], names, members))
    if isinstance(output, dict) and not images:
        sized = [name for i, name in enumerate(names) if _has_rows(leaves[i], depth)]
        keys = [key for key, entry in output.items() if isinstance(entry, Detections)]
        if sized and not any(name in output for name in sized):
            raise ValueError(
                f"output names {', '.join(keys)}, which the model does not return; it returns {', '.join(sized)}"
            )
    return complete


def _has_rows(leaf: Any, depth: int) -> bool:
    return isinstance(leaf, Ragged) or (isinstance(leaf, Tensor) and leaf.dim() > depth)


def _missing_message(
    meaning: Detections, missing: Sequence[str], names: Sequence[str], members: Collection[int]
) -> str:
    present = ", ".join(repr(names[i]) if names[i] else "one tensor without a name" for i in members)
    return (
        f"{meaning!r}: the model returns no {' and no '.join(map(repr, missing))}; it returns {present}. Return a dict with boxes [k, 4], "
        'scores [k] and labels [k], or give their names, output=Detections(boxes="...", scores="...", labels="..."); name outputs that are not '
        'detections as well, output={"features": Values(), "*": Detections()}'
    )


def combine(
    image: Image, leaves: Sequence[Any], names: Sequence[str], depth: int
) -> tuple[dict[int, Tensor], dict[str, Any]]:
    """Combine the detections of one image by all branches.

    Args:
        image: positions of the leaves.
        leaves: leaves of all branches.
        names: dotted names of the leaves.
        depth: number of leading dimensions of branches; with 0 the output is that of a single model and is returned unchanged.

    Returns:
        Pair of {position: leaf of the prediction} and {name of the risk: {position: leaf}, "seen": fraction of branches [objects]}.
    """
    places = [i for i in (image.boxes, image.scores, image.labels, *image.others) if i is not None]
    branches = {i: _branches(leaves[i], depth) for i in places}
    _check(image, branches, names)
    if not depth:
        entropy = _entropy(leaves[image.scores])
        single_risks = {"aleatoric": {image.scores: entropy}, "total": {image.scores: entropy}}
        return {i: leaves[i] for i in places}, single_risks
    boxes, scores = branches[image.boxes], branches[image.scores]
    labels = branches[image.labels] if image.labels is not None else [score.new_zeros(len(score)) for score in scores]
    clusters = match(boxes, scores, labels, image.meaning.iou)
    device, n = scores[0].device, len(clusters)
    order = torch.tensor([row for cluster in clusters for row in cluster], dtype=torch.long, device=device)
    number = torch.tensor([k for k, cluster in enumerate(clusters) for _ in cluster], dtype=torch.long, device=device)
    first = torch.tensor([cluster[0] for cluster in clusters], dtype=torch.long, device=device)
    seen = torch.zeros(n, device=device).index_add(0, number, torch.ones(len(number), device=device))

    def total(rows: Tensor) -> Tensor:
        return rows.new_zeros(n, *rows.shape[1:]).index_add(0, number, rows)

    y: dict[int, Tensor] = {}
    risks: dict[str, Any] = {"epistemic": {}, "aleatoric": {}, "total": {}}
    for i in (image.boxes, *image.others):
        rows = at_least_float32(_rows(branches[i]))[order]
        count = seen.to(rows.dtype).view(-1, *[1] * (rows.dim() - 1))
        mean = total(rows) / count
        spread = sqrt(total((rows - mean[number]).square()) / count)
        y[i] = mean.to(leaves_dtype(branches[i]))
        risks["epistemic"][i] = risks["total"][i] = spread
    score = at_least_float32(_rows(scores))[order]
    mean = total(score) / len(scores)
    aleatoric, total_entropy = total(_entropy(score)) / len(scores), _entropy(mean)
    y[image.scores] = mean.to(leaves_dtype(scores))
    if image.labels is not None:
        y[image.labels] = _rows(labels)[first]
    risks["aleatoric"][image.scores], risks["total"][image.scores] = aleatoric, total_entropy
    risks["epistemic"][image.scores] = (total_entropy - aleatoric).clamp_min(0)
    risks["seen"] = seen / len(scores)
    return y, risks


def match(boxes: Sequence[Tensor], scores: Sequence[Tensor], labels: Sequence[Tensor], iou: float) -> list[list[int]]:
    """Match the boxes of several branches to objects.

    Agglomerative clustering with average linkage: the two clusters with the same label and the largest mean overlap (intersection over union)
    are merged, as long as that is at least `iou`; two boxes of one branch are never merged. Ties are broken in favour of boxes with higher
    scores, so that the order of the branches does not matter. Affinity and the exclusion within a branch follow Miller et al. 2019, "Evaluating
    merging strategies for sampling-based uncertainty techniques in object detection"; boxes are averaged as in weighted boxes fusion (Solovyev
    et al. 2021) with equal weights.

    Args:
        boxes: for each branch its corners x1, y1, x2, y2, [k, 4].
        scores: for each branch its scores [k].
        labels: for each branch its labels [k].
        iou: minimum overlap.

    Returns:
        For each object the numbers of its boxes in the concatenation of all branches; objects are sorted by the sum of their scores, the boxes
        of an object by score.

    Raises:
        RuntimeError: while a program is exported or traced.
        ValueError: if boxes or scores contain NaN.

    Example:
        >>> box, away = torch.tensor([[0.0, 0, 2, 2]]), torch.tensor([[5.0, 5, 7, 7], [0, 0, 2, 1.9]])
        >>> match([box, away], [torch.tensor([0.9]), torch.tensor([0.4, 0.8])], [torch.ones(1), torch.ones(2)], 0.5)
        [[0, 2], [1]]
    """
    if values_unavailable():
        raise RuntimeError(
            "detections are matched by their values, which are not available while a program is exported or traced: export single voters, "
            "wrapped.voters(), and match outside"
        )
    corners, score, label = (_rows(parts).detach().to("cpu", torch.float64) for parts in (boxes, scores, labels))
    corners = corners.reshape(-1, 4)
    if bool(corners.isnan().any()) or bool(score.isnan().any()):
        raise ValueError(
            "some boxes or scores are NaN, so detections cannot be matched; check the inputs and weights of the model"
        )
    numbers = [k for k, part in enumerate(scores) for _ in range(len(part))]
    keys = list(zip((-score).tolist(), label.tolist(), corners.tolist(), strict=True))
    order = sorted(range(len(keys)), key=keys.__getitem__)
    index = torch.tensor(order, dtype=torch.long)
    corners, score, label, branch = corners[index], score[index], label[index], torch.tensor(numbers)[index]
    overlap = overlaps(corners)
    overlap[(label[:, None] != label) | (branch[:, None] == branch)] = _NEVER
    objects = [cluster for near in _components(overlap >= iou) for cluster in _clusters(near, overlap, iou)]
    # by mean score, with 0 for branches that did not detect the object; ties by the sort order of their first boxes
    objects.sort(key=lambda cluster: (-float(score[cluster].sum()), cluster[0]))
    return [[order[row] for row in cluster] for cluster in objects]


def overlaps(boxes: Tensor) -> Tensor:
    """Return the intersection over union [n, n] of all pairs of boxes [n, 4]; 0 if neither has an area, 1 for equal boxes."""
    low, high = torch.maximum(boxes[:, None, :2], boxes[:, :2]), torch.minimum(boxes[:, None, 2:], boxes[:, 2:])
    intersection = (high - low).clamp_min(0).prod(-1)
    area = (boxes[:, 2:] - boxes[:, :2]).prod(-1)
    union = area[:, None] + area - intersection
    same = (boxes[:, None] == boxes).all(-1)  # including boxes without an area
    return torch.where(same, 1.0, intersection / union.where(union > 0, 1.0))


def _components(near: Tensor) -> Iterator[list[int]]:
    """Yield the connected components of boxes with sufficient overlap (bool [n, n])."""
    n = len(near)
    label = torch.arange(n)
    while n:
        lower = torch.minimum(label, torch.where(near, label, n).amin(1))
        if torch.equal(lower, label):
            break
        label = lower
    components: dict[int, list[int]] = {}
    for row, first in enumerate(label.tolist()):
        components.setdefault(first, []).append(row)
    yield from components.values()


def _clusters(rows: list[int], overlap: Tensor, iou: float) -> list[list[int]]:
    """Cluster some boxes by average linkage."""
    clusters = [[row] for row in rows]
    overlap = overlap[rows][:, rows]
    while len(clusters) > 1:
        best = int(overlap.argmax())
        a, b = sorted(divmod(best, len(rows)))
        if float(overlap[a, b]) < iou:
            break
        weight = len(clusters[a]) / (len(clusters[a]) + len(clusters[b]))
        mean = weight * overlap[a] + (1 - weight) * overlap[b]
        mean[a] = _NEVER
        overlap[a] = overlap[:, a] = mean
        overlap[b] = overlap[:, b] = _NEVER
        clusters[a], clusters[b] = sorted(clusters[a] + clusters[b]), []
    return [cluster for cluster in clusters if cluster]


def with_seen(risks: Any, image: Image, seen: Tensor) -> Any:
    """Return the risks of an output with those of this image as a dict, extended by the fraction of branches under "seen"."""

    def as_dict(node: Any) -> dict[Any, Any]:
        return {_key(name): value for name, value in children(node) or ()} | {"seen": seen}

    return replace_node(risks, image.name, as_dict)


def _key(name: str) -> str | int:
    name = name.strip("[].'\"")
    return int(name) if name.isdecimal() else name


def _branches(leaf: Any, depth: int) -> list[Tensor]:
    """Return the tensors of all branches in row-major order of the axes."""
    if isinstance(leaf, Ragged):
        return leaf.items
    return list(leaf.flatten(0, depth - 1).unbind(0)) if depth else [leaf]


def _rows(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate all rows; parts without rows are skipped, since their shape is arbitrary."""
    nonempty = [part for part in parts if part.shape[0]]
    return torch.cat(nonempty) if nonempty else parts[0]


def leaves_dtype(parts: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype of parts if it is floating-point, otherwise float32."""
    dtype = parts[0].dtype
    return dtype if dtype.is_floating_point else torch.float32


def _entropy(p: Tensor) -> Tensor:
    """Return the binary entropy of probabilities in nats, in float32 or float64."""
    p = at_least_float32(p)
    tiny = torch.finfo(p.dtype).tiny
    return torch.special.entr(p.clamp_min(tiny)) + torch.special.entr((1 - p).clamp_min(tiny))


def _check(image: Image, branches: dict[int, list[Tensor]], names: Sequence[str]) -> None:
    """Raise ValueError if the tensors of a branch are not valid detections."""
    for k, (boxes, scores) in enumerate(zip(branches[image.boxes], branches[image.scores], strict=True)):
        n = scores.shape[0]
        if scores.dim() != 1 or (boxes.numel() and tuple(boxes.shape) != (n, 4)):
            raise ValueError(
                f"Detections needs boxes [k, 4] and scores [k], and {names[image.boxes]} has shape {list(boxes.shape)}, {names[image.scores]} "
                f"{list(scores.shape)}; return a list with one dict per image"
            )
        for i in (image.labels, *image.others):
            if i is not None and (
                branches[i][k].shape[:1] != (n,) or (i == image.labels and branches[i][k].dim() != 1)
            ):
                raise ValueError(
                    f"{names[i]} has shape {list(branches[i][k].shape)}, and there are {n} boxes; name outputs without a row per box in "
                    f'output=, as in output={{"{names[i]}": Values(), "*": Detections()}}'
                )
        for i in image.others:
            if not branches[i][k].is_floating_point():
                raise ValueError(
                    f"{names[i]} holds {branches[i][k].dtype}, which cannot be averaged over boxes; return it as floating-point numbers, or "
                    "leave it out of the output"
                )
        if values_unavailable() or not n or scores.is_meta:
            continue
        if bool((boxes[:, :2] > boxes[:, 2:]).any()):
            raise ValueError(
                f"Detections needs corners x1, y1, x2, y2 in {names[image.boxes]}, and some have x2 < x1 or y2 < y1; return corners, such as "
                "from torchvision.ops.box_convert(boxes, 'cxcywh', 'xyxy')"
            )
        if bool(((scores < 0) | (scores > 1)).any()):
            raise ValueError(
                f"Detections needs probabilities in {names[image.scores]}, and it holds numbers outside [0, 1]; return scores.sigmoid()"
            )
