"""Names that code mentions, reads and assigns are read from its bytecode, also in nested and decorated functions."""

from __future__ import annotations

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
