"""The number of branches that run at once bounds memory: set by `chunk=`, or reduced automatically when memory runs out."""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest
import torch
from conftest import ROOT
from torch import Tensor, nn

from workbench import sample, vote
from workbench.engine import dispatch
from workbench.experiments.worker import load_file

peak = load_file(ROOT / "benchmarks" / "speed_clock.py").peak


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1))


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", [vote.Wrapper, sample.Wrapper], ids=["vote", "sample"])
def test_a_prediction_of_a_quarter_at_once_takes_a_quarter_of_the_memory(wrapper: Any) -> None:
    model, x = net(), torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
    taken = {}
    for chunk in (None, 4):
        wrapped = wrapper(16, strategy="vmap", chunk=chunk)(model).eval()
        with torch.no_grad():
            wrapped(x, return_risk=True)
            taken[chunk] = peak(functools.partial(wrapped, x, return_risk=True), "cpu")
    assert taken[4] < 0.3 * taken[None]


@pytest.mark.slow
def test_a_step_in_chunks_keeps_what_its_backward_pass_needs() -> None:
    """All activations of all voters, but what else a pass takes only for some at once."""
    x, y = torch.randn(512, 8, generator=torch.Generator().manual_seed(0)), torch.zeros(512, 1)
    taken = {}
    for chunk in (None, 4):
        wrapped = vote.Wrapper(16, strategy="vmap", chunk=chunk)(net())

        def step(wrapped: Any = wrapped) -> None:
            wrapped.zero_grad()
            wrapped.loss(nn.MSELoss(), x, y).backward()

        step()
        taken[chunk] = peak(step, "cpu")
    assert taken[4] < 0.8 * taken[None]


def test_a_shared_trunk_is_computed_once_whatever_the_chunk() -> None:
    wrapped = vote.Wrapper(4, share=1, chunk=1)(net()).eval()
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wrapped(x)
        with torch.profiler.profile() as profile:
            y, risk = wrapped(x, return_risk=True)
        voters = torch.stack([voter(x) for voter in wrapped.voters()])
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["aten::linear"] == 2 + 4
    torch.testing.assert_close(y, voters.mean(0))
    torch.testing.assert_close(risk, voters.std(0, correction=0))


class Small(nn.Module):
    """A model on a device that has no memory for more than so many branches at once."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.fc, self.room = nn.Linear(3, 2), room

    def forward(self, x: Tensor) -> Tensor:
        weight = self.fc.weight
        functorch = torch._C._functorch
        count = functorch.get_unwrapped(weight).shape[0] if functorch.is_batchedtensor(weight) else 1
        if count > self.room:
            raise torch.OutOfMemoryError(f"no memory for {count}")
        return self.fc(x)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("room", [1, 4, 7])
def test_fewer_run_at_once_where_memory_is_too_small(room: int, gradients: bool, caplog: Any) -> None:
    model, x = Small(room), torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    wrapped = vote.Wrapper(10, strategy="vmap")(model).eval()
    state = torch.random.get_rng_state()
    with caplog.at_level(logging.WARNING, "workbench"), torch.set_grad_enabled(gradients):
        for _ in range(2):
            y, risk = wrapped(x, return_risk=True)
    answers = torch.stack([voter.fc(x) for voter in wrapped.voters()])
    torch.testing.assert_close(y, answers.mean(0))
    torch.testing.assert_close(risk, answers.std(0, correction=0))
    assert torch.equal(state, torch.random.get_rng_state())
    at_once = {1: 1, 4: 2, 7: 5}[room]  # 10, 5, 2, 1
    assert [record.message for record in caplog.records] == [
        f"{wrapped._get_name()}: memory was too small for all 10 branches in one pass, so {at_once} run at once. "
        f"chunk={at_once} silences this"
    ]
    assert f"more than {at_once} at once" in str(wrapped.explain())


def test_where_memory_is_too_small_for_one_the_error_is_the_users() -> None:
    wrapped = vote.Wrapper(4)(Small(0)).eval()
    with pytest.raises(torch.OutOfMemoryError, match="no memory for 1"):
        wrapped(torch.zeros(5, 3))


def test_it_also_leads_from_one_rung_to_the_next() -> None:
    class Refused(Small):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y * float(y.detach().sum() * 0 + 1)  # no number under vmap

    model = Refused(2)
    wrapped = vote.Wrapper(16)(model).eval()
    with torch.no_grad():
        y = wrapped(torch.ones(2, 3))
    torch.testing.assert_close(y, torch.stack([voter(torch.ones(2, 3)) for voter in wrapped.voters()]).mean(0))


@pytest.mark.parametrize(("rows", "how"), [(2, "8 passes in one"), (5, "8 passes, 4 at once"), (40, "8 passes")])
def test_on_a_cpu_small_models_run_some_voters_at_once_so_that_activations_stay_in_the_cache(
    rows: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_CACHED", 200)
    wrapped: Any = vote.Wrapper(8)(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))).double().eval()
    x = torch.randn(rows, 3, dtype=torch.float64)
    y, risk = wrapped(x, return_risk=True)
    assert wrapped.explain().rows[-1][3] == how
    voters = torch.stack([voter(x) for voter in wrapped.voters()])
    torch.testing.assert_close(y, voters.mean(0))
    torch.testing.assert_close(risk, voters.std(0, correction=0))


def test_noise_is_drawn_for_all_samples_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped: Any = sample.Wrapper(8)(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))).eval()
    x = torch.randn(40, 3)
    torch.manual_seed(0)
    whole = wrapped(x)
    monkeypatch.setattr(dispatch, "_CACHED", 200)
    torch.manual_seed(0)
    assert torch.equal(wrapped(x), whole)
