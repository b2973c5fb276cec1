"""Randomized prior functions: each voter is a trained copy plus an untrained one that never changes."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import workbench
from workbench import compose, fit, neo, sample, sculpt, vote
from workbench.outputs import Binary

SCALE, VOTERS, PLACE = 2.0, 3, "extras@workbench.prior."


class Net(nn.Module):
    """Layers whose answers depend on the mode, on buffers, and on a parameter without an initialization of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5))
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gain * self.body(x))


def _net() -> Net:
    torch.manual_seed(0)
    return Net()


def _x() -> Tensor:
    return torch.randn(6, 2, generator=torch.Generator().manual_seed(1))


def _row(state: dict[str, Tensor], key: str, like: Tensor, i: int) -> Tensor:
    return state[key] if state[key].shape == like.shape else state[key][i]


def _pairs(wrapped: Any, net: nn.Module) -> list[tuple[Any, Any]]:
    """For each voter plain copies with its tensors and with those of its prior, found by the keys of the state alone."""
    state = wrapped.state_dict()
    pairs: list[tuple[Any, Any]] = []
    for i in range(VOTERS):
        trained, fixed = copy.deepcopy(net), copy.deepcopy(net).eval()
        keys = {key: f"{key}@vote" if f"{key}@vote" in state else key for key in net.state_dict()}
        trained.load_state_dict({key: _row(state, keys[key], like, i) for key, like in net.state_dict().items()})
        prior = {key: PLACE + key.replace(".", "/") for key in net.state_dict()}
        fixed.load_state_dict({key: _row(state, prior[key], like, i) for key, like in net.state_dict().items()})
        pairs.append((trained, fixed))
    return pairs


def _answers(wrapped: Any, net: nn.Module, x: Tensor) -> Tensor:
    """[voters, rows, columns], in the mode that the wrapped object is in."""
    return torch.stack([f.train(wrapped.training)(x) + SCALE * p(x) for f, p in _pairs(wrapped, net)])


@pytest.mark.parametrize("share", [None, 1, 2])
@pytest.mark.parametrize("strategy", ["auto", "loop", "vmap", "rescue"])
def test_voters_are_trained_copies_plus_untrained_ones(share: int | None, strategy: str) -> None:
    net, x = _net(), _x()
    wrapped = vote.Wrapper(VOTERS, share=share, prior=SCALE, strategy=strategy)(net).eval()
    expected = _answers(wrapped, net, x)
    y, risk = wrapped(x, return_risk=True)
    torch.testing.assert_close(y, expected.mean(0))
    torch.testing.assert_close(risk, expected.std(0, correction=0))
    for voter, answer in zip(wrapped.voters(), expected, strict=True):
        torch.testing.assert_close(voter(x), answer)
    torch.testing.assert_close(wrapped.unwrap()(x), expected[0])


def test_a_shared_trunk_is_replayed_beside_priors_of_their_own() -> None:
    net, x = _net(), _x()
    wrapped = vote.Wrapper(VOTERS, share=1, prior=SCALE, strategy="replay")(net).eval()
    torch.testing.assert_close(wrapped(x), _answers(wrapped, net, x).mean(0))


def test_rank_one_voters_have_whole_priors() -> None:
    net, x = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)), _x()
    torch.manual_seed(3)
    wrapped = vote.Wrapper(VOTERS, share="rank1", prior=SCALE)(net).eval()
    torch.manual_seed(3)
    without = vote.Wrapper(VOTERS, share="rank1")(net).eval()
    expected = torch.stack(
        [v(x) + SCALE * p(x) for v, (_, p) in zip(without.voters(), _pairs(wrapped, net), strict=True)]
    )
    torch.testing.assert_close(wrapped(x), expected.mean(0))


