"""Models for graph-run steps: those that repeat the same computation, and those for which no graph may be used."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench import augment, compose, laplace, neo, sample, sculpt, snapshot, swag, vote
from workbench.models.embeddings import ColumnLinear, NumericColumns, Periodic, PiecewiseLinear, Standardization

SCALE = 1.0
settings = types.ModuleType("settings")
settings.scale = 2.0  # type: ignore[attr-defined]
NOISE = np.random.default_rng(0)


def mlp(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), *between, nn.Linear(8, 1))


class Residual(nn.Module):
    """A model that reads attributes, a list of modules, and a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.out = nn.Linear(3, 8), nn.Linear(8, 1)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.scale, self.deep = 0.5, True
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.entry(x)) + self.shift
        for layer in self.layers:
            h = h + F.gelu(layer(h)) * self.scale
        if self.deep:
            h = self.noisy(h)
        return self.out(h)

    def noisy(self, h: Tensor) -> Tensor:
        return F.dropout(h, 0.2, self.training)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.parameters()) for _ in range(1)]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()


class ReadsGlobal(_Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * SCALE


class ReadsModule(_Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * settings.scale


class Counter(_Net):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.net(x) * (1 + self.calls % 3)


class DataIf(_Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) if x.mean() > 0 else 2 * self.net(x)


class Item(_Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * float(x.abs().max().item())


class NumpyMean(_Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * float(x.detach().numpy().mean())


class NumpyNoise(_Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + float(NOISE.standard_normal())


class ListItem(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.scales = [1.0]

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.scales[0]


class Cache(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.cache: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = x.detach().mean()
        return self.net(x) + self.cache


class Masked(_Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + x[x > 0].mean()


class OwnGenerator(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + torch.rand(x.shape[0], 1, generator=self.generator)


class Seeding(_Net):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(5)
        return self.net(x) + torch.rand(x.shape[0], 1)


class Writing(_Net):
    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return self.net(x)


class Closure(_Net):
    def forward(self, x: Tensor) -> Tensor:
        return (lambda h: self.net(h))(x)


def _hooked() -> nn.Module:
    net, calls = mlp(), []

    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        calls.append(0)
        return out * (1 + len(calls) % 2)

    net[0].register_forward_hook(hook)
    return net


def _with_set_forward() -> nn.Module:
    net = mlp()
    layer, calls = net[0], []

    def forward(x: Tensor) -> Tensor:
        calls.append(0)
        return F.linear(x, layer.weight, layer.bias) * len(calls)

    layer.forward = forward  # type: ignore[method-assign]
    return net


def _frozen() -> nn.Module:
    net = mlp()
    net[0].requires_grad_(False)
    return net


def _tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 1))
    net[2].weight = net[0].weight
    return net


class ReadsMath(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.sin(math.pi * self.fc(x)) / math.sqrt(x.shape[-1]))


class MathOfValue(ReadsMath):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.fc(x)) * math.exp(-x.square().mean())


class Parts(NamedTuple):
    mean: Tensor
    mT: Tensor


class MakesNamed(_Net):
    def forward(self, x: Tensor) -> Tensor:
        parts = Parts(self.net(x), mT=x[:, :1])
        return parts.mean + parts.mT


def _columns() -> nn.Module:
    edges = [torch.tensor([-1.0, 0.0, 1.0]), torch.tensor([-2.0, 2.0])]
    embedded = NumericColumns([0, 2], PiecewiseLinear(edges))
    return nn.Sequential(
        Standardization(torch.ones(3), torch.full((3,), 0.7)), embedded, nn.Linear(7, 8), nn.SiLU(), nn.Linear(8, 1)
    )


def _periodic() -> nn.Module:
    embedded = NumericColumns([0, 1], nn.Sequential(Periodic(2, 3), ColumnLinear(2, 6, 4), nn.ReLU()))
    return nn.Sequential(embedded, nn.Linear(11, 8), nn.SiLU(), nn.Linear(8, 1))


class _Attends(nn.Module):
    """torch's own attention layers on rows of three positions."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.entry, self.layers, self.out = nn.Linear(1, 4), nn.ModuleList(layers), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.entry(x[:, :, None])
        for layer in self.layers:
            h = layer(h)
        return self.out(h.mean(1))


class _AttendsItself(_Attends):
    def forward(self, x: Tensor) -> Tensor:
        h = self.entry(x[:, :, None])
        for layer in self.layers:
            h = h + layer(h, h, h, need_weights=False)[0]
        return self.out(h.mean(1))


def _encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, **options)
    return _Attends(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


TRACED: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "mlp, one": (mlp, compose()),
    "mlp": (mlp, vote.Wrapper(3)),
    "mlp, many": (mlp, vote.Wrapper(6)),
    "mlp, loop": (mlp, vote.Wrapper(3, strategy="loop")),
    "mlp, last": (mlp, vote.Wrapper(3, share=1)),
    "sculpt": (mlp, sculpt.Wrapper()),
    "vote x sculpt": (mlp, compose(vote.Wrapper(4), sculpt.Wrapper(n_layers=1))),
    "dropout": (lambda: mlp(nn.Dropout(0.3)), vote.Wrapper(4)),
    "batch norm": (lambda: mlp(nn.BatchNorm1d(8)), vote.Wrapper(3)),
    "batch norm, loop": (lambda: mlp(nn.BatchNorm1d(8), nn.Dropout(0.1)), vote.Wrapper(3, strategy="loop")),
    "norms": (lambda: mlp(nn.LayerNorm(8), nn.PReLU(), nn.GELU()), vote.Wrapper(4)),
    "frozen": (_frozen, vote.Wrapper(3)),
    "tied": (_tied, vote.Wrapper(3)),
    "users": (Residual, vote.Wrapper(4)),
    "users, sculpt": (Residual, sculpt.Wrapper()),
    "global": (ReadsGlobal, vote.Wrapper(3)),
    "sample": (mlp, sample.Wrapper(4)),
    "sample, weights": (mlp, sample.Wrapper(3, where="weights")),
    "sample, trainable": (mlp, sample.Wrapper(3, where="weights", distribution=sample.Normal(0.1), trainable=True)),
    "vote x sample": (lambda: mlp(nn.BatchNorm1d(8)), compose(vote.Wrapper(3), sample.Wrapper(4))),
    "neo": (mlp, neo.Wrapper()),
    "vote x sculpt x neo": (mlp, compose(vote.Wrapper(3), sculpt.Wrapper(n_layers=1), neo.Wrapper())),
    "math": (ReadsMath, vote.Wrapper(3)),
    "named tuple": (MakesNamed, vote.Wrapper(3)),
    "columns": (_columns, compose(vote.Wrapper(3), sculpt.Wrapper(n_layers=1))),
    "columns, loop": (_columns, compose(vote.Wrapper(3, strategy="loop"), sculpt.Wrapper(strategy="loop"))),
    "periodic": (_periodic, vote.Wrapper(3)),
    "attention": (lambda: _AttendsItself(nn.MultiheadAttention(4, 2, batch_first=True)), vote.Wrapper(3)),
    "encoder": (_encoder, vote.Wrapper(3)),
    "encoder, loop": (lambda: _encoder(activation="gelu"), vote.Wrapper(3, strategy="loop")),
    "encoder, norms first": (lambda: _encoder(norm_first=True, dropout=0.0), vote.Wrapper(4)),
    "rank one": (mlp, vote.Wrapper(4, share="rank1")),
    "rank one, users": (Residual, vote.Wrapper(3, share="rank1")),
    "rank one, encoder": (_encoder, vote.Wrapper(3, share="rank1")),
    "rank one x sculpt": (mlp, compose(vote.Wrapper(4, share="rank1"), sculpt.Wrapper(n_layers=1))),
    "encoder, sculpt": (lambda: _encoder(dropout=0.0), compose(vote.Wrapper(2), sculpt.Wrapper(n_layers=1))),
}
# models whose predictions depend on tensor values, or run user functions
TRACED_STEPS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "swag": (mlp, swag.Wrapper()),
    "snapshot": (lambda: mlp(nn.BatchNorm1d(8)), snapshot.Wrapper(3)),
    "laplace": (mlp, compose(vote.Wrapper(3), laplace.Wrapper())),
    "augment": (mlp, augment.Wrapper([augment.Transform(lambda x: x, None), augment.Transform(lambda x: -x, None)])),
}
EAGER: dict[str, Callable[[], nn.Module]] = {
    "math of a value": MathOfValue,
    "counter": Counter,
    "data if": DataIf,
    "item": Item,
    "numpy mean": NumpyMean,
    "numpy noise": NumpyNoise,
    "list item": ListItem,
    "module of the user's": ReadsModule,
    "cache": Cache,
    "masked": Masked,
    "own generator": OwnGenerator,
    "seeding": Seeding,
    "writing": Writing,
    "closure": Closure,
    "hooked": _hooked,
    "set forward": _with_set_forward,
    "momentum none": lambda: mlp(nn.BatchNorm1d(8, momentum=None)),
    "LSTM": lambda: _Recurrent(),
}


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x[:, None])[0][:, -1])
