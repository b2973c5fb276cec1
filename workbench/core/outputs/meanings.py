"""What one output of a model means: values, detections, a state, or no more than a mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

IGNORED = -100  # the class number of rows, pixels or tokens to leave out, as in torch's losses


@dataclass(frozen=True)
class Meaning:
    """What one output means."""

    short: ClassVar[str] = ""  # the short form; what the meaning is called where its options don't matter


@dataclass(frozen=True)
class Values(Meaning):
    """Numbers whose risk is a standard deviation, elementwise and in their units.

    Example:
        >>> from workbench import vote
        >>> vote.Wrapper(3, output={"box": Values(), "classes": Logits()})
        vote.Wrapper(output={'box': 'values', 'classes': 'logits'})
    """

    short = "values"


@dataclass(frozen=True)
class Mean(Meaning):
    """A loss or another number that is averaged over voters and samples, without a risk.

    The default for numbers without dimensions beside other outputs, and for what is not named where others are.
    """

    short = "mean"


@dataclass(frozen=True)
class State(Meaning):
    """What the caller hands on from call to call, such as the state of a recurrent cell: each branch keeps its own; see the option `state`."""

    short = "state"


@dataclass(frozen=True)
class Detections(Meaning):
    """Boxes with scores and labels, as many as the model selects: a dict, or a list of dicts, one for each image, as torchvision gives them.

    The boxes of all voters or samples are matched, see `workbench.core.outputs.detections.match`. The prediction has one box for each
    cluster, sorted by score: the mean corners of those that saw it, its label, and the mean score of all, where one that did not see it
    counts as 0. Risks are dicts with the names of the output: of `boxes` the epistemic one is the standard deviation of each corner over
    those that saw it; of `scores` they are the entropies of a yes or no in nats, as for `Binary`; `risk.epistemic["seen"]` is the share of
    the voters or samples that saw the box.

    Args:
        boxes: name of the corners [k, 4], x1, y1, x2, y2; a dotted path from the dict, the attribute of a dataclass or the position in a tuple.
        scores: name of the scores [k], probabilities.
        labels: name of the labels [k]; None for a detector of a single class.
        iou: boxes of one label in different branches are the same object if they overlap by so much (intersection over union), in (0, 1].

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
                raise ValueError(f"Detections({name}=...) is the name or position of an output, not {key!r}")
        keys = [str(key) for key in (self.boxes, self.scores, self.labels) if key is not None]
        if len(set(keys)) < len(keys):
            raise ValueError(f"boxes, scores and labels are different outputs, not {', '.join(map(repr, keys))}")
        if isinstance(self.iou, bool) or not isinstance(self.iou, int | float) or not 0 < self.iou <= 1:
            raise ValueError(f"Detections(iou=...) is an overlap in (0, 1], not {self.iou!r}")
