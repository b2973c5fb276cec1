"""Targets of class scores other than class numbers: soft labels, shares of a yes, and -100 for ignored ones."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench import compose, fit, laplace, sculpt, vote
from workbench.core.outputs.class_scores import Logits, Probs
from workbench.distributions import LogitNormal
from workbench.methods.laplace import _negative_log_likelihood

ROWS = 12


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def some_ignored(*shape: int) -> Tensor:
    labels = (3 * random(*shape)).long()
    return labels.where(random(*shape, seed=2) > 0.3, -100)


class Maps(nn.Module):
    """Scores [n, 3, 5] of [n, 4, 5]."""

    def __init__(self, probs: bool = False) -> None:
        super().__init__()
        self.layer, self.probs = nn.Conv1d(4, 3, 1), probs

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).softmax(1) if self.probs else self.layer(x)


def dense(outputs: int) -> nn.Module:
    return nn.Linear(4, outputs)


TARGETS: dict[str, tuple[Any, Any, Tensor]] = {
    "soft rows": ("logits", lambda: dense(3), random(ROWS, 3).softmax(-1)),
    "rows left out": ("logits", lambda: dense(3), some_ignored(ROWS)),
    "soft maps": (Logits(dim=1), Maps, random(ROWS, 3, 5).softmax(1)),
    "pixels left out": (Logits(dim=1), Maps, some_ignored(ROWS, 5)),
    "soft maps of probabilities": (Probs(dim=1), lambda: Maps(probs=True), random(ROWS, 3, 5).softmax(1)),
    "soft labels": ("binary", lambda: dense(3), random(ROWS, 3)),
    "a soft yes": ("binary", lambda: dense(1), random(ROWS)),
}


def inputs(model: nn.Module) -> Tensor:
    return random(ROWS, 4, 5, seed=3) if isinstance(model, Maps) else random(ROWS, 4, seed=3)


def by_hand(output: Any, scores: Tensor, noise: Tensor, target: Tensor) -> Tensor:
    """Cross entropy by torch, of logits under normal noise in the mean-field form (without noise: of the scores)."""
    if isinstance(output, Probs):
        scores = scores.log()
    scores = scores / (1 + torch.pi / 8 * noise**2).sqrt()
    if output == "binary":
        return F.binary_cross_entropy_with_logits(scores, target.reshape(scores.shape))
    return F.cross_entropy(scores, target)


@pytest.fixture
def model(name: str) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return TARGETS[name][1]()


@pytest.mark.parametrize("name", TARGETS)
def test_the_likelihood_of_noisy_scores(name: str, model: Any) -> None:
    output, _, target = TARGETS[name]
    wrapped = sculpt.Wrapper(output=output)(model)
    state = wrapped.state_dict()
    x = inputs(model)
    # what gives the noise is a copy of the layer with tensors of its own
    raw = torch.func.functional_call(
        model.layer if isinstance(model, Maps) else model,
        {key: state[f"{'layer.' * isinstance(model, Maps)}{key}@sculpt"] for key in ("weight", "bias")},
        (x,),
    )
    if isinstance(output, Probs):
        raw = raw.softmax(1)
    scores, noise = model(x), F.softplus(raw)
    expected = by_hand(output, scores, 0 * noise, target) + by_hand(output, scores, noise, target)
    plain = fit_criterion(output)
    torch.testing.assert_close(wrapped.loss(plain, x, target), expected)


def fit_criterion(output: Any) -> Any:
    return lambda scores, target: by_hand(output, scores, torch.zeros(()), target)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("wrapper", [vote.Wrapper(2), sculpt.Wrapper()], ids=["vote", "sculpt"])
def test_fit_starts_from_the_loss_by_hand(name: str, wrapper: Any, model: Any) -> None:
    output, _, target = TARGETS[name]
    x = inputs(model)
    wrapped = wrapper.with_options(output=output)(model)
    losses = [by_hand(output, voter(x), torch.zeros(()), target) for voter in wrapped.voters()]
    expected = torch.stack(losses).mean()
    if isinstance(wrapper, sculpt.Wrapper):
        expected = wrapped.loss(fit_criterion(output), x, target)
    history = fit(wrapped, (x, target), epochs=1, batch_size=ROWS, validation=0, standardize=False, progress=False)
    assert history.records[0][1] == pytest.approx(float(expected.detach()), rel=1e-5)


@pytest.mark.parametrize("name", ["rows left out", "pixels left out", "soft labels", "a soft yes"])
def test_cross_fitting_takes_them(name: str, model: Any) -> None:
    output, _, target = TARGETS[name]
    wrapped = vote.Wrapper(2, output=output)(model)
    history = fit(wrapped, (inputs(model), target), epochs=2, folds=2, standardize=False, progress=False)
    assert all(torch.isfinite(torch.tensor(record[1])) for record in history.records)


@pytest.mark.parametrize(
    ("output", "folds"), [(None, None), ("logits", None), ("probs", None), ("logits", 2), ("probs", 2)]
)
def test_batches_without_a_class_add_nothing(output: Any, folds: int | None) -> None:
    x, y = random(96, 4, seed=3), torch.full((96,), -100)
    y[::24] = torch.arange(4) % 3
    net = nn.Sequential(dense(3), nn.Softmax(-1)) if output == "probs" else dense(3)
    wrapped = vote.Wrapper(2, output=output)(net)
    held_out = {"folds": folds} if folds else {"validation": (x[:40], y[:40])}
    said = pytest.warns(UserWarning, match="no output=") if output is None else contextlib.nullcontext()
    with said:
        history = fit(wrapped, (x, y), epochs=2, batch_size=2, lr=1e-9, standardize=False, progress=False, **held_out)
    known = y >= 0
    logs = [
        voter(x[known]).log() if output == "probs" else voter(x[known]).log_softmax(-1) for voter in wrapped.voters()
    ]
    losses = torch.stack([F.nll_loss(log, y[known], reduction="none") for log in logs])
    if folds is None:
        assert history.records[0][1] == pytest.approx(float(losses.mean().detach()), rel=1e-4)
        assert history.records[0][2] == pytest.approx(float(losses[:, :2].mean().detach()), rel=1e-4)
    else:
        fold = history.out_of_fold.fold[known]
        out_of_fold = losses[fold, torch.arange(4)]  # one voter has not seen each fold
        assert f"out-of-fold nll {float(out_of_fold.mean().detach()):.4g})" in repr(history)


@pytest.mark.parametrize(
    "wrapper", [sculpt.Wrapper(), compose(vote.Wrapper(2), sculpt.Wrapper())], ids=["sculpt", "both"]
)
@pytest.mark.parametrize("tokens", [False, True])
def test_the_likelihood_of_a_batch_without_a_class_is_one(wrapper: Any, tokens: bool) -> None:
    output = Logits(dim=-1) if tokens else "logits"
    wrapped = wrapper.with_options(output=output)(dense(3)).train()
    x, y = random(4, 5, 4, seed=3)[:, slice(None) if tokens else 0], torch.full((4, 5) if tokens else (4,), -100)
    loss = wrapped.loss(None, x, y)
    loss.backward()
    assert loss.item() == 0
    assert not any(p.grad.any() for p in wrapped.parameters() if p.grad is not None)
    history = fit(
        wrapped,
        (x.repeat(3, *[1] * (x.dim() - 1)), torch.cat([y, y, y * 0])),
        epochs=2,
        batch_size=2,
        progress=False,
        validation=0,
    )
    assert all(record[1] > 0 for record in history.records)


def test_rows_of_which_none_has_a_class_are_refused() -> None:
    x, y = random(40, 4, seed=3), torch.arange(40) % 3
    with pytest.raises(ValueError, match="validation: no row has a class"):
        fit(vote.Wrapper(2, output="logits")(dense(3)), (x, y), validation=(x, torch.full((40,), -100)), progress=False)


@pytest.mark.parametrize("name", ["soft rows", "rows left out", "soft labels", "a soft yes"])
def test_laplace_is_tuned_by_the_same_loss(name: str, model: Any) -> None:
    output, _, target = TARGETS[name]
    x = inputs(model)
    wrapped = laplace.Wrapper(output=output)(model).eval().fit([(x, target)])
    scores = wrapped(x)
    kept = 1.0 if target.is_floating_point() else float((target != -100).sum())
    size = scores.numel() if output == "binary" else kept if kept > 1 else ROWS
    expected = size * float(by_hand(output, scores, torch.zeros(()), target).detach())
    assert _negative_log_likelihood(wrapped, (x,), {}, target) == pytest.approx(expected, rel=1e-5)
    laplace.tune(wrapped, [(x, target)])


def test_soft_labels_that_are_none_are_refused() -> None:
    scores, risk = torch.zeros(2, 3), torch.ones(2, 3)
    with pytest.raises(ValueError, match="probabilities that sum to one"):
        LogitNormal.loss_function(torch.ones(2, 3), scores, risk)
    with pytest.raises(TypeError, match="integer class labels"):
        LogitNormal.loss_function(torch.ones(2), scores, risk)
    with pytest.raises(ValueError, match=r"binary targets must lie in \[0, 1\], not from 0 to 7"):
        sculpt.Wrapper(output="binary")(dense(3)).loss(None, torch.zeros(2, 4), torch.tensor([[0.0, 1, 7], [0, 0, 0]]))
