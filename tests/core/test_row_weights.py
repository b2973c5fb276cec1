"""Voters that start alike diverge through row weights of their own, or a warning says why they cannot."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.models import mlp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import workbench
from workbench import WorkbenchWarning, compose, fit, sculpt, vote
from workbench.core.batches.row_weights import row_weights


def rows(n: int = 48) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 3)
    return x, x[:, :1].square() + 0.3 * torch.randn(n, 1)


@torch.no_grad()
def epistemic(wrapped: Any) -> Tensor:
    risk = wrapped.eval()(3 * torch.randn(20, 3), return_risk=True)[1]
    return risk if isinstance(risk, Tensor) else risk.epistemic


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_weights_are_exponential_and_independent() -> None:
    weights = row_weights(torch.randn(20_000, 2), torch.randn(20_000), 4)
    assert torch.allclose(weights.mean(1), torch.ones(4), atol=0.04)  # five standard errors
    for q in (0.5, 1.0, 2.0):
        assert torch.allclose((weights > q).float().mean(1), torch.full((4,), -q).exp(), atol=0.02)
    assert float((torch.corrcoef(weights) - torch.eye(4)).abs().max()) < 0.04


def test_a_row_has_its_weight_in_every_batch() -> None:
    x, y = rows()
    weights = row_weights(x, y, 3)
    order = torch.randperm(len(x))[:10]
    assert torch.equal(row_weights(x[order], y[order], 3), weights[:, order])
    assert torch.equal(row_weights({"x": x[order]}, y[order], 3), weights[:, order])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.complex64, torch.uint8, torch.bool])
def test_equal_rows_count_by_themselves(dtype: torch.dtype) -> None:
    weights = row_weights(torch.ones(5000, 2, 3, dtype=dtype), torch.zeros(5000, dtype=torch.int64), 2)
    assert weights.unique().numel() > 9000
    assert torch.allclose(weights.mean(1), torch.ones(2), atol=0.1)


def test_gradients_are_those_of_weighed_losses_of_plain_copies() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    wrapped: Any = vote.Wrapper(3, finetune=True)(model)
    x, y = rows(12)
    loss = wrapped.loss(nn.MSELoss(), x, y)
    loss.backward()
    assert torch.allclose(loss, F.mse_loss(copy.deepcopy(model)(x), y))  # what is reported is the plain loss
    grads = dict(wrapped.named_parameters())
    for v, weights in enumerate(row_weights(x, y, 3)):
        plain = copy.deepcopy(model)
        ((plain(x) - y).square()[:, 0] * weights).mean().backward()
        for name, p in plain.named_parameters():
            assert p.grad is not None
            assert torch.allclose(3 * grads[f"{name}@vote"].grad[v], p.grad, atol=1e-6)


def test_voters_that_differ_are_not_weighed() -> None:
    wrapped: Any = vote.Wrapper(3)(mlp())
    x, y = rows(12)
    wrapped.loss(nn.MSELoss(), x, y).backward()
    grads = dict(wrapped.named_parameters())
    for v, plain in enumerate(wrapped.voters()):
        F.mse_loss(plain(x), y).backward()
        for name, p in plain.named_parameters():
            assert torch.allclose(3 * grads[f"{name}@vote"].grad[v], p.grad, atol=1e-6)
    assert "alike" not in str(bytes(wrapped.state_dict()["settings@workbench"].tolist()))


# ---- loops -----------------------------------------------------------------------------------------------------------


def own_loop(wrapped: Any, size: int = 16, accumulate: int = 1) -> None:
    x, y = rows()
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.01)
    for step, numbers in enumerate(torch.randperm(len(x)).split(size)):
        wrapped.loss(nn.MSELoss(), x[numbers], y[numbers]).backward()
        if step % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()


def newton(wrapped: Any) -> None:
    x, y = rows()
    optimizer = torch.optim.LBFGS(wrapped.parameters(), lr=0.1, max_iter=5)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = wrapped.loss(nn.MSELoss(), x, y)
        loss.backward()
        return loss

    optimizer.step(closure)


def whole_batch(wrapped: Any) -> None:
    fit(wrapped, rows(), epochs=3, batch_size=64, validation=0, progress=False)


def loader() -> Any:
    return DataLoader(TensorDataset(*rows()), batch_size=16, shuffle=True)


LOOPS: dict[str, Callable[[Any], object]] = {
    "fit": lambda w: fit(w, rows(), epochs=2, progress=False),
    "whole batch": whole_batch,
    "dataset": lambda w: fit(w, torch.utils.data.ConcatDataset([TensorDataset(*rows())]), epochs=2, progress=False),
    "loader": lambda w: fit(w, loader(), epochs=2, validation=0, progress=False),
    "loss": own_loop,
    "one row": lambda w: own_loop(w, size=1),
    "accumulated": lambda w: own_loop(w, accumulate=3),
    "lbfgs": newton,
}
ALIKE: dict[str, Callable[[], Any]] = {
    "all": lambda: vote.Wrapper(4, finetune=True),
    "rank1": lambda: vote.Wrapper(4, finetune=True, share="rank1"),
    "last": lambda: vote.Wrapper(4, finetune=True, share=1),
    "together": lambda: vote.Wrapper(4, finetune=True, independent=False),
    "sculpt": lambda: compose(vote.Wrapper(4, finetune=True), sculpt.Wrapper(n_layers=1)),
    "rank1 without spread": lambda: vote.Wrapper(4, share="rank1", alpha=0),
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", ALIKE)
def test_voters_that_start_alike_come_to_differ(loop: str, name: str) -> None:
    wrapped = ALIKE[name]()(mlp())
    LOOPS[loop](wrapped)
    assert float(epistemic(wrapped).min()) > 1e-5


def test_voters_of_cross_fitting_differ() -> None:
    wrapped: Any = vote.Wrapper(4, finetune=True)(mlp())
    fit(wrapped, rows(), epochs=3, folds=2, progress=False)
    assert float(epistemic(wrapped).min()) > 1e-5


def test_voters_that_were_loaded_from_a_plain_model_come_to_differ() -> None:
    wrapped: Any = vote.Wrapper(3)(mlp())
    own_loop(wrapped)
    wrapped.load_state_dict(mlp().state_dict())
    assert float(epistemic(wrapped).max()) < 1e-6
    own_loop(wrapped.train())
    assert float(epistemic(wrapped).min()) > 1e-5


def test_a_state_remembers_that_voters_were_alike(tmp_path: Any) -> None:
    wrapped: Any = vote.Wrapper(3, finetune=True)(mlp())
    own_loop(wrapped)
    workbench.save(wrapped, tmp_path / "model.safetensors")
    loaded = workbench.load(tmp_path / "model.safetensors", mlp()).train()
    x, y = rows(8)
    for model in (wrapped, loaded, copy.deepcopy(wrapped)):
        model.zero_grad()
        model.loss(nn.MSELoss(), x, y).backward()
    for ours, theirs in zip(wrapped.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_losses_that_a_model_computes_weigh_whole_batches() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(self.fc(x), y)

    wrapped: Any = vote.Wrapper(3, finetune=True)(WithLoss())
    x, y = rows(8)
    with pytest.warns(WorkbenchWarning, match="no row for each target"):
        wrapped.loss(lambda loss, _: loss, (x, y), y).backward()
    plain = wrapped.voters()[0]
    plain(x, y).backward()
    for v, weight in enumerate(row_weights((x, y), y, 3).mean(1)):
        assert torch.allclose(3 * wrapped.get_parameter("fc.weight@vote").grad[v], weight * plain.fc.weight.grad[0])


# ---- the mean of voters that are alike -------------------------------------------------------------------------------


def step(wrapped: Any, x: Tensor, **kwargs: Any) -> None:
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    out = wrapped(x, **kwargs)
    F.mse_loss(out[0] if isinstance(out, tuple) else out, x[:, :1]).backward()
    optimizer.step()


@pytest.mark.parametrize("share", [None, "rank1", 1])
@pytest.mark.parametrize(
    ("settings", "kwargs"), [({"independent": False}, {}), ({}, {"tile_and_reduce": True}), ({}, {"return_risk": True})]
)
def test_the_loss_of_the_mean_is_told_once(settings: dict[str, Any], kwargs: dict[str, Any], share: Any) -> None:
    wrapped: Any = vote.Wrapper(3, finetune=True, share=share, **settings)(mlp())
    with pytest.warns(WorkbenchWarning, match=r"stay alike.*wrapped\.loss") as caught:
        step(wrapped, torch.randn(8, 3), **kwargs)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(wrapped, torch.randn(8, 3), **kwargs)


def test_batches_of_one_row_are_told() -> None:
    wrapped: Any = vote.Wrapper(3, finetune=True)(mlp())
    with pytest.warns(WorkbenchWarning) as caught:
        step(wrapped, torch.randn(1, 3))
    assert ["stay alike" in str(w.message) for w in caught] == [False, True]


def test_nothing_is_told_where_voters_differ() -> None:
    x = torch.randn(8, 3)
    step(vote.Wrapper(3, finetune=True)(mlp()), x)  # dealt
    step(vote.Wrapper(3, independent=False)(mlp()), x)
    step(vote.Wrapper(3, finetune=True, independent=False)(nn.Sequential(mlp(4), nn.Dropout(0.5), nn.Linear(4, 1))), x)
    own_loop(vote.Wrapper(3, finetune=True, independent=False)(mlp()))
