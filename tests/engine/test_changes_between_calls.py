"""Changes that users make between calls, in place and not through `__setattr__`, take effect in the next call."""

import collections
import functools
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from workbench import PurityError, compose, neo, sample, sculpt, vote

SCALE = 1.0
SCALES = [1.0]
X = torch.ones(3, 4)


class Held:
    """A plain object that a model may hold."""

    def __init__(self):
        self.k, self.inner = 1.0, types.SimpleNamespace(v=[1.0])

    def __call__(self):
        return self.k

    def value(self):
        return self.k * self.inner.v[0]


class Slotted:
    __slots__ = ("k",)

    def __init__(self):
        self.k = 1.0


class Scaled(nn.Module):
    """A model whose prediction is proportional to what it reads from `held`."""

    def __init__(self, held, read):
        super().__init__()
        self.fc, self.held, self.read = nn.Linear(4, 1), held, read

    def forward(self, x):
        return self.fc(x) * self.read(self.held)


CASES = {
    "list": (lambda: [1.0], lambda q: q[0], lambda q: q.__setitem__(0, 3.0)),
    "nested": (
        lambda: {"a": [{"b": [[[1.0]]]}]},
        lambda q: q["a"][0]["b"][0][0][0],
        lambda q: q["a"][0]["b"][0][0].__setitem__(0, 3.0),
    ),
    "key": (lambda: {"a": None}, lambda q: 3.0 if "b" in q else 1.0, lambda q: (q.pop("a"), q.update(b=None))),
    "deque": (lambda: collections.deque([1.0]), lambda q: q[-1], lambda q: q.append(3.0)),
    "set": (lambda: {1.0}, max, lambda q: q.add(3.0)),
    "bytes": (lambda: bytearray([1]), lambda q: q[0], lambda q: q.__setitem__(0, 3)),
    "user_dict": (lambda: collections.UserDict(a=1.0), lambda q: q["a"], lambda q: q.update(a=3.0)),
    "object": (Held, lambda q: q.k, lambda q: setattr(q, "k", 3.0)),
    "inside_an_object": (Held, lambda q: q.inner.v[0], lambda q: q.inner.v.__setitem__(0, 3.0)),
    "callable": (Held, lambda q: q(), lambda q: setattr(q, "k", 3.0)),
    "method": (lambda: Held().value, lambda q: q(), lambda q: setattr(q.__self__, "k", 3.0)),
    "slots": (Slotted, lambda q: q.k, lambda q: setattr(q, "k", 3.0)),
    "partial": (
        lambda: functools.partial(lambda v: v[0], [1.0]),
        lambda q: q(),
        lambda q: q.args[0].__setitem__(0, 3.0),
    ),
    "array": (lambda: np.ones(3), lambda q: float(q[0]), lambda q: q.__setitem__(0, 3.0)),
    "large_array": (lambda: np.ones(2**18), lambda q: float(q[5]), lambda q: q.__setitem__(5, 3.0)),
    "array_in_a_list": (lambda: [np.ones(3)], lambda q: float(q[0][1]), lambda q: q[0].__setitem__(1, 3.0)),
    "tensor": (lambda: torch.ones(()), lambda q: q, lambda q: q.fill_(3.0)),
    "tensor_in_a_list": (lambda: [torch.ones(())], lambda q: q[0], lambda q: q[0].fill_(3.0)),
    "other_tensor": (lambda: [torch.ones(())], lambda q: q[0], lambda q: q.__setitem__(0, torch.tensor(3.0))),
}
WRAPPERS = {
    "auto": vote.Wrapper(5),
    "loop": vote.Wrapper(2, strategy="loop"),
    "vmap": vote.Wrapper(2, strategy="vmap"),
    "trunk": vote.Wrapper(2, share=1),
    "replay": vote.Wrapper(2, share=1, strategy="replay"),
    "heads": sculpt.Wrapper(n_layers=1),
    "noise": compose(vote.Wrapper(2), sample.Wrapper(2, randomness="same")),
}


def tripled(wrapped, change):
    """Whether a prediction is three times what it was before a change."""
    with torch.no_grad():
        for _ in range(2):
            torch.manual_seed(0)
            before = wrapped(X)
        change()
        torch.manual_seed(0)
        return torch.allclose(wrapped(X), 3 * before)


@pytest.mark.filterwarnings("ignore:Scaled holds tensors")
@pytest.mark.parametrize("case", CASES)
def test_what_the_model_holds(case):
    make, read, change = CASES[case]
    wrapped = vote.Wrapper(2)(Scaled(make(), read)).eval()
    assert tripled(wrapped, lambda: change(wrapped.held))


