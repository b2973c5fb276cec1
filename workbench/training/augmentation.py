"""Random changes of training rows in which an image and its map move together."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from workbench.core.batches.rows import Batch, describe, with_class_numbers
from workbench.core.outputs.meanings import IGNORED
from workbench.engine.tree import flatten, names, tensors

Augmentation = Callable[[Any, Any, torch.Generator], tuple[Any, Any]]  # (x, y, generator) of a batch -> (x, y)


def augmentations(augment: Augmentation | Sequence[Augmentation] | None) -> tuple[Augmentation, ...]:
    """The augmentations that `fit` is given, in their order.

    Raises:
        TypeError: one of them is no function of a pair.
    """
    if augment is None:
        return ()
    several = tuple(augment) if isinstance(augment, Sequence) else (augment,)
    for each in several:
        if not callable(each) or isinstance(each, type):
            raise TypeError(
                f"augment: found {each!r:.80}; give a function augment(x, y, generator) -> (x, y) of a batch, such as "
                "workbench.training.RandomFlip(), or a list of them"
            )
    return several


def changed(batch: Batch, augment: Sequence[Augmentation], generator: torch.Generator) -> Batch:
    """A batch after all augmentations, which knows the rows that it was made of.

    Raises:
        TypeError: an augmentation returns no pair.
        ValueError: it returns other targets than it was given, or another number of rows.
    """
    x, y = batch.x, batch.y
    for each in augment:
        pair = each(x, y, generator)
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            raise TypeError(f"augment: {_name(each)} returned {describe(pair)}; return the pair (x, y)")
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
class _OfImages(ABC):
    """A change of images [n, channels, height, width] and of all that has their height and width."""

    @abstractmethod
    def __call__(self, x: Any, y: Any, generator: torch.Generator) -> tuple[Any, Any]: ...

    def _moved(
        self,
        x: Any,
        y: Any,
        of_input: Callable[[Tensor], Tensor],
        of_target: Callable[[Tensor, str], Tensor],
        keep: bool,
    ) -> tuple[Any, Any]:
        """Inputs and targets, of which those that are maps of the images are changed.

        Args:
            x, y: trees of tensors [n, ...].
            of_input: of a tensor [n, ..., height, width].
            of_target: of such a tensor and its name.
            keep: whether rows of several numbers [n, k] stay as they are.
        """
        size, name = image_size(x), type(self).__name__

        def moves(leaf: Tensor, what: str) -> bool:
            if leaf.dim() > 2 and leaf.shape[-2:] != size:
                raise ValueError(
                    f"augment: {what} is {list(leaf.shape)}, and the images have {size[0]} x {size[1]} pixels: {name} moves maps of the same "
                    "size only; give a function augment(x, y, generator) -> (x, y) of your own"
                )
            return leaf.dim() > 2

        inputs, rebuild = flatten(x)
        paths = _written("x", x)
        x = rebuild(
            [of_input(v) if isinstance(v, Tensor) and moves(v, p) else v for v, p in zip(inputs, paths, strict=True)]
        )
        targets, rebuild = flatten(y)
        for i, (leaf, what) in enumerate(zip(targets, _written("y", y), strict=True)):
            if not isinstance(leaf, Tensor):
                continue
            if moves(leaf, what):
                targets[i] = of_target(leaf, what)
            elif leaf.dim() == 2 and leaf.shape[1] > 1 and not keep:
                raise ValueError(
                    f"augment: {what} has {leaf.shape[1]} numbers for each image, and nothing says whether they move with it, as corners of "
                    f"boxes do: write {name}(..., keep=True) if they stay, else give a function augment(x, y, generator) -> (x, y) of your own"
                )
        return x, rebuild(targets)


@dataclass(frozen=True)
class RandomFlip(_OfImages):
    """Mirror each image of a batch with its maps from left to right, or leave both as they are.

    What has the height and width of the images moves with them, numbers unchanged: class maps [n, height, width], values such as depth, masks
    among the inputs. Numbers that say a direction (optical flow, surface normals, disparity) would be wrong in a mirror: write a function of
    your own for them. Class numbers [n] and columns [n, 1] stay.

    Args:
        p: the probability of a mirror image.
        keep: whether targets [n, k] of several numbers stay as well, such as labels, shares or measurements; False refuses them.

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
        """The pair after the change.

        Args:
            x: images [n, channels, height, width], or a tuple or dict with such among the inputs.
            y: targets, a tensor or a tree.
            generator: on the CPU; one number is drawn for each row.
        """
        mirrored = torch.rand(_rows(x), generator=generator) < self.p

        def moved(leaf: Tensor, what: str = "") -> Tensor:
            each = mirrored.to(leaf.device).reshape(-1, *[1] * (leaf.dim() - 1))
            return torch.where(each, leaf.flip(-1), leaf)

        return self._moved(x, y, moved, moved, self.keep)


