"""Dispatch: choose the executor that runs a call.

Executors are ordered from fast to universal. Each either gives the right result or refuses, and the choice is kept for calls of the same kind.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..introspect.source_lines import first_sentence, users_line
from .attempts import Executor, SpoiledInputsError, attempt, seconds
from .clones import Clones
from .effects.outside import outside_undone
from .executors import loop, replay, vmap
from .executors.branched_tensors import heads_on_trunks
from .obstacles import obstacle_to_replay, obstacle_to_vmap
from .plan import Axis, Plan, Shared, Stacked, differ_in_length
from .rank_one import LAYERS, SMALL
from .request import Request
from .results import Result
from .surroundings import interruption

log = logging.getLogger("workbench")


# A new executor is one more row. If several can run a call, they are tried in this order.
EXECUTORS: dict[str, Executor] = {
    "vmap": Executor(vmap.run, obstacle_to_vmap, at_once=True, needs_rules=True),
    "rescue": Executor(vmap.rescued, obstacle_to_vmap, at_once=True),
    "replay": Executor(replay.run, obstacle_to_replay, trunk_only=True),
    "loop": Executor(loop.run),  # last, since it runs everything
}
STRATEGIES = ("auto", *EXECUTORS, "tune")
_SMALL_PASS = 2**23  # multiplications per pass below which Python's overhead takes longer than the computation
_CACHED = 2**17  # activations of a layer, of all branches that run at once, up to which a CPU keeps them in its cache
# multiplications of a branch up to which convolutions on a GPU run for all branches at once: in full precision, and on tensor cores, where the
# limit lies between a ResNet-50 at 8 images of 224 pixels and at 64 (H100, bfloat16)
_EXACT_CONVOLUTIONS, _LOW_CONVOLUTIONS = 2**35, 2**44
_LIGHT = 2**17  # weights of a model above which three models wait for memory, at once or one after another
LITTLE = "each of the branches is little work"
HEADS = "each model's heads share its trunk, which is computed once"
# modules without a batching rule in plain vmap
_NO_BATCHING_RULE = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, nn.TransformerEncoderLayer)


class CallKind(NamedTuple):
    """Key of the calls that share a decision about their executor."""

    strategy: str
    training: bool
    gradients: bool
    axes: tuple[Axis, ...]
    device: str
    autocast: bool
    dealt: bool
    loop_only: str  # reason why the branches must run one after another
    rows: int  # 0 if each pass is little work (on a CPU, of enough of them), else 1; with "tune" the bit length of the number of rows
    hooks: int  # number of hooks of modules, which can be added between calls
    parts: int = 1  # number of passes, each of some branches, in which activations stay in the cache


@dataclass
class Decision:
    """Decision about how calls of one kind run.

    Args:
        executor: name of the executor.
        reason: why it was chosen.
        fallbacks: executors to try if it refuses.
        branches: number of branches.
        shared: whether the branches share a trunk.
        refused: executors that have refused, with their error messages.
        chunk: number of branches of the outermost axis that run at once, None: as set by the wrapper.
        short_of_memory: whether memory was too small for more.
        by_model: whether all heads of one model run at once, then those of the next model.
    """

    executor: str
    reason: str
    fallbacks: tuple[str, ...]
    branches: int
    shared: bool
    refused: dict[str, str] = field(default_factory=dict)
    chunk: int | None = None
    short_of_memory: bool = False
    by_model: bool = False


class Dispatcher:
    """Runs the calls of one wrapped object, each by the executor for its kind.

    Args:
        clones: clones of the wrapped object.
    """

    def __init__(self, clones: Clones) -> None:
        self.clones, self.root = clones, clones.root
        self.decisions: dict[CallKind, Decision] = {}
        self.kind: CallKind  # kind of the last call
        self.in_one_pass = False  # whether all branches of the last call ran in one pass

    def run(self, request: Request, strategy: str) -> Sequence[Result]:
        """Run a request by the executor for its kind of call. If it refuses, its side effects are undone and the next one is tried."""
        plan = request.plan
        kind = self.kind = self._kind_of(request, strategy)
        if kind.autocast:
            request = replace(request, autocast=kind.device)
        cached = self.decisions.get(kind)
        decision = cached or self._decide(request, kind)
        first = cached is None
        refusal: Exception
        handled = sys.exc_info()[1]
        while decision.executor != "loop":
            try:
                if first or decision.chunk is not None:
                    chunked = plan if decision.chunk is None else replace(plan, chunk=decision.chunk)
                    results = attempt(EXECUTORS[decision.executor], replace(request, plan=chunked, first=first))
                else:
                    results = attempt(EXECUTORS[decision.executor], request)
                self._store(kind, decision)
                self.in_one_pass = EXECUTORS[decision.executor].at_once and (decision.chunk or plan.chunk) is None
                return results
            except SpoiledInputsError as spoiled:
                raise spoiled.error from None
            except torch.OutOfMemoryError as error:
                if (fewer := _smaller_chunk(plan, decision)) is not None:
                    reason = f"memory was too small for more than {fewer} at once"
                    decision = replace(decision, reason=reason, chunk=fewer, short_of_memory=True)
                    continue  # drops the error, whose traceback holds the tensors of the failed pass
                refusal, where = error, _describe_error(error)
            except Exception as error:
                if (interrupt := interruption(error, handled)) is not None:
                    raise interrupt from None  # the error is only a consequence of the interrupt
                refusal, where = error, _describe_error(error)
            if not decision.fallbacks:
                self.decisions.pop(kind, None)
                if not isinstance(refusal, torch.OutOfMemoryError) and (cause := _error_of_loop(request)) is not None:
                    raise cause
                raise _strategy_error(self.root, plan, strategy, refusal, where) from refusal
            decision = _next_decision(decision, where)
            first = True
        results = loop.run(request)
        self._store(kind, decision)
        self.in_one_pass = False
        return results

    def _kind_of(self, request: Request, strategy: str) -> CallKind:
        """Return the kind of a call."""
        plan = request.plan
        leaves = [leaf for leaf in request.flat[0] if isinstance(leaf, Tensor)]
        device = next((leaf.device.type for leaf in leaves), "cpu")
        autocast = (device == "cpu" or torch.amp.is_autocast_available(device)) and torch.is_autocast_enabled(device)
        parts = 1
        if torch.compiler.is_compiling():
            # torch.export would turn a comparison into a constraint on the number of rows
            rows, is_small = 3, device != "cpu"
        else:
            n_weights, rows, is_tabular = self.clones.n_weights, _n_rows(leaves), self._is_tabular(leaves)
            is_small = rows <= 2 or self.is_little(leaves)
            if is_small and (models := _n_models(plan)) < 4:
                is_small = models == 3 and is_tabular and n_weights <= _LIGHT and _takes_three_at_once(request)
            if device != "cpu":
                is_small = not self._convolves_slowly(plan, leaves, autocast)
            # noise is drawn at once, whatever the number of rows
            elif is_tabular and is_small and not request.training and not plan.interventions and plan.chunk is None:
                parts = 1 + plan.size * rows * self.clones.width // _CACHED
                is_small = parts == 1 or plan.axes[0].size >= 3 * parts  # fewer branches at once save too little
        return CallKind(
            strategy,
            request.training,
            torch.is_grad_enabled(),
            plan.axes,
            device,
            autocast,
            bool(plan.dealt),
            plan.loop_only,
            int(rows).bit_length() if strategy == "tune" else int(not is_small),
            self.clones.n_hooks,
            parts if is_small else 1,
        )

    def _is_tabular(self, leaves: list[Tensor]) -> bool:
        return self.clones.n_weights > 0 and all(leaf.dim() <= 2 and leaf.is_floating_point() for leaf in leaves)

    def is_little(self, leaves: list[Tensor]) -> bool:
        """Return whether the pass of one branch, of rows of numbers through linear layers, takes no longer than Python's overhead."""
        return self._is_tabular(leaves) and _n_rows(leaves) * self.clones.n_weights <= _SMALL_PASS

    def _convolves_slowly(self, plan: Plan, leaves: list[Tensor], autocast: bool) -> bool:
        """Return whether grouped convolutions on a GPU, one group for each branch, are slower than separate ones, which large ones are."""
        kernels = self.clones.kernels
        size = sum(size for slot, size in kernels.items() if isinstance(plan.rules.get(slot), Stacked))
        images = [leaf for leaf in leaves if leaf.dim() > 2] if size else []
        if not images:
            return False
        # at most so many multiplications, since later layers have fewer positions
        multiplications = size * max(len(image) * image.shape[2:].numel() for image in images)
        dtype = images[0].dtype
        exact = dtype is torch.float64 or (dtype is torch.float32 and not torch.backends.cudnn.allow_tf32)
        return multiplications > (_EXACT_CONVOLUTIONS if exact and not autocast else _LOW_CONVOLUTIONS)

    def _store(self, kind: CallKind, decision: Decision) -> None:
        """Store a decision and log its refusals once.

        They are not logged earlier, since an error that the last executor raises as well is a mistake in the model or the call.
        """
        if decision.short_of_memory and decision.executor != "loop" and self.decisions.get(kind) is not decision:
            log.warning(
                "%s: memory was too small for all %d branches in one pass, so %d run at once. chunk=%d silences this",
                self.root._get_name(),
                decision.branches,
                decision.chunk,
                decision.chunk,
            )
        if decision.refused and self.decisions.get(kind) is not decision:
            log.info(
                '%s: %s; %d branches run on "%s" instead. strategy="%s" silences this',
                self.root._get_name(),
                decision.reason,
                decision.branches,
                decision.executor,
                decision.executor,
            )
        self.decisions[kind] = decision

    # ---- choice of the executor
    def _decide(self, request: Request, kind: CallKind) -> Decision:
        plan = request.plan
        executors, reason = self._candidates(plan, kind)
        if kind.strategy in EXECUTORS and plan.size > 1:
            obstacle = _obstacle(self.root, plan, kind.strategy)
            if obstacle and not plan.dealt:
                raise _strategy_error(self.root, plan, kind.strategy, None, obstacle)
            # with dealt rows, which the user did not request, those of "auto" are tried instead
            if not obstacle:
                executors = (kind.strategy, "loop") if plan.dealt and kind.strategy != "loop" else (kind.strategy,)
                reason = f'strategy="{kind.strategy}"'
        decision = Decision(executors[0], reason, executors[1:], plan.size, plan.shares_trunk)
        if executors[0] != "loop" and reason == HEADS:
            decision = replace(decision, chunk=1, by_model=True)
        elif executors[0] != "loop" and reason == LITTLE and kind.parts > 1:
            decision = replace(decision, chunk=math.ceil(plan.axes[0].size / kind.parts))
        if kind.strategy == "tune" and plan.size > 1:
            return self._tune(request, decision)
        return decision

    def _candidates(self, plan: Plan, kind: CallKind) -> tuple[tuple[str, ...], str]:
        """Return the executors to try, in order, and the reason for the first one."""
        possible = _possible_executors(self.root, plan)
        if possible == ("loop",):
            return possible, _obstacle(self.root, plan, next(iter(EXECUTORS)))
        misses_rule = _misses_batching_rule(self.root, plan)
        executors = tuple(
            name
            for name in possible
            if not (EXECUTORS[name].trunk_only and not plan.shares_trunk)
            and not (EXECUTORS[name].needs_rules and misses_rule)
        )
        if plan.shares_trunk:
            reason = "the branches share a trunk, which is computed once"
            if plan.chunk is not None and plan.chunk < plan.axes[0].size and not (kind.training or kind.gradients):
                # "vmap" would compute the trunk once per chunk
                executors = tuple(sorted(executors, key=lambda name: name != "replay"))
                return executors, f"{reason}, also with chunk={plan.chunk}"
            return executors, reason
        if kind.device != "cpu" and kind.rows:
            return ("loop",), "separate convolutions of this size are faster than grouped ones"
        if kind.device != "cpu":
            return executors, "one launch for all branches"
        if not kind.rows:
            return executors, LITTLE
        if kind.dealt and _n_models(plan) >= 4 and _all_factored(self.clones, plan):
            return executors, "few rows for each branch, and all read the same weights"
        if heads_on_trunks(plan) and len(possible) > 1:
            misses_rule = _misses_batching_rule(self.root, plan, plan.axes[1].name)
            return tuple(name for name in ("vmap", "rescue", "loop") if not (name == "vmap" and misses_rule)), HEADS
        return ("loop",), "on the CPU a pass for each branch is as fast as all at once"

    def _tune(self, request: Request, decision: Decision) -> Decision:
        """Time every executor that can run the plan on copies of these inputs, backward pass included, and choose the fastest."""
        times: dict[str, float] = {}
        refused: dict[str, str] = {}
        tried = replace(request, receiver=None)
        with outside_undone(self.root, request.plan, request.flat[0]) as watch:
            with watch:  # only in a pass that is not timed
                seconds(EXECUTORS["loop"], replace(tried, first=True))
            for name in _possible_executors(self.root, request.plan):
                if name == "rescue" and "vmap" in times:
                    continue  # it does the same work as vmap and more
                try:
                    times[name] = min(seconds(EXECUTORS[name], replace(tried, first=k == 0)) for k in range(3))
                except Exception as error:
                    if name == "loop":
                        raise
                    refused[name] = _describe_error(error)
        best = min(times, key=lambda name: times[name])
        reason = "measured " + ", ".join(f"{name} {1e3 * value:.2f} ms" for name, value in times.items())
        fallbacks = tuple(name for name in ("loop",) if name != best)
        return Decision(best, reason, fallbacks, decision.branches, decision.shared, refused)


