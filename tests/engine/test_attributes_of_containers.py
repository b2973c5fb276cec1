"""Dicts and dataclasses whose attributes hold tensors as well, as outputs and as inputs: each attribute is of the same call as the items."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import sample, vote
from workbench.engine.tree import flatten, names
from workbench.errors import NonTensorOutputError


class AttributeDict(dict):
    """A dict whose items are its attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


class KeepsBoth(dict):
    """A dict with attributes for its items that setting an item does not change."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__.update(items)


class Noting(dict):
    """A dict with an attribute that is no item."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.note = 2 * items["mean"]


@dataclasses.dataclass
class Cached:
    mean: Tensor

    @functools.cached_property
    def note(self) -> Tensor:
        return 2 * self.mean


@dataclasses.dataclass
class Prepared:
    mean: Tensor

    def __post_init__(self) -> None:
        self.note = 2 * self.mean
        self.parts = [self.mean, self.note]


class Gives(nn.Module):
    """Returns what `make` makes of its answer, and reads `read` of that once."""

    def __init__(self, make: Callable[..., Any], read: str = "mean") -> None:
        super().__init__()
        self.layer, self.make, self.read = nn.Linear(4, 2), make, read

    def forward(self, x: Tensor) -> Any:
        output = self.make(mean=self.layer(x))
        getattr(output, self.read)
        return output


class Takes(nn.Module):
    """Answers from one attribute of its input."""

    def __init__(self, read: str) -> None:
        super().__init__()
        self.layer, self.read = nn.Linear(4, 2), read

    def forward(self, batch: Any) -> Tensor:
        return self.layer(getattr(batch, self.read))


KINDS = [
    (AttributeDict, "mean"),
    (KeepsBoth, "mean"),
    (Noting, "note"),
    (Cached, "note"),
    (Prepared, "note"),
]


@pytest.mark.parametrize(("make", "read"), KINDS)
def test_attributes_of_an_output_are_those_of_the_mean(make: Any, read: str) -> None:
    wrapped: Any = vote.Wrapper(3)(Gives(make, read)).eval()
    x = torch.randn(8, 4)
    expected = torch.stack([getattr(voter(x), read) for voter in wrapped.voters()])
    for _ in range(3):
        y, risk = wrapped(x, return_risk=True)
        assert type(y) is make
        torch.testing.assert_close(getattr(y, read), expected.mean(0))
        torch.testing.assert_close(getattr(risk, read), expected.std(0, correction=0))


def test_lists_in_attributes_are_values_too() -> None:
    wrapped: Any = vote.Wrapper(3)(Gives(Prepared)).eval()
    y = wrapped(torch.randn(8, 4))
    torch.testing.assert_close(y.parts, [y.mean, 2 * y.mean])


@pytest.mark.parametrize(("make", "read"), KINDS)
def test_rows_are_dealt_in_attributes_of_an_input(make: Any, read: str) -> None:
    wrapped: Any = vote.Wrapper(3)(Takes(read)).train()
    batch = make(mean=torch.randn(9, 4))
    answers = torch.stack([voter(batch) for voter in wrapped.voters()])
    y = wrapped(batch)
    assert torch.isclose(y, answers).all(2).any(0).all()
    assert not torch.allclose(y, answers.mean(0))


@pytest.mark.parametrize(("make", "read"), KINDS)
def test_noise_on_inputs_reaches_their_attributes(make: Any, read: str) -> None:
    wrapped: Any = sample.Wrapper(8, where="inputs")(Takes(read)).eval()
    _, risk = wrapped(make(mean=torch.randn(9, 4)), return_risk=True)
    assert bool((risk > 0).all())


def test_attributes_are_named_once_and_only_if_they_hold_tensors_of_their_own() -> None:
    x = torch.zeros(2)
    prepared = Prepared(x)
    vars(prepared).update(again=x, text="none", circle=[prepared])
    assert names(prepared) == ["mean", "note", "parts.0", "parts.1"]
    assert names(AttributeDict(mean=x)) == names(KeepsBoth(mean=x)) == names(Cached(x)) == ["mean"]


def test_mappings_that_nobody_can_copy_are_dicts_of_the_mean() -> None:
    wrapped: Any = vote.Wrapper(3)(Gives(lambda **items: types.MappingProxyType(items), "keys")).eval()
    x = torch.randn(8, 4)
    expected = torch.stack([voter(x)["mean"] for voter in wrapped.voters()])
    y, risk = wrapped(x, return_risk=True)
    torch.testing.assert_close(dict(y), {"mean": expected.mean(0)})
    torch.testing.assert_close(dict(risk), {"mean": expected.std(0, correction=0)})


def test_distributions_that_do_not_tell_all_of_their_parameters_are_refused() -> None:
    def relaxed(mean: Tensor) -> Any:
        return torch.distributions.RelaxedBernoulli(torch.tensor(0.5), logits=mean)

    assert len(flatten(relaxed(torch.zeros(2)))[0]) == 1
    with pytest.raises(NonTensorOutputError, match="RelaxedBernoulli whose tensors differ"):
        vote.Wrapper(3)(Gives(relaxed, "logits")).eval()(torch.randn(8, 4))
