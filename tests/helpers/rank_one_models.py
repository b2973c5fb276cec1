"""Models that use the weights of their layers in ways that rank-one voters have to detect."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Double(torch.autograd.Function):
    """Twice a linear function, with hand-written gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return 2 * F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return 2 * grad @ weight, 2 * grad.T @ x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.dropout(torch.tanh(self.a(x))))

    def use(self, h: Tensor) -> Tensor:
        return self.b(h)


class ByFunction(Net):
    def use(self, h: Tensor) -> Tensor:
        return F.linear(self.b(h), self.b.weight, self.b.bias)


class Normed(Net):
    def use(self, h: Tensor) -> Tensor:
        return F.linear(h, F.normalize(self.b.weight))


class Penalty(Net):
    def use(self, h: Tensor) -> Tensor:
        return self.b(h) + sum(p.square().sum() for p in self.parameters())


class OwnGradient(Net):
    def use(self, h: Tensor) -> Tensor:
        return Double.apply(h, self.b.weight)


class Differentiates(Net):
    def use(self, h: Tensor) -> Tensor:
        y = self.b(h)
        (slope,) = torch.autograd.grad(y.square().sum(), self.b.weight, create_graph=True)
        return y + slope.sum(0)


class Tells(Net):
    def use(self, h: Tensor) -> Tensor:
        return self.b(h).sum() * torch.stack([self.a.weight.sum(), torch.zeros((), dtype=h.dtype)])


class Gives(Net):
    def use(self, h: Tensor) -> Tensor:
        self.b(h)
        return self.b.weight


class Keeps(Net):
    def use(self, h: Tensor) -> Tensor:
        self.kept = self.b.weight
        return self.b(h) + self.kept.sum()


class Swallows(Net):
    def use(self, h: Tensor) -> Tensor:
        try:
            return self.b(h) * self.b.weight.norm()
        except Exception:
            return h


class Copies(Net):
    def use(self, h: Tensor) -> Tensor:
        twin = copy.copy(self.b)
        return twin(h) + self.b.weight.T.sum()


class Plainly(Net):
    def use(self, h: Tensor) -> Tensor:
        return nn.Linear.forward(self.b, h)


class InBackward(Net):
    def use(self, h: Tensor) -> Tensor:
        y = self.b(h)
        if y.requires_grad:
            y.register_hook(lambda grad: grad * self.b.weight.sum())
        return y


class Listed(Net):
    def use(self, h: Tensor) -> Tensor:
        return torch.linalg.multi_dot([h, self.b.weight.T, self.a.weight])


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(4, 4)
        self.c.weight = self.b.weight

    def use(self, h: Tensor) -> Tensor:
        return self.c(self.b(h))


class Attention(Net):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0)

    def use(self, h: Tensor) -> Tensor:
        return self.c(self.b(h)[None])[0]


class Again(Net):
    """A model that uses a layer in a loop and in its own vmap, and differentiates with respect to its input."""

    def use(self, h: Tensor) -> Tensor:
        for _ in range(3):
            h = self.b(h)
        h = torch.vmap(self.b)(h)
        return h + torch.func.jacrev(self.b)(h[0]).sum()


class Writes(Net):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return super().forward(x) * self.b.weight.norm()


class Compiled(Net):
    @torch.compile(backend="eager")
    def use(self, h: Tensor) -> Tensor:
        return torch.tanh(self.b(h))


class Script(Net):
    def use(self, h: Tensor) -> Tensor:
        return _scripted(h, self.b.weight)


@torch.jit.script
def _scripted(h: Tensor, weight: Tensor) -> Tensor:
    return h @ weight
