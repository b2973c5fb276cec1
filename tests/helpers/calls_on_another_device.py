"""Calls with model and inputs on a simulated device equal those on the CPU; started by `test_other_device.py`."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F

from helpers import pretend_device
from helpers.conformance_table import is_due
from helpers.device_models import MODELS, WRAPPERS, cnn, criterion_of, mlp, quiet, trained
from helpers.other_device import DEVICE, answers, by_formula, close, in_order, states_close
from workbench import WorkbenchWarning, compose, neo, sample, sculpt, vote
from workbench.engine import dispatch
from workbench.engine.executors.rescue import DropoutByFormula
from workbench.methods.densities import DENSITIES


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
    outputs = []
    for options in ({}, {"return_risk": True}):
        torch.manual_seed(1)
        outputs.append(wrapped(x, **options))
    torch.testing.assert_close(outputs[0], outputs[1][0])


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
    for limit, executor in ((12 * 36 * 72, "vmap"), (12 * 36 * 72 - 1, "loop")):  # rows, pixels, weights of the kernels
        monkeypatch.setattr(dispatch, name, limit)
        wrapped = vote.Wrapper(3)(cnn()).to(DEVICE).eval()
        with torch.backends.cudnn.flags(allow_tf32=tf32), torch.no_grad():
            y = wrapped(x.to(DEVICE))
            answers = torch.stack([voter.cpu()(x) for voter in wrapped.voters()])
        assert f": {executor}, 3 passes" in str(wrapped.explain())
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


class HiddenStateInBuffer(nn.Module):
    """Goes on from what the last call has left in a buffer that no file holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("hidden", torch.zeros(5, 3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = 0.5 * self.hidden + self.layer(x)
        return self.hidden


def test_a_hidden_state_that_branches_share_is_told_in_the_first_call_which_alone_waits() -> None:
    wrapped, x = vote.Wrapper(3)(HiddenStateInBuffer()).eval().to(DEVICE), torch.ones(5, 3).to(DEVICE)
    with pytest.warns(WorkbenchWarning, match="each branch goes on from the mean"):
        wrapped(x)
    with quiet():
        wrapped(x)
        pretend_device.WAITS.clear()
        wrapped(x)
    assert pretend_device.WAITS == []
