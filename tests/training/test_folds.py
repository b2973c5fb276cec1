"""Cross-fitting: no voter sees its own fold, the model follows the decisions, and training resumes where it stopped."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fold_models import classes, net, plane, quiet, wrapped
from torch import Tensor, nn
from torch.nn import functional as F

import workbench
from workbench import compose, fit, neo, sculpt, vote
from workbench.core.crossfit import committee_of
from workbench.distributions import Normal, StudentT
from workbench.errors import WorkbenchWarning
from workbench.testing.models import build, inputs
from workbench.testing.zoo import CASES
from workbench.training import checkpoint as checkpoint_module
from workbench.training.cross_fitting import CrossFit
from workbench.training.fold_layout import assign_folds
from workbench.training.stacked_adam import BETAS, EPSILON, StackedAdam

# ---- training --------------------------------------------------------------------------------------------------------


def test_no_voter_sees_its_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[dict[str, Tensor]] = []
    settle = CrossFit.settle
    monkeypatch.setattr(CrossFit, "settle", lambda self, *args: (kept.append(self.snapshots[-1]), settle(self, *args)))
    x, y = plane()
    fold = assign_folds(60, 3, None, 0)
    other = torch.where((fold == 1)[:, None], -y, y)
    for target in (y, other):
        quiet(wrapped(), (x, target), folds=fold, standardize=False)
    for name, value in kept[0].items():
        for voter in range(6):  # two for each fold
            assert torch.equal(value[voter], kept[1][name][voter]) == (voter // 2 == 1)


def test_each_voter_trains_as_it_would_alone() -> None:
    """StackedAdam on three rows against torch's AdamW on each of them, biases without weight decay."""
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(3, 4, 2, generator=generator), torch.randn(3, 4, generator=generator)
    lr, decay = torch.tensor([0.1, 0.01, 0.03], dtype=torch.float64), torch.tensor([0.0, 0.5, 0.1], dtype=torch.float64)
    stacked = [weight.clone().requires_grad_(), bias.clone().requires_grad_()]
    ours = StackedAdam(stacked, lr, decay, horizon=10, steps=100)
    alone = [(weight[k].clone().requires_grad_(), bias[k].clone().requires_grad_()) for k in range(3)]
    theirs = [
        torch.optim.AdamW(
            [{"params": [w], "weight_decay": float(decay[k])}, {"params": [b], "weight_decay": 0.0}],
            lr=float(lr[k]),
            betas=BETAS,
            eps=EPSILON,
        )
        for k, (w, b) in enumerate(alone)
    ]
    for step in range(20):
        x = torch.randn(5, 2, generator=generator)
        share = 1 / (1 + step)
        (torch.einsum("koi,ni->kno", stacked[0], x) + stacked[1][:, None]).square().sum().backward()
        ours.step(share)
        for k, (w, b) in enumerate(alone):
            theirs[k].zero_grad()
            for group in theirs[k].param_groups:
                group["lr"] = share * float(lr[k])
            F.linear(x, w, b).square().sum().backward()
            theirs[k].step()
    for k, (w, b) in enumerate(alone):
        torch.testing.assert_close(stacked[0][k], w, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(stacked[1][k], b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head", [True, False])
def test_vmap_trains_what_the_loop_trains(head: bool) -> None:
    x, y = plane()
    models = [wrapped(strategy=strategy, head=head) for strategy in ("loop", "vmap")]
    for model in models:
        quiet(model, (x, y), folds=3)
    assert head or "rows dealt, 6 vote: vmap, 1 pass" in str(models[1].explain())
    loop, vmap = (model(x, return_risk=True)[0] for model in models)
    torch.testing.assert_close(loop, vmap, atol=1e-3, rtol=1e-3)


def test_a_criterion_that_is_no_mean_is_asked_for_each_voter() -> None:
    x, y = plane()
    rows = []

    def largest(prediction: Tensor, target: Tensor) -> Tensor:
        if prediction.grad_fn is not None:  # of a model
            rows.append(len(target))
        return (prediction - target).abs().max()

    quiet(wrapped(head=False), (x, y), folds=3, criterion=largest, epochs=1)
    assert set(rows) == {8}
    assert len(rows) == 6 * (40 // 8)


@pytest.mark.parametrize("criterion", [None, F.cross_entropy])
def test_the_loss_of_an_epoch_is_the_mean_over_rows_with_a_class(criterion: Any) -> None:
    """Some batches of a voter have none; with F.cross_entropy all voters' rows make one batch."""
    x, y = classes()
    y = torch.where(torch.arange(60) < 12, y, -100)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = vote.Wrapper(6, output="logits")(net(3))
    folds = torch.arange(60) % 3
    options: dict[str, Any] = {"criterion": criterion, "lr": 1e-12, "weight_decay": 0.0, "standardize": False}
    [loss] = quiet(model, (x, y), folds=folds, epochs=1, **options).frame["loss"]
    losses = []
    for k, voter in enumerate(model.voters()):
        labelled = (folds != k // 2) & (y >= 0)
        losses.append(F.cross_entropy(voter(x[labelled]), y[labelled], reduction="none"))
    assert loss == pytest.approx(float(torch.cat(losses).mean().detach()), rel=1e-4)


# ---- what it gives ---------------------------------------------------------------------------------------------------


def test_out_of_fold_predictions_are_those_of_the_voters_that_have_not_seen_a_row() -> None:
    x, y = plane()
    model = wrapped(12)
    history = quiet(model, (x, y), folds=3, lr=(0.01, 0.03))
    said, weights = history.out_of_fold, history.out_of_fold.decisions.weights
    voters, fold = model.voters(), committee_of(model).fold
    expected = torch.zeros_like(y)
    for k in range(3):
        held = said.fold == k
        for v in (fold == k).nonzero()[:, 0].tolist():
            expected[held] += weights[v // 6] / 2 * voters[v](x[held]).detach()
    torch.testing.assert_close(said.prediction, expected, atol=1e-4, rtol=1e-4)
    assert said.risk.names() == ("aleatoric", "epistemic", "total")
    torch.testing.assert_close(said.risk.total**2, said.risk.aleatoric**2 + said.risk.epistemic**2)
    assert "out-of-fold nll" in repr(history)


@pytest.mark.slow
def test_the_model_is_the_weighted_mixture() -> None:
    x, y = plane()
    model = wrapped(12)
    quiet(model, (x, y), folds=3, lr=(0.01, 0.03), weight_decay=(0.0, 0.1))
    committee = committee_of(model)
    means = torch.stack([voter(x) for voter in model.voters()]).detach()
    weights = committee.weights[:, None, None].float()
    mean = (weights * means).sum(0)
    prediction, risk = model(x, return_risk=True)
    torch.testing.assert_close(prediction, mean)
    torch.testing.assert_close(risk.epistemic, (weights * (means - mean) ** 2).sum(0).sqrt(), atol=1e-4, rtol=1e-4)
    predictive = model.predictive(x)
    torch.testing.assert_close(predictive.mean, prediction)
    torch.testing.assert_close(predictive.stddev, risk.total, atol=1e-4, rtol=1e-4)
    each = StudentT(float(committee.df)) if committee.df.isfinite() else Normal()
    terms = (
        each.log_prob(y.expand_as(predictive.loc), predictive.loc, predictive.risk)
        + predictive.weights.log()[:, None, None]
    )
    torch.testing.assert_close(predictive.log_prob(y), terms.logsumexp(0))
    assert (predictive.icdf(0.1) < predictive.icdf(0.9)).all()
    torch.testing.assert_close(predictive.cdf(predictive.icdf(0.3)), torch.full_like(y, 0.3), atol=1e-3, rtol=0)


@pytest.mark.slow
def test_predictions_and_noise_come_from_different_times() -> None:
    """The trunk is untied where they do: the risk head then has all layers of its own."""
    x, y = plane(noise=2.0)
    model = wrapped(6, hidden=24)
    history = quiet(model, (x, y), folds=3, epochs=120, lr=0.05, standardize=True)
    decisions = history.out_of_fold.decisions
    assert decisions.mean_at != decisions.scale_at
    assert "0.weight@sculpt@vote" in model.state_dict()
    again = compose(vote.Wrapper(6), sculpt.Wrapper(n_layers=2))(net(hidden=24)).eval()
    again.load_state_dict(model.state_dict())
    for one, two in zip(again(x, return_risk=True)[1].total, model(x, return_risk=True)[1].total, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.slow
def test_folds_of_classes_are_stratified_and_judged_by_probabilities() -> None:
    x, y = classes()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = vote.Wrapper(6, output="probs")(nn.Sequential(net(3), nn.Softmax(-1)))
    history = quiet(model, (x, y), folds=3, epochs=30)
    said = history.out_of_fold
    torch.testing.assert_close(said.prediction.sum(1), torch.ones(60))
    log_prob = said.prediction.gather(1, y[:, None]).log()[:, 0]
    torch.testing.assert_close(said.decisions.log_prob[:, 0].float(), log_prob, atol=1e-3, rtol=1e-3)
    assert all(((said.fold == k) & (y == c)).sum() >= (y == c).sum() // 3 for k in range(3) for c in range(3))
    torch.testing.assert_close(model(x).sum(1), torch.ones(60))


@pytest.mark.slow
def test_without_risk_heads_the_noise_is_found_all_the_same() -> None:
    x, y = plane(200)
    model = wrapped(head=False)
    quiet(model, (x, y), folds=3, epochs=60)
    score = model.predictive(x).log_prob(y).mean()
    best = Normal.log_prob(y, y * 0 + 5 + 3 * (x @ torch.tensor([[1.0], [-2.0]])), torch.full_like(y, 0.3)).mean()
    assert best - 0.6 < score < best + 0.2


@pytest.mark.slow
def test_each_output_has_the_noise_of_its_own_head() -> None:
    """Each with the noise that its own head says; without heads one number would stand for all, so there is none."""
    x, y = plane(200)
    both = torch.cat([y, 100 * y], 1)
    model = wrapped(6, outputs=2)
    quiet(model, (x, both), folds=3, epochs=40)
    noise = model(x, return_risk=True)[1].aleatoric.mean(0)
    assert 50 < noise[1] / noise[0] < 200
    assert model.predictive(x).log_prob(both).isfinite().all()
    plain = wrapped(6, head=False, outputs=2)
    assert quiet(plain, (x, both), folds=3).out_of_fold.risk.names() == ("epistemic", "total")
    with pytest.raises(ValueError, match="one noise for all outputs"):
        plain.predictive(x)


def test_copies_files_and_units(tmp_path: Path) -> None:
    x, y = plane()
    model = wrapped(6)
    quiet(model, (x, 1000 * y), folds=3)
    plain = net()
    path = tmp_path / "model.safetensors"
    workbench.save(model, path)
    expected = model(x, return_risk=True)[1].total
    assert 100 < expected.mean() < 100_000
    for other in (copy.deepcopy(model), workbench.load(path, plain)):
        torch.testing.assert_close(other.eval()(x, return_risk=True)[1].total, expected)
        assert other.predictive(x).log_prob(1000 * y).shape == (60, 1)


def test_it_repeats_and_leaves_the_global_random_state_alone() -> None:
    x, y = plane()
    before = torch.get_rng_state()
    states = []
    for _ in range(2):
        model = wrapped(6)
        quiet(model, (x, y), folds=3, seed=3)
        states.append(model.state_dict())
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.parametrize(
    "family",
    [
        sculpt.NormalInverseGamma(),
        pytest.param(sculpt.Quantiles((0.16, 0.5, 0.84)), marks=pytest.mark.slow),
        pytest.param(sculpt.Laplace(), marks=pytest.mark.slow),
    ],
)
def test_other_risk_heads(family: Any) -> None:
    x, y = plane()
    model = compose(vote.Wrapper(3), sculpt.Wrapper(family, n_layers=1))(net())
    quiet(model, (x, y), folds=3, epochs=20)
    predictive, risk = model.predictive(x), model(x, return_risk=True)[1]
    torch.testing.assert_close(predictive.mean, model(x))
    # evidence says an epistemic risk of its own beside the voters'
    assert (predictive.stddev <= risk.total * 1.001).all()
    assert predictive.log_prob(y).isfinite().all()


def test_a_density_is_fitted_at_the_end() -> None:
    x, y = plane()
    model = compose(vote.Wrapper(3), neo.Wrapper())(net())
    quiet(model, (x, y), folds=3)
    risk = model(torch.cat([x, 30 + x]), return_risk=True)[1]
    assert risk.vacuitic[:60].max() < risk.vacuitic[60:].min()


def test_a_failure_leaves_the_model_as_it_was() -> None:
    x, y = plane()
    model = wrapped(6)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(FloatingPointError, match="the weights from before the training"):
        quiet(model, (x, y), folds=3, lr=1e30)
    assert model.scaling is None  # else the same weights would predict other numbers
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())


def test_another_training_forgets_what_was_decided() -> None:
    x, y = plane()
    model = wrapped(6)
    quiet(model, (x, y), folds=3)
    fit(model, (x, y), epochs=1, progress=False)
    assert committee_of(model) is None


# ---- going on --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "WRITE_INTERVAL", 0.0)
    x, y = plane()
    whole = wrapped(6)
    quiet(whole, (x, y), folds=3, epochs=10)
    calls = 0

    def stopped(prediction: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 33:
            raise KeyboardInterrupt
        return F.mse_loss(prediction, target)

    halves = {"epochs": 10, "folds": 3, "checkpoint": tmp_path / "state.pt"}
    broken, alone = wrapped(6, head=False), wrapped(6, head=False)
    stopped.__qualname__ = "mse"
    with pytest.warns(WorkbenchWarning, match="interrupted after"):
        history = quiet(broken, (x, y), criterion=stopped, standardize=True, **halves)
    assert history.interrupted
    assert history.out_of_fold is not None
    calls = 1000
    resumed = wrapped(6, head=False)
    quiet(resumed, (x, y), criterion=stopped, standardize=True, **halves)
    quiet(alone, (x, y), criterion=stopped, standardize=True, epochs=10, folds=3)
    assert all(torch.equal(value, alone.state_dict()[name]) for name, value in resumed.state_dict().items())


# ---- rows and models of other kinds ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [torch.as_tensor, torch.Tensor.numpy, torch.Tensor.tolist])
def test_folds_of_groups(form: Any) -> None:
    x, y = plane()
    groups = torch.arange(60) // 20 * 7 + 3
    history = quiet(wrapped(3), (x, y), folds=form(groups), epochs=1)
    assert history.out_of_fold.fold.tolist() == (torch.arange(60) // 20).tolist()


@pytest.mark.parametrize(
    ("folds", "says"),
    [
        # -1 is a missing group for pandas.factorize, and a row that is never tested on for PredefinedSplit of scikit-learn
        ([-1] * 20 + [0] * 20 + [1] * 20, "folds: -1 in 20 of 60 rows, which elsewhere marks rows without a fold"),
        ([0] * 59 + [1], "folds: one fold has 59 of 60 rows, so that a voter would be trained on one row"),
    ],
)
def test_folds_that_are_none_are_refused(folds: list[int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        quiet(wrapped(6), plane(), folds=folds, epochs=1)


@pytest.mark.parametrize(
    "name", ["cnn_bn", "dropout", "item_loop", "lstm", "moe_topk", "tied", "transformer", "two_inputs"]
)
def test_awkward_models_predict_out_of_fold_what_their_voters_do(name: str) -> None:
    """What was said out of fold is what plain voters say, for models that draw, loop, keep statistics or take several inputs."""
    case = CASES[name]
    args, _ = inputs(case)
    with torch.no_grad():
        y = build(case)(*args)
    x = tuple(torch.cat([part, part.flip(0)]) for part in args)
    target = torch.randn(2 * len(y), *y.shape[1:], generator=torch.Generator().manual_seed(0))
    model = vote.Wrapper(2)(build(case))
    said = quiet(model, (x if len(x) > 1 else x[0], target), folds=2, epochs=2, batch_size=3).out_of_fold
    assert said is not None
    for fold, voter in enumerate(model.voters()):
        held = said.fold == fold
        with torch.no_grad():
            expected = voter.eval()(*(part[held] for part in x))
        torch.testing.assert_close(said.prediction[held], expected, atol=1e-4, rtol=1e-3)
