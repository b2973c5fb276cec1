"""From a plan to the outputs of all branches: pick an executor, keep the clones, merge the state once."""

from __future__ import annotations

import dis
import logging
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from . import loop, random, state, vmapped
from .body import Clone, Result
from .plan import Bank, Plan
from .reach import reached
from .tree import flatten, paths, tensors

log = logging.getLogger("workbench")
STRATEGIES = ("auto", "loop", "vmap")


class NonTensorOutputError(TypeError):
    """A part of the output that is no tensor differs between the branches, so there is no one value to return."""


class OutputShapeError(RuntimeError):
    """A part of the output has another shape in another branch, so that the branches can't be averaged."""


class NotDealableError(RuntimeError):
    """The rows of the output do not answer the rows of the input one by one."""


class UnreachedParametersError(RuntimeError):
    """The branches would not differ where they should: the model uses other tensors than those that a wrapper has taken over."""


class Branched:
    """The outputs of all branches: one tree whose tensor leaves have the axes of the run in front.

    Args:
        axes: names of the leading axes, outermost first.
        leaves: the leaves of the output; tensors are [*sizes, ...].
        rebuild: puts as many leaves into the shape of the model's output.
    """

    def __init__(self, axes: tuple[str, ...], leaves: list[Any], rebuild: Callable[[list[Any]], Any]) -> None:
        self.axes, self.leaves, self.rebuild = axes, leaves, rebuild


