"""Online conformal intervals: compared with plain loops over one series and one step, and their coverage where split conformal loses it."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.calibration import OnlineConformal
from workbench.calibration.online import RATES

METHODS: list[Any] = ["aci", "dtaci", "pid"]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def quantile(scores: list[float], alpha: float) -> float:
    rank = math.ceil(round((len(scores) + 1) * (1 - alpha), 9))
    return math.inf if rank > len(scores) else -math.inf if rank < 1 else sorted(scores)[rank - 1]


def plain_aci(scores: list[float], delay: int, miss: float = 0.1, rate: float = 0.005) -> list[float]:
    """The bounds of one step: a score is known `delay` times after its forecast."""
    alpha, bounds = miss, []
    for time in range(len(scores)):
        if (old := time - delay) >= delay:  # before that nothing was known when it was forecast
            alpha += rate * (miss - (scores[old] > bounds[old]))
        bounds.append(quantile(scores[: max(0, time - delay + 1)], alpha))
    return bounds


def plain_dtaci(scores: list[float], miss: float = 0.1, length: int = 500) -> list[float]:
    k = len(RATES)
    alphas, weights, bounds, seen = [miss] * k, [1.0] * k, [], []
    eta = math.sqrt(3 / length) * math.sqrt(
        (math.log(k * length) + 2) / ((1 - miss) ** 2 * miss**3 + miss**2 * (1 - miss) ** 3)
    )
    for score in scores:
        bounds.append(quantile(seen, sum(w * a for w, a in zip(weights, alphas, strict=True)) / sum(weights)))
        if seen:
            beta = 1 - sum(s < score for s in seen) / (len(seen) + 1)
            missed = [score > quantile(seen, alpha) for alpha in alphas]
            losses = [miss * (beta - a) - min(0.0, beta - a) for a in alphas]
            weights = [w * math.exp(-eta * loss) for w, loss in zip(weights, losses, strict=True)]
            weights = [(1 - 1 / (2 * length)) * w + sum(weights) / (2 * length * k) for w in weights]
            alphas = [a + rate * (miss - m) for a, rate, m in zip(alphas, RATES, missed, strict=True)]
        seen.append(score)
    return bounds


def plain_pid(scores: list[float], miss: float = 0.1, rate: float = 0.1) -> list[float]:
    tracked, excess, bounds = 0.0, 0.0, []
    for time, score in enumerate(scores):
        if not time:
            bounds.append(math.inf)
            tracked = score
            continue
        largest = max(scores[:time])
        angle = excess * math.log(time + 1) / (5 * (time + 1))
        integral = math.inf if angle >= math.pi / 2 else -math.inf if angle <= -math.pi / 2 else math.tan(angle)
        bounds.append(tracked + largest * integral)
        gone = (score > bounds[-1]) - miss
        tracked += rate * largest * gone
        excess += gone
    return bounds


def drifting(n: int = 600) -> Tensor:
    """Errors of which the spread triples in the middle."""
    return draw(n) * torch.where(torch.arange(n) < n // 2, 1.0, 3.0)


@pytest.mark.parametrize(
    ("method", "plainly"), [("aci", lambda s: plain_aci(s, 1)), ("dtaci", plain_dtaci), ("pid", plain_pid)]
)
def test_bounds_are_those_of_a_plain_loop(method: Any, plainly: Any) -> None:
    y = drifting(200)
    lower, upper = OnlineConformal(window=200, method=method).replay(torch.zeros(200, 1), y[:, None].float())
    expected = torch.tensor(plainly(y.float().abs().tolist()), dtype=torch.float64)
    assert torch.allclose(upper[:, 0].double(), expected, rtol=1e-5)
    assert torch.equal(lower, -upper)
    assert upper[60:].isfinite().any()


def test_each_step_learns_when_its_truth_comes() -> None:
    y = draw(150)
    truth = y.unfold(0, 3, 1)  # [148, 3]: step h of the forecast of time t is y[t + h]
    _, upper = OnlineConformal(window=200, method="aci").replay(torch.zeros(148, 3), truth)
    for step in range(3):
        expected = plain_aci(truth[:, step].abs().tolist(), delay=step + 1)
        assert torch.allclose(upper[:, step].double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_series_and_steps_do_not_touch_each_other(method: Any) -> None:
    y = torch.stack([drifting(200), draw(200, seed=1)], 1)
    truth = y.unfold(0, 2, 1).movedim(-1, 1)  # [199, 2 steps, 2 series]
    prediction, risk = 0.1 * draw(199, 2, 2, seed=2), draw(199, 2, 2, seed=3).exp()
    together = OnlineConformal(0.8, method, window=200).replay(prediction, truth, risk)
    for series in range(2):
        part = (..., series)
        alone = OnlineConformal(0.8, method, window=200).replay(prediction[part], truth[part], risk[part])
        assert all(torch.equal(one[part], other) for one, other in zip(together, alone, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_scores_in_units_of_the_risk(method: Any) -> None:
    y, risk = drifting(300)[:, None], drifting(300).abs()[:, None] + 0.1
    lower, upper = OnlineConformal(window=200, method=method).replay(torch.zeros(300, 1), y, risk)
    _, scaled = OnlineConformal(window=200, method=method).replay(torch.zeros(300, 1), y / risk)
    assert torch.allclose(upper, (scaled * risk).to(upper))
    assert torch.equal(lower, -upper)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_coverage_holds_over_time_where_that_of_split_conformal_is_lost(method: Any) -> None:
    y = drifting(1600)
    split = float((y[800:].abs() <= y[:800].abs().quantile(0.9)).double().mean())
    assert split < 0.5
    lower, upper = OnlineConformal(method=method, window=300, rate=0.02 if method == "aci" else None).replay(
        torch.zeros(1600, 1), y[:, None]
    )
    inside = (lower[:, 0] <= y) & (y <= upper[:, 0])
    assert abs(float(inside[900:].double().mean()) - 0.9) < 0.02


@pytest.mark.parametrize("method", METHODS)
def test_an_interval_knows_nothing_of_what_comes_later(method: Any) -> None:
    y = drifting(120)[:, None]
    _, whole = OnlineConformal(0.8, method, window=200).replay(torch.zeros(120, 1), y)
    _, part = OnlineConformal(0.8, method, window=200).replay(torch.zeros(60, 1), y[:60])
    assert torch.equal(whole[:60], part)


@pytest.mark.parametrize("method", METHODS)
def test_it_goes_on_where_it_was_also_from_a_file(method: Any) -> None:
    y = drifting(120)[:, None]
    _, whole = OnlineConformal(0.8, method, window=200).replay(torch.zeros(120, 1), y)
    online = OnlineConformal(0.8, method, window=200)
    online.replay(torch.zeros(60, 1), y[:60])
    _, rest = pickle.loads(pickle.dumps(online)).replay(torch.zeros(60, 1), y[60:])
    assert torch.equal(whole[60:], rest)


@pytest.mark.parametrize("method", METHODS)
def test_missing_truth_changes_nothing(method: Any) -> None:
    y = drifting(100)[:, None]
    gaps = torch.full((200, 1), math.nan, dtype=torch.float64)
    gaps[::2] = y
    _, expected = OnlineConformal(0.8, method, window=200).replay(torch.zeros(100, 1), y)
    _, upper = OnlineConformal(0.8, method, window=200).replay(torch.zeros(200, 1), gaps)
    assert torch.equal(upper[::2], expected)


def test_forecasts_several_steps_apart() -> None:
    y = draw(90)
    truth = y.reshape(30, 3)
    _, upper = OnlineConformal(0.8, "aci", window=200).replay(torch.zeros(30, 3), truth, every=3)
    for step in range(3):
        expected = plain_aci(truth[:, step].abs().tolist(), delay=1, miss=0.2)
        assert torch.allclose(upper[:, step].double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5)
    with pytest.raises(ValueError, match="is every=1 right"):
        OnlineConformal().replay(torch.zeros(30, 3), truth)


@pytest.mark.parametrize("method", ["aci", "dtaci", "pid"])
def test_forecasts_further_apart_than_their_horizon(method: Any) -> None:
    """Six hours of each day: nothing is observed in the other hours, and every step learns from its truth once."""
    truth = draw(60, 3)
    apart = OnlineConformal(0.8, method, window=900).replay(torch.zeros(60, 3), truth, every=12)
    expected = OnlineConformal(0.8, method, window=900).replay(torch.zeros(60, 3), truth, every=3)
    assert torch.equal(torch.stack(apart), torch.stack(expected))


def test_what_is_wrong_is_refused_and_changes_nothing() -> None:
    online = OnlineConformal(0.8, window=60)
    online.replay(torch.zeros(50, 2), draw(51).unfold(0, 2, 1))
    before = pickle.dumps(online)
    for prediction, risk, words in (
        (torch.zeros(3), None, r"forecasts so far were \[2\] without risk, found \[3\] without"),
        (torch.zeros(2), torch.ones(2), r"found \[2\] with"),
        (torch.tensor([0.0, math.nan]), None, "prediction has 1 NaN or infinite"),
        (torch.tensor(0.0), None, "found one number"),
    ):
        with pytest.raises(ValueError, match=words):
            online.interval(prediction, risk)
    for target, words in ((torch.zeros(2), r"found \[2\]"), (torch.tensor(math.inf), "infinite")):
        with pytest.raises(ValueError, match=words):
            online.observe(target)
    assert pickle.dumps(online) == before
    online.interval(torch.zeros(2))
    with pytest.raises(RuntimeError, match="observe"):
        online.interval(torch.zeros(2))
    with pytest.raises(ValueError, match="risk is a standard deviation"):
        OnlineConformal().interval(torch.zeros(2), torch.zeros(2))
    for options, words in (
        ({"coverage": 1.0}, "coverage"),
        ({"method": "ACI"}, "method must be one of aci, dtaci, pid"),
        ({"rate": 0.1}, "has fixed rates"),
        ({"method": "aci", "rate": -1.0}, "rate must be above 0"),
        ({"window": 1}, "window"),
    ):
        with pytest.raises(ValueError, match=words):
            OnlineConformal(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("by_risk", [False, True])
def test_enbpi_by_a_plain_loop_over_bootstrap_voters(by_risk: bool) -> None:
    """Algorithm 1 of Xu & Xie 2021: linear models on bootstrap rows, out-of-bag residuals, a window that slides with each truth."""
    n, times, voters = 40, 60, 12
    x, noise = draw(n + times, seed=1), draw(n + times, seed=2)
    y = 2 * x + noise * torch.linspace(0.5, 2, n + times)
    rows = torch.randint(n, (voters, n), generator=torch.Generator().manual_seed(3))
    slopes = [float((x[chosen] * y[chosen]).sum() / x[chosen].square().sum()) for chosen in rows]
    unseen = [[b for b in range(voters) if i not in rows[b].tolist()] for i in range(n)]
    assert all(unseen)
    out_of_bag = torch.stack([sum(slopes[b] for b in bag) / len(bag) * x[i] for i, bag in enumerate(unseen)])
    prediction = sum(slopes) / voters * x[n:]
    unit = 1 + draw(n + times, seed=4).abs() if by_risk else torch.ones(n + times).double()

    residuals = ((y[:n] - out_of_bag).abs() / unit[:n]).tolist()
    expected = []
    for time in range(times):
        expected.append(quantile(residuals, 0.2))
        residuals = [*residuals[1:], float((y[n + time] - prediction[time]).abs() / unit[n + time])]

    online = OnlineConformal(0.8, "enbpi", window=n)
    online.start(out_of_bag[:, None], y[:n, None], unit[:n, None] if by_risk else None)
    lower, upper = online.replay(prediction[:, None], y[n:, None], unit[n:, None] if by_risk else None)
    bound = torch.tensor(expected, dtype=torch.float64) * unit[n:]
    assert torch.allclose(upper[:, 0], prediction + bound)
    assert torch.allclose(lower[:, 0], prediction - bound)


def test_a_start_that_cannot_be_is_refused() -> None:
    y = draw(5, 2)
    with pytest.raises(ValueError, match="takes no scores to start with"):
        OnlineConformal(method="pid").start(y, y)
    with pytest.raises(ValueError, match=r"must have shape \[n, steps, ...\], found \[5\]"):
        OnlineConformal().start(y[:, 0], y[:, 0])
    with pytest.raises(ValueError, match="shapes must be equal"):
        OnlineConformal().start(y, y[:, :1])
    with pytest.raises(ValueError, match="'enbpi' has none"):
        OnlineConformal(method="enbpi", rate=0.1)
    online = OnlineConformal(method="aci", window=3)
    online.start(y, 0 * y)
    with pytest.raises(ValueError, match=r"were \[2\] without risk, found \[3\]"):
        online.interval(torch.zeros(3))
    with pytest.raises(RuntimeError, match="before the first interval"):
        online.start(y, y)


@pytest.mark.parametrize("method", ["aci", "dtaci"])
def test_coverage_against_targets_that_are_placed_just_outside(method: Any) -> None:
    """Only "aci" has a bound for any series (Gibbs & Candes 2021, proposition 4.1), as its docstring says."""
    rate, times, alpha = 0.05, 1500, 0.1
    online, misses = OnlineConformal(1 - alpha, method, rate if method == "aci" else None, window=200), 0
    usual = draw(times).abs()
    for time in range(times):
        bound = float(online.interval(torch.zeros(1, dtype=torch.float64))[1])
        score = float(usual[time]) if time < 50 or math.isinf(bound) else min(max(bound, 0) + 1e-9, 9)
        misses += score > bound
        online.observe(torch.tensor(score, dtype=torch.float64))
    if method == "aci":
        assert abs(misses / times - alpha) <= (max(alpha, 1 - alpha) + rate) / (rate * times)
    else:
        assert misses / times > 0.15


def test_steps_of_the_forecasts_dtype_wider_than_the_noise_lose_no_coverage() -> None:
    target = 1e6 + 0.01 * torch.randn(400, 1, dtype=torch.float64)
    online = OnlineConformal(method="enbpi")
    lower, upper = online.replay(torch.full((400, 1), 1e6), target)  # the next float32 is 0.06 away
    assert lower.dtype == torch.float32
    assert ((lower <= target) & (target <= upper))[100:].double().mean() > 0.85
