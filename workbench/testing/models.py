"""Plain models of the zoo in other precisions and modes, their tensors, and comparisons of their outputs."""

from __future__ import annotations

import inspect
import random
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..engine.tree import is_float, tree_map
from .zoo import Case, leaves, modules

ROWS = 6  # no other axis of an input of the zoo has this length
Tree = dict[str, Any]  # path of a leaf -> leaf


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Seed the generators of torch, numpy and Python, and restore their states afterwards."""
    numpy_state, python_state = np.random.get_state(), random.getstate()  # noqa: NPY002 - models draw from the global state
    # CUDA is not initialized just to seed it: without initialization nothing is drawn there
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(numpy_state)  # noqa: NPY002
            random.setstate(python_state)


def rng_states() -> dict[str, Any]:
    """Return the states of all global generators."""
    numpy_state: Any = np.random.get_state()  # noqa: NPY002
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": (numpy_state[1].tobytes(), numpy_state[2:]),
        "Python": random.getstate(),
    }


# ---- models and inputs
def parts(model: Any) -> dict[str, nn.Module]:
    """Return the modules of a model by the prefix of their tensors' names in a wrapped one."""
    if isinstance(model, nn.Module):
        return {"": getattr(model, "_orig_mod", model) if isinstance(model, torch._dynamo.OptimizedModule) else model}
    variables = inspect.getclosurevars(model).nonlocals
    return {f"{name}.": module for name, module in variables.items() if isinstance(module, nn.Module)}


def parameters(model: Any) -> dict[str, nn.Parameter]:
    """Return the parameters of a model by their names in a wrapped one."""
    return {prefix + name: p for prefix, module in parts(model).items() for name, p in module.named_parameters()}


def buffers(model: Any) -> dict[str, Tensor]:
    """Return the buffers of a model by their names in a wrapped one."""
    return {prefix + name: b for prefix, module in parts(model).items() for name, b in module.named_buffers()}


def state(model: Any) -> dict[str, Tensor]:
    """Return the state_dict of a model, as a wrapped one loads it."""
    if isinstance(model, nn.Module):
        return model.state_dict()
    return {prefix + name: t for prefix, module in parts(model).items() for name, t in module.state_dict().items()}


def build(case: Case, dtype: torch.dtype = torch.float64, training: bool = False) -> Any:
    """Return the plain model of a case in a given precision and mode; complex tensors stay complex."""
    with seeded():  # so that a user's case has the same parameters at every call
        model = case.build()
    for module in parts(model).values():
        if dtype not in {p.dtype for p in module.parameters()}:
            module._apply(lambda t: t.to(dtype) if t.is_floating_point() else t)
    for module in modules(model):
        module.train(training)
    return model


def inputs(case: Case, dtype: torch.dtype = torch.float64, rows: int = ROWS, seed: int = 0) -> Any:
    """Return inputs (args, kwargs) in a given precision, new tensors at every call."""
    return tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf,
        case.inputs(seed, rows),
    )


def call(model: Any, arguments: Any, seed: int = 0) -> Any:
    """Return the output of a plain or a wrapped model, without gradients."""
    args, kwargs = arguments
    with seeded(seed), torch.no_grad():
        return model(*args, **kwargs)


def total(*trees: Any) -> Tensor:
    """Return the sum of all floating-point and complex leaves."""
    numbers = [leaf for tree in trees for _, leaf in leaves(tree) if is_float(leaf)]
    return torch.stack([(leaf.real + leaf.imag if leaf.is_complex() else leaf).sum() for leaf in numbers]).sum()


# ---- comparisons
def close(actual: Tensor, expected: Tensor, what: str, tolerance: float = 1e-9) -> None:
    """Assert that two tensors are equal up to a tolerance, relative and absolute."""
    torch.testing.assert_close(
        actual, expected, rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}", check_dtype=False
    )


def majority(value: Tensor, answers: list[Tensor], what: str) -> None:
    """Assert that each integer is one of those that most branches gave."""
    stack = torch.stack(answers)
    counts = (stack[:, None] == stack[None]).sum(1)
    votes = (stack == value).sum(0)
    assert torch.equal(votes, counts.max(0).values), f"{what}: {value.tolist()} is not the majority of {stack.tolist()}"


def assert_tree(output: Any, like: Any, expected: Tree, what: str, tolerance: float = 1e-9) -> None:
    """Assert structure and values of a prediction or of a risk.

    Args:
        output: the tree to check.
        like: an output of the plain model.
        expected: the numbers of each leaf by path; for integers and leaves that are no tensors, a list of the outputs of all branches.
        what: description for the error message.
        tolerance: relative and absolute.
    """
    assert_structure(output, like, what, expected)
    for path, leaf in leaves(output):
        where = f"{what} {path}".strip()
        if path not in expected:
            assert leaf is None, f"{where}: a risk of an output that is no floating-point tensor"
        elif is_float(leaf):
            assert leaf.shape == expected[path].shape, f"{where}: {tuple(leaf.shape)} for {tuple(expected[path].shape)}"
            close(leaf, expected[path], where, tolerance)
        elif isinstance(leaf, Tensor):
            majority(leaf, expected[path], where)
        else:
            assert all(leaf == answer for answer in expected[path]), f"{where}: {leaf!r}, not {expected[path]}"


def assert_structure(output: Any, like: Any, what: str, expected: Container[str] | None = None) -> None:
    """Assert that a tree has the same type and leaves as another, or at least the leaves that are expected."""
    assert type(output) is type(like), f"{what}: {type(output).__name__} instead of {type(like).__name__}"
    actual_paths = [path for path, _ in leaves(output)]
    expected_paths = [path for path, _ in leaves(like) if expected is None or path in expected or path in actual_paths]
    assert actual_paths == expected_paths, f"{what}: leaves {actual_paths} instead of {expected_paths}"


def exactly(output: Any) -> Tree:
    """Return the `expected` argument of `assert_tree` that stands for exactly this output."""
    return {path: leaf if is_float(leaf) else [leaf] for path, leaf in leaves(output)}