class Engine:
    """Runs one wrapped object; one call at a time, since the branches share the clones.

    Args:
        root: the wrapped module.
        build: makes a plain structural copy of it, and tells which tensors it holds under which slot name: (copy, id -> slot, buffer slots).
        originals: taken-over parameters of the given model that must not be reached any more, by slot.
    """

    def __init__(
        self,
        root: nn.Module,
        build: Callable[[], tuple[nn.Module, dict[int, str], set[str]]],
        originals: Callable[[], dict[int, str]],
    ) -> None:
        self.root, self._build, self._originals = root, build, originals
        self.lock = threading.RLock()
        self.writes_inputs: bool | None = None  # unknown before the first call
        self.impure: dict[bool, frozenset[state.Attribute]] = {}  # by mode: the attributes that forward changes
        self.decisions: dict[tuple, tuple[str, str]] = {}  # by kind of call: the executor, and why
        self._sets: dict[tuple, tuple[list[Clone], list[Any]]] = {}
        self._clones: list[Clone] = []
        self._tree: dict[str, nn.Module] = {}
        self._checked = False

    # ---- clones
    def mode(self) -> bool:
        return self.root.training

    def clone(self, k: int) -> Clone:
        """The k-th clone; made when it is first asked for."""
        while len(self._clones) <= k:
            self._clones.append(Clone(*self._build()))
        return self._clones[k]

    def _refresh(self) -> None:
        """Use the clones that fit the wrapped object as it is now: somebody may have replaced a layer or an attribute since the last call."""
        ignore = frozenset().union(*self.impure.values()) if self.impure else frozenset()
        facts = state.structure(self._tree, ignore) if self._tree else None
        if facts is None or facts not in self._sets:
            self._tree = {path: module for path, module in state.modules(self.root).items() if "@" not in path}
            facts = state.structure(self._tree, ignore)
        if facts not in self._sets:
            if len(self._sets) >= 4:  # training and evaluation mode, and a change or two
                self._sets.pop(next(iter(self._sets)))
            alive = [list(module.__dict__.values()) for module in self._tree.values()]  # so that no id is used again
            self._sets[facts] = ([], alive)
        self._clones = self._sets[facts][0]

    def sync(self, clone: Clone) -> None:
        """Give a clone the attributes that forward changes, as the wrapped object has them now."""
        state.transfer(self.impure.get(self.mode(), frozenset()), self._tree, clone.tree)

    @contextmanager
    def attributes(self, k: int) -> Iterator[None]:
        """Around a pass on clone k: attributes start as the wrapped object has them; what the first clone changes is found out."""
        clone = self.clone(k)
        self.sync(clone)
        watch = k == 0 and self.mode() not in self.impure
        before = state.fingerprint(clone.tree) if watch else {}
        yield
        if watch:
            self.impure[self.mode()] = state.changed(before, state.fingerprint(clone.tree))

    def keep_attributes(self) -> None:
        """Let the wrapped object end as if it had been called once: with what the first branch left."""
        if self._clones:
            state.transfer(self.impure.get(self.mode(), frozenset()), self._clones[0].tree, self._tree)

    # ---- running
    def run(
        self, plan: Plan, args: tuple, kwargs: dict[str, Any], strategy: str = "auto"
    ) -> tuple[Branched, list[Result]]:
        """Run all branches of a plan.

        Args:
            plan: what differs between the branches.
            args, kwargs: the inputs, the same for all branches unless the plan deals their rows.
            strategy: "auto", "loop" or "vmap".

        Returns:
            The outputs with the axes of the plan in front, and the single results for who needs their taps.
        """
        with self.lock:
            self._refresh()
            results = self._execute(plan, args, kwargs, strategy)
            # before anything is kept, since it may find that the branches do not fit together
            branched = combined(plan, results)
            if plan.keep_state:
                buffers = state.Buffers()
                for index, result in zip(plan.indices(), results, strict=True):
                    for slot, value in result.buffers.items():
                        name, row = plan.rules[slot].home(index) if slot in plan.rules else (slot, None)
                        buffers.add(name, row, value.detach())
                buffers.merge(plan.bank)
                self.keep_attributes()
                self._refresh_keys()
            if not self._checked:
                self._check_reach(plan, results, args, kwargs)
        return branched, results

    def _refresh_keys(self) -> None:
        """File the clones under what the wrapped object looks like after the call, or its own changes would throw them away."""
        if any(self.impure.values()):
            ignore = frozenset().union(*self.impure.values())
            facts = state.structure(self._tree, ignore)
            if facts not in self._sets:
                alive = [list(module.__dict__.values()) for module in self._tree.values()]
                self._sets[facts] = (self._clones, alive)

    def _execute(self, plan: Plan, args: tuple, kwargs: dict[str, Any], strategy: str) -> list[Result]:
        leaves = tensors((args, kwargs))
        device = next((leaf.device.type for leaf in leaves), "cpu")
        autocast = torch.is_autocast_enabled(device)
        few = max((leaf.shape[0] for leaf in leaves if leaf.dim()), default=1) <= 2
        key = (
            strategy,
            self.mode(),
            torch.is_grad_enabled(),
            plan.axes,
            device,
            autocast,
            plan.loop_only,
            plan.dealt,
            few,
        )
        first = key not in self.decisions
        if first:
            self.decisions[key] = self._first_rung(plan, strategy, device, autocast, few)
        if self.decisions[key][0] == "vmap":
            return self._try_vmap(key, first, plan, args, kwargs, strategy)
        return loop.run(self, plan, args, kwargs)

    def _first_rung(self, plan: Plan, strategy: str, device: str, autocast: bool, few: bool) -> tuple[str, str]:
        if plan.size == 1:
            return "loop", "there is one branch"
        loop_only = plan.loop_only
        if any(writes_globals(type(module)) for module in self._tree.values()):
            loop_only = "the model writes global variables, where vmap would leave dead tensors"
        if strategy != "auto":
            if strategy == "vmap" and loop_only:
                raise ValueError(f'strategy="vmap" is not possible here: {loop_only}')
            return strategy, f'strategy="{strategy}"'
        if loop_only or plan.dealt:
            return "loop", loop_only or "each row is answered by one branch"
        if autocast and device == "cpu":
            return "loop", "under autocast vmap computes in other dtypes"
        if plan.shares_trunk:
            return "vmap", "the branches share a trunk, which vmap computes once"
        if device != "cpu":
            return "vmap", "one launch for all branches"
        if few and plan.size >= 16:
            return "vmap", "few rows and many branches"
        return "loop", "on the CPU a pass for each branch is as fast as all at once"

    def _try_vmap(
        self, key: tuple, first: bool, plan: Plan, args: tuple, kwargs: dict[str, Any], strategy: str
    ) -> list[Result]:
        """Under vmap; if that refuses the model, everything is put back and from then on the loop runs.

        The first call of a kind works on copies of the inputs, since a model that writes into them must be found out.
        """
        leaves, rebuild = flatten((args, kwargs))
        devices = random.devices(leaves)
        before = random.state(devices)
        given = [leaf.clone() if first and isinstance(leaf, Tensor) else leaf for leaf in leaves]
        versions = loop.versions(given)
        impure = dict(self.impure)
        try:
            results = vmapped.run(self, plan, *rebuild(given))
            if first and loop.versions(given) != versions:
                raise RuntimeError("the model writes into its inputs")
            return results
        except Exception as error:
            if strategy == "vmap" or (not first and loop.versions(given) != versions):
                del self.decisions[key]
                raise
            self._clones.clear()  # the failed pass may have left dead tensors in its clone
            self.impure = impure
            random.restore(before, devices)
            reason = f"vmap refused the model ({_where(error)})"
            self.decisions[key] = ("loop", reason)
            log.info("%s; running %d passes in a loop instead. strategy='loop' silences this.", reason, plan.size)
        return loop.run(self, plan, args, kwargs)

    def _check_reach(self, plan: Plan, results: list[Result], args: tuple, kwargs: dict[str, Any]) -> None:
        """Once: do the outputs depend on the tensors that the methods own, and on none of those that they have replaced?"""
        rules = {slot: rule for slot, rule in plan.rules.items() if rule.axes()}
        index = list(plan.indices())[-1]
        if not rules or not any(index.values()):
            return
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return  # inside a function transform the graph is not the one that is looked at here
        last = results[-1]
        if not torch.is_grad_enabled():
            last = self._with_gradients(
                replace(plan, axes=(), fixed=index, dealt="", bank=Bank(plan.bank.get)), args, kwargs
            )
        outputs = [leaf for leaf in tensors(last.output) if leaf.requires_grad]
        if not outputs:
            return
        self._checked = True
        found = reached(outputs)
        stale = sorted(name for key, name in self._originals().items() if key in found)
        if stale:
            raise UnreachedParametersError(
                f"the model uses {', '.join(stale[:3])} of the model that was given, by a reference that does not move "
                "along (a partial function or an object that holds the tensor): the branches would not differ there. Reach it through "
                "the module, as self.layer.weight"
            )
        owned = {id(plan.bank.get(name)) for rule in rules.values() for name in rule.names(index)}
        if owned and not owned & found:
            raise UnreachedParametersError(
                f"no output depends on {', '.join(sorted(rules)[:4])}{' ...' if len(rules) > 4 else ''}, which should differ between the "
                "branches: these layers did not run, or their result is detached. Choose more layers"
            )

    def _with_gradients(self, plan: Plan, args: tuple, kwargs: dict[str, Any]) -> Result:
        """One branch once more, with gradients, for looking only."""
        leaves, rebuild = flatten((args, kwargs))
        devices = random.devices(leaves)
        before = random.state(devices)
        try:
            with torch.inference_mode(False), torch.enable_grad():
                copies = rebuild([leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves])
                return loop.run(self, plan, *copies)[0]
        finally:
            random.restore(before, devices)


