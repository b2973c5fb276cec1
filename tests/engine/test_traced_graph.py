"""Graphs of tensor operations equal the traced function, whatever happens to the memory of its tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.engine.traced_graph import Graph, RefusedError, share_memory

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


def _weights() -> tuple[nn.Parameter, nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return nn.Parameter(torch.randn(3, 4, 4, generator=draw)), nn.Parameter(torch.randn(3, 4, generator=draw))


def _function(weight: Tensor, bias: Tensor) -> Callable[[Tensor], list[Tensor]]:
    """Views of what is held, one behind another, a copy, a permutation that is none, and products by one."""

    def function(x: Tensor) -> list[Tensor]:
        h = torch.bmm(x.expand(3, 5, 4), weight.transpose(1, 2)) + (bias * 1).unsqueeze(1)
        return [h.permute(0, 1, 2).clone().exp(), weight[0].t().diagonal() + x.sum(), x.clone(), weight.transpose(1, 2)]

    return function


def _copy(parameter: nn.Parameter) -> None:
    parameter.data = 2 * parameter.data


def _other_sight(parameter: nn.Parameter) -> None:
    """Another part of the same memory."""
    parameter.data = torch.cat([parameter.data, 3 * parameter.data])[len(parameter) :]


def _resized(parameter: nn.Parameter) -> None:
    """Memory that is given back, and had anew."""
    values, storage = parameter.detach().clone(), parameter.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    parameter.data.copy_(4 * values)


CHANGES: dict[str, Callable[[nn.Parameter], object]] = {
    "in place": lambda parameter: parameter.data.mul_(2),
    "numpy": lambda parameter: parameter.detach().numpy().__imul__(2),
    "data": _copy,
    "part of other memory": _other_sight,
    "set": lambda parameter: parameter.data.set_(5 * parameter.data),
    "resized": _resized,
}


@torch.no_grad()
@pytest.mark.parametrize("scripted", [True, False])
@pytest.mark.parametrize("name", CHANGES)
def test_views_of_what_is_held_follow_it(name: str, scripted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not scripted:  # TorchScript's reader of graphs is gone
        monkeypatch.delattr(torch._C, "parse_ir")
    weight, bias = _weights()
    function = _function(weight, bias)
    graph = Graph(function, [weight, bias], [], (X,))
    assert graph.scripted is scripted
    before = weight.data
    for _ in range(2):
        assert all(map(torch.equal, graph.run(X), function(X)))
        CHANGES[name](weight)
        results = graph.run(X)
        assert all(map(torch.equal, results, function(X)))
    weight.data = before  # where it lay at first
    assert all(map(torch.equal, graph.run(2 * X), function(2 * X)))


@torch.no_grad()
def test_outputs_have_memory_of_their_own() -> None:
    weight, bias = _weights()
    graph = Graph(_function(weight, bias), [weight, bias], [], (X,))
    results = graph.run(X)
    assert not share_memory(results, [weight, bias, X])
    first = [result.clone() for result in results]
    for result in results:
        result.zero_()
    assert all(map(torch.equal, graph.run(X), first))


def test_gradients_stay_out_of_it() -> None:
    weight, bias = _weights()
    with torch.no_grad():
        graph = Graph(_function(weight, bias), [weight, bias], [], (X,))
    assert not any(result.requires_grad for result in graph.run(X))
    weight.sum().backward()
    with torch.no_grad():
        weight.sub_(weight.grad)
        assert all(map(torch.equal, graph.run(X), _function(weight, bias)(X)))


@torch.no_grad()
def test_numbers_that_no_input_decides_may_be_read() -> None:
    def function(x: Tensor) -> list[Tensor]:
        rows = torch.arange(5).reshape(5, 1)
        return [x + float(rows[1:].sum()), x.index_select(0, rows.flatten())]

    graph = Graph(function, [], [], (X,))
    assert all(map(torch.equal, graph.run(2 * X), function(2 * X)))


def _filled(x: Tensor) -> list[Tensor]:
    rows = torch.zeros(5)
    rows[1:].copy_(x[1:, 0])
    return [x + float(rows.sum())]


@torch.no_grad()
@pytest.mark.parametrize(
    "function",
    [lambda x: [x + float(x.sum())], _filled, lambda x: [x + float(torch.rand(2).sum())]],
    ids=["batch", "written into", "drawn"],
)
def test_numbers_that_differ_from_run_to_run_may_not(function: Callable[[Tensor], list[Tensor]]) -> None:
    with pytest.raises(RefusedError, match="gives numbers to Python"):
        Graph(function, [], [], (X,))


@torch.no_grad()
def test_constants_are_not_computed_again() -> None:
    """On a GPU each operation takes time, and a copy of numbers from the CPU would wait for it."""
    operations: list[str] = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            operations.append(function.name())
            return function(*args, **(kwargs or {}))

    def function(x: Tensor) -> list[Tensor]:
        order = torch.arange(5, 0, -1) - 1
        scale = torch.full((1,), torch.nan).isnan().float()
        return [x.index_select(0, order) * scale + order[:, None], order]

    graph = Graph(function, [], [], (X,))
    with Noted():
        results = graph.run(2 * X)
    assert all(map(torch.equal, results, function(2 * X)))
    assert not any(word in name for name in operations for word in ("arange", "full", "nan"))
    results[1].zero_()
    assert all(map(torch.equal, graph.run(X), function(X)))


@torch.no_grad()
def test_what_is_set_free_while_a_graph_is_made_is_not_kept() -> None:
    """Recording takes no more memory than the function, and what comes to lie in the same place is something else."""
    freed = []

    def function(x: Tensor) -> list[Tensor]:
        for i in range(50):
            last = x * i
            freed.append(weakref.ref(last))
            x = last + 1
        return [x]

    graph = Graph(function, [], [], (X,))
    assert all(ref() is None for ref in freed)
    assert torch.equal(graph.run(2 * X)[0], function(2 * X)[0])
