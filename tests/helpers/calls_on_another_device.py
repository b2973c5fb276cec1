"""Calls with model and inputs on a simulated device equal those on the CPU; started by `test_other_device.py`."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F

from helpers import pretend_device
from helpers.conformance_table import is_due
from helpers.device_models import MODELS, WRAPPERS, cnn, criterion_of, leaves, mlp, quiet, trained
from helpers.other_device import DEVICE, answers, by_formula, close, in_order, states_close
from helpers.recorded_calls import calls_of, record_early
from workbench import compose, neo, sample, sculpt, vote
from workbench.core.calls.verdicts import Verdict
from workbench.engine import ladder
from workbench.engine.executors.rescue import DropoutByFormula
from workbench.methods.densities import DENSITIES


@pytest.fixture(autouse=True)
def the_same_start() -> None:
    torch.manual_seed(0)  # seeds the generators of the CPU and of the device


# ---- the device itself
def test_the_device_refuses_what_a_gpu_refuses() -> None:
    x = torch.ones(3)
    y = x.to(DEVICE)
    assert y.device == torch.device(DEVICE, 0)
    for mixed in (lambda: x + y, lambda: y.add_(x), lambda: torch.cat([x, y]), lambda: F.linear(y, x[None])):
        with pytest.raises(RuntimeError, match="same device"):
            mixed()
    assert torch.equal((y + torch.tensor(1.0)).cpu(), x + 1)
    with pytest.raises(TypeError, match="convert"):
        y.numpy()


def test_the_device_counts_waits() -> None:
    x = torch.ones(3)
    y = x.to(DEVICE)
    pretend_device.WAITS.clear()
    y.sum().exp()
    x.to(DEVICE, non_blocking=True)
    assert pretend_device.WAITS == []
    for wait in (y.cpu, y.sum().item, lambda: y[y > 0], lambda: y[torch.tensor([0])], y.nonzero, lambda: x.to(DEVICE)):
        wait()
        assert pretend_device.WAITS, wait
        pretend_device.WAITS.clear()


# ---- calls
# every wrapper on the mlp, which is the cheapest, and on every second other model in rotation; on all models in an exhaustive run
CELLS = [
    (name, model)
    for row, name in enumerate(WRAPPERS)
    for column, model in enumerate(MODELS)
    if model == "mlp" or is_due(row, column, 2)
]


@functools.cache
def learned(name: str, model: str) -> tuple[Any, Tensor, Tensor]:
    with quiet():
        return trained(WRAPPERS[name], model)


def test_samples_are_the_same_with_and_without_a_risk() -> None:
    """Risk heads add a second vmap, under which dropout draws other numbers on a GPU."""
    wrapped = compose(sample.Wrapper(4), sculpt.Wrapper(n_layers=1))(mlp()).to(DEVICE).eval()
    x = torch.randn(5, 4).to(DEVICE)
    wrapped(x, return_risk=True)
    found = []
    for options in ({}, {"return_risk": True}):
        torch.manual_seed(1)
        found.append(wrapped(x, **options))
    torch.testing.assert_close(found[0], found[1][0])


@pytest.mark.parametrize(("name", "model"), CELLS)
def test_answers_losses_and_gradients(name: str, model: str) -> None:
    here, x, y = learned(name, model)
    here = in_order(copy.deepcopy(here)).double()
    there = copy.deepcopy(here).to(DEVICE)
    x, y = x.double(), y.double() if y.is_floating_point() else y
    results: list[Any] = []
    for part, where in ((here, "cpu"), (there, DEVICE)):
        outputs = answers(part.eval(), x.to(where)) + answers(copy.deepcopy(part), x.to(where))
        part.train().zero_grad()
        torch.manual_seed(1)
        if part.methods == ("neo",):
            loss = part(x.to(where), return_risk=True)[1].mean()
        else:
            loss = part.loss(criterion_of(part), x.to(where), y.to(where))
        loss.backward()
        results.append([*outputs, loss.detach(), *(p.grad for p in part.parameters() if p.grad is not None)])
    close(*results, atol=1e-7)  # voters' spread of 1e-16
    states_close(here, there)


@pytest.mark.parametrize(("name", "model"), CELLS)
def test_warm_calls_and_steps_do_not_wait(name: str, model: str) -> None:
    """The network keeps its dropout, and its weights change between the calls."""
    wrapped, x, y = learned(name, model)
    wrapped = copy.deepcopy(wrapped).to(DEVICE)
    x, y = x.to(DEVICE), y.to(DEVICE)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4, fused=True)

    def once() -> Tensor:
        for training in (False, True):
            wrapped.train(training)
            for risk in (False, True):
                wrapped(x, return_risk=risk)
        optimizer.zero_grad()
        risky = wrapped.methods == ("neo",)
        loss = wrapped(x, return_risk=True)[1].mean() if risky else wrapped.loss(criterion_of(wrapped), x, y)
        loss.backward()
        optimizer.step()
        return loss

    with quiet():
        once(), once()
        pretend_device.WAITS.clear()
        loss = once()
    assert pretend_device.WAITS == []
    assert loss.isfinite()


@pytest.mark.parametrize("name", DENSITIES)
def test_signatures_do_not_wait(name: str) -> None:
    with quiet():
        wrapped, x, _ = trained(neo.Wrapper(density=name, output="logits"), "relu mlp", rows=60)
    wrapped.to(DEVICE).eval()
    x = x.to(DEVICE)
    with torch.no_grad():
        wrapped(x, return_risk=True)
        pretend_device.WAITS.clear()
        wrapped(x, return_risk=True)
    assert pretend_device.WAITS == []


@pytest.mark.parametrize("strategy", ["vmap", "loop"])
@pytest.mark.parametrize("name", ["vote", "vote last layer", "vote rank-1", "sample", "sample, weights", "swag"])
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_each_strategy(name: str, model: str, strategy: str) -> None:
    here, x, _ = learned(name, model)
    here = by_formula(copy.deepcopy(here)).eval()
    here._workbench.strategy = strategy
    there = copy.deepcopy(here).to(DEVICE)
    close(answers(here, x), answers(there, x.to(DEVICE)), atol=1e-6)
    states_close(here, there)


@pytest.mark.parametrize(("tf32", "name"), [(False, "_EXACT_CONVOLUTIONS"), (True, "_LOW_CONVOLUTIONS")])
def test_large_convolutions_run_one_by_one(tf32: bool, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(12, 2, 6, 6)
    for limit, rung in ((12 * 36 * 72, "vmap"), (12 * 36 * 72 - 1, "loop")):  # rows, pixels, weights of the kernels
        monkeypatch.setattr(ladder, name, limit)
        wrapped = vote.Wrapper(3)(cnn()).to(DEVICE).eval()
        with torch.backends.cudnn.flags(allow_tf32=tf32), torch.no_grad():
            y = wrapped(x.to(DEVICE))
            answers = torch.stack([voter.cpu()(x) for voter in wrapped.voters()])
        assert f": {rung}, 3 passes" in str(wrapped.explain())
        close(answers.mean(0), y, atol=1e-6)


def test_attention_of_voters_is_one_fused_call() -> None:
    wrapped = vote.Wrapper(3)(MODELS["transformer"][0]()).to(DEVICE).train()
    x, y = torch.randn(6, 5, 4).to(DEVICE), torch.randn(6, 3).to(DEVICE)
    wrapped.loss(F.mse_loss, x, y)
    wrapped.eval()(x)
    said = str(wrapped.explain())
    assert said.count("rescue") == 2, said


def test_dropout_under_two_vmaps_of_which_the_inner_one_draws_the_same_for_all() -> None:
    """torch.native_dropout, which GPUs use for dropout, crashes under these two vmaps."""
    x = torch.ones(50, 20, device=DEVICE)

    def kept(function: Any, outer: Tensor, inner: Tensor) -> Tensor:
        with DropoutByFormula():
            return function(x + outer, 0.25, True) + inner

    zeros = torch.zeros(3, device=DEVICE), torch.zeros(2, device=DEVICE)
    for function in (F.dropout, torch.dropout):
        inside = lambda outer: vmap(lambda inner: kept(function, outer, inner), randomness="same")(zeros[1])  # noqa: B023, E731
        dropped = vmap(inside, randomness="different")(zeros[0]).cpu()
        assert torch.equal(dropped[:, 0], dropped[:, 1])
        assert not torch.equal(dropped[0], dropped[1])
        torch.testing.assert_close(dropped.unique(), torch.tensor([0, 4 / 3]))
        assert 0.7 < (dropped > 0).double().mean() < 0.8


def test_a_network_may_make_tensors_on_the_cpu() -> None:
    class Makes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            shift, moved = torch.zeros(4), torch.zeros_like(x)
            shift[1] = 2.0
            moved[:] = x + shift.to(x.device)
            return self.attention(moved, moved, moved)[0]

    wrapped = vote.Wrapper(3)(Makes()).eval().to(DEVICE)
    x = torch.randn(2, 5, 4, device=DEVICE)
    results = answers(wrapped, x)
    assert "vote: rescue" in str(wrapped.explain())
    wrapped._workbench.strategy = "loop"
    torch.testing.assert_close(results, answers(wrapped, x))


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_model_is_wrapped_copied_and_pickled_where_it_is(name: str) -> None:
    there = WRAPPERS[name](mlp().to(DEVICE))
    here = copy.deepcopy(there).cpu()
    for part in (there, copy.deepcopy(there), pickle.loads(pickle.dumps(here)).to(DEVICE)):
        states_close(here, part)


def test_voters_begin_there_as_on_the_cpu() -> None:
    """The user's next random numbers are unaffected, too."""
    torch.manual_seed(0)
    model, results = mlp(), []
    for where in ("cpu", DEVICE):
        torch.manual_seed(0)
        wrapped = compose(vote.Wrapper(3), sculpt.Wrapper())(copy.deepcopy(model).to(where))
        results.append([*wrapped.parameters(), torch.rand(2, device=where)])
    close(*results)


