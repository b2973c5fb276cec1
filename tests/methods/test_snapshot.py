"""Snapshot voters: the schedule of the paper, with the weights at the end of each cycle as voters."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import NotFittedError, compose, fit, laplace, load, neo, sample, save, sculpt, snapshot, swag, vote

X = torch.linspace(-2, 2, 64)[:, None]


def net(norm: bool = False) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.Linear(8, 1))


def taken(wrapped: Any, n: int) -> list[nn.Module]:
    """Take snapshots of weights and buffers that differ; the plain models of that moment."""
    models = []
    for step in range(n):
        with torch.no_grad():
            for value in (*wrapped.parameters(), *(b for name, b in wrapped.named_buffers() if "@" not in name)):
                if value.is_floating_point():
                    value.add_(0.1 * torch.rand(value.shape, generator=torch.Generator().manual_seed(step)))
        assert snapshot.collect(wrapped) == step + 1
        models.append(copy.deepcopy(wrapped.unwrap()).eval())
    return models


@pytest.mark.parametrize("norm", [False, True])
def test_voters_are_the_models_of_the_moments_that_were_taken(norm: bool) -> None:
    wrapped = snapshot.Wrapper(3)(net(norm))
    models = taken(wrapped, 4)[1:]  # the oldest has given way
    wrapped.eval()
    with torch.no_grad():
        answers = torch.stack([model(X) for model in models])
        y, risk = wrapped(X, return_risk=True)
        for voter, answer in zip(wrapped.voters(), answers, strict=True):
            assert torch.equal(voter(X), answer)
    torch.testing.assert_close(y, answers.mean(0))
    torch.testing.assert_close(risk, answers.std(0, correction=0))


def test_it_says_what_vote_says_of_the_same_voters() -> None:
    wrapped, voting = (
        compose(w, sculpt.Wrapper())(net()) for w in (snapshot.Wrapper(3), vote.Wrapper(3, finetune=True))
    )
    models = []
    for step in range(3):
        with torch.no_grad():
            for parameter in wrapped.parameters():
                parameter.add_(0.1 * (step + 1))
        models.append({name: p.detach().clone() for name, p in wrapped.named_parameters()})
        snapshot.collect(wrapped)
    with torch.no_grad():
        for name, stacked in voting.named_parameters():
            stacked.copy_(torch.stack([model[name.removesuffix("@vote")] for model in models]))
    for output, expected in zip(ask(wrapped), ask(voting), strict=True):
        torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("heads_first", [False, True])
def test_heads_of_frozen_layers_are_collected(heads_first: bool) -> None:
    """The layers of a risk head learn also where those of the model are frozen, and must belong to the same moment as its last layer."""
    model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    model[2].requires_grad_(False)
    wrapped: Any = model
    for wrapper in (sculpt.Wrapper(), snapshot.Wrapper(3)) if heads_first else (snapshot.Wrapper(3), sculpt.Wrapper()):
        wrapped = wrapper(wrapped)
    noises = []
    for step in range(3):
        with torch.no_grad():
            for parameter in filter(lambda p: p.requires_grad, wrapped.parameters()):
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step)))
        snapshot.collect(wrapped)
        alone, point = sculpt.Wrapper()(copy.deepcopy(model)).eval(), dict(wrapped.named_parameters())
        with torch.no_grad():
            for name, parameter in alone.named_parameters():
                parameter.copy_(point[name])
            noises.append(alone(X, return_risk=True)[1])
    aleatoric = wrapped.eval()(X, return_risk=True)[1].aleatoric
    torch.testing.assert_close(aleatoric, torch.stack(noises).square().mean(0).sqrt())
    both = {*compose(swag.Wrapper(3), sculpt.Wrapper())(model).state_dict()}
    assert {"0.weight@swag", "0.weight@sculpt@swag", "2.weight@sculpt@swag"} < both
    assert "2.weight@swag" not in both


@pytest.mark.parametrize("wrapper", [snapshot.Wrapper(3), swag.Wrapper(n_samples=3)], ids=repr)
def test_weights_unfrozen_after_wrapping_are_refused(wrapper: Any) -> None:
    model = net()
    model[0].requires_grad_(False)
    wrapped = wrapper(model)
    collect = snapshot.collect if "snapshot" in wrapped.methods else swag.collect
    assert collect(wrapped) == 1
    wrapped[0].requires_grad_(True)
    before = copy.deepcopy(wrapped.state_dict())
    for train in (lambda: collect(wrapped), lambda: fit(wrapped, (X, X), epochs=8, progress=False)):
        with pytest.raises(ValueError, match=r"0\.weight, 0\.bias were frozen then, but not now: unfreeze"):
            train()
    assert all(torch.equal(value, before[name]) for name, value in wrapped.state_dict().items())


def ask(wrapped: Any) -> list[Tensor]:
    y, risk = wrapped.eval()(X, return_risk=True)
    return [y, risk.aleatoric, risk.epistemic, risk.total]


def test_fit_anneals_in_cycles_and_takes_at_their_ends() -> None:
    wrapped = snapshot.Wrapper(3)(net())
    history = fit(wrapped, (X, X.sin()), epochs=9, batch_size=16, lr=0.02, validation=0, progress=False)
    rates = history.frame["lr"].tolist()
    steps = 4
    last = [(epoch % 3 + (steps - 1) / steps) / 3 for epoch in range(9)]  # share of the cycle at each epoch's last step
    assert rates == pytest.approx([0.01 * (1 + math.cos(math.pi * share)) for share in last])
    voters = wrapped.voters()
    ends = [voter[0].weight for voter in voters]
    assert not torch.equal(ends[0], ends[1])
    assert torch.equal(ends[2], wrapped[0].weight)
    assert history.best_epoch == 9


def test_the_last_epoch_counts_whatever_the_validation_says() -> None:
    wrapped = compose(snapshot.Wrapper(2), sculpt.Wrapper(), neo.Wrapper())(net())
    history = fit(wrapped, (X, X.sin()), epochs=4, validation=(X, -9 * X), patience=1, progress=False)
    assert history.best_epoch == 4
    assert len(wrapped.voters()) == 2
    assert set(wrapped(X, return_risk=True)[1].names()) == {"aleatoric", "epistemic", "vacuitic", "total"}


def test_an_optimizer_of_ones_own_keeps_its_rate() -> None:
    wrapped = snapshot.Wrapper(2)(net())
    history = fit(wrapped, (X, X), epochs=4, optimizer=lambda p: torch.optim.SGD(p, lr=0.01), progress=False)
    assert set(history.frame["lr"]) == {0.01}


def test_copies_files_and_pickles_keep_the_voters(tmp_path: Path) -> None:
    wrapped = snapshot.Wrapper(3)(net(norm=True))
    taken(wrapped, 3)
    save(wrapped.eval(), tmp_path / "model.safetensors")
    copies = [
        copy.deepcopy(wrapped),
        pickle.loads(pickle.dumps(wrapped)),
        load(tmp_path / "model.safetensors", net(True)).eval(),
    ]
    for copied in copies:
        for output, expected in zip(copied(X, return_risk=True), wrapped(X, return_risk=True), strict=True):
            assert torch.equal(output, expected)


def test_classes_have_entropies_and_noise_composes() -> None:
    wrapped = compose(snapshot.Wrapper(2, output="logits"), sample.Wrapper(2))(
        nn.Sequential(nn.Linear(1, 8), nn.Linear(8, 3))
    )
    taken(wrapped, 2)
    y, risk = wrapped.eval()(X, return_risk=True)
    torch.testing.assert_close(risk.total, risk.aleatoric + risk.epistemic)
    torch.testing.assert_close(y.exp().sum(-1), torch.ones(64))


def test_before_all_are_taken_there_is_no_risk() -> None:
    wrapped = snapshot.Wrapper(3)(net()).eval()
    taken(wrapped, 1)
    torch.testing.assert_close(wrapped(X), wrapped.unwrap()(X))
    with pytest.raises(NotFittedError, match="collected 1 of 3 voters"):
        wrapped(X, return_risk=True)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("wrapper", [snapshot.Wrapper(2), swag.Wrapper(3)])
def test_training_after_the_sets_were_collected_is_told(wrapper: Any, norm: bool, tmp_path: Path) -> None:
    method = {"snapshot": snapshot, "swag": swag}[wrapper(net())._workbench.methods[0].name]
    wrapped = wrapper(net(norm))
    fit(wrapped, (X, X**2), epochs=8, progress=False)
    before = wrapped(X, return_risk=True)  # without a warning
    save(wrapped, tmp_path / "model.safetensors")
    load(tmp_path / "model.safetensors", net(norm))(X, return_risk=True)
    copy.deepcopy(wrapped)(X, return_risk=True)

    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    wrapped.train().loss(nn.MSELoss(), X, X**2).backward()
    optimizer.step()
    with pytest.warns(UserWarning, match=rf"trained after that: call {method.__name__.split('.')[-1]}.collect"):
        after = wrapped.eval()(X, return_risk=True)
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    wrapped(X, return_risk=True)  # told once
    method.collect(wrapped)
    if method is swag:
        wrapped.fit(X)
    wrapped(X, return_risk=True)


def test_bad_input_is_told() -> None:
    with pytest.raises(ValueError, match="n_voters must be a whole number of at least 2, not 1"):
        snapshot.Wrapper(1)
    with pytest.raises(ValueError, match="3 epochs are too few for 5 cycles"):
        fit(snapshot.Wrapper(5)(net()), (X, X), epochs=3, progress=False)
    with pytest.raises(TypeError, match=r"wrapped by snapshot.Wrapper"):
        snapshot.collect(net())
    for other in (vote.Wrapper(2), laplace.Wrapper()):
        with pytest.raises(ValueError, match="both model the distribution"):
            compose(snapshot.Wrapper(2), other)(net())


def test_the_old_name_of_collect_says_the_new_one() -> None:
    wrapped = snapshot.Wrapper(n_voters=2)(net())
    with pytest.warns(DeprecationWarning, match=r"snapshot\.collect"):
        assert snapshot.take(wrapped) == 1
