"""Public functions under random arguments: an answer, or an error of this package that names the cause."""

from __future__ import annotations

from collections.abc import Iterator

import matplotlib
import pytest
from helpers import bad_calls
from hypothesis import HealthCheck, Phase, given, settings

CALLS = {"metrics": 120, "calibration": 60, "distributions": 60, "plots": 25, "wrappers": 40, "data": 40}


@pytest.fixture(autouse=True)
def _no_window() -> Iterator[None]:
    before = matplotlib.get_backend()
    matplotlib.use("Agg")
    yield
    matplotlib.use(before)


@pytest.mark.parametrize("group", CALLS)
def test_calls_end_well_or_with_an_error_of_ours(group: str) -> None:
    outcomes: list[tuple[str, str]] = []

    @settings(
        max_examples=CALLS[group],
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(bad_calls.GROUPS[group])
    def run(call: bad_calls.Call) -> None:
        outcomes.append(bad_calls.outcome(call))

    run()
    counts, raw = bad_calls.counted(outcomes)
    assert not raw, "\n".join(raw)
    assert counts["ok"]  # the calls are not all nonsense
    assert counts["refused"]