def _n_rows(leaves: list[Tensor]) -> int:
    return max((leaf.size(0) for leaf in leaves if leaf.dim()), default=1)


def _n_models(plan: Plan) -> int:
    """Return the number of models. Risk heads are not counted: a prediction must draw the same random numbers with and without its risk."""
    return math.prod(axis.size for axis in plan.axes if not axis.own_first)


def _takes_three_at_once(request: Request) -> bool:
    """Return whether even three models of linear layers answer faster at once, which is so for predictions of whole copies only.

    Noise would draw other random numbers. Training, autocast, half precision, risk heads and rank-one factors can take longer under vmap.
    """
    plan = request.plan
    return (
        not (request.training or torch.is_autocast_enabled("cpu") or plan.dealt)
        and plan.chunk is None
        and all(leaf.dtype.itemsize >= 4 for leaf in request.flat[0] if isinstance(leaf, Tensor))
        and all(intervention.only_records for intervention in plan.interventions)
        and all(isinstance(rule, Shared | Stacked) for rule in plan.rules.values())
    )


def _next_decision(decision: Decision, where: str) -> Decision:
    executor, *fallbacks = decision.fallbacks
    return replace(
        decision,
        executor=executor,
        reason=f"{decision.executor} refused the model ({where})",
        fallbacks=tuple(fallbacks),
        refused={**decision.refused, decision.executor: where},
    )