# ---- recorded calls
def asked_often(wrapped: Any, x: Tensor, n: int = 12) -> list[Tensor]:
    """Return the last answer of calls that are recorded early."""
    with torch.no_grad(), quiet():
        for _ in range(n):
            answer = leaves(wrapped(x, return_risk=True))
    return answer


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    record_early(monkeypatch)


@pytest.mark.usefixtures("early")
@pytest.mark.parametrize("name", ["vote", "vote last layer", "sculpt", "neo", "vote of sculpt, with neo"])
@pytest.mark.parametrize("frozen", [False, True], ids=["open", "frozen"])
def test_recorded_calls_answer_there_as_plain_calls_on_the_cpu(name: str, frozen: bool) -> None:
    here, x, _ = learned(name, "mlp")
    here = copy.deepcopy(here).double().eval()
    there, x = copy.deepcopy(here).to(DEVICE), x.double()
    with there.frozen() if frozen else nullcontext():
        asked_often(there, x.to(DEVICE))
        before = calls_of(there).replays
        pretend_device.WAITS.clear()
        given = (x + 1).to(DEVICE, non_blocking=True)
        found = asked_often(there, given, 2)
        assert pretend_device.WAITS == []
    assert calls_of(there).replays == before + 2
    close(answers(here, x + 1), found, atol=1e-7)


