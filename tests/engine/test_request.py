"""Requests to executors: how inputs are taken apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from workbench.engine.effects.inputs import InputEffects
from workbench.engine.plan import Bank, Plan
from workbench.engine.request import Request
from workbench.engine.tree import flatten

X, Y = torch.zeros(2, 3), torch.ones(4)
INPUTS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "one tensor": ((X,), {}),
    "tensors by place and name": ((X, Y), {"b": Y, "a": X}),
    "tensors by name": ((), {"mask": Y, "x": X}),
    "nothing": ((), {}),
    "others": ((X, 2, [Y, {"deep": X}]), {"flag": True, "none": None}),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_are_taken_apart_and_put_together_as_trees_are(name: str) -> None:
    args, kwargs = INPUTS[name]
    clones: Any = None
    leaves, rebuild = Request(Plan((), {}, Bank(lambda _: X)), args, kwargs, clones, InputEffects()).flat
    expected, rebuild_tree = flatten((args, kwargs))
    assert all(leaf is other for leaf, other in zip(leaves, expected, strict=True))
    numbers = list(range(len(leaves)))
    assert rebuild(numbers) == rebuild_tree(numbers)
    assert list(rebuild(numbers)[1]) == list(kwargs)
    if kwargs:
        assert rebuild(leaves)[1] is not kwargs
