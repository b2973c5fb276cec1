"""Trainings in threads equal those of the main thread, whatever is drawn elsewhere meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.default_suite import one_in
from helpers.threads import in_thread, seeded, state
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from workbench import compose, fit, sample, sculpt, vote
from workbench.training import Progress
from workbench.training import checkpoint as checkpoint_module


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.last(h + 0.1 * torch.randn(h.shape) if self.training else h)


class Sequence(nn.Module):
    def __init__(self, attention: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(1, 4), nn.Linear(4, 1)
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True) if attention else None
        self.lstm = None if attention else nn.LSTM(4, 4, 2, dropout=0.4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x[..., None])
        h = self.lstm(h)[0] if self.lstm is not None else self.attention(h, h, h, need_weights=False)[0]
        return self.head(h[:, -1])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 2, generator=generator)
    return x, x.sum(1, keepdim=True) + 0.1 * torch.randn(60, 1, generator=generator)


def loader() -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(*rows()), batch_size=16, shuffle=True)


TRAININGS: dict[str, tuple[Callable[[], Any], Callable[[], nn.Module], dict[str, Any]]] = {
    "plain": (compose, mlp, {}),
    "loader": (compose, mlp, {"data": loader, "validation": 0, "batch_size": None}),
    "vote": (lambda: vote.Wrapper(3), mlp, {}),
    "vote by vmap": (lambda: vote.Wrapper(3, strategy="vmap"), mlp, {}),
    "vote by replay": (lambda: vote.Wrapper(3, strategy="replay"), mlp, {}),
    "sample": (lambda: sample.Wrapper(2), mlp, {}),
    "vote of sculpt": (lambda: compose(vote.Wrapper(2), sculpt.Wrapper()), mlp, {}),
    "folds": (lambda: compose(vote.Wrapper(5), sculpt.Wrapper()), mlp, {"folds": 5}),
    "LSTM": (compose, lambda: Sequence(attention=False), {}),
    "attention": (lambda: vote.Wrapper(2), lambda: Sequence(attention=True), {}),
    "randn in forward": (lambda: vote.Wrapper(2), Noisy, {}),
}


def train(name: str, model: nn.Module, callback: Any = None) -> dict[str, Tensor]:
    wrapper, _, options = TRAININGS[name]
    wrapped = wrapper()(seeded(model))
    options = {"data": rows, "epochs": 3, "batch_size": 8, "progress": False, "callback": callback, **options}
    fit(wrapped, options.pop("data")(), **options)
    return {key: value for key, value in wrapped.state_dict().items() if isinstance(value, Tensor)}


@pytest.mark.parametrize("name", one_in(4, TRAININGS))
def test_a_training_in_a_thread_is_that_of_the_main_thread_whatever_cells_draw_meanwhile(name: str) -> None:
    with torch.random.fork_rng(devices=[]):
        models = [TRAININGS[name][1]() for _ in range(3)]
        torch.manual_seed(1)
        expected = train(name, models[0])
        torch.manual_seed(1)
        quiet = in_thread(lambda: train(name, models[1]))
        assert state() == torch.Generator().manual_seed(1).get_state().numpy().tobytes()

        torch.manual_seed(1)
        started, drew, ended, trained = threading.Event(), threading.Event(), threading.Event(), []

        def look(progress: Progress) -> None:
            started.set()
            drew.wait()

        def noisy() -> None:
            try:
                trained.append(train(name, models[2], look))
            finally:
                started.set()
                ended.set()

        # wrapping draws its seed when it begins, so that cells draw from here on
        thread = threading.Thread(target=noisy)
        thread.start()
        started.wait()
        drawn = []
        while not ended.is_set():
            drawn.append(torch.rand(3))
            drew.set()
            time.sleep(0.001)
        thread.join()
    generator = torch.Generator().manual_seed(1)
    assert drawn
    assert all(torch.equal(value, torch.rand(3, generator=generator)) for value in drawn)
    assert expected.keys() == quiet.keys() == trained[0].keys()
    for key, value in expected.items():
        assert torch.equal(quiet[key], value), key
        assert torch.equal(trained[0][key], value), key


@pytest.mark.parametrize("folds", [None, 2])
def test_a_thread_goes_on_where_another_one_was_stopped(folds: int | None, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(checkpoint_module, "WRITE_INTERVAL", 0.0)
    first = vote.Wrapper(2)(seeded(mlp()))
    start = {key: value.clone() for key, value in first.state_dict().items() if isinstance(value, Tensor)}

    def go_on(file: str | None, callback: Any = None) -> list[Tensor]:
        wrapped = vote.Wrapper(2)(seeded(mlp()))
        wrapped.load_state_dict(start, strict=False)
        path = None if file is None else tmp_path / file
        options = {"epochs": 6, "batch_size": 8, "progress": False, "folds": folds}
        fit(wrapped, rows(), checkpoint=path, callback=callback, **options)
        return list(wrapped.parameters())

    whole = go_on(None)
    in_thread(lambda: go_on("state", lambda p: p.epoch_ended and p.epoch == 3))
    for one, other in zip(in_thread(lambda: go_on("state")), whole, strict=True):
        assert torch.equal(one, other)


def test_wrapping_in_a_thread_is_wrapping_and_moves_no_state() -> None:
    with torch.random.fork_rng(devices=[]):
        model = seeded(mlp())
        before = state()
        here = vote.Wrapper(3)(model).state_dict()
        there = in_thread(lambda: vote.Wrapper(3)(model).state_dict())
        assert state() == before
    for key, value in here.items():
        assert not isinstance(value, Tensor) or torch.equal(there[key], value)