@pytest.mark.usefixtures("early")
def test_a_recorded_mean_is_that_of_plain_copies() -> None:
    wrapped = vote.Wrapper(5)(mlp()).to(DEVICE).eval()
    x = torch.randn(6, 4).to(DEVICE)
    asked_often(wrapped, x)
    found = asked_often(wrapped, x + 1, 1)
    with torch.no_grad():
        copies = torch.stack([voter.cpu()(x.cpu() + 1) for voter in wrapped.voters()])
    assert calls_of(wrapped).replays
    close([copies.mean(0), copies.std(0, correction=0)], found, atol=1e-6)


class Steps(nn.Module):
    """A layer for sequences on rows of four steps, and the mean of its outputs."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.entry, self.layer = nn.Linear(1, 8), layer

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(self.entry(x[..., None]))
        return (h[0] if isinstance(h, tuple) else h).mean(1)


@pytest.mark.usefixtures("early")
@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True),
        lambda: nn.LSTM(8, 8, batch_first=True),
        lambda: nn.GRU(8, 8, batch_first=True),
    ],
    ids=["encoder", "norms first", "LSTM", "GRU"],
)
@pytest.mark.parametrize("n", [2, 6])
def test_recorded_sequences_are_those_of_plain_copies(build: Any, n: int) -> None:
    wrapped = vote.Wrapper(n)(Steps(build())).to(DEVICE).eval()
    x = torch.randn(6, 4).to(DEVICE)
    asked_often(wrapped, x)
    before = calls_of(wrapped).replays
    given = x + 1
    pretend_device.WAITS.clear()
    found = asked_often(wrapped, given, 1)
    assert pretend_device.WAITS == []
    with torch.no_grad():
        copies = torch.stack([voter.cpu()(x.cpu() + 1) for voter in wrapped.voters()])
    assert calls_of(wrapped).replays == before + 1
    close([copies.mean(0), copies.std(0, correction=0)], found, atol=1e-6)


class HalfThere(nn.Module):
    """Multiplies by a single number, which may be on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp().to(DEVICE)
        self.register_buffer("factor", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.factor


@pytest.mark.usefixtures("early")
def test_a_model_on_two_devices_is_not_recorded() -> None:
    wrapped, x = vote.Wrapper(3)(HalfThere()).eval(), torch.randn(6, 4).to(DEVICE)
    asked_often(wrapped, x)
    assert calls_of(wrapped).replays == 0
    assert "another device" in calls_of(wrapped).off


INF, NAN = torch.inf, torch.nan


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ([1.0, NAN, INF, -INF], [1.0, NAN, INF, -INF], True),
        ([1.0, 1e-6], [1.0, 0.0], True),
        ([1.0, 1e-2], [1.0, 0.0], False),
        ([1e-6, 1e-8], [1e-6, 0.0], False),
        ([1.0, NAN], [1.0, 1.0], False),
        ([1.0, INF], [1.0, 1e30], False),
        ([1.0, INF], [1.0, -INF], False),
        ([0.0, 0.0], [0.0, 0.0], True),
        ([], [], True),
        ([1, 2], [1, 2], True),
        ([1000, 2], [1000, 3], False),
        ([True], [False], False),
        ([1.0], [1], False),
        ([1.0 + 1j], [1.0 + 1.1j], False),
        ([1.0], [1.0, 1.0], False),
    ],
)
def test_verdicts(one: list[Any], other: list[Any], same: bool) -> None:
    pair = [torch.tensor(values).to(DEVICE) for values in (one, other)]
    pretend_device.WAITS.clear()
    verdict = Verdict(pair[:1], pair[1:], run=1)
    assert verdict.is_known()
    assert verdict.is_same() is same
    assert not Verdict(pair[:1], [], run=1).is_same()
    assert pretend_device.WAITS == []


class WritesIntoInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.add_(1))


@pytest.mark.usefixtures("early")
@pytest.mark.parametrize("build", [mlp, WritesIntoInput])
def test_calls_in_inference_mode_do_not_wait(build: Any) -> None:
    """Neither those that are compared nor recorded ones. A write into an input happens in each call, whose copies are compared."""
    wrapped = vote.Wrapper(3)(build()).to(DEVICE).eval()
    start, x, writes = torch.randn(6, 4), torch.empty(6, 4, device=DEVICE), build is WritesIntoInput
    with torch.inference_mode(), quiet():
        wrapped(x.clone(), return_risk=True), wrapped(x.clone(), return_risk=True)
        for i in range(12):
            given = x.copy_(start, non_blocking=True).clone()
            if i > 1:
                pretend_device.WAITS.clear()
            y = wrapped(given, return_risk=True)[0]
            assert i <= 1 or writes or pretend_device.WAITS == []
        assert torch.equal(given.cpu(), start + 1 if writes else start)
        expected = torch.stack([voter.cpu()(start.clone()) for voter in wrapped.voters()]).mean(0)
    torch.testing.assert_close(y.cpu(), expected)
    assert (calls_of(wrapped).replays == 0) is writes


@pytest.mark.usefixtures("early")
def test_recorded_noise_continues_that_of_the_device() -> None:
    wrapped = sample.Wrapper(3)(mlp()).to(DEVICE).eval()
    x = torch.randn(6, 4).to(DEVICE)
    other = copy.deepcopy(wrapped)
    calls_of(other).off = "for comparison"
    results = []
    for part in (wrapped, other):
        torch.manual_seed(3)
        results.append([asked_often(part, x), torch.rand(4, device=DEVICE), torch.rand(4)])
    assert calls_of(wrapped).replays
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.usefixtures("early")
def test_each_call_that_differs_is_no_recorded_one(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = vote.Wrapper(3)(mlp()).to(DEVICE).eval()
    x = torch.randn(6, 4)
    asked_often(wrapped, x.to(DEVICE))
    calls = calls_of(wrapped)
    n = calls.replays
    assert n
    with torch.no_grad(), pytest.raises(RuntimeError, match="same device"):
        wrapped(x, return_risk=True)
    with torch.autocast(DEVICE, torch.bfloat16):
        asked_often(wrapped, x.to(DEVICE))
    monkeypatch.setattr(pretend_device.MODULE, "captures", True)
    asked_often(wrapped, x.to(DEVICE))
    monkeypatch.setattr(pretend_device.MODULE, "captures", False)
    wrapped(x.to(DEVICE), return_risk=True)  # with gradients
    assert calls.replays == n
    wrapped.cpu()
    y = asked_often(wrapped, x)[0]
    torch.testing.assert_close(y, torch.stack([voter(x) for voter in wrapped.voters()]).mean(0))
    with torch.no_grad(), pytest.raises(RuntimeError, match="same device"):
        wrapped(x.to(DEVICE), return_risk=True)
    wrapped.to(DEVICE)
    torch.testing.assert_close(asked_often(wrapped, x.to(DEVICE))[0].cpu(), y)
    assert calls_of(wrapped).replays


@pytest.mark.usefixtures("early")
def test_nothing_is_answered_by_a_graph_before_its_comparisons_have_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = vote.Wrapper(3)(mlp()).to(DEVICE).eval()
    x = torch.randn(6, 4).to(DEVICE)
    monkeypatch.setattr(pretend_device.MODULE, "arrives", False)
    asked_often(wrapped, x)
    assert calls_of(wrapped).replays == 0
    monkeypatch.setattr(pretend_device.MODULE, "arrives", True)
    asked_often(wrapped, x, 1)
    assert calls_of(wrapped).replays == 1


@pytest.mark.usefixtures("early")
def test_rounding_is_no_difference_and_another_function_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no call looks at: a function inside torch."""
    make = lambda: vote.Wrapper(3)(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))).to(DEVICE).eval()  # noqa: E731
    wrapped, x, gelu = make(), torch.randn(6, 4).to(DEVICE), F.gelu
    for factor in (1 + 1e-6, 2.0):
        asked_often(wrapped, x)
        assert calls_of(wrapped).replays
        monkeypatch.setattr(F, "gelu", lambda h, approximate, factor=factor: factor * gelu(h))
        with torch.no_grad(), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(20):
                y = wrapped(x)
            for _ in range(20):
                y = wrapped(x, return_risk=True)[0]
        monkeypatch.setattr(F, "gelu", gelu)
        differs = factor == 2.0
        assert any("something outside of the model" in str(warning.message) for warning in told) is differs
        assert bool(calls_of(wrapped).off) is differs
    assert y.isfinite().all()