def _smaller_chunk(plan: Plan, decision: Decision) -> int | None:
    """Return a smaller number of branches to run at once after running out of memory, or None if there is none."""
    if not EXECUTORS[decision.executor].at_once or plan.axes[0].randomness == "same":
        return None
    present = min(decision.chunk or plan.chunk or plan.axes[0].size, plan.axes[0].size)
    return present // 2 or None


def _possible_executors(root: nn.Module, plan: Plan) -> tuple[str, ...]:
    """Return the executors that may be able to run the plan."""
    return tuple(name for name in EXECUTORS if not _obstacle(root, plan, name))


def _obstacle(root: nn.Module, plan: Plan, name: str) -> str:
    """Return the reason why an executor cannot run the plan, "" if none is known."""
    if name == "loop":
        return ""
    if plan.size == 1:
        return "there is one branch"
    if plan.loop_only:
        return plan.loop_only
    if differ_in_length(plan.rows):
        return "each row is answered by one branch, and some branches have more rows than others"
    return EXECUTORS[name].obstacle(root, plan)


def _misses_batching_rule(root: nn.Module, plan: Plan, axis: str = "") -> bool:
    """Return whether tensors of a module without a batching rule differ between the branches, or along `axis` if it is given."""
    owners = {
        slot.rpartition(".")[0] for slot, rule in plan.rules.items() if (axis in rule.axes() if axis else rule.axes())
    }
    return any(
        isinstance(module, _NO_BATCHING_RULE) and any(owner == path or owner.startswith(f"{path}.") for owner in owners)
        for path, module in root.named_modules()
    )


