"""SWAG: compared with its closed forms on recorded trajectories, and composed with the other methods."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from workbench import (
    NotFittedError,
    WorkbenchWarning,
    compose,
    fit,
    laplace,
    load,
    neo,
    sample,
    save,
    sculpt,
    snapshot,
    swag,
    vote,
)
from workbench.core.ownership import table_of
from workbench.engine.reach import Reach


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def net(norm: bool = False) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6) if norm else nn.Tanh(), nn.Linear(6, 2))


def walked(wrapped: Any, steps: int) -> list[dict[str, Tensor]]:
    """Collect along a random walk of all parameters; the weights on the way."""
    path = []
    for step in range(steps):
        with torch.no_grad():
            for i, parameter in enumerate(wrapped.parameters()):
                parameter.add_(0.1 * normal(*parameter.shape, seed=100 * step + i))
        path.append({name: p.detach().clone() for name, p in wrapped.named_parameters()})
        assert swag.collect(wrapped) == step + 1
    return path


X = normal(40, 3, seed=7)


@pytest.mark.parametrize("steps", [3, 9])
def test_moments_are_those_of_the_trajectory(steps: int) -> None:
    wrapped = swag.Wrapper(n_samples=2, rank=4)(net())
    path = walked(wrapped, steps)
    table, [method] = table_of(wrapped), wrapped._workbench.methods
    for name in path[0]:
        points = np.stack([point[name].double().numpy() for point in path])
        mean, variance, deviations = (moment.numpy() for moment in method.moments(table, name))
        np.testing.assert_allclose(mean, points.mean(0), atol=1e-5)
        np.testing.assert_allclose(variance, points.var(0), atol=1e-5)
        # the latest four, the oldest gives way
        recent = {i % 4: points[i] - points[: i + 1].mean(0) for i in range(steps)}
        for place, deviation in recent.items():
            np.testing.assert_allclose(deviations[place], deviation, atol=1e-5)


def test_variances_survive_weights_far_from_zero() -> None:
    model = nn.Linear(1, 1, bias=False)
    wrapped = swag.Wrapper(n_samples=2)(model)
    for value in (1000.0, 1000.01, 1000.02):
        with torch.no_grad():
            wrapped.weight.fill_(value)
        swag.collect(wrapped)
    [method] = wrapped._workbench.methods
    variance = method.moments(table_of(wrapped), "weight")[1].item()
    assert variance == pytest.approx(0.01**2 * 2 / 3, rel=0.02)


def test_drawn_weights_have_the_covariance_of_the_paper() -> None:
    wrapped = swag.Wrapper(n_samples=40_000, rank=3)(nn.Linear(2, 1))
    path = walked(wrapped, 5)
    wrapped.fit(normal(4, 2))
    table = table_of(wrapped)
    flat = np.stack([torch.cat([p.flatten() for p in point.values()]).double().numpy() for point in path])
    running = np.stack([flat[i] - flat[: i + 1].mean(0) for i in range(5)])[-3:]
    expected = np.diag(flat.var(0)) / 2 + running.T @ running / (2 * (3 - 1))
    drawn = torch.cat([table.get(f"{name}@swag").flatten(1) for name in path[0]], 1).double().numpy()
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    np.testing.assert_allclose(drawn.mean(0), flat.mean(0), atol=0.01)
    np.testing.assert_allclose(np.cov(drawn.T) / scale, expected / scale, atol=0.03)
    weights = torch.cat([p.detach().flatten() for p in wrapped.parameters()]).numpy()
    np.testing.assert_allclose(weights, flat.mean(0), atol=1e-5)


def test_answers_are_those_of_the_drawn_models() -> None:
    wrapped = compose(swag.Wrapper(n_samples=4), sculpt.Wrapper())(net())
    walked(wrapped, 4)
    wrapped.eval().fit(X)
    voters = wrapped.voters()
    with torch.no_grad():
        answers = torch.stack([voter(X) for voter in voters])
        y, risk = wrapped(X, return_risk=True)
    assert len(voters) == 4
    torch.testing.assert_close(y, answers.mean(0))
    torch.testing.assert_close(risk.epistemic, answers.std(0, correction=0))
    torch.testing.assert_close(wrapped(X), y)
    torch.testing.assert_close(risk.total**2, risk.epistemic**2 + risk.aleatoric**2)


def test_statistics_of_batch_norm_are_those_of_the_inputs_under_each_set_of_weights() -> None:
    wrapped = swag.Wrapper(n_samples=3)(net(norm=True))
    walked(wrapped, 4)
    before = wrapped.train()[1].num_batches_tracked.clone()
    # torch takes the plain mean over batches: they must be of one size
    loader = torch.utils.data.DataLoader(X, batch_size=20)
    wrapped.fit(loader)
    assert wrapped.training
    assert torch.equal(wrapped[1].num_batches_tracked, before)
    for model in (*wrapped.eval().voters(), wrapped.unwrap()):
        expected = copy.deepcopy(model)
        update_bn(loader, expected)
        torch.testing.assert_close(model[1].running_mean, expected[1].running_mean)
        torch.testing.assert_close(model[1].running_var, expected[1].running_var)


class Twice(nn.Module):
    """Runs its norm twice, and another only in training mode."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last, self.unused = nn.Linear(3, 6), norm, nn.Linear(6, 2), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.training:
            self.unused(h)
        return self.last(self.norm(h) * self.norm(-2 * h).tanh())


