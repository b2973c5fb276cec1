"""Writes in place, state that forward changes, and other side effects."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .core import Base, case


@case("fill_zeros")
class FillZeros(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.trunk(x)
        out = torch.zeros(len(x), 2, dtype=x.dtype, device=x.device)
        for column in range(2):
            out[:, column] = self.c(h)[:, column]
        return out


@case("inplace_relu_on_view")
class InplaceReluOnView(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h[:, :4].relu_()
        return self.c(torch.tanh(self.b(h)))


@case("out_kwarg")
class OutKwarg(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.trunk(x)
        gate = torch.empty_like(h)
        torch.add(h.detach(), 1.0, out=gate)
        return self.c(h * gate)


@case("input_mutation", "mutates_input")
class InputMutation(Base):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return self.c(self.trunk(x))


class Ema(Base):
    ema: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(8))


@case("ema_reassign", "buffers", "batch_mixing_train")
class EmaReassign(Ema):
    def forward(self, x: Tensor) -> Tensor:
        h = self.trunk(x)
        if self.training:
            self.ema = 0.9 * self.ema + 0.1 * h.detach().mean(0)
        return self.c(h - self.ema)


@case("ema_inplace", "buffers", "batch_mixing_train")
class EmaInplace(Ema):
    def forward(self, x: Tensor) -> Tensor:
        h = self.trunk(x)
        if self.training:
            self.ema.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return self.c(h - self.ema)


@case("counter_attr", "mutates_attribute")
class CounterAttr(Base):
    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.c(self.trunk(x)) / self.steps


@case("grown_list", "mutates_attribute")
class GrownList(Base):
    def __init__(self) -> None:
        super().__init__()
        self.info = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.info.append(0)
        return self.c(self.trunk(x))


@case("cached_tensor_attr", "mutates_attribute")
class CachedTensorAttr(Base):
    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.trunk(x)
        return self.c(self.last)


LAST_HIDDEN: Tensor | None = None


@case("global_assign", "writes_global")
class GlobalAssign(Base):
    def forward(self, x: Tensor) -> Tensor:
        global LAST_HIDDEN
        LAST_HIDDEN = self.trunk(x)
        return self.c(LAST_HIDDEN)


@case("nonpersistent_buffer")
class NonpersistentBuffer(Base):
    positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.linspace(0, 1, 8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.trunk(x) + self.positions)


@case("nonpersistent_ema", "buffers", "batch_mixing_train")
class NonpersistentEma(EmaInplace):
    def __init__(self) -> None:
        super().__init__()
        del self.ema
        self.register_buffer("ema", torch.zeros(8), persistent=False)


@case("cache_dict", "mutates_attribute")
class CacheDict(Base):
    """Caches a tensor for each input width, as caches of masks and positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[1]
        if width not in self.scales:
            self.scales[width] = torch.linspace(0.5, 1, width, dtype=x.dtype, device=x.device)
        return self.c(self.trunk(x * self.scales[width]))


class _Noting(nn.Linear):
    """A layer that notes its output in a list, which another module holds as well."""

    def __init__(self, n_in: int, n_out: int, notes: list[Tensor], place: int) -> None:
        super().__init__(n_in, n_out)
        self.notes, self.place = notes, place

    def forward(self, x: Tensor) -> Tensor:
        self.notes[self.place] = super().forward(x)
        return self.notes[self.place]


@case("shared_list", "mutates_attribute")
class SharedList(Base):
    """Layers hand their outputs to the model in a list that all hold, as networks with deep supervision do."""

    def __init__(self) -> None:
        super().__init__()
        self.notes = [torch.zeros(1), torch.zeros(1)]
        self.a, self.b = _Noting(5, 8, self.notes, 0), _Noting(8, 8, self.notes, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.trunk(x)
        return self.c(h + 0.5 * self.notes[0] - 0.1 * self.notes[1])
