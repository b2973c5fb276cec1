"""On a GPU: results equal those on the CPU, warm calls and steps do not wait, and files and memory serve."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.device_models import MODELS, WRAPPERS, criterion_of, leaves, quiet, still, trained
from helpers.gpu import DEVICE, MOST, NEEDS_GPU, full_precision, no_wait
from torch import nn

from workbench import compose, fit, load, save, sculpt, vote
from workbench.training import Backward

pytestmark = NEEDS_GPU
__all__ = ["full_precision"]  # a fixture for all tests here
NOISY = {name for name in WRAPPERS if "sample" in name}  # they draw other numbers there


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", [name for name in WRAPPERS if name not in NOISY])
def test_answers_losses_and_gradients_are_those_of_the_cpu(name: str, model: str) -> None:
    with quiet():
        here, x, y = trained(WRAPPERS[name], model)
    still(here).double()
    there = copy.deepcopy(here).to(DEVICE)
    x, y = x.double(), y.double() if y.is_floating_point() else y
    close: dict[str, Any] = {"rtol": 1e-7, "atol": 1e-9, "check_device": False}
    with torch.no_grad(), quiet():
        for a, b in zip(
            *(leaves(part.eval()(x.to(where), return_risk=True)) for part, where in ((here, "cpu"), (there, DEVICE))),
            strict=True,
        ):
            torch.testing.assert_close(a, b, **close)
    if here.methods == ("neo",):
        return
    losses = []
    for part, where in ((here, "cpu"), (there, DEVICE)):
        part.train().zero_grad()
        losses.append(part.loss(criterion_of(part), x.to(where), y.to(where)))
        losses[-1].backward()
    torch.testing.assert_close(*losses, **close)
    for (key, a), b in zip(here.named_parameters(), there.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), key
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, **close)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", WRAPPERS)
def test_warm_calls_and_steps_do_not_wait(name: str, model: str) -> None:
    with quiet():
        wrapped, x, y = trained(WRAPPERS[name], model)
    wrapped.to(DEVICE)
    x, y = x.to(DEVICE), y.to(DEVICE)
    criterion = criterion_of(wrapped)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        loss = wrapped(x, return_risk=True)[1].mean() if wrapped.methods == ("neo",) else wrapped.loss(criterion, x, y)
        loss.backward()
        optimizer.step()

    def once() -> None:
        for training in (False, True):
            wrapped.train(training)
            for risk in (False, True):
                wrapped(x, return_risk=risk)
        step()

    with quiet():
        for _ in range(2):
            once()
        torch.cuda.synchronize()
        with no_wait():
            once()


@pytest.mark.parametrize("options", [{}, {"folds": 2}], ids=["", "folds"])
def test_a_training_waits_in_no_step(options: dict[str, Any]) -> None:
    """Comparisons of replayed steps wait, in the first steps; their number depends on which kind of step is faster."""

    def waits(rows: int) -> int:
        x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(0))
        wrapped = compose(vote.Wrapper(4), sculpt.Wrapper(n_layers=1))(MODELS["mlp"][0]().to(DEVICE))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                fit(wrapped, (x, x[:, :3]), epochs=3, batch_size=16, standardize=False, progress=False, **options)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("synchroniz" in str(warning.message) for warning in told)

    with quiet():
        waits(1600)  # what is found out once
    steps = 3 * (6400 - 1600) // 16
    assert waits(6400) - waits(1600) < steps / 4


@pytest.mark.parametrize("name", MOST)
def test_a_model_that_learned_there_is_saved_and_answers_on_the_cpu(name: str, tmp_path: Path) -> None:
    make, shape = MODELS["cnn"]
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, *shape, generator=generator), torch.randn(64, 3, generator=generator)
    wrapped = WRAPPERS[name](make())
    with quiet():
        history = fit(wrapped, (x, y), epochs=3, batch_size=16, device=DEVICE, progress=False)
    assert history.frame.loss.notna().all()
    assert {p.device.type for p in wrapped.parameters()} == {DEVICE}
    save(wrapped, tmp_path / "model.safetensors")
    torch.save(wrapped.state_dict(), tmp_path / "state.pt")
    loaded = load(tmp_path / "model.safetensors", make())
    again = WRAPPERS[name](make())
    with quiet():
        fit(again, (x, y), epochs=1, progress=False)  # signature and units are there to be filled
    again.load_state_dict(torch.load(tmp_path / "state.pt", map_location="cpu", weights_only=True))
    assert {p.device.type for part in (loaded, again) for p in part.parameters()} == {"cpu"}
    if name == "sample":
        return
    with torch.no_grad():
        there = leaves(wrapped.eval()(x.to(DEVICE), return_risk=True))
        for part in (loaded, again):
            for a, b in zip(there, leaves(part.eval()(x, return_risk=True)), strict=True):
                torch.testing.assert_close(a.cpu(), b, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", MOST)
def test_autocast_to_bfloat16(name: str, model: str) -> None:
    with quiet():
        wrapped, x, y = trained(WRAPPERS[name], model)
    still(wrapped).to(DEVICE)
    x, y = x.to(DEVICE), y.to(DEVICE)
    with torch.no_grad(), quiet():
        exact = wrapped.eval()(x)
        with torch.autocast(DEVICE, torch.bfloat16):
            outputs = leaves(wrapped(x, return_risk=True))
    assert all(leaf.isfinite().all() for leaf in outputs)
    if name not in NOISY:
        torch.testing.assert_close(outputs[0].float(), exact, rtol=0.1, atol=0.1)
    if wrapped.methods == ("neo",):
        return
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = wrapped.train().loss(criterion_of(wrapped), x, y)
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in wrapped.parameters())


def test_memory_that_is_too_small_for_all_voters_is_enough_for_some() -> None:
    """Hidden layers of 16 voters at once are 4 GiB, of one 256 MiB."""
    torch.cuda.empty_cache()
    model = nn.Sequential(nn.Linear(4, 4096), nn.Tanh(), nn.Linear(4096, 1)).to(DEVICE)
    wrapped = vote.Wrapper(16, strategy="vmap")(model).eval()
    x = torch.randn(16_384, 4, device=DEVICE)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, 3 * 2**30 / total))
    try:
        with torch.no_grad():
            y, _ = wrapped(x, return_risk=True)
            answers = torch.stack([voter.to(DEVICE)(x) for voter in wrapped.voters()])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "memory was too small" in str(wrapped.explain())
    torch.testing.assert_close(y, answers.mean(0), rtol=1e-2, atol=1e-3)


def test_voters_in_turn_wait_for_nothing_and_need_the_memory_of_one() -> None:
    def net() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2)
        )

    def peak(step: Callable[[], Any]) -> int:
        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before

    x, y = torch.randn(256, 3, 24, 24, device=DEVICE), torch.randn(256, 2, device=DEVICE)
    model, criterion = net().to(DEVICE), nn.MSELoss()
    model(x[:1])
    wrapped = vote.Wrapper(4, strategy="loop")(model).train()
    backward = Backward(wrapped, criterion)
    of_one = peak(lambda: criterion(model(x), y).backward())
    wrapped.loss(criterion, x, y).backward()
    at_once = [parameter.grad.clone() for parameter in wrapped.parameters()]
    wrapped.zero_grad()
    backward(x, y)
    for parameter, gradient in zip(wrapped.parameters(), at_once, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)
    with no_wait():
        backward(x, y)
    assert peak(lambda: backward(x, y)) < 1.5 * of_one
    assert peak(lambda: wrapped.loss(criterion, x, y).backward()) > 3 * of_one


def test_composed_risks_stay_on_the_device() -> None:
    wrapped = compose(vote.Wrapper(3), sculpt.Wrapper())(MODELS["mlp"][0]().to(DEVICE)).eval()
    assert all(leaf.is_cuda for leaf in leaves(wrapped(torch.zeros(5, 4, device=DEVICE), return_risk=True)))
