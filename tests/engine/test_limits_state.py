"""Models with state and side effects, and inputs that they change or that can be read once: right, or refused.

The models of the first part are those of the tutorial on the limitations of Pax.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.reference_from_copies import ROWS, VOTERS, WRAPPERS, Net, asked, close, expected, inputs, seeded
from torch import Tensor, nn

import workbench
from workbench import sample, sculpt, vote

STRATEGIES = ("loop", "vmap", "auto")


# ---- unregistered tensors ------------------------------------------------------------------------------------------


class M1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.a: Any = [torch.tensor(0.0), torch.tensor(1)]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + self.a[1]


class WritesUnregistered(M1):
    def forward(self, x: Tensor) -> Tensor:
        self.a[0] += 1
        return self.fc(x) * self.a[0]


class WritesAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.count = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        self.count.add_(1)
        return y * self.count


class FixedM1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.count: Tensor
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.fc(x) * self.count


# noise on the only layer's input: not drawn here
ONE_LAYER = [kind for kind in WRAPPERS if kind != "sample_activations"]


def wrapped_as(kind: str, strategy: str, model: nn.Module) -> Any:
    with warnings.catch_warnings(), seeded(1):
        warnings.simplefilter("ignore", workbench.WorkbenchWarning)  # unregistered tensors are told, see below
        return WRAPPERS[kind](strategy, 0.0)(model)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ONE_LAYER)
@pytest.mark.parametrize("cls", [M1, WritesUnregistered, WritesAttribute, FixedM1])
def test_tensors_that_a_model_holds_are_right_registered_or_not(cls: type, kind: str, strategy: str) -> None:
    plain = cls().eval()
    wrapped = wrapped_as(kind, strategy, copy.deepcopy(plain))
    for _ in range(3):
        answer = asked(wrapped, (inputs(),))
        close(answer, expected(kind, plain, wrapped_before(wrapped, plain), (inputs(),)))
        plain(inputs())  # as if called once
    assert torch.equal(held(wrapped), held(plain))


def held(model: Any) -> Tensor:
    return model.a[0] if isinstance(model, M1) else model.count


def wrapped_before(wrapped: Any, plain: nn.Module) -> Any:
    """The wrapped model with the buffers that it had before its last call, which are those of the plain one."""
    before = copy.deepcopy(wrapped)
    for name, buffer in plain.named_buffers():
        for held, value in before.named_buffers():
            if held.split("@")[0] == name:
                value.copy_(buffer.expand_as(value))
    return before


@pytest.mark.parametrize("kind", [*WRAPPERS, "neo"])
def test_unregistered_tensors_are_named_at_wrap_time(kind: str) -> None:
    wrapper = workbench.neo.Wrapper() if kind == "neo" else WRAPPERS[kind]("auto", 0.0)
    with pytest.warns(workbench.WorkbenchWarning, match=r"a\[0\].*register_buffer"):
        wrapper(M1())


def test_registered_tensors_are_not_told() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vote.Wrapper()(FixedM1())


# ---- immutability in the forward pass ------------------------------------------------------------------------------


class M2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.info = 0

    def forward(self, x: Tensor) -> Tensor:
        self.info = self.info + 1
        return self.fc(x)


class M3(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.info = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.info.append(0)
        return self.fc(x)


IMPURE = {"M2": (M2, "info: 0 -> 1"), "M3": (M3, "info: [0] -> [0, 0]")}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("name", IMPURE)
def test_attributes_end_as_if_called_once(name: str, kind: str, strategy: str) -> None:
    plain = IMPURE[name][0]()
    wrapped = wrapped_as(kind, strategy, copy.deepcopy(plain))
    for _ in range(3):
        asked(wrapped, (inputs(),))
        plain(inputs())
        assert wrapped.info == plain.info


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("build", [vote.Wrapper, sample.Wrapper, sculpt.Wrapper, workbench.neo.Wrapper])
@pytest.mark.parametrize("name", IMPURE)
def test_purity_raise_shows_what_changed_before_and_after(name: str, build: Any, training: bool) -> None:
    cls, difference = IMPURE[name]
    wrapped: Any = build(purity="raise")(cls()).train(training)
    for _ in range(2):  # and nothing has changed by then
        with pytest.raises(workbench.PurityError) as caught:
            wrapped(inputs())
        assert difference in str(caught.value)
        assert cls.__name__ in str(caught.value)
        assert wrapped.info == cls().info


@pytest.mark.parametrize("name", IMPURE)
def test_purity_warn_tells_once_and_goes_on(name: str) -> None:
    cls, difference = IMPURE[name]
    wrapped: Any = vote.Wrapper(VOTERS, purity="warn")(cls()).eval()
    with pytest.warns(workbench.WorkbenchWarning) as told:
        _ = [wrapped(inputs()) for _ in range(3)]
    assert len(told) == 1
    assert difference in str(told[0].message)
    plain = cls()
    for _ in range(3):
        plain(inputs())
    assert wrapped.info == plain.info


@pytest.mark.parametrize("name", IMPURE)
def test_purity_allow_lets_every_pass_change_it(name: str) -> None:
    wrapped: Any = vote.Wrapper(VOTERS, purity="allow")(IMPURE[name][0]()).eval()
    wrapped(inputs())
    assert wrapped.info in (VOTERS, [0] * (1 + VOTERS))


def test_purity_is_one_of_four() -> None:
    with pytest.raises(ValueError, match=r"purity must be one of .*once"):
        vote.Wrapper(purity="always")


# ---- what a pure model is not told ---------------------------------------------------------------------------------


def test_pure_models_pass_under_purity_raise() -> None:
    # statistics are no impurity
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    wrapped: Any = vote.Wrapper(2, purity="raise")(plain)
    for training in (True, False):
        assert wrapped.train(training)(inputs()).shape == (ROWS, 1)


# ---- inputs that are no tensors ------------------------------------------------------------------------------------


class Memory:
    """Such as the cache of a language model."""

    def __init__(self) -> None:
        self.items: list[Tensor] = []


class Remembers(Net):
    def forward(self, x: Tensor, memory: Memory) -> Tensor:  # type: ignore[override]
        h = self.h(x)
        memory.items.append(h.detach())
        return h * len(memory.items)


class PopsArgument(Net):
    def forward(self, x: Tensor, list: list[int]) -> Tensor:  # type: ignore[override]
        list.pop()
        print("hello!")
        return self.h(x) * len(list)


@pytest.mark.parametrize(("strategy", "printed"), [("loop", VOTERS), ("vmap", 1)])
def test_what_is_printed_is_printed_once_a_pass(strategy: str, printed: int, capsys: Any) -> None:
    wrapped: Any = vote.Wrapper(VOTERS, strategy=strategy)(PopsArgument()).eval()
    plain = PopsArgument()
    answer = asked(wrapped, (inputs(), [0, 1, 2, 3]))
    assert capsys.readouterr().out == "hello!\n" * printed
    close(answer, expected("vote", plain, wrapped, (inputs(), [0, 1, 2, 3])))


@pytest.mark.parametrize("strategy", ["loop", "vmap"])
@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_list_that_is_given_is_changed_once(kind: str, strategy: str) -> None:
    wrapped: Any = WRAPPERS[kind](strategy, 0.0)(PopsArgument()).eval()
    lst = [0, 1, 2, 3]
    for left in ([0, 1, 2], [0, 1], [0]):
        asked(wrapped, (inputs(), lst))
        assert lst == left


class FillsDict(Net):
    def forward(self, x: Tensor, counts: dict[str, Any]) -> Tensor:  # type: ignore[override]
        h = self.h(x)
        counts["n"] = counts.get("n", 0) + 1
        return h * counts["n"]


class SumsAll(Net):
    def forward(self, xs: Any) -> Tensor:
        total = torch.zeros(ROWS, 3)
        for x in xs:
            total = total + self.h(x)
        return total


@pytest.mark.parametrize("strategy", ["loop", "auto"])
@pytest.mark.parametrize("kind", WRAPPERS)
def test_an_object_that_is_given_is_changed_once(kind: str, strategy: str) -> None:
    plain = Remembers()
    wrapped = wrapped_as(kind, strategy, copy.deepcopy(plain))
    memory, like = Memory(), Memory()
    for _ in range(2):
        args = (inputs(), copy.deepcopy(memory))
        close(asked(wrapped, (inputs(), memory)), expected(kind, plain, wrapped, args))
        plain(inputs(), like)
        assert len(memory.items) == len(like.items)
        assert all(torch.tensor(item.tolist()).isfinite().all() for item in memory.items)


def test_an_object_that_keeps_tensors_of_one_pass_for_all_is_refused() -> None:
    wrapped = wrapped_as("vote", "vmap", Remembers())
    with pytest.raises(RuntimeError, match=r'(?s)Remembers.*strategy="loop"'):
        wrapped.eval()(inputs(), Memory())


def test_an_object_of_a_call_with_other_branches_is_refused() -> None:
    """What the risk head would have in its place was never made."""
    wrapped, memory = wrapped_as("sculpt", "auto", Remembers()).eval(), Memory()
    wrapped(inputs(), memory)
    wrapped(inputs(), memory)
    with pytest.raises(RuntimeError, match="comes from a call with other branches"):
        wrapped(inputs(), memory, return_risk=True)
    wrapped(inputs(), Memory(), return_risk=True)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_dict_that_is_given_is_changed_once(kind: str, strategy: str) -> None:
    plain = FillsDict()
    wrapped = wrapped_as(kind, strategy, copy.deepcopy(plain))
    counts: dict[str, Any] = {}
    for calls in (1, 2):
        args = (inputs(), dict(counts))
        close(asked(wrapped, (inputs(), counts)), expected(kind, plain, wrapped, args))
        assert counts == {"n": calls}


@pytest.mark.parametrize("make", [iter, lambda xs: (x for x in xs), lambda xs: map(torch.clone, xs)])
@pytest.mark.parametrize("kind", WRAPPERS)
def test_an_iterator_is_read_by_every_pass_or_refused_with_a_remedy(kind: str, make: Callable[[Any], Any]) -> None:
    plain = SumsAll()
    wrapped = wrapped_as(kind, "loop", copy.deepcopy(plain))
    xs = [inputs(1), inputs(2)]
    close(asked(wrapped, (xs,)), expected(kind, plain, wrapped, (xs,)))
    with pytest.raises(TypeError, match=r"read only once.*list\("):
        asked(wrapped, (make(xs),))


class ReturnsFloat(Net):
    def forward(self, x: Tensor) -> Any:
        h = self.h(x)
        return h, h.mean().item()


class Yields(Net):
    def forward(self, x: Tensor) -> Any:
        yield self.h(x)


def test_a_number_that_differs_between_the_branches_is_refused() -> None:
    wrapped: Any = vote.Wrapper(VOTERS)(ReturnsFloat()).eval()
    with pytest.raises(
        TypeError, match=r"output\[1\] is .* in one branch and .*; return it as a tensor, or leave it out"
    ):
        wrapped(inputs())


class YieldsBeside(Net):
    def steps(self, x: Tensor) -> Any:
        yield self.h(x)

    def forward(self, x: Tensor) -> Any:
        return {"y": self.h(x), "steps": self.steps(x)}


@pytest.mark.parametrize("voters", [VOTERS, 5])  # one pass each, and one for all
@pytest.mark.parametrize("build", [Yields, YieldsBeside])
def test_a_forward_that_yields_is_refused(build: Any, voters: int) -> None:
    wrapped: Any = vote.Wrapper(voters)(build()).eval()
    with pytest.raises(TypeError, match="read only after its branch has ended"):
        wrapped(inputs())
