"""torch.compile: a wrapped model is one graph, equals plain models, and is not recompiled at every call."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.conformance_table import EXHAUSTIVE, is_due
from helpers.reference_from_state import (
    CERTAIN,
    KINDS,
    Net,
    assert_answer,
    assert_buffers,
    assert_gradients,
    close,
    data,
    expected,
    expected_loss,
    objective,
    parts,
    seeded,
    state_of,
    wrap,
)
from torch import Tensor, nn

from workbench.engine.run import Engine

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")
BREAKS = {  # wrapper, in training mode: a call with risk that is no single graph
    ("sample_sculpt", False),  # both heads must draw the same numbers, which a graph cannot do
    ("sample_sculpt", True),
    ("neo", True),  # a signature that is being learned looks at its own state
}


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Graphs:
    """A backend that runs what Dynamo found as it is, with the random numbers of eager mode, or gives it to another backend, and counts."""

    def __init__(self, backend: str = "eager") -> None:
        self.count, self.backend = 0, torch._dynamo.lookup_backend(backend)

    def __call__(self, graph: Any, inputs: list[Tensor]) -> Any:
        self.count += 1
        return self.backend(graph, inputs)


def ways(name: str, training: bool) -> list[dict[str, Any]]:
    """The keyword arguments of the calls that have a reference: with and without risk; dealt rows are tested apart."""
    plain = {"tile_and_reduce": True} if "vote" in name and training else {}
    return [plain, {"return_risk": True}]


# ---- one graph, the right numbers ------------------------------------------------------------------------------------


LONG = {"vote", "vote_rank1", "vote_sculpt", "sample_sculpt", "sample_activations", "neo"}  # to compile


def in_short(names: list[str], plain: set[str]) -> Any:
    """Parametrize by wrapper: compiling takes seconds, so that some of them stand for all between changes and the others are slow."""
    marked = [pytest.param(name, marks=[] if name in plain else pytest.mark.slow) for name in names]
    return pytest.mark.parametrize("name", marked)


@pytest.mark.parametrize(
    ("name", "training"),
    [
        pytest.param(name, training, marks=[pytest.mark.slow] * (name in LONG or (i + training) % 2))
        for i, name in enumerate([*KINDS, "neo"])
        for training in (False, True)
    ],
)
def test_a_wrapped_model_is_one_graph_with_the_numbers_of_plain_models(name: str, training: bool) -> None:
    for kwargs in ways(name, training):
        risk = "return_risk" in kwargs
        breaks = risk and (name, training) in BREAKS
        wrapped = wrap(name).train(training)
        wrapped(data(seed=9)[0], **kwargs)  # the call in which the model is looked at
        state, (x, _) = state_of(wrapped), data()
        torch._dynamo.reset()
        # the gradients are those of a compiled backward pass as well
        graphs = Graphs("aot_eager" if risk and training and name in CERTAIN else "eager")
        compiled = torch.compile(wrapped, backend=graphs, fullgraph=not breaks)
        if name == "neo" and risk:
            want = wrapped(x, **kwargs)
            for part, like in zip(compiled(x, **kwargs), want, strict=True):
                close(part, like, "neo")
        else:
            output = seeded(compiled, x, **kwargs)
            answer = seeded(expected, name, state, x, training, risk)
            assert_answer(output, answer)
            assert_buffers(wrapped, answer)
            objective(output).backward()
            objective(answer).backward()
            assert_gradients(wrapped, state)
        first = graphs.count
        assert first == 1 or breaks
        for seed in range(3):
            compiled(data(seed=seed)[0], **kwargs)
        assert graphs.count == first, "compiled anew"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sample_weights", "sample_activations"])
def test_compiled_samples_differ_from_each_other_and_from_call_to_call(name: str) -> None:
    wrapped = wrap(name).eval()
    x = data()[0]
    wrapped(x)
    compiled = torch.compile(wrapped, backend="aot_eager", fullgraph=True)
    answers = [compiled(x, return_risk=True) for _ in range(2)]
    assert all((risk > 0).any() for _, risk in answers)
    assert not torch.equal(answers[0][0], answers[1][0])


@pytest.mark.slow
@in_short(["vote", "vote_rank1", "vote_last2", "vote_sculpt"], {"vote_sculpt"})
def test_rows_are_dealt_in_one_graph(name: str) -> None:
    wrapped = wrap(name, nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()).train()
    wrapped(data(seed=9)[0])
    x = data()[0]
    graphs = Graphs()
    compiled = torch.compile(wrapped, backend=graphs, fullgraph=True)
    voters = torch.stack([voter(x) for voter in wrapped.voters()])
    seen = set()
    for _ in range(4):
        said = torch.isclose(voters, compiled(x)).all(2)
        assert torch.equal(said.sum(1), torch.full((3,), 2)), "each voter answers two of the six rows"
        seen.add(tuple(said.int().argmax(0).tolist()))
    assert len(seen) > 1, "dealt anew at each call"
    assert graphs.count == 1


@pytest.mark.slow
@in_short(["vote", "vote_last2", "sculpt", "sample_weights", "vote_sculpt"], {"sample_weights"})
def test_a_compiled_training_step_trains_as_plain_models_do(name: str) -> None:
    wrapped = wrap(name).train()
    graphs = Graphs()

    @torch.compile(backend=graphs)
    def step(x: Tensor, target: Tensor) -> Tensor:
        return wrapped.loss(nn.functional.mse_loss, x, target)

    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    counts = []
    for number in range(4):
        x, target = data(seed=number)
        state = state_of(wrapped)
        loss = seeded(step, x, target)
        like = seeded(expected_loss, name, state, x, target)
        close(loss, like, f"loss of step {number}")
        optimizer.zero_grad()
        loss.backward()
        like.backward()
        assert_gradients(wrapped, state)
        optimizer.step()
        counts.append(graphs.count)
    assert counts[-1] == counts[1], "compiled anew"


# ---- without a look, after changes -----------------------------------------------------------------------------------


@pytest.mark.slow
@in_short(["vote", "sculpt", "sample_activations", "sample_sculpt"], {"vote"})
def test_the_first_call_may_be_a_compiled_one(name: str) -> None:
    wrapped = wrap(name).eval()
    state = state_of(wrapped)
    graphs = Graphs()
    compiled = torch.compile(wrapped, backend=graphs)
    counts = []
    for seed in range(4):
        x = data(seed=seed)[0]
        assert_answer(seeded(compiled, x), seeded(expected, name, state, x, risk=False))
        counts.append(graphs.count)
    assert counts[1:] == [counts[1]] * 3, "compiled anew"


def test_what_fullgraph_needs_is_said() -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported, match="call it once before"):
        torch.compile(wrap("vote").eval(), backend="eager", fullgraph=True)(data()[0])


@in_short(["vote", "vote_rank1", "sculpt", "sample_weights"] if EXHAUSTIVE else ["vote_rank1", "sample_weights"], set())
def test_changed_tensors_layers_and_modes_are_seen(name: str) -> None:
    wrapped = wrap(name).eval()
    x = data()[0]
    compiled = torch.compile(wrapped, backend="eager")
    for _ in range(2):
        compiled(x)

    def check() -> None:
        answer = seeded(expected, name, state_of(wrapped), x, training=wrapped.training, risk=False)
        kwargs = {"tile_and_reduce": True} if "vote" in name else {}
        assert_answer(seeded(compiled, x, **kwargs), answer)
        assert_buffers(wrapped, answer)

    with torch.no_grad():
        for parameter in wrapped.parameters():
            parameter.mul_(0.5)
    check()
    wrapped.load_state_dict(wrap(name, Net()).state_dict())
    check()
    wrapped.train()
    check()
    check()
    wrapped.eval()
    check()
    assert_answer(seeded(wrapped, x), seeded(expected, name, state_of(wrapped), x, risk=False))  # and outside


@pytest.mark.slow
def test_a_batch_of_another_size_is_right_and_compiled_at_most_once_more() -> None:
    wrapped = wrap("vote_sculpt").eval()
    graphs = Graphs()
    state = state_of(wrapped)
    wrapped(data()[0])
    compiled = torch.compile(wrapped, backend=graphs, fullgraph=True)
    for rows in (6, 4, 9, 5):
        x = data(rows)[0]
        assert_answer(compiled(x, return_risk=True), expected("vote_sculpt", state, x))
    assert graphs.count <= 2


# ---- compiled before wrapping ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param(name, how, marks=[pytest.mark.slow] * (row != column))
        for row, name in enumerate(("vote", "vote_rank1", "sculpt", "sample_activations"))
        for column, how in enumerate(("torch.compile", "module.compile", "a layer"))
        if is_due(row, column, 2)
    ],
)
def test_a_compiled_model_can_be_wrapped(name: str, how: str) -> None:
    model: Any = Net()
    if how == "torch.compile":
        model = torch.compile(model, backend="eager")
    elif how == "module.compile":
        model.compile(backend="eager")
    else:
        model.second = torch.compile(model.second, backend="eager")
    model(data()[0])
    wrapped = wrap(name, model).eval()
    state = state_of(wrapped)
    x = data()[0]
    for _ in range(2):
        answer = seeded(expected, name, state, x)
        assert_answer(seeded(wrapped, x, return_risk=True), answer)


@pytest.mark.slow
@in_short(["vote", "sculpt", "sample_weights"], {"sculpt"})
def test_a_wrapped_model_compiles_in_place(name: str) -> None:
    wrapped = wrap(name).eval()
    graphs = Graphs()
    wrapped.compile(backend=graphs)
    state = state_of(wrapped)
    for seed in range(4):
        x = data(seed=seed)[0]
        assert_answer(seeded(wrapped, x, return_risk=True), seeded(expected, name, state, x))
    assert graphs.count
    assert wrapped.state_dict().keys() == wrap(name).state_dict().keys()


# ---- what cannot be one graph is right all the same ------------------------------------------------------------------


class Counting(Net):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Breaking(Net):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(torch._dynamo.disable(torch.sin)(x))


class Calling(Net):
    """Reaches its own forward by other ways."""

    def forward(self, x: Tensor, deep: bool = True) -> Tensor:
        return self(x, deep=False) + self.forward(x, deep=False) if deep else super().forward(x)


class Recurrent(Net):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(3, 3, batch_first=True).double()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.rnn(x[:, None])[0][:, 0])


class Hooked(Net):
    """With hooks of its own, and a forward that was set on the object."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda module, args, output: 3 * output)
        self.register_forward_pre_hook(lambda module, args: (args[0] / 2,))
        self.forward = lambda x: Net.forward(self, x).exp()  # type: ignore[method-assign]