def test_voters_start_as_without_priors_and_nothing_else_is_new() -> None:
    torch.manual_seed(5)
    wrapped = vote.Wrapper(VOTERS, prior=SCALE)(_net())
    torch.manual_seed(5)
    without = vote.Wrapper(VOTERS)(_net())
    state, other = wrapped.state_dict(), without.state_dict()
    assert {key for key in state if not key.startswith(PLACE)} == set(other)
    assert all(torch.equal(state[key], other[key]) for key in other if key != "settings@workbench")
    assert "prior" not in bytes(other["settings@workbench"].tolist()).decode()
    assert [name for name, _ in wrapped.named_parameters()] == [name for name, _ in without.named_parameters()]
    zero = vote.Wrapper(VOTERS, prior=0)(_net())
    assert set(zero.state_dict()) == set(other)


def test_training_mode_has_gradients_of_the_voters_alone_and_priors_stay_in_evaluation_mode() -> None:
    net, x, target = (
        nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)),
        _x(),
        torch.ones(6, 1),
    )
    wrapped = vote.Wrapper(VOTERS, prior=SCALE)(net).train()
    before = {key: value.clone() for key, value in wrapped.state_dict().items()}
    pairs = _pairs(wrapped, net)
    answers = [f.train()(x) + SCALE * p(x).detach() for f, p in pairs]
    torch.stack([nn.functional.mse_loss(answer, target) for answer in answers]).mean().backward()
    loss = wrapped.loss(nn.MSELoss(), x, target)
    loss.backward()
    torch.testing.assert_close(loss, torch.stack([(a - target).square().mean() for a in answers]).mean())
    for name, parameter in wrapped.named_parameters():
        expected = torch.stack([dict(f.named_parameters())[name.removesuffix("@vote")].grad for f, _ in pairs])
        torch.testing.assert_close(parameter.grad, expected)
    after = wrapped.state_dict()
    assert all(torch.equal(after[key], before[key]) for key in after if key.startswith(PLACE))
    moved = torch.stack([f[1].running_mean for f, _ in pairs])
    torch.testing.assert_close(after["1.running_mean@vote"], moved)


def test_dealt_rows_have_the_priors_of_their_voters() -> None:
    net, x = nn.Linear(2, 1), _x()
    wrapped = vote.Wrapper(VOTERS, prior=SCALE)(net).train()
    answers = _answers(wrapped, net, x)
    dealt = wrapped(x)
    owners = [int((answers[:, row] - dealt[row]).abs().sum(1).argmin()) for row in range(6)]
    torch.testing.assert_close(dealt, torch.stack([answers[i, row] for row, i in enumerate(owners)]))
    assert sorted(owners) == [0, 0, 1, 1, 2, 2]


def test_gradients_of_inputs_pass_through_priors() -> None:
    net, x = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)), _x().requires_grad_()
    wrapped = vote.Wrapper(VOTERS, prior=SCALE)(net).eval()
    (expected,) = torch.autograd.grad(_answers(wrapped, net, x).mean(0).sum(), x)
    (gradient,) = torch.autograd.grad(wrapped(x).sum(), x)
    torch.testing.assert_close(gradient, expected)


