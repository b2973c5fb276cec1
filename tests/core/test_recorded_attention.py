"""Recorded predictions of torch's attention and recurrent layers equal loops over copies; whatever could change them counts at the next call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from helpers.recorded_calls import CALLS, assert_same, calls_of, record_early, wrapped_as
from helpers.sequence_models import MODELS, ROWS, STEPS, WIDTH, Inputs, Plain, encoder, sequence
from torch import Tensor, nn
from torch.nn import functional as F

from workbench import neo, sculpt, vote


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    record_early(monkeypatch)


def _without_graphs(wrapped: Any) -> Any:
    other = copy.deepcopy(wrapped)
    calls_of(other).off = "as ever"
    return other


def _copies(wrapped: Any) -> list[nn.Module]:
    return [copy.deepcopy(voter) for voter in wrapped.voters()]


def _assert_as_loop(wrapped: Any, copies: list[nn.Module], inputs: Inputs) -> None:
    """A call gives what a loop over copies of the voters gives."""
    y, risk = wrapped(*inputs, return_risk=True)
    answers = torch.stack([voter(*inputs) for voter in copies])
    close: dict[str, float] = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(y, answers.mean(0), **close)
    torch.testing.assert_close(risk, answers.std(0, correction=0), **close)


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors", "ignore:enable_nested_tensor is True", "ignore:LSTM with projections"
)
@pytest.mark.parametrize(
    ("name", "n"), [*((name, 2) for name in MODELS), *((name, 6) for name in ("encoder", "padding", "decoder", "LSTM"))]
)
def test_predictions_are_those_of_a_loop(name: str, n: int) -> None:
    """And to the last bit those without graphs."""
    build, inputs, recorded = MODELS[name]
    wrapped = wrapped_as(build, vote.Wrapper(n))
    other, copies = _without_graphs(wrapped), _copies(wrapped)
    with torch.no_grad():
        for i in range(CALLS):
            _assert_as_loop(wrapped, copies, inputs(i))
            before = calls_of(wrapped).replays
            answers = wrapped(*inputs(i)), other(*inputs(i))
            if calls_of(wrapped).replays > before:
                assert_same(*answers)
    assert (calls_of(wrapped).replays > 10) == recorded, calls_of(wrapped).off


@pytest.mark.parametrize("frozen", [False, True], ids=["open", "frozen"])
@pytest.mark.parametrize("wrapper", [sculpt.Wrapper(), neo.Wrapper()], ids=repr)
@pytest.mark.parametrize("name", ["encoder", "attention", "LSTM", "GRU"])
def test_predictions_of_one_model_are_its_own(name: str, wrapper: Any, frozen: bool) -> None:
    """Also in inference mode, where torch keeps some operations whole."""
    build, inputs, _ = MODELS[name]
    torch.manual_seed(0)
    model = build().eval()
    plain = copy.deepcopy(model)
    wrapped = wrapper(model).eval()
    if wrapped.needs_fit:
        wrapped.fit(*inputs(100))
    other = _without_graphs(wrapped)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), wrapped.frozen() if frozen else nullcontext():
            before = calls_of(wrapped).replays
            for i in range(CALLS):
                y, risk = wrapped(*inputs(i), return_risk=True)
                assert_same((y, risk), other(*inputs(i), return_risk=True))
                torch.testing.assert_close(y, plain(*inputs(i)))
            assert calls_of(wrapped).replays > before + 8, calls_of(wrapped).off


# ---- what could make a recorded call wrong
def _write(wrapped: Any) -> None:
    for parameter in wrapped.parameters():
        parameter.data.mul_(1.5)


def _load(wrapped: Any) -> None:
    state = wrapped.state_dict()
    wrapped.load_state_dict({key: x + 1 if x.is_floating_point() else x for key, x in state.items()})


def _exchange_data(wrapped: Any) -> None:
    for parameter in wrapped.parameters():
        parameter.data = 1.5 * parameter.data


def _hooked(path: str) -> Callable[[Any], Any]:
    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        return (2 * out[0], *out[1:]) if isinstance(out, tuple) else 2 * out

    return lambda wrapped: wrapped.get_submodule(path).register_forward_hook(hook)


def _exchange_activation(wrapped: Any) -> None:
    layer = wrapped.layer.layers[0]
    layer.activation, layer.activation_relu_or_gelu = F.gelu, 2


def _in_layer(path: str, name: str, value: Any) -> Callable[[Any], Any]:
    return lambda wrapped: setattr(wrapped.get_submodule(path), name, value)


CHANGES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "written": ("encoder", _write),
    "data": ("encoder", _exchange_data),
    "dtype": ("encoder", lambda wrapped: wrapped.double()),
    "load": ("encoder", _load),
    "hook on attention": ("encoder", _hooked("layer.layers.1.self_attn")),
    "hook on a norm": ("encoder", _hooked("layer.layers.0.norm2")),
    "activation": ("encoder", _exchange_activation),
    "norms first": ("encoder", _in_layer("layer.layers.0", "norm_first", True)),
    "epsilon": ("encoder", _in_layer("layer.layers.1.norm1", "eps", 0.5)),
    "heads": ("encoder", _in_layer("layer.layers.0.self_attn", "num_heads", 4)),
    "rows first": ("encoder", _in_layer("layer.layers.0.self_attn", "batch_first", False)),
    "layer's forward": ("encoder", _in_layer("layer.layers.0", "forward", lambda h, **masks: h)),
    "padding": ("padding", lambda wrapped: None),
    "written, LSTM": ("LSTM", _write),
    "data, LSTM": ("LSTM", _exchange_data),
    "dtype, LSTM": ("LSTM", lambda wrapped: wrapped.double()),
    "hook on LSTM": ("LSTM", _hooked("layer")),
    "rows first, LSTM": ("LSTM", _in_layer("layer", "batch_first", False)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_count_at_the_next_call(name: str) -> None:
    model, change = CHANGES[name]
    build, inputs, _ = MODELS[model]
    wrapped = wrapped_as(build)
    with torch.no_grad():
        for i in range(CALLS):
            wrapped(*inputs(i), return_risk=True)
        assert calls_of(wrapped).replays > 10
        change(wrapped)
        dtype, copies = next(wrapped.parameters()).dtype, _copies(wrapped)
        for i in range(CALLS):
            changed = tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs(i))
            _assert_as_loop(wrapped, copies, changed)


@pytest.mark.parametrize("path", ["layer", "layer.layers.1"])
def test_dropout_that_becomes_active_counts(path: str) -> None:
    wrapped, inputs = wrapped_as(MODELS["encoder"][0]), sequence(0)
    with torch.no_grad():
        for _ in range(CALLS):
            still = wrapped(*inputs)
        assert calls_of(wrapped).replays > 10
        wrapped.get_submodule(path).train()
        answers = torch.stack([wrapped(*inputs) for _ in range(CALLS)])
        assert len(answers.flatten(1).unique(dim=0)) == CALLS
        wrapped.eval()
        torch.testing.assert_close(wrapped(*inputs), still)


@contextmanager
def _without_fast_path() -> Iterator[None]:
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


SETTINGS: dict[str, tuple[str, Callable[[], Any]]] = {
    "fast path": ("encoder", _without_fast_path),
    "kernels of attention": ("odd heads", lambda: nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH)),
    "oneDNN": ("LSTM", lambda: torch.backends.mkldnn.flags(enabled=False)),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_torch_end_a_graph(name: str) -> None:
    model, setting = SETTINGS[name]
    build, inputs, _ = MODELS[model]
    wrapped, other_rows = wrapped_as(build), tuple(x[:2] for x in inputs(0))
    copies = _copies(wrapped)
    with torch.no_grad():
        for i in range(CALLS):
            wrapped(*inputs(i), return_risk=True)
        before = calls_of(wrapped).replays
        with setting():
            for _ in range(CALLS):  # also graphs recorded under the setting do not bring the others back
                wrapped(*other_rows, return_risk=True)
            during = calls_of(wrapped).replays
            _assert_as_loop(wrapped, copies, inputs(0))
            assert calls_of(wrapped).replays == during > before > 10
        for i in range(CALLS):
            _assert_as_loop(wrapped, copies, inputs(i))


@pytest.mark.parametrize("name", ["encoder", "attention", "LSTM", "GRU"])
def test_modes_of_torch_count(name: str) -> None:
    build, inputs, _ = MODELS[name]
    wrapped = wrapped_as(build)
    copies = _copies(wrapped)
    with torch.no_grad():
        for i in range(CALLS):
            wrapped(*inputs(i), return_risk=True)
        before = calls_of(wrapped).replays
        with torch.autocast("cpu", torch.bfloat16):
            answers = torch.stack([voter(*inputs(0)) for voter in copies])
            torch.testing.assert_close(wrapped(*inputs(0)), answers.mean(0), rtol=0.05, atol=0.05)
        assert calls_of(wrapped).replays == before
    assert wrapped(*inputs(0)).requires_grad
    wrapped.train()
    assert wrapped(*inputs(0)).requires_grad
    wrapped.eval()
    with torch.no_grad():
        _assert_as_loop(wrapped, copies, inputs(0))
        assert calls_of(wrapped).replays == before + 1


@pytest.mark.parametrize("name", ["encoder", "attention", "LSTM", "GRU", "padding"])
def test_other_forms_are_other_calls(name: str) -> None:
    build, inputs, _ = MODELS[name]
    wrapped = wrapped_as(build)

    def transposed(x: Tensor) -> Tensor:
        return x.transpose(0, 1).contiguous().transpose(0, 1)

    forms: list[Callable[[Tensor], Tensor]] = [lambda x: x, lambda x: x[:2], lambda x: x[:, :3], transposed]
    copies = _copies(wrapped)
    with torch.no_grad():
        for i in range(12):
            for form in forms:
                _assert_as_loop(wrapped, copies, tuple(map(form, inputs(i))))
    assert calls_of(wrapped).replays > 10


def test_a_layer_without_a_model_around_it_is_recorded() -> None:
    for build in (encoder, lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)):
        wrapped = wrapped_as(build)
        copies = _copies(wrapped)
        with torch.no_grad():
            for i in range(CALLS):
                x = torch.randn(ROWS, STEPS, WIDTH, generator=torch.Generator().manual_seed(i))
                _assert_as_loop(wrapped, copies, (x,))
        assert calls_of(wrapped).replays > 10


def test_another_weight_in_the_list_of_a_recurrent_layer_counts() -> None:
    """The list from which forward reads its weights, which nothing but torch should write."""
    model = MODELS["LSTM"][0]().eval()
    wrapped = sculpt.Wrapper(n_layers=1)(model).eval()
    (x,) = sequence(0)
    with torch.no_grad():
        for _ in range(CALLS):
            wrapped(x)
        assert calls_of(wrapped).replays > 10
        lstm = wrapped.get_submodule("layer")
        lstm._flat_weights[0] = nn.Parameter(2 * lstm.weight_ih_l0)
        before = calls_of(wrapped).replays
        wrapped(x)
        assert calls_of(wrapped).replays == before


class _Packing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(2, WIDTH, batch_first=True), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.out(self.lstm(packed)[1][0][-1])


def test_packed_sequences_are_computed_anew() -> None:
    wrapped = wrapped_as(_Packing)
    copies = _copies(wrapped)
    with torch.no_grad():
        for i in range(CALLS):
            lengths = 1 + torch.randint(STEPS, (ROWS,), generator=torch.Generator().manual_seed(i))
            _assert_as_loop(wrapped, copies, (*sequence(i), lengths))
    assert calls_of(wrapped).replays == 0


def test_an_activation_of_the_users_is_left_alone() -> None:
    """A function that nobody has looked at."""
    scale = [1.0]
    wrapped = wrapped_as(lambda: Plain(encoder(activation=lambda h: scale[0] * h.relu())))
    with torch.no_grad():
        for i in range(CALLS):
            wrapped(*sequence(i))
        assert calls_of(wrapped).replays == 0
        scale[0] = 2.0
        _assert_as_loop(wrapped, _copies(wrapped), sequence(0))