@dataclass(frozen=True)
class RandomCrop(_OfImages):
    """Cut a piece of one size out of each image of a batch and out of its maps, at the same random place.

    Pixels of class maps beyond the border of the image are void. Maps of values have no void, so that crops of those must not reach beyond it.

    Args:
        size: height and width of the piece, or one number for both. An image that is smaller lies somewhere in the piece.
        padding: how many pixels a piece may reach beyond each border.
        fill: the numbers of images beyond the border, in the units of the rows: one, or one for each channel. Images in [0, 1] are black there.
        void: the class number there; -100 is left out of the losses of `fit`.
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
        """Height and width of the pieces."""
        return tuple(self.size) if isinstance(self.size, Sequence) else (self.size, self.size)

    def __call__(self, x: Any, y: Any, generator: torch.Generator) -> tuple[Any, Any]:
        """The pair after the change.

        Args:
            x: images [n, channels, height, width], or a tuple or dict with such among the inputs.
            y: targets, a tensor or a tree.
            generator: on the CPU; two numbers are drawn for each row.
        """
        places = torch.rand(2, _rows(x), generator=generator, dtype=torch.float64)
        starts: list[list[int]] = []
        beyond = False
        for share, side, length in zip(places, self.sides, image_size(x), strict=True):
            first, last = sorted((-self.padding, length + self.padding - side))
            starts.append((first + (share * (last - first + 1)).floor().long()).clamp_max(last).tolist())
            beyond = beyond or first < 0

        def of_input(leaf: Tensor) -> Tensor:
            return self._cut(leaf, starts, self._filled(leaf))

        def of_target(leaf: Tensor, what: str) -> Tensor:
            if beyond and leaf.is_floating_point():
                raise ValueError(
                    f"augment: {what} holds values {list(leaf.shape)}, of which there are none beyond the border of an image: choose a size of "
                    f"at most the images' {list(leaf.shape[-2:])} and padding=0, or pad the rows yourself"
                )
            return self._cut(leaf, starts, torch.tensor(self.void))

        return self._moved(x, y, of_input, of_target, self.keep)

    def _filled(self, leaf: Tensor) -> Tensor:
        """The numbers of an input beyond its border."""
        if leaf.dim() == 3:  # a mask, say
            return torch.zeros(())
        fill = torch.tensor(self.fill, dtype=torch.float64)
        if not leaf.is_floating_point() and not torch.equal(fill.to(leaf.dtype).double(), fill):
            raise ValueError(f"augment: RandomCrop(fill={self.fill}) are no numbers of images of {leaf.dtype}")
        if len(fill) not in (1, leaf.shape[-3]):
            raise ValueError(
                f"augment: RandomCrop has a fill for {len(fill)} channels, and images have {leaf.shape[-3]}"
            )
        return fill[:, None, None]

    def _cut(self, leaf: Tensor, starts: list[list[int]], outside: Tensor) -> Tensor:
        """The pieces of a tensor [n, ..., height, width]."""
        out = leaf.new_empty((*leaf.shape[:-2], *self.sides)).copy_(outside.to(leaf.dtype))
        for i, corner in enumerate(zip(*starts, strict=True)):
            ends = zip(corner, self.sides, leaf.shape[-2:], strict=True)
            (top, bottom), (left, right) = [(max(start, 0), min(start + side, size)) for start, side, size in ends]
            rows, columns = (slice(top - corner[0], bottom - corner[0]), slice(left - corner[1], right - corner[1]))
            out[i, ..., rows, columns] = leaf[i, ..., top:bottom, left:right]
        return out


def image_size(x: Any) -> tuple[int, int]:
    """Height and width of the images among the inputs.

    Raises:
        ValueError: there is none [n, channels, height, width].
    """
    image = next((leaf for leaf in tensors(x) if leaf.dim() > 3), None)
    shapes = [list(leaf.shape) for leaf in tensors(x)]
    if image is None or image.shape[-1] <= 4 < image.shape[-3]:
        raise ValueError(
            f"augment: inputs have shapes {shapes}, and images are [n, channels, height, width]; give a function "
            "augment(x, y, generator) -> (x, y) of your own for other inputs"
        )
    return image.shape[-2], image.shape[-1]


def _rows(x: Any) -> int:
    return len(next(leaf for leaf in tensors(x) if leaf.dim())) if tensors(x) else 0


def _written(root: str, tree: Any) -> list[str]:
    """What each leaf is called in errors."""
    return [f"{root}[{name!r}]" if name else root for name in names(tree)]


__all__ = ["Augmentation", "RandomCrop", "RandomFlip", "augmentations", "changed", "image_size"]
