"""Random models: classes whose forward is a random sequence of what people write into theirs.

Each is a program in a file of its own, since the source of a model is read, for vectors [rows, 6] -> [rows, 3]. Parts are right by themselves;
what fails is mostly a combination of them.
"""

from __future__ import annotations

import importlib.util
import random
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch

from helpers import conformance_table
from helpers.plain_copies import check_evaluation, check_training
from helpers.zoo import Case
from workbench.testing.models import seeded

WIDTH, OUTPUTS = 6, 3
# wrappers that take all of these models, and those whose training steps are those of plain copies as well
TRAINED = ("vote", "vote_share1", "sculpt", "vote_sculpt", "sample_activations", "sample_weights")
WRAPPERS = (*TRAINED, "swag", "neo")

_HEAD = """
import collections
import functools
import threading
import types

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.w = nn.Parameter(torch.randn(d, d) / d)
        self.layer = nn.Linear(d, d)

    def forward(self, x, scale=1.0):
        return x + scale * self.layer(x @ self.w).tanh()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
"""


class Part(NamedTuple):
    """Statements of a model, in which {n} stands for a number of its own, {d} for the width of x and {h} for half of it.

    Args:
        forward: what happens to x [rows, d].
        init: what `__init__` prepares for it.
        width: width of x afterwards; 0 if it stays.
        even: whether the width must be even.
    """

    forward: str
    init: str = ""
    width: int = 0
    even: bool = False


def _parameter(*shape: str, scale: float = 0.4) -> str:
    return f"self.p{{n}} = nn.Parameter({scale} * torch.randn({', '.join(shape)}))"


_SQUARE, _VECTOR, _MATRIX = "self.l{n} = nn.Linear({d}, {d})", _parameter("{d}"), _parameter("{d}", "{d}")
_EMA = "self.register_buffer('e{n}', torch.zeros({d}))"

