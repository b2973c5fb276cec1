"""Outliers, inputs unlike the training data, made of training inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..engine.tree import tensors, tree_map

MIN_ROWS = 8  # in a batch, to make outliers of it
MIN_PIXELS = 8  # per side, for a tensor to be changed as a picture


def make_outliers(inputs: Any, rows: int, seed: int) -> Iterator[tuple[str, Any]]:
    """Iterate over the kinds of outliers made of a batch: `KINDS` and, for pictures [rows, channels, height, width], `PICTURES`.

    Yields nothing if no input is a floating-point tensor [rows, ...], as with token numbers, or if there are fewer than eight rows.

    Args:
        inputs: tree of inputs; integer tensors, and whatever has no rows, are left unchanged.
        rows: number of rows of the batch.
        seed: seed of the draws; no global random state is used.

    Yields:
        The name of the kind, and the changed inputs.
    """
    changing = [leaf for leaf in tensors(inputs) if _is_changed(leaf, rows)]
    if rows < MIN_ROWS or not changing:
        return
    pictures = [leaf for leaf in changing if _is_picture(leaf)]
    kinds = {**KINDS, **PICTURES} if pictures else KINDS
    if all(leaf.shape[1] == 1 for leaf in pictures):
        kinds = {name: change for name, change in kinds.items() if name != "colours"}
    for name, change in kinds.items():
        draws = Draws(seed, rows)

        def changed(leaf: Any, name: str = name, change: Any = change, draws: Draws = draws) -> Any:
            return change(leaf, draws) if _is_changed(leaf, rows) and (name in KINDS or _is_picture(leaf)) else leaf

        yield name, tree_map(changed, inputs)


class Draws:
    """Random numbers for a batch; the permutation and the share of each row are the same for all its tensors."""

    def __init__(self, seed: int, rows: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.order = torch.randperm(rows, generator=self.generator)
        self.share = torch.rand(rows, generator=self.generator)

    def others(self, x: Tensor, turn: int = 0) -> Tensor:
        """Return the rows in a random order; another one for each `turn`."""
        return x[self.order.roll(turn).to(x.device)]

    def shares(self, x: Tensor) -> Tensor:
        """Return a number in [0, 1) for each row, [rows, 1, ...]."""
        return self.share.to(x).reshape(-1, *[1] * (x.dim() - 1))

    def below(self, limit: int) -> int:
        return int(torch.randint(limit, (), generator=self.generator))

    def normal_like(self, x: Tensor) -> Tensor:
        """Return standard normal numbers in the shape of x."""
        return torch.randn(x.shape, generator=self.generator).to(x)


def _resampled(x: Tensor, draws: Draws) -> Tensor:
    return x.gather(0, torch.randint(len(x), x.shape, generator=draws.generator).to(x.device))


def _with_noise(x: Tensor, draws: Draws) -> Tensor:
    noisy = x + draws.shares(x) * x.std(0) * draws.normal_like(x)
    return noisy.minimum(x.amax(0)).maximum(x.amin(0))


def _collage(x: Tensor, draws: Draws) -> Tensor:
    """Combine quarters of three pictures."""
    x, height, width = x.clone(), x.shape[2] // 2, x.shape[3] // 2
    x[:, :, :height, width:] = draws.others(x)[:, :, :height, width:]
    x[:, :, height:, :width] = draws.others(x, 1)[:, :, height:, :width]
    return x


def _pieces(x: Tensor, draws: Draws) -> Tensor:
    """Shuffle four stripes along the height and four along the width."""
    for dim in (2, 3):
        parts = x.tensor_split(4, dim)
        x = torch.cat([parts[i] for i in torch.randperm(4, generator=draws.generator)], dim)
    return x


def _shuffled(x: Tensor, draws: Draws) -> Tensor:
    """Shuffle all pixels."""
    order = torch.randperm(x[0, 0].numel(), generator=draws.generator).to(x.device)
    return x.flatten(2)[:, :, order].reshape(x.shape)


def _smooth(x: Tensor, size: int) -> Tensor:
    return F.avg_pool2d(F.pad(x, [size // 2] * 4, mode="reflect"), size, 1)


def _zoomed(x: Tensor, draws: Draws) -> Tensor:
    """Enlarge a window of a quarter of both sides to the whole picture."""
    height, width = x.shape[2:]
    top, left = draws.below(height - height // 4 + 1), draws.below(width - width // 4 + 1)
    window = x[:, :, top : top + height // 4, left : left + width // 4]
    return F.interpolate(window, size=(height, width), mode="bilinear")


def _window(x: Tensor, draws: Draws) -> Tensor:
    """Keep a window of three eighths of both sides, and the smallest value elsewhere."""
    height, width = (3 * side // 8 for side in x.shape[2:])
    top, left = draws.below(x.shape[2] - height + 1), draws.below(x.shape[3] - width + 1)
    blank = x.amin().expand(x.shape).clone()
    blank[:, :, top : top + height, left : left + width] = x[:, :, top : top + height, left : left + width]
    return blank


def _shrunk(x: Tensor, draws: Draws) -> Tensor:
    """Shrink to half the size, and pad with the smallest value."""
    small = F.avg_pool2d(x, 2)
    height, width = (whole - part for whole, part in zip(x.shape[2:], small.shape[2:], strict=True))
    frame = [width // 2, width - width // 2, height // 2, height - height // 2]
    return F.pad(small, frame, value=float(x.amin()))


KINDS = {
    "mixed": lambda x, draws: (x + draws.others(x)) / 2,
    "extrapolated": lambda x, draws: x + (x - draws.others(x)) / 2,
    "drawn": _resampled,
    "noisy": _with_noise,
}
PICTURES = {
    "collage": _collage,
    "pieces": _pieces,
    "shuffled": _shuffled,
    "smooth": lambda x, draws: _smooth(x, 3),
    "smoother": lambda x, draws: _smooth(x, 5),
    "zoomed": _zoomed,
    "window": _window,
    "shrunk": _shrunk,
    "faded": lambda x, draws: x.lerp(x.mean((1, 2, 3), keepdim=True).expand_as(x), 0.4 + 0.5 * draws.shares(x)),
    "flat": lambda x, draws: x.lerp(x.mean((2, 3), keepdim=True).expand_as(x), 1 - 0.02 * draws.shares(x)),
    "dark": lambda x, draws: x.amin() + (0.1 + 0.4 * draws.shares(x)) * (x - x.amin()),
    "inverted": lambda x, draws: x.amax() + x.amin() - x,
    "black and white": lambda x, draws: torch.where(
        x < x.flatten(1).median(1).values[:, None, None, None], x.amin(), x.amax()
    ),
    "upside down": lambda x, draws: x.flip(2),
    "turned": lambda x, draws: x.mT if x.shape[2] == x.shape[3] else x.flip(2, 3),
    "colours": lambda x, draws: x.roll(1, 1),
}


def concatenate_by_kind(made: Sequence[tuple[list[Tensor], Tensor, str]]) -> list[tuple[list[Tensor], Tensor]]:
    """Concatenate features and class scores over the batches, for each kind of outliers."""
    kinds = dict.fromkeys(kind for *_, kind in made)
    parts = [[(features, scores) for features, scores, part_kind in made if part_kind == kind] for kind in kinds]
    return [
        ([torch.cat(layer) for layer in zip(*(f for f, _ in part), strict=True)], torch.cat([s for _, s in part]))
        for part in parts
    ]


def _is_changed(leaf: Any, rows: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > 1 and len(leaf) == rows


def _is_picture(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() == 4 and min(leaf.shape[2:]) >= MIN_PIXELS


__all__ = ["concatenate_by_kind", "make_outliers"]
