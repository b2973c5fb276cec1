"""Helpers shared by the tests on a simulated device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from helpers import pretend_device
from helpers.device_models import WRAPPERS, leaves, mlp, quiet, still
from workbench import Risk, sample
from workbench.core.outputs.options import has_classes

DEVICE = pretend_device.NAME


def home(value: Any) -> Any:
    """Return a value with its tensors on the CPU, and assert that they come from the device."""
    if isinstance(value, Tensor):
        assert value.device.type == DEVICE
        return value.cpu()
    if isinstance(value, Risk):
        return value.map(home)
    return [home(item) for item in value] if isinstance(value, tuple | list) else value


def answers(wrapped: Any, x: Tensor) -> list[Tensor]:
    """Return prediction and risks of a call that starts from the same random state each time."""
    torch.manual_seed(1)
    with torch.no_grad(), quiet():
        return leaves(wrapped(x, return_risk=True))


def close(here: Any, there: Any, atol: float = 1e-8) -> None:
    """Assert that results of the CPU and of the device are close."""
    torch.testing.assert_close(here, home(there), rtol=1e-6, atol=atol)


def states_close(here: nn.Module, there: nn.Module) -> None:
    for (name, a), b in zip(here.state_dict().items(), there.state_dict().values(), strict=True):
        assert name.startswith("settings@") or b.device.type == DEVICE, name
        torch.testing.assert_close(a, b.cpu(), rtol=1e-6, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")


def in_order(wrapped: Any) -> Any:
    """Turn off the model's own dropout, and draw noise in an order that is the same on all devices."""
    still(by_formula(wrapped))
    if "sample" in wrapped.methods:
        wrapped._workbench.strategy = "loop"
    return wrapped


def by_formula(wrapped: Any) -> Any:
    """Let sample draw on the CPU what it draws on a GPU."""
    for method in wrapped._workbench.methods:
        if method.name == "sample" and isinstance(method.noise, sample.Bernoulli):
            method.noise = Formula(method.noise.p)
    return wrapped


class Formula(sample.Bernoulli):
    """Dropout by the formula that is used on a GPU."""

    def apply(self, value: Tensor, raw: Tensor | None, generator: torch.Generator | None, additive: bool) -> Tensor:
        if raw is not None:
            return super().apply(value, raw, generator, additive)
        return value * ((torch.rand(value.shape, dtype=value.dtype, device=value.device) >= self.p) / (1 - self.p))


def rows(n: int = 40, shape: tuple[int, ...] = (4,), classes: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, *shape, generator=generator)
    return x, torch.arange(n) % 3 if classes else 3 + 2 * torch.randn(n, 3, generator=generator)


def is_classes(name: str) -> bool:
    return has_classes(WRAPPERS[name](mlp())._workbench.output)