PARTS = {
    # layers
    "linear": Part("x = self.l{n}(x)", "self.l{n} = nn.Linear({d}, 8)", 8),
    "narrow": Part("x = self.l{n}(x)", "self.l{n} = nn.Linear({d}, 5, bias=False)", 5),
    "bilinear": Part("x = self.l{n}(x, x.tanh())", "self.l{n} = nn.Bilinear({d}, {d}, 6)", 6),
    "block called twice": Part("x = self.b{n}(self.b{n}(x), scale=0.5)", "self.b{n} = Block({d})"),
    "list": Part(
        "for layer in self.m{n}:\n    x = x + layer(x).tanh()",
        "self.m{n} = nn.ModuleList(nn.Linear({d}, {d}) for _ in range(3))",
    ),
    "mixture": Part(
        "k = self.g{n}(x).argmax(1)\nz = torch.zeros_like(x)\nfor i, expert in enumerate(self.m{n}):\n"
        "    z[k == i] = expert(x[k == i])\nx = x + z",
        "self.g{n} = nn.Linear({d}, 2)\nself.m{n} = nn.ModuleList(nn.Linear({d}, {d}) for _ in range(2))",
    ),
    "convolution": Part(
        "x = F.max_pool2d(self.b{n}(self.c{n}(self.l{n}(x).view(-1, 2, 4, 4))).relu(), 2).flatten(1)",
        "self.l{n} = nn.Linear({d}, 32)\nself.c{n} = nn.Conv2d(2, 2, 3, padding=1, padding_mode='circular')\n"
        "self.b{n} = nn.BatchNorm2d(2)",
        8,
    ),
    "transposed": Part("x = self.c{n}(x[:, None])[:, 0, :{d}]", "self.c{n} = nn.ConvTranspose1d(1, 2, 2, stride=2)"),
    "batch norm": Part("x = self.b{n}(x)", "self.b{n} = nn.BatchNorm1d({d})"),
    "averaged batch norm": Part("x = self.b{n}(x)", "self.b{n} = nn.BatchNorm1d({d}, momentum=None)"),
    "layer norm": Part("x = self.b{n}(x)", "self.b{n} = nn.LayerNorm({d})"),
    "group norm": Part("x = self.b{n}(x)", "self.b{n} = nn.GroupNorm(2, {d})", even=True),
    "prelu": Part("x = self.a{n}(x)", "self.a{n} = nn.PReLU({d})"),
    "gru": Part(
        "x = self.r{n}(self.l{n}(x).view(-1, 3, 4))[0][:, -1]",
        "self.l{n} = nn.Linear({d}, 12)\nself.r{n} = nn.GRU(4, 4, batch_first=True, bidirectional=True)",
        8,
    ),
    "cell": Part(
        "h = x.new_zeros(len(x), 6)\nfor _ in range(3):\n    h = self.r{n}(x, h)\nx = h",
        "self.r{n} = nn.GRUCell({d}, 6)",
        6,
    ),
    "attention": Part(
        "s = self.l{n}(x).view(-1, 2, 4)\nx = self.a{n}(s, s, s)[0].flatten(1)",
        "self.l{n} = nn.Linear({d}, 8)\nself.a{n} = nn.MultiheadAttention(4, 2, batch_first=True)",
        8,
    ),
    "encoder": Part(
        "x = self.t{n}(self.l{n}(x).view(-1, 2, 4)).flatten(1)",
        "self.l{n} = nn.Linear({d}, 8)\nself.t{n} = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)",
        8,
    ),
    "fused attention": Part(
        "q, k, v = self.l{n}(x).view(-1, 1, 2, 12).split(4, -1)\nx = F.scaled_dot_product_attention(q, k, v).flatten(1)",
        "self.l{n} = nn.Linear({d}, 24)",
        8,
    ),
    "embedding": Part("x = x + self.e{n}(x.argmax(1) % 5)", "self.e{n} = nn.Embedding(5, {d})"),
    "weight norm": Part("x = self.l{n}(x)", f"{_SQUARE}\nnn.utils.parametrizations.weight_norm(self.l{{n}})"),
    "orthogonal": Part("x = self.l{n}(x)", f"{_SQUARE}\nnn.utils.parametrizations.orthogonal(self.l{{n}})"),
    "spectral norm": Part("x = self.l{n}(x)", f"{_SQUARE}\nnn.utils.parametrizations.spectral_norm(self.l{{n}})"),
    # parameters without layers
    "matmul": Part("x = x @ self.p{n}", _parameter("{d}", "8"), 8),
    "einsum": Part("x = torch.einsum('bi,ij->bj', x, self.p{n})", _parameter("{d}", "6"), 6),
    "functional": Part("x = F.linear(x, self.p{n})", _parameter("8", "{d}"), 8),
    "partial": Part("x = self.f{n}(x)", f"{_MATRIX}\nself.f{{n}} = functools.partial(F.linear, weight=self.p{{n}})"),
    "closure": Part("x = self.f{n}(x)", f"{_VECTOR}\nself.f{{n}} = lambda z: z * self.p{{n}}"),
    "normalized": Part("x = F.linear(x, F.normalize(self.p{n}))", _parameter("8", "{d}"), 8),
    "tied": Part("x = F.linear(self.l{n}(x).tanh(), self.l{n}.weight.t())", _SQUARE),
    "shared": Part(
        "x = self.k{n}(self.l{n}(x).tanh())",
        f"{_SQUARE}\nself.k{{n}} = nn.Linear({{d}}, {{d}})\nself.k{{n}}.weight = self.l{{n}}.weight",
    ),
    "stacked": Part(
        "x = x * torch.stack([self.p{n}, self.q{n}]).sum(0)",
        f"{_VECTOR}\nself.q{{n}} = nn.Parameter(torch.ones({{d}}))",
    ),
    "unbound": Part("for k in self.p{n}.unbind():\n    x = (x @ k).tanh()", _parameter("3", "{d}", "{d}")),
    "parameter list": Part(
        "for p in self.m{n}:\n    x = (x * p + p).tanh()",
        "self.m{n} = nn.ParameterList(torch.randn({d}) for _ in range(3))",
    ),
    "memory": Part(
        "x = (x @ self.p{n}.T).softmax(-1) @ self.q{n}",
        f"{_parameter('5', '{d}')}\nself.q{{n}} = nn.Parameter(torch.randn(5, {{d}}))",
    ),
    "looked up": Part("x = x + self.p{n}[(x[:, 0] > 0).long()]", _parameter("2", "{d}")),
    "scattered": Part("x = x + torch.zeros_like(x).scatter_add(1, x.argsort(1), self.p{n}.expand_as(x))", _VECTOR),
    "hypernetwork": Part(
        "k = self.l{n}(x).view(-1, {d}, {d})\nx = x + torch.bmm(k, x[:, :, None])[:, :, 0] / {d}",
        "self.l{n} = nn.Linear({d}, {d} * {d})",
    ),
    "solved": Part("x = torch.linalg.solve(torch.eye({d}) + 0.1 * self.p{n}, x.T).T", _MATRIX),
    "exponential": Part("x = x @ torch.matrix_exp(self.p{n} - self.p{n}.T)", _MATRIX),
    "in a tuple": Part(
        "x = x * self.t{n}[0] + self.t{n}[1]",
        f"{_VECTOR}\nself.q{{n}} = nn.Parameter(torch.ones({{d}}))\nself.t{{n}} = (self.p{{n}}, self.q{{n}})",
    ),
    "by name": Part("x = x @ dict(self.named_parameters())['p{n}']", _MATRIX),
    "all of them": Part("x = x / (1 + sum(p.square().mean() for p in self.parameters()))"),
    "masked": Part(
        "x = F.linear(x, self.p{n} * self.k{n})",
        f"{_MATRIX}\nself.register_buffer('k{{n}}', torch.ones({{d}}, {{d}}).tril())",
    ),
    "rounded": Part("w = self.p{n} + ((8 * self.p{n}).round() / 8 - self.p{n}).detach()\nx = x @ w", _MATRIX),
    "detached weight": Part("x = x @ self.p{n} + x @ self.p{n}.detach().T", _MATRIX),
    "data": Part("x = x * self.p{n}.data + self.p{n}", _VECTOR),
    "foreach": Part(
        "u, v = torch._foreach_mul([self.p{n}, self.q{n}], 2.0)\nx = x * u + v",
        f"{_VECTOR}\nself.q{{n}} = nn.Parameter(torch.ones({{d}}))",
    ),
    # writing
    "in place": Part("x = self.l{n}(x)\nx += self.p{n}\nx[:, :2] *= self.p{n}[:2]", f"{_SQUARE}\n{_VECTOR}"),
    "in place activation": Part("x = F.elu(self.l{n}(x), inplace=True)", _SQUARE),
    "shifted": Part("z = torch.zeros_like(x)\nz[:, 1:] = x[:, :-1]\nz[:, 0] = self.p{n}[0]\nx = z", _VECTOR),
    "accumulated": Part("z = x.new_zeros(len(x), {d})\nz += self.p{n}\nx = x + z", _VECTOR),
    # state
    "counter": Part("self.c{n} += 1", "self.c{n} = 0"),
    "kept": Part("self.c{n} = x.detach()", "self.c{n} = None"),
    "auxiliary loss": Part("self.c{n} = x.square().mean()", "self.c{n} = torch.zeros(())"),
    "cache": Part(
        "if len(x) not in self.c{n}:\n    self.c{n}[len(x)] = torch.arange({d}) / {d}\nx = x + self.c{n}[len(x)]",
        "self.c{n} = dict()",
    ),
    "moving average": Part(
        "if self.training:\n    with torch.no_grad():\n        self.e{n}.mul_(0.9).add_(0.1 * x.mean(0))\nx = x - self.e{n}",
        _EMA,
    ),
    "assigned average": Part(
        "if self.training:\n    self.e{n} = 0.9 * self.e{n} + 0.1 * x.detach().mean(0)\nx = x - self.e{n}", _EMA
    ),
    "mask": Part(
        "x = x.masked_fill(self.k{n}, 0.1)",
        "self.register_buffer('k{n}', torch.arange({d}) % 2 == 1, persistent=False)",
    ),
    "history": Part(
        "self.c{n}.append(x.detach().mean())\nx = x + sum(self.c{n}) / len(self.c{n})",
        "self.c{n} = collections.deque(maxlen=3)",
    ),
    "filled and cleared": Part(
        "self.c{n}.append(self.l{n}(x))\nx = x + torch.stack(self.c{n}).mean(0)\nself.c{n}.clear()",
        f"{_SQUARE}\nself.c{{n}} = []",
    ),
    "set and deleted": Part("self.c{n} = self.l{n}(x)\nx = x + self.c{n}\ndel self.c{n}", _SQUARE),
    "object": Part(
        "self.c{n}.values.append(len(self.c{n}.values))\nx = x * self.c{n}.factor * self.p{n}",
        f"{_VECTOR}\nself.c{{n}} = types.SimpleNamespace(factor=2.0, values=[])",
    ),
    "object with a lock": Part(
        "x = x * self.c{n}[0].factor",
        "self.t{n} = types.SimpleNamespace(factor=0.5, lock=threading.Lock())\nself.c{n} = [self.t{n}]",
    ),
    "sparse buffer": Part(
        "x = torch.sparse.mm(self.e{n}.to(x.dtype), x.T).T",
        "self.register_buffer('e{n}', (torch.eye({d}) + torch.ones({d}, {d}).triu(1)).to_sparse())",
    ),
    # control flow and gradients
    "branch": Part("x = self.l{n}(x) if x[0, 0] > 0 else self.l{n}(-x).tanh()", _SQUARE),
    "iteration": Part(
        "for _ in range(5):\n    x = 0.5 * x + self.l{n}(x).tanh()\n    if x.abs().max() < 1:\n        break", _SQUARE
    ),
    "without gradient": Part("with torch.no_grad():\n    t = self.l{n}(x)\nx = x + t", _SQUARE),
    "detached": Part("x = x + self.l{n}(x.detach())", _SQUARE),
    "frozen": Part("x = self.l{n}(x)", f"{_SQUARE}\nself.l{{n}}.requires_grad_(False)"),
    "straight through": Part("x = Round.apply(4 * self.l{n}(x)) / 4 + x", _SQUARE),
    "recomputed": Part("x = checkpoint(self.l{n}, x, use_reentrant=False)", _SQUARE),
    "energy": Part(
        "with torch.enable_grad():\n    z = x.detach().requires_grad_()\n"
        "    g, = torch.autograd.grad(self.l{n}(z).tanh().sum(), z, create_graph=self.training)\nx = x + g",
        _SQUARE,
    ),
    "functional call": Part(
        "x = torch.func.functional_call(self.l{n}, dict(weight=0.5 * self.l{n}.weight), (x,))", _SQUARE
    ),
    "derivative": Part("x = torch.func.jvp(lambda z: (z * self.p{n}).tanh(), (x,), (torch.ones_like(x),))[1]", _VECTOR),
    "forward hook": Part(
        "x = self.l{n}(x)", f"{_SQUARE}\nself.l{{n}}.register_forward_hook(lambda m, args, y: 2 * y + args[0])"
    ),
    "pre-hook": Part(
        "x = self.l{n}(x)",
        f"{_SQUARE}\n{_VECTOR}\nself.l{{n}}.register_forward_pre_hook(lambda m, args: (args[0] * self.p{{n}},))",
    ),
    "vmap": Part("x = torch.vmap(lambda row: row * self.p{n} + row.sum())(x)", _VECTOR),
    # numbers
    "activation": Part("x = F.gelu(x) + x.sin()"),
    "where": Part("x = torch.where(x > 0, x, self.p{n} * x)", _VECTOR),
    "gate": Part("a, b = x.chunk(2, dim=1)\nx = torch.cat([a * b.sigmoid(), b], 1)", even=True),
    "regrouped": Part("x = x.view(-1, 2, {h}).transpose(1, 2).reshape(-1, {d})", even=True),
    "sorted": Part("x = x.sort(1).values"),
    "largest": Part("x = x.topk(4, 1).values", width=4),
    "cumulated": Part("x = x.cumsum(1).roll(1, 1).flip(1)"),
    "spectrum": Part("x = torch.fft.fft(x).abs()"),
    "centred": Part("x = x - x.mean(0)"),
    "rows attend": Part("x = (x @ x.T).softmax(1) @ x"),
    "python number": Part("x = x / (1 + float(x.detach().abs().mean()))"),
    "numpy": Part("x = x + torch.from_numpy(np.sign(x.detach().numpy()))"),
}


