"""Wrapped objects in training mode: losses, gradients, batch statistics and user-written loops."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.models import mlp
from torch import Tensor, nn

from workbench import WorkbenchWarning, compose, neo, sample, sculpt, vote

# ---- losses ----------------------------------------------------------------------------------------------------------


def heads(wrapped: Any, voter: int | None) -> tuple[nn.Sequential, nn.Linear]:
    """The plain model of a voter and its risk head, as deep copies."""
    model: Any = copy.deepcopy(wrapped.voters()[voter or 0])
    named = dict(wrapped.named_parameters())
    head = nn.Linear(8, 1)
    end = "@sculpt" if voter is None else "@sculpt@vote"
    with torch.no_grad():
        for name in ("weight", "bias"):
            value = named[f"2.{name}{end}"]
            getattr(head, name).copy_(value if voter is None else value[voter])
    return model, head


def nll(y: Tensor, loc: Tensor, raw: Tensor) -> Tensor:
    sigma = nn.functional.softplus(raw)
    return -torch.distributions.Normal(loc, sigma).log_prob(y).mean()


@pytest.mark.parametrize("strategy", ["loop", "vmap"])
@pytest.mark.parametrize("kind", ["vote", "sculpt", "vote of sculpt"])
def test_the_loss_and_its_gradients_equal_a_loop_over_deep_copies(kind: str, strategy: str) -> None:
    wrappers: dict[str, Callable[[], Any]] = {
        "vote": lambda: vote.Wrapper(3, strategy=strategy),
        "sculpt": lambda: sculpt.Wrapper(n_layers=1, strategy=strategy),
        "vote of sculpt": lambda: compose(vote.Wrapper(3, strategy=strategy), sculpt.Wrapper(n_layers=1)),
    }
    wrapped: Any = wrappers[kind]()(mlp())
    criterion = nn.MSELoss()
    x, y = torch.randn(10, 3), torch.randn(10, 1)
    loss = wrapped.loss(criterion, x, y)
    loss.backward()
    terms, firsts = [], []
    for voter in range(3) if "vote" in kind else [None]:
        if kind == "vote":
            model: Any = copy.deepcopy(wrapped.voters()[voter])
            terms.append(criterion(model(x), y))
        else:
            model, head = heads(wrapped, voter)
            hidden = model[:2](x)
            loc = model[2](hidden)
            terms.append(criterion(loc, y) + nll(y, loc, head(hidden)))
        firsts.append(model[0].weight)
    expected = torch.stack(terms).mean()
    assert torch.allclose(loss, expected, rtol=1e-5)
    expected.backward()
    named = dict(wrapped.named_parameters())
    grad = named["0.weight@vote"].grad if "vote" in kind else named["0.weight"].grad[None]
    assert torch.allclose(grad, torch.stack([weight.grad for weight in firsts]), atol=1e-6)


def test_the_loss_takes_class_labels_and_many_outputs() -> None:
    wrapped: Any = vote.Wrapper(3, output="logits")(mlp(4))
    x, labels = torch.randn(10, 3), torch.randint(4, (10,))
    criterion = nn.CrossEntropyLoss()
    expected = torch.stack([criterion(voter(x), labels) for voter in wrapped.voters()]).mean()
    assert torch.allclose(wrapped.loss(criterion, x, labels), expected, rtol=1e-5)


def test_the_loss_of_one_step_moves_batch_statistics_once() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    x, y = torch.randn(12, 3), torch.randn(12, 1)
    wrapped: Any = vote.Wrapper(3)(model)
    copies = wrapped.voters()
    wrapped.loss(nn.MSELoss(), x, y)
    for before, after in zip(copies, wrapped.voters(), strict=True):
        before.train()(x)
        assert torch.allclose(after[1].running_mean, before[1].running_mean, atol=1e-6)
        assert torch.allclose(after[1].running_var, before[1].running_var, atol=1e-6)
        assert int(after[1].num_batches_tracked) == 1


@pytest.mark.parametrize("kind", ["sculpt", "sample", "neo"])
def test_batch_statistics_of_one_model_move_as_those_of_the_plain_one(kind: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    plain: Any = copy.deepcopy(model)
    wrappers: dict[str, Callable[[], Any]] = {
        "sculpt": lambda: sculpt.Wrapper(n_layers=1),
        "sample": lambda: sample.Wrapper(3, sample.Bernoulli(0.0)),
        "neo": lambda: neo.Wrapper(),
    }
    wrapped: Any = wrappers[kind]()(model).train()
    for _ in range(3):
        x = torch.randn(12, 3)
        plain(x)
        wrapped(x)
    assert torch.allclose(wrapped[1].running_mean, plain[1].running_mean, atol=1e-6)
    assert torch.allclose(wrapped[1].running_var, plain[1].running_var, atol=1e-6)
    assert int(wrapped[1].num_batches_tracked) == 3


def test_the_wrapped_loss_uses_the_given_criterion_alone_for_sample() -> None:
    wrapped: Any = sample.Wrapper(4, sample.Bernoulli(0.3))(mlp())
    x, y = torch.randn(10, 3), torch.randn(10, 1)
    torch.manual_seed(3)
    loss = wrapped.loss(nn.MSELoss(), x, y)
    torch.manual_seed(3)
    assert torch.allclose(loss, nn.functional.mse_loss(wrapped(x), y))


# ---- loops that users write ------------------------------------------------------------------------------------------


LOOPS: dict[str, Callable[[], Any]] = {
    "plain": compose,
    "vote": lambda: vote.Wrapper(3),
    "vote rank1": lambda: vote.Wrapper(3, share="rank1"),
    "vote last": lambda: vote.Wrapper(3, share=1),
    "vote finetune": lambda: vote.Wrapper(3, finetune=True),
    "vote together": lambda: vote.Wrapper(3, independent=False),
    "sample": lambda: sample.Wrapper(3),
    "sample weights": lambda: sample.Wrapper(3, sample.Normal(0.1), where="weights"),
    "sample learned": lambda: sample.Wrapper(3, trainable=True),
    "sculpt": lambda: sculpt.Wrapper(n_layers=1),
    "neo": lambda: neo.Wrapper(),
    "vote of sculpt": lambda: compose(vote.Wrapper(3), sculpt.Wrapper(n_layers=1)),
    "sample of sculpt": lambda: compose(sample.Wrapper(3), sculpt.Wrapper(n_layers=1)),
    "vote of sample": lambda: compose(vote.Wrapper(3), sample.Wrapper(3)),
    "all": lambda: compose(vote.Wrapper(3), sample.Wrapper(3), sculpt.Wrapper(n_layers=1), neo.Wrapper()),
}


@pytest.mark.parametrize("by_hand", [True, False], ids=["by hand", "by wrapped.loss"])
@pytest.mark.parametrize("name", LOOPS)
def test_the_users_own_loop_lowers_the_loss(name: str, by_hand: bool) -> None:
    wrapped = LOOPS[name]()(mlp())
    criterion = nn.MSELoss()
    x = torch.randn(48, 3)
    y = x.sum(1, keepdim=True)
    opt = torch.optim.Adam(wrapped.parameters(), lr=0.02)
    torch.manual_seed(1)
    start = criterion(wrapped.eval()(x), y).item()
    wrapped.train()
    heads_missed = by_hand and "sculpt" in wrapped.methods
    with pytest.warns(WorkbenchWarning, match="not reach the risk") if heads_missed else contextlib.nullcontext():
        for _ in range(60):
            opt.zero_grad()
            loss = criterion(wrapped(x), y) if by_hand else wrapped.loss(criterion, x, y)
            loss.backward()
            opt.step()
    end = criterion(wrapped.eval()(x), y).item()
    assert end < 0.35 * start


def test_a_learned_signature_lowers_its_loss_and_knows_what_is_far() -> None:
    wrapped: Any = neo.Wrapper()(mlp()).train()
    x = torch.randn(64, 3)
    wrapped(x, return_risk=True)
    opt = torch.optim.Adam(wrapped.risk_parameters(), lr=0.02)
    base = {key: p.clone() for key, p in wrapped.named_base_parameters()}
    losses = []
    for _ in range(40):
        opt.zero_grad()
        loss = wrapped(x, return_risk=True)[1].mean()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(torch.equal(p, base[key]) for key, p in wrapped.named_base_parameters())
    wrapped.eval()
    near, far = wrapped(x, return_risk=True)[1], wrapped(x + 20, return_risk=True)[1]
    assert bool(far.min() > near.max())
