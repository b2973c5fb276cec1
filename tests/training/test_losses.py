"""Losses that arrive late, as on a GPU: the decisions are the same, without waiting for work just begun."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import compose, fit
from workbench.core.batches.rows import Batch
from workbench.training import running_loss as module
from workbench.training.running_loss import RunningLoss


class Copy:
    """A number that is not there before it is waited for."""

    def __init__(self, loss: Tensor, number: int, waited: list[int]) -> None:
        self.loss, self.number, self.waited = loss.clone(), number, waited
        self.there = torch.full_like(loss, -77.0)

    def synchronize(self) -> None:
        self.waited.append(self.number)
        self.there.copy_(self.loss)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the losses that were waited for."""
    sent: list[Copy] = []
    waited: list[int] = []

    def send(loss: Tensor) -> Any:
        sent.append(Copy(loss, len(sent), waited))
        return sent[-1].there, sent[-1]

    monkeypatch.setattr(module, "send", send)
    return waited


def batch(n: int) -> Batch:
    return Batch(torch.arange(n), torch.zeros(n, 2), torch.zeros(n, 1))


def test_a_loss_is_waited_for_when_the_next_is_on_its_way(late: list[int]) -> None:
    running_loss = RunningLoss(lambda *_: "")
    values = [torch.tensor(value) for value in (1.0, 2.0, 6.0)]
    for number, (value, rows) in enumerate(zip(values, (4, 4, 2), strict=True)):
        assert running_loss.add(value, "", batch(rows)) is not value  # detached
        assert late == list(range(number))
    assert running_loss.mean() == pytest.approx((4 * 1 + 4 * 2 + 2 * 6) / 10)
    assert late == [0, 1, 2]


def test_on_the_cpu_at_once() -> None:
    running_loss = RunningLoss(lambda value, place, rows: f"{value} at {place} in {len(rows)}")
    assert running_loss.add(torch.tensor(2.5), "here", batch(3)) == 2.5
    with pytest.raises(FloatingPointError, match="inf at there in 2"):
        running_loss.add(torch.tensor(float("inf")), "there", batch(2))


def test_class_numbers_that_are_ignored_do_not_count() -> None:
    running_loss = RunningLoss(lambda *_: "")
    for loss, labels in ((2.0, [0, 1, 1, 0]), (8.0, [-100, 1, -100, -100]), (0.0, [-100, -100])):
        running_loss.add(torch.tensor(loss), "", Batch(None, torch.zeros(len(labels), 2), torch.tensor(labels)))
    assert running_loss.mean() == pytest.approx((4 * 2 + 1 * 8) / 5)


def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))


def rows() -> tuple[Tensor, Tensor]:
    x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
    return x, x.sum(1, keepdim=True)


def test_a_training_is_the_same(late: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def course() -> tuple[Any, dict[str, Tensor], list[float]]:
        wrapped, told = compose()(model()), []

        def callback(progress: Any) -> None:
            told.append(float(progress.loss))

        history = fit(wrapped, rows(), epochs=3, batch_size=8, progress=False, callback=callback)
        return history.frame[["loss", "validation_loss"]], wrapped.state_dict(), told

    later = course()
    assert late
    monkeypatch.undo()
    now = course()
    assert later[0].equals(now[0])
    assert later[2] == now[2]
    assert all(torch.equal(later[1][key], value) for key, value in now[1].items())


@pytest.mark.parametrize("step", [3, 8])  # of 8: the last of an epoch, too
def test_a_loss_that_is_not_finite_is_found_where_it_was(late: list[int], step: int) -> None:
    wrapped, calls = compose()(model()), []
    before = {key: value.clone() for key, value in wrapped.state_dict().items()}

    def criterion(y: Tensor, target: Tensor) -> Tensor:
        calls.append(wrapped.training)
        return (y - target).square().mean() * (float("nan") if sum(calls) == step else 1.0)

    with pytest.raises(FloatingPointError, match=f"nan at epoch 1, step {step} .* weights from before the training"):
        fit(
            wrapped,
            rows(),
            criterion=criterion,
            epochs=2,
            batch_size=8,
            validation=0,
            progress=False,
            standardize=False,
        )
    assert all(torch.equal(before[key], value) for key, value in wrapped.state_dict().items())
