"""Voters that share nothing are differentiated one after another: to the last bit as all at once, in the memory of one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from helpers.zoo import CASES as CASES_OF_ZOO
from helpers.zoo import Case
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from workbench import compose, fit, sculpt, vote
from workbench.core.calls import model_by_model, training_losses
from workbench.engine.tree import is_float, tensors
from workbench.testing.models import build, inputs, seeded
from workbench.training import Backward
from workbench.training.progress import Progress


@pytest.fixture(autouse=True)
def turns(monkeypatch: pytest.MonkeyPatch) -> list[range]:
    """The positions of the voters that had their turn; even the smallest models have one."""
    taken: list[range] = []
    differentiate = model_by_model._Turns._differentiate

    def noted(self: Any, losses: Tensor, numbers: range) -> None:
        taken.append(numbers)
        differentiate(self, losses, numbers)

    monkeypatch.setattr(model_by_model, "LONG_PASS", 0.0)
    monkeypatch.setattr(model_by_model._Turns, "_differentiate", noted)
    return taken


class Base(nn.Module):
    """Images [n, 1, 6, 6] to two numbers, with statistics and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.unused = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(2, 2)
        self.out = nn.Linear(64, 2)

    def body(self, x: Tensor) -> Tensor:
        return F.dropout(self.norm(self.conv(x)).relu(), 0.3, self.training).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x))


class Checkpointed(Base):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return checkpoint(self.out, h, use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    reentrant = True


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x[:, 0])[0][:, -1])


class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table(x[:, 0, 0].abs().long().clamp(max=8)).mean(1))


class Penalized(nn.Module):
    """A criterion with a parameter of its own, and a penalty on those of the wrapped model."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.parameters_of: Callable[[], Any] = list

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        penalty = torch.stack([p.square().sum() for p in self.parameters_of()]).sum()
        return ((prediction - target).square() * self.weight).mean() + 0.01 * penalty


class Weighted(nn.Module):
    """A criterion with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        return ((prediction - target).square() * self.weight).mean()


class Common(Weighted):
    """A criterion of which a part was computed before, for all voters."""

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        return ((prediction - target).square() * self.common).mean()

    def prepare(self) -> None:
        self.common = self.weight.exp().sin()