def test_fit_never_trains_a_prior_and_adds_it_in_the_units_of_training(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.linspace(-30, 50, 40)[:, None]
    wrapped = vote.Wrapper(VOTERS, prior=SCALE)(net)
    before = {key: value.clone() for key, value in wrapped.state_dict().items() if key.startswith(PLACE)}
    fit(wrapped, (x, 100 + x), epochs=2, progress=False)
    wrapped.eval()
    moved = {key for key, value in before.items() if not torch.equal(wrapped.state_dict()[key], value)}
    assert moved == {f"{PLACE}2/weight", f"{PLACE}2/bias"}  # by `fit`, before it trains
    scaling = wrapped.scaling
    inside = _answers(wrapped, net, (x - scaling.x_mean) / scaling.x_scale)
    expected = inside * scaling.y_scale + scaling.y_mean
    y, risk = wrapped(x, return_risk=True)
    torch.testing.assert_close(y, expected.mean(0))
    torch.testing.assert_close(risk, expected.std(0, correction=0))
    torch.testing.assert_close(torch.stack([voter(x) for voter in wrapped.voters()]), expected)
    other = vote.Wrapper(VOTERS, prior=SCALE)(net).eval()
    other.load_state_dict(wrapped.state_dict())
    workbench.save(wrapped, tmp_path / "model.pt")
    loaded = workbench.load(tmp_path / "model.pt", net)
    for twin in (other, loaded.eval(), copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        assert torch.equal(twin(x), y)
    voter = wrapped.voters()[1]
    for twin in (copy.deepcopy(voter), pickle.loads(pickle.dumps(voter))):
        torch.testing.assert_close(twin(x), expected[1])


@pytest.mark.parametrize("heads", [False, True])
def test_fit_takes_from_a_prior_what_ridge_regression_finds_of_it_at_the_rows(heads: bool) -> None:
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2))
    x = 10 + 3 * torch.randn(50, 2, generator=torch.Generator().manual_seed(2))
    wrapped = compose(vote.Wrapper(VOTERS, prior=SCALE), *([sculpt.Wrapper()] if heads else []))(net)
    before = [{key: v[i] for key, v in wrapped.state_dict().items() if key.startswith(PLACE)} for i in range(VOTERS)]
    before = copy.deepcopy(before)
    fit(wrapped, (x, x), epochs=1, validation=0, progress=False)
    standard = ((x - x.mean(0)) / x.std(0, correction=0)).double()
    for i, prior in enumerate(before):
        weight, bias, last, end = (
            prior[f"{PLACE}{layer}/{part}"].double() for layer in (0, 2) for part in ("weight", "bias")
        )
        phi = torch.cat([(standard @ weight.mT + bias).tanh(), torch.ones(50, 1).double()], 1)
        both = torch.cat([last, end[:, None]], 1).mT
        ridge = 0.01 * phi.square().mean() * 50
        coefficients = torch.linalg.lstsq(
            torch.cat([phi, ridge.sqrt() * torch.eye(6).double()]), torch.cat([phi @ both, torch.zeros(6, 2).double()])
        ).solution
        state = wrapped.state_dict()
        left = torch.cat([state[f"{PLACE}2/weight"][i], state[f"{PLACE}2/bias"][i][:, None]], 1)
        torch.testing.assert_close(left.double(), (both - coefficients).mT, rtol=1e-4, atol=1e-6)
        assert (phi @ left.double().mT).std() < 0.3 * (phi @ both).std()
    twin = compose(vote.Wrapper(VOTERS, prior=SCALE), *([sculpt.Wrapper()] if heads else []))(net)
    twin.load_state_dict(wrapped.state_dict())
    for one in (wrapped, twin):  # once: voters have learned beside it
        fit(one, (x + 1, x), epochs=1, progress=False)
        assert all(torch.equal(one.state_dict()[key], state[key]) for key in state if key.startswith(PLACE))


def test_priors_without_one_linear_layer_at_their_end_stay_as_they_are() -> None:
    net = nn.Sequential(
        nn.Conv1d(1, 4, 2), nn.Tanh(), nn.Flatten(), nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 1, 4), nn.Flatten()
    )
    wrapped = vote.Wrapper(VOTERS, prior=SCALE)(net)
    before = {key: value.clone() for key, value in wrapped.state_dict().items() if key.startswith(PLACE)}
    fit(wrapped, (torch.randn(20, 1, 2), torch.randn(20, 1)), epochs=1, progress=False)
    assert all(torch.equal(wrapped.state_dict()[key], value) for key, value in before.items())


