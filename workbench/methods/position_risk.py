"""Vacuitic risk of the positions of a map, and of whole images from their positions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.outputs.class_scores import Binary, Classes
from ..core.outputs.meanings import Meaning, Values
from ..core.outputs.options import meaning_of
from ..core.outputs.resolution import resolve
from ..engine.tree import flatten, names, tree_map
from .class_rows import concatenate_if_all
from .densities.positions import Positions
from .feature_tap import FeatureMap, FeatureTap

MAX_IMAGES = 512  # images that a fit uses
N_POSITIONS = 64  # positions drawn from each of them
MAX_HELD_OUT = 64  # images used for standardization only
Layout = tuple[int, bool]  # number of axes of the positions, and whether the channels come before them


@dataclass(frozen=True)
class Part:
    """One output tensor and its positions.

    Args:
        leaf: output tensor [n, ...].
        meaning: meaning of the output.
        axes: dimensions of its positions.
    """

    leaf: Tensor
    meaning: Meaning
    axes: tuple[int, ...]

    @property
    def size(self) -> tuple[int, ...]:
        """Number of positions along each axis."""
        return tuple(self.leaf.shape[axis] for axis in self.axes)

    def scores(self) -> Tensor | None:
        """Return class scores [n, classes, ...] up to a constant per position; None if there are none."""
        if not isinstance(self.meaning, Classes):
            return None
        scores = self.meaning.log_scores(self.leaf.detach())
        if not isinstance(self.meaning, Binary):
            return scores.movedim(-1, 1)
        channels = scores.shape[1:-1].numel() // torch.Size(self.size).numel()
        return scores.reshape(len(scores), *self.size, 2).movedim(-1, 1) if channels == 1 else None

    def shaped(self, risk: Tensor) -> Tensor:
        """Return a risk [n, *size] in the shape of the other risks of this output."""
        if isinstance(self.meaning, Classes) and not isinstance(self.meaning, Binary):
            return risk
        shape = [size if i == 0 or i in self.axes else 1 for i, size in enumerate(self.leaf.shape)]
        return risk.reshape(shape).expand(self.leaf.shape).contiguous()


def has_positions(output: Any) -> bool:
    """Whether the option `output` names the dimension of classes, which it does for maps and tokens."""
    entries = output.values() if isinstance(output, Mapping) else (output,)
    return any(entry is not None and getattr(meaning_of(entry), "dim", None) is not None for entry in entries)


def parts_of(output: Any, y: Any, layout: Layout | None) -> list[Part | None]:
    """Return the positions of each leaf of a model's output, None for a leaf without.

    Args:
        output: the option `output`.
        y: output of the model.
        layout: layout of the features; None if it is not known yet, so that only outputs with a dimension of classes have positions.
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
        rank, channels_first = layout
        axes = tuple(range(leaf.dim() - rank, leaf.dim()) if channels_first else range(1, 1 + rank))
        axes = axes if leaf.dim() > rank else ()
    else:
        return None
    matches = axes and (layout is None or len(axes) == layout[0])
    return Part(leaf, meaning, axes) if matches else None


def layout_of(output: Any, y: Any, tap: FeatureTap) -> Layout | None:
    """Return the layout of the positions: that of the class scores, otherwise of the last layer's features; None if there are none."""
    class_part = next((part for part in parts_of(output, y, None) if part is not None), None)
    if class_part is not None:
        return len(class_part.axes), True
    last = [layout for name, layout in tap.layouts.items() if tap.calls and name in tap.calls[-1]]
    return last[0] if last else None


def draw_positions(values: Tensor, keep: Tensor | None, seed: int) -> Tensor:
    """Draw positions of each row uniformly and return the values there; a seed draws the same places at every resolution.

    Args:
        values: map [n, channels, ...].
        keep: mask of the steps [n, t] of a sequence that may be drawn.
        seed: seed of the draw; no global random state is used.

    Returns:
        Values [n, positions, channels].
    """
    n, channels, *size = values.shape
    places = torch.rand(n, N_POSITIONS, 3, generator=torch.Generator().manual_seed(seed)).to(values.device)
    if keep is not None:
        steps = (places[:, :, 0] * keep.sum(1, keepdim=True)).long()
        index = (~keep).to(torch.uint8).argsort(dim=1, stable=True).gather(1, steps)
    else:
        index = torch.zeros(n, N_POSITIONS, dtype=torch.int64, device=values.device)
        for axis, length in enumerate(size):
            index = index * length + (places[:, :, axis] * length).long()
    return values.flatten(2).gather(2, index[:, None].expand(n, channels, N_POSITIONS)).mT


def learn(method: Any, wrapped: Any, batches: Iterable[tuple[tuple, dict[str, Any]]]) -> bool:
    """Fit the density to a sample of positions of at most `MAX_IMAGES` rows, and standardize it on every fifth row, up to 64 of them.

    Args:
        method: the method of neo.
        wrapped: the wrapped model.
        batches: positional and keyword inputs of the model.

    Returns:
        Whether the output has positions; if not, nothing was learned.
    """
    density: Positions = method.model(wrapped)
    sample = _sample(method, wrapped, batches)
    if sample is None:
        return False
    _check_scores(method, density, sample)
    with torch.enable_grad():
        density.fit(sample.features, sample.scores)
    raws, masks = [], []
    for args, kwargs in sample.held_out:
        y, maps, tap = _maps(method, wrapped, args, kwargs)
        part = _first(method, wrapped, y)
        assert part is not None
        raws.append(_raw(density, part, maps))
        masks.append(_keep(part, tap))
    density.standardize(raws, masks)
    return True


