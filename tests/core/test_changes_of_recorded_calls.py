"""Changes of a model, of torch or of what a method has learned count at the next call, also if a graph answered the last one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import traced_models
from helpers.recorded_calls import CALLS, as_ever, assert_same, batches, calls_of, record_early, wrapped_as
from helpers.traced_models import ReadsGlobal, Residual, mlp
from torch import Tensor, nn

from workbench import neo, vote


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    record_early(monkeypatch)


def _write(wrapped: Any) -> None:
    for parameter in wrapped.parameters():
        parameter.data.mul_(1.5)


def _exchange_data(wrapped: Any) -> None:
    for parameter in wrapped.parameters():
        parameter.data = 1.5 * parameter.data


def _optimized(wrapped: Any) -> None:
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    with torch.enable_grad():
        wrapped(torch.ones(5, 3)).sum().backward()
    optimizer.step()


def _hooked(wrapped: Any) -> None:
    wrapped.layers[0].register_forward_hook(lambda module, args, out: 2 * out)


def _numpy(wrapped: Any) -> None:
    wrapped.shift.numpy()[:] = 5.0


def _other_hooks(wrapped: Any) -> None:
    """An empty dict in the place of an empty one, into which a hook comes then."""
    layer = wrapped.layers[0]
    layer._forward_hooks = type(layer._forward_hooks)()
    layer.register_forward_hook(lambda module, args, out: 2 * out)


def _other_strides(wrapped: Any) -> None:
    wrapped.shift.data = torch.arange(16.0).reshape(8, 2)[:, 0]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "in place": _write,
    "data": _exchange_data,
    "numpy": _numpy,
    "optimizer": _optimized,
    "hook": _hooked,
    "attribute": lambda w: setattr(w, "scale", 2.0),
    "flag": lambda w: setattr(w, "deep", False),
    "another layer": lambda w: w.layers.append(nn.Linear(8, 8)),
    "activation": lambda w: setattr(w, "layers", nn.ModuleList([*w.layers, nn.Tanh()])),
    "buffer": lambda w: w.register_buffer("other", torch.full((8,), 3.0)),
    "training": lambda w: w.layers[0].train(),
    "dtype": lambda w: w.double(),
    "load": lambda w: w.load_state_dict({k: v + 1 if v.is_floating_point() else v for k, v in w.state_dict().items()}),
    "risk parameters": lambda w: w.set_risk_parameters({n: p.detach() + 1 for n, p in w.named_risk_parameters()}),
    "layer's forward": lambda w: setattr(w.layers[0], "forward", lambda h: h),
    "other hooks": _other_hooks,
    "other strides": _other_strides,
    "frozen parameters": lambda w: w.requires_grad_(False),
}


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("name", CHANGES)
def test_changes_count_at_the_next_call(name: str, quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not quick:  # torch's own guard of tensors is gone
        monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    wrapped = wrapped_as(Residual)
    x = batches()[0]
    with torch.no_grad():
        for _ in range(CALLS):
            wrapped(x, return_risk=True)
        assert calls_of(wrapped).replays > 10
        CHANGES[name](wrapped)
        x = x.to(next(wrapped.parameters()).dtype)
        for _ in range(CALLS):
            y, risk = wrapped(x, return_risk=True)
            voters = torch.stack([voter(x) for voter in wrapped.voters()])
            torch.testing.assert_close(y, voters.mean(0))
            torch.testing.assert_close(risk, voters.std(0, correction=0))


def test_classes_and_globals_count_at_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped, x = wrapped_as(ReadsGlobal), batches()[0]
    with torch.no_grad():
        for _ in range(CALLS):
            before = wrapped(x)
        monkeypatch.setattr(traced_models, "SCALE", 3.0)
        torch.testing.assert_close(wrapped(x), 3 * before)
        monkeypatch.setattr(ReadsGlobal, "forward", lambda self, x: 7 * self.net(x))
        torch.testing.assert_close(copy.deepcopy(wrapped)(x), 7 * before)
        torch.testing.assert_close(wrapped(x), 7 * before)


def test_a_mode_and_back() -> None:
    wrapped, x = wrapped_as(mlp, vote.Wrapper(3)), batches()[0]
    with torch.no_grad():
        for _ in range(CALLS):
            expected = wrapped(x, return_risk=True)
        before = calls_of(wrapped).replays
        wrapped.train()
        wrapped(x, return_risk=True)
        wrapped.eval()
        assert_same(wrapped(x, return_risk=True), expected)
    assert calls_of(wrapped).replays == before + 1
    assert wrapped(x).requires_grad


def test_what_torch_keeps_for_a_thread_counts() -> None:
    wrapped, x = wrapped_as(mlp), batches()[0]
    with torch.no_grad():
        for _ in range(CALLS):
            expected = wrapped(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert wrapped(x).dtype is torch.bfloat16
        torch.testing.assert_close(torch.func.vmap(wrapped)(torch.stack([x, x]))[1], expected)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            assert torch.autograd.forward_ad.unpack_dual(wrapped(dual)).tangent is not None  # under no_grad as well
        with torch.inference_mode():
            for _ in range(CALLS):
                assert wrapped(x).is_inference()
            before = calls_of(wrapped).replays
            wrapped(x)
            assert calls_of(wrapped).replays == before + 1
        assert not wrapped(x).is_inference()


class _Adds(nn.Module):
    """A model that makes a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + torch.ones(1)


def test_a_setting_of_torch_counts_for_all_kinds_of_calls() -> None:
    """Also after calls of another kind were recorded under it."""
    wrapped, x = wrapped_as(_Adds), batches()[0]
    with torch.no_grad():
        for _ in range(CALLS):
            wrapped(x)
        torch.set_default_dtype(torch.float64)
        try:
            for _ in range(CALLS):
                assert wrapped(x[:2]).dtype is torch.float64
            assert wrapped(x).dtype is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        assert wrapped(x).dtype is torch.float32


def test_hooks_for_all_modules_fire() -> None:
    wrapped, x, seen = wrapped_as(mlp), batches()[0], []
    with torch.no_grad():
        for _ in range(CALLS):
            wrapped(x)
        handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(module))
        try:
            wrapped(x)
        finally:
            handle.remove()
    assert any(isinstance(module, nn.Tanh) for module in seen)


def test_what_neo_has_learned_counts() -> None:
    wrapped, x = wrapped_as(mlp, neo.Wrapper()), batches()[0]
    with torch.no_grad():
        for _ in range(CALLS):
            wrapped(x, return_risk=True)
        assert calls_of(wrapped).replays
        wrapped.fit(torch.randn(50, 3) + 1)
        for _ in range(CALLS):
            assert_same(wrapped(x, return_risk=True), as_ever(wrapped, x, return_risk=True))