def source(seed: int, length: int) -> tuple[list[str], str]:
    """Return the names of the parts of a random model, and its source."""
    draws, width = random.Random(seed), WIDTH
    names, init, forward = [], [], []
    for number in range(length):
        name = draws.choice([name for name, part in PARTS.items() if width % 2 == 0 or not part.even])
        part = PARTS[name]
        values = {"n": number, "d": width, "h": width // 2}
        names.append(name)
        init += part.init.format(**values).splitlines()
        forward += part.forward.format(**values).splitlines()
        width = part.width or width
    init.append(f"self.last = nn.Linear({width}, {OUTPUTS})")
    body = [f"        {line}" for line in init] + ["", "    def forward(self, x):"]
    body += [f"        {line}" for line in [*forward, "return self.last(x)"]]
    return names, _HEAD + "\n".join(body) + "\n"


def random_case(seed: int, length: int, folder: Path) -> Case:
    """Return a random model as a case of the zoo; its program is written into a folder."""
    names, text = source(seed, length)
    path = folder / f"random_model_{seed}_{length}.py"
    path.write_text(text, encoding="utf-8")
    spec: Any = importlib.util.spec_from_file_location(path.stem, path)
    sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def build() -> Any:
        with seeded(seed):
            return module.Net()

    def inputs(seed: int = 0, rows: int = 6) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)),), {}

    return Case(", ".join(names), build, inputs, frozenset())


def check(case: Case, wrapper: str) -> None:
    """Compare prediction, risks, gradients and buffers of a wrapped model with those of plain copies."""
    check_evaluation(case, conformance_table.WRAPPERS[wrapper])
    if wrapper in TRAINED:
        check_training(case, conformance_table.WRAPPERS[wrapper])


def outcome(seed: int, length: int, wrapper: str, folder: Path) -> tuple[str, str]:
    """Return how a random model ended under a wrapper ("ok", "wrong" or "raw"), with the error or difference as one line."""
    case = random_case(seed, length, folder)
    where = f"{wrapper} of model {seed} ({case.name})"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check(case, wrapper)
    except AssertionError as error:
        return "wrong", f"{where}: {error}"[:400]
    except Exception as error:  # none of these models is to be refused
        return "raw", f"{where}: {type(error).__name__}: {error}"[:400]
    finally:
        del sys.modules[case.build().__class__.__module__]
    return "ok", where
