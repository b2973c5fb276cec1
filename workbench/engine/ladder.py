"""Which executor runs a call: rungs from fast to universal, each right or refused, and the decision kept for calls of a kind."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..introspect.bytecode import globals_assigned, methods_of
from ..introspect.source_lines import first_sentence, line_name, users_line
from .branch import Result
from .effects.objects import is_object
from .effects.random import moved
from .executors import loop, replay
from .executors import vmap as vmapped
from .plan import Axis, Plan, uneven
from .rank_one import LAYERS, SMALL
from .tree import flatten, follow, tensors

if TYPE_CHECKING:
    from .run import Engine

log = logging.getLogger("workbench")
RUNGS: dict[str, Callable[..., Sequence[Result]]] = {
    "vmap": vmapped.run,
    "rescue": vmapped.rescued,
    "replay": replay.run,
    "loop": loop.run,
}
LITTLE = 2**23  # multiplications in a pass of a branch below which what surrounds them takes longer
STRATEGIES = ("auto", *RUNGS, "tune")
_NO_RULE = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, nn.TransformerEncoderLayer)  # plain vmap refuses them


class Kind(NamedTuple):
    """Calls of one kind are run alike."""

    strategy: str
    training: bool
    gradients: bool
    axes: tuple[Axis, ...]
    device: str
    autocast: bool
    dealt: bool
    looped: str  # why the branches must run one after another
    rows: int  # 0 for so few that a pass is little work; "tune" tells sizes apart by powers of two


@dataclass
class Decision:
    """How calls of a kind are run.

    Args:
        rung: the executor.
        reason: why.
        below: the rungs that are left if it refuses.
        refused: those that have refused, and their words.
        branches: how many there are.
        shared: whether they share a trunk.
        chunk: how many run at once, where memory was too small for all; None as the wrapper says.
    """

    rung: str
    reason: str
    below: tuple[str, ...]
    branches: int
    shared: bool
    refused: dict[str, str] = field(default_factory=dict)
    chunk: int | None = None


def kind_of(engine: Engine, plan: Plan, args: tuple, kwargs: dict[str, Any], strategy: str) -> Kind:
    """What decides about the rung of a call."""
    leaves = tensors((*args, *kwargs.values()))
    device = next((leaf.device.type for leaf in leaves), "cpu")
    if torch.compiler.is_compiling():  # torch.export would take a comparison for a promise about the number of rows
        rows, little = 3, False
    else:
        rows = max((leaf.shape[0] for leaf in leaves if leaf.dim()), default=1)
        flat = engine.weights > 0 and all(leaf.dim() <= 2 and leaf.is_floating_point() for leaf in leaves)
        little = rows <= 2 or (flat and rows * engine.weights <= LITTLE)
    return Kind(
        strategy,
        engine.root.training,
        torch.is_grad_enabled(),
        plan.axes,
        device,
        torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device),
        bool(plan.dealt),
        plan.loop_only,
        int(rows).bit_length() if strategy == "tune" else int(not little),
    )


def execute(engine: Engine, plan: Plan, args: tuple, kwargs: dict[str, Any], strategy: str) -> Sequence[Result]:
    """Run a plan on the rung for its kind of call; a rung that refuses leaves everything as it was, and the next is tried."""
    kind = engine.kind = kind_of(engine, plan, args, kwargs, strategy)
    known = engine.decisions.get(kind)
    decision = known or _decide(engine, plan, kind, args, kwargs)
    first = known is None
    refusal: Exception
    while decision.rung != "loop":
        try:
            part = plan if decision.chunk is None else replace(plan, chunk=decision.chunk)
            results = _attempt(engine, part, decision.rung, args, kwargs, first)
            _settle(engine, kind, decision)
            return results
        except _Spoiled as spoiled:
            raise spoiled.error from None
        except torch.OutOfMemoryError as error:
            if (fewer := _fewer(plan, decision)) is not None:
                decision = replace(decision, reason=f"memory was too small for more than {fewer} at once", chunk=fewer)
                continue  # the error is gone, and with it the tensors of the pass that failed
            refusal, where = error, _where(error)
        except Exception as error:
            refusal, where = error, _where(error)
        if not decision.below:
            engine.decisions.pop(kind, None)
            raise _forced(engine, plan, strategy, refusal, where) from refusal
        rung, *below = decision.below
        refused = {**decision.refused, decision.rung: where}
        reason = f"{decision.rung} refused the model ({where})"
        decision = Decision(rung, reason, tuple(below), decision.branches, decision.shared, refused, decision.chunk)
        first = True
    results = loop.run(engine, plan, args, kwargs)
    _settle(engine, kind, decision)
    return results


def _fewer(plan: Plan, decision: Decision) -> int | None:
    """How many branches of the outermost axis to run at once after memory was too small; None where there is no less."""
    if decision.rung == "replay" or plan.axes[0].randomness == "same":
        return None
    present = min(decision.chunk or plan.chunk or plan.axes[0].size, plan.axes[0].size)
    return present // 2 or None


def _settle(engine: Engine, kind: Kind, decision: Decision) -> None:
    """Keep a decision, and tell once what was refused: only now, since what the last rung refuses as well was the user's own mistake."""
    if decision.chunk is not None and decision.rung != "loop" and engine.decisions.get(kind) is not decision:
        log.warning(
            "%s: memory was too small for all %d branches in one pass, so %d run at once. chunk=%d silences this",
            engine.root._get_name(),
            decision.branches,
            decision.chunk,
            decision.chunk,
        )
    if decision.refused and engine.decisions.get(kind) is not decision:
        log.info(
            '%s: %s; %d branches run on "%s" instead. strategy="%s" silences this',
            engine.root._get_name(),
            decision.reason,
            decision.branches,
            decision.rung,
            decision.rung,
        )
    engine.decisions[kind] = decision