@pytest.mark.parametrize("name", WRAPPERS)
def test_every_rung_and_wrapper(name):
    wrapped = WRAPPERS[name](Scaled([1.0], lambda q: q[0])).eval()
    assert tripled(wrapped, lambda: wrapped.held.__setitem__(0, 3.0))


def test_a_global_a_closure_and_a_helper(monkeypatch):
    inside, outside = [1.0], 1.0

    def change(value):
        nonlocal outside
        outside = value

    global_variable = vote.Wrapper(2)(Scaled(None, lambda q: SCALE)).eval()
    assert tripled(global_variable, lambda: monkeypatch.setattr(f"{__name__}.SCALE", 3.0))
    global_list = vote.Wrapper(2)(Scaled(None, lambda q: SCALES[0])).eval()
    assert tripled(global_list, lambda: monkeypatch.setitem(globals(), "SCALES", [3.0]))
    closure = vote.Wrapper(2)(Scaled(None, lambda q: inside[0] * outside)).eval()
    assert tripled(closure, lambda: change(3.0))
    assert tripled(closure, lambda: inside.__setitem__(0, 3.0))
    method = vote.Wrapper(2)(Scaled(Held(), lambda q: q.value())).eval()
    assert tripled(method, lambda: monkeypatch.setattr(Held, "value", lambda self: 3.0))


def test_a_decorated_function():
    layer, settings = nn.Linear(4, 1), {"k": 1.0}
    settings["layer"] = layer

    @vote.Wrapper(2)
    def predict(x, scales=[1.0]):  # noqa: B006
        return settings["layer"](x) * settings["k"] * scales[0]

    assert tripled(predict.eval(), lambda: settings.update(k=3.0))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.held = nn.Linear(4, 1), {"calls": 0, "scales": [[[[1.0]]]]}

    def forward(self, x):
        self.held["calls"] += 1
        return self.fc(x) * self.held["scales"][0][0][0][0]


def test_what_forward_changes_as_well():
    wrapped = vote.Wrapper(3)(Counting()).eval()
    assert tripled(wrapped, lambda: wrapped.held["scales"][0][0][0].__setitem__(0, 3.0))
    assert wrapped.held["calls"] == 3


def test_the_part_of_a_model_and_its_mode():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Scaled([1.0], lambda q: q[0])

        def forward(self, x):
            return self.inner(x) * (3.0 if self.inner.fc.training else 1.0)

    wrapped = vote.Wrapper(2)(Outer()).eval()
    assert tripled(wrapped, lambda: wrapped.inner.held.__setitem__(0, 3.0))
    assert tripled(wrapped, wrapped.inner.fc.train)


def test_clones_are_kept_while_nothing_changes():
    from workbench.core.ownership import engine_of

    wrapped = vote.Wrapper(2)(Scaled({"a": [np.ones(3), Held(), Slotted()]}, lambda q: q["a"][1].k)).eval()
    wrapped(X)
    clones = engine_of(wrapped).clones.existing()
    wrapped(X)
    assert all(a is b for a, b in zip(clones, engine_of(wrapped).clones.existing(), strict=True))


def test_the_objects_of_the_given_model_are_its_own():
    """A wrapped object has copies of what the given model holds beside its tensors."""
    model = Scaled([1.0], lambda q: q[0])
    wrapped = vote.Wrapper(2)(model).eval()
    wrapped.held[0] = 3.0
    assert model.held == [1.0]


