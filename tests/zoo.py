"""A zoo of awkward models: one table of everything that PyTorch users do and that wrappers trip over.

Each `Case` builds a small model, draws inputs for it and states facts about it as tags. `test_zoo.py` checks every fact
in both directions, so a test can rely on a tag as much as on its absence.

Example:
    >>> case = CASES["cnn_bn"]
    >>> args, kwargs = case.inputs(seed=0, rows=6)
    >>> case.build()(*args, **kwargs).shape
    torch.Size([6, 2])
    >>> "cnn_bn" in [c.name for c in cases("buffers")]
    False
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, rnn

Inputs = Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]
T = TypeVar("T", bound=Callable[..., Any])

TAGS = {
    "function": "build() gives a function that closes over modules, not a module",
    "scripted": "a ScriptModule",
    "compiled": "made by torch.compile",
    "checkpoint": "recomputes activations in the backward pass",
    "float64": "parameters and inputs are float64",
    "stochastic_train": "draws random numbers in train mode",
    "batch_mixing": "a row of the output depends on other rows, in eval mode too",
    "batch_mixing_train": "a row of the output depends on other rows in train mode only",
    "not_dealable": "some tensor of the inputs or of the output has no leading axis of rows",
    "no_grad_params": "a backward pass leaves at least one parameter without gradient",
    "buffers": "a forward pass in train mode changes registered buffers",
    "mutates_attribute": "a forward pass changes attributes that are neither parameters nor buffers",
    "mutates_input": "a forward pass writes into its input",
    "writes_global": "a forward pass writes a module global",
    "structured_output": "the output is a tree, not one tensor",
    "integer_output": "a leaf of the output is an integer tensor",
    "non_tensor_output": "a leaf of the output is no tensor",
    "captures_self": "a closure on the instance refers to the instance, so a copy still calls the original",
    "not_copyable": "copy.deepcopy fails, or its copy does not run",
    "name_clash": "has attributes of its own that are named like those of a wrapped model",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """An awkward model.

    Args:
        name: Key in `CASES`.
        build: Builds the model in train mode, with the same parameters at every call; the global RNG stays untouched.
        inputs: `inputs(seed=0, rows=6)` draws `(args, kwargs)` for one call.
        tags: Facts about the model, keys of `TAGS`.
    """

    name: str
    build: Callable[[], Callable[..., Any]]
    inputs: Inputs
    tags: frozenset[str]


CASES: dict[str, Case] = {}


def cases(*exclude_tags: str) -> list[Case]:
    """The cases that bear none of the given tags."""
    if unknown := set(exclude_tags) - set(TAGS):
        raise ValueError(f"unknown tags {sorted(unknown)}; the tags are {sorted(TAGS)}")
    return [case for case in CASES.values() if case.tags.isdisjoint(exclude_tags)]


def leaves(output: Any, path: str = "") -> list[tuple[str, Any]]:
    """All leaves of a tree of dicts, lists, tuples and dataclasses with their paths, such as "heads.0.mean"."""
    if isinstance(output, dict):
        children = list(output.items())
    elif isinstance(output, tuple) and hasattr(output, "_fields"):
        children = list(zip(output._fields, output, strict=True))
    elif isinstance(output, (list, tuple)):
        children = list(enumerate(output))
    elif dataclasses.is_dataclass(output):
        children = [(field.name, getattr(output, field.name)) for field in dataclasses.fields(output)]
    else:
        return [(path, output)]
    return [leaf for key, child in children for leaf in leaves(child, f"{path}.{key}" if path else str(key))]


def float_leaves(output: Any) -> list[tuple[str, Tensor]]:
    """The leaves that are floating-point tensors."""
    return [(path, leaf) for path, leaf in leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def modules(model: Callable[..., Any]) -> list[nn.Module]:
    """The model itself, or the modules that a function closes over."""
    if isinstance(model, nn.Module):
        return [model]
    return [value for value in inspect.getclosurevars(model).nonlocals.values() if isinstance(value, nn.Module)]


def normal(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Inputs:
    """Inputs of standard normal tensors [rows, *shape]."""

    def inputs(seed: int = 0, rows: int = 6) -> tuple[tuple[Any, ...], dict[str, Any]]:
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randn(rows, *shape, generator=generator, dtype=dtype) for shape in shapes), {}

    return inputs


def tokens(seed: int = 0, rows: int = 6) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs of one tensor of token ids below 10, int64 [rows, 4]."""
    return (torch.randint(10, (rows, 4), generator=torch.Generator().manual_seed(seed)),), {}


TABLE, SEQUENCE, IMAGE = normal((5,)), normal((4, 8)), normal((1, 8, 8))


def case(name: str, *tags: str, inputs: Inputs = TABLE) -> Callable[[T], T]:
    """Register a class or factory that takes no arguments as a case."""

    def register(factory: T) -> T:
        def build() -> Callable[..., Any]:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(0)  # torch.manual_seed would reseed CUDA, which is not forked
                return factory()

        CASES[name] = Case(name, build, inputs, frozenset(tags))
        return factory

    return register


