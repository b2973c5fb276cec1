"""Targets of the speed benchmark, as ratios of one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Cell = Mapping[str, Any]
DEEP = ("cnn", "resnet18", "transformer")
LAUNCHES = ("mlp", "cnn", "transformer", "tiny", "lstm")  # of which a GPU spends its time on being told what to do
LARGE = ("resnet18", "gpt2")
BUSY = ("resnet50", "vit", "gpt2-1024")  # which keep a GPU busy
PHASES = {"forward": "forward", "step": "training step", "predict": "prediction only", "fit": "fit"}

ONCE = (
    "what is done once a call, in caches that a large pass has emptied, counts beside the passes of so small a network"
)
THREE = "the last three layers are most of these networks; with the last layer alone it is the case above"
FIXED = (
    "the fixed work of a call, which finds out whether the model is still the same, and torch.vmap's for each operation take longer than passes "
    "of so few numbers; n = 1 pays for it without having anything to share"
)
APART = (
    "the weights of all voters must be read by whatever computes them; convolutions with weights for each voter become grouped ones, slower "
    "on a CPU than as many single ones, and recurrent layers are taken apart step by step"
)
RISK = "risk takes operations of its own, such as a second head, a spread or a density of features, each as dear as one of the network's"
SERVED = (
    "the guard that finds out whether the model is still the same, and the graph's interpreter, take as long as the products of so few "
    "numbers; at 64 rows these products are most of what both do"
)
REASONS: dict[str, str] = {  # case -> one sentence: why it is missed
    "vote, all layers, n = 5, frozen": SERVED,
    "vote, all layers, n = 16, frozen": SERVED,
    "overhead, tiny MLP, batch 1, neo, frozen: with risk": "the density takes operations of its own, and there are more tensors to look at",
    "sculpt, last layer: forward": ONCE,
    "sculpt, last layer: training step": ONCE,
    "sculpt, three layers (default): forward": THREE,
    "sculpt, three layers (default): training step": THREE,
    "neo: forward": (
        "features are found in a mode for torch functions, in which torch's encoder layers do without their fused kernel, and to pool and "
        "project them counts beside small networks at 64 rows"
    ),
    "vote of sculpt, last layer, n = 16: training step": (
        "the likelihood of each voter is computed by itself, and attention with gradients must be put in other words under two vmaps"
    ),
    "vote, last layer, n = 4, maps of 512 x 512 x 19: forward": (
        "the probabilities of each voter's map and their entropies take as long as some of so small a network's layers"
    ),
    "vote, dealt rows, n = 5: training step": (
        "five passes of a fifth of the rows each are slower than one of all rows, and five times as many parameters take their step, which is "
        "most of what the MLPs do"
    ),
    "vote, all layers, CPU, batch 64 and more: forward": FIXED,
    "vote, all layers, CPU, batch 64 and more: training step": FIXED,
    "vote, all layers, CPU, batch 1: forward": APART,
    "vote, all layers, CPU, batch 1: training step": APART,
    "sample, all layers, n = 16": FIXED,
    "sample, all layers, n = 16, batch 1": "torch.vmap's work for each operation is most of what a pass of one row takes",
    "overhead, tiny MLP, batch 1, sculpt: with risk": RISK,
    "overhead, tiny MLP, batch 1, sample: with risk": RISK,
    "overhead, tiny MLP, batch 1, neo: with risk": RISK,
    "overhead, tiny MLP, batch 1, sample: prediction only": "noise is put in by a look at every call of a torch function",
}


@dataclass(frozen=True)
class Target:
    """One line of the table of targets.

    Args:
        case: what is measured, in words.
        column: of the results: "plain", "loop" and "best" are ratios to one plain pass, to the loop over copies, and to the best rung;
            "over_us" is the time over a plain pass in microseconds, "guard_us" that of finding out whether a graph may answer a call;
            "utilisation" is the share of the operations a second of the loop.
        limit: the most that it may be, of "utilisation" the least.
        holds: whether a cell belongs to it.
        faster: whether the limit is told as "so many times faster".
    """

    case: str
    column: str
    limit: float
    holds: Callable[[Cell], bool]
    faster: bool = False

    @property
    def worst(self) -> Callable[[list[float]], float]:
        """Which of some values is the worst."""
        return min if self.column == "utilisation" else max

    def met(self, value: float) -> bool:
        """Whether a value is within the limit."""
        return self.worst([value, self.limit]) == self.limit

    def text(self, value: float) -> str:
        """A value as it is told."""
        if self.column == "utilisation":
            return f"{value:.3g} of the loop's utilisation"
        if self.faster:
            return f"{1 / value:.3g} times faster"
        if self.column == "over_us":
            return f"{value:.0f} µs over a plain pass"
        if self.column == "guard_us":
            return f"{value:.1f} µs"
        what = {"plain": "a plain pass", "loop": "the loop", "best": "the best rung"}[self.column]
        return f"{value:.3g} x {what}"

    def aim(self) -> str:
        return ("at least " if self.faster or self.column == "utilisation" else "at most ") + self.text(self.limit)


def _is(**wanted: Any) -> Callable[[Cell], bool]:
    """Cells with these values, or one of these where there is a tuple; on their own rungs, in float32, unless said otherwise."""
    wanted = {"how": "auto", "dtype": "float32", **wanted}
    return lambda cell: all(
        cell.get(name) in values if isinstance(values, tuple) else cell.get(name) == values
        for name, values in wanted.items()
    )


def _targets() -> list[Target]:
    some = (64, 1024)
    targets = []
    for phase, words in (("forward", "forward"), ("step", "training step")):
        deep = {"model": DEEP, "batch": some, "phase": phase}
        for name, wrapper in (
            ("sculpt, last layer", "sculpt 1"),
            ("sculpt, three layers (default)", "sculpt"),
            ("neo", "neo"),
        ):
            targets.append(Target(f"{name}: {words}", "plain", 1.10, _is(wrapper=wrapper, **deep)))
        targets += [
            Target(f"vote, last layer, n = 5: {words}", "plain", 1.15, _is(wrapper="vote last", n=5, **deep)),
            Target(
                f"vote, last layer, n = 16: {words}", "plain", 1.15, _is(wrapper="vote last", n=16, on="cpu", **deep)
            ),
        ]
        targets.append(
            Target(
                f"vote of sculpt, last layer, n = 16: {words}",
                "plain",
                1.25,
                _is(wrapper="vote of sculpt last", n=16, **deep),
            )
        )
    targets.append(
        Target(
            "vote, dealt rows, n = 5: training step",
            "plain",
            1.10,
            _is(wrapper="vote dealt", n=5, phase="step", batch=some),
        )
    )
    for phase, words in (("forward", "forward"), ("step", "training step")):
        full = {"wrapper": "vote", "phase": phase, "on": "cpu"}
        targets.append(
            Target(f"vote, all layers, CPU, batch 64 and more: {words}", "loop", 1.05, _is(batch=some, **full))
        )
        targets.append(
            Target(f"vote, all layers, CPU, batch 1: {words}", "loop", 0.5, _is(batch=1, n=(5, 16, 64), **full))
        )
    noise = {"n": 16, "phase": "forward"}
    targets += [
        Target(
            "sample, noise in the last block, n = 16",
            "plain",
            1.3,
            _is(wrapper="sample last", model=DEEP, batch=some, **noise),
        ),
        Target("sample, all layers, n = 16", "loop", 1.05, _is(wrapper="sample", batch=some, **noise)),
        Target("sample, all layers, n = 16, batch 1", "loop", 0.35, _is(wrapper="sample", batch=1, **noise)),
    ]
    for phase, words in (("forward", "forward"), ("step", "training step")):
        gpu = {"wrapper": "vote", "phase": phase, "batch": 64, "on": "cuda"}
        targets += [
            Target(
                f"GPU, launch-bound models, vote, all layers, n = {n}{compiled}: {words}",
                "loop",
                1 / times,
                _is(n=n, model=LAUNCHES, how=how, **gpu),
                faster=True,
            )
            for how, compiled in (("auto", ""), ("compiled", ", compiled"))
            for n, times in ((16, 9), (5, 3))
        ]
        last = {"wrapper": "vote last", "n": 16, "phase": phase, "on": "cuda"}
        targets += [
            Target(f"GPU, vote, last layer, n = 16: {words}", "plain", 1.05, _is(model=DEEP, batch=some, **last)),
            Target(
                f"GPU, ResNet-50, ViT-B and GPT-2, bfloat16, vote, last layer, n = 16: {words}",
                "plain",
                1.05,
                _is(model=BUSY, dtype="bfloat16", **last),
            ),
        ]
        busy = {"model": BUSY, "n": 5, "wrapper": "vote", "phase": phase, "on": "cuda", "dtype": "bfloat16"}
        targets += [
            Target(f"GPU, ResNet-50, ViT-B and GPT-2, bfloat16, vote, all layers: {words}", "loop", 1.02, _is(**busy)),
            Target(f"GPU, ResNet-50, ViT-B and GPT-2, bfloat16, vote: {words}", "utilisation", 0.9, _is(**busy)),
        ]
        targets.append(
            Target(
                f"GPU, large CNN and transformer, vote, all layers: {words}",
                "loop",
                1.02,
                _is(model=LARGE, n=(5, 16), **gpu),
            )
        )
    targets.append(
        Target(
            "vote, last layer, n = 4, maps of 512 x 512 x 19: forward",
            "plain",
            1.4,
            _is(wrapper="vote last", n=4, model="unet", phase="forward"),
        )
    )
    targets.append(Target('"tune"', "best", 1.05, _is(how="tune")))
    targets += [
        Target(
            f"overhead, tiny MLP, batch 1, {wrapper}: {words}",
            "over_us",
            60,
            _is(model="tiny", batch=1, n=1, wrapper=wrapper, phase=phase, on="cpu"),
        )
        for phase, words in (("forward", "with risk"), ("predict", "prediction only"))
        for wrapper in ("sculpt", "sample", "neo")
    ]
    served = {"wrapper": "vote", "phase": "forward", "on": "cpu", "how": "frozen"}
    targets += [
        Target(f"vote, all layers, n = {n}, frozen", "loop", limit, _is(n=n, **served))
        for n, limit in ((5, 0.7), (16, 0.3))
    ]
    targets += [
        Target(
            f"overhead, tiny MLP, batch 1, {wrapper}, frozen: with risk",
            "over_us",
            60,
            _is(model="tiny", batch=1, n=1, wrapper=wrapper, phase="forward", on="cpu", how="frozen"),
        )
        for wrapper in ("sculpt", "sample", "neo")
    ]
    targets += [
        Target(
            f"guard of recorded calls, {wrapper}",
            "guard_us",
            10,
            _is(model="tiny", batch=1, n=(1, 5), wrapper=wrapper, phase="forward", on="cpu", how=("auto", "frozen")),
        )
        for wrapper in ("vote", "sculpt", "sample", "neo")
    ]
    return targets


TARGETS = _targets()
