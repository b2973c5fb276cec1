"""Warnings of rows unlike those held out: neither chance alone nor guarantees of another kind cause them."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from helpers.calibration_models import rng
from torch import Tensor, nn

from workbench import calibrate, compose, neo, sample, vote
from workbench.calibration import SplitConformal
from workbench.calibration.shift import _beta_binomial_tail, warn_unlike
from workbench.errors import WorkbenchWarning


def test_rows_stranger_than_those_held_out_are_told_of() -> None:
    g = rng()
    x, y = torch.randn(600, 2, generator=g), torch.randn(600, 1, generator=g)
    wrapped = neo.Wrapper()(nn.Linear(2, 1))
    wrapped.fit(x[:300])
    calibrated = calibrate(wrapped, (x[300:500], y[300:500]), "conformal", score="absolute")
    usual = calibrated.interval(x[500:], coverage=0.8)
    plain = calibrate(compose()(wrapped.unwrap()), (x[300:500], y[300:500]), "conformal", score="absolute")
    assert all(map(torch.equal, usual, plain.interval(x[500:], coverage=0.8)))
    with pytest.warns(
        WorkbenchWarning, match="100 of 100 rows are stranger by vacuitic risk than 99.5 % of the 200 held-out rows"
    ):
        calibrated.interval(x[500:] + 9, coverage=0.8)
    few = x[500:].clone()
    few[:16] += 9
    with pytest.warns(WorkbenchWarning, match="guaranteed only for rows like those"):
        calibrated.interval(few, coverage=0.8)
    weighted = calibrate(wrapped, (x[300:500], y[300:500]), "conformal", weight=lambda x: torch.ones(len(x)))
    weighted.interval(x[500:] + 9, coverage=0.8)
    # a file from before
    state = calibrated.state_dict()
    del state["strangeness"]
    old = SplitConformal(wrapped, score="absolute")
    old.load_state_dict(state)
    assert all(
        map(torch.equal, old.interval(x[500:] + 9, coverage=0.8), calibrated_without_words(calibrated, x[500:] + 9))
    )


def calibrated_without_words(calibrated: Any, x: Tensor) -> Any:
    with pytest.warns(WorkbenchWarning):
        return calibrated.interval(x, coverage=0.8)


def told(held_out: Tensor, new: Tensor) -> str:
    """What is said of rows, "" for nothing."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        said = warn_unlike(held_out.sort().values, new, "stranger")
    assert said == bool(caught)
    return str(caught[0].message) if caught else ""


@pytest.mark.parametrize(("n", "m"), [(150, 100), (29, 40), (1000, 3)])
def test_chance_alone_is_not_told_of(n: int, m: int) -> None:
    draws = [torch.randn(n + m, generator=rng(seed)) for seed in range(300)]
    assert not any(told(rows[:n], rows[n:]) for rows in draws)


def test_what_chance_does_is_that_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    for count, m, above, below in [(0, 5, 2, 30), (3, 5, 2, 30), (9, 40, 1, 29), (25, 100, 11, 990)]:
        wanted = stats.betabinom.sf(count - 1, m, above, below)
        assert _beta_binomial_tail(count, m, above, below) == pytest.approx(wanted, rel=1e-9)
    held_out, new = torch.randn(400, generator=rng()), torch.randn(300, generator=rng(1)) + 0.6
    distance = stats.ks_2samp(new, held_out, alternative="less").statistic
    chance = math.sqrt(-math.log(1e-4) * 700 / (2 * 400 * 300))
    assert f"KS distance {distance:.2f}, by chance {chance:.2f} at most" in told(
        held_out, new.clamp_max(held_out.max())
    )
    assert told(held_out, new - 1.2) == ""  # less strange than those held out


def test_sets_of_less_clear_rows_are_told_of_without_neo() -> None:
    g = rng()
    x, y = 3 * torch.randn(900, 4, generator=g), torch.randint(4, (900,), generator=g)
    model = compose(output="logits")(nn.Identity())
    calibrated = calibrate(model, (x[:400], y[:400]), "conformal", score="aps")
    calibrated.predict_set(x[400:])
    with pytest.warns(WorkbenchWarning, match="500 rows are less clear to the model than"):
        calibrated.predict_set(x[400:] / 3)
    # groups have a guarantee of their own, weights another one
    for options in ({"groups": "class"}, {"groups": lambda x: x[:, 0] > 0}, {"weight": lambda x: torch.ones(len(x))}):
        calibrate(model, (x[:400], y[:400]), "conformal", score="aps", **options).predict_set(x[400:] / 3)
    state = calibrated.state_dict()
    del state["doubt"]  # a file from before
    old = SplitConformal(model, score="aps")
    old.load_state_dict(state)
    old.predict_set(x[400:] / 3)


def test_intervals_of_rows_that_voters_know_less_are_told_of_without_neo() -> None:
    g = rng()
    x, y = torch.randn(900, 3, generator=g), torch.randn(900, 2, generator=g)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        voters = vote.Wrapper(4)(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)))
        noisy = sample.Wrapper(16)(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)))
    with torch.no_grad():
        for parameter in voters.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=g)
    calibrated = calibrate(voters, (x[:400], y[:400]), "conformal")
    assert calibrated.score == "normalized"
    calibrated.interval(x[400:])
    with pytest.warns(WorkbenchWarning, match="500 rows are of higher epistemic risk than"):
        calibrated.interval(4 * x[400:])
    _, risk = voters(x[:400], return_risk=True)
    risks = risk if isinstance(risk, Tensor) else risk.epistemic
    assert torch.allclose(calibrated.doubt.exp(), risks.prod(1).sqrt().sort().values, rtol=1e-4)
    # a pass that draws says nothing, since its noise may be common to the rows of a batch; nor does one without the risk
    for model, options in ((noisy, {}), (voters, {"score": "absolute"})):
        assert calibrate(model, (x[:400], y[:400]), "conformal", **options).doubt.numel() == 0