class Base(nn.Module):
    """Three linear layers [rows, 5] -> [rows, 2]; most cases differ only in what they do with them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def trunk(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(torch.tanh(self.a(x))))

    def forward(self, x: Tensor) -> Any:
        return self.c(self.trunk(x))


# ---- plain stacks of layers -----------------------------------------------------------------------------------------


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


# ---- architectures --------------------------------------------------------------------------------------------------


@case("res_inplace")
class ResInplace(Base):
    def forward(self, x: Tensor) -> Tensor:
        skip = self.a(x)
        h = self.b(F.relu(skip))
        h += skip
        return self.c(F.relu_(h))


@case("unet", inputs=IMAGE)
class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.up = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.down(x))
        h = F.relu(self.middle(F.max_pool2d(skip, 2)))
        return self.up(torch.cat([skip, F.interpolate(h, scale_factor=2.0)], dim=1))


@case("lstm", inputs=SEQUENCE)
class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def padded(seed: int = 0, rows: int = 6) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (x,), _ = SEQUENCE(seed, rows)
    return (x, torch.randint(1, 5, (rows,), generator=torch.Generator().manual_seed(seed))), {}


@case("packed_seq", inputs=padded)
class PackedSeq(Lstm):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        packed = rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(self.rnn(packed)[1][0][-1])


def timefirst(seed: int = 0, rows: int = 6) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (SEQUENCE(seed, rows)[0][0].transpose(0, 1).contiguous(),), {}


@case("grucell_timefirst", "not_dealable", inputs=timefirst)
class GruCellTimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[1], 8, dtype=x.dtype, device=x.device)
        for step in x:
            h = self.cell(step, h)
        return self.head(h)


@case("transformer", inputs=SEQUENCE)
class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


@case("mha_module", "structured_output", inputs=SEQUENCE)
class MhaModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, weights = self.attention(x, x, x)
        return self.head(h), weights


@case("sdpa", inputs=SEQUENCE)
class Sdpa(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out, self.qkv = nn.Linear(8, 2), nn.Linear(8, 24)  # registered in the reverse of their execution order

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def graph(seed: int = 0, rows: int = 6) -> tuple[tuple[Any, ...], dict[str, Any]]:
    node = torch.arange(rows)
    ring = torch.stack([torch.cat([node, node]), torch.cat([(node + 1) % rows, (node - 1) % rows])])
    return TABLE(seed, rows)[0], {"edge_index": ring}


@case("gnn_scatter", "batch_mixing", "not_dealable", inputs=graph)
class GnnScatter(Base):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:  # type: ignore[override]
        h = torch.tanh(self.a(x))
        source, target = edge_index
        return self.c(torch.tanh(h + torch.zeros_like(h).index_add_(0, target, self.b(h)[source])))


@case("moe_topk")
class MoeTopK(Base):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.trunk(x)
        weights, chosen = self.gate(h).softmax(-1).topk(2)
        out = self.c(h)
        for index, expert in enumerate(self.experts):
            rows, slot = torch.where(chosen == index)
            out = out.index_add(0, rows, weights[rows, slot, None] * expert(h[rows]))
        return out


# ---- control flow and values that depend on the data ----------------------------------------------------------------


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


# ---- parameters that are used in unusual ways -----------------------------------------------------------------------


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


class Quantise(torch.autograd.Function):
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
        return self.c(Quantise.apply(self.trunk(x)))


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


# ---- writes in place, state and side effects ------------------------------------------------------------------------


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


# ---- inputs and outputs ---------------------------------------------------------------------------------------------


@case("two_inputs", inputs=normal((5,), (8,)))
class TwoInputs(Base):
    def forward(self, x: Tensor, z: Tensor) -> Tensor:  # type: ignore[override]
        return self.c(self.trunk(x) * z)


@case("kwargs_tensor", inputs=lambda seed=0, rows=6: (TABLE(seed, rows)[0], {"mask": normal((8,))(seed, rows)[0][0]}))
class KwargsTensor(Base):
    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:  # type: ignore[override]
        return self.c(self.trunk(x) * (mask > 0))


@case("kwargs_nontensor", inputs=lambda seed=0, rows=6: (TABLE(seed, rows)[0], {"scale": 2.0, "activation": "relu"}))
class KwargsNonTensor(Base):
    def forward(self, x: Tensor, *, scale: float = 1.0, activation: str = "tanh") -> Tensor:
        return self.c(getattr(torch, activation)(self.trunk(x) * scale))


@case("dict_out", "structured_output")
class DictOut(Base):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.trunk(x)
        return {"logits": self.c(h), "hidden": h}


@case("tuple_out", "structured_output")
class TupleOut(Base):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x)
        return self.c(h), h


class Moments(NamedTuple):
    mean: Tensor
    scale: Tensor


@case("namedtuple_out", "structured_output")
class NamedTupleOut(Base):
    def forward(self, x: Tensor) -> Moments:
        mean, scale = self.c(self.trunk(x)).split(1, dim=1)
        return Moments(mean, F.softplus(scale))


@dataclasses.dataclass(frozen=True)
class Prediction:
    logits: Tensor
    hidden: Tensor


@case("dataclass_out", "structured_output")
class DataclassOut(Base):
    def forward(self, x: Tensor) -> Prediction:
        h = self.trunk(x)
        return Prediction(self.c(h), h)


@dataclasses.dataclass
class ModelOutput(OrderedDict[str, Tensor]):
    """Behaves like the outputs of transformers: a dataclass that is also a dict, without the fields that are None."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden: Tensor | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if (value := getattr(self, field.name)) is not None:
                super().__setitem__(field.name, value)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]

    def __setitem__(self, key: str, value: Tensor) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


