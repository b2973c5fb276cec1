"""Meanings of a single output of a model: values, detections, state, or only a mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

IGNORED = -100  # class number of rows, pixels or tokens to leave out, as in torch's losses


@dataclass(frozen=True)
class Meaning:
    """Meaning of one output."""

    short: ClassVar[str] = ""  # short form, also the name of the meaning regardless of its options


@dataclass(frozen=True)
class Values(Meaning):
    """Real values, whose risk is an elementwise standard deviation in their units.

    Example:
        >>> from workbench import vote
        >>> vote.Wrapper(3, output={"box": Values(), "classes": Logits()})
        vote.Wrapper(output={'box': 'values', 'classes': 'logits'})
    """

    short = "values"


@dataclass(frozen=True)
class Mean(Meaning):
    """A loss or another output that is averaged over voters and samples, without a risk.

    The default for scalars if there are other outputs, and for outputs that are not named in a dict `output=`.
    """

    short = "mean"


@dataclass(frozen=True)
class State(Meaning):
    """State that the caller passes to the next call, such as that of a recurrent cell: each branch has its own; see the option `state`."""

    short = "state"


@dataclass(frozen=True)
class Detections(Meaning):
    """A variable number of boxes with scores and labels: a dict, or a list of dicts, one per image, as in torchvision.

    The boxes of all voters or samples are matched, see `workbench.core.outputs.detections.match`. The prediction has one box per cluster,
    sorted by score: the mean corners over the branches that detected it, its label, and the mean score over all branches, with 0 for those that
    did not detect it. Risks are dicts with the names of the output: for `boxes` the epistemic risk is the standard deviation of each corner over
    the branches that detected it; for `scores` risks are binary entropies in nats, as for `Binary`; `risk.epistemic["seen"]` is the fraction of
    voters or samples that detected the box.

    Args:
        boxes: name of the corners [k, 4], x1, y1, x2, y2: a dotted path from the dict, attribute of a dataclass or position in a tuple.
        scores: name of the scores [k], probabilities.
        labels: name of the labels [k]; None for a detector of a single class.
        iou: minimum overlap (intersection over union), in (0, 1], at which boxes with the same label in different branches are one object.

    Example:
        >>> from workbench import vote
        >>> vote.Wrapper(3, output=Detections(iou=0.6))
        vote.Wrapper(output=Detections(boxes='boxes', scores='scores', labels='labels', iou=0.6))
    """

    short = "detections"
    boxes: str | int = "boxes"
    scores: str | int = "scores"
    labels: str | int | None = "labels"
    iou: float = 0.5

    def __post_init__(self) -> None:
        for name in ("boxes", "scores", "labels"):
            key = getattr(self, name)
            if not ((isinstance(key, str | int) and not isinstance(key, bool)) or (name == "labels" and key is None)):
                raise ValueError(f"Detections({name}=...) must be the name or position of an output, not {key!r}")
        keys = [str(key) for key in (self.boxes, self.scores, self.labels) if key is not None]
        if len(set(keys)) < len(keys):
            raise ValueError(f"boxes, scores and labels must be different outputs, not {', '.join(map(repr, keys))}")
        if isinstance(self.iou, bool) or not isinstance(self.iou, int | float) or not 0 < self.iou <= 1:
            raise ValueError(f"Detections(iou=...) must be an overlap in (0, 1], not {self.iou!r}")
