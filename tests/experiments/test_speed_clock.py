"""The clock of the benchmark `speed`: seconds, memory and operations of known work."""

from __future__ import annotations

import gc
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import ROOT
from torch import Tensor, nn

from workbench.experiments.worker import load_file


@pytest.fixture(scope="module")
def clock() -> ModuleType:
    load_file(ROOT / "benchmarks" / "speed.py")  # which imports it
    return sys.modules["speed_clock"]


def test_time_is_proportional_to_work(clock: ModuleType) -> None:
    times = clock.timed({"one": lambda: sum(range(4000)), "four": lambda: sum(range(16000))}, "cpu")
    assert len(times["one"]) == len(times["four"]) >= 9
    ratio = clock.middle([b / a for a, b in zip(times["one"], times["four"], strict=True)])[0]
    assert 3 < ratio < 6


@pytest.mark.slow
def test_memory_is_the_most_that_is_alive_at_once(clock: ModuleType) -> None:
    x = torch.zeros(512, 512)  # 1 MiB
    assert clock.peak(lambda: torch.cat([(x + 1) + 1, x]), "cpu") == pytest.approx(3, abs=0.01)
    y = torch.ones(256, 256, requires_grad=True)  # 0.25 MiB

    def backward() -> None:
        y.exp().sin().sum().backward()
        y.grad = None

    assert clock.peak(backward, "cpu") == pytest.approx(0.75, abs=0.01)  # what exp gave, a gradient, and the next


@pytest.mark.slow
def test_memory_that_only_garbage_holds_is_not_counted_as_set_free(clock: ModuleType) -> None:
    held: list[Any] = [torch.zeros(512, 512)]
    held.append(held)
    del held

    def run() -> Tensor:
        gc.collect()
        return torch.zeros(256, 256)

    assert clock.peak(run, "cpu") == pytest.approx(0.25, abs=0.01)


def test_operations_are_those_of_the_formulas(clock: ModuleType) -> None:
    linear = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3))
    operations = clock.operations(linear, torch.zeros(4, 8), False)
    assert operations == {"": 2 * 4 * (8 * 5 + 5 * 3), "0": 2 * 4 * 8 * 5, "1": 2 * 4 * 5 * 3}
    step = clock.operations(linear, torch.zeros(4, 8), True)
    assert step[""] == 2 * 4 * (2 * 8 * 5 + 3 * 5 * 3)  # no gradient of the input
    lstm = clock.operations(nn.LSTM(6, 7, batch_first=True).eval(), torch.zeros(2, 3, 6), False)
    assert lstm[""] == 2 * 2 * 3 * 4 * 7 * (6 + 7)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()
    operations = clock.operations(layer, torch.zeros(2, 5, 8), False)
    assert operations[""] == 2 * 2 * 5 * (4 * 8 * 8 + 2 * 8 * 16) + 2 * 2 * 2 * 5 * 5 * 8


def test_rates_are_those_of_the_best_operation(clock: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([1.0, 1.0, 0.5, 1.0, 1.0])
    monkeypatch.setattr(clock, "timed", lambda passes, device: {key: [next(seconds)] for key in passes})
    assert clock.operations_a_second.__wrapped__("cpu", torch.float32) == 2 * 1024**3 / 0.5
    monkeypatch.setattr(clock, "timed", lambda passes, device: {"copy": [3.0, 2.0]})
    assert clock._bytes_a_second.__wrapped__("cpu", 1 << 20) == 2**20 / 2
