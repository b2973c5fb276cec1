"""Vacuitic risk of the positions of a map, and of a whole image by its positions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.outputs.class_scores import Binary, Classes
from ..core.outputs.meanings import Meaning, Values
from ..core.outputs.options import meaning_of
from ..core.outputs.resolution import resolve
from ..engine.tree import flatten, names, tree_map
from .densities.positions import Positions
from .feature_tap import FeatureMap, FeatureTap

MOST_IMAGES = 512  # that a fit looks at
POSITIONS = 64  # drawn from each of them
MOST_HELD = 64  # images that nothing is learned from
Layout = tuple[int, bool]  # how many axes positions have, and whether the channels come before them


@dataclass(frozen=True)
class Part:
    """One output and where its positions are.

    Args:
        leaf: the tensor [n, ...].
        meaning: what it means.
        axes: the dimensions of its positions.
    """

    leaf: Tensor
    meaning: Meaning
    axes: tuple[int, ...]

    @property
    def size(self) -> tuple[int, ...]:
        """The number of positions along each axis."""
        return tuple(self.leaf.shape[axis] for axis in self.axes)

    def scores(self) -> Tensor | None:
        """Class scores [n, classes, ...] up to a constant for each position, None if there are none."""
        if not isinstance(self.meaning, Classes):
            return None
        scores = self.meaning.log_scores(self.leaf.detach())
        if not isinstance(self.meaning, Binary):
            return scores.movedim(-1, 1)
        channels = scores.shape[1:-1].numel() // torch.Size(self.size).numel()
        return scores.reshape(len(scores), *self.size, 2).movedim(-1, 1) if channels == 1 else None

    def shaped(self, risk: Tensor) -> Tensor:
        """A risk [n, *size] in the shape of the other risks of this output."""
        if isinstance(self.meaning, Classes) and not isinstance(self.meaning, Binary):
            return risk
        shape = [size if i == 0 or i in self.axes else 1 for i, size in enumerate(self.leaf.shape)]
        return risk.reshape(shape).expand(self.leaf.shape).contiguous()


def has_positions(output: Any) -> bool:
    """Whether the option `output` says at which dimension there are classes, which is said of maps and tokens."""
    entries = output.values() if isinstance(output, Mapping) else (output,)
    return any(entry is not None and getattr(meaning_of(entry), "dim", None) is not None for entry in entries)


def parts_of(output: Any, y: Any, layout: Layout | None) -> list[Part | None]:
    """For each leaf of a model's output its positions, None where it has none.

    Args:
        output: the option.
        y: what the model gave.
        layout: of the features; where it is not known yet, outputs with a dimension of classes alone tell.
    """
    leaves = flatten(y)[0]
    return [
        _part(leaf, meaning, layout)
        for leaf, meaning in zip(leaves, resolve(output, lambda: names(y), leaves, 0), strict=True)
    ]


def _part(leaf: Any, meaning: Meaning | None, layout: Layout | None) -> Part | None:
    if not isinstance(meaning, Values | Classes):
        return None
    dim = getattr(meaning, "dim", None)
    if dim is not None:
        axes = tuple(axis for axis in range(1, leaf.dim()) if axis != dim % leaf.dim())
    elif layout is not None:
        rank, first = layout
        axes = tuple(range(leaf.dim() - rank, leaf.dim()) if first else range(1, 1 + rank))
        axes = axes if leaf.dim() > rank else ()
    else:
        return None
    fits = axes and (layout is None or len(axes) == layout[0])
    return Part(leaf, meaning, axes) if fits else None


def layout_of(output: Any, y: Any, tap: FeatureTap) -> Layout | None:
    """How positions lie: as the classes say, else as in the features of the last layer; None if there are none."""
    of_classes = next((part for part in parts_of(output, y, None) if part is not None), None)
    if of_classes is not None:
        return len(of_classes.axes), True
    last = [layout for name, layout in tap.layouts.items() if tap.calls and name in tap.calls[-1]]
    return last[0] if last else None


def drawn(values: Tensor, keep: Tensor | None, seed: int) -> Tensor:
    """Values at positions drawn from each row, evenly, [n, positions, channels]; a seed draws the same places at every resolution.

    Args:
        values: Tensor [n, channels, ...].
        keep: which steps [n, t] of a sequence may be drawn.
        seed: of the draw; no global random state is used.
    """
    n, channels, *size = values.shape
    places = torch.rand(n, POSITIONS, 3, generator=torch.Generator().manual_seed(seed)).to(values.device)
    if keep is not None:
        steps = (places[:, :, 0] * keep.sum(1, keepdim=True)).long()
        index = (~keep).to(torch.uint8).argsort(dim=1, stable=True).gather(1, steps)
    else:
        index = torch.zeros(n, POSITIONS, dtype=torch.int64, device=values.device)
        for axis, length in enumerate(size):
            index = index * length + (places[:, :, axis] * length).long()
    return values.flatten(2).gather(2, index[:, None].expand(n, channels, POSITIONS)).mT


def learn(method: Any, wrapped: Any, batches: Iterable[tuple[tuple, dict[str, Any]]]) -> bool:
    """Learn from a sample of positions of at most `MOST_IMAGES` rows, and standardise on every fifth row, up to 64 of them.

    Args:
        method: neo's.
        wrapped: the object.
        batches: positional and keyword inputs, as the model takes them.

    Returns:
        False if the output has no positions; nothing was learned then.
    """
    density: Positions = method.model(wrapped)
    samples: list[list[Tensor]] = []
    logits: list[Tensor | None] = []
    held_out: list[tuple[tuple, dict[str, Any]]] = []
    rows = n_held = 0
    for seed, (args, kwargs) in enumerate(batches):

        def draw(name: str, feature: FeatureMap, seed: int = seed) -> Tensor:
            return drawn(feature.values, feature.keep, seed)

        y, n, features, tap = method.features(wrapped, args, kwargs, draw)
        part = _first(method, wrapped, y)
        if part is None:
            return False
        scores = part.scores() if method.wrapper.classes is not False else None
        keep = _kept(part, tap)
        out = torch.tensor([(rows + i) % 5 == 4 for i in range(n)], device=part.leaf.device)
        out &= out.cumsum(0) <= MOST_HELD - n_held
        by_rows = method.rows_first
        if out.any():
            held_out.append(_rows(args, kwargs, out, n) if by_rows else (args, kwargs))
            n_held += int(out.sum())
        inside = ~out if by_rows and not out.all() else torch.ones_like(out)
        samples.append([feature[inside.to(feature.device)].flatten(0, 1) for feature in features])
        logits.append(None if scores is None else drawn(scores, keep, seed)[inside].flatten(0, 1))
        last = args, kwargs
        rows += n
        if rows >= MOST_IMAGES:
            break
    if not samples:
        raise ValueError("fit got no inputs; give the training inputs as a tensor or a loader")
    classes = torch.cat(logits) if all(part is not None for part in logits) else None  # type: ignore[arg-type]
    if classes is None and (method.wrapper.classes or density.template.needs_logits):
        raise ValueError(
            f"neo: density={type(density.template).__name__} is to use class scores, and the positions of the output have none; choose another "
            "density, or say which dimension holds the classes, output=Logits(dim=1)"
        )
    with torch.enable_grad():
        density.fit([torch.cat(parts) for parts in zip(*samples, strict=True)], classes)
    raws, kept = [], []
    held_out = held_out or [last]
    for args, kwargs in held_out:
        y, maps, tap = _maps(method, wrapped, args, kwargs)
        part = _first(method, wrapped, y)
        assert part is not None
        raws.append(_raw(density, part, maps))
        kept.append(_kept(part, tap))
    density.standardise(raws, kept)
    return True


def judge(method: Any, wrapped: Any, args: tuple, kwargs: dict[str, Any], image: bool) -> tuple[Any, Any]:
    """The model's output, and its risks: for each output with positions a tensor, or one number [n] for each image."""
    density: Positions = method.model(wrapped)
    y, maps, tap = _maps(method, wrapped, args, kwargs)
    parts = parts_of(wrapped._workbench.output, y, method.layout)
    first = next((part for part in parts if part is not None), None)
    if first is None:
        raise ValueError("neo: the output has no positions in this call, as it had when neo was fitted")
    if image:
        return y, density.of_images(_raw(density, first, maps), _kept(first, tap))
    risks = [None if part is None else part.shaped(density.of_positions(_raw(density, part, maps))) for part in parts]
    return y, flatten(y)[1](risks)


