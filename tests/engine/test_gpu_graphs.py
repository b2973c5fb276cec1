"""On a GPU: replayed steps, captured, compiled and recorded calls equal eager ones, and warm ones do not wait."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers.device_models import MODELS, WRAPPERS, criterion_of, leaves, quiet, trained
from helpers.gpu import DEVICE, MOST, NEEDS_GPU, full_precision, no_wait
from helpers.recorded_calls import calls_of, record_early
from helpers.replayed_steps import replay_early
from helpers.threads import in_threads
from torch import nn

from workbench import compose, fit, sculpt, vote
from workbench.distributions import LogitNormal
from workbench.training.backward import Backward
from workbench.training.traced_step import TracedStep

pytestmark = NEEDS_GPU
__all__ = ["full_precision"]  # a fixture for all tests here


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> list[TracedStep]:
    return replay_early(monkeypatch)


REPLAYED = [
    "plain",
    "vote",
    "vote last layer",
    "vote in chunks",
    "sculpt",
    "sample",
    "sample, weights",
    "neo",
    "vote of sculpt, with neo",
]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", REPLAYED)
def test_replayed_steps_are_the_eager_ones(name: str, model: str, early: list[TracedStep]) -> None:
    """In double precision, where atomic additions round to sixteen digits."""
    make, shape = MODELS[model]
    x = torch.randn(96, *shape, generator=torch.Generator().manual_seed(0))
    y = torch.stack([x.flatten(1).sum(1), x.flatten(1).amax(1), x.flatten(1).prod(1)], 1)
    states, losses = [], []
    for strategy in (None, "eager"):
        torch.manual_seed(0)
        wrapped = WRAPPERS[name](make())
        options: dict[str, Any] = {"epochs": 8, "batch_size": 16, "validation": 0, "dtype": torch.float64}
        with quiet():
            history = fit(wrapped, (x, y), device=DEVICE, strategy=strategy, progress=False, **options)
        states.append(wrapped.state_dict())
        losses.append(history.frame.loss.tolist())
    assert early[0].off == ""
    assert early[0].replays > 30
    assert losses[0] == pytest.approx(losses[1], rel=1e-8)
    for key, value in states[0].items():
        if isinstance(value, torch.Tensor) and not key.startswith("settings@"):
            torch.testing.assert_close(
                value, states[1][key], rtol=1e-6, atol=1e-8, msg=lambda text, key=key: key + text
            )


@pytest.mark.parametrize("n_voters", [1, 5])
def test_replayed_steps_of_noisy_classes_are_the_eager_ones(n_voters: int, early: list[TracedStep]) -> None:
    x, y = torch.randn(96, 4, generator=torch.Generator().manual_seed(0)), torch.arange(96) % 3
    states = []
    for strategy in (None, "eager"):
        torch.manual_seed(0)
        wrapper: Any = sculpt.Wrapper(LogitNormal, n_layers=1, output="logits")
        if n_voters > 1:
            wrapper = compose(vote.Wrapper(n_voters, share=1, output="logits"), sculpt.Wrapper(LogitNormal, n_layers=1))
        wrapped = wrapper(MODELS["mlp"][0]())
        options: dict[str, Any] = {"epochs": 8, "batch_size": 16, "validation": 0, "dtype": torch.float64}
        with quiet():
            fit(wrapped, (x, y), device=DEVICE, strategy=strategy, progress=False, **options)
        states.append(wrapped.state_dict())
    assert early[0].off == ""
    assert early[0].replays > 30
    for key, value in states[0].items():
        if isinstance(value, torch.Tensor) and not key.startswith("settings@"):
            torch.testing.assert_close(
                value, states[1][key], rtol=1e-6, atol=1e-8, msg=lambda text, key=key: key + text
            )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", REPLAYED)
def test_replayed_steps_do_not_wait(name: str, model: str, early: list[TracedStep]) -> None:
    """Those compared with eager steps, at run numbers that are powers of two, do not either, apart from the first four."""
    with quiet():
        wrapped, x, y = trained(WRAPPERS[name], model)
    wrapped.to(DEVICE).train()
    x, y = x.to(DEVICE), y.to(DEVICE)
    criterion = criterion_of(wrapped)
    if wrapped.methods == ("neo",):
        criterion = torch.nn.functional.mse_loss
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4, fused=True)
    backward = Backward(wrapped, criterion)

    def step() -> None:
        optimizer.zero_grad()
        backward(x, y)
        optimizer.step()

    with quiet():
        for _ in range(12):
            step()
        torch.cuda.synchronize()
        assert early[-1].off == ""
        replays = early[-1].replays
        assert replays > 5
        with no_wait():
            for _ in range(8):
                step()
    assert early[-1].replays == replays + 8


def test_rows_are_not_dealt_in_a_graph() -> None:
    wrapped = vote.Wrapper(3)(MODELS["mlp"][0]().to(DEVICE)).train()
    x = torch.zeros(9, 4, device=DEVICE)
    wrapped(x)
    with pytest.raises(RuntimeError, match="each replay"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        wrapped(x)


@pytest.mark.parametrize("name", [*MOST, "class probabilities"])
def test_a_captured_call_answers_as_an_eager_one(name: str) -> None:
    with quiet():
        wrapped, x, _ = trained(WRAPPERS[name], "cnn")
    wrapped.to(DEVICE).eval()
    static_input, other = x.to(DEVICE), torch.randn(x.shape, device=DEVICE)
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side_stream):
        for _ in range(3):
            wrapped(static_input, return_risk=True)
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = leaves(wrapped(static_input, return_risk=True))
    static_input.copy_(other)
    graph.replay()
    replayed = [leaf.clone() for leaf in captured]
    if name == "sample":
        graph.replay()
        assert not torch.equal(replayed[0], captured[0])  # each time with other noise
        return
    with torch.no_grad():
        for a, b in zip(replayed, leaves(wrapped(other, return_risk=True)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["vote", "vote last layer", "sculpt", "sample"])
def test_compiled_predictions_and_steps_in_cuda_graphs(name: str) -> None:
    torch._dynamo.reset()
    with quiet():
        wrapped, x, y = trained(WRAPPERS[name], "mlp")
    wrapped.to(DEVICE)
    x, y = x.to(DEVICE), y.to(DEVICE)
    wrapped.eval()(x, return_risk=True)
    compiled = torch.compile(wrapped, mode="reduce-overhead")
    with torch.no_grad(), quiet():
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            outputs = [leaf.clone() for leaf in leaves(compiled(x, return_risk=True))]
        if name != "sample":
            for a, b in zip(outputs, leaves(wrapped(x, return_risk=True)), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)

    wrapped.train()
    criterion = criterion_of(wrapped)
    loss_of = torch.compile(lambda: wrapped.loss(criterion, x, y), mode="reduce-overhead")
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2, fused=True)
    losses = []
    with quiet():
        for _ in range(30):
            torch.compiler.cudagraph_mark_step_begin()
            optimizer.zero_grad()
            loss = loss_of()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    assert losses[-1] < losses[0]


# ---- recorded calls
def asked_often(wrapped: Any, x: torch.Tensor, n: int = 60) -> list[torch.Tensor]:
    """The last answer of calls that have been recorded meanwhile."""
    with torch.no_grad(), quiet():
        for _ in range(n):
            answer = leaves(wrapped(x, return_risk=True))
            torch.cuda.synchronize()  # so that comparisons arrive
    return answer


@pytest.fixture
def recorded_early(monkeypatch: pytest.MonkeyPatch) -> None:
    record_early(monkeypatch)


@pytest.mark.usefixtures("recorded_early")
@pytest.mark.parametrize("n", [5, 16])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("frozen", [False, True], ids=["open", "frozen"])
def test_recorded_calls_answer_as_a_loop_over_copies(model: str, n: int, frozen: bool) -> None:
    make, shape = MODELS[model]
    wrapped = vote.Wrapper(n)(make().to(DEVICE)).eval()
    copies = [copy.deepcopy(voter).to(DEVICE).eval() for voter in wrapped.voters()]
    x, other = torch.randn(2, 12, *shape, device=DEVICE)
    with wrapped.frozen() if frozen else nullcontext():
        asked_often(wrapped, x)
        calls = calls_of(wrapped)
        if model == "transformer":  # which no graph answers on a CPU either
            assert calls.replays == 0
            return
        before = calls.replays
        with torch.no_grad(), no_wait():
            y, risk = wrapped(other, return_risk=True)
    assert calls.off == ""
    assert calls.replays == before + 1 > 20
    with torch.no_grad():
        answers = torch.stack([each(other) for each in copies])
    torch.testing.assert_close(y, answers.mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(risk, answers.std(0, correction=0), rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("recorded_early")
@pytest.mark.parametrize("model", ["mlp", "cnn"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_recorded_calls_answer_as_eager_ones_without_waiting(name: str, model: str) -> None:
    with quiet():
        wrapped, x, _ = trained(WRAPPERS[name], model)
    wrapped.to(DEVICE).eval()
    x = x.to(DEVICE)
    other = copy.deepcopy(wrapped)
    calls_of(other).off = "for comparison"
    results = []
    for part in (wrapped, other):
        torch.manual_seed(3)
        asked_often(part, x)
        with no_wait(), torch.no_grad():
            answers = [leaves(part(x + i, return_risk=True)) for i in range(9)]
        results.append([*answers, torch.rand(4, device=DEVICE), torch.rand(4)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    # with neo, signatures of a CNN are recorded nowhere
    if name in ("vote", "vote last layer", "sculpt", "sample") or (model, name) == ("mlp", "neo"):
        assert calls_of(wrapped).replays > 20, calls_of(wrapped).off


@pytest.mark.usefixtures("recorded_early")
def test_what_no_recorded_call_answers() -> None:
    """Inputs elsewhere, autocast, captures, gradients, and a model that has moved."""
    wrapped = vote.Wrapper(5)(MODELS["mlp"][0]().to(DEVICE)).eval()
    x = torch.randn(12, 4)
    eager = asked_often(copy.deepcopy(wrapped), x.to(DEVICE), 1)
    asked_often(wrapped, x.to(DEVICE))
    calls = calls_of(wrapped)
    n = calls.replays
    assert n
    with torch.no_grad(), pytest.raises(RuntimeError, match="same device"):
        wrapped(x, return_risk=True)
    with torch.autocast(DEVICE, torch.bfloat16):
        y = asked_often(wrapped, x.to(DEVICE))[0]
        torch.testing.assert_close(y.float(), eager[0], rtol=0.1, atol=0.1)
        assert not torch.equal(y.float(), eager[0])
    wrapped(x.to(DEVICE), return_risk=True)[0].sum().backward()
    assert all(p.grad is not None for p in wrapped.parameters())
    static_input, graph = x.to(DEVICE), torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        answer = leaves(wrapped(static_input, return_risk=True))
    static_input += 1
    graph.replay()
    torch.testing.assert_close(answer, asked_often(copy.deepcopy(wrapped), static_input, 1), rtol=1e-4, atol=1e-5)
    assert calls.replays == n
    asked_often(wrapped, x.to(DEVICE), 1)
    assert calls.replays == n + 1
    wrapped.cpu()
    with torch.no_grad():
        torch.testing.assert_close(wrapped(x), eager[0].cpu(), rtol=1e-4, atol=1e-5)
    outputs = asked_often(wrapped.to(DEVICE), x.to(DEVICE))
    assert calls_of(wrapped).replays
    torch.testing.assert_close(outputs, eager, rtol=1e-4, atol=1e-5)
    for p in wrapped.parameters():  # the same objects elsewhere
        p.data = p.data.cpu()
    with torch.no_grad(), pytest.raises(RuntimeError, match="same device"):
        wrapped(x.to(DEVICE), return_risk=True)


@pytest.mark.usefixtures("recorded_early")
def test_a_recorded_call_keeps_no_activations() -> None:
    model = nn.Sequential(nn.Linear(4, 4096), nn.Tanh(), nn.Linear(4096, 1)).to(DEVICE)
    wrapped = vote.Wrapper(4)(model).eval()
    x = torch.randn(1024, 4, device=DEVICE)
    asked_often(wrapped, x, 2)
    before = torch.cuda.memory_allocated()
    asked_often(wrapped, x)
    assert calls_of(wrapped).replays
    assert torch.cuda.memory_allocated() - before < 2**20


@pytest.mark.usefixtures("recorded_early")
def test_recorded_calls_in_another_stream_and_in_threads() -> None:
    wrapped = vote.Wrapper(5)(MODELS["mlp"][0]().to(DEVICE)).eval()
    inputs = list(torch.randn(8, 12, 4, device=DEVICE))
    other = copy.deepcopy(wrapped)
    with torch.no_grad():
        expected = [leaves(other(x, return_risk=True)) for x in inputs]
    asked_often(wrapped, inputs[0])
    torch.cuda.synchronize()

    def serve() -> None:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                outputs = [leaves(wrapped(x, return_risk=True)) for x in inputs]
            torch.cuda.current_stream().synchronize()
            torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)

    in_threads(serve, 3)
    assert calls_of(wrapped).replays > 100
