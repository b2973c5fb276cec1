"""Large models: wrapping and calling copy no more bytes than needed, and take calls in proportion to the modules."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import ROOT
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from workbench import compose, distributions, neo, sample, sculpt, unwrap, vote
from workbench.core.layer_order import watched
from workbench.core.ownership import table_of
from workbench.core.plain_copies import plain_module
from workbench.core.wrapper import Wrapper
from workbench.experiments.worker import load_file

clock = load_file(ROOT / "benchmarks" / "speed_clock.py")
size, alive = clock.size, clock.alive


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.fc(self.norm(x)))


def net(width: int, depth: int) -> Any:
    return nn.Sequential(*(Block(width) for _ in range(depth)), nn.Linear(width, 2))


@pytest.mark.slow
def test_bytes_are_counted_once() -> None:
    x = torch.zeros(1000)
    before = alive()
    y = torch.zeros(250_000, dtype=torch.float64)
    views = [y[:10], y.view(25, 10_000), nn.Parameter(y)]
    assert size([y, *views]) == 2_000_000
    assert size([x, *views]) == 2_004_000
    assert alive() - before == pytest.approx(2_000_000, rel=0.01)  # other tests' garbage may have gone meanwhile


def added(wrapped: nn.Module, model: nn.Module) -> int:
    """Bytes that wrapping registered beside the tensors of the given model."""
    ids = {id(t) for t in (*model.parameters(), *model.buffers())}
    return size(t for t in (*wrapped.parameters(), *wrapped.buffers()) if id(t) not in ids)


WRAPPERS: dict[str, Wrapper] = {
    "sculpt": sculpt.Wrapper(n_layers=1),
    "sample": sample.Wrapper(4),
    "sample, weights": sample.Wrapper(4, where="weights"),
    "neo": neo.Wrapper(),
    "vote rank-1": vote.Wrapper(5, finetune=True, share="rank1"),
    "vote last layer": vote.Wrapper(5, finetune=True, share=1),
    "vote of sculpt, with neo": compose(
        vote.Wrapper(3, finetune=True, share=1), sculpt.Wrapper(n_layers=1), neo.Wrapper()
    ),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_billion_parameters_are_wrapped_for_less_than_a_hundredth_of_them(name: str) -> None:
    with torch.device("meta"):
        model = net(4096, 60).bfloat16()
    layers = {id(block.fc.weight) for block in model.children() if isinstance(block, Block)}
    assert sum(p.numel() for p in model.parameters()) > 1e9
    wrapped = WRAPPERS[name](model)
    assert added(wrapped, model) < 0.01 * size(model.parameters())
    assert layers <= {id(p) for p in wrapped.parameters()}  # the model's own
    assert all(p.is_meta for p in wrapped.parameters())
    assert all(p.is_meta and p.dtype is torch.bfloat16 for name, p in unwrap(wrapped).named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapping_a_model_of_values_takes_the_bytes_that_it_registers(name: str) -> None:
    model = net(192, 40)
    model_bytes = size(model.parameters())
    before = alive()
    wrapped = WRAPPERS[name](model)
    taken = alive() - before
    # rank-1 voters have 5 x 5 x 192 numbers for each layer of 192 x 192: two factors, a bias, and those of the norm
    limit = 0.14 if name == "vote rank-1" else 0.03
    assert taken <= limit * model_bytes
    assert added(wrapped, model) <= limit * model_bytes


@pytest.mark.parametrize(
    ("wrapper", "copies"),
    [(sculpt.Wrapper(n_layers=1), 1), (vote.Wrapper(5), 5), (vote.Wrapper(5, finetune=True), 5)],
    ids=["sculpt", "vote", "vote finetune"],
)
def test_layers_of_their_own_are_not_held_twice_while_they_are_drawn(wrapper: Wrapper, copies: int) -> None:
    model = net(192, 12) if copies > 1 else nn.Sequential(nn.Linear(8, 192), nn.Linear(192, 4096))
    layers = size((model if copies > 1 else model[1]).parameters())
    wrapper(model)
    taken = clock.peak(lambda: wrapper(model), "cpu") * 2**20
    assert copies * layers <= taken < (copies + 0.6) * layers


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("distribution", [distributions.Normal, distributions.NormalInverseGamma])
def test_layers_that_are_drawn_share_no_memory(n: int, distribution: Any) -> None:
    risk = sculpt.Wrapper(distribution, n_layers=1)
    for wrapper in (risk, compose(vote.Wrapper(n, share=1), risk)):
        wrapped = wrapper(net(8, 2))
        assert size(wrapped.parameters()) == sum(p.numel() * p.element_size() for p in wrapped.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy"),
    [(name, "auto") for name in ("sculpt", "sample", "vote of sculpt, with neo")]
    + [("sample, weights", strategy) for strategy in ("vmap", "loop")]
    + [("vote last layer", strategy) for strategy in ("vmap", "replay", "loop")],
)
def test_calls_leave_no_copies_of_weights_behind(name: str, strategy: str) -> None:
    model = net(192, 12)
    model_bytes = size(model.parameters())
    x = torch.randn(16, 192, generator=torch.Generator().manual_seed(0))
    wrapped = WRAPPERS[name](model)
    wrapped._workbench.strategy = strategy
    wrapped.eval()
    if wrapped.needs_fit:
        wrapped.fit(torch.randn(64, 192, generator=torch.Generator().manual_seed(1)))
    before = alive()
    with torch.no_grad():
        for _ in range(2):
            wrapped(x, return_risk=True)
    assert alive() - before < 0.05 * model_bytes


def test_a_deep_copy_of_a_part_or_of_all_is_made_only_where_it_is_asked_for() -> None:
    model = net(64, 4)
    wrapped = vote.Wrapper(3, share=1)(model)
    plain: Any = unwrap(wrapped)
    assert plain[0].fc.weight is model[0].fc.weight is wrapped[0].fc.weight
    assert wrapped.voters()[0][0].fc.weight is not model[0].fc.weight
    assert added(plain, model) == size(model[4].parameters())  # the first voter's head


@pytest.mark.parametrize(
    "wrapper",
    [sculpt.Wrapper(), sample.Wrapper(2), vote.Wrapper(2), vote.Wrapper(2, finetune=True, share="rank1")],
    ids=repr,
)
def test_meta_models_answer_learn_and_take_their_weights_later(wrapper: Wrapper) -> None:
    with torch.device("meta"):
        model = net(8, 2)
        x, y = torch.zeros(6, 8), torch.zeros(6, 2)
    wrapped = wrapper(model)
    prediction, risk = wrapped(x, return_risk=True)
    assert prediction.is_meta
    assert prediction.shape == risk.shape == (6, 2)
    wrapped.loss(nn.MSELoss(), x, y).backward()
    assert all(p.grad.is_meta for p in wrapped.parameters())

    real = wrapper(net(8, 2))
    with torch.device("meta"):
        filled, assigned = wrapper(net(8, 2)).to_empty(device="cpu"), wrapper(net(8, 2))
    filled.load_state_dict(real.state_dict())
    assigned.load_state_dict(real.state_dict(), assign=True)
    for other in (filled, assigned):
        for a, b in zip(unwrap(other).parameters(), unwrap(real).parameters(), strict=True):
            assert torch.equal(a, b)


def calls(function: Callable[[], Any]) -> int:
    """How many Python functions and operations were called."""
    count = 0

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    "wrapper",
    [
        sculpt.Wrapper(),
        sample.Wrapper(2),
        neo.Wrapper(),
        vote.Wrapper(2),
        vote.Wrapper(2, finetune=True, share="rank1"),
        compose(vote.Wrapper(2, share=1), sculpt.Wrapper(n_layers=1)),
    ],
    ids=repr,
)
@pytest.mark.slow
def test_work_grows_in_proportion_to_the_number_of_modules(wrapper: Wrapper) -> None:
    """Four times as many modules: not sixteen times as much to do."""
    work: dict[str, list[int]] = {}
    x = torch.zeros(3, 4)
    wrapper(net(4, 2))
    for depth in (15, 60):
        model = net(4, depth)
        made: list[Any] = []
        work.setdefault("wrap", []).append(calls(lambda model=model, made=made: made.append(wrapper(model))))  # type: ignore[misc]
        wrapped = made[0].eval()
        if wrapped.needs_fit:
            wrapped.fit(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))
        with torch.no_grad():
            for kind in ("first call", "second call"):
                work.setdefault(kind, []).append(calls(functools.partial(wrapped, x, return_risk=True)))
        work.setdefault("unwrap", []).append(calls(functools.partial(unwrap, wrapped)))
        work.setdefault("voters", []).append(calls(wrapped.voters))
    assert {kind: few for kind, (few, many) in work.items() if many > 5 * few} == {}


@pytest.mark.slow
def test_work_grows_in_proportion_to_the_number_of_parameters_of_a_module() -> None:
    """A ParameterList may hold thousands."""
    instructions: list[int] = []
    for n in (50, 200):
        model = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(n))
        table = table_of(vote.Wrapper(2)(model))
        instructions.append(0)

        def note(frame: Any, event: str, arg: Any) -> Any:
            frame.f_trace_opcodes = True
            instructions[-1] += event == "opcode"
            return note

        sys._getframe().f_trace_opcodes = True  # Python 3.12 tells of no instructions before a frame asks for them
        sys.settrace(note)
        try:
            copied = plain_module(table, "")
        finally:
            sys.settrace(None)
        assert list(dict(copied.named_parameters())) == list(dict(model.named_parameters()))
    assert instructions[1] < 5 * instructions[0]


@pytest.mark.slow
def test_finding_the_order_of_layers_grows_in_proportion_to_their_number() -> None:
    work = []
    for depth in (50, 200):
        wrapped = vote.Wrapper(2, share=1)(net(4, depth))
        work.append(calls(functools.partial(watched, wrapped, (torch.zeros(3, 4),), {})))
    assert work[1] < 5 * work[0]


def test_layers_that_run_in_one_call_are_in_the_order_of_registration() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(4, 1) for _ in range(9))

        def forward(self, x: Tensor) -> Tensor:
            return x @ torch.cat([part.weight for part in self.parts]).T

    execution = watched(vote.Wrapper(2, share=1)(Sum()), (torch.zeros(3, 4),), {})
    assert execution is not None
    assert execution.modules() == [f"parts.{i}" for i in range(9)]


def test_taking_out_voters_grows_in_proportion_to_their_number() -> None:
    class Made(TorchDispatchMode):
        tensors = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            self.tensors += len(out) if isinstance(out, list | tuple) else 1
            return out

    made = []
    for n in (10, 40):
        wrapped = vote.Wrapper(n)(net(4, 2))
        with Made() as count:
            assert len(wrapped.voters()) == n
        made.append(count.tensors)
    assert made[1] < 5 * made[0]
