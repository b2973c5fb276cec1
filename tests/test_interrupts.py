"""Interrupts at any moment leave everything as it was; `workbench bench interrupts` makes thousands of them."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import sample, sculpt, vote
from workbench.engine.surroundings import guarded

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from interrupts import Interruption, soak
from interrupts_cases import Case, Net, X, net

QUICK = ("vote", "sculpt", "sample", "trunk", "neo")


@pytest.fixture(autouse=True)
def _no_garbage_of_others() -> None:
    """Collect what earlier tests have left, whose finalizers would be interrupted in place of what is tested."""
    gc.collect()


# in a generator that is being thrown away
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", ["line", "call"])
def test_interrupts_leave_nothing_behind(kind: str) -> None:
    def chosen(name: str, strategy: str, action: str, cls: type[Net]) -> bool:
        return name in QUICK and action != "fit"

    hits, wrong = soak(50, seed=0, kinds=(kind,), chosen=chosen)
    assert not wrong
    assert hits > 30


@pytest.mark.slow
def test_interrupted_fits_leave_a_model_that_can_be_used() -> None:
    hits, wrong = soak(
        16, seed=1, kinds=("line",), chosen=lambda name, strategy, action, cls: name == "sculpt" and action == "fit"
    )
    assert not wrong
    assert hits > 3


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: vote.Wrapper(2), sculpt.Wrapper, sample.Wrapper])
def test_modes_are_noted_whole(make: type) -> None:
    """Each line of `refresh` after a change of modes: evaluation afterwards has no dropout and no batch statistics."""
    wrapped = make()(net()).eval()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        before = wrapped(X)
        for k in range(1, 240, 6):
            wrapped.train()
            torch.manual_seed(0)
            buffers = {name: value.clone() for name, value in wrapped.named_buffers()}
            interruption = Interruption("line", k)
            with pytest.raises(KeyboardInterrupt) if k < 60 else _any(), interruption:
                wrapped(X)
            for name, value in wrapped.named_buffers():
                value.copy_(buffers[name])
            torch.manual_seed(0)
            assert torch.equal(wrapped.eval()(X), before), interruption.where


class Cycle:
    """Garbage with a finalizer."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        pass


class CollectingLater(Interruption):
    """Lets the next object that is made after an event collect garbage."""

    def _profile(self, frame: Any, event: str, arg: Any) -> None:
        Interruption._profile(self, frame, event, arg)
        gc.enable()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_finalizer_is_interrupted_while_the_profiler_waits() -> None:
    """CPython 3.11 looks the profiler up, makes an object for the frame, which may collect garbage, and only then calls the profiler."""

    def call() -> None:
        pass

    thresholds, callbacks = gc.get_threshold(), gc.callbacks[:]
    gc.disable()
    # finalizers of other tests, and what other packages call in a collection, would be interrupted in its place
    gc.collect()
    gc.freeze()
    gc.callbacks.clear()
    try:
        Cycle()
        gc.set_threshold(1)
        with _any(), CollectingLater("call", 1) as interruption:
            call()
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.extend(callbacks)
        gc.unfreeze()
        gc.enable()
    assert interruption.where.endswith("__del__" if sys.version_info < (3, 12) else " call")


def _any() -> object:
    import contextlib

    return contextlib.suppress(KeyboardInterrupt)


@pytest.mark.slow
def test_an_error_that_comes_of_an_interrupt_is_the_interrupt() -> None:
    class Raising(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            try:
                raise KeyboardInterrupt
            except KeyboardInterrupt:
                raise RuntimeError("in the middle of cleaning up") from None

    for strategy in ("vmap", "loop"):
        wrapped = vote.Wrapper(3, strategy=strategy)(Raising())
        with pytest.raises(KeyboardInterrupt):
            wrapped(X)
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:  # one that was there before is none of this call
        with pytest.raises(ValueError, match="n_voters"):
            vote.Wrapper(0)
        with pytest.raises(RuntimeError, match="shapes"):
            vote.Wrapper(3)(net())(torch.ones(2, 5))


@pytest.mark.slow
def test_inference_mode_that_is_being_entered_or_left_ends_at_once() -> None:
    """Its guard would put gradients back to what they were inside once the traceback is gone."""

    def block() -> None:
        with torch.no_grad(), torch.inference_mode(False):
            pass

    with Interruption("call", None) as whole:
        guarded(block)
    for k in range(1, whole.count + 1):
        try:
            with Interruption("call", k) as interruption:
                guarded(block)
        except KeyboardInterrupt:
            pass
        assert torch.is_grad_enabled(), interruption.where


@pytest.mark.slow
def test_the_attacker_finds_what_is_left_behind() -> None:
    case = Case("vote", "loop", "eval")
    inner = case.wrapped.__class__.forward

    def careless(self: nn.Module, *args: object, **kwargs: object) -> object:
        torch.set_default_dtype(torch.float64)
        out = inner(self, *args, **kwargs)
        torch.set_default_dtype(torch.float32)
        return out

    case.wrapped.__class__.forward = careless
    try:
        seen = []
        for k in range(1, 40):  # the first lines are those before the careless ones
            interruption = Interruption("line", k)
            interruption.k_odd = False
            hit, wrong = case.attack(interruption)
            torch.set_default_dtype(torch.float32)
            assert hit
            seen += wrong
        assert "torch: dtype" in seen
    finally:
        case.wrapped.__class__.forward = inner
        torch.set_default_dtype(torch.float32)
