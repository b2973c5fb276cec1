"""Recorded calls on a simulated device: they equal plain ones, and none waits; started by `test_other_device.py`."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers import pretend_device
from helpers.device_models import WRAPPERS, leaves, mlp, quiet, trained
from helpers.other_device import DEVICE, answers, close
from helpers.recorded_calls import calls_of, record_early
from workbench import sample, vote
from workbench.core.calls.verdicts import Verdict


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
    with quiet():
        here, x, _ = trained(WRAPPERS[name], "mlp")
    here = copy.deepcopy(here).double().eval()
    there, x = copy.deepcopy(here).to(DEVICE), x.double()
    with there.frozen() if frozen else nullcontext():
        asked_often(there, x.to(DEVICE))
        before = calls_of(there).replays
        pretend_device.WAITS.clear()
        inputs = (x + 1).to(DEVICE, non_blocking=True)
        answer = asked_often(there, inputs, 2)
        assert pretend_device.WAITS == []
    assert calls_of(there).replays == before + 2
    close(answers(here, x + 1), answer, atol=1e-7)


@pytest.mark.usefixtures("early")
def test_a_recorded_mean_is_that_of_plain_copies() -> None:
    wrapped = vote.Wrapper(5)(mlp()).to(DEVICE).eval()
    x = torch.randn(6, 4).to(DEVICE)
    asked_often(wrapped, x)
    answer = asked_often(wrapped, x + 1, 1)
    with torch.no_grad():
        copies = torch.stack([voter.cpu()(x.cpu() + 1) for voter in wrapped.voters()])
    assert calls_of(wrapped).replays
    close([copies.mean(0), copies.std(0, correction=0)], answer, atol=1e-6)


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
    others = x + 1
    pretend_device.WAITS.clear()
    answer = asked_often(wrapped, others, 1)
    assert pretend_device.WAITS == []
    with torch.no_grad():
        copies = torch.stack([voter.cpu()(x.cpu() + 1) for voter in wrapped.voters()])
    assert calls_of(wrapped).replays == before + 1
    close([copies.mean(0), copies.std(0, correction=0)], answer, atol=1e-6)


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
            inputs = x.copy_(start, non_blocking=True).clone()
            if i > 1:
                pretend_device.WAITS.clear()
            y = wrapped(inputs, return_risk=True)[0]
            assert i <= 1 or writes or pretend_device.WAITS == []
        assert torch.equal(inputs.cpu(), start + 1 if writes else start)
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
