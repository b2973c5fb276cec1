"""Inside a `frozen` block a wrapped object equals its plain models, and changes of it do not go unnoticed."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import traced_models
from helpers.recorded_calls import assert_same, batches, wrapped_as
from helpers.threads import in_threads
from helpers.traced_models import EAGER, TRACED, Counter, ListItem, ReadsGlobal, mlp
from torch import Tensor, nn

from workbench import compose, fit, neo, sample, sculpt, vote
from workbench.errors import FrozenModelError, WorkbenchWarning

CALLS = 12

WRAPPERS = {
    "sample": sample.Wrapper(4),
    "sample, same": sample.Wrapper(4, randomness="same"),
    "neo": neo.Wrapper(),
    "all": compose(vote.Wrapper(3), sculpt.Wrapper(), neo.Wrapper()),
    "logits": vote.Wrapper(3, output="binary"),
}
MODELS = {
    **TRACED,
    **{name: (build, vote.Wrapper(3)) for name, build in EAGER.items()},
    **{name: (mlp, wrapper) for name, wrapper in WRAPPERS.items()},
}


@pytest.mark.parametrize("name", MODELS)
def test_numbers_are_those_outside(name: str) -> None:
    """Also the global random state afterwards, and what forward itself has changed."""

    def calls(wrapped: Any) -> list[Any]:
        torch.manual_seed(2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", WorkbenchWarning)
            answers = [wrapped(x.clone(), return_risk=i % 3 > 0) for i, x in enumerate(batches(CALLS))]
        return [*answers, torch.get_rng_state()]

    build, wrapper = MODELS[name]
    outside = wrapped_as(build, wrapper)
    try:
        with torch.no_grad():
            expected = calls(outside)
    except Exception as error:  # what is refused outside is so inside
        with pytest.raises(type(error)), (refused := wrapped_as(build, wrapper)).frozen():
            calls(refused)
        return
    with wrapped_as(build, wrapper).frozen() as inside:
        assert_same(calls(inside), expected)


# draw or count what copies draw and count as well
_SHARING = ("own generator", "seeding", "numpy noise", "hooked", "set forward")


@pytest.mark.parametrize("name", [name for name in EAGER if name not in _SHARING])
def test_numbers_are_those_of_a_loop_over_copies(name: str) -> None:
    wrapped = wrapped_as(EAGER[name])
    voters = [copy.deepcopy(voter) for voter in wrapped.voters()]
    with wrapped.frozen():
        for x in batches(CALLS):
            expected = torch.stack([voter(x.clone()) for voter in voters]).detach()
            y, risk = wrapped(x.clone(), return_risk=True)
            torch.testing.assert_close(y, expected.mean(0))
            torch.testing.assert_close(risk, expected.std(0, correction=0))


# ---- changes from outside
def _optimized(wrapped: Any) -> None:
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    for parameter in wrapped.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


REFUSED: dict[str, Callable[[Any], Any]] = {
    "train": lambda w: w.train(),
    "fit": lambda w: fit(w, (torch.zeros(8, 3), torch.zeros(8, 1)), epochs=1, progress=False),
    "closed form": lambda w: w.fit(torch.zeros(8, 3)),
    "double": lambda w: w.double(),
    "load": lambda w: w.load_state_dict(w.state_dict()),
    "load a whole": lambda w: nn.ModuleList([w]).load_state_dict(nn.ModuleList([w]).state_dict()),
    "attribute": lambda w: setattr(w, "factor", 2.0),
    "parameter": lambda w: setattr(w, "offset", nn.Parameter(torch.zeros(1))),
    "hook": lambda w: w.register_forward_hook(lambda *args: None),
    "buffer": lambda w: w.register_buffer("offset", torch.zeros(1)),
    "units": lambda w: w.scale(y_mean=1.0, y_scale=2.0),
    "no units": lambda w: w.unscale(),
    "risk parameters": lambda w: w.set_risk_parameters(dict(w.named_risk_parameters())),
    "optimizer": _optimized,
}


@pytest.mark.parametrize("name", REFUSED)
def test_changes_are_refused_at_once(name: str) -> None:
    wrapped, x = wrapped_as(mlp), batches(CALLS)[0]
    with wrapped.frozen():
        before = wrapped(x)
        with pytest.raises(FrozenModelError, match=r"wrapped.frozen\(\)"):
            REFUSED[name](wrapped)
        assert torch.equal(wrapped(x), before)
    if name not in ("closed form", "no units"):
        REFUSED[name](wrapped)  # outside it may


def _in_place(wrapped: Any) -> None:
    with torch.no_grad():
        next(wrapped.parameters()).mul_(2)


SEEN: dict[str, tuple[Callable[[Any], Any], str]] = {
    "in place": (_in_place, r"net.0.weight@vote was written into"),
    "mode of a layer": (lambda w: w.net[1].train(), r"net.1.training"),
    "attribute of a layer": (lambda w: setattr(w.net[1], "factor", 2.0), r"net.1.factor"),
    "hook of a layer": (lambda w: w.net[1].register_forward_hook(lambda *args: None), r"net.1.a hook"),
    "another layer": (lambda w: w.net.__setitem__(1, nn.ReLU()), r"net.1"),
    "item of a list": (lambda w: w.scales.__setitem__(0, 3.0), "a list"),
}


@pytest.mark.parametrize("name", SEEN)
@pytest.mark.parametrize("asked", [True, False], ids=["next call", "end"])
def test_changes_that_no_method_tells_are_seen(name: str, asked: bool) -> None:
    change, what = SEEN[name]
    wrapped, x = wrapped_as(ListItem), batches(CALLS)[0]

    def changed() -> None:
        with wrapped.frozen():
            for _ in range(CALLS):
                wrapped(x)
            change(wrapped)
            if asked:
                with pytest.raises(FrozenModelError, match=what):
                    wrapped(x)

    with pytest.raises(FrozenModelError, match=what):
        changed()
    wrapped(x)  # outside, it is what it is now


@pytest.mark.parametrize("build", [mlp, ReadsGlobal, Counter])
def test_writes_that_torch_does_not_count_count_at_once(build: Callable[[], nn.Module]) -> None:
    wrapped, plain, x = wrapped_as(build), wrapped_as(build), batches(CALLS)[0]
    numpy_view = next(wrapped.parameters()).detach().numpy()
    with wrapped.frozen(), torch.no_grad():
        for i in range(CALLS):
            if i == CALLS - 3:
                next(wrapped.parameters()).data.mul_(2)
                next(plain.parameters()).mul_(2)
            if i == CALLS - 2:
                numpy_view *= 3
                next(plain.parameters()).mul_(3)
            if i == CALLS - 1:
                next(wrapped.parameters()).data = 2 * next(wrapped.parameters()).data
                next(plain.parameters()).mul_(2)
            assert_same(wrapped(x, return_risk=True), plain(x, return_risk=True))


def test_globals_count_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped, x = wrapped_as(ReadsGlobal), batches(CALLS)[0]
    with wrapped.frozen():
        for _ in range(CALLS):
            before = wrapped(x, return_risk=True)
        monkeypatch.setattr(traced_models, "SCALE", 2.0)
        for _ in range(CALLS):
            torch.testing.assert_close(wrapped(x, return_risk=True), (2 * before[0], 2 * before[1]))


# ---- blocks
def test_a_model_in_training_is_not_frozen() -> None:
    with pytest.raises(RuntimeError, match=r"call wrapped.eval\(\)"), wrapped_as(mlp).train().frozen():
        pass


def test_blocks_lie_in_each_other() -> None:
    wrapped = wrapped_as(mlp)
    with wrapped.frozen():
        with wrapped.frozen():
            pass
        with pytest.raises(FrozenModelError):
            wrapped.train()
        assert wrapped.eval() is wrapped
    assert wrapped.train().training


def test_errors_inside_come_through() -> None:
    wrapped = wrapped_as(mlp)

    def failing() -> None:
        with wrapped.frozen():
            _in_place(wrapped)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        failing()
    wrapped.train()


def test_copies_are_not_frozen() -> None:
    wrapped, x = wrapped_as(mlp), batches(CALLS)[0]
    with wrapped.frozen():
        expected = wrapped(x)
        copies = [copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped)), copy.copy(wrapped)]
        state, voters, plain = wrapped.state_dict(), wrapped.voters(), wrapped.unwrap()
        assert torch.equal(wrapped(x), expected)
    for copied in copies:
        assert torch.equal(copied(x), expected)
        copied.train()
    copies[0].load_state_dict(state)
    assert len(voters) == 3
    plain.train()


def test_gradients_are_left_out_and_come_again() -> None:
    wrapped, x = wrapped_as(mlp), batches(CALLS)[0].requires_grad_()
    with wrapped.frozen():
        assert not wrapped(x).requires_grad
        assert not wrapped.loss(nn.MSELoss(), x, torch.zeros(5, 1)).requires_grad
        assert torch.is_grad_enabled()
    assert wrapped(x).requires_grad


def test_a_frozen_function_answers_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = mlp(), batches(CALLS)[0]

    @vote.Wrapper(3)
    def doubled(x: Tensor) -> Tensor:
        return 2 * model(x)

    doubled.eval()
    expected = doubled(x)
    with doubled.frozen():
        for _ in range(CALLS):
            torch.testing.assert_close(doubled(x), expected.detach())


def test_threads_serve_and_the_last_ends_the_block() -> None:
    wrapped, inputs = wrapped_as(mlp), batches(CALLS)
    expected = [wrapped(x, return_risk=True) for x in inputs]

    def serve() -> None:
        with wrapped.frozen():
            for _ in range(5):
                for x, (y, risk) in zip(inputs, expected, strict=True):
                    answer = wrapped(x, return_risk=True)
                    assert torch.equal(answer[0], y)
                    assert torch.equal(answer[1], risk)

    in_threads(serve, 3)
    wrapped.train()


def test_a_users_own_name_wins() -> None:
    net = mlp()
    net.frozen = True
    wrapped = vote.Wrapper(3)(net).eval()
    assert wrapped.frozen is True
    with type(wrapped).__mro__[1].frozen(wrapped), pytest.raises(FrozenModelError):
        wrapped.train()