def test_a_state_of_another_prior_is_refused() -> None:
    wrapped = vote.Wrapper(VOTERS, prior=SCALE)(nn.Linear(2, 1))
    with pytest.raises(ValueError, match=r"prior=2\.0, this object prior=1\.0"):
        vote.Wrapper(VOTERS, prior=1)(nn.Linear(2, 1)).load_state_dict(wrapped.state_dict())
    with pytest.raises(ValueError, match=r"prior=2\.0, this object prior=None"):
        vote.Wrapper(VOTERS)(nn.Linear(2, 1)).load_state_dict(wrapped.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        wrapped.load_state_dict(vote.Wrapper(VOTERS)(nn.Linear(2, 1)).state_dict())


def test_a_state_of_the_plain_model_leaves_priors_alone() -> None:
    wrapped = vote.Wrapper(VOTERS, prior=SCALE)(nn.Linear(2, 1))
    before = {key: value.clone() for key, value in wrapped.state_dict().items() if key.startswith(PLACE)}
    wrapped.load_state_dict(nn.Linear(2, 1).state_dict())
    assert all(torch.equal(wrapped.state_dict()[key], value) for key, value in before.items())


@pytest.mark.parametrize("values", [(1.0, 2.0), (1.0, 1.0)], ids=["differing", "constant"])
def test_priors_load_into_a_model_with_other_values_of_its_own(values: tuple[float, float], tmp_path: Path) -> None:
    """Constants are the same in all untrained models, and whether a parameter is one depends on the values when it is wrapped."""

    def net(first: float, last: float) -> Net:
        given = _net()
        with torch.no_grad():
            given.gain.copy_(torch.linspace(first, last, 8))
        return given

    wrapped, file = vote.Wrapper(VOTERS, prior=SCALE)(net(*values)).eval(), tmp_path / "net.safetensors"
    workbench.save(wrapped, file)
    other = net(1.0, 3.0 - values[1])
    filled = vote.Wrapper(VOTERS, prior=SCALE)(other).eval()
    filled(_x(), return_risk=True)
    filled.load_state_dict(wrapped.state_dict())
    for loaded in (filled, workbench.load(file, other).eval(), pickle.loads(pickle.dumps(filled))):
        torch.testing.assert_close(loaded(_x(), return_risk=True), wrapped(_x(), return_risk=True), rtol=0, atol=0)
        state = loaded.state_dict()
        assert all(torch.equal(state[key], value) for key, value in wrapped.state_dict().items())


def test_a_refused_load_leaves_the_priors_sizes() -> None:
    wrapped = vote.Wrapper(VOTERS, prior=SCALE)(_net()).eval()
    before = wrapped(_x(), return_risk=True)
    state = {**wrapped.state_dict(), f"{PLACE}gain": torch.ones(8), "head.bias@vote": torch.ones(VOTERS, 4)}
    with pytest.raises(RuntimeError, match=r"size mismatch for head\.bias@vote"):
        wrapped.load_state_dict(state)
    torch.testing.assert_close(wrapped(_x(), return_risk=True), before, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match=r"size mismatch for .*gain"):
        wrapped.load_state_dict({**wrapped.state_dict(), f"{PLACE}gain": torch.ones(VOTERS + 1, 8)})


def test_risk_heads_have_no_part_in_the_prior() -> None:
    net, x = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)), _x()
    torch.manual_seed(7)
    wrapped = compose(vote.Wrapper(VOTERS, prior=SCALE), sculpt.Wrapper())(net).eval()
    torch.manual_seed(7)
    without = compose(vote.Wrapper(VOTERS), sculpt.Wrapper())(net).eval()
    y, risk = wrapped(x, return_risk=True)
    torch.testing.assert_close(risk.aleatoric, without(x, return_risk=True)[1].aleatoric)
    expected = _answers(wrapped, net, x)
    torch.testing.assert_close(y, expected.mean(0))
    torch.testing.assert_close(risk.epistemic, expected.std(0, correction=0))
    torch.testing.assert_close(wrapped.predictive(x).mean, expected.mean(0))


def test_noise_does_not_reach_priors() -> None:
    net, x = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)), _x()
    wrapped = compose(vote.Wrapper(VOTERS, prior=SCALE), sample.Wrapper(4, sample.Bernoulli(0.999999)))(net).eval()
    fixed = torch.stack([p(x) for _, p in _pairs(wrapped, net)])
    biases = wrapped.state_dict()["2.bias@vote"][:, None]  # all that is left of the voters
    torch.testing.assert_close(wrapped(x), (biases + SCALE * fixed).mean(0))


def test_classes_have_priors_on_their_logits() -> None:
    net, x = _net(), _x()
    wrapped = vote.Wrapper(VOTERS, prior=SCALE, output="logits")(net).eval()
    probs = _answers(wrapped, net, x).softmax(-1)
    y, risk = wrapped(x, return_risk=True)
    torch.testing.assert_close(y.softmax(-1), probs.mean(0))
    torch.testing.assert_close(risk.total, torch.special.entr(probs.mean(0)).sum(-1))
    several = vote.Wrapper(VOTERS, prior=SCALE, output=Binary())(net).eval()
    torch.testing.assert_close(several(x).sigmoid(), _answers(several, net, x).sigmoid().mean(0))


