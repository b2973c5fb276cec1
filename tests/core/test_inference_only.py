"""Models whose code runs only without gradients: it never runs with them, and unused layers are still detected."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import compose, sculpt, snapshot, vote
from workbench.errors import UnreachedParametersError

MAKERS = {
    "vote": lambda: vote.Wrapper(3),
    "share": lambda: vote.Wrapper(3, share=1),
    "rank1": lambda: vote.Wrapper(3, share="rank1"),
    "sculpt": lambda: sculpt.Wrapper(n_layers=1),
    "composed": lambda: compose(vote.Wrapper(3), sculpt.Wrapper(n_layers=1)),
}
every_kind = pytest.mark.parametrize("kind", MAKERS)
MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode}


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        assert not torch.is_grad_enabled(), "there is no code for gradients"
        return self.b(self.between(self.a(x)))

    def between(self, h: Tensor) -> Tensor:
        return h


class Out(Base):
    def between(self, h: Tensor) -> Tensor:
        return torch.add(h, 1.0, out=torch.empty_like(h))


class Pieces(Base):
    def between(self, h: Tensor) -> Tensor:
        filled = torch.zeros(h.shape[0], 4)
        for i in range(4):
            filled[:, i] = h[:, i]
        return filled


class Numpy(Base):
    """Is out of torch's sight on its way."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(super().forward(x).numpy().copy())


class Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        assert not ctx.needs_input_grad[0], "inference only"
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise NotImplementedError


class Custom(Base):
    def between(self, h: Tensor) -> Tensor:
        return Kernel.apply(h)


class InPlace(Base):
    def between(self, h: Tensor) -> Tensor:
        next(iter(h.unbind(1))).mul_(2.0)  # a view of several
        return h


def answers(wrapped: Any, x: Tensor) -> Tensor:
    return torch.stack([voter.eval()(x) for voter in wrapped.voters()])


@pytest.mark.parametrize("mode", MODES)
@every_kind
@pytest.mark.parametrize("cls", [Out, Pieces, Numpy, Custom, InPlace])
def test_it_is_right_and_never_run_with_gradients(cls: type[nn.Module], kind: str, mode: str) -> None:
    with MODES[mode]():
        wrapped: Any = MAKERS[kind]()(cls()).eval()
        x = torch.randn(5, 4)
        for _ in range(2):
            y, risk = wrapped(x, return_risk=True)
            each = answers(wrapped, x)
            torch.testing.assert_close(y, each.mean(0))
            if kind in ("vote", "share", "rank1"):
                torch.testing.assert_close(risk, each.std(0, unbiased=False))


class Unused(Base):
    """Its last layer does not take part."""

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


class UnusedNumpy(Unused):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(super().forward(x).detach().numpy().copy())


class Holds(nn.Module):
    """Reaches a weight past the module."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)
        weight = self.a.weight
        self.layer = lambda x: nn.functional.linear(x, weight)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(len(x), 4)
        h[:, :] = self.layer(x)
        return self.b(h)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("mode", ["gradients", *MODES])
def test_what_no_output_depends_on_is_refused(mode: str, frozen: bool) -> None:
    context = MODES.get(mode, contextlib.nullcontext)
    x = torch.randn(5, 4)
    for cls, kind in ((Unused, "share"), (Unused, "sculpt"), (UnusedNumpy, "share")):
        if cls is UnusedNumpy and mode == "gradients" and not frozen:
            continue  # nothing hangs together there
        wrapped: Any = MAKERS[kind]()(cls()).eval().requires_grad_(not frozen)
        with context(), pytest.raises(UnreachedParametersError, match=r"no output depends on b\.bias, b\.weight"):
            wrapped(x, return_risk=True)
    wrapped = vote.Wrapper(3)(Holds()).eval().requires_grad_(not frozen)
    with context(), pytest.raises(UnreachedParametersError, match=r"uses a\.weight by a reference"):
        wrapped(x, return_risk=True)


def test_saturated_outputs_are_no_sign_of_unused_layers() -> None:
    class Saturated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return (self.b(self.a(x)) - 1e6).relu()

    with torch.no_grad():
        wrapped: Any = vote.Wrapper(3, share=1)(Saturated()).eval()
        y, risk = wrapped(torch.randn(5, 4), return_risk=True)
    assert not y.any()
    assert not risk.any()


def test_looking_draws_no_numbers_and_changes_nothing() -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.calls = nn.Linear(4, 4), nn.BatchNorm1d(4), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.b(self.a(x + torch.randn_like(x)))

    wrapped: Any = vote.Wrapper(3, strategy="loop")(Draws())
    x = torch.randn(6, 4)
    outputs = []
    for gradients in (True, False):  # only without them it takes a look
        torch.manual_seed(1)
        twin = vote.Wrapper(3, strategy="loop")(Draws())
        twin.load_state_dict(wrapped.state_dict())
        torch.manual_seed(2)
        with torch.set_grad_enabled(gradients):
            outputs.append(twin(x, tile_and_reduce=True).detach())
        assert twin.calls == 1
        assert (twin.state_dict()["b.num_batches_tracked@vote"] == 1).all()
        outputs.append(torch.rand(3))
    torch.testing.assert_close(outputs[0], outputs[2])
    torch.testing.assert_close(outputs[1], outputs[3])


@pytest.mark.parametrize("gradients", [True, False])
def test_weight_sets_that_an_intervention_puts_in_place_are_no_unused_ones(gradients: bool) -> None:
    """As in a first call with gradients that asks for the risk: nothing of snapshot's requires one."""
    wrapped: Any = snapshot.Wrapper(3)(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)))
    for _ in range(3):
        with torch.no_grad():
            for p in wrapped.base_parameters():
                p.add_(0.1 * torch.randn_like(p))
        snapshot.collect(wrapped)
    x = torch.randn(5, 4)
    with torch.set_grad_enabled(gradients):
        _, risk = wrapped.eval()(x, return_risk=True)
    torch.testing.assert_close(risk, answers(wrapped, x).std(0, unbiased=False))


def test_first_predictions_do_not_import_the_compiler() -> None:
    code = (
        "import sys, torch; from workbench import compose, sample, sculpt, vote\n"
        "for wrapper in vote.Wrapper(2), sculpt.Wrapper(n_layers=1), compose(vote.Wrapper(2), sample.Wrapper(2)):\n"
        "    wrapped = wrapper(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))).eval()\n"
        "    with torch.no_grad(): wrapped(torch.ones(4, 2), return_risk=True)\n"
        "print({'torch._dynamo', 'torch._inductor', 'sympy'} & sys.modules.keys())"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, filter(None, sys.path)))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout.strip()) == (0, "set()"), done.stderr
