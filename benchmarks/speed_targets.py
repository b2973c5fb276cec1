"""What was aimed at, as ratios of one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Cell = Mapping[str, Any]
DEEP = ("cnn", "resnet18", "transformer")
LAUNCHES = ("tiny", "mlp", "cnn", "transformer")  # of which a GPU spends its time on being told what to do
LARGE = ("resnet18", "gpt2")
PHASES = {"forward": "forward", "step": "training step", "predict": "prediction only"}

REASONS: dict[str, str] = {}  # case -> one sentence: why it is missed


@dataclass(frozen=True)
class Target:
    """One line of the table of targets.

    Args:
        case: what is measured, in words.
        column: of the results: "plain", "loop" and "best" are ratios to one plain pass, to the loop over copies, and to the best rung;
            "over_us" is the time over a plain pass in microseconds.
        limit: the most that it may be.
        holds: whether a cell belongs to it.
        faster: whether the limit is told as "so many times faster".
    """

    case: str
    column: str
    limit: float
    holds: Callable[[Cell], bool]
    faster: bool = False

    def text(self, value: float) -> str:
        """A value as it is told."""
        if self.faster:
            return f"{1 / value:.3g} times faster"
        if self.column == "over_us":
            return f"{value:.0f} µs over a plain pass"
        what = {"plain": "a plain pass", "loop": "the loop", "best": "the best rung"}[self.column]
        return f"{value:.3g} x {what}"

    def aim(self) -> str:
        return ("at least " if self.faster else "at most ") + self.text(self.limit)


def _is(**wanted: Any) -> Callable[[Cell], bool]:
    """Cells with these values, or one of these where there is a tuple; on their own rungs, in float32, unless said otherwise."""
    wanted = {"how": "auto", "dtype": "float32", **wanted}
    return lambda cell: all(
        cell.get(name) in values if isinstance(values, tuple) else cell.get(name) == values
        for name, values in wanted.items()
    )


def _targets() -> list[Target]:
    some = (64, 1024)
    found = []
    for phase, told in (("forward", "forward"), ("step", "training step")):
        deep = {"model": DEEP, "batch": some, "phase": phase}
        for name, wrapper in (
            ("sculpt, last layer", "sculpt 1"),
            ("sculpt, three layers (default)", "sculpt"),
            ("neo", "neo"),
        ):
            found.append(Target(f"{name}: {told}", "plain", 1.10, _is(wrapper=wrapper, **deep)))
        found += [
            Target(f"vote, last layer, n = {n}: {told}", "plain", 1.15, _is(wrapper="vote last", n=n, **deep))
            for n in (5, 16)
        ]
        found.append(
            Target(
                f"vote of sculpt, last layer, n = 16: {told}",
                "plain",
                1.25,
                _is(wrapper="vote of sculpt last", n=16, **deep),
            )
        )
    found.append(
        Target(
            "vote, dealt rows, n = 5: training step",
            "plain",
            1.10,
            _is(wrapper="vote dealt", n=5, phase="step", batch=some),
        )
    )
    for phase, told in (("forward", "forward"), ("step", "training step")):
        full = {"wrapper": "vote", "phase": phase, "on": "cpu"}
        found.append(Target(f"vote, all layers, CPU, batch 64 and more: {told}", "loop", 1.05, _is(batch=some, **full)))
        found.append(
            Target(f"vote, all layers, CPU, batch 1: {told}", "loop", 0.5, _is(batch=1, n=(5, 16, 64), **full))
        )
    noise = {"n": 16, "phase": "forward"}
    found += [
        Target(
            "sample, noise in the last block, n = 16",
            "plain",
            1.3,
            _is(wrapper="sample last", model=DEEP, batch=some, **noise),
        ),
        Target("sample, all layers, n = 16", "loop", 1.05, _is(wrapper="sample", batch=some, **noise)),
        Target("sample, all layers, n = 16, batch 1", "loop", 0.35, _is(wrapper="sample", batch=1, **noise)),
    ]
    for phase, told in (("forward", "forward"), ("step", "training step")):
        gpu = {"wrapper": "vote", "phase": phase, "batch": 64, "on": "cuda"}
        found += [
            Target(
                f"GPU, launch-bound models, vote, all layers, n = {n}: {told}",
                "loop",
                1 / times,
                _is(n=n, model=LAUNCHES, **gpu),
                faster=True,
            )
            for n, times in ((16, 9), (5, 3))
        ]
        found.append(
            Target(
                f"GPU, large CNN and transformer, vote, all layers: {told}",
                "loop",
                1.02,
                _is(model=LARGE, n=(5, 16), **gpu),
            )
        )
    found.append(Target('"tune"', "best", 1.05, _is(how="tune")))
    found += [
        Target(
            f"overhead, tiny MLP, batch 1, {wrapper}: {told}",
            "over_us",
            60,
            _is(model="tiny", batch=1, n=1, wrapper=wrapper, phase=phase, on="cpu"),
        )
        for phase, told in (("forward", "with risk"), ("predict", "prediction only"))
        for wrapper in ("sculpt", "sample", "neo")
    ]
    return found


TARGETS = _targets()
