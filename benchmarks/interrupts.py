"""Ctrl-C at random moments of calls, trainings, loads and saves, which must leave all as it was: modes, numbers, hooks, random draws and
what torch keeps for a thread.

`python benchmarks/interrupts.py --interrupts 500 --seed 7` makes others than `workbench bench interrupts`. Three kinds: at the k-th line of
workbench's own code, at the k-th moment at which CPython looks for signals (both the same again with the same seed), and by a real signal after
a random time. After each, all that an interrupt could leave behind is compared with what was there before, or with what a whole call leaves.
`tests/test_interrupts.py` runs some hundred of them.
"""

from __future__ import annotations

import argparse
import dis
import functools
import inspect
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import interrupts_cases
from interrupts_cases import ACTIONS, WRAPPERS, Case, Net, cases

from workbench.experiments.bench import table

if TYPE_CHECKING:
    import pandas as pd

KINDS = ("line", "call", "signal")
SEEDS = 4
TRIED = 108  # interrupts of each cell of the benchmark
EACH = 4  # interrupts of a case before it is the next one's turn


class Interruption:
    """Raises KeyboardInterrupt once in this thread, at the k-th event of a kind; counts them if k is None.

    Args:
        kind: "line" (each line, call and return in files of workbench), or "call" (calls and returns from C, everywhere: the moments at which
            CPython delivers signals).
        k: which event.
    """

    def __init__(self, kind: str, k: int | None) -> None:
        self.kind, self.k, self.count, self.where = kind, k, 0, ""

    def _event(self, frame: Any) -> None:
        self.count += 1
        if self.count == self.k:
            self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
            self._stop()
            raise KeyboardInterrupt

    def _trace(self, frame: Any, event: str, arg: Any) -> Any:
        if "workbench/" not in frame.f_code.co_filename:
            return None
        self._event(frame)
        return self._trace

    def _profile(self, frame: Any, event: str, arg: Any) -> None:
        if (
            event in ("call", "c_return")
            and frame.f_code.co_filename not in (__file__, interrupts_cases.__file__)
            and not _is_thrown_into(frame, event)
        ):
            self._event(frame)

    def _stop(self) -> None:
        sys.settrace(None)
        sys.setprofile(None)

    def __enter__(self) -> Interruption:
        (sys.settrace if self.kind == "line" else sys.setprofile)(
            self._trace if self.kind == "line" else self._profile  # type: ignore[arg-type]
        )
        return self

    def __exit__(self, *error: Any) -> None:
        self._stop()


def _is_thrown_into(frame: Any, event: str) -> bool:
    """Whether a generator is being closed or thrown into: no moment for signals, and CPython loses what a profiler raises there."""
    if event != "call" or not frame.f_code.co_flags & inspect.CO_GENERATOR or frame.f_lasti < 0:
        return False
    return frame.f_code.co_code[frame.f_lasti] != dis.opmap["RESUME"]


class Signal:
    """Raises KeyboardInterrupt by a real signal after so many seconds."""

    where = "signal"

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def _send(self) -> None:
        end = time.perf_counter() + self.seconds
        while time.perf_counter() < end:
            if self.over:
                return
        signal.raise_signal(signal.SIGINT)

    def __enter__(self) -> Signal:
        self.over = False
        self.thread = threading.Thread(target=self._send)
        self.thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.over = True
        self.thread.join()


# ---- attacks
@functools.cache
def made(row: tuple[str, str, str, type[Net]]) -> Case | None:
    """The case of a row, None if the rung does not run this wrapper."""
    try:
        return Case(*row)
    except (ValueError, RuntimeError) as error:
        if "is not possible for" not in str(error):
            raise
        return None


@functools.cache
def events(row: tuple[str, str, str, type[Net]], kind: str) -> int:
    case = made(row)
    assert case is not None
    return case.count(Interruption(kind, None))


Attack = tuple[tuple[str, str, str, type[Net]], str, bool, str, list[str]]


