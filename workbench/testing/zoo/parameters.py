"""Parameters that are used in unusual ways."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

from .core import Base, case, tokens


@case("flinear_selfweight")
class FLinearSelfWeight(Base):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(self.trunk(x), self.weight, self.bias)


@case("paramlist_einsum")
class ParamListEinsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(8, 8) / 8**0.5 for _ in range(2))
        self.embed, self.out = nn.Parameter(torch.randn(5, 8)), nn.Parameter(torch.randn(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.embed
        for weight in self.weights:
            h = torch.tanh(torch.einsum("bi,io->bo", h, weight))
        return h @ self.out


@case("tied", inputs=tokens)
class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.out = nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 10, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(torch.tanh(self.middle(self.embed(ids))))


@case("shared_submodule")
class SharedSubmodule(Base):
    def __init__(self) -> None:
        super().__init__()
        self.again = self.b

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.again(self.trunk(x))))


@case("frozen_trunk", "no_grad_params")
class FrozenTrunk(Base):
    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)
        self.b.requires_grad_(False)


@case("unused_parameter", "no_grad_params")
class UnusedParameter(Base):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.zeros(3))


class Quantize(torch.autograd.Function):
    """Rounds, with the straight-through gradient; written the old way, without setup_context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


@case("custom_autograd")
class CustomAutograd(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(Quantize.apply(self.trunk(x)))


class MatMul(torch.autograd.Function):
    """Matrix product, written the old way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].T @ x


@case("custom_autograd_weight")
class CustomAutogradWeight(Base):
    def forward(self, x: Tensor) -> Tensor:
        return MatMul.apply(self.trunk(x), self.c.weight) + self.c.bias


@case("checkpoint", "checkpoint")
class Checkpoint(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.utils.checkpoint.checkpoint(self.trunk, x, use_reentrant=False))


@case("complex_inside")
class ComplexInside(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.fft.irfft(torch.fft.rfft(self.trunk(x)) * torch.fft.rfft(self.b.bias), n=8))


@case("autograd_in_forward", "structured_output")
class AutogradInForward(Base):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.c(self.trunk(x)).sum(1, keepdim=True)
            (grad,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return {"energy": energy, "forces": -grad}


@case("parameter_dict")
class ParameterDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shapes = {"into": (5, 8), "shift": (8,), "out": (8, 2)}
        self.held = nn.ParameterDict({name: torch.randn(shape) / 3 for name, shape in shapes.items()})

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.held["into"] + self.held["shift"]) @ self.held["out"]


@case("complex_parameter")
class ComplexParameter(Base):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        h = self.trunk(x)
        return self.c((h * self.phase).real.to(h.dtype))


@case("shared_in_list")
class SharedInList(Base):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.a, self.b, self.b])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.c(x)


@case("weight_property")
class WeightProperty(Base):
    """A weight that is computed from parameters each time it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.randn(2, 8))

    @property
    def weight(self) -> Tensor:
        return F.softplus(self.raw)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.trunk(x)) + self.trunk(x) @ self.weight.T
