"""Conversion of Pillow images to tensors."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.errors import require

GREY = ("1", "L", "LA", "I;16", "I;16B", "I;16L")  # Pillow modes with a single channel of grey levels
ORIENTATION = 0x0112  # the EXIF tag that says how a viewer turns or mirrors the stored pixels; 1, or none: not at all


def mode_of(file: Path) -> str:
    """Return the Pillow mode of an image file, of which only the header is read.

    Raises:
        ValueError: the file is not an image, or is damaged.
    """
    with _named(file), require("PIL.Image").open(file) as image:
        return str(image.mode)


def open_image(file: str | Path | bytes) -> Any:
    """Read an image by Pillow from a file, or from the bytes of a file, upright as its EXIF orientation says.

    That orientation, 1 to 8, is left in `image.info["orientation"]`.

    Raises:
        ValueError: the file is not an image, is damaged, or holds several frames.
    """
    with _named(file), require("PIL.Image").open(io.BytesIO(file) if isinstance(file, bytes) else file) as image:
        n_frames = getattr(image, "n_frames", 1)
        orientation = image.getexif().get(ORIENTATION, 1)
        image.load()
        # after loading: those of a TIFF are then upright already
        require("PIL.ImageOps").exif_transpose(image, in_place=True)
    image.info["orientation"] = orientation
    if n_frames > 1 and image.format != "MPO":  # the second picture of a camera is a preview or another view
        raise ValueError(f"{_name(file)} holds {n_frames} frames or pages; save the one that counts, or each as a file")
    return image


@contextlib.contextmanager
def _named(file: str | Path | bytes) -> Iterator[None]:
    """Name the file in what Pillow raises about damaged ones."""
    try:
        yield
    except (OSError, SyntaxError, EOFError) as error:
        raise ValueError(f"{_name(file)} can't be read as an image: {error}") from error


def _name(file: str | Path | bytes) -> str:
    return "an image" if isinstance(file, bytes) else str(file)


def is_image(value: Any) -> bool:
    """Return whether a value is a Pillow image."""
    return type(value).__module__.partition(".")[0] == "PIL"


def to_tensor(image: Any, size: tuple[int, int] | None = None, grey: bool = False) -> Tensor:
    """Convert an image to float32 [3, height, width] in [0, 1], or [1, height, width] of grey levels.

    Args:
        image: Pillow image.
        size: (height, width) to resize to, bilinearly; None: no resizing.
        grey: whether to return one channel.

    Raises:
        ValueError: the values of the image's mode have no upper bound (modes I and F).
    """
    if image.mode in ("I", "F"):
        raise ValueError(f"an image of mode {image.mode!r} has no range of grey levels; convert it to 8 or 16 bits")
    deep = image.mode.startswith("I;16")
    if not deep:
        image = image.convert("L" if grey else "RGB")
    if size is not None:
        image = image.resize((size[1], size[0]), require("PIL.Image").Resampling.BILINEAR)
    pixels = np.array(image)
    tensor = torch.from_numpy(pixels.astype(np.float32) / (65535 if deep else 255))
    if pixels.ndim == 3:
        return tensor.permute(2, 0, 1).contiguous()
    return tensor[None] if grey else tensor[None].repeat(3, 1, 1)


def to_numbers(image: Any, size: tuple[int, int] | None = None) -> Tensor:
    """Return the pixel values of a mask [height, width] (indices of a palette), float32 for mode F, else int64.

    Args:
        image: Pillow image.
        size: (height, width) to resize to, by the nearest pixel; None: no resizing.

    Raises:
        ValueError: the image has several channels.
    """
    if len(image.getbands()) > 1:
        raise ValueError(f"a mask of mode {image.mode!r} holds colours; give the number of the class in one channel")
    if size is not None:
        image = image.resize((size[1], size[0]), require("PIL.Image").Resampling.NEAREST)
    pixels = np.array(image)
    return torch.from_numpy(pixels.astype(np.float32 if pixels.dtype.kind == "f" else np.int64))
