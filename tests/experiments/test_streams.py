"""Risks of streams: compared with plain loops, and independent of later values."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from scipy.stats import norm
from torch import Tensor

from workbench.experiments import anomaly_likelihood, first_alarms, novelty


def walk(n: int = 700) -> Tensor:
    """Values with ties, drifts and jumps."""
    g = torch.Generator().manual_seed(0)
    values = torch.randn(n, generator=g, dtype=torch.float64).mul(3).round() + torch.linspace(
        0, 5, n, dtype=torch.float64
    )
    values[n // 2 :: 97] += 40
    return values


def plain_novelty(x: list[float], w: int) -> list[float]:
    risks = []
    for t in range(len(x)):
        apart = [
            math.dist(x[t - w + 1 : t + 1], x[s - w + 1 : s + 1]) for s in range(w - 1, t - w + 1) if t - w + 1 >= 0
        ]
        span = max(x[: t + 1]) - min(x[: t + 1])
        risks.append(math.sqrt(t / w) * min(apart) / span if apart and span else 0.0)
    return risks


@pytest.mark.parametrize("window", [1, 3, 8])
def test_novelty_is_the_distance_to_the_nearest_past(window: int) -> None:
    x = walk()  # more than two blocks of rows
    torch.testing.assert_close(
        novelty(x, window), torch.tensor(plain_novelty(x.tolist(), window), dtype=torch.float64), rtol=1e-9, atol=1e-9
    )


def test_novelty_does_not_depend_on_units_and_of_a_constant_series_is_none() -> None:
    x = walk()
    torch.testing.assert_close(novelty(1e6 + 1e-3 * x), novelty(x), rtol=1e-4, atol=1e-4)
    assert not novelty(torch.full((50,), 45.0)).any()
    assert novelty([1.0, 2.0, 3.0], window=2).tolist() == [0, 0, 0]
    big = torch.tensor([2**53 - 1, 2**53 - 3, 2**53 - 3, 2**53 - 2])  # float32 does not tell these apart
    assert novelty(big).tolist() == [0.0, 1.0, 0.0, math.sqrt(3) / 2]


@pytest.mark.parametrize("spike", [0.0, 1e8])  # with a spike, until it is among the `long` earlier risks no more
@pytest.mark.parametrize(("short", "long"), [(1, None), (10, None), (5, 60)])
def test_anomaly_likelihood_is_that_of_a_plain_loop(short: int, long: int | None, spike: float) -> None:
    risk, start = 100 + walk().abs(), 30
    risk[10] += spike
    likelihood = anomaly_likelihood(risk, short, long, start)
    assert not likelihood[:start].any()
    for t in range(start, len(risk)):
        past = risk[:t] if long is None else risk[max(0, t - long) : t]
        latest = risk[max(0, t + 1 - short) : t + 1].mean()
        z = float((latest - past.mean()) / past.std(correction=0))
        expected = 0.0 if z <= 0 else -norm.logsf(z) / math.log(10)
        assert float(likelihood[t]) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_the_first_risk_after_none_is_infinitely_unlikely_and_silence_is_not() -> None:
    risk = torch.zeros(300)
    assert not anomaly_likelihood(risk).any()
    risk[200] = 1e-6
    likelihood = anomaly_likelihood(risk, short=1)
    assert likelihood[200] == math.inf
    assert not likelihood[:200].any()
    assert not likelihood[201:].any()
    assert not anomaly_likelihood(torch.full((300,), 0.1), short=7).any()  # what always is as high, is usual


@pytest.mark.parametrize("rest", [1, 7, 1000])
def test_first_alarms_follow_no_higher_one(rest: int) -> None:
    risk = walk()
    expected = [
        value if all(value > before for before in risk[max(0, t - rest) : t]) else -math.inf
        for t, value in enumerate(risk)
    ]
    assert torch.equal(first_alarms(risk, rest), torch.stack([torch.as_tensor(value) for value in expected]).double())


@pytest.mark.parametrize(
    "risk",
    [
        novelty,
        partial(novelty, window=5),
        anomaly_likelihood,
        partial(anomaly_likelihood, short=3, long=50),
        partial(first_alarms, rest=20),
    ],
)
@pytest.mark.parametrize("until", [30, 255, 512])
def test_the_future_changes_no_risk(risk: Callable[..., Tensor], until: int) -> None:
    x = walk()
    other = torch.cat([x[:until], 1e6 * x[until:].flip(0)])
    assert torch.equal(risk(x)[:until], risk(other)[:until])
    torch.testing.assert_close(risk(x[:until]), risk(x)[:until])


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: novelty(torch.zeros(9, 1)), ValueError, r"series must have shape \[time\], found \[9, 1\]"),
        (lambda: novelty([0.0, math.nan]), ValueError, "NaN or infinite"),
        (lambda: novelty([0.0, 1.0], 0), ValueError, "window must be at least 1; found 0"),
        (lambda: novelty([0.0, 1.0], 1.5), TypeError, "window must be a whole number"),  # type: ignore[arg-type]
        (lambda: novelty(["a"]), TypeError, "series must be"),
        (lambda: anomaly_likelihood(torch.zeros(9, 1)), ValueError, r"risk must have shape \[time\]"),
        (lambda: anomaly_likelihood([0.0, math.inf]), ValueError, "NaN or infinite"),
        (lambda: anomaly_likelihood([0.0], short=0), ValueError, "short must be at least 1"),
        (lambda: anomaly_likelihood([0.0], long=1), ValueError, "long must be at least 2"),
        (lambda: anomaly_likelihood([0.0], start=1), ValueError, "start must be at least 2"),
        (lambda: first_alarms([0.0, math.nan], 2), ValueError, "NaN"),
        (lambda: first_alarms([0.0], 0), ValueError, "rest must be at least 1"),
    ],
)
def test_what_has_no_risk_is_refused(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()