@torch.no_grad()
def check(method: Any, wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Return whether the output of a call has positions; raise ValueError if `learn` would refuse them."""
    sample = _sample(method, wrapped, [(args, kwargs)])
    if sample is not None:
        _check_scores(method, method.model(wrapped), sample)
    return sample is not None


class _Sample(NamedTuple):
    """Positions that a density is fitted to.

    Args:
        features: features of each chosen layer [positions, channels].
        scores: class scores [positions, classes]; None if not all batches have them.
        held_out: inputs of the rows used for standardization.
    """

    features: list[Tensor]
    scores: Tensor | None
    held_out: list[tuple[tuple, dict[str, Any]]]


def _check_scores(method: Any, density: Positions, sample: _Sample) -> None:
    if sample.scores is None and (method.wrapper.classes or density.template.needs_logits):
        raise ValueError(
            f"neo: density={type(density.template).__name__} is to use class scores, but the positions of the output have none; choose another "
            "density, or say which dimension holds the classes, output=Logits(dim=1)"
        )


def _sample(method: Any, wrapped: Any, batches: Iterable[tuple[tuple, dict[str, Any]]]) -> _Sample | None:
    """Draw positions of the rows that are fitted, and set rows aside; None if the output has no positions."""
    samples: list[list[Tensor]] = []
    logits: list[Tensor | None] = []
    held_out: list[tuple[tuple, dict[str, Any]]] = []
    rows = n_held = 0
    for seed, (args, kwargs) in enumerate(batches):

        def draw(name: str, feature: FeatureMap, seed: int = seed) -> Tensor:
            return draw_positions(feature.values, feature.keep, seed)

        y, n, features, tap = method.features(wrapped, args, kwargs, draw)
        part = _first(method, wrapped, y)
        if part is None:
            return None
        scores = part.scores() if method.wrapper.classes is not False else None
        is_held_out = torch.tensor([(rows + i) % 5 == 4 for i in range(n)], device=part.leaf.device)
        is_held_out &= is_held_out.cumsum(0) <= MAX_HELD_OUT - n_held
        by_rows = method.rows_first
        if is_held_out.any():
            held_out.append(_select_rows(args, kwargs, is_held_out, n) if by_rows else (args, kwargs))
            n_held += int(is_held_out.sum())
        is_fitted = ~is_held_out if by_rows and not is_held_out.all() else torch.ones_like(is_held_out)
        samples.append([feature[is_fitted.to(feature.device)].flatten(0, 1) for feature in features])
        keep = _keep(part, tap)
        logits.append(None if scores is None else draw_positions(scores, keep, seed)[is_fitted].flatten(0, 1))
        last = args, kwargs
        rows += n
        if rows >= MAX_IMAGES:
            break
    if not samples:
        raise ValueError("fit got no inputs; give the training inputs as a tensor or a loader")
    features = [torch.cat(parts) for parts in zip(*samples, strict=True)]
    return _Sample(features, concatenate_if_all(logits), held_out or [last])


def judge(method: Any, wrapped: Any, args: tuple, kwargs: dict[str, Any], image: bool) -> tuple[Any, Any]:
    """Return the model's output and its risks: one tensor for each output with positions, or one number [n] per image."""
    density: Positions = method.model(wrapped)
    y, maps, tap = _maps(method, wrapped, args, kwargs)
    parts = parts_of(wrapped._workbench.output, y, method.layout)
    first = next((part for part in parts if part is not None), None)
    if first is None:
        raise ValueError(
            "neo: the output has no positions in this call, but had some when neo was fitted; call the model with inputs of the same kind"
        )
    if image:
        return y, density.of_images(_raw(density, first, maps), _keep(first, tap))
    risks = [None if part is None else part.shaped(density.of_positions(_raw(density, part, maps))) for part in parts]
    return y, flatten(y)[1](risks)


def _maps(method: Any, wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, list[Tensor], FeatureTap]:
    """Return the output, and the scores of each layer at its own resolution."""
    density: Positions = method.model(wrapped)
    y, _, maps, tap = method.features(
        wrapped, args, kwargs, lambda name, feature: density.layer_map(method.sites.index(name), feature.values)
    )
    return y, maps, tap


def _raw(density: Positions, part: Part, maps: Sequence[Tensor]) -> Tensor:
    if density.template.needs_features:
        return density.raw(maps, part.size)
    scores = part.scores()
    assert scores is not None  # the fit has checked
    return density.raw([density.layer_map(0, scores)], part.size)


def _first(method: Any, wrapped: Any, y: Any) -> Part | None:
    return next((part for part in parts_of(wrapped._workbench.output, y, method.layout) if part is not None), None)


def _keep(part: Part, tap: FeatureTap) -> Tensor | None:
    """Return the mask of the positions [n, t] that are not padding, None if it is unknown or all count."""
    keep = tap.keep
    matches = keep is not None and keep.shape == (len(part.leaf), *part.size)
    return keep.to(part.leaf.device) if matches and keep is not None else None


def _select_rows(args: tuple, kwargs: dict[str, Any], mask: Tensor, n: int) -> tuple[tuple, dict[str, Any]]:
    def select(leaf: Any) -> Any:
        return leaf[mask.to(leaf.device)] if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == n else leaf

    return tree_map(select, (args, kwargs))


__all__ = ["has_positions", "judge", "learn"]
