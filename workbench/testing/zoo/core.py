"""Cases of the zoo: their class, the table that lists them, and the parts that they are made of."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

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
    "iterator_output": "the output is an iterator, computed only as it is read",
    "captures_self": "a closure on the instance refers to the instance, so a copy still calls the original",
    "not_copyable": "copy.deepcopy fails, or its copy does not run",
    "name_clash": "has attributes of its own that are named like those of a wrapped model",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """An awkward model.

    Args:
        name: key in `CASES`.
        build: builds the model in train mode, with the same parameters at every call; leaves the global RNG untouched.
        inputs: `inputs(seed=0, rows=6)` draws `(args, kwargs)` for one call.
        tags: facts about the model, keys of `TAGS`.
    """

    name: str
    build: Callable[[], Callable[..., Any]]
    inputs: Inputs
    tags: frozenset[str]


CASES: dict[str, Case] = {}


def cases(*exclude_tags: str) -> list[Case]:
    """Return the cases without any of the given tags."""
    if unknown := set(exclude_tags) - set(TAGS):
        raise ValueError(f"unknown tags {sorted(unknown)}; the tags are {sorted(TAGS)}")
    return [case for case in CASES.values() if case.tags.isdisjoint(exclude_tags)]


def leaves(output: Any, path: str = "") -> list[tuple[str, Any]]:
    """Return all leaves of a tree of dicts, lists, tuples and dataclasses, with their paths, such as "heads.0.mean"."""
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
    """Return the leaves that are floating-point tensors, with their paths."""
    return [(path, leaf) for path, leaf in leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def modules(model: Callable[..., Any]) -> list[nn.Module]:
    """Return the model itself, or the modules that a function closes over, as a list."""
    if isinstance(model, nn.Module):
        return [model]
    return [value for value in inspect.getclosurevars(model).nonlocals.values() if isinstance(value, nn.Module)]


def normal(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Inputs:
    """Return a function that draws standard normal inputs [rows, *shape]."""

    def inputs(seed: int = 0, rows: int = 6) -> tuple[tuple[Any, ...], dict[str, Any]]:
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randn(rows, *shape, generator=generator, dtype=dtype) for shape in shapes), {}

    return inputs


def tokens(seed: int = 0, rows: int = 6) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a tensor of token ids below 10, int64 [rows, 4], as inputs."""
    return (torch.randint(10, (rows, 4), generator=torch.Generator().manual_seed(seed)),), {}


TABLE, SEQUENCE, IMAGE = normal((5,)), normal((4, 8)), normal((1, 8, 8))


def case(name: str, *tags: str, inputs: Inputs = TABLE) -> Callable[[T], T]:
    """Register a class or factory without arguments as a case."""

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