class _Spoiled(Exception):
    """A rung has failed in the middle of a call, after it had changed the inputs, so that no other can be tried."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _attempt(
    engine: Engine, plan: Plan, rung: str, args: tuple, kwargs: dict[str, Any], first: bool
) -> Sequence[Result]:
    """One rung; the first time on copies of the inputs, since a model that writes into them must be found out."""
    leaves, rebuild = flatten((args, kwargs))
    given = [leaf.clone() if first and isinstance(leaf, Tensor) else leaf for leaf in leaves]
    inputs = rebuild(given) if first else (args, kwargs)
    versions = loop.versions(given)
    objects = [leaf for leaf in given if is_object(leaf)]
    if objects and engine.objects.changes is not False:
        raise RuntimeError(f"a {type(objects[0]).__name__} is among the inputs, which forward may change")
    sources = engine.sources(leaves)
    before = sources.all() if first else None
    once = any(axis.randomness != "same" and axis.size > 1 for axis in plan.axes) and rung != "replay"
    elsewhere = sources.unknown_to_torch() if first and once else []
    try:
        results = RUNGS[rung](engine, plan, *inputs, first)
        if first and loop.versions(given) != versions:
            raise RuntimeError("the model writes into its inputs")
        if first and engine.kind.autocast and rung != "replay":
            _refuse_other_dtypes(engine, plan, args, kwargs, results)
        if first and once and moved(elsewhere, sources.unknown_to_torch()):
            raise RuntimeError(
                "the model draws from numpy's or Python's random numbers or from a generator of its own, which vmap would do once for all"
            )
        if first:
            follow((args, kwargs), inputs, {id(own): leaf for own, leaf in zip(given, leaves, strict=True)})
        return results
    except Exception as error:
        engine.forget()  # a failed pass may have left dead tensors in its clone
        if before is not None:
            sources.restore(before)
        elif loop.versions(given) != versions:
            raise _Spoiled(error) from None
        raise


def _refuse_other_dtypes(
    engine: Engine, plan: Plan, args: tuple, kwargs: dict[str, Any], results: Sequence[Result]
) -> None:
    """Autocast must give what it gives a branch by itself, which is run to see it."""
    leaves, rebuild = flatten((args, kwargs))
    sources = engine.sources(leaves)
    before = sources.all()
    fixed = {**plan.fixed, **{axis.name: 0 for axis in plan.axes}}
    one = replace(plan, axes=(), fixed=fixed, dealt="", rows=(), keep_state=False)
    copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    try:
        alone = tensors(loop.run(engine, one, *rebuild(copies))[0].output)
    finally:
        sources.restore(before)
    for found, wanted in zip(tensors(results[0].output), alone, strict=True):
        if found.dtype != wanted.dtype:
            raise RuntimeError(f"autocast gives {found.dtype} where a branch by itself has {wanted.dtype}")


def _decide(engine: Engine, plan: Plan, kind: Kind, args: tuple, kwargs: dict[str, Any]) -> Decision:
    rungs, reason = candidates(engine, plan, kind)
    if kind.strategy in RUNGS and plan.size > 1:
        possible = kind.strategy in _possible(engine, plan)
        if not possible and not plan.dealt:
            raise _forced(engine, plan, kind.strategy, None, _obstacle(engine, plan))
        if possible:  # dealing is our idea, not the user's, so that a refusal is no error
            rungs = (kind.strategy, "loop") if plan.dealt and kind.strategy != "loop" else (kind.strategy,)
            reason = f'strategy="{kind.strategy}"'
    decision = Decision(rungs[0], reason, rungs[1:], plan.size, plan.shares_trunk)
    if kind.strategy == "tune" and plan.size > 1:
        return _tuned(engine, plan, decision, args, kwargs)
    return decision


def _possible(engine: Engine, plan: Plan) -> tuple[str, ...]:
    """The rungs that could run the plan."""
    if plan.size == 1 or plan.loop_only or uneven(plan.rows):
        return ("loop",)
    vmaps = () if writes_globals(engine.root) or hooked(engine.root) else ("vmap", "rescue")
    return (*vmaps, *(() if plan.interventions or plan.dealt else ("replay",)), "loop")


def _obstacle(engine: Engine, plan: Plan) -> str:
    if plan.size == 1:
        return "there is one branch"
    if plan.loop_only or plan.dealt:
        return plan.loop_only or "each row is answered by one branch, and not all have as many"
    return (
        writes_globals(engine.root)
        or hooked(engine.root)
        or "noise reaches all layers, so that the branches share no trunk"
    )


def candidates(engine: Engine, plan: Plan, kind: Kind) -> tuple[tuple[str, ...], str]:
    """The rungs to try, in this order, and why the first comes first."""
    possible = _possible(engine, plan)
    if possible == ("loop",):
        return possible, _obstacle(engine, plan)

    def those(*rungs: str) -> tuple[str, ...]:
        return tuple(rung for rung in rungs if rung in possible)

    start = ("rescue",) if _lacks_rule(engine, plan) else ("vmap", "rescue")
    if plan.shares_trunk:
        return those(*start, "replay", "loop"), "the branches share a trunk, which is computed once"
    if kind.device != "cpu":
        return those(*start, "loop"), "one launch for all branches"
    # without the heads beside them, so that a prediction does not draw other numbers where its risk is wanted
    models = math.prod(axis.size for axis in plan.axes if not axis.own_first)
    if not kind.rows and models >= 4:
        return those(*start, "loop"), "each of the branches is little work"
    if kind.dealt and models >= 4 and _factored(engine, plan):
        return those(*start, "loop"), "few rows for each branch, and all read the same weights"
    return ("loop",), "on the CPU a pass for each branch is as fast as all at once"


def _lacks_rule(engine: Engine, plan: Plan) -> bool:
    """Whether a module that plain vmap refuses holds tensors that differ between the branches."""
    owners = {slot.rpartition(".")[0] for slot, rule in plan.rules.items() if rule.axes()}
    return any(
        isinstance(module, _NO_RULE) and any(owner == path or owner.startswith(f"{path}.") for owner in owners)
        for path, module in engine.root.named_modules()
    )


def _factored(engine: Engine, plan: Plan) -> bool:
    """Whether all weights of rank-one voters are such that their layers need no products of them, and some of them large."""
    slots = [slot for slot, rule in plan.rules.items() if rule.factors and slot not in engine.whole]
    owners = [engine.root.get_submodule(slot.rpartition(".")[0]) for slot in slots]
    large = any(plan.bank.get(slot).numel() >= SMALL for slot in slots)
    # the class of the wrapped object itself is one of ours
    return large and all(getattr(type(owner), "_plain_class", type(owner)) in LAYERS for owner in owners)


def _tuned(engine: Engine, plan: Plan, decision: Decision, args: tuple, kwargs: dict[str, Any]) -> Decision:
    """Measure every rung that can run the plan on copies of these inputs, backward pass included, and take the fastest."""
    seconds: dict[str, float] = {}
    refused: dict[str, str] = {}
    for rung in _possible(engine, plan):
        if rung == "rescue" and "vmap" in seconds:
            continue  # it does the same, and more
        try:
            seconds[rung] = min(_measured(engine, plan, rung, args, kwargs, k == 0) for k in range(3))
        except Exception as error:
            if rung == "loop":
                raise
            refused[rung] = _where(error)
    best = min(seconds, key=lambda rung: seconds[rung])
    reason = "measured " + ", ".join(f"{rung} {1e3 * value:.2f} ms" for rung, value in seconds.items())
    return Decision(best, reason, tuple(r for r in ("loop",) if r != best), plan.size, plan.shares_trunk, refused)


def _measured(engine: Engine, plan: Plan, rung: str, args: tuple, kwargs: dict[str, Any], first: bool) -> float:
    leaves, rebuild = flatten((args, kwargs))
    sources = engine.sources(leaves)
    before = sources.all()
    start = _now(leaves)
    try:
        if rung == "loop":
            copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            results: Sequence[Result] = loop.run(engine, plan, *rebuild(copies))
        else:
            results = _attempt(engine, plan, rung, args, kwargs, first)
        outputs = [leaf for result in results for leaf in tensors(result.output) if leaf.requires_grad]
        parameters = [p for p in engine.root.parameters() if p.requires_grad]
        if outputs and parameters:
            torch.autograd.grad([leaf.abs().sum() for leaf in outputs], parameters, allow_unused=True)
        return _now(leaves) - start
    finally:
        sources.restore(before)
        if engine.impure:
            engine.forget()


def _now(leaves: list[Any]) -> float:
    if any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in leaves):
        torch.cuda.synchronize()
    return time.perf_counter()


# ---- what to say
def _where(error: Exception) -> str:
    """What an error says, with the innermost line of the user's."""
    message = first_sentence(str(error)) or type(error).__name__
    place = users_line(error.__traceback__)
    return f"{message}; at {place}" if place else message


