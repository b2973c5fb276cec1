"""What figures of images and maps share: pictures from arrays, colours of classes and risks, panels and their colour bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from workbench.plots._common import COLOURS, Array, Values, array, finite

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.image import AxesImage

MAX_CLASSES = 20  # number of colours that can just be told apart
VOID = (0.6, 0.6, 0.6, 1.0)


def holds_class_numbers(value: Any) -> bool:
    """Return whether values are class numbers, by their integer dtype."""
    if isinstance(value, torch.Tensor):
        return not (value.is_floating_point() or value.is_complex())
    return np.asarray(value).dtype.kind in "iub"


def pictures_of(image: Values, shape: tuple[int, ...], max_rows: int) -> Array:
    """Convert images to [n, height, width, 3] from 0 to 1."""
    pictures = array(image, "image")
    size = shape[1:]
    if pictures.shape[-2:] == size and pictures.ndim in (2, 3):  # without channels, or one image
        single = pictures.ndim == 3 and shape[0] == 1 and pictures.shape[0] in (1, 3)
        pictures = pictures[None] if single else pictures.reshape(-1, 1, *size)
    if pictures.ndim != 4 or pictures.shape[1] not in (1, 3) or pictures.shape[2:] != size:
        last = pictures.ndim in (3, 4) and pictures.shape[-3:-1] == size  # as pictures are read from files
        remedy = (
            "the channels are last: give numpy.moveaxis(image[..., :3], -1, -3)"
            if last
            else "of more channels pick those to draw, as in image[:, :3]"
        )
        raise ValueError(
            f"image: expected [n, channels, height, width] with 1 or 3 channels and maps of {list(size)}, found {list(pictures.shape)}; {remedy}"
        )
    pictures = pictures[:max_rows]
    if len(pictures) != shape[0]:
        raise ValueError(f"shapes do not match: {len(pictures)} images, {shape[0]} predictions")
    finite(image=pictures)
    low, high = pictures.min(), pictures.max()
    if low >= 0 and holds_class_numbers(image):
        low, high = 0.0, 255.0
    elif low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    pictures = np.clip((pictures - low) / ((high - low) or 1.0), 0, 1)
    return np.moveaxis(np.broadcast_to(pictures, (len(pictures), 3, *size)), 1, -1)


def picture(image: Values) -> Array:
    """Convert one image to [height, width, 3] from 0 to 1."""
    values = array(image, "image")
    if values.ndim not in (2, 3):
        raise ValueError(f"image: expected [channels, height, width] or [height, width], found {list(values.shape)}")
    if values.ndim == 3 and values.shape[0] not in (1, 3):
        last = (
            ", which is .transpose(2, 0, 1) of an array [height, width, channels]" if values.shape[2] in (1, 3) else ""
        )
        raise ValueError(
            f"image: expected [channels, height, width] with 1 or 3 channels{last}, found {list(values.shape)}; "
            "of more channels pick those to draw, as in image[:3]"
        )
    return pictures_of(image, (1, *values.shape[-2:]), 1)[0]


def shades_of(kind: str, *, dark: bool = True) -> Colormap:
    """Return a colour map from white to the colour of a risk, and with `dark` on to nearly black."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list(kind, ["#FFFFFF", COLOURS[kind], *["#111111"] * dark])


def class_colours(n: int) -> Colormap:
    """Return a colour map of a colour for each class, of at most `MAX_CLASSES` classes."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    return ListedColormap(colormaps["tab10" if n <= 10 else "tab20"](np.arange(n)))


def draw_panel(ax: Axes, values: Array, **look: Any) -> AxesImage:
    """Draw one panel, hatched where a number is missing."""
    ax.set(xticks=[], yticks=[])
    ax.grid(False)
    missing = np.isnan(values) if values.ndim == 2 else np.zeros(values.shape[:2], bool)
    if missing.any():
        ax.set_facecolor(VOID)
    drawn = ax.imshow(np.ma.masked_array(values, np.isnan(values)), **look)
    if missing.any() and min(missing.shape) > 1:
        hatched = ax.contourf(missing, levels=[0.5, 1.5], colors="none", hatches=["////"])
        hatched.set(edgecolor="white", linewidth=0)
    return drawn


def add_spare_bar(figure: Any, mappable: Any, axes: np.ndarray[Any, Any]) -> None:
    """Add an invisible colour bar below a column, so that its panels align with those of columns that have one."""
    bar = figure.colorbar(mappable, ax=axes.tolist(), location="bottom", fraction=0.06, pad=0.02, shrink=0.9)
    bar.ax.set(xticks=[], label=" ")
    bar.solids.set_visible(False)
    bar.outline.set_visible(False)


def key_columns(names: Sequence[str], width: float, most: int) -> int:
    """Return how many columns of a legend of class names fit into a figure, at least 1, by its width in inches."""
    return int(np.clip(width / (0.075 * max(map(len, names)) + 0.45), 1, min(len(names), most)))
