"""Objects are traversed in one place: containers, closures, partial functions, bound methods and attributes."""

from __future__ import annotations

import functools
import random
from collections import OrderedDict, deque, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from workbench.introspect.objects import access_code, attributes, parts, tensors_and_generators
from workbench.introspect.source_lines import is_installed, is_user_class, is_user_code
from workbench.introspect.unregistered import unregistered

Pair = namedtuple("Pair", ["first", "second"])


class Holder:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def method(self) -> None:
        pass


def closure(value: Any) -> Any:
    return lambda: value


@pytest.mark.parametrize(
    ("holder", "steps"),
    [
        ({"a": 1, 2: 3}, ["['a']", "[2]"]),
        (OrderedDict(a=1), ["['a']"]),
        ([4, 5], ["[0]", "[1]"]),
        (deque([4]), ["[0]"]),
        (Pair(1, 2), [".first", ".second"]),
        ({7}, ["{...}"]),
        (functools.partial(print, 1, end=""), [".func", ".args", ".keywords"]),
        (Holder(a=1).method, [".__self__"]),
        (closure(3), [": value"]),
        (Holder(a=1), [".a"]),
        (3, []),
    ],
)
def test_parts_and_how_they_are_written(holder: Any, steps: list[str]) -> None:
    assert [access_code(holder, key) for key, _ in parts(holder)] == steps


def test_a_variable_that_is_not_set_yet_is_left_out() -> None:
    def function() -> Any:
        return later

    assert list(parts(function)) == []
    later = 3
    assert list(parts(function)) == [("later", 3)]


def test_tensors_and_generators_in_whatever_depth() -> None:
    layer = nn.Linear(2, 1)
    tensor, generator = torch.zeros(2), torch.Generator()
    deep = Holder(items=[{"a": (tensor, functools.partial(print, generator))}], again=tensor, layer=layer)
    deep.itself = deep  # type: ignore[attr-defined]
    leaves = tensors_and_generators([deep, closure(torch.ones(1)), random.Random(0), np.random.default_rng(0), torch])
    expected = {id(tensor), id(generator), id(layer.weight), id(layer.bias)}
    assert expected < {id(leaf) for leaf in leaves}
    assert len(leaves) == len({id(leaf) for leaf in leaves}) == 6


def test_attributes_of_a_module_include_slots() -> None:
    class Slotted(nn.Linear):
        __slots__ = ("temperature", "unset")

    module = Slotted(2, 1)
    module.temperature = 3.0  # type: ignore[misc]
    names = dict(attributes(module))
    assert names["temperature"] == 3.0
    assert names["in_features"] == 2
    assert not {"weight", "_parameters", "unset"} & names.keys()


def test_unregistered_tensors_in_partial_functions_and_closures() -> None:
    model = nn.Linear(1, 1)
    model.scale = functools.partial(closure(torch.ones(1)), torch.ones(2), by=torch.ones(3))  # type: ignore[assignment]
    names = [entry.name for entry in unregistered(model)]
    assert names == ["scale.func: value", "scale.args[0]", "scale.keywords['by']"]


def test_two_questions_about_a_file() -> None:
    files = {
        __file__: (True, False),
        np.__file__: (False, True),
        torch.__file__: (False, True),
        pytest.__file__: (True, True),  # messages may name its lines, but its globals hold no models of the user
        random.__file__: (False, True),
        "<string>": (False, False),  # no line to show, but globals to follow
        "<stdin>": (True, False),
    }
    assert {file: (is_user_code(file), is_installed(file)) for file in files} == files
    assert is_user_class(Holder)
    assert not is_user_class(nn.Linear)
    assert is_installed(None)
