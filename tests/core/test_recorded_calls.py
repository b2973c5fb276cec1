"""Calls answered by a graph equal eager calls to the last bit; where they would not, no graph is used."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import traced_models
from helpers.threads import in_threads
from helpers.traced_models import EAGER, TRACED, ReadsGlobal, Residual, mlp
from torch import Tensor, nn
from torch.nn import functional as F

from workbench import compose, neo, sample, sculpt, vote
from workbench.core.calls import recorded_calls
from workbench.core.calls.recorded_calls import RecordedCalls
from workbench.errors import WorkbenchWarning
from workbench.outputs import Detections

CALLS = 20


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are made early, and used even where they are slower."""
    monkeypatch.setattr(recorded_calls, "MIN_CALLS", 2)
    monkeypatch.setattr(recorded_calls, "MIN_FROZEN_CALLS", 1)
    monkeypatch.setattr(recorded_calls, "MAX_MISSES", 3)
    monkeypatch.setattr(recorded_calls, "_is_faster", lambda recorded: True)
    monkeypatch.setattr(recorded_calls, "MAX_SECONDS", 1e9)


def _batches(n: int = CALLS) -> list[Tensor]:
    return list(torch.randn(n, 5, 3, generator=torch.Generator().manual_seed(1)))


def _wrapped(build: Callable[[], nn.Module], wrapper: Any = None) -> Any:
    torch.manual_seed(0)
    traced_models.NOISE = np.random.default_rng(0)
    wrapped = (wrapper or vote.Wrapper(3))(build()).eval()
    return wrapped.fit(torch.randn(100, 3)) if wrapped.needs_fit else wrapped


def _calls_of(wrapped: Any) -> RecordedCalls:
    return wrapped.__dict__["_engine"].recorded


def _assert_same(one: Any, other: Any) -> None:
    for a, b in zip(torch.utils._pytree.tree_leaves(one), torch.utils._pytree.tree_leaves(other), strict=True):
        assert a.shape == b.shape
        assert a.stride() == b.stride()
        assert torch.equal(a, b)


def _as_ever(wrapped: Any, *args: Tensor, **options: Any) -> Any:
    """What a copy answers, which has no graphs."""
    return copy.deepcopy(wrapped)(*args, **options)


class Two(nn.Module):
    """Several inputs, several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor, other: Tensor) -> Any:
        return {"mean": self.net(x) + other, "parts": (self.net(other), self.net(x).exp())}


RECORDED = {
    **TRACED,
    "sample, normal": (mlp, sample.Wrapper(4, distribution=sample.Normal(0.1))),
    "sample, inputs": (mlp, sample.Wrapper(3, where="inputs", distribution=sample.Normal(0.1))),
    "sample x sculpt": (mlp, compose(sample.Wrapper(4), sculpt.Wrapper())),
    "neo, gaussian": (mlp, neo.Wrapper(density="gaussian")),
    "all": (mlp, compose(vote.Wrapper(3), sculpt.Wrapper(), neo.Wrapper())),
    "laplace distribution": (mlp, sculpt.Wrapper(sculpt.Laplace)),
    "quantiles": (mlp, sculpt.Wrapper(sculpt.Quantiles((0.1, 0.9)))),
    "binary": (mlp, vote.Wrapper(3, output="binary")),
    "logits": (lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4)), vote.Wrapper(3, output="logits")),
}
RECORDED = {name: row for name, row in RECORDED.items() if not name.endswith(", loop")}  # where a strategy was chosen


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("frozen", [False, True], ids=["open", "frozen"])
def test_recorded_calls_are_the_same(name: str, frozen: bool) -> None:
    """Also the global random state after each."""
    build, wrapper = RECORDED[name]
    wrapped, other = _wrapped(build, wrapper), _wrapped(build, wrapper)
    _calls_of(other).off = "as ever"
    answers: list[Any] = []

    def ask(model: Any) -> list[Any]:
        torch.manual_seed(2)
        out = []
        for i, x in enumerate(_batches()):
            out += [model(x), model(x, return_risk=True), torch.get_rng_state()] if i % 2 else [model(x + 1)]
        return out

    with torch.no_grad():
        if frozen:
            with wrapped.frozen():
                answers = ask(wrapped)
        else:
            answers = ask(wrapped)
        _assert_same(answers, ask(other))
    assert _calls_of(wrapped).off == ""
    assert _calls_of(wrapped).replays > 10
    assert f"{_calls_of(wrapped).replays} calls were answered by a graph" in wrapped.explain()


@pytest.mark.parametrize("name", [*sorted(EAGER.keys() - {"momentum none"}), "loop"])  # which differs in training only
def test_what_is_not_sure_to_repeat_is_left_alone(name: str) -> None:
    build, wrapper = (EAGER[name], vote.Wrapper(3)) if name in EAGER else (mlp, vote.Wrapper(3, strategy="loop"))
    wrapped = _wrapped(build, wrapper)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", WorkbenchWarning)
        for x in _batches():
            try:
                wrapped(x.clone(), return_risk=True)
            except Exception:  # refused as ever
                continue
    assert _calls_of(wrapped).replays == 0


def test_several_inputs_and_outputs() -> None:
    wrapped = _wrapped(Two)
    with torch.no_grad():
        for x in _batches():
            _assert_same(
                wrapped(x, x[:, :1] @ torch.ones(1, 3)[:, :3]), _as_ever(wrapped, x, x[:, :1] @ torch.ones(1, 3))
            )
        for x in _batches():  # once the same tensor twice, which is another kind of call
            _assert_same(wrapped(x, x, return_risk=True), _as_ever(wrapped, x, x, return_risk=True))


def test_dealt_rows_are_drawn_anew() -> None:
    wrapped, x = _wrapped(mlp, vote.Wrapper(2)), torch.ones(8, 3)
    with torch.no_grad():
        dealt = torch.stack([wrapped(x, tile_and_reduce=False) for _ in range(CALLS)])
    assert len(dealt.flatten(1).unique(dim=0)) > CALLS // 2
    assert _calls_of(wrapped).replays == 0


class Boxes(nn.Module):
    """As many boxes for each input, whatever it is."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.score = nn.Linear(3, 4), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        corners = self.net(x)
        return {
            "boxes": torch.cat([corners[:, :2], corners[:, :2] + corners[:, 2:].exp()], 1),
            "scores": self.score(x).sigmoid()[:, 0],
            "labels": torch.ones(x.shape[0], dtype=torch.int64),
        }