@case("hf_dataclass", "structured_output")
class HfDataclass(Base):
    def forward(self, x: Tensor) -> ModelOutput:
        h = self.trunk(x)
        return ModelOutput(logits=self.c(h), hidden=h)


@case("nested_out", "structured_output", "non_tensor_output")
class NestedOut(Base):
    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.trunk(x)
        return {"heads": (self.c(h), [h, len(self.c.bias)]), "aux": None, "kind": "regression"}


@case("int_and_float_out", "structured_output", "integer_output")
class IntAndFloatOut(Base):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.c(self.trunk(x))
        return logits, logits.argmax(-1)


@case("scalar_output", "batch_mixing", "not_dealable")
class ScalarOutput(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.trunk(x)).square().mean()


# ---- Python: attributes, classes, hooks and functions ---------------------------------------------------------------


@case("lambda_attr", "captures_self")
class LambdaAttr(Base):
    def __init__(self) -> None:
        super().__init__()
        self.act = lambda x: torch.tanh(self.b(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.act(self.a(x)))


@case("partial_attr")
class PartialAttr(Base):
    def __init__(self) -> None:
        super().__init__()
        self.scaled = functools.partial(self.head, self.c, scale=2.0)

    @staticmethod
    def head(layer: nn.Module, x: Tensor, scale: float) -> Tensor:
        return layer(x) * scale

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.trunk(x))


@case("partial_weight")
class PartialWeight(Base):
    def __init__(self) -> None:
        super().__init__()
        self.head = functools.partial(F.linear, weight=self.c.weight, bias=self.c.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))


@case("bound_method_attr")
class BoundMethodAttr(Base):
    def __init__(self) -> None:
        super().__init__()
        self.encode = self.trunk

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.encode(x))


@case("plain_list_of_modules")
class PlainListOfModules(Base):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [self.a, self.b]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.c(x)


def double_input(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(2 * x for x in args)


def add_one(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output + 1


@case("hooks_user")
def hooks_user() -> nn.Module:
    model = Base()
    model.b.register_forward_pre_hook(double_input)
    model.c.register_forward_hook(add_one)
    return model


@case("hooks_root")
def hooks_root() -> nn.Module:
    model = Base()
    model.register_forward_pre_hook(double_input)
    model.register_forward_hook(add_one)
    return model


class Registered(Base):
    registry: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, *, key: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Registered.registry[key] = cls


@case("custom_init_subclass")
class CustomInitSubclass(Registered, key="custom"):
    """A subclass of this class must name its key, or Python refuses to create it."""


@case("init_with_args_class")
def init_with_args() -> nn.Module:
    return InitWithArgs(5, hidden=8, out=2)


class InitWithArgs(nn.Module):
    def __init__(self, features: int, *, hidden: int, out: int) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(features, hidden), nn.Linear(hidden, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.a(x)))


@case("slots_bare", "not_copyable")
class SlotsBare(Base):
    __slots__ = ("temperature",)

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.trunk(x)) * self.temperature


@case("slots_and_property")
class SlotsAndProperty(SlotsBare):
    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "temperature": self.temperature}  # nn.Module leaves out what is held in slots

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        temperature = state.pop("temperature")
        super().__setstate__(state)
        self.temperature = temperature

    @property
    def norm(self) -> Tensor:
        return self.b.weight.norm()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.norm


@case("other_methods")
class OtherMethods(Base):
    def helper(self, x: Tensor) -> Tensor:
        return self.c(self.trunk(x)) * 5

    def add_3_and_call(self, x: Tensor) -> Tensor:
        return self.forward(x + 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.helper(x)


@case("name_clash", "name_clash")
class NameClash(Base):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.voters = nn.Linear(8, 8), 7

    def loss(self, h: Tensor) -> Tensor:
        return h.square().mean(1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.base(self.trunk(x)) / self.voters
        return self.c(h) - self.loss(h)


@case("getattr_override")
class GetattrOverride(nn.Module):
    """Attributes that it lacks are those of the net inside, as in many adapters and compilers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Base()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("net"), name)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.trunk(x))


@case("closure", "function")
def closure() -> Callable[[Tensor], Tensor]:
    net, scale = Base(), 2.0

    def predict(x: Tensor) -> Tensor:
        return torch.tanh(net(x)) * scale

    return predict


@case("closure_two", "function")
def closure_two() -> Callable[[Tensor], Tensor]:
    encoder, decoder = nn.Linear(5, 8), nn.Linear(8, 2)
    return lambda x: decoder(torch.relu(encoder(x)))
