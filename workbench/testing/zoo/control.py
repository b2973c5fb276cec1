"""Control flow, shapes and random numbers that depend on the data."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .core import Base, case


@case("data_if", "batch_mixing")
class DataIf(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.abs().max() > 2:
            h = h / 2
        return self.c(torch.tanh(self.b(h)))


@case("item_loop", "batch_mixing")
class ItemLoop(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        for _ in range(1 + int(h.abs().max().item())):
            h = torch.tanh(self.b(h))
        return self.c(h)


@case("bool_mask")
class BoolMask(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.trunk(x).clone()
        h[h < 0] = 0.1 * h[h < 0]
        return self.c(h)


@case("nonzero_shape", "batch_mixing", "not_dealable")
class NonzeroShape(Base):
    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.nonzero(x[:, 0] >= x[:, 0].mean()).squeeze(1)
        return self.c(self.trunk(x[chosen]))


@case("cross_batch", "batch_mixing")
class CrossBatch(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.trunk(x)
        return self.c(torch.softmax(h @ h.T, dim=-1) @ h)


@case("numpy_print")
class NumpyPrint(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.trunk(x)
        print("mean activation", h.detach().cpu().numpy().mean())
        return self.c(h)


@case("dropout", "stochastic_train")
class Dropout(Base):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.dropout(self.drop(self.trunk(x)), 0.3, training=self.training))


@case("numpy_randomness", "stochastic_train")
class NumpyRandomness(Base):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            noise = np.random.normal(size=x.shape)  # noqa: NPY002 - users draw from the global state
            x = x + torch.as_tensor(noise, dtype=x.dtype, device=x.device)
        return self.c(self.trunk(x))


@case("routed_by_input", "batch_mixing", "no_grad_params")
class RoutedByInput(Base):
    """A layer that is chosen by the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.routes = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.routes[int(x[:, 0].sum() > 0)](self.trunk(x))))


@case("autocast_inside")
class AutocastInside(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            h = self.trunk(x)
        return self.c(h.to(x.dtype))


@case("vmap_inside")
class VmapInside(Base):
    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(self.c, randomness="different")(self.trunk(x))