def _forced(engine: Engine, plan: Plan, strategy: str, error: Exception | None, where: str) -> Exception:
    kind = ValueError if error is None else RuntimeError
    return kind(
        f'strategy="{strategy}" is not possible for {engine.root._get_name()} ({where}). Use strategy="auto" or strategy="loop", which runs '
        f"{plan.size} passes"
    )


def hooked(root: nn.Module) -> str:
    """Why vmap would hand dead tensors to hooks, which may keep them; "" if there are no hooks."""
    for path, module in root.named_modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values(), *module._backward_hooks.values())
        for hook in hooks if path else ():
            if not str(getattr(hook, "__module__", "")).startswith(("torch.nn.utils", "workbench.")):
                return f"{path} has hooks, which would get tensors that stand for all branches at once"
    return ""


def writes_globals(root: nn.Module) -> str:
    """Why vmap would leave dead tensors in global variables, "" if it would not."""
    classes: list[Any] = [type(module) for module in root.modules()]
    return next(filter(None, map(_global_write, classes)), "")


@functools.cache
def _global_write(cls: Any) -> str:
    """Where a method of the class assigns to a global variable."""
    for _, function in methods_of(cls):
        code = function.__code__
        if globals_assigned(code):
            line = line_name(code.co_filename, code.co_firstlineno)
            return f"{function.__qualname__} writes global variables, where vmap would leave dead tensors; at {line}"
    return ""
