"""Training steps on a simulated device: replayed ones equal eager ones, and none waits; started by `test_other_device.py`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from helpers import pretend_device
from helpers.device_models import mlp, quiet
from helpers.other_device import DEVICE, rows
from helpers.replayed_steps import replay_early
from helpers.traced_models import TRACED, TRACED_STEPS
from workbench import compose, fit, neo, sculpt, vote
from workbench.core.batches.rows import Batch, TensorRows
from workbench.distributions import LogitNormal
from workbench.engine.traced_graph import Graph
from workbench.errors import WorkbenchWarning
from workbench.methods import curvature
from workbench.training import traced_step
from workbench.training.batches import Batches
from workbench.training.running_loss import RunningLoss
from workbench.training.traced_step import TracedStep


def test_steps_of_voters_of_folds_do_not_wait() -> None:
    def waits(n: int) -> int:
        wrapped = compose(vote.Wrapper(4), sculpt.Wrapper(n_layers=1))(mlp())
        pretend_device.WAITS.clear()
        with quiet():
            fit(wrapped, rows(n), folds=2, epochs=3, batch_size=8, progress=False, device=DEVICE)
        return len(pretend_device.WAITS)

    assert waits(480) == waits(240)  # with fewer rows, learning rates are tried in fewer steps


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> list[TracedStep]:
    return replay_early(monkeypatch)


@pytest.mark.parametrize(
    ("name", "folds"),
    [
        *((name, None) for name in [*TRACED, *TRACED_STEPS] if "," not in name),
        *((name, 3) for name in ("mlp, many", "batch norm, loop", "vote x sculpt x neo")),
    ],
)
def test_replayed_steps_are_the_eager_ones_and_do_not_wait(
    name: str, folds: int | None, early: list[TracedStep], monkeypatch: pytest.MonkeyPatch
) -> None:
    build, wrapper = {**TRACED, **TRACED_STEPS}[name]
    waits: list[str] = []
    run = Graph.run

    def noted(self: Graph, *rows: torch.Tensor) -> list[torch.Tensor]:
        before = len(pretend_device.WAITS)
        results = run(self, *rows)
        waits.extend(pretend_device.WAITS[before:])
        return results

    monkeypatch.setattr(Graph, "run", noted)
    monkeypatch.setattr(curvature, "MAX_STEPS", 3)  # what laplace computes after the training is no step
    x = torch.randn(100, 3, generator=torch.Generator().manual_seed(1))
    states = []
    for strategy in (None, "eager"):
        torch.manual_seed(0)
        wrapped = wrapper(build())
        with quiet():
            fit(
                wrapped,
                (x, torch.sin(2 * x.sum(1, keepdim=True))),
                **{
                    "epochs": 6 if name in ("swag", "snapshot") else 3,
                    "batch_size": 16,
                    "progress": False,
                    "device": DEVICE,
                },
                strategy=strategy,
                folds=folds,
            )
        states.append(wrapped.state_dict())
    assert early[0].off == ""
    assert early[0].replays > 8
    assert not waits
    for key, value in states[0].items():
        assert not isinstance(value, torch.Tensor) or torch.equal(value.cpu(), states[1][key].cpu()), key


CLASSES: dict[str, Any] = {
    "vote": vote.Wrapper(3, output="logits"),
    "sculpt": sculpt.Wrapper(LogitNormal, n_layers=1),
    "sculpt, logits": sculpt.Wrapper(LogitNormal, n_layers=1, output="logits"),
    "sculpt, draws": sculpt.Wrapper(LogitNormal(n_samples=3), n_layers=1),
    "sculpt, pairs": sculpt.Wrapper(LogitNormal(pairwise=True), n_layers=1),
    "vote of sculpt": compose(vote.Wrapper(5, share=1, output="logits"), sculpt.Wrapper(LogitNormal, n_layers=1)),
}


@pytest.mark.parametrize(
    ("name", "ignored"),  # rows of class -100, which need output=
    [*((name, False) for name in CLASSES), *((name, True) for name in ("vote", "sculpt, logits", "vote of sculpt"))],
)
def test_replayed_steps_of_classes_are_the_eager_ones(name: str, ignored: bool, early: list[TracedStep]) -> None:
    x, y = rows(100, classes=True)
    if ignored:
        y[40:50] = -100
    states = []
    for strategy in (None, "eager"):
        torch.manual_seed(0)
        wrapped = CLASSES[name](mlp())
        with quiet():
            fit(wrapped, (x, y), epochs=3, batch_size=16, device=DEVICE, progress=False, strategy=strategy)
        states.append(wrapped.state_dict())
    assert early[0].off == ""
    assert early[0].replays > 8
    for key, value in states[0].items():
        assert not isinstance(value, torch.Tensor) or torch.equal(value.cpu(), states[1][key].cpu()), key


@pytest.mark.parametrize("name", ["vote", "neo"])
def test_twice_the_steps_do_not_wait_more_often(name: str) -> None:
    """Losses are read in groups."""

    def waits(n: int) -> int:
        wrapper: Any = {"vote": vote.Wrapper(5, output="logits"), "neo": neo.Wrapper(output="logits")}[name]
        wrapped = wrapper(mlp())
        pretend_device.WAITS.clear()
        with quiet():
            fit(wrapped, rows(n, classes=True), validation=0, epochs=1, batch_size=16, progress=False, device=DEVICE)
        return len(pretend_device.WAITS)

    waits(128)  # what is found out once
    assert waits(128) == waits(256)


@pytest.mark.parametrize("labels", [False, True])
def test_losses_are_read_in_groups(labels: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    losses, sizes = torch.rand(40, generator=generator), [4] * 30 + [3] * 10
    running_loss = RunningLoss(lambda value, place, batch: f"{value} at {place} in {len(batch)}")
    pretend_device.WAITS.clear()
    total = weight = 0.0
    for i, size in enumerate(sizes):
        y = torch.randint(2, (size,), generator=generator) * 101 - 100 if labels else torch.zeros(size, 2)
        share = size if not labels else int((y != -100).sum())
        total, weight = total + losses[i].item() * share, weight + share
        running_loss.add(
            losses[i].to(DEVICE, non_blocking=True), str(i), Batch(None, None, y.to(DEVICE, non_blocking=True))
        )
    assert running_loss.mean() == pytest.approx(total / weight)
    assert len(pretend_device.WAITS) == 3
    for i in range(3):
        loss = torch.tensor(float("inf") if i == 1 else 1.0, device=DEVICE)
        running_loss.add(loss, f"step {i}", Batch(None, None, torch.zeros(i + 1, 2, device=DEVICE)))
    with pytest.raises(FloatingPointError, match="inf at step 1 in 2"):
        running_loss.mean()


def test_rows_are_moved_once_if_there_is_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = rows(64)
    epochs = []
    for free in (8 * 64 * 7 * 8, 8 * 64 * 7 * 8 - 1):
        monkeypatch.setattr(pretend_device.MODULE, "mem_get_info", lambda device, free=free: (free, free))
        order = torch.Generator().manual_seed(0)
        batches = Batches(TensorRows(x, y), 8, torch.device(DEVICE, 0), torch.float64, order)
        list(batches)
        pretend_device.WAITS.clear()
        epochs.append([*batches])
        assert len(pretend_device.WAITS) == (1 if len(epochs) == 1 else 16)  # the order; or each batch
    for one, other in zip(*epochs, strict=True):
        for a, b in ((one.x, other.x), (one.y, other.y)):
            assert a.device.type == b.device.type == DEVICE
            assert a.dtype is torch.float64
            assert torch.equal(a.cpu(), b.cpu())


def test_a_difference_ends_replays_and_is_told(early: list[TracedStep], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = torch.nn.functional.gelu

    def change(progress: Any) -> None:
        if progress.step == 20:
            monkeypatch.setattr(torch.nn.functional, "gelu", lambda *args, **kwargs: 2 * layer(*args, **kwargs))

    wrapped = vote.Wrapper(3)(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)))
    with pytest.warns(WorkbenchWarning, match="changed what a training step computes"):
        fit(wrapped, rows(100), epochs=8, batch_size=16, progress=False, callback=change, device=DEVICE)
    assert "other numbers" in early[0].off


def test_too_little_memory_to_compare_steps(early: list[TracedStep], monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much(*args: Any) -> Any:
        raise torch.OutOfMemoryError("there is no more")

    monkeypatch.setattr(traced_step, "_close", too_much)
    start = vote.Wrapper(3)(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3)))
    states = []
    for strategy in (None, "eager"):
        wrapped = copy.deepcopy(start)
        fit(wrapped, rows(100), epochs=2, batch_size=16, progress=False, device=DEVICE, strategy=strategy)
        states.append(wrapped.state_dict())
    assert "too little memory" in early[0].off
    assert all(torch.equal(value.cpu(), states[1][key].cpu()) for key, value in states[0].items())