class Writing(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cls"),
    [
        pytest.param(name, cls, id=f"{name}-{cls.__name__}")
        for row, cls in enumerate((Counting, Breaking, Calling, Recurrent, Hooked, Writing))
        for column, name in enumerate(("vote", "vote_rank1", "sculpt", "sample_weights"))
        if is_due(row, column, 2)
    ],
)
def test_models_that_are_no_single_graph(name: str, cls: type[Net]) -> None:
    wrapped = wrap(name, seeded(cls)).eval()
    state, x = state_of(wrapped), data()[0]
    answer = seeded(expected, name, state, x, make=cls)
    compiled = torch.compile(wrapped, backend="eager")
    for number in range(3):
        batch = x.clone()
        assert_answer(seeded(compiled, batch, return_risk=True), answer)
        assert torch.equal(batch, 2 * x if cls is Writing else x)
        assert getattr(wrapped, "calls", number + 1) == number + 1, "as if called once"


@pytest.mark.slow
def test_branches_outside_the_graph_are_not_compiled_frame_by_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    callbacks = []
    eager = Engine.eager

    def record(*args: Any) -> Any:
        callbacks.append(torch._C._dynamo.eval_frame.get_eval_frame_callback())
        return eager(*args)

    monkeypatch.setattr(Engine, "eager", record)
    compiled = torch.compile(wrap("sample_weights", seeded(Breaking)).eval(), backend="eager")
    for _ in range(2):
        compiled(data()[0], return_risk=True)
    assert callbacks == [None, None], "Dynamo would compile the engine itself"


