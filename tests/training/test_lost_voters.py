"""A voter that diverges in a training gives a warning and gets the weights of its own best epoch; the others are unchanged."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import compose, fit, sample, sculpt, vote
from workbench.errors import WorkbenchWarning
from workbench.training import Progress
from workbench.training import checkpoint as checkpoint_module
from workbench.training.lost_voters import VoterWatch, lost_voters, mean_per_voter

VOTERS, EPOCHS = 4, 20


def rows() -> tuple[Tensor, Tensor]:
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    return x, x.sum(1, keepdim=True) + 0.1 * torch.randn(200, 1, generator=torch.Generator().manual_seed(1))


def made(*parts: Any, **options: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return compose(vote.Wrapper(VOTERS, **options), *parts)(
            nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        )


def hurt(progress: Progress) -> None:
    """Let voter 2 say the same of all rows after the first epoch."""
    if progress.epoch > 1 or progress.epoch_ended:
        weights = dict(progress.wrapped.named_parameters())
        with torch.no_grad():
            weights["2.weight@vote"][2], weights["2.bias@vote"][2] = 0.0, 1.0


def trained(model: Any, **options: Any) -> Any:
    x, y = rows()
    split = {"validation": (x[150:], y[150:])}
    return fit(model, (x[:150], y[:150]), epochs=EPOCHS, batch_size=32, lr=0.01, progress=False, **split, **options)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [(), (sculpt.Wrapper(),)])
def test_a_lost_voter_is_told_and_gets_the_weights_of_its_own_best_epoch(parts: tuple[Any, ...]) -> None:
    states: list[dict[str, Tensor]] = []

    def callback(progress: Progress) -> None:
        if progress.epoch_ended:
            states.append({name: value.clone() for name, value in progress.wrapped.state_dict().items()})
        hurt(progress)

    model = made(*parts)
    with pytest.warns(WorkbenchWarning, match=r"1 of 4 voters diverged .* voter 2 .* weights of epoch 1 ") as told:
        history = trained(model, callback=callback)
    assert Path(told[0].filename).name == Path(__file__).name
    state = model.state_dict()
    for name, value in state.items():
        for k in range(VOTERS if "@vote" in name else 0):
            epoch = 1 if k == 2 else history.best_epoch
            assert torch.equal(value[k], states[epoch - 1][name][k]), (name, k)
    assert history.best_epoch == EPOCHS


def test_the_losses_of_voters_are_those_of_plain_models() -> None:
    x, y = rows()
    model = made(sample.Wrapper(3))
    watch = VoterWatch.of(model)
    model.eval()
    with torch.no_grad(), watch.recording(torch.tensor(50.0)):
        loss = model.loss(nn.functional.mse_loss, x[:50], y[:50])
    with torch.no_grad(), watch.recording(torch.tensor(150.0)):
        model.loss(nn.functional.mse_loss, x[50:], y[50:])
    watch.update(0)
    plain = made()
    watched = VoterWatch.of(plain.eval())
    with torch.no_grad(), watched.recording(torch.tensor(200.0)):
        whole = plain.loss(nn.functional.mse_loss, x, y)
    watched.update(0)
    expected = [(one(x) - y).square().mean().item() for one in plain.voters()]
    assert watched.latest.tolist() == pytest.approx(expected)
    assert float(whole) == pytest.approx(sum(expected) / VOTERS)
    assert watch.latest.shape == (VOTERS,)
    assert math.isfinite(loss)
    assert mean_per_voter({"sample": 2, "vote": 3}, torch.arange(6.0)).tolist() == [1.5, 2.5, 3.5]


@pytest.mark.slow
def test_trainings_without_a_lost_voter_are_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    watched, alone = made(sculpt.Wrapper()), made(sculpt.Wrapper())
    history = trained(watched)
    monkeypatch.setattr(VoterWatch, "of", lambda wrapped: None)
    other = trained(alone)
    assert [record[:4] for record in history.records] == [record[:4] for record in other.records]
    assert all(torch.equal(value, alone.state_dict()[name]) for name, value in watched.state_dict().items())


@pytest.mark.slow
def test_noise_alone_loses_nobody() -> None:
    x, _ = rows()
    for seed in range(5):
        y = torch.randn(200, 1, generator=torch.Generator().manual_seed(seed))
        fit(made(sculpt.Wrapper()), (x, y), epochs=20, seed=seed, progress=False)


@pytest.mark.slow
def test_it_is_brought_back_after_a_break(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "WRITE_INTERVAL", 0.0)

    def interrupt(progress: Progress) -> None:
        hurt(progress)
        if progress.epoch == 5:
            raise KeyboardInterrupt

    with pytest.warns(WorkbenchWarning):
        trained(made(), callback=interrupt, checkpoint=tmp_path / "state")
    resumed, whole = made(), made()
    for model, options in ((resumed, {"checkpoint": tmp_path / "state"}), (whole, {})):
        with pytest.warns(WorkbenchWarning, match="voter 2 had"):
            trained(model, callback=hurt, **options)
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in resumed.state_dict().items())


@pytest.mark.parametrize("options", [{"share": 1}, {"share": "rank1"}, {"use_bias": False}])
def test_voters_that_share_what_is_trained_are_left_together(options: dict[str, Any]) -> None:
    assert VoterWatch.of(made(**options)) is None


@pytest.mark.parametrize(
    ("start", "least", "chosen", "lost"),
    [
        # hours of ETTh1, trained anew
        ([1.41] * 5, [1.20, 1.20, 1.41, 1.22, 1.20], [1.21, 1.20, 3.59, 1.22, 1.21], [2]),
        # those of ETTh2: most have gained nothing
        ([3.0] * 5, [2.9, 2.9, 2.57, 2.9, 2.9], [2.99, 3.81, 2.57, 24.3, 3.01], [3]),
        # slow ones, as far from the others as these are from each other
        ([2.57] * 5, [1.86, 1.68, 1.71, 2.34, 2.38], [1.86, 1.68, 1.71, 2.34, 2.38], []),
        # one that was good, and one that has never been
        ([1.0] * 4, [0.01, 0.012, 0.011, 0.2], [0.01, 0.012, 0.011, 0.9], [3]),
        ([1.0] * 4, [0.01, 0.012, 0.011, 0.9], [0.01, 0.012, 0.011, 0.9], []),
        # noise alone
        ([1.0] * 4, [1.0] * 4, [1.01, 1.012, 1.02, 1.1], []),
        ([1.06, 0.64, 0.82], [1.0, 0.64, 0.8], [1.0, 0.7, 0.8], []),
        ([math.nan] * 3, [math.nan] * 3, [math.nan] * 3, []),
    ],
)
def test_the_rule_on_losses_that_were_seen(
    start: list[float], least: list[float], chosen: list[float], lost: list[int]
) -> None:
    losses = (torch.tensor(values, dtype=torch.float64) for values in (start, chosen, least))
    assert lost_voters(*losses).nonzero()[:, 0].tolist() == lost


@pytest.mark.slow
@pytest.mark.parametrize("output", [None, "logits"])
def test_a_voter_that_is_lost_in_a_cross_fitted_training_is_told(output: str | None) -> None:
    x, y = rows()
    target = y if output is None else (y[:, 0] > 0).long()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1 if output is None else 2))
        model = vote.Wrapper(VOTERS, output=output)(net)

    def hurt(progress: Progress) -> None:
        weights = dict(progress.wrapped.named_parameters())
        if progress.epoch > EPOCHS // 2:
            with torch.no_grad():
                weights["2.weight@vote"][2], weights["2.bias@vote"][2] = (
                    0.0,
                    9 * torch.eye(2)[0, : weights["2.bias@vote"].shape[1]],
                )

    options: dict[str, Any] = {"folds": 4, "epochs": EPOCHS, "batch_size": 32, "progress": False}
    with pytest.warns(WorkbenchWarning, match=r"1 of 4 voters diverged .* voter 2 had") as told:
        fit(model, (x, target), callback=hurt, **options)
    assert Path(told[0].filename).name == Path(__file__).name
    fit(model, (x, target), **options)  # without a warning


def test_the_losses_of_voters_count_rows_with_a_class_alone() -> None:
    """Of unequal batches, one of which has no class at all."""
    torch.manual_seed(0)
    model: Any = vote.Wrapper(3, output="logits")(nn.Linear(3, 2))
    x, y = torch.randn(30, 3), torch.randint(2, (30,))
    y[:13] = -100
    best: list[Tensor] = []
    original = VoterWatch.update

    def update(self: VoterWatch, epoch: int) -> None:
        original(self, epoch)
        with torch.no_grad():
            losses = [nn.functional.cross_entropy(voter.eval()(x), y) for voter in self.wrapped.voters()]
        best.append(self.latest - torch.stack(losses).double())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VoterWatch, "update", update)
        fit(model, (x[13:], y[13:]), epochs=2, validation=(x, y), batch_size=6, standardize=False, progress=False)
    assert len(best) == 3
    assert torch.stack(best).abs().max() < 1e-6
