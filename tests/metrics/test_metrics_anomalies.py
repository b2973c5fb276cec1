"""The score of the Numenta Anomaly Benchmark: compared with a plain loop and published scores of a detector."""

from __future__ import annotations

import csv
import io
import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench import data
from workbench.data.files import read
from workbench.metrics import nab_score

WEIGHTS = {"standard": (1.0, 0.11, 1.0), "low_fp": (1.0, 0.22, 1.0), "low_fn": (1.0, 0.11, 2.0)}


def sigmoid(y: float) -> float:
    return -1.0 if y >= 3 else 2 / (1 + math.exp(5 * y)) - 1


def plain_score(risks: list[Tensor], windows: list[list[tuple[int, int]]], profile: str, threshold: float) -> float:
    """Lavin & Ahmad 2015, section II, one value after the other."""
    tp, fp, fn = WEIGHTS[profile]
    total, count = 0.0, 0
    for risk, of in zip(risks, windows, strict=True):
        start = int(0.15 * min(len(risk), 5000))
        of = [window for window in of if window[1] >= start]
        count += len(of)
        first_alarms: dict[tuple[int, int], int] = {}
        for at, value in enumerate(risk.tolist()):
            if at < start or value < threshold:
                continue
            inside = next((window for window in of if window[0] <= at <= window[1]), None)
            if inside is not None:
                first_alarms.setdefault(inside, at)
                continue
            before = [window for window in of if window[1] < at]
            total += fp * sigmoid((at - before[-1][1]) / (before[-1][1] - before[-1][0])) if before else -fp
        for first, last in of:
            if (first, last) in first_alarms:
                y = -(last - first_alarms[first, last] + 1) / (last - first + 1)
                total += tp * sigmoid(y) / sigmoid(-1.0)
            else:
                total -= fn
    return 100 * (total + fn * count) / (count * (tp + fn))


def corpus() -> tuple[list[Tensor], list[list[tuple[int, int]]]]:
    g = torch.Generator().manual_seed(0)
    risks = [torch.rand(n, generator=g).mul(20).round().div(20) for n in (120, 90, 60)]
    return risks, [[(30, 39), (42, 60)], [(5, 20), (80, 85)], []]


@pytest.mark.parametrize("profile", WEIGHTS)
def test_scores_are_those_of_a_plain_loop(profile: Any) -> None:
    risks, windows = corpus()
    for threshold in (0.0, 0.5, 0.95, 1.0, 2.0):
        expected = plain_score(risks, windows, profile, threshold)
        assert float(nab_score(risks, windows, profile, threshold).score) == pytest.approx(expected, abs=1e-9)
    best = nab_score(risks, windows, profile)
    levels = [*torch.cat(risks).unique().tolist(), math.inf]
    scores = [plain_score(risks, windows, profile, level) for level in levels]
    assert float(best.score) == pytest.approx(max(scores), abs=1e-9)
    assert plain_score(risks, windows, profile, float(best.threshold)) == pytest.approx(max(scores), abs=1e-9)


def test_silence_is_worth_nothing_and_the_first_value_of_each_window_all() -> None:
    risk = torch.zeros(100)
    windows = [[(30, 39), (60, 79)]]
    assert float(nab_score([risk], windows, threshold=1.0).score) == 0
    risk[[30, 60]] = 1.0
    assert float(nab_score([risk], windows).score) == pytest.approx(100)
    risk[10] = 2.0  # among the first 15 %, where nothing counts
    assert float(nab_score([risk], windows).score) == pytest.approx(100)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (([torch.zeros(9)], []), ValueError, "one entry per series, found 1 and 0"),
        (([torch.zeros(9, 1)], [[]]), ValueError, r"must have shape \[time\], found \(9, 1\)"),
        (([torch.zeros(9)], [[]]), ValueError, "no series has an anomaly window"),
        (([torch.zeros(9)], [[(2, 5), (4, 7)]]), ValueError, r"\(4, 7\) must start after position 5"),
        (([torch.zeros(9)], [[(2, 9)]]), ValueError, "end by 8"),
        (([torch.zeros(9)], [[(2.5, 5)]]), TypeError, "whole numbers"),
        (([torch.full((9,), torch.nan)], [[(2, 5)]]), ValueError, "NaN"),
        (([torch.zeros(9)], [[(2, 5)]], "lenient"), ValueError, "profile must be one of"),
        (([torch.zeros(9)], [[(2, 5)]], "standard", math.nan), ValueError, "threshold must be a number"),
    ],
)
def test_what_cannot_be_scored_is_refused(arguments: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        nab_score(*arguments)


def windowed_gaussian(values: list[float], size: int = 6400, step: int = 100) -> Tensor:
    """One minus the tail probability under mean and deviation of a window that moves on by steps: the benchmark's own plain detector."""
    window: list[float] = []
    waiting: list[float] = []
    sums, risks, mean, deviation = [0.0, 0.0], [], 0.0, 1.0
    for value in values:
        risks.append(1 - 0.5 * math.erfc(abs(value - mean) / deviation / math.sqrt(2)) if window else 0.0)
        if len(window) < size:
            window.append(value)
            sums = [sums[0] + value, sums[1] + value * value]
        else:
            waiting.append(value)
            if len(waiting) < step:
                continue
            window, waiting = window[step:] + waiting, []
            sums = [math.fsum(window), math.fsum(x * x for x in window)]
        mean = sums[0] / len(window)
        deviation = math.sqrt(max(sums[1] / len(window) - mean * mean, 0.0)) or 1e-6
    return torch.tensor(risks, dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.skipif("nab" not in data.names(available=True), reason="nab is not on this machine")
def test_a_published_detector_has_its_published_score() -> None:
    """39.6, 20.9 and 47.4 of 100 (numenta/NAB), whose search for the threshold stops short of the best one."""
    (content,) = read("nab")
    whole = json.loads(content)
    risks, windows = [], []
    for name, text in whole["series"].items():
        times, values = zip(*list(csv.reader(io.StringIO(text)))[1:], strict=True)
        risks.append(windowed_gaussian([float(value) for value in values]))
        of = [
            [at for at, time in enumerate(times) if start.partition(".")[0] <= time <= end.partition(".")[0]]
            for start, end in whole["windows"][f"{name}.csv"]
        ]
        windows.append([(positions[0], positions[-1]) for positions in of])
    assert sum(map(len, windows)) == 116
    for profile, published in (("standard", 39.6), ("low_fp", 20.9), ("low_fn", 47.4)):
        assert published - 0.5 < float(nab_score(risks, windows, profile).score) < published + 3.5
