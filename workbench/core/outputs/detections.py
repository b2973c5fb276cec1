"""Detections of several branches as one: which boxes are the same object, and what all of them together say."""

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

_NEVER = -torch.inf  # the overlap of boxes that are two objects whatever their corners


@dataclass(frozen=True)
class Image:
    """The leaves of an output that hold the detections of one image.

    Args:
        meaning: the option.
        name: the dotted name of what holds them, "" for the whole output.
        boxes, scores, labels: places of these leaves; labels are None for a detector of one class.
        others: places of other leaves with a row for each box, such as masks.
    """

    meaning: Detections
    name: str
    boxes: int
    scores: int
    labels: int | None
    others: tuple[int, ...]


def ragged_leaves(output: Output) -> Any:
    """What tells the leaves whose rows each branch chooses by itself, as `Plan.ragged` takes it; None if there are none."""
    return functools.partial(_ragged, output) if has_detections(output) else None


def _ragged(output: Output, names: list[str]) -> Collection[int]:
    return detections_at(output, names)


def images_of(output: Output, names: Sequence[str], leaves: Sequence[Any], depth: int) -> list[Image]:
    """The detections in an output.

    Args:
        output: the option.
        names: the dotted names of the leaves.
        leaves: of all branches; tensors have so many dimensions of branches in front.
        depth: that number.

    Raises:
        ValueError: if boxes, scores or labels are not there under their names.
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
        wanted = {role: f"{prefix}{key}" for role, key in roles.items() if key is not None}
        if missing := [name for name in wanted.values() if places.get(name) not in members]:
            raise ValueError(_not_there(meaning, missing, names, members))
        at = {role: places[name] for role, name in wanted.items()}
        images.append(Image(meaning, prefix.rstrip("."), i, at["scores"], at.get("labels"), ()))
    taken = {i for image in images for i in (image.boxes, image.scores, image.labels)}
    complete: list[Image] = []
    for image in images:
        prefix = f"{image.name}." if image.name else ""
        others = [i for i in members if i not in taken and names[i].startswith(prefix)]
        taken.update(others)
        complete.append(replace(image, others=tuple(others)))
    if left := [i for i in members if i not in taken]:
        raise ValueError(_not_there(members[left[0]], [str(members[left[0]].boxes)], names, members))
    if isinstance(output, dict) and not images:
        sized = [name for i, name in enumerate(names) if _has_rows(leaves[i], depth)]
        keys = [key for key, entry in output.items() if isinstance(entry, Detections)]
        if sized and not any(name in output for name in sized):
            raise ValueError(
                f"output names {', '.join(keys)}, which the model does not give; it gives {', '.join(sized)}"
            )
    return complete


def _has_rows(leaf: Any, depth: int) -> bool:
    return isinstance(leaf, Ragged) or (isinstance(leaf, Tensor) and leaf.dim() > depth)


def _not_there(meaning: Detections, missing: Sequence[str], names: Sequence[str], members: Collection[int]) -> str:
    there = ", ".join(repr(names[i]) if names[i] else "one tensor without a name" for i in members)
    return (
        f"{meaning!r}: the model gives no {' and no '.join(map(repr, missing))}; it gives {there}. Return a dict with boxes [k, 4], scores "
        '[k] and labels [k], or say their names, output=Detections(boxes="...", scores="...", labels="..."); what is no detection is named '
        'beside them, output={"features": Values(), "*": Detections()}'
    )


def combine(
    image: Image, leaves: Sequence[Any], names: Sequence[str], depth: int
) -> tuple[dict[int, Tensor], dict[str, Any]]:
    """The detections of one image by all branches.

    Args:
        image: their places.
        leaves: of all branches.
        names: the dotted names of the leaves.
        depth: how many dimensions of branches tensors have in front; with 0 the output is that of a single model and stays as it is.

    Returns:
        (by place the leaf of the prediction, by name of the risk {place: leaf}, and under "seen" the share of the branches).
    """
    places = [i for i in (image.boxes, image.scores, image.labels, *image.others) if i is not None]
    branches = {i: _branches(leaves[i], depth) for i in places}
    _check(image, branches, names)
    if not depth:
        entropy = _entropy(leaves[image.scores])
        own = {"aleatoric": {image.scores: entropy}, "total": {image.scores: entropy}}
        return {i: leaves[i] for i in places}, own
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
    aleatoric, whole = total(_entropy(score)) / len(scores), _entropy(mean)
    y[image.scores] = mean.to(leaves_dtype(scores))
    if image.labels is not None:
        y[image.labels] = _rows(labels)[first]
    risks["aleatoric"][image.scores], risks["total"][image.scores] = aleatoric, whole
    risks["epistemic"][image.scores] = (whole - aleatoric).clamp_min(0)
    risks["seen"] = seen / len(scores)
    return y, risks


def match(boxes: Sequence[Tensor], scores: Sequence[Tensor], labels: Sequence[Tensor], iou: float) -> list[list[int]]:
    """Which boxes of several branches are the same object.

    Agglomerative clustering with average linkage: the two clusters of boxes of one label whose boxes overlap most on average (intersection over
    union) become one, for as long as that is at least `iou`; two boxes of one branch are never the same object. With equal overlaps the boxes of
    higher scores come first, so that the order of the branches does not matter. Affinity and the exclusion within a branch are those of Miller
    et al. 2019, "Evaluating merging strategies for sampling-based uncertainty techniques in object detection", and boxes are averaged as in
    weighted boxes fusion (Solovyev et al. 2021) with equal weights.

    Args:
        boxes: for each branch its corners x1, y1, x2, y2, [k, 4].
        scores: [k] each.
        labels: [k] each.
        iou: the least overlap.

    Returns:
        For each object the numbers of its boxes, counted through all branches, one branch after another; objects are sorted by the sum of their
        scores, the boxes of an object by their own.

    Example:
        >>> box, away = torch.tensor([[0.0, 0, 2, 2]]), torch.tensor([[5.0, 5, 7, 7], [0, 0, 2, 1.9]])
        >>> match([box, away], [torch.tensor([0.9]), torch.tensor([0.4, 0.8])], [torch.ones(1), torch.ones(2)], 0.5)
        [[0, 2], [1]]
    """
    if values_unavailable():
        raise RuntimeError(
            "detections are matched by their numbers, which are not known while a program is exported or traced: export single voters, "
            "wrapped.voters(), and match outside"
        )
    corners, score, label = (_rows(parts).detach().to("cpu", torch.float64) for parts in (boxes, scores, labels))
    corners = corners.reshape(-1, 4)
    if bool(corners.isnan().any()) or bool(score.isnan().any()):
        raise ValueError(
            "some boxes or scores are NaN, so detections cannot be matched; call the model with inputs that give numbers"
        )
    numbers = [k for k, part in enumerate(scores) for _ in range(len(part))]
    keys = list(zip((-score).tolist(), label.tolist(), corners.tolist(), strict=True))
    order = sorted(range(len(keys)), key=keys.__getitem__)
    index = torch.tensor(order, dtype=torch.long)
    corners, score, label, branch = corners[index], score[index], label[index], torch.tensor(numbers)[index]
    overlap = overlaps(corners)
    overlap[(label[:, None] != label) | (branch[:, None] == branch)] = _NEVER
    objects = [cluster for near in _linked(overlap >= iou) for cluster in _merged(near, overlap, iou)]
    # by their mean score, as a branch that did not see it counts as 0; equal ones by the contents of their first boxes
    objects.sort(key=lambda cluster: (-float(score[cluster].sum()), cluster[0]))
    return [[order[row] for row in cluster] for cluster in objects]


def overlaps(boxes: Tensor) -> Tensor:
    """Intersection over union of all pairs of boxes [n, 4]: [n, n]; 0 where neither has an area."""
    low, high = torch.maximum(boxes[:, None, :2], boxes[:, :2]), torch.minimum(boxes[:, None, 2:], boxes[:, 2:])
    intersection = (high - low).clamp_min(0).prod(-1)
    area = (boxes[:, 2:] - boxes[:, :2]).prod(-1)
    union = area[:, None] + area - intersection
    same = (boxes[:, None] == boxes).all(-1)  # boxes without an area as well
    return torch.where(same, 1.0, intersection / union.where(union > 0, 1.0))


def _linked(near: Tensor) -> Iterator[list[int]]:
    """The sets of boxes that no box outside is near to."""
    n = len(near)
    mark = torch.arange(n)
    while n:
        lower = torch.minimum(mark, torch.where(near, mark, n).amin(1))
        if torch.equal(lower, mark):
            break
        mark = lower
    linked: dict[int, list[int]] = {}
    for row, first in enumerate(mark.tolist()):
        linked.setdefault(first, []).append(row)
    yield from linked.values()


def _merged(rows: list[int], overlap: Tensor, iou: float) -> list[list[int]]:
    """Average linkage among some boxes."""
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
    """The risks of an output, those of this image as a dict that has the share of branches under "seen"."""

    def as_dict(node: Any) -> dict[Any, Any]:
        return {_key(name): value for name, value in children(node) or ()} | {"seen": seen}

    return replace_node(risks, image.name, as_dict)


def _key(name: str) -> str | int:
    name = name.strip("[].'\"")
    return int(name) if name.isdecimal() else name


def _branches(leaf: Any, depth: int) -> list[Tensor]:
    """The tensors of all branches, last axis fastest."""
    if isinstance(leaf, Ragged):
        return leaf.items
    return list(leaf.flatten(0, depth - 1).unbind(0)) if depth else [leaf]


def _rows(parts: Sequence[Tensor]) -> Tensor:
    """All rows; parts without any have any shape."""
    some = [part for part in parts if part.shape[0]]
    return torch.cat(some) if some else parts[0]


def leaves_dtype(parts: Sequence[Tensor]) -> torch.dtype:
    """The dtype in which a model gives numbers of this kind."""
    dtype = parts[0].dtype
    return dtype if dtype.is_floating_point else torch.float32


def _entropy(p: Tensor) -> Tensor:
    """Of a yes or no with this probability, in nats, in float32 at least."""
    p = at_least_float32(p)
    tiny = torch.finfo(p.dtype).tiny
    return torch.special.entr(p.clamp_min(tiny)) + torch.special.entr((1 - p).clamp_min(tiny))


def _check(image: Image, branches: dict[int, list[Tensor]], names: Sequence[str]) -> None:
    """Raise if the tensors of a branch are no detections."""
    for k, (boxes, scores) in enumerate(zip(branches[image.boxes], branches[image.scores], strict=True)):
        n = scores.shape[0]
        if scores.dim() != 1 or (boxes.numel() and tuple(boxes.shape) != (n, 4)):
            raise ValueError(
                f"Detections wants boxes [k, 4] and scores [k], and {names[image.boxes]} has shape {list(boxes.shape)}, {names[image.scores]} "
                f"{list(scores.shape)}; return a list with one dict for each image"
            )
        for i in (image.labels, *image.others):
            if i is not None and (
                branches[i][k].shape[:1] != (n,) or (i == image.labels and branches[i][k].dim() != 1)
            ):
                raise ValueError(
                    f"{names[i]} has shape {list(branches[i][k].shape)} beside {n} boxes; what has no row for each box is named in "
                    f'output=, as in output={{"{names[i]}": Values(), "*": Detections()}}'
                )
        for i in image.others:
            if not branches[i][k].is_floating_point():
                raise ValueError(
                    f"{names[i]} holds {branches[i][k].dtype}, of which a cluster of boxes has no mean; return it as floating-point numbers, or "
                    "leave it out of the output"
                )
        if values_unavailable() or not n or scores.is_meta:
            continue
        if bool((boxes[:, :2] > boxes[:, 2:]).any()):
            raise ValueError(
                f"Detections wants corners x1, y1, x2, y2 in {names[image.boxes]}, and some have x2 < x1 or y2 < y1; return corners, such as "
                "torchvision.ops.box_convert(boxes, 'cxcywh', 'xyxy') makes them"
            )
        if bool(((scores < 0) | (scores > 1)).any()):
            raise ValueError(
                f"Detections wants probabilities in {names[image.scores]}, and it holds numbers outside [0, 1]; return scores.sigmoid()"
            )
