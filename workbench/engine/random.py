"""The random streams of the branches: different, the same, or forbidden, as `torch.func.vmap` has them, for passes made one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .plan import Axis


def devices(leaves: list[Any]) -> list[torch.device]:
    """The CUDA devices that tensors among the leaves lie on."""
    return sorted({leaf.device for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_cuda}, key=str)


def state(cuda: list[torch.device]) -> list[Tensor]:
    """The state of torch's global generators: the CPU's, then each device's."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in cuda)]


def restore(states: list[Tensor], cuda: list[torch.device]) -> None:
    """Set what `state` gave."""
    torch.set_rng_state(states[0])
    for device, value in zip(cuda, states[1:], strict=True):
        torch.cuda.set_rng_state(value, device)


class Streams:
    """Gives each pass the stream that its place along the axes asks for."""

    def __init__(self, axes: tuple[Axis, ...], leaves: list[Any]) -> None:
        self._devices = devices(leaves)
        self._same = {axis.name for axis in axes if axis.randomness in ("same", "error") and axis.size > 1}
        self._error = any(axis.randomness == "error" for axis in axes)
        self._starts: dict[tuple, list[Tensor]] = {}

    @contextmanager
    def branch(self, index: Mapping[str, int]) -> Iterator[None]:
        """Around one pass; along a "same" axis every pass starts where the first one did."""
        if not self._same:
            yield
            return
        key = tuple((name, i) for name, i in index.items() if name not in self._same)
        if key in self._starts:
            restore(self._starts[key], self._devices)
        else:
            self._starts[key] = state(self._devices)
        yield
        if self._error and any(
            not torch.equal(a, b) for a, b in zip(self._starts[key], state(self._devices), strict=True)
        ):
            raise RuntimeError(
                'the model draws random numbers, which randomness="error" forbids; use randomness="different" (each sample its own) or '
                '"same" (all samples alike)'
            )
