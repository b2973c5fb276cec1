"""Public functions called with arguments that are good, nearly good or nonsense: how many answer wrongly, end in an error of Python or torch
that names nothing, or don't end.

The calls are those of `tests/test_fuzz.py`, with other seeds. Answers are compared with plain loops and scipy where `tests/helpers` has them.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.experiments.bench import table

if TYPE_CHECKING:
    import pandas as pd

CALLS = {"metrics": 600, "calibration": 400, "distributions": 400, "wrappers": 300, "plots": 150, "data": 150}
SEEDS = range(1, 11)  # of 2,000 calls each
TOO_LONG = 10.0  # seconds of the processor
COUNTS = ("ok", "refused", "raw", "wrong")


def cells(smoke: bool = False) -> list[dict[str, Any]]:
    """Every group of functions, with several seeds."""
    if smoke:
        return [{"group": "distributions", "seed": 0, "calls": 20}]
    return [{"group": group, "seed": seed, "calls": calls} for seed in SEEDS for group, calls in CALLS.items()]


def run(group: str, seed: int, calls: int) -> dict[str, Any]:
    """How many calls ended how, the longest time of one, and what was wrong."""
    import matplotlib
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded

    tests = str(Path(__file__).parents[1] / "tests")
    if tests not in sys.path:
        sys.path.append(tests)
    from helpers import bad_calls

    matplotlib.use("Agg")
    outcomes: list[tuple[str, str]] = []
    seconds = [0.0]

    @seeded(seed)
    @settings(
        max_examples=calls,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(bad_calls.GROUPS[group])
    def attack(call: bad_calls.Call) -> None:
        start = time.process_time()
        outcomes.append(bad_calls.outcome(call))
        seconds.append(time.process_time() - start)

    attack()
    counts, faults = bad_calls.counted(outcomes)
    return {
        "made": len(outcomes),
        **{name: counts[name] for name in COUNTS},
        "too_long": sum(value > TOO_LONG for value in seconds),
        "longest_s": round(max(seconds), 3),
        "faults": "; ".join(f"{n} x {text}" for text, n in faults.items()),
    }


def summary(frame: pd.DataFrame, images: Path) -> str:
    """A table of groups, and the share of raw errors."""
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
    said = (
        f"Of {total['made']:,} calls {total['raw']:,} ({total['raw'] / total['made']:.2%}) ended in a raw error, {total['wrong']:,} gave a "
        f"wrong answer or changed what they were given, and {total['too_long']:,} took more than {TOO_LONG:.0f} seconds."
    )
    return f"{said}\n\n{table(shown)}"
