"""One call of a wrapped object: the clones that its branches run on, what they share, and what is kept of what they did."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import (
    NonTensorOutputError,
    NotDealableError,
    OutputShapeError,
    PurityError,
    UnreachedParametersError,
    WorkbenchWarning,
)
from . import loop
from .body import Clone, Result
from .buffers import Buffers
from .combine import Branched, combined
from .ladder import RUNGS, STRATEGIES, Decision, Kind, execute
from .memory import carried, duplicate, put, taken, tensors_in, transfer
from .objects import Key, Objects, refuse_iterators
from .plan import Bank, Index, Plan
from .random import Sources, generators
from .reach import reached
from .state import Attribute, Tree, Values, changed, described, difference, fingerprint, modules, registered, structure
from .tree import flatten, tensors

PURITIES = ("once", "warn", "raise", "allow")


def branch_key(index: Index) -> Key:
    """Where a branch stands; a branch that stands at 0 along an axis is the one that a run without the axis has."""
    return tuple(sorted((name, i) for name, i in index.items() if i))


class Engine:
    """Runs one wrapped object; one call at a time, since the branches share the clones.

    Args:
        root: the wrapped module.
        build: makes a plain structural copy of it, tells which tensors it holds under which slot name, and what a branch calls:
            (copy, id -> slot, buffer slots, method).
        originals: taken-over parameters of the given model that must not be reached any more, by slot.
    """

    def __init__(
        self,
        root: nn.Module,
        build: Callable[[], tuple[nn.Module, dict[int, str], set[str], str]],
        originals: Callable[[], dict[int, str]],
    ) -> None:
        self.root, self._build, self._originals = root, build, originals
        self.lock = threading.RLock()
        self.writes_inputs: bool | None = None  # unknown before the first call
        self.objects = Objects()
        self.impure: frozenset[Attribute] = frozenset()  # the attributes that forward was seen to change
        self.decisions: dict[Kind, Decision] = {}
        self.kind: Kind  # of the last call
        self.memory: dict[Key, Values] = {}  # what those are in branches that have no clone at present
        self._watched: set[bool] = set()  # the modes (training or not) that forward has run in
        self._clones: dict[Key, Clone] = {}
        self._current: set[Key] = set()  # the branches that took part in the last call: their attributes are up to date
        self._kept: Values = {}  # marks of the impure attributes as the last call left them in the wrapped object
        self._last: Clone | None = None
        self._saved: tuple = ({}, frozenset(), set())
        self._tree: Tree = {}
        self._facts: tuple = ()
        self._shape: tuple = ()
        self._modes: list[bool] = []
        self._alive: list[Any] = []
        self._generators: list[Any] = []
        self._checked = False

    # ---- clones
    def clones(self) -> list[Clone]:
        """Those that there are."""
        return list(self._clones.values())

    def clone(self, index: Index) -> Clone:
        """The clone of a branch; `begin` has made it."""
        return self._clones[branch_key(index)]

    def sources(self, leaves: list[Any]) -> Sources:
        """What the model may draw random numbers from."""
        return Sources(leaves, self._generators)

    def begin(self, plan: Plan, alone: bool = False) -> list[Key]:
        """Make what clones are missing, and give each the attributes that its branch is to start from.

        A branch goes on from where its last pass left it; one that had no part in the last call starts from its nearest relative that had, or
        from what the wrapped object shows. What the user has changed there since then holds for all.

        Args:
            plan: of the run.
            alone: only for the first branch, which stands for all.
        """
        keys = [branch_key(index) for index in plan.indices()][: 1 if alone else None]
        self._last = None
        missing = [key for key in keys if key not in self._clones]
        for key in missing:
            self._clones[key] = Clone(*self._build())
        for key in keys:
            for module, mode in zip(self._clones[key].tree.values(), self._modes, strict=True):
                module.training = mode
        if self.impure:
            now = fingerprint(self._tree, self.impure)
            touched = frozenset(name for name in self.impure if now.get(name) != self._kept.get(name))
            starts = {key: self._start(key) for key in keys if key in missing or key not in self._current}
            for key in keys:
                clone = self._clones[key]
                if key in starts:
                    put(carried(starts[key], self._tree, clone.tree), clone.tree)
                transfer(touched, self._tree, clone.tree)
        return keys

    def _start(self, key: Key) -> Values:
        """What the attributes of a branch are to be that has no clone with them: in terms of the wrapped object's modules."""
        if key in self.memory:
            return self.memory[key]
        for i in range(len(key)):
            near = key[:i] + key[i + 1 :]
            if near in self._current:
                return self.memory[near] if near in self.memory else self._taken(self._clones[near])
        return taken(self.impure, self._tree)

    def _taken(self, clone: Clone) -> Values:
        return carried(taken(self.impure, clone.tree), clone.tree, self._tree)

    def remembered(self) -> dict[Key, Values]:
        """What the attributes that forward changes are in each branch."""
        if not self.impure:
            return {}
        own = {key: self._taken(clone) for key, clone in self._clones.items() if key in self._current}
        return {**self.memory, **own}

    def recall(self, branches: dict[Key, Values]) -> None:
        """Take up what `remembered` gave; the wrapped object shows what its first branch has."""
        self.memory, self._current = branches, set(branches)
        self.impure = frozenset(name for values in branches.values() for name in values)
        self._refresh()
        self._kept = fingerprint(self._tree, self.impure)

    def forget(self) -> None:
        """Let go of the clones, after a pass that was none: all is as it was before the call."""
        self.memory, self.impure, self._watched = self._saved[0], self._saved[1], set(self._saved[2])
        self._current = set(self.memory)
        self._clones.clear()

    def _refresh(self) -> None:
        """Use clones that fit the wrapped object as it is now: somebody may have replaced a layer or an attribute since the last call."""
        if self._tree and structure(self._tree, self.impure) == self._facts:
            return
        self._tree = {path: module for path, module in modules(self.root).items() if "@" not in path}
        self._modes = [module.training for module in self._tree.values()]
        if structure(self._tree, self.impure, modes=False) != self._shape:
            self.memory = self.remembered()
            self._current = set(self.memory)
            self._clones.clear()
            self._generators = generators(self._tree)
        self._note()

    def _note(self) -> None:
        """Remember what the wrapped object looks like."""
        self._facts = structure(self._tree, self.impure)
        self._shape = structure(self._tree, self.impure, modes=False)
        self._alive = [  # so that no id is used again
            (
                [value for name, value in module.__dict__.items() if (path, name) not in self.impure],
                *(list(module.__dict__[kind].values()) for kind in ("_parameters", "_buffers", "_modules")),
            )
            for path, module in self._tree.items()
        ]

    # ---- attributes
    @contextmanager
    def watching(self, clone: Clone, plan: Plan, first: bool) -> Iterator[None]:
        """Around a pass: finds out what the first branch changes, and lets the others start from what that was before.

        Raises:
            PurityError: if it changes anything and `plan.purity` is "raise".
            RuntimeError: if forward makes layers, which nothing would train.
        """
        mode = self.root.training
        new = mode not in self._watched
        if not first:
            if plan.purity == "allow" and self._last is not None:
                transfer(self.impure, self._last.tree, clone.tree)
            else:
                transfer(self.impure - self._saved[1], self._tree, clone.tree)
            yield
            self._last = clone
            return
        if not new and not self.impure:
            yield
            self._last = clone
            return
        private = self._privately(clone) if new else {}
        before, held = fingerprint(clone.tree), registered(clone.tree)
        words = described(clone.tree) if plan.purity in ("warn", "raise") else {}
        yield
        self._last = clone
        found = changed(before, fingerprint(clone.tree))
        put({name: value for name, value in private.items() if name not in found}, clone.tree)
        _refuse_layers(self.root, held, registered(clone.tree))
        if words and found:
            _complain(self.root, plan.purity, difference(words, described(clone.tree, found), found), new)
        self.impure |= found
        self._watched.add(mode)

    def _privately(self, clone: Clone) -> Values:
        """Give a clone copies of all unregistered tensors, since it may write into them; returns the attributes as they were."""
        places = tensors_in(clone.tree)
        put(carried(places, clone.tree, clone.tree), clone.tree)
        return places

    def _keep(self, plan: Plan, results: list[Result], keys: set[Key]) -> None:
        """Let the wrapped object end as if it had been called once."""
        buffers = Buffers()
        for index, result in zip(plan.indices(), results, strict=True):
            for slot, value in result.buffers.items():
                name, row = plan.rules[slot].home(index) if slot in plan.rules else (slot, None)
                buffers.add(name, row, value.detach())
        buffers.merge(plan.bank)
        if self.impure:
            first = self._clones[branch_key(next(plan.indices()))]
            source = self._last if plan.purity == "allow" and self._last is not None else first
            transfer(self.impure, source.tree, self._tree)
            self._kept = fingerprint(self._tree, self.impure)
            self.memory, self._current = {}, keys
            self._note()

    # ---- running
    def run(
        self, plan: Plan, args: tuple, kwargs: dict[str, Any], strategy: str = "auto"
    ) -> tuple[Branched, list[Result]]:
        """Run all branches of a plan.

        Args:
            plan: what differs between the branches.
            args, kwargs: the inputs, the same for all branches unless the plan deals their rows.
            strategy: "auto", the name of a rung, or "tune".

        Returns:
            The outputs with the axes of the plan in front, and the single results for who needs their taps.
        """
        with self.lock:
            self._refresh()
            if plan.size > 1:
                refuse_iterators(flatten((args, kwargs))[0])
            self._saved = self.remembered(), self.impure, set(self._watched)
            try:
                results = execute(self, plan, args, kwargs, strategy)
                # before anything is kept, since it may find that the branches do not fit together
                branched = combined(plan, results)
            except BaseException:
                self.forget()
                raise
            if plan.keep_state:
                alone = self.decisions[self.kind].rung in ("vmap", "rescue")
                keys = [branch_key(index) for index in plan.indices()]
                self._keep(plan, results, set(keys[: 1 if alone else None]))
                if plan.size > 1 and not alone:
                    columns = zip(*(flatten(result.output)[0] for result in results), strict=True)
                    self.objects.kept(keys, columns)
            elif self.impure:
                self.forget()
            if not self._checked:
                self._check_reach(plan, results, args, kwargs)
        return branched, results

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
        # what comes in may have been computed by the given model itself
        before = reached([leaf for leaf in tensors((args, kwargs)) if leaf.requires_grad])
        stale = sorted(name for key, name in self._originals().items() if key in found and key not in before)
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
        sources = self.sources(leaves)
        before = sources.all()
        self._saved = self.remembered(), self.impure, set(self._watched)
        try:
            with torch.inference_mode(False), torch.enable_grad():
                copies = rebuild([duplicate(leaf) if not isinstance(leaf, Tensor) else leaf.detach().clone() for leaf in leaves])
                return loop.run(self, plan, *copies)[0]
        finally:
            sources.restore(before)
            if self.impure:
                self.forget()


def _refuse_layers(root: nn.Module, before: dict[Attribute, tuple], after: dict[Attribute, tuple]) -> None:
    for (path, kind), names in after.items():
        if new := [name for name in names if name not in before.get((path, kind), ())]:
            what = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "layer"}[kind]
            name = f"{path}.{new[0]}" if path else new[0]
            raise RuntimeError(
                f"forward of {root._get_name()} made the {what} {name!r}, which no optimizer, state_dict or voter would know; call the model "
                "once with real inputs before wrapping it"
            )


def _complain(root: nn.Module, purity: str, lines: str, new: bool) -> None:
    message = f"forward of {root._get_name()} changes attributes of the model:\n{lines}"
    if purity == "raise":
        raise PurityError(f'{message}\nReturn them as outputs, or wrap with purity="once" (they end as if called once) or "allow"')
    if new:
        warnings.warn(f"{message}\nThey end as if the model had been called once", WorkbenchWarning, stacklevel=2)


__all__ = [
    "PURITIES",
    "RUNGS",
    "STRATEGIES",
    "Branched",
    "Engine",
    "NonTensorOutputError",
    "NotDealableError",
    "OutputShapeError",
    "UnreachedParametersError",
]