def _all_factored(clones: Clones, plan: Plan) -> bool:
    """Return whether all rank-one weights belong to layers that can apply the factors without forming the product, and some are large."""
    slots = [slot for slot, rule in plan.rules.items() if rule.factors and slot not in clones.dense_slots]
    owners = [clones.root.get_submodule(slot.rpartition(".")[0]) for slot in slots]
    large = any(plan.bank.get(slot).numel() >= SMALL for slot in slots)
    # the wrapped object itself has a generated class, which keeps the class of the user's model
    return large and all(getattr(type(owner), "_plain_class", type(owner)) in LAYERS for owner in owners)


class _RanError(Exception):
    """Raised after a successful run of the loop, so that `attempt` undoes its side effects."""


def _error_of_loop(request: Request) -> Exception | None:
    """Return the error that the loop raises too, which is a mistake in the model or the call; None if the loop succeeds."""
    began = False

    def run_and_forget(tried: Request) -> Sequence[Result]:
        nonlocal began
        began = True
        loop.run(tried)
        raise _RanError

    try:
        with outside_undone(request.clones.root, request.plan, request.flat[0]) as watch, watch:
            attempt(Executor(run_and_forget), replace(request, first=True))
    except _RanError:
        return None
    except Exception as error:
        return error if began else None
    return None


# ---- messages
def _describe_error(error: Exception) -> str:
    """Describe an error by its first sentence and the innermost line of the user's code."""
    message = first_sentence(str(error)) or type(error).__name__
    place = users_line(error.__traceback__)
    return f"{message}; at {place}" if place else message


def _strategy_error(root: nn.Module, plan: Plan, strategy: str, error: Exception | None, where: str) -> Exception:
    cls = ValueError if error is None else RuntimeError
    return cls(
        f'strategy="{strategy}" is not possible for {root._get_name()} ({where}). Use strategy="auto" or strategy="loop", which runs '
        f"{plan.size} passes"
    )