def _maps(method: Any, wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, list[Tensor], FeatureTap]:
    """The output and the scores of each layer, at its resolution."""
    density: Positions = method.model(wrapped)
    y, _, maps, tap = method.features(
        wrapped, args, kwargs, lambda name, feature: density.layer_map(method.sites.index(name), feature.values)
    )
    return y, maps, tap


def _raw(density: Positions, part: Part, maps: Sequence[Tensor]) -> Tensor:
    if density.template.needs_features:
        return density.raw(maps, part.size)
    scores = part.scores()
    assert scores is not None  # there were some at the fit
    return density.raw([density.layer_map(0, scores)], part.size)


def _first(method: Any, wrapped: Any, y: Any) -> Part | None:
    return next((part for part in parts_of(wrapped._workbench.output, y, method.layout) if part is not None), None)


def _kept(part: Part, tap: FeatureTap) -> Tensor | None:
    """Which positions [n, t] are no padding, None if all or if nothing says so."""
    keep = tap.keep
    fits = keep is not None and keep.shape == (len(part.leaf), *part.size)
    return keep.to(part.leaf.device) if fits and keep is not None else None


def _rows(args: tuple, kwargs: dict[str, Any], mask: Tensor, n: int) -> tuple[tuple, dict[str, Any]]:
    def chosen(leaf: Any) -> Any:
        return leaf[mask.to(leaf.device)] if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == n else leaf

    return tree_map(chosen, (args, kwargs))


__all__ = ["has_positions", "judge", "learn"]