def attacks(
    interrupts: int, seed: int, kinds: tuple[str, ...] = KINDS, chosen: Callable[..., bool] | None = None
) -> Iterator[Attack]:
    """Interrupts at random moments, of one case after another.

    Args:
        interrupts: how many to try.
        seed: of the order of the cases, and of moments.
        kinds: of interrupts.
        chosen: which cases; all by default.

    Yields:
        The row of the case, the kind, whether the interrupt came before the end, where, and what was wrong afterwards.
    """
    draw = random.Random(seed)
    wanted = [row for row in cases() if chosen is None or chosen(*row)]
    while True:
        for row in draw.sample(wanted, len(wanted)):
            case, kind = made(row), draw.choice(kinds)
            for _ in range(EACH if case is not None else 0):
                count = events(row, "call" if kind == "signal" else kind)
                if kind == "signal":
                    interruption: Any = Signal(count * 4e-7 * draw.random() ** 2 * 4)
                else:
                    interruption = Interruption(kind, draw.randint(1, count))
                interruption.k_odd = draw.random() < 0.5
                hit, faults = case.attack(interruption)  # type: ignore[union-attr]
                yield row, kind, hit, interruption.where, faults
                interrupts -= 1
                if not interrupts:
                    return


def soak(
    interrupts: int, seed: int, kinds: tuple[str, ...] = KINDS, chosen: Callable[..., bool] | None = None
) -> tuple[int, list[str]]:
    """How many interrupts hit, and what was wrong after which; the arguments are those of `attacks`."""
    hits, wrong = 0, []
    for row, kind, hit, where, faults in attacks(interrupts, seed, kinds, chosen):
        hits += hit
        if faults:
            wrong.append(f"{'/'.join(row[:3])} [{kind}] at {where}: {', '.join(faults)}")
            print(wrong[-1], flush=True)
    return hits, wrong


# ---- the benchmark
def cells(smoke: bool = False) -> list[dict[str, Any]]:
    """Every wrapper, with several seeds."""
    if smoke:
        return [{"wrapper": "vote", "seed": 0, "interrupts": 8}]
    return [{"wrapper": name, "seed": seed, "interrupts": TRIED} for seed in range(SEEDS) for name in WRAPPERS]


def run(wrapper: str, seed: int, interrupts: int) -> list[dict[str, Any]]:
    """One row for each rung and action: the interrupts of each kind that came before the end, and what they left behind."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a worker ignores it
    try:
        for (_, strategy, action, _), kind, hit, where, faults in attacks(
            interrupts, seed, chosen=lambda name, *_: name == wrapper
        ):
            start = {"strategy": strategy, "action": action, **dict.fromkeys(KINDS, 0), "left_behind": 0, "faults": ""}
            row = rows.setdefault((strategy, action), start)
            row[kind] += hit
            if faults:
                row["left_behind"] += 1
                row["faults"] += f"[{kind}] at {where}: {', '.join(faults)}; "
    finally:
        signal.signal(signal.SIGINT, handler)
    return list(rows.values())


def summary(frame: pd.DataFrame, images: Path) -> str:
    """A table of actions, and how many interrupts left something behind."""
    import pandas as pd

    frame = frame.assign(hits=frame[list(KINDS)].sum(axis=1))
    actions = frame.groupby("action")[[*KINDS, "hits", "left_behind"]].sum().loc[list(ACTIONS)]
    shown = pd.DataFrame(
        {
            "interrupted": [ACTIONS[action] for action in actions.index],
            "at a line": [f"{n:,}" for n in actions["line"]],
            "at a call": [f"{n:,}" for n in actions["call"]],
            "by a signal": [f"{n:,}" for n in actions["signal"]],
            "left something behind": [f"{n:,}" for n in actions["left_behind"]],
        }
    )
    pairs = len(frame[frame["hits"] > 0].drop_duplicates(["wrapper", "strategy", "action"]))
    said = (
        f"{int(frame['left_behind'].sum())} of {int(frame['hits'].sum()):,} interrupts left something behind, in {pairs} "
        f"combinations of {frame['wrapper'].nunique()} wrappers, rungs of the engine and actions."
    )
    return f"{said}\n\n{table(shown)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interrupts", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    args = parser.parse_args()
    start = time.perf_counter()
    hits, wrong = soak(args.interrupts, args.seed, tuple(args.kinds))
    print(Counter(line.partition(" [")[0].rpartition("/")[2] for line in wrong))
    print(f"{len(wrong)} of {hits} interrupts left something behind ({time.perf_counter() - start:.0f} s)")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
