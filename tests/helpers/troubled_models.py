"""Small models with one problem each, for the tests of `diagnose`; the lines that it must name are marked with HERE."""

from __future__ import annotations

import inspect
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from workbench import vote


def x(rows: int = 6, features: int = 3) -> Tensor:
    return torch.randn(rows, features, generator=torch.Generator().manual_seed(0))


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.b(torch.tanh(self.a(x)))


# ---- one model for each problem, with its line marked -------------------------------------------------------------------
class Raises(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) @ x  # HERE


class RaisesInTraining(Base):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            raise KeyError("no such thing")  # HERE
        return super().forward(x)


class Unregistered(Base):
    def __init__(self) -> None:
        super().__init__()
        self.scales = [torch.tensor(0.5), torch.tensor(2.0)]  # HERE

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scales[0]


class Grows(Base):
    def __init__(self) -> None:
        super().__init__()
        self.info: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.info.append(len(x))  # HERE
        return super().forward(x)


class GrowsDict(Base):
    def __init__(self) -> None:
        super().__init__()
        self.info: dict[int, int] = {}

    def note(self) -> None:
        self.info[len(self.info)] = 0  # HERE

    def forward(self, x: Tensor) -> Tensor:
        self.note()
        return super().forward(x)


class Counts(Base):
    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1  # HERE
        return super().forward(x)


class Statistics:
    def __init__(self) -> None:
        self.calls = 0


class ChangesObject(Base):
    def __init__(self) -> None:
        super().__init__()
        self.statistics = Statistics()

    def forward(self, x: Tensor) -> Tensor:
        self.statistics.calls += 1  # HERE
        return super().forward(x)


class WritesBuffer(Base):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1  # HERE
        return super().forward(x)


class WritesInput(Base):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)  # HERE
        return super().forward(x)


LAST: Any = None
LOG: list[int] = []


class WritesGlobal(Base):
    def forward(self, x: Tensor) -> Tensor:
        global LAST
        LAST = len(x)  # HERE
        return super().forward(x)


class AppendsToGlobal(Base):
    def forward(self, x: Tensor) -> Tensor:
        LOG.append(len(x))  # HERE
        return super().forward(x)


class WritesClass(Base):
    calls: ClassVar[int] = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1  # HERE
        return super().forward(x)


class NumpyNoise(Base):
    def forward(self, x: Tensor) -> Tensor:
        noise = np.random.normal()  # noqa: NPY002  # HERE
        return super().forward(x) + noise


class PythonNoise(Base):
    def forward(self, x: Tensor) -> Tensor:
        noise = random.random()  # HERE
        return super().forward(x) + noise


class OwnGenerator(Base):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand((), generator=self.generator)  # HERE
        return super().forward(x) + noise


class AlwaysNoisy(Base):
    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(4)  # HERE
        return self.b(self.a(x) + noise)


class If(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if h[:, 0].max() > -9:  # HERE
            h = torch.tanh(h)
        return self.b(h)


class Item(Base):
    def forward(self, x: Tensor) -> Tensor:
        bias = self.a.bias.sum().item()  # HERE
        return super().forward(x) + bias


class Mask(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        few = h[h < -100]  # HERE
        return self.b(h) + few.sum()


class Gradient(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            (g,) = torch.autograd.grad(self.a(z := x.detach().requires_grad_()).sum(), z, create_graph=True)  # HERE
        return super().forward(x) + g.sum(1, keepdim=True)


class Checkpointed(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.utils.checkpoint.checkpoint(self.a, x, use_reentrant=False)  # HERE
        return self.b(torch.tanh(h))


class AddsInPlace(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = x.clone()
        h.add_(self.a.bias.sum())  # HERE
        return super().forward(h)


class Mixes(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = h - h.mean(0)  # HERE
        return self.b(h)


class MixesInTraining(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.training:
            h = h - h.mean(0)  # HERE
        return self.b(h)


class Scalar(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.square().mean()  # HERE


class Argmax(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.argmax(-1)  # HERE


class Softmax(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        p = y.softmax(-1)  # HERE
        return p.reshape(-1, 2)


class LogSoftmax(Base):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.log_softmax(super().forward(x), dim=-1)  # HERE


class Says(Base):
    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        return super().forward(x), "done"


class Detached(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.detach()  # HERE


class Unused(Base):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)


class Compiled(Base):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.compile(self.a, backend="eager")  # type: ignore[assignment]


class Tied(Base):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(2, 4)
        self.c.weight = nn.Parameter(torch.ones(4, 2))
        self.d = nn.Linear(2, 4)
        self.d.weight = self.c.weight

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return self.c(y) + self.d(y)


def doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:  # HERE
    return 2 * output


def hooked() -> nn.Module:
    model = Base()
    model.b.register_forward_hook(doubled)
    return model


def frozen() -> nn.Module:
    model = Base()
    model.a.requires_grad_(False)
    return model


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return nn.Sequential(nn.Linear(3, 4), torch.jit.script(nn.Linear(4, 1)))


def wrapped_part() -> nn.Module:
    return nn.Sequential(vote.Wrapper(2)(nn.Linear(3, 4)), nn.Linear(4, 1))


# kind -> the models with this problem and no other, and whether the problem has a line
TROUBLES: list[tuple[str, Callable[[], Any], bool]] = [
    ("error", Raises, True),
    ("error", RaisesInTraining, True),
    ("unregistered", Unregistered, True),
    ("grows", Grows, True),
    ("grows", GrowsDict, True),
    ("state", Counts, True),
    ("state", ChangesObject, True),
    ("buffers", WritesBuffer, True),
    ("input_write", WritesInput, True),
    ("global_write", WritesGlobal, True),
    ("global_write", AppendsToGlobal, True),
    ("global_write", WritesClass, True),
    ("randomness", NumpyNoise, True),
    ("randomness", PythonNoise, True),
    ("randomness", OwnGenerator, True),
    ("random_eval", AlwaysNoisy, True),
    ("control_flow", If, True),
    ("item", Item, True),
    ("dynamic_shape", Mask, True),
    ("autograd", Gradient, True),
    ("checkpoint", Checkpointed, True),
    ("vmap", AddsInPlace, True),
    ("batch_mixing", Mixes, True),
    ("batch_mixing", MixesInTraining, True),
    ("no_rows", Scalar, True),
    ("integer_output", Argmax, True),
    ("probabilities", Softmax, True),
    ("probabilities", LogSoftmax, True),
    ("non_tensor_output", Says, False),
    ("no_gradient", Detached, True),
    ("unused", Unused, False),
    ("compiled", Compiled, False),
    ("tied", Tied, False),
    ("hooks", hooked, True),
    ("frozen", frozen, False),
    ("scripted", scripted, False),
    ("wrapped_part", wrapped_part, False),
    ("lazy", lambda: nn.Sequential(nn.LazyLinear(2)), False),
    ("no_parameters", lambda: nn.Sequential(nn.ReLU()), False),
    ("wrapped", lambda: vote.Wrapper(2)(Base()), False),
]


def marked(build: Any) -> str:
    """Return the marked line in the form used by findings."""
    lines, start = inspect.getsourcelines(doubled if build is hooked else build)
    (number,) = [start + i for i, line in enumerate(lines) if line.rstrip().endswith("# HERE")]
    return f"{Path(inspect.getfile(doubled if build is hooked else build)).relative_to(Path.cwd())}:{number}"
