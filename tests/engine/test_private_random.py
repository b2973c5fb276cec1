"""Draws in threads: the same numbers as in the main thread, unaffected by and without effect on other threads."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from helpers.threads import in_thread, seeded, state
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from workbench.engine.dependence import DependenceTracker
from workbench.engine.effects.private_random import CPU, KEY, _kernel_that_borrows, generator_of, own_random
from workbench.engine.traced_graph import _Recorder
from workbench.errors import WorkbenchWarning

# ---- single draws
X = torch.linspace(-1, 1, 5 * 2 * 4).reshape(5, 2, 4)
LSTM = seeded(nn.LSTM(4, 3, 2, dropout=0.5))
ATTENTION = seeded(nn.MultiheadAttention(4, 2, dropout=0.3))
DRAWS: dict[str, Callable[[], Tensor]] = {
    "rand": lambda: torch.rand(3),
    "rand out": lambda: torch.rand(3, out=torch.empty(3)),
    "rand_like": lambda: torch.rand_like(X),
    "randn": lambda: torch.randn(20),
    "randn float64": lambda: torch.randn(3, dtype=torch.float64),
    "randn complex": lambda: torch.randn(3, dtype=torch.complex64),
    "randn half": lambda: torch.randn(3, dtype=torch.float16),
    "randint": lambda: torch.randint(3, 10, (4,)),
    "randint_like": lambda: torch.randint_like(X, 7),
    "randperm": lambda: torch.randperm(9),
    "uniform_": lambda: torch.empty(3).uniform_(2, 3),
    "normal": lambda: torch.normal(X, 2.0),
    "bernoulli": lambda: torch.bernoulli(torch.full((9,), 0.4)),
    "multinomial": lambda: torch.multinomial(torch.ones(6), 3),
    "poisson": lambda: torch.poisson(torch.full((9,), 4.0)),
    "exponential": lambda: torch.empty(4).exponential_(),
    "geometric": lambda: torch.empty(4).geometric_(0.3),
    "gamma": lambda: torch.distributions.Gamma(torch.ones(3), 1.0).sample(),
    "dirichlet": lambda: torch.distributions.Dirichlet(torch.ones(3)).sample(),
    "binomial": lambda: torch.distributions.Binomial(10, torch.full((5,), 0.4)).sample(),
    "trunc_normal_": lambda: nn.init.trunc_normal_(torch.empty(5)),
    "gumbel": lambda: F.gumbel_softmax(X),
    "rrelu": lambda: F.rrelu(X, training=True),
    "dropout": lambda: F.dropout(X),
    "dropout in place": lambda: F.dropout(X.clone(), inplace=True),
    "dropout2d": lambda: F.dropout2d(torch.ones(2, 3, 4, 4)),
    "alpha dropout": lambda: F.alpha_dropout(X, training=True),
    "fractional pooling": lambda: F.fractional_max_pool2d(torch.arange(900.0).reshape(1, 1, 30, 30), 2, output_size=9),
    "attention": lambda: F.scaled_dot_product_attention(X, X, X, dropout_p=0.5),
    "attention module": lambda: ATTENTION(X, X, X)[0].detach(),
    "LSTM": lambda: LSTM(X)[0].detach(),
    "vmap": lambda: torch.vmap(F.dropout, randomness="different")(X),
    "vmap alike": lambda: torch.vmap(torch.rand_like, randomness="same")(X),
    "explicitly the shared one": lambda: torch.rand(3, generator=torch.default_generator),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_thread_draws_what_a_seed_of_torch_gives(name: str) -> None:
    def twice() -> tuple[Tensor, Tensor]:
        with own_random(5):
            return DRAWS[name](), DRAWS[name]()

    with torch.random.fork_rng():
        torch.manual_seed(5)
        expected = DRAWS[name](), DRAWS[name]()
    before = state()
    drawn = in_thread(twice)
    assert state() == before
    for one, other in zip(drawn, expected, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(*drawn)


def privately(function: Callable[[], Any], seed: int = 0) -> Any:
    """What it gives in a thread, with draws of its own."""

    def work() -> Any:
        with own_random(seed):
            return function()

    return in_thread(work)


def test_every_operation_of_torch_that_takes_a_generator_is_met() -> None:
    privately(lambda: None)
    missed, met = [], 0
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.partition(".")
        schema = str(torch._C._get_schema(packet, overload))
        if name.startswith("aten::") and "Generator?" in schema and "Tensor" in schema.partition("->")[0]:
            met += 1
            if not torch._C._dispatch_has_kernel_for_dispatch_key(name, KEY):
                missed.append(name)
    assert not missed
    assert met > 50


@pytest.mark.parametrize(("p", "expected"), [(0.0, 0), (0.5, 1)], ids=["draws nothing", "draws once"])
def test_only_what_draws_runs_python(p: float, expected: int) -> None:
    calls: list[str] = []

    def note(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_globals["__name__"] == "workbench.engine.effects.private_random":
            calls.append(frame.f_code.co_name)

    def step() -> None:
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(p), nn.Linear(8, 1))
        calls.clear()
        sys.setprofile(note)
        model(X).square().sum().backward()
        sys.setprofile(None)

    privately(step)
    assert calls.count("kernel") == expected
    assert bool(calls) is bool(expected)


def test_blocks_nest_and_end() -> None:
    def nested() -> tuple[list[Tensor], bool]:
        with own_random(1):
            out = [torch.rand(2)]
            with suppress(ZeroDivisionError), own_random(2):
                out.append(torch.rand(2))
                raise ZeroDivisionError
            out.append(torch.rand(2))
        before = state()
        torch.rand(1)  # outside, a thread draws from the shared generator, as ever
        return out, state() != before

    with torch.random.fork_rng(devices=[]):
        (a, b, c), shared = in_thread(nested)
    ones = torch.rand(4, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.cat([a, c]), ones)
    assert torch.equal(b, torch.rand(2, generator=torch.Generator().manual_seed(2)))
    assert shared


def test_threads_at_the_same_time_do_not_disturb_each_other() -> None:
    start, drawn = threading.Barrier(4), {}

    def draw(seed: int) -> None:
        start.wait()
        with own_random(seed):
            drawn[seed] = torch.stack([torch.randn(3) for _ in range(200)])

    threads = [threading.Thread(target=draw, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, value in drawn.items():
        generator = torch.Generator().manual_seed(seed)
        assert torch.equal(value, torch.stack([torch.randn(3, generator=generator) for _ in range(200)]))
    assert len(drawn) == 4


def test_a_generator_of_the_model_is_used() -> None:
    generator = torch.Generator().manual_seed(11)
    drawn = privately(lambda: torch.rand(3, generator=generator))
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(11)))


def test_the_state_can_be_kept_and_set_back() -> None:
    def again() -> tuple[Tensor, Tensor]:
        kept = generator_of(CPU).get_state()
        first = torch.rand(3)
        generator_of(CPU).set_state(kept)
        return first, torch.rand(3)

    assert torch.equal(*privately(again))
    assert generator_of(CPU) is torch.default_generator


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="such a mode hides other dispatch keys before torch 2.13")
def test_under_a_dispatch_mode_draws_are_private_as_well() -> None:
    class Counting(TorchDispatchMode):
        n = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.n += 1
            return function(*args, **(kwargs or {}))

    counting = Counting()

    def draw() -> Tensor:
        with counting:
            return F.dropout(torch.ones(50))

    before = state()
    drawn = privately(draw, seed=3)
    assert state() == before
    assert counting.n > 0
    with own_random(3):
        assert torch.equal(drawn, F.dropout(torch.ones(50)))


@pytest.mark.parametrize("mode", [DependenceTracker, _Recorder])
def test_under_our_own_dispatch_modes_draws_are_private(mode: Callable[..., TorchDispatchMode]) -> None:
    def draw() -> tuple[Tensor, Tensor, Tensor]:
        with mode((), (X,)):
            first = F.dropout(torch.ones(50)), torch.rand(3)
        return *first, torch.rand(3)

    before = state()
    drawn = privately(draw, seed=3)
    assert state() == before
    with own_random(3):
        expected = F.dropout(torch.ones(50)), torch.rand(3), torch.rand(3)
    for one, other in zip(drawn, expected, strict=True):
        assert torch.equal(one, other)


def test_tensors_without_values_draw_nothing() -> None:
    def draw() -> tuple[torch.device, Tensor]:
        return F.dropout(torch.ones(3, device="meta")).device, torch.rand(2)

    device, drawn = privately(draw, seed=4)
    assert device.type == "meta"
    assert torch.equal(drawn, torch.rand(2, generator=torch.Generator().manual_seed(4)))


def test_what_takes_no_generator_is_lent_our_state_and_says_so() -> None:
    class Foreign:
        """Stands for an operation with a kernel of its own, such as fused attention on a GPU: it asks nobody where to draw from."""

        def redispatch(self, keys: Any, like: Tensor, draws: bool) -> Tensor:
            out = torch.empty_like(like)
            unseen = torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C._parse_dispatch_key(KEY)))
            with unseen:
                return out.uniform_() if draws else out.zero_()

        def __str__(self) -> str:
            return "foreign"

    kernel = _kernel_that_borrows(Foreign())
    keys = torch._C._dispatch_keyset_full()
    before = state()

    def draw() -> list[Tensor]:
        x = torch.empty(2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kernel(keys, x, False)
        with pytest.warns(WorkbenchWarning, match="foreign draws from the generator that all threads share"):
            out = [torch.rand(2), kernel(keys, x, True)]
        return [*out, torch.rand(2), kernel(keys, x, True)]  # told once

    drawn = privately(draw, seed=9)
    assert state() == before
    assert torch.equal(torch.cat(drawn), torch.rand(8, generator=torch.Generator().manual_seed(9)))


def test_draws_in_threads_of_torch_are_refused() -> None:
    def draw() -> None:
        torch._C._dispatch_tls_set_dispatch_key_included(KEY, True)  # as in the backward pass on a GPU
        torch.rand(2)

    privately(lambda: None)
    with pytest.raises(RuntimeError, match="thread that torch has started"):
        in_thread(draw)


@pytest.mark.slow
def test_python_ends_in_peace_afterwards() -> None:
    script = """
        import threading, torch
        from workbench.engine.effects.private_random import own_random
        def draw():
            with own_random(0):
                torch.rand(3)
        thread = threading.Thread(target=draw)
        thread.start()
        thread.join()
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("reentrant", [True, False])
def test_draws_that_the_backward_pass_cannot_repeat_are_refused(reentrant: bool) -> None:
    def backward(function: Callable[[Tensor], Tensor]) -> Tensor:
        x = torch.ones(4, requires_grad=True)
        checkpoint(function, x, use_reentrant=reentrant).sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        return x.grad

    with pytest.raises(RuntimeError, match=r"torch\.utils\.checkpoint.*main thread"):
        privately(lambda: backward(lambda x: F.dropout(x) * x))
    assert privately(lambda: backward(torch.square)).tolist() == [2.0] * 4
