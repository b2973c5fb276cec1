"""Targets of the speed benchmark, as ratios of one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Cell = Mapping[str, Any]
DEEP = ("cnn", "resnet18", "transformer")
# launch-bound: a GPU spends most of the time on launching their kernels
LAUNCHES = (
    "mlp",
    "cnn",
    "transformer",
    "tiny",
    "lstm",
)
LARGE = ("resnet18", "gpt2")
AS_IN_FIT = ("cnn", "resnet18", "transformer", "lstm")  # whose voters are trained one after another
BUSY = ("resnet50", "vit", "gpt2-1024")  # large enough to keep a GPU busy
PHASES = {"forward": "forward", "step": "training step", "predict": "prediction only", "fit": "fit"}

ONCE = "the fixed work of a call, done with caches that a large pass has emptied, is noticeable next to the passes of so small a network"
THREE = "the last three layers, which the risk head copies, are most of these networks; for the last layer alone, see the case above"
FIXED = (
    "the fixed work of a call, which checks whether the model has changed, and that of torch.vmap for each operation take longer than passes of "
    "such small models; n = 1 has these costs and nothing to share"
)
APART = (
    "every implementation must read the weights of all voters; convolutions with separate weights for each voter become grouped convolutions, "
    "which are slower on a CPU than as many single ones, and recurrent layers run step by step"
)
RISK = "risk needs additional operations, such as a second head, a spread or a density of features, each as expensive as one of the network's"
SERVED = (
    "the guard that checks whether the model has changed, and the graph's interpreter, take as long as the matrix products of such small "
    "models; at 64 rows, these products are most of the work of both"
)
LAUNCHED = (
    "every operation is launched by itself, and a prediction with its risk has two to three times as many as a plain pass. cuDNN's recurrent "
    "layers have no batched rule and run voter by voter, each with weights that must be gathered first; predictions of torch's encoder layers "
    "were not recorded as a graph when this was measured, and did not use their fused kernel"
)
STEPPED = (
    "a step of an own loop launches what vmap makes of its operations, with that of the optimizer two to three times as many as a plain step; "
    "`fit` replays a graph instead, see [throughput](#throughput)"
)
EARLIER = (
    "measured with grouped convolutions and vmap's own rule for attention; since then, large convolutions run voter by voter, and attention of "
    "all voters is one call in predictions too, which has not been measured"
)
TRUNKED = (
    "the heads, their spread and the trunk's buffers need launches of their own, and under autocast each operation of the trunk passed through "
    "Python once more; since then, buffers and autocast take fewer steps, which has not been measured"
)
REASONS: dict[str, str] = {  # case -> why its target is missed
    **{f"GPU, launch-bound models, vote, all layers, n = {n}: forward": LAUNCHED for n in (5, 16)},
    **{f"GPU, launch-bound models, vote, all layers, n = {n}: training step": STEPPED for n in (5, 16)},
    **{
        f"GPU, ResNet-50, ViT-B and GPT-2, bfloat16, {case}: {phase}": EARLIER
        for case in ("vote, all layers", "vote")
        for phase in ("forward", "training step")
    },
    **{
        f"GPU, {case}vote, last layer, n = 16: {phase}": TRUNKED
        for case in ("", "ResNet-50, ViT-B and GPT-2, bfloat16, ")
        for phase in ("forward", "training step")
    },
    "vote, all layers, n = 5, frozen": SERVED,
    "vote, all layers, n = 16, frozen": SERVED,
    "overhead, tiny MLP, batch 1, neo, frozen: with risk": "the density needs additional operations, and the guard checks more tensors",
    "sculpt, last layer: forward": ONCE,
    "sculpt, last layer: training step": ONCE,
    "sculpt, three layers (default): forward": THREE,
    "sculpt, three layers (default): training step": THREE,
    "neo: forward": "features are pooled and projected, which is noticeable next to small networks at 64 rows",
    "vote of sculpt, last layer, n = 16: training step": "attention with gradients must be decomposed under two nested vmaps",
    "vote, last layer, n = 4, maps of 512 x 512 x 19: forward": (
        "the probabilities of each voter's map and their entropies take as long as some of the layers of so small a network"
    ),
    "vote, dealt rows, n = 5: training step": (
        "five passes with a fifth of the rows each are slower than one with all rows, and the optimizer updates five times as many parameters, "
        "which is most of the work for the MLPs"
    ),
    "vote, all layers, CPU, batch 64 and more: forward": FIXED,
    "vote, all layers, CPU, batch 64 and more: training step": FIXED,
    "vote, all layers, CPU, batch 1: forward": APART,
    "vote, all layers, CPU, batch 1: training step": APART,
    "vote, all layers, as in fit: training step": (
        "the gradients of the voters are gathered into stacked tensors, and each voter has a backward pass and checks of its loss of its own"
    ),
    "sample, all layers, n = 16": FIXED,
    "sample, all layers, n = 16, batch 1": "torch.vmap's work for each operation is most of the time of a pass of one row",
    "overhead, tiny MLP, batch 1, sculpt: with risk": RISK,
    "overhead, tiny MLP, batch 1, sample: with risk": RISK,
    "overhead, tiny MLP, batch 1, neo: with risk": RISK,
    "overhead, tiny MLP, batch 1, sample: prediction only": "noise is inserted by intercepting every call of a torch function",
}


@dataclass(frozen=True)
class Target:
    """One line of the table of targets.

    Args:
        case: description of what is measured.
        column: column of the results: "plain", "loop" and "best" are ratios to one plain pass, to the loop over copies, and the best executor;
            "over_us" is the time in excess of a plain pass in microseconds, "guard_us" that of checking whether a graph may answer a call;
            "utilization" is the number of operations per second as a share of that of the loop.
        limit: upper limit; for "utilization" the lower one.
        holds: whether the target concerns a cell.
        faster: whether the limit is displayed as "... times faster".
    """

    case: str
    column: str
    limit: float
    holds: Callable[[Cell], bool]
    faster: bool = False

    @property
    def worst(self) -> Callable[[list[float]], float]:
        """Function that returns the worst of several values."""
        return min if self.column == "utilization" else max

    def met(self, value: float) -> bool:
        """Whether a value is within the limit."""
        return self.worst([value, self.limit]) == self.limit

    def text(self, value: float) -> str:
        """Return a value with its unit, for display."""
        if self.column == "utilization":
            return f"{value:.3g} of the loop's utilization"
        if self.faster:
            return f"{1 / value:.3g} times faster"
        if self.column == "over_us":
            return f"{value:.0f} µs over a plain pass"
        if self.column == "guard_us":
            return f"{value:.1f} µs"
        what = {"plain": "a plain pass", "loop": "the loop", "best": "the best executor"}[self.column]
        return f"{value:.3g} x {what}"

    def aim(self) -> str:
        return ("at least " if self.faster or self.column == "utilization" else "at most ") + self.text(self.limit)


def _is(**wanted: Any) -> Callable[[Cell], bool]:
    """Return a predicate for cells with these values, or one of a tuple of values; `how` is "auto" and `dtype` "float32" by default."""
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
    quick = ("cnn", "transformer", "lstm", "gpt2")  # enough for the loop to be measured as well
    dealt = _is(wrapper="vote dealt", n=(5, 16), phase="step", batch=some, on="cpu", model=quick)
    targets.append(Target("vote, dealt rows: training step, beside a loop by hand", "loop", 1.05, dealt))
    for phase, words in (("forward", "forward"), ("step", "training step")):
        full = {"wrapper": "vote", "phase": phase, "on": "cpu"}
        targets.append(
            Target(f"vote, all layers, CPU, batch 64 and more: {words}", "loop", 1.05, _is(batch=some, **full))
        )
        targets.append(
            Target(f"vote, all layers, CPU, batch 1: {words}", "loop", 0.5, _is(batch=1, n=(5, 16, 64), **full))
        )
    stepped = {"wrapper": "vote", "phase": "step", "batch": 64, "on": "cpu", "how": "backward"}
    targets.append(
        Target("vote, all layers, as in fit: training step", "loop", 1.02, _is(model=AS_IN_FIT, **stepped)),
    )
    for n, most in ((5, 0.35), (16, 0.2)):
        case = f"vote, all layers, as in fit, MLPs, n = {n}: training step"
        targets.append(Target(case, "loop", most, _is(model=("tiny", "small"), n=n, **stepped)))
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
            Target(f"GPU, ResNet-50, ViT-B and GPT-2, bfloat16, vote: {words}", "utilization", 0.9, _is(**busy)),
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
