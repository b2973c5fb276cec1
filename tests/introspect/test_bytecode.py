"""Names that code mentions, reads and assigns are read from its bytecode, also in nested and decorated functions."""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import vote
from workbench.introspect.bytecode import (
    attributes_assigned,
    attributes_of_self,
    containers_changed,
    globals_assigned,
    globals_read,
    methods_of,
    names_in,
)

_last: Any = None
_limit = 3


def _keep(model: Any, h: Tensor) -> Any:
    global _last
    _last = h

    def inner() -> Any:
        model.state.value = h  # INNER
        model.seen.append(h)
        model.by_size[len(h)] = h
        return model.table[0] + _limit

    model.count = 1
    return inner()


def test_nested_functions_are_read() -> None:
    code = _keep.__code__
    lines, first = inspect.getsourcelines(_keep)
    (inner,) = [first + i for i, line in enumerate(lines) if "# INNER" in line]
    assert dict(globals_assigned(code)) == {"_last": first + 2}
    assert dict(attributes_assigned(code))["value"] == inner
    assert dict(attributes_assigned(code)).keys() == {"value", "count"}
    assert containers_changed(code) == {"seen", "by_size"}
    assert globals_read(code) == ["_limit", "len"]
    assert {"state", "table", "append", "_limit"} <= names_in(code)


def _change(model: Any, k: int, h: Tensor) -> None:
    model.item[k] = model.value
    model.items[k:] = [h]
    model.added[k] += h
    model.added_to_items[k : k + 1] += [h]
    del model.deleted[0]
    model.read[k][0] = model.read_items[k:][0]
    model.item[model.key] = model.other[k]


def test_items_that_are_set_added_to_or_deleted_are_changed() -> None:
    assert containers_changed(_change.__code__) == {"item", "items", "added", "added_to_items", "deleted"}


def _penalties() -> list[Callable[..., Any]]:
    return [
        lambda self: self.layers[0].weight.square(),
        lambda self: self.layers[-1][300].weight,
        lambda self: self.blocks["a"].weight + self.layers[self.k].bias,
    ]


@pytest.mark.parametrize("version", ["this", "3.14"])
def test_items_with_a_constant_key_are_parts_of_a_chain(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def renamed(step: dis.Instruction) -> dis.Instruction:
        """An instruction as Python 3.14 has it."""
        if step.opname == "BINARY_SUBSCR":
            return step._replace(opname="BINARY_OP", argrepr="[]")
        small = step.opname == "LOAD_CONST" and isinstance(step.argval, int) and 0 <= step.argval < 256
        return step._replace(opname="LOAD_SMALL_INT") if small else step

    if version == "3.14":
        instructions = dis.get_instructions
        monkeypatch.setattr(dis, "get_instructions", lambda code: [renamed(step) for step in instructions(code)])
    chains = [attributes_of_self.__wrapped__(function.__code__) for function in _penalties()]  # past the cache
    assert chains == [
        (("layers", "0", "weight", "square"),),
        (("layers", "-1", "300", "weight"),),
        (("blocks", "a", "weight"), ("layers",), ("k",)),
    ]


def _logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    @property
    def width(self) -> int:
        return 3

    @staticmethod
    def double(h: Tensor) -> Tensor:
        return 2 * h


class Decorated(Stateful):
    @functools.cache  # noqa: B019
    def cached(self) -> int:
        return self.width

    @_logged
    def forward(self, x: Tensor) -> Tensor:
        global _last
        _last = self.fc(x)
        return self.double(_last)


class Nested(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        def keep(h: Tensor) -> Tensor:
            global _last
            _last = h
            return h

        return self.double(keep(self.fc(x)))


def test_methods_are_opened_and_those_of_torch_left_out() -> None:
    names = [name for name, _ in methods_of(Decorated)]
    assert sorted(names) == ["__init__", "cached", "double", "forward", "forward", "width"]
    assert all(isinstance(function, types.FunctionType) for _, function in methods_of(Decorated))
    outer, inner = (function for name, function in methods_of(Decorated) if name == "forward")
    assert outer is Decorated.forward
    assert inner is Decorated.forward.__wrapped__  # type: ignore[attr-defined]
    assert list(methods_of(nn.Linear)) == []


@pytest.mark.parametrize("build", [Decorated, Nested])
def test_a_global_that_a_decorated_or_a_nested_function_writes_keeps_vmap_away(build: type) -> None:
    with pytest.raises(ValueError, match="forward writes global variables"):
        vote.Wrapper(16, strategy="vmap")(build()).eval()(torch.ones(1, 3))
    wrapped = vote.Wrapper(16)(build()).eval()
    wrapped(torch.ones(1, 3))
    assert _last.shape == (1, 3)
    assert torch.isfinite(_last).all()  # no dead tensor of a pass over all branches