def test_boxes_are_matched_anew() -> None:
    wrapped = _wrapped(Boxes, vote.Wrapper(3, output=Detections("boxes", "scores", "labels")))
    with torch.no_grad():
        for x in _batches():
            _assert_same(wrapped(x), _as_ever(wrapped, x))
    assert _calls_of(wrapped).replays == 0


def test_units_count() -> None:
    wrapped = _wrapped(mlp)
    wrapped.scale(x_mean=1.0, x_scale=2.0, y_mean=3.0, y_scale=4.0)
    with torch.no_grad():
        for x in _batches():
            _assert_same(wrapped(x, return_risk=True), _as_ever(wrapped, x, return_risk=True))
        assert _calls_of(wrapped).replays > 10
        wrapped.scale(y_mean=0.0, y_scale=1.0)
        _assert_same(wrapped(x, return_risk=True), _as_ever(wrapped, x, return_risk=True))


def test_other_forms_are_other_calls() -> None:
    wrapped = _wrapped(mlp)
    with torch.no_grad():
        for x in _batches(12):
            for other in (x, x[:2], x.t().contiguous().t(), x[::2], x[0], x.view(1, 5, 3)):
                _assert_same(wrapped(other, return_risk=True), _as_ever(wrapped, other, return_risk=True))
        assert _calls_of(wrapped).replays > 10
        wrapped.double()
        for x in _batches(8):
            _assert_same(wrapped(x.double(), return_risk=True), _as_ever(wrapped, x.double(), return_risk=True))
    assert _calls_of(wrapped).replays


# ---- changes between calls
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
    wrapped = _wrapped(Residual)
    x = _batches()[0]
    with torch.no_grad():
        for _ in range(CALLS):
            wrapped(x, return_risk=True)
        assert _calls_of(wrapped).replays > 10
        CHANGES[name](wrapped)
        x = x.to(next(wrapped.parameters()).dtype)
        for _ in range(CALLS):
            y, risk = wrapped(x, return_risk=True)
            voters = torch.stack([voter(x) for voter in wrapped.voters()])
            torch.testing.assert_close(y, voters.mean(0))
            torch.testing.assert_close(risk, voters.std(0, correction=0))


def test_classes_and_globals_count_at_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped, x = _wrapped(ReadsGlobal), _batches()[0]
    with torch.no_grad():
        for _ in range(CALLS):
            before = wrapped(x)
        monkeypatch.setattr(traced_models, "SCALE", 3.0)
        torch.testing.assert_close(wrapped(x), 3 * before)
        monkeypatch.setattr(ReadsGlobal, "forward", lambda self, x: 7 * self.net(x))
        torch.testing.assert_close(copy.deepcopy(wrapped)(x), 7 * before)
        torch.testing.assert_close(wrapped(x), 7 * before)


def test_a_mode_and_back() -> None:
    wrapped, x = _wrapped(mlp, vote.Wrapper(3)), _batches()[0]
    with torch.no_grad():
        for _ in range(CALLS):
            expected = wrapped(x, return_risk=True)
        before = _calls_of(wrapped).replays
        wrapped.train()
        wrapped(x, return_risk=True)
        wrapped.eval()
        _assert_same(wrapped(x, return_risk=True), expected)
    assert _calls_of(wrapped).replays == before + 1
    assert wrapped(x).requires_grad


def test_what_torch_keeps_for_a_thread_counts() -> None:
    wrapped, x = _wrapped(mlp), _batches()[0]
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
            before = _calls_of(wrapped).replays
            wrapped(x)
            assert _calls_of(wrapped).replays == before + 1
        assert not wrapped(x).is_inference()