@pytest.mark.parametrize("kind", ["forward", "full_backward", "full_backward_pre"])
@pytest.mark.parametrize("options", [{}, {"share": 1}, {"strategy": "vmap"}])
def test_hooks_that_are_added_between_calls_run_in_every_branch_or_vmap_is_refused(options: Any, kind: str) -> None:
    hooks = {
        "forward": lambda module, inputs, output: 0 * output,
        "full_backward": lambda module, gradients, outputs: tuple(0 * gradient for gradient in gradients),
        "full_backward_pre": lambda module, outputs: tuple(0 * gradient for gradient in outputs),
    }
    wrapped = vote.Wrapper(3, **options)(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    x = torch.randn(6, 3)
    for _ in range(3):
        wrapped(x, tile_and_reduce=True)
    getattr(wrapped[1], f"register_{kind}_hook")(hooks[kind])
    if "strategy" in options:
        with pytest.raises(ValueError, match="has hooks, which would get tensors that stand for all branches"):
            wrapped(x, tile_and_reduce=True)
        return
    wrapped(x, tile_and_reduce=True).sum().backward()
    trunk = [parameter for name, parameter in wrapped.named_parameters() if name.startswith("0.")]
    assert all(not parameter.grad.any() for parameter in trunk)  # no hook lets a gradient through


class Aliased(nn.Module):
    """Holds a weight and running statistics under second names, past the registration of parameters."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.seen = self.norm.running_mean
        self.__dict__["raw"] = self.fc.weight

    def forward(self, x):
        return self.fc(self.norm(x)) + self.raw.sum() + self.seen.mean()


@pytest.mark.parametrize("strategy", ["loop", "vmap", "auto"])
@pytest.mark.parametrize("training", [False, True])
def test_tensors_of_branches_under_a_second_name(training, strategy):
    torch.manual_seed(0)
    wrapped, x = vote.Wrapper(3, strategy=strategy)(Aliased()).train(training), torch.randn(6, 4) + 2

    def check():
        copies = []
        for voter in wrapped.voters():
            copies.append(Aliased().train(training))
            copies[-1].load_state_dict(voter.state_dict())
        answers = torch.stack([copy(x) for copy in copies])
        y, risk = wrapped(x, return_risk=True)
        torch.testing.assert_close(y, answers.mean(0))
        torch.testing.assert_close(risk, answers.std(0, correction=0))
        y.sum().backward()
        answers.mean(0).sum().backward()
        sums = torch.stack([copy.fc.weight.grad.sum() for copy in copies])
        torch.testing.assert_close(wrapped.get_parameter("fc.weight@vote").grad.flatten(1).sum(1), sums)

    for change in (
        lambda: None,
        lambda: [parameter.data.mul_(1.5) for parameter in wrapped.parameters()],
        lambda: wrapped.load_state_dict(vote.Wrapper(3)(Aliased()).state_dict()),
    ):
        change()
        wrapped.zero_grad()
        check()


class Keeps(nn.Module):
    """Keeps what an argument or a flag asks for, as attention does with its weights."""

    def __init__(self):
        super().__init__()
        self.fc, self.head, self.asked, self.steps = nn.Linear(4, 3), nn.Linear(3, 1), False, []

    def forward(self, x, keep=False):
        h = torch.tanh(self.fc(x))
        if keep or self.asked:
            self.mean, self.hidden = h.mean(), h
            self.steps.append(len(x))
        return self.head(h)


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Keeps()

    def forward(self, x, **options):
        return self.part(x, **options)


@pytest.mark.parametrize("by", ["argument", "flag", "argument of a part"])
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize(
    "wrapper",
    [
        vote.Wrapper(3),
        vote.Wrapper(3, strategy="loop"),
        vote.Wrapper(3, share=1),
        vote.Wrapper(3, share="rank1"),
        sculpt.Wrapper(),
        sample.Wrapper(3),
        neo.Wrapper(),
        compose(vote.Wrapper(3), sculpt.Wrapper()),
    ],
)
def test_what_a_later_call_keeps_for_the_first_time(wrapper, gradients, by):
    def part_of(model):
        return model.part if by.endswith("part") else model

    torch.manual_seed(0)
    x = torch.randn(5, 4)
    wrapped = wrapper(Around() if by.endswith("part") else Keeps()).eval()
    part, options = part_of(wrapped), {} if by == "flag" else {"keep": True}
    voters = [part_of(voter) for voter in wrapped.voters()]
    with torch.set_grad_enabled(gradients):
        for _ in range(3):
            wrapped(x)
        assert not hasattr(part, "hidden")
        part.asked = by == "flag"
        for step in range(1, 4):
            wrapped(x + step, **options)
            assert part.steps == [5] * step
            hidden = torch.stack([torch.tanh(voter.fc(x + step)) for voter in voters])
            if "sample" not in wrapped.methods:
                torch.testing.assert_close(part.hidden, hidden[0])
                torch.testing.assert_close(part.mean, hidden.mean() if gradients else hidden[0].mean())
        assert part.mean.requires_grad == gradients


def test_what_a_later_call_changes_is_refused_where_nothing_may_change():
    wrapped = vote.Wrapper(3, purity="raise")(Keeps()).eval()
    wrapped(X)
    with pytest.raises(PurityError, match="steps"):
        wrapped(X, keep=True)
    assert wrapped.steps == []