_writing: dict[type, bool] = {}


def writes_globals(cls: type) -> bool:
    """Whether a method of the class assigns to a global variable."""
    if cls not in _writing:
        functions = [
            getattr(item, "__func__", item)
            for base in cls.__mro__
            if not base.__module__.startswith("torch.")
            for item in vars(base).values()
        ]
        _writing[cls] = any(
            step.opname == "STORE_GLOBAL"
            for function in functions
            if isinstance(function, types.FunctionType)
            for step in dis.get_instructions(function)
        )
    return _writing[cls]


def _where(error: Exception) -> str:
    """The message of an error in one line, with the innermost line outside torch and this package."""
    message = str(error).strip().split("\n")[0][:160]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if (
            "/torch/" not in frame.filename
            and "/workbench/" not in frame.filename
            and not frame.filename.startswith("<")
        ):
            return f"{message}; at {frame.filename}:{frame.lineno}"
    return message


def combined(plan: Plan, results: list[Result]) -> Branched:
    """Stack the branches' outputs along the axes of the plan; dealt rows go back to their places."""
    axes = plan.axes
    trees = [flatten(result.output) for result in results]
    rebuild = trees[0][1]
    if len({len(leaves) for leaves, _ in trees}) > 1:
        raise NonTensorOutputError(
            f"the output has {sorted({len(leaves) for leaves, _ in trees})} parts, depending on the branch"
        )
    if plan.dealt:
        axes = tuple(axis for axis in axes if axis.name != plan.dealt)
    sizes = [axis.size for axis in axes]
    order = None
    if plan.dealt:
        order = torch.argsort(torch.cat(plan.rows))
    beside = [axis.name for axis in axes if axis.own_first]
    equals = [k for k, index in enumerate(plan.indices()) if not any(index[name] for name in beside)]
    columns: list[Any] = []
    for i, items in enumerate(zip(*(leaves for leaves, _ in trees), strict=True)):
        if not isinstance(items[0], Tensor):
            columns.append(_agreed([items[k] for k in equals], results[0].output, i))
        elif order is None:
            columns.append(_stack(items, sizes, results[0].output, i))
        else:
            columns.append(_gathered(items, plan, sizes, order))
    return Branched(tuple(axis.name for axis in axes), columns, rebuild)


