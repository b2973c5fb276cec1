"""Public functions called with valid, nearly valid and nonsensical arguments, and random models: how many calls give a wrong answer, fail with
an unhelpful error of Python or torch, or hang.

The calls are generated as in `tests/test_fuzz.py`, with other seeds. Answers are compared with the plain loops and scipy functions of
`tests/helpers`, where there is one. The models are those of `tests/helpers/random_models.py`, random sequences of what people write into a
forward, for vectors, images or sequences: each is wrapped, and prediction, risks, gradients and buffers are compared with plain copies.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.experiments.bench import table

if TYPE_CHECKING:
    from collections.abc import Callable

    import pandas as pd

CALLS = {
    "metrics": 600,
    "calibration": 400,
    "distributions": 400,
    "wrappers": 300,
    "plots": 150,
    "data": 150,
    "vectors": 100,
    "images": 100,
    "sequences": 100,
}
MODELS = ("vectors", "images", "sequences")
SEEDS = range(1, 11)  # each with 2,300 calls
LENGTH = 8  # parts of a random model
TOO_LONG = 10.0  # seconds of processor time
COUNTS = ("ok", "refused", "raw", "wrong")


def cells(smoke: bool = False) -> list[dict[str, Any]]:
    """Return a cell for each group of functions and seed."""
    if smoke:
        return [{"group": "distributions", "seed": 0, "calls": 20}]
    return [{"group": group, "seed": seed, "calls": calls} for seed in SEEDS for group, calls in CALLS.items()]


def run(group: str, seed: int, calls: int) -> dict[str, Any]:
    """Return the number of calls by outcome, the longest time of a call, and the faults."""
    tests = str(Path(__file__).parents[1] / "tests")
    if tests not in sys.path:
        sys.path.append(tests)
    from helpers import bad_calls

    outcomes: list[tuple[str, str]] = []
    seconds = [0.0]

    def attack(outcome: Callable[..., tuple[str, str]], *call: Any) -> None:
        start = time.process_time()
        outcomes.append(outcome(*call))
        seconds.append(time.process_time() - start)

    if group in MODELS:
        _attack_by_models(attack, group, seed, calls)
    else:
        _attack_by_calls(attack, group, seed, calls)
    counts, faults = bad_calls.counted(outcomes)
    return {
        "made": len(outcomes),
        **{name: counts[name] for name in COUNTS},
        "too_long": sum(value > TOO_LONG for value in seconds),
        "longest_s": round(max(seconds), 3),
        "faults": "; ".join(f"{n} x {text}" for text, n in faults.items()),
    }


def _attack_by_calls(attack: Callable[..., None], group: str, seed: int, calls: int) -> None:
    import matplotlib
    from helpers import bad_calls
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded

    matplotlib.use("Agg")

    @seeded(seed)
    @settings(
        max_examples=calls,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(bad_calls.GROUPS[group])
    def attack_by(call: bad_calls.Call) -> None:
        attack(bad_calls.outcome, call)

    attack_by()


def _attack_by_models(attack: Callable[..., None], kind: str, seed: int, calls: int) -> None:
    from helpers.random_models import WRAPPERS, outcome

    with tempfile.TemporaryDirectory() as folder:
        for number in range(calls):
            attack(outcome, kind, seed * 100_000 + number, LENGTH, WRAPPERS[number % len(WRAPPERS)], Path(folder))


def summary(frame: pd.DataFrame, images: Path) -> str:
    """Return a table of the groups, and the share of raw errors."""
    import pandas as pd

    columns = ["made", *COUNTS, "too_long"]
    groups = frame.groupby("group")[columns].sum().loc[[group for group in CALLS if group in set(frame["group"])]]
    shown = pd.DataFrame(
        {
            "functions": groups.index,
            "calls": [f"{n:,}" for n in groups["made"]],
            "answered": [f"{n:,}" for n in groups["ok"]],
            "refused": [f"{n:,}" for n in groups["refused"]],
            "raw errors": [f"{n:,}" for n in groups["raw"]],
            "wrong answers": [f"{n:,}" for n in groups["wrong"]],
            "hung": [f"{n:,}" for n in groups["too_long"]],
        }
    )
    total = frame[columns].sum()
    totals = (
        f"Of {total['made']:,} calls, {total['raw']:,} ({total['raw'] / total['made']:.2%}) ended in a raw error, {total['wrong']:,} gave a "
        f"wrong answer or changed its arguments, and {total['too_long']:,} took more than {TOO_LONG:.0f} seconds. *Refused*: ended with a "
        "clear error of this package, as bad arguments should. *Raw errors*: errors of Python or torch that do not say which argument is bad. "
        "*vectors*, *images*, *sequences*: random models for them, each under a wrapper and compared with plain copies; none is to be refused."
    )
    return f"{totals}\n\n{table(shown)}"