def test_vacuitic_risk_reads_the_class_scores_of_the_whole_first_voter() -> None:
    net, x = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)), _x()
    both = compose(vote.Wrapper(VOTERS, prior=SCALE, output="logits"), neo.Wrapper(density="energy"))
    wrapped = both(net).eval().fit(_x())
    risk = wrapped(x, return_risk=True)[1].vacuitic
    energy = -_answers(wrapped, net, x)[0].logsumexp(-1)
    assert torch.corrcoef(torch.stack([risk, energy]))[0, 1] > 0.9999


@pytest.mark.slow
def test_compiled_and_exported_models_are_the_eager_one() -> None:
    net, x = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)), _x()
    wrapped = vote.Wrapper(VOTERS, prior=SCALE)(net).eval()
    with torch.no_grad():
        y, risk = wrapped(x, return_risk=True)
        compiled = torch.compile(wrapped, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, return_risk=True), (y, risk))
    exported = torch.export.export(wrapped, (x,))
    torch.testing.assert_close(exported.module()(x), y)


def test_copies_of_a_fitted_model_have_its_priors() -> None:
    wrapped: Any = compose(vote.Wrapper(VOTERS, prior=SCALE), neo.Wrapper())(_net())
    fit(wrapped, (_x(), torch.randn(6, 3)), epochs=1, progress=False)
    wrapped.eval()(_x(), return_risk=True)
    state = wrapped.state_dict()
    pickled = pickle.loads(pickle.dumps(wrapped))
    for twin in (copy.deepcopy(wrapped), pickled, copy.deepcopy(pickled)):
        kept = twin.state_dict()
        assert [key for key in state if key.startswith(PLACE) and not torch.equal(kept[key], state[key])] == []


def test_frozen_layers_are_the_same_in_all_priors() -> None:
    net, x = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)), _x()
    net[0].requires_grad_(False)
    wrapped = vote.Wrapper(VOTERS, prior=SCALE)(net).eval()
    assert all(torch.equal(p[0].weight, net[0].weight) for _, p in _pairs(wrapped, net))
    y = wrapped(x)
    torch.testing.assert_close(y, _answers(wrapped, net, x).mean(0))
    with torch.no_grad():
        net[0].weight.mul_(2)  # the voters' own, which they share with the given model
    assert torch.equal(_pairs(wrapped, net)[0][1][0].weight * 2, net[0].weight)


def test_other_initializations_than_a_layers_own_are_shuffled() -> None:
    wrapped = vote.Wrapper(VOTERS, prior=SCALE)(_net())
    rows = wrapped.state_dict()[f"{PLACE}gain"]
    assert all(torch.equal(row.sort().values, torch.linspace(0.5, 1.5, 8)) for row in rows)
    assert not torch.equal(rows[0], rows[1])


@pytest.mark.parametrize("name", ["scale", "shared", "value"])
def test_a_parameter_may_be_called_as_the_prior_calls_its_own(name: str) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 3)
            setattr(self, name, nn.Parameter(torch.tensor([2.0])))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x) * getattr(self, name)

    wrapped: Any = vote.Wrapper(VOTERS, prior=1.0)(Named()).eval()
    again: Any = vote.Wrapper(VOTERS, prior=1.0)(Named()).eval()
    again.load_state_dict(wrapped.state_dict())
    torch.testing.assert_close(again(_x()), wrapped(_x()))
    state = wrapped.state_dict()
    for i, voter in enumerate(wrapped.voters()):
        trained, prior = (
            (_x() @ state[head + "weight" + end][i].T + state[head + "bias" + end][i])
            * state[gain][i % len(state[gain])]
            for head, end, gain in (("head.", "@vote", f"{name}@vote"), (f"{PLACE}head/", "", f"{PLACE}{name}/"))
        )
        torch.testing.assert_close(voter(_x()), trained + prior)