def _stack(items: tuple[Tensor, ...], sizes: list[int], output: Any, i: int) -> Tensor:
    if len(items) == 1:
        return items[0].reshape((*sizes, *items[0].shape))
    shapes = {tuple(item.shape) for item in items}
    if len(shapes) > 1:
        raise OutputShapeError(
            f"{paths(output)[i]} has other shapes in other branches: {sorted(shapes)}; return a fixed shape"
        )
    return torch.stack(items).reshape((*sizes, *items[0].shape))


def _gathered(items: tuple[Tensor, ...], plan: Plan, sizes: list[int], order: Tensor) -> Tensor:
    """Rows answered branch by branch, back in the order of the batch; other axes go to the front."""
    position = next(i for i, axis in enumerate(plan.axes) if axis.name == plan.dealt)
    grouped: dict[tuple, list[Tensor]] = {}
    for index, item in zip(plan.indices(), items, strict=True):
        if not item.dim() or item.shape[0] != len(plan.rows[index[plan.dealt]]):
            raise NotDealableError
        key = tuple(index[axis.name] for i, axis in enumerate(plan.axes) if i != position)
        grouped.setdefault(key, []).append(item)
    if len({tuple(item.shape[1:]) for item in items}) > 1:
        raise NotDealableError
    stacked = torch.stack([torch.cat(parts).index_select(0, order.to(parts[0].device)) for parts in grouped.values()])
    return stacked.reshape((*sizes, *stacked.shape[1:]))


def _agreed(items: list[Any], output: Any, i: int) -> Any:
    first = items[0]
    for item in items[1:]:
        same = item is first
        if not same:
            try:
                same = type(item) is type(first) and bool(item == first)
            except Exception:  # values that cannot be compared are taken as given by the first branch
                same = True
        if not same and isinstance(first, bool | int | float | complex | str):
            raise NonTensorOutputError(
                f"{paths(output)[i]} is {first!r} in one branch and {item!r} in another; return it as a tensor, or leave it out of the output"
            )
    return first
