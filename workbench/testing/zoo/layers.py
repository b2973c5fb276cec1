"""Plain stacks of layers."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations

from workbench import models
from workbench.data import Data

from .core import IMAGE, TABLE, case, normal, tokens


@case("mlp")
def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


case("prelu")(lambda: nn.Sequential(nn.Linear(5, 8), nn.PReLU(), nn.Linear(8, 2)))
case("double_model", "float64", inputs=normal((5,), dtype=torch.float64))(lambda: mlp().double())
case("compiled", "compiled")(lambda: torch.compile(mlp(), backend="eager"))
case("embedding_bag", inputs=tokens)(lambda: nn.Sequential(nn.EmbeddingBag(10, 8), nn.Linear(8, 8), nn.Linear(8, 2)))
case("bilinear", inputs=normal((5,), (4,)))(lambda: nn.Bilinear(5, 4, 2))
case("batchnorm1d_tabular", "buffers", "batch_mixing_train")(
    lambda: nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
)
case("cnn_bn", "buffers", "batch_mixing_train", inputs=IMAGE)(
    lambda: nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)),
    )
)
case("groupnorm_conv", inputs=IMAGE)(
    lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.Flatten(), nn.Linear(144, 2))
)
case("conv_transpose", inputs=IMAGE)(
    lambda: nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.ConvTranspose2d(4, 1, 4, stride=2))
)


@case("scripted", "scripted")
def scripted() -> Callable[..., Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit is deprecated, but models made with it live on
        return torch.jit.script(mlp())


@case("sequential_root")
class SequentialRoot(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(OrderedDict(first=nn.Linear(5, 8), act=nn.Tanh(), last=nn.Linear(8, 2)))


@case("spectral_norm", "buffers")
def spectral_norm() -> nn.Module:
    layer = parametrizations.spectral_norm(nn.Linear(5, 8))
    layer.weight = torch.randn(8, 5)  # as after training steps: the power iteration has to catch up with the weight
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(8, 2))


@case("weight_norm")
def weight_norm() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 8)), nn.Tanh(), nn.Linear(8, 2))


@case("tabular")
def tabular() -> nn.Sequential:
    """Numeric columns embedded by bins; one column has fewer bins than the others."""
    x = TABLE(seed=1, rows=60)[0][0]
    x[:, 4] = x[:, 4].sign() * (x[:, 4].abs() > 0.7)
    return models.tabular(Data.from_arrays(x, x[:, :2], test=[0]), embedding="piecewise", bins=4, width=8)
