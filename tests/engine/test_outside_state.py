"""State that a model keeps outside its modules and goes on from in the next call: an attempt in one pass leaves nothing there."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from helpers.reference_from_copies import Net, seeded
from torch import Tensor, nn

from workbench import WorkbenchWarning, vote
from workbench.engine.effects import outside


class Ledger:
    running: Tensor


MEANS: dict[str, Tensor] = {}
HISTORY: list[Tensor] = []
LEDGER = Ledger()


class InGlobalDict(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.h(x)
        MEANS["running"] = 0.9 * MEANS["running"] + h.mean()
        return h - MEANS["running"]


class InGlobalList(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.h(x)
        HISTORY[0] = 0.9 * HISTORY[0] + h.mean()
        return h - HISTORY[0]


class InObject(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.h(x)
        LEDGER.running = 0.9 * LEDGER.running + h.mean()
        return h - LEDGER.running


class InSortedRows(InGlobalDict):
    """Sorts its rows, so that further passes look whether all copies sort them alike."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[(x[:, 0] + 0 * self.h(x)[:, 0]).argsort()]


def in_class() -> Net:
    class InClass(Net):
        running = torch.tensor(0.5)

        def forward(self, x: Tensor) -> Tensor:
            h = self.h(x)
            type(self).running = 0.9 * self.running + h.mean()
            return h - self.running

    return InClass()


class Neuron(nn.Module):
    """Adds up its inputs; a class attribute lists all neurons, of which copies are not part."""

    every: ClassVar[list[Neuron]] = []

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("charge", torch.zeros(()))
        self.every.append(self)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.charge


class InListedModules(Net):
    """Changes all neurons, also those of the model that it was copied from, before it does what vmap refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.neuron = Neuron()

    def forward(self, x: Tensor) -> Tensor:
        h = self.neuron(self.h(x))
        for neuron in Neuron.every:
            neuron.charge = 0.9 * neuron.charge + h.mean()
        return h * float(h.detach().sum() * 0 + 2)


BUILD: dict[str, Callable[[], Net]] = {
    "a global dict": InGlobalDict,
    "a global list": InGlobalList,
    "a global object": InObject,
    "a global dict, with sorted rows": InSortedRows,
    "a class": in_class,
    "listed modules": InListedModules,
}


def renew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a test holders of its own: referrers of objects that conftest.py has frozen cannot be looked up."""
    start, ledger = torch.tensor(0.5), Ledger()
    ledger.running = start
    for name, holder in {"MEANS": {"running": start}, "HISTORY": [start], "LEDGER": ledger}.items():
        monkeypatch.setitem(globals(), name, holder)
    monkeypatch.setattr(Neuron, "every", [])


def built(name: str) -> Net:
    with seeded(0):
        return BUILD[name]().eval()


@pytest.mark.parametrize("strategy", ["auto", "loop", "tune"])
@pytest.mark.parametrize("name", BUILD)
def test_state_outside_goes_on_from_copy_to_copy(name: str, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    calls, answers = [torch.randn(2, 3, generator=generator) for _ in range(3)], []
    for plainly in (True, False):
        monkeypatch.undo()
        renew(monkeypatch)
        with torch.no_grad(), seeded(0):
            wrapped: Any = vote.Wrapper(4, strategy=strategy)(built(name))
            voters = wrapped.voters()
            for x in calls:
                answers.append(torch.stack([model(x) for model in voters]).mean(0) if plainly else wrapped(x))
    torch.testing.assert_close(answers[3:], answers[:3])
    assert strategy != "auto" or re.search("loop, 4 passes, .* refused the model", str(wrapped.explain()))


@pytest.mark.parametrize("name", BUILD)
def test_a_refused_pass_for_all_branches_leaves_a_plain_model_that_can_be_called(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = []
    for refuses in (False, True):
        monkeypatch.undo()
        renew(monkeypatch)
        model = built(name)
        wrapped: Any = vote.Wrapper(4, strategy="vmap")(model)
        if refuses:
            with pytest.raises(RuntimeError, match='strategy="vmap" is not possible'):
                wrapped(torch.ones(2, 3))
        answers.append(model(torch.ones(2, 3)))
    torch.testing.assert_close(*answers)


class Counter(nn.Module):
    """Counts its calls; `reset` clears the counts of all counters, which the class lists."""

    every: ClassVar[list[Counter]] = []

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.every.append(self)

    @classmethod
    def reset(cls) -> None:
        for counter in cls.every:
            counter.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


def test_modules_that_a_class_lists_are_told_and_the_remedy_works() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Counter())
    with pytest.warns(WorkbenchWarning, match=r"Counter\.every lists modules of Sequential \(1\).* model\.modules\(\)"):
        wrapped: Any = vote.Wrapper(2)(model).eval()
    with torch.no_grad():
        first = wrapped(torch.ones(2, 3))
        Counter.reset()
        assert not torch.equal(wrapped(torch.ones(2, 3)), first)
        for module in wrapped.modules():
            if isinstance(module, Counter):
                module.calls = 0
        torch.testing.assert_close(wrapped(torch.ones(2, 3)), first)


class Attention(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.h(x)[None]
        return nn.functional.scaled_dot_product_attention(h, h, h)[0]


def test_tensors_that_the_engine_makes_of_the_models_own_are_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look-up takes tens of milliseconds, which each attention of a large model would pay in a first call."""
    looked_up: list[Tensor] = []
    monkeypatch.setattr(outside, "gc", SimpleNamespace(get_referrers=lambda tensor: looked_up.append(tensor) or []))
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), seeded(0):
        wrapped: Any = vote.Wrapper(4, strategy="rescue")(Attention()).eval()
        torch.testing.assert_close(wrapped(x), torch.stack([model(x) for model in wrapped.voters()]).mean(0))
    assert looked_up == []