@pytest.mark.parametrize("momentum", [None, 0.1, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_are_means_whatever_the_momentum_and_number_of_calls(momentum: float, dtype: torch.dtype) -> None:
    wrapped = swag.Wrapper(n_samples=2)(Twice(nn.BatchNorm1d(6, momentum=momentum)).to(dtype))
    wrapped(X.to(dtype))  # counts a batch
    walked(wrapped, 3)
    unused = wrapped.unused.running_mean.clone()
    loader = torch.utils.data.DataLoader(X.to(dtype), batch_size=20)
    wrapped.fit(loader)
    assert wrapped.norm.momentum == momentum
    for voter in wrapped.eval().voters():
        torch.testing.assert_close(voter.unused.running_mean, unused)
        expected = copy.deepcopy(voter)
        update_bn(loader, expected)
        tolerances = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.02, "atol": 0.02}
        torch.testing.assert_close(voter.norm.running_mean, expected.norm.running_mean, **tolerances)
        torch.testing.assert_close(voter.norm.running_var, expected.norm.running_var, **tolerances)


def test_statistics_of_instance_norm_are_those_of_the_inputs() -> None:
    wrapped = swag.Wrapper(n_samples=2)(
        nn.Sequential(nn.Conv1d(1, 2, 1), nn.InstanceNorm1d(2, track_running_stats=True))
    )
    walked(wrapped, 3)
    x = X[:, None]
    wrapped.fit(torch.utils.data.DataLoader(x, batch_size=20))
    for voter in wrapped.eval().voters():
        torch.testing.assert_close(voter[1].running_mean, voter[0](x).mean((0, 2)).detach())
        torch.testing.assert_close(voter[1].running_var, voter[0](x).var(2).mean(0).detach())


@pytest.mark.parametrize("when", ["before", "after"])
def test_moments_of_half_precision_are_exact(when: str) -> None:
    model = nn.Linear(1, 1, bias=False)
    wrapped = swag.Wrapper(n_samples=2)(model.bfloat16() if when == "before" else model).bfloat16()
    values = [1.0 + step / 128 for step in range(40)]
    for value in values:
        with torch.no_grad():
            wrapped.weight.fill_(value)
        swag.collect(wrapped)
    [method] = wrapped._workbench.methods
    mean, variance, _ = method.moments(table_of(wrapped), "weight")
    assert mean.item() == pytest.approx(np.mean(values), rel=1e-5)
    assert variance.item() == pytest.approx(np.var(values), rel=1e-5)


@pytest.mark.parametrize("strategy", ["loop", "vmap"])
@pytest.mark.parametrize("wrapper", [swag.Wrapper(n_samples=3, rank=3), snapshot.Wrapper(3)], ids=repr)
def test_a_prediction_leaves_the_statistics_of_batch_norm_alone(wrapper: Any, strategy: str) -> None:
    wrapped = wrapper(net(norm=True))
    fit(wrapped, (normal(40, 3), normal(40, 2, seed=1)), epochs=8, progress=False)
    wrapped._workbench.strategy = strategy
    before = copy.deepcopy(wrapped.state_dict())
    for risk in (False, True):
        wrapped(normal(5, 3), return_risk=risk)
    assert all(torch.equal(value, before[name]) for name, value in wrapped.state_dict().items())


@pytest.mark.parametrize("wrapper", [swag.Wrapper(n_samples=3), vote.Wrapper(3)], ids=repr)
def test_only_the_first_prediction_is_followed_through_the_graph(wrapper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept weights are no parameters, and frozen ones are in no graph: another look would show no more."""
    wrapped = wrapper(net())
    fit(wrapped, (normal(40, 3), normal(40, 2, seed=1)), epochs=8, progress=False)
    wrapped = copy.deepcopy(wrapped.requires_grad_(False))
    followed: list[Any] = []
    follow = Reach._follow
    monkeypatch.setattr(Reach, "_follow", lambda *args: followed.append(args) or follow(*args))
    with torch.no_grad():
        for _ in range(3):
            wrapped(normal(5, 3), return_risk=True)
    assert len(followed) == 1


def test_fit_collects_late_epochs_at_a_constant_rate() -> None:
    x = torch.linspace(-2, 2, 64)[:, None]
    wrapped = compose(swag.Wrapper(n_samples=8, start=0.5, rate=0.2), sculpt.Wrapper(), neo.Wrapper())(
        nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    )
    history = fit(wrapped, (x, torch.sin(2 * x)), epochs=12, lr=0.02, progress=False)
    method = wrapped._workbench.methods[0]
    assert int(method.flag(table_of(wrapped), "count")) == 6
    assert history.best_epoch == 12
    assert history.frame["lr"].tolist()[-5:] == pytest.approx([0.004] * 5)
    _, risk = wrapped(x, return_risk=True)
    assert (risk.epistemic > 0).all()


def test_training_again_starts_a_new_collection() -> None:
    x = torch.linspace(-2, 2, 64)[:, None]
    wrapped = swag.Wrapper(n_samples=4)(nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)))
    for _ in range(2):
        fit(wrapped, (x, x), epochs=8, progress=False)
        assert int(wrapped._workbench.methods[0].flag(table_of(wrapped), "count")) == 2


def test_a_fitted_model_survives_copies_files_and_pickles(tmp_path: Path) -> None:
    wrapped = swag.Wrapper(n_samples=3, rank=2)(net(norm=True))
    walked(wrapped, 3)
    wrapped.eval().fit(X)
    save(wrapped, tmp_path / "model.safetensors")
    other = swag.Wrapper(n_samples=3, rank=2)(net(norm=True)).eval()
    other.load_state_dict(wrapped.state_dict())
    copies = [copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped)), other]
    copies.append(load(tmp_path / "model.safetensors", net(norm=True)).eval())
    y, risk = wrapped(X, return_risk=True)
    for copied in copies:
        z, same = copied(X, return_risk=True)
        assert torch.equal(z, y)
        assert torch.equal(same, risk)
        assert swag.collect(copied) == 4


def test_weights_of_the_plain_model_make_what_was_collected_void() -> None:
    wrapped = swag.Wrapper(n_samples=3)(net())
    walked(wrapped, 3)
    wrapped.eval().fit(X)
    plain = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))
    wrapped.load_state_dict(plain.state_dict())
    torch.testing.assert_close(wrapped(X), plain(X))
    with pytest.raises(NotFittedError, match="collected 0 sets of weights"):
        wrapped(X, return_risk=True)


def test_training_mode_is_the_networks_own() -> None:
    wrapped = swag.Wrapper()(net()).train()
    plain = net()
    torch.testing.assert_close(wrapped(X), plain(X))
    loss = wrapped.loss(nn.functional.mse_loss, X, torch.zeros(40, 2))
    torch.testing.assert_close(loss, plain(X).square().mean())
    state = torch.get_rng_state()
    swag.collect(wrapped)
    swag.collect(wrapped)
    wrapped.fit(X)
    assert torch.equal(torch.get_rng_state(), state)


def test_classes_have_entropies() -> None:
    wrapped = compose(swag.Wrapper(n_samples=4, output="logits"), sample.Wrapper(2))(net())
    walked(wrapped, 3)
    y, risk = wrapped.eval().fit(X)(X, return_risk=True)
    torch.testing.assert_close(risk.total, risk.aleatoric + risk.epistemic)
    torch.testing.assert_close(y.exp().sum(-1), torch.ones(40))


def test_before_two_sets_of_weights_there_is_no_risk() -> None:
    wrapped = swag.Wrapper()(net()).eval()
    swag.collect(wrapped)
    with pytest.warns(WorkbenchWarning, match="collected 1 sets of weights"):
        wrapped.fit(X)
    with pytest.raises(NotFittedError, match=r"swag.collect\(wrapped\) after each late epoch"):
        wrapped(X, return_risk=True)


@pytest.mark.parametrize("other", [vote.Wrapper(2), laplace.Wrapper()])
def test_two_answers_to_one_question_are_refused(other: Any) -> None:
    for wrap in (
        lambda m: compose(swag.Wrapper(), other)(m),
        lambda m: other(swag.Wrapper()(m)),
        lambda m: swag.Wrapper()(other(m)),
    ):
        with pytest.raises(ValueError, match="both model the distribution of the weights"):
            wrap(net())


def test_bad_input_is_told() -> None:
    for settings, words in (
        ({"n_samples": 1}, "n_samples must be a whole number of at least 2, not 1"),
        ({"rank": 1.5}, "rank must be a whole number of at least 2, not 1.5"),
        ({"start": 1.0}, "start must be a share of the training"),
        ({"rate": 0}, "rate must be above 0"),
    ):
        with pytest.raises(ValueError, match=words):
            swag.Wrapper(**settings)
    with pytest.raises(ValueError, match=r"only 1 of 4 epochs are after start=0\.75"):
        fit(swag.Wrapper()(net()), (X, X[:, :2]), epochs=4, progress=False)
    with pytest.raises(ValueError, match="all weights of this model are frozen"):
        swag.Wrapper()(net().requires_grad_(False))
    with pytest.raises(TypeError, match=r"wrapped by swag.Wrapper, not Sequential"):
        swag.collect(net())


@pytest.mark.parametrize(
    ("wrapper", "collect"), [(swag.Wrapper(), swag.collect), (snapshot.Wrapper(2), snapshot.collect)]
)
def test_weights_that_are_not_finite_do_not_spoil_what_was_collected(wrapper: Any, collect: Any) -> None:
    wrapped = wrapper(net())
    collect(wrapped)
    before = copy.deepcopy(wrapped.state_dict())
    parameter = next(wrapped.parameters())
    good = parameter.detach().clone()
    with torch.no_grad():
        parameter[0] = torch.nan
    with pytest.raises(ValueError, match=r"0.weight.* has NaN or infinite numbers, .* those collected before stay"):
        collect(wrapped)
    with torch.no_grad():
        parameter.copy_(good)
    after = wrapped.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items() if isinstance(value, Tensor))


class Positions(nn.Module):
    """Adds positions, in a buffer that no file holds."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3, 2)
        self.register_buffer("positions", torch.arange(3.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.positions)


@pytest.mark.parametrize("wrapper", [swag.Wrapper(n_samples=3), snapshot.Wrapper(3)], ids=repr)
def test_files_of_earlier_versions_hold_sets_of_caches(wrapper: Any) -> None:
    wrapped = wrapper(Positions())
    fit(wrapped, (normal(40, 3), normal(40, 2, seed=1)), epochs=8, progress=False)
    method = wrapped._workbench.methods[0]
    state = wrapped.state_dict() | {f"positions@{method.name}": torch.arange(3.0).expand(method.size, 3).clone()}
    other = wrapper(Positions()).eval()
    other.load_state_dict(state)
    x = normal(5, 3, seed=2)
    torch.testing.assert_close(other(x), wrapped.eval()(x))
