"""Random transformations of training rows that move an image and its map together."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from workbench.core.batches.rows import Batch, describe
from workbench.core.batches.target_forms import with_class_numbers
from workbench.core.outputs.meanings import IGNORED
from workbench.engine.tree import flatten, names, tensors

Augmentation = Callable[[Any, Any, torch.Generator], tuple[Any, Any]]  # (x, y, generator) -> (x, y), for a batch


def augmentations(augment: Augmentation | Sequence[Augmentation] | None) -> tuple[Augmentation, ...]:
    """Return the augmentations given to `fit` as a tuple, in order.

    Raises:
        TypeError: one of them is not callable.
    """
    if augment is None:
        return ()
    functions = tuple(augment) if isinstance(augment, Sequence) else (augment,)
    for function in functions:
        if not callable(function) or isinstance(function, type):
            raise TypeError(
                f"augment: found {function!r:.80}; give a function augment(x, y, generator) -> (x, y) of a batch, such as "
                "workbench.training.RandomFlip(), or a list of them"
            )
    return functions


def augmented(batch: Batch, augment: Sequence[Augmentation], generator: torch.Generator) -> Batch:
    """Return a batch after all augmentations; its `source` holds the rows before them.

    Raises:
        TypeError: an augmentation does not return a pair.
        ValueError: the names of the targets or the number of rows changed.
    """
    x, y = batch.x, batch.y
    for augmentation in augment:
        pair = augmentation(x, y, generator)
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            raise TypeError(f"augment: {_name(augmentation)} returned {describe(pair)}; return the pair (x, y)")
        x, y = pair
    counts = {len(leaf) for leaf in tensors((x, y)) if leaf.dim()}
    if names(y) != names(batch.y) or counts != {len(batch)}:
        raise ValueError(
            f"augment: a batch of {len(batch)} rows came back with {' and '.join(map(str, sorted(counts))) or 'no'} rows and the targets "
            f"{names(y)}; return as many rows and the same targets"
        )
    return replace(batch, x=x, y=with_class_numbers(y), source=(batch.x, batch.y))


def _name(augmentation: Augmentation) -> str:
    return getattr(augmentation, "__name__", type(augmentation).__name__)


@dataclass(frozen=True)
class _ImageAugmentation(ABC):
    """Base of transformations of images [n, channels, height, width] and of everything that has their height and width."""

    @abstractmethod
    def __call__(self, x: Any, y: Any, generator: torch.Generator) -> tuple[Any, Any]: ...

    def _transform(
        self,
        x: Any,
        y: Any,
        transform_input: Callable[[Tensor], Tensor],
        transform_target: Callable[[Tensor, str], Tensor],
        keep: bool,
    ) -> tuple[Any, Any]:
        """Return inputs and targets with the maps of the images transformed.

        Args:
            x, y: trees of tensors [n, ...].
            transform_input: function of a tensor [n, ..., height, width].
            transform_target: function of such a tensor and its name.
            keep: whether targets with several numbers per row [n, k] are left as they are.
        """
        size, name = image_size(x), type(self).__name__

        def is_map(leaf: Tensor, label: str) -> bool:
            if leaf.dim() > 2 and leaf.shape[-2:] != size:
                raise ValueError(
                    f"augment: {label} is {list(leaf.shape)}, and the images have {size[0]} x {size[1]} pixels: {name} transforms maps of the "
                    "same size only; write your own function augment(x, y, generator) -> (x, y)"
                )
            return leaf.dim() > 2

        inputs, rebuild = flatten(x)
        paths = _leaf_names("x", x)
        x = rebuild(
            [
                transform_input(v) if isinstance(v, Tensor) and is_map(v, p) else v
                for v, p in zip(inputs, paths, strict=True)
            ]
        )
        targets, rebuild = flatten(y)
        for i, (leaf, label) in enumerate(zip(targets, _leaf_names("y", y), strict=True)):
            if not isinstance(leaf, Tensor):
                continue
            if is_map(leaf, label):
                targets[i] = transform_target(leaf, label)
            elif leaf.dim() == 2 and leaf.shape[1] > 1 and not keep:
                raise ValueError(
                    f"augment: {label} has {leaf.shape[1]} numbers for each image, which may have to move with it, as corners of boxes do: pass "
                    f"{name}(..., keep=True) if they stay the same, else write your own function augment(x, y, generator) -> (x, y)"
                )
        return x, rebuild(targets)


@dataclass(frozen=True)
class RandomFlip(_ImageAugmentation):
    """Flip each image of a batch horizontally together with its maps, with probability p.

    Everything with the height and width of the images is flipped, with unchanged values: class maps [n, height, width], values such as depth,
    masks among the inputs. Values that encode a direction (optical flow, surface normals, disparity) would be wrong after a flip: write your
    own function for them. Class numbers [n] and columns [n, 1] stay as they are.

    Args:
        p: probability of a flip.
        keep: whether targets [n, k] of several numbers, such as labels, shares or measurements, are left as they are; False raises an error.

    Example:
        >>> images = torch.arange(3.0).expand(4, 1, 2, 3)
        >>> x, y = RandomFlip(p=1.0)(images, images[:, 0].long(), torch.Generator().manual_seed(0))
        >>> x[0, 0, 0].tolist(), y[0, 0].tolist()
        ([2.0, 1.0, 0.0], [2, 1, 0])
    """

    p: float = 0.5
    keep: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.p, bool) or not isinstance(self.p, int | float) or not 0 <= self.p <= 1:
            raise ValueError(f"RandomFlip(p=...) is a probability from 0 to 1, not {self.p!r}")

    def __call__(self, x: Any, y: Any, generator: torch.Generator) -> tuple[Any, Any]:
        """Return the transformed pair.

        Args:
            x: images [n, channels, height, width], or a tuple or dict of inputs that contains such.
            y: targets, a tensor or a tree of tensors.
            generator: a generator on the CPU; one number is drawn for each row.
        """
        is_flipped = torch.rand(_n_rows(x), generator=generator) < self.p

        def flip(leaf: Tensor, what: str = "") -> Tensor:
            mask = is_flipped.to(leaf.device).reshape(-1, *[1] * (leaf.dim() - 1))
            return torch.where(mask, leaf.flip(-1), leaf)

        return self._transform(x, y, flip, flip, self.keep)


@dataclass(frozen=True)
class RandomCrop(_ImageAugmentation):
    """Crop each image of a batch together with its maps, at the same random position.

    Pixels of class maps outside the image are void. Maps of values have no void value, so that crops of those must lie inside the image.

    Args:
        size: height and width of the crop, or one number for both. A smaller image is placed at a random position inside the crop.
        padding: number of pixels by which a crop may extend beyond each border.
        fill: value of image pixels outside the border, in the units of the rows: one number, or one per channel. 0 is black for images in [0,
            1].
        void: class number outside the border; -100 is ignored by the losses of `fit`.
        keep: as for `RandomFlip`.

    Example:
        >>> images, maps = torch.rand(4, 3, 32, 48), torch.randint(5, (4, 32, 48))
        >>> x, y = RandomCrop(16, padding=4)(images, maps, torch.Generator().manual_seed(0))
        >>> x.shape, y.shape
        (torch.Size([4, 3, 16, 16]), torch.Size([4, 16, 16]))
    """

    size: int | tuple[int, int]
    padding: int = 0
    fill: float | tuple[float, ...] = 0.0
    void: int = IGNORED
    keep: bool = False

    def __post_init__(self) -> None:
        sides = self.sides
        if len(sides) != 2 or any(isinstance(side, bool) or not isinstance(side, int) or side < 1 for side in sides):
            raise ValueError(f"RandomCrop(size=...) is a height and a width in pixels, not {self.size!r}")
        if isinstance(self.padding, bool) or not isinstance(self.padding, int) or self.padding < 0:
            raise ValueError(f"RandomCrop(padding=...) is a number of pixels, 0 or more, not {self.padding!r}")
        if isinstance(self.void, bool) or not isinstance(self.void, int):
            raise ValueError(f"RandomCrop(void=...) is a class number, not {self.void!r}")
        fill = tuple(self.fill) if isinstance(self.fill, Sequence) else (self.fill,)
        if not fill or not all(isinstance(each, int | float) and math.isfinite(each) for each in fill):
            raise ValueError(f"RandomCrop(fill=...) is a number, or one for each channel, not {self.fill!r}")
        object.__setattr__(self, "fill", fill)

    @property
    def sides(self) -> tuple[int, ...]:
        """Height and width of the crops."""
        return tuple(self.size) if isinstance(self.size, Sequence) else (self.size, self.size)

    def __call__(self, x: Any, y: Any, generator: torch.Generator) -> tuple[Any, Any]:
        """Return the transformed pair.

        Args:
            x: images [n, channels, height, width], or a tuple or dict of inputs that contains such.
            y: targets, a tensor or a tree of tensors.
            generator: a generator on the CPU; two numbers are drawn for each row.
        """
        positions = torch.rand(2, _n_rows(x), generator=generator, dtype=torch.float64)
        starts: list[list[int]] = []
        crosses_border = False
        for share, side, length in zip(positions, self.sides, image_size(x), strict=True):
            first, last = sorted((-self.padding, length + self.padding - side))
            starts.append((first + (share * (last - first + 1)).floor().long()).clamp_max(last).tolist())
            crosses_border = crosses_border or first < 0

        def transform_input(leaf: Tensor) -> Tensor:
            return self._cut(leaf, starts, self._fill_values(leaf))

        def transform_target(leaf: Tensor, label: str) -> Tensor:
            if crosses_border and leaf.is_floating_point():
                raise ValueError(
                    f"augment: {label} holds values {list(leaf.shape)}, which are undefined outside of the images: choose a size of at most the "
                    f"images' {list(leaf.shape[-2:])} and padding=0, or pad the rows yourself"
                )
            return self._cut(leaf, starts, torch.tensor(self.void))

        return self._transform(x, y, transform_input, transform_target, self.keep)

    def _fill_values(self, leaf: Tensor) -> Tensor:
        """Return the values of an input outside the border."""
        if leaf.dim() == 3:  # no channels, such as a mask
            return torch.zeros(())
        fill = torch.tensor(self.fill, dtype=torch.float64)
        if not leaf.is_floating_point() and not torch.equal(fill.to(leaf.dtype).double(), fill):
            raise ValueError(f"augment: RandomCrop(fill={self.fill}) can't be represented in images of {leaf.dtype}")
        if len(fill) not in (1, leaf.shape[-3]):
            raise ValueError(
                f"augment: RandomCrop has a fill for {len(fill)} channels, and images have {leaf.shape[-3]}"
            )
        return fill[:, None, None]

    def _cut(self, leaf: Tensor, starts: list[list[int]], outside: Tensor) -> Tensor:
        """Return the crops of a tensor [n, ..., height, width]."""
        out = leaf.new_empty((*leaf.shape[:-2], *self.sides)).copy_(outside.to(leaf.dtype))
        for i, corner in enumerate(zip(*starts, strict=True)):
            ends = zip(corner, self.sides, leaf.shape[-2:], strict=True)
            (top, bottom), (left, right) = [(max(start, 0), min(start + side, size)) for start, side, size in ends]
            rows, columns = (slice(top - corner[0], bottom - corner[0]), slice(left - corner[1], right - corner[1]))
            out[i, ..., rows, columns] = leaf[i, ..., top:bottom, left:right]
        return out


def image_size(x: Any) -> tuple[int, int]:
    """Return height and width of the images among the inputs.

    Raises:
        ValueError: no input has the shape [n, channels, height, width].
    """
    image = next((leaf for leaf in tensors(x) if leaf.dim() > 3), None)
    shapes = [list(leaf.shape) for leaf in tensors(x)]
    if image is None or image.shape[-1] <= 4 < image.shape[-3]:
        raise ValueError(
            f"augment: inputs have shapes {shapes}, and images are [n, channels, height, width]; give a function "
            "augment(x, y, generator) -> (x, y) of your own for other inputs"
        )
    return image.shape[-2], image.shape[-1]


def _n_rows(x: Any) -> int:
    return len(next(leaf for leaf in tensors(x) if leaf.dim())) if tensors(x) else 0


def _leaf_names(root: str, tree: Any) -> list[str]:
    """Return the name of each leaf for error messages."""
    return [f"{root}[{name!r}]" if name else root for name in names(tree)]


__all__ = ["Augmentation", "RandomCrop", "RandomFlip", "augmentations", "augmented", "image_size"]
