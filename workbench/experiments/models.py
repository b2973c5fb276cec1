"""Ready models for `workbench.experiments.grid`: small, of the shape that the data set asks for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import nn

from workbench.models import is_table, tabular

if TYPE_CHECKING:
    from ..data import Data


def linear(data: Data) -> nn.Module:
    """One linear layer.

    Args:
        data: whose input and output shapes it gets.

    Example:
        >>> from workbench import data
        >>> linear(data.load("diabetes"))[-1]
        Linear(in_features=10, out_features=1, bias=True)
    """
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(data.input_shape), data.n_outputs))


def mlp(data: Data, width: int = 50, depth: int = 2) -> nn.Module:
    """Hidden layers of ReLU units.

    Args:
        data: whose input and output shapes it gets; images are flattened.
        width: units of each hidden layer.
        depth: number of hidden layers.

    Example:
        >>> from workbench import data
        >>> sum(p.numel() for p in mlp(data.load("diabetes"), width=20, depth=1).parameters())
        241
    """
    sizes = [math.prod(data.input_shape), *[width] * depth]
    hidden = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(sizes[-1], data.n_outputs))


def cnn(data: Data, width: int = 16) -> nn.Module:
    """Two convolutions of 3x3, each with pooling, and a hidden layer of four times as many units as channels.

    Args:
        data: images [channels, height, width].
        width: channels of the first convolution; the second has twice as many.

    Raises:
        ValueError: the data are no images, or have fewer than 4 pixels to a side.

    Example:
        >>> from workbench import data
        >>> cnn(data.load("digits"))(data.load("digits").test.x[:5]).shape
        torch.Size([5, 10])
    """
    shape = data.input_shape
    if len(shape) != 3 or min(shape[1:]) < 4:
        raise ValueError(
            f"cnn takes images [channels, height, width] of at least 4 pixels a side; a row of {data.name} is {list(shape)}: take mlp"
        )
    channels, high, wide = shape
    return nn.Sequential(
        *(nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(2 * width * (high // 4) * (wide // 4), 4 * width), nn.ReLU()),
        nn.Linear(4 * width, data.n_outputs),
    )


def suited(data: Data) -> str:
    """The ready model that `auto` takes.

    Example:
        >>> from workbench import data
        >>> suited(data.load("diabetes")), suited(data.load("digits"))
        ('tabular', 'mlp')
    """
    return "tabular" if is_table(data) else "mlp"


def auto(data: Data) -> nn.Module:
    """What is trained where no model is named: `workbench.models.tabular` for a table of numbers, `mlp` for anything else.

    Args:
        data: whose input and output shapes it gets.

    Example:
        >>> from workbench import data
        >>> [type(layer).__name__ for layer in auto(data.load("diabetes"))][:2], type(auto(data.load("digits"))[0]).__name__
        (['Standardization', 'Linear'], 'Flatten')
    """
    return READY[suited(data)](data)


READY: dict[str, Callable[..., nn.Module]] = {
    "auto": auto,
    "linear": linear,
    "mlp": mlp,
    "cnn": cnn,
    "tabular": tabular,
}
