"""Tensors that a model holds without registering them are named in a warning when it is wrapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.troubled_models import Base, x
from torch import Tensor, nn

from workbench import WorkbenchWarning, neo, sample, sculpt, vote
from workbench.introspect.unregistered import unregistered

MAKERS: dict[str, Callable[[], Any]] = {
    "vote": lambda: vote.Wrapper(3),
    "sample": lambda: sample.Wrapper(3),
    "sculpt": lambda: sculpt.Wrapper(),
    "neo": lambda: neo.Wrapper(),
}


def names(model: nn.Module) -> list[tuple[str, bool]]:
    return [(each.name, each.requires_grad) for each in unregistered(model)]


class M1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.a = [torch.tensor(0.0), torch.tensor(1)]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.a[0]


def test_tensors_in_lists_are_named_when_they_are_wrapped() -> None:
    assert names(M1()) == [("a[0]", False), ("a[1]", False)]
    for make in MAKERS.values():
        with pytest.warns(WorkbenchWarning, match=r"M1 holds tensors \(a\[0\], a\[1\]\), which are neither") as caught:
            make()(M1())
        assert [each.filename for each in caught] == [__file__]
    with pytest.warns(WorkbenchWarning, match="M1 holds tensors") as caught:
        twice = sculpt.Wrapper()(vote.Wrapper(2)(M1()))
    assert len(caught) == 1
    assert twice(torch.zeros(4, 1)).shape == (4, 1)


def test_tensors_to_be_trained_have_a_warning_of_their_own() -> None:
    class Trained(M1):
        def __init__(self) -> None:
            super().__init__()
            self.a = {"w": nn.Parameter(torch.ones(2)), "b": (torch.ones(1, requires_grad=True),)}  # type: ignore[assignment]

    assert names(Trained()) == [("a['w']", True), ("a['b'][0]", True)]
    with pytest.warns(WorkbenchWarning, match=r"wrapped\.parameters\(\) does not train them"):
        vote.Wrapper(2)(nn.Sequential(Trained()))
    assert names(nn.Sequential(Trained()))[0] == ("0.a['w']", True)
    with pytest.warns(WorkbenchWarning, match=r"a\['w'\]"):
        vote.Wrapper(2)(Decorated := type("Decorated", (Trained,), {}))()
    assert issubclass(Decorated, Trained)


def test_what_is_registered_somewhere_is_not_named() -> None:
    class Fine(Base):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(4))
            self.alias, self.again = self.a.weight, [self.mask, self.b.bias]
            self.row = self.a.weight.data[0]
            self.rnn = nn.LSTM(2, 2)
            self.old = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
            self.count, self.text, self.array = 3, "name", np.zeros(2)

    assert names(Fine()) == []
    del (fine := Fine()).row  # a view of the given weight, which vote replaces
    assert names(vote.Wrapper(2)(fine)) == []
    assert names(vote.Wrapper(2, share="rank1")(fine)) == []


def test_what_forward_leaves_behind_is_not_named() -> None:
    class Leaves(Base):
        def __init__(self) -> None:
            super().__init__()
            self.last = torch.zeros(2)
            self.seen: list[Tensor] = []
            self.cache: dict[int, Tensor] = {}

        def keep(self, h: Tensor) -> None:
            self.cache[h.shape[0]] = h

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x).detach()
            self.last = h
            self.seen.append(h)
            self.keep(h)
            return super().forward(x)

    model = Leaves()
    assert names(model) == []
    model(x())
    assert names(model) == []
    graph = Base()
    graph.kept = graph(x())  # type: ignore[assignment]
    assert names(graph) == []
    graph.kept = graph.kept.detach()
    assert names(graph) == [("kept", False)]


def test_what_was_computed_once_and_is_read_is_named() -> None:
    """Voters would share it, and training would move a weight of the given model."""

    class Computed(Base):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))
            self.double, self.unused, self.later = self.scale * 2, self.scale * 3, self.scale * 4

        def forward(self, x: Tensor) -> Tensor:
            self.later = self.scale * 4
            return super().forward(x) * self.double.sum() + self.later.sum()

    assert names(Computed()) == [("double", True)]
    with pytest.warns(
        WorkbenchWarning, match=r"Computed holds tensors \(double\), .* compute them in forward"
    ) as caught:
        vote.Wrapper(2)(Computed())
    assert len(caught) == 1


def test_what_forward_only_reads_or_writes_in_place_is_named() -> None:
    class Bank(Base):
        def __init__(self) -> None:
            super().__init__()
            self.bank, self.table = torch.zeros(4), [torch.ones(4)]

        def forward(self, x: Tensor) -> Tensor:
            h = {}
            h["x"] = self.table[0]
            self.bank[0] = 1
            return super().forward(x) + h["x"].sum()

    assert names(Bank()) == [("bank", False), ("table[0]", False)]


def test_objects_of_other_classes_hold_their_own_constants() -> None:
    model = Base()
    model.prior = torch.distributions.Normal(torch.zeros(2), torch.ones(2))  # type: ignore[assignment]
    assert names(model) == []
    model.prior = torch.distributions.Normal(torch.zeros(2, requires_grad=True), torch.ones(2))  # type: ignore[assignment]
    assert names(model) == [("prior.loc", True)]
