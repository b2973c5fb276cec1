"""Ctrl-C at random moments of calls, trainings, loads and saves, which must leave the state as it was: modes, weights, hooks, random number
generators and the thread-local settings of torch.

`python benchmarks/interrupts.py --interrupts 500 --seed 7` runs other interrupts than `workbench bench interrupts`. There are three kinds: at
the k-th line of workbench's code, at the k-th moment at which CPython checks for signals (both reproducible by the seed), and by a real signal
after a random time. After each, everything that an interrupt could change is compared with its state before, or with its state after a
complete call. `tests/test_interrupts.py` runs a few hundred of them.
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
INTERRUPTS_PER_CELL = 108
INTERRUPTS_PER_CASE = 4  # consecutive interrupts of a case before the next case


class Interruption:
    """Raises KeyboardInterrupt once in this thread, at the k-th event of a kind; counts them if k is None.

    Args:
        kind: "line" (each line, call and return in files of workbench), or "call" (calls and returns from C, everywhere: the moments at which
            CPython delivers signals).
        k: number of the event, from 1.
    """

    def __init__(self, kind: str, k: int | None) -> None:
        self.kind, self.k, self.count, self.where = kind, k, 0, ""
        # held here, since CPython 3.11 may call it once more after it was removed
        self._installed = self._trace if kind == "line" else self._profile

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
        (sys.settrace if self.kind == "line" else sys.setprofile)(self._installed)  # type: ignore[arg-type]
        return self

    def __exit__(self, *error: Any) -> None:
        self._stop()


def _is_thrown_into(frame: Any, event: str) -> bool:
    """Whether a generator is being closed or thrown into: CPython checks for no signals there, and drops what a profiler raises."""
    if event != "call" or not frame.f_code.co_flags & inspect.CO_GENERATOR or frame.f_lasti < 0:
        return False
    return frame.f_code.co_code[frame.f_lasti] != dis.opmap["RESUME"]


class Signal:
    """Raises KeyboardInterrupt by a real signal after a number of seconds."""

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
    """Return the case of a row, None if the executor does not run this wrapper."""
    try:
        return Case(*row)
    except (ValueError, RuntimeError) as error:
        if "is not possible for" not in str(error):
            raise
        return None


@functools.cache
def events(row: tuple[str, str, str, type[Net]], kind: str) -> int:
    """Return the number of events of a kind in a complete run of a case."""
    case = made(row)
    assert case is not None
    return case.count(Interruption(kind, None))


Attack = tuple[tuple[str, str, str, type[Net]], str, bool, str, list[str]]


def attacks(
    interrupts: int, seed: int, kinds: tuple[str, ...] = KINDS, chosen: Callable[..., bool] | None = None
) -> Iterator[Attack]:
    """Interrupt one case after another at random moments.

    Args:
        interrupts: number of interrupts.
        seed: seed of the order of the cases and of the moments.
        kinds: kinds of interrupts.
        chosen: predicate that selects cases; all by default.

    Yields:
        The row of the case, the kind, whether the interrupt came before the end, where, and what was wrong afterwards.
    """
    draw = random.Random(seed)
    wanted = [row for row in cases() if chosen is None or chosen(*row)]
    while True:
        for row in draw.sample(wanted, len(wanted)):
            case, kind = made(row), draw.choice(kinds)
            for _ in range(INTERRUPTS_PER_CASE if case is not None else 0):
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
    """Return how many interrupts came before the end, and the faults that they left; the arguments are those of `attacks`."""
    hits, wrong = 0, []
    for row, kind, hit, where, faults in attacks(interrupts, seed, kinds, chosen):
        hits += hit
        if faults:
            wrong.append(f"{'/'.join(row[:3])} [{kind}] at {where}: {', '.join(faults)}")
            print(wrong[-1], flush=True)
    return hits, wrong


# ---- the benchmark
def cells(smoke: bool = False) -> list[dict[str, Any]]:
    """Return a cell for each wrapper and seed."""
    if smoke:
        return [{"wrapper": "vote", "seed": 0, "interrupts": 8}]
    return [
        {"wrapper": name, "seed": seed, "interrupts": INTERRUPTS_PER_CELL} for seed in range(SEEDS) for name in WRAPPERS
    ]


def run(wrapper: str, seed: int, interrupts: int) -> list[dict[str, Any]]:
    """Return one row for each executor and action: the interrupts of each kind that came before the end, and what they left behind."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # workers ignore the signal
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
    """Return a table of actions, and how many interrupts left something behind."""
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
    totals = (
        f"{int(frame['left_behind'].sum())} of {int(frame['hits'].sum()):,} interrupts left something behind, in {pairs} combinations of a "
        f"wrapper ({frame['wrapper'].nunique()} in all), an executor and an action. The columns count the interrupts at a random line "
        "of workbench's code, at a random call or return at which CPython checks for signals, and by a real signal after a random time. "
        "*Left something behind*: state that differs from that before the interrupt or after a complete call."
    )
    return f"{totals}\n\n{table(shown)}"


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