class Shrinking(Net):
    """Goes through its parameters, of which Dynamo knows only those from before a call."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / (1 + sum(p.square().mean() for p in self.parameters())))


class OnDevice(Net):
    """Asks a parameter for its device alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(next(self.parameters()).device))


@pytest.mark.slow
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("model", [Shrinking, OnDevice])
def test_parameters_that_forward_goes_through_are_those_of_the_branch(model: type[Net], enabled: bool) -> None:
    wrapped, (x, _) = wrap("vote", model()).eval(), data()
    answers = torch.stack([voter(x) for voter in wrapped.voters()])
    compiled = torch.compile(wrapped, backend="eager", fullgraph=model is OnDevice)
    with torch.set_grad_enabled(enabled):
        wrapped(x)
        for _ in range(2):
            torch.testing.assert_close(compiled(x), answers.mean(0))


# ---- C++ -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vote_last2", "sample_activations"])
def test_inductor_gives_the_answers_of_plain_models(name: str) -> None:
    assert shutil.which("g++") or shutil.which("clang++") or sys.platform == "win32", (
        "torch.compile needs a C++ compiler on the CPU; install g++"
    )
    wrapped = wrap(name).train()
    x, _ = data()
    wrapped(x, return_risk=True)
    state = state_of(wrapped)
    output = torch.compile(wrapped, fullgraph=True)(x, return_risk=True)
    if name in CERTAIN:
        answer = expected(name, state, x, training=True)
        assert_answer(output, answer)
        objective(output).backward()
        objective(answer).backward()
        assert_gradients(wrapped, state)
        assert_buffers(wrapped, answer)
    else:
        assert (parts(output)["risk"] > 0).any()
        objective(output).backward()
        assert all(parameter.grad is not None for parameter in wrapped.parameters())
