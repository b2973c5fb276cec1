"""Ready models for `workbench.experiments.grid`: small networks that fit the shapes of a data set."""

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
    """Linear model.

    Args:
        data: data set, for the input and output shapes.

    Example:
        >>> from workbench import data
        >>> linear(data.load("diabetes"))[-1]
        Linear(in_features=10, out_features=1, bias=True)
    """
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(data.input_shape), data.n_outputs))


def mlp(data: Data, width: int = 50, depth: int = 2) -> nn.Module:
    """Multilayer perceptron with ReLU.

    Args:
        data: data set, for the input and output shapes; images are flattened.
        width: units per hidden layer.
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
    """Small convolutional network: two 3x3 convolutions, each with ReLU and 2x2 max pooling, and a hidden layer of ``4 * width`` units.

    Args:
        data: data set of images [channels, height, width].
        width: channels of the first convolution; the second has twice as many.

    Raises:
        ValueError: the data are not images of at least 4x4 pixels.

    Example:
        >>> from workbench import data
        >>> cnn(data.load("digits"))(data.load("digits").test.x[:5]).shape
        torch.Size([5, 10])
    """
    shape = data.input_shape
    if len(shape) != 3 or min(shape[1:]) < 4:
        raise ValueError(
            f"cnn takes images [channels, height, width] of at least 4x4 pixels; a row of {data.name} is {list(shape)}: use mlp instead"
        )
    channels, high, wide = shape
    return nn.Sequential(
        *(nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(2 * width * (high // 4) * (wide // 4), 4 * width), nn.ReLU()),
        nn.Linear(4 * width, data.n_outputs),
    )


def suited(data: Data) -> str:
    """Return the name of the ready model that `auto` chooses.

    Example:
        >>> from workbench import data
        >>> suited(data.load("diabetes")), suited(data.load("digits"))
        ('tabular', 'mlp')
    """
    return "tabular" if is_table(data) else "mlp"


def auto(data: Data) -> nn.Module:
    """Default model: `workbench.models.tabular` for a table of numbers, `mlp` for anything else.

    Args:
        data: data set, for the input and output shapes.

    Example:
        >>> from workbench import data
        >>> [type(auto(data.load(name))[0]).__name__ for name in ("diabetes", "digits")]
        ['Standardization', 'Flatten']
    """
    return READY[suited(data)](data)


READY: dict[str, Callable[..., nn.Module]] = {
    "auto": auto,
    "linear": linear,
    "mlp": mlp,
    "cnn": cnn,
    "tabular": tabular,
}