def test_hooks_for_all_modules_fire() -> None:
    wrapped, x, seen = _wrapped(mlp), _batches()[0], []
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
    wrapped, x = _wrapped(mlp, neo.Wrapper()), _batches()[0]
    with torch.no_grad():
        for _ in range(CALLS):
            wrapped(x, return_risk=True)
        assert _calls_of(wrapped).replays
        wrapped.fit(torch.randn(50, 3) + 1)
        for _ in range(CALLS):
            _assert_same(wrapped(x, return_risk=True), _as_ever(wrapped, x, return_risk=True))


def test_held_noise_stays() -> None:
    wrapped, x = _wrapped(mlp, sample.Wrapper(4)), _batches()[0]
    with torch.no_grad():
        for _ in range(CALLS):
            wrapped(x)
        with sample.hold_noise(wrapped):
            assert torch.equal(wrapped(x), wrapped(x))
        assert not torch.equal(wrapped(x), wrapped(x))


def test_nan_is_told_once() -> None:
    wrapped, x = _wrapped(mlp), _batches()[0]
    with torch.no_grad():
        for _ in range(CALLS):
            wrapped(x, return_risk=True)
        bad = x.clone()
        bad[0] = torch.nan
        with pytest.warns(WorkbenchWarning, match="the risk is NaN in some rows; 1 rows of the input"):
            y, _ = wrapped(bad, return_risk=True)
        assert y.isnan().any(1).tolist() == [True, False, False, False, False]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            wrapped(bad, return_risk=True)


def test_answers_are_the_callers_own() -> None:
    wrapped, x = _wrapped(mlp), _batches()[0]
    with torch.no_grad():
        for _ in range(CALLS):
            first = wrapped(x, return_risk=True)
        kept = [tensor.clone() for tensor in first]
        for tensor in wrapped(x, return_risk=True):
            tensor.zero_()
        _assert_same(first, kept)
        _assert_same(wrapped(x, return_risk=True), kept)


class Passing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(x), x


def test_an_output_that_is_an_input_is_left_alone() -> None:
    wrapped, x = _wrapped(Passing, sculpt.Wrapper()), _batches()[0]
    with torch.no_grad():
        for _ in range(CALLS):
            _, same = wrapped(x)
            assert same.data_ptr() == _as_ever(wrapped, x)[1].data_ptr()


def test_a_difference_ends_it_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody looks at: a function inside torch."""
    wrapped, x = _wrapped(lambda: mlp(nn.GELU())), _batches()[0]
    gelu = F.gelu
    with torch.no_grad():
        for _ in range(12):
            wrapped(x)
        monkeypatch.setattr(F, "gelu", lambda h, approximate: 2 * gelu(h))
        with pytest.warns(WorkbenchWarning, match="something outside of the model"):
            answers = [wrapped(x) for _ in range(CALLS)]
        _assert_same(answers[-1], _as_ever(wrapped, x))
    assert _calls_of(wrapped).off


def test_a_model_that_changes_again_and_again_is_recorded_anew() -> None:
    wrapped, x = _wrapped(Residual), _batches()[0]
    with torch.no_grad():
        for scale in (1.0, 2.0, 3.0):
            wrapped.scale = scale
            for _ in range(CALLS):
                _assert_same(wrapped(x), _as_ever(wrapped, x))
    assert _calls_of(wrapped).replays > 20


def test_threads_get_right_answers() -> None:
    wrapped, batches = _wrapped(mlp), _batches(10)
    with torch.no_grad():
        expected = [_as_ever(wrapped, x, return_risk=True) for x in batches]

    def serve() -> None:
        with torch.no_grad():
            for _ in range(5):
                for x, right in zip(batches, expected, strict=True):
                    _assert_same(wrapped(x, return_risk=True), right)

    in_threads(serve, 3)


def test_a_recorded_model_goes_away() -> None:
    wrapped, x = _wrapped(mlp), _batches()[0]
    with torch.no_grad():
        for _ in range(CALLS):
            wrapped(x)
    gone = weakref.ref(next(wrapped.parameters()))
    del wrapped
    gc.collect()
    assert gone() is None


# ---- when a graph is made
def _made_after(wrapped: Any, shape: tuple[int, ...]) -> int:
    """How many calls of a form are taken before a graph is made for it."""
    kinds = _calls_of(wrapped)
    before = kinds._made
    for n in range(1, 40):
        with torch.no_grad():
            wrapped(torch.ones(shape), return_risk=True)
        if kinds._made > before:
            return n
    return 0


def test_short_calls_are_recorded_soon_and_those_in_many_forms_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_calls, "MIN_CALLS", 15)
    monkeypatch.setattr(recorded_calls, "SHORT_SECONDS", 1e9)
    wrapped = _wrapped(mlp)
    assert [_made_after(wrapped, (rows, 3)) for rows in range(1, 7)] == [2, 2, 2, 2, 16, 16]


def test_long_calls_are_recorded_when_they_have_come_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_calls, "MIN_CALLS", 15)
    monkeypatch.setattr(recorded_calls, "SHORT_SECONDS", 0.0)
    assert _made_after(_wrapped(mlp), (5, 3)) == 16