def noisy(prediction: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(prediction, target + 0.1 * torch.randn_like(target))


def writing(prediction: Tensor, target: Tensor) -> Tensor:
    return prediction.sub_(target).square_().mean()


def frozen() -> nn.Module:
    net = Base()
    net.conv.weight.requires_grad_(False)
    return net


# model, wrapper, criterion, and whether the voters take turns
CASES: dict[str, tuple[Callable[[], nn.Module], Any, Any, bool]] = {
    "convolutions": (Base, vote.Wrapper(3), F.mse_loss, True),
    "four": (Base, vote.Wrapper(4), nn.MSELoss(), True),
    "heads": (Base, compose(vote.Wrapper(3), sculpt.Wrapper()), None, True),
    "heads by vmap": (Base, compose(vote.Wrapper(3), sculpt.Wrapper(n_layers=1)), F.mse_loss, True),
    "two at a time": (Recurrent, vote.Wrapper(4, chunk=2), F.mse_loss, True),
    "started equal": (Base, vote.Wrapper(3, finetune=True), F.mse_loss, True),
    "frozen layer": (frozen, vote.Wrapper(3), F.mse_loss, False),
    "checkpoint": (Checkpointed, vote.Wrapper(3), F.mse_loss, True),
    "reentrant checkpoint": (Reentrant, vote.Wrapper(3), F.mse_loss, True),
    "recurrent": (Recurrent, vote.Wrapper(3), F.mse_loss, True),
    "sparse gradients": (SparseEmbedding, vote.Wrapper(3), F.mse_loss, True),
    "criterion that learns": (Base, vote.Wrapper(3), Weighted, True),
    "criterion with a common part": (Base, vote.Wrapper(3), Common, True),
    "penalty on all weights": (Base, vote.Wrapper(3), Penalized, True),
    "criterion that writes": (Base, vote.Wrapper(3), writing, True),
    "criterion that draws": (Base, vote.Wrapper(3), noisy, False),
    "prior": (Base, vote.Wrapper(3, prior=3), F.mse_loss, False),
    "shared trunk": (Base, vote.Wrapper(3, share=1), F.mse_loss, False),
    "shared weights": (Base, vote.Wrapper(3, share="rank1"), F.mse_loss, False),
}


def _train(name: str, in_turn: bool) -> tuple[list[Tensor], list[int]]:
    """Train for some steps; return losses, weights and random state, and how often hooks of the parameters were called."""
    build, wrapper, criterion, _ = CASES[name]
    torch.manual_seed(0)
    wrapped = wrapper(build()).train()
    criterion = criterion() if isinstance(criterion, type) else criterion
    if isinstance(criterion, Penalized):
        criterion.parameters_of = lambda: [p for p in wrapped.parameters() if p.requires_grad]
    learned = list(criterion.parameters()) if isinstance(criterion, nn.Module) else []
    called: list[int] = []
    for i, parameter in enumerate(p for p in wrapped.parameters() if p.requires_grad):
        parameter.register_post_accumulate_grad_hook(lambda _, i=i: called.append(i))
    optimizer = torch.optim.SGD([*wrapped.parameters(), *learned], 0.05, momentum=0.9)
    backward = Backward(wrapped, criterion)
    losses = []
    for step in range(4):
        x = torch.randn(8, 1, 6, 6, generator=torch.Generator().manual_seed(step))
        y = x[:, 0, 0, :2].sin()
        if step != 2:  # gradients add up
            optimizer.zero_grad()
        if isinstance(criterion, Common):
            criterion.prepare()
        if in_turn:
            losses.append(backward(x, y))
        else:
            loss = wrapped.loss(criterion, x, y)
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
    state = [value for value in wrapped.state_dict().values() if isinstance(value, Tensor)]
    return [*losses, *state, *learned, torch.get_rng_state()], sorted(called)


def close(a: Tensor, b: Tensor) -> bool:
    """Whether numbers are equal up to the order in which the models' gradients of a common tensor are added."""
    return torch.equal(a, b) or torch.allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore::workbench.errors.WorkbenchWarning")
def test_gradients_are_those_of_all_at_once(name: str, turns: list[range]) -> None:
    expected, expected_calls = _train(name, False)
    assert not turns
    ours, calls = _train(name, True)
    assert bool(turns) == CASES[name][3]
    adds_up = ("criterion that learns", "criterion with a common part", "penalty on all weights")
    compare = close if name in adds_up else torch.equal
    assert all(map(compare, ours, expected))
    if name != "reentrant checkpoint":
        assert calls == expected_calls


def _squared(prediction: Any, target: Tensor) -> Tensor:
    leaves = [leaf for leaf in tensors(prediction) if is_float(leaf)]
    return torch.stack([leaf.abs().float().square().mean() for leaf in leaves]).sum()


def _zoo_step(case: Case, wrapper: Any, in_turn: bool) -> list[Tensor | None]:
    """Return loss and gradients of two steps, and the state after them."""
    wrapped = wrapper(build(case)).train()
    parameters = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    results: list[Tensor | None] = []
    with seeded(0):
        for _ in range(2):
            args, kwargs = inputs(case)
            wrapped.zero_grad()
            if in_turn:
                loss = model_by_model._backward(wrapped, _squared, args, kwargs, torch.zeros(()), None)
            else:
                loss = training_losses.loss(wrapped, _squared, args, kwargs, torch.zeros(()))
                loss.backward()
            results += [loss.detach(), *(parameter.grad for parameter in parameters)]
    return [*results, *(value for value in wrapped.state_dict().values() if isinstance(value, Tensor))]


@pytest.mark.parametrize("name", [name for name in CASES_OF_ZOO if name not in ("generator_out", "scripted")])
@pytest.mark.filterwarnings("ignore::workbench.errors.WorkbenchWarning")
def test_every_model_has_the_gradients_of_all_at_once(
    name: str, turns: list[range], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_by_model._Turns, "_pays", lambda self, seconds, leaves: True)
    case, wrapper = CASES_OF_ZOO[name], vote.Wrapper(3, strategy="loop")
    expected = _zoo_step(case, wrapper, False)
    assert not turns
    results = _zoo_step(case, wrapper, True)
    assert turns
    for ours, all_at_once in zip(results, expected, strict=True):
        if ours is None or all_at_once is None:
            assert ours is all_at_once
        elif ours.is_sparse:
            assert torch.equal(ours.to_dense(), all_at_once.to_dense())
        else:
            torch.testing.assert_close(ours, all_at_once, rtol=0, atol=0, equal_nan=True)


class Saved:
    """A tensor that waits for the backward pass."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Waiting(torch.autograd.graph.saved_tensors_hooks):
    """Context manager that counts how many tensors wait for a backward pass at most."""

    def __init__(self) -> None:
        super().__init__(self._pack, lambda saved: saved.tensor)
        self._alive: weakref.WeakSet[Saved] = weakref.WeakSet()
        self.most = 0

    def _pack(self, tensor: Tensor) -> Saved:
        saved = Saved(tensor)
        self._alive.add(saved)
        self.most = max(self.most, len(self._alive))
        return saved


def test_only_the_activations_of_one_model_are_in_memory(turns: list[range]) -> None:
    x, y = torch.randn(24, 1, 6, 6), torch.randn(24, 2)
    net, criterion = Base(), nn.MSELoss()
    with (of_one := Waiting()):
        criterion(net(x), y).backward()
    wrapped = vote.Wrapper(4)(net)
    with ExitStack() as stack:
        in_turn = Waiting()

        def begin(progress: Progress) -> None:
            if progress.step == 1:  # `fit` has tried a first batch with all voters
                stack.enter_context(in_turn)

        fit(wrapped, (x, y), criterion=criterion, epochs=2, batch_size=8, validation=0, progress=False, callback=begin)
    assert len(turns) == 4 * 6
    assert 0 < in_turn.most <= of_one.most
    with (at_once := Waiting()):
        wrapped.train().loss(criterion, x, y).backward()
    assert at_once.most >= 4 * of_one.most


@pytest.mark.parametrize(("name", "at_once"), [("two at a time", 2), ("criterion that learns", 1), ("heads", 2)])
def test_other_ways_free_the_memory_as_well(name: str, at_once: int) -> None:
    build, wrapper, criterion, _ = CASES[name]
    criterion = criterion() if isinstance(criterion, type) else criterion
    net, x, y = build(), torch.randn(8, 1, 6, 6), torch.randn(8, 2)
    with (of_one := Waiting()):
        (criterion or F.mse_loss)(net(x), y).backward()
    wrapped = wrapper(net).train()
    backward = Backward(wrapped, criterion)
    backward(x, y)
    with (in_turn := Waiting()):
        backward(x, y)
    assert 0 < in_turn.most <= (at_once + 0.5) * of_one.most


def test_gradients_are_stored_without_a_copy(turns: list[range], monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[int] = []
    stacked = model_by_model._Rows.stacked

    def noted(rows: model_by_model._Rows) -> Tensor:
        places.append(stacked(rows).data_ptr())
        return stacked(rows)

    monkeypatch.setattr(model_by_model._Rows, "stacked", noted)
    monkeypatch.setattr(model_by_model._Turns, "_pays", lambda self, seconds, leaves: True)
    wrapped = vote.Wrapper(3, strategy="loop")(nn.Linear(4, 2)).train()
    Backward(wrapped, F.mse_loss)(torch.ones(5, 4), torch.zeros(5, 2))
    assert turns
    assert sorted(places) == sorted(p.grad.data_ptr() for p in wrapped.parameters() if p.grad is not None)


def test_what_depends_on_no_parameter_is_told() -> None:
    wrapped = vote.Wrapper(3)(Base()).train()
    backward = Backward(wrapped, lambda prediction, target: F.mse_loss(prediction.detach(), target))
    for _ in range(2):
        with pytest.raises(ValueError, match="depends on no trainable parameter"):
            backward(torch.randn(8, 1, 6, 6), torch.randn(8, 2))
    assert all(parameter.grad is None for parameter in wrapped.parameters())


def test_an_error_of_the_criterion_leaves_no_gradients() -> None:
    count = [0]

    def fails_later(prediction: Tensor, target: Tensor) -> Tensor:
        count[0] += 1
        if count[0] == 6:
            raise ValueError("the third voter's answer")
        return F.mse_loss(prediction, target)

    wrapped = vote.Wrapper(3)(Base()).train()
    backward = Backward(wrapped, fails_later)
    x, y = torch.randn(8, 1, 6, 6), torch.randn(8, 2)
    backward(x, y)
    wrapped.zero_grad()
    with pytest.raises(ValueError, match="third voter"):
        backward(x, y)
    assert all(parameter.grad is None for parameter in wrapped.parameters())
    assert torch.isfinite(backward(x, y))
