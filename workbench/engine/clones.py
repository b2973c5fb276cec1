"""Clones of a wrapped object, one per branch, and the attributes that forward changes in them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ..errors import PurityError, WorkbenchWarning
from .branch import Clone
from .effects.attribute_losses import with_mean_terms
from .effects.attributes import (
    HOOKS,
    Attribute,
    ModuleContents,
    Tree,
    Values,
    changed,
    described,
    difference,
    fingerprint,
    modes_of,
    modules,
    structure,
)
from .effects.branch_values import copy_values, get_values, held_elsewhere, set_values, tensors_in, transfer, with_hooks
from .effects.contents import Contents
from .effects.inputs import Key
from .effects.later_changes import LaterChanges
from .effects.parameters import ParameterWrites, explain_write
from .effects.random import RandomSources, find_generators
from .effects.reseeding import refused_in_threads
from .encoder_layers import in_modes
from .layer_sizes import kernel_sizes, linear_size
from .plan import Index, Plan
from .rank_one import DenseSlots
from .registrations import new_caches, registered

Build = Callable[[], tuple[nn.Module, dict[int, str], set[str], str]]


def branch_key(plan: Plan, index: Index) -> Key:
    """Return the key of a branch: its non-zero positions, so that position 0 along an axis is the same branch as a run without the axis.

    Runs that keep no state, such as neo's, use separate clones: other clones may be run again in a pending backward pass (activation
    checkpointing), where they must still have the mode and the tensors of their last forward pass.
    """
    positions = tuple(sorted((name, i) for name, i in index.items() if i))
    return positions if plan.keep_state else (*positions, ("apart", 1))


class Clones:
    """Clones of one wrapped object.

    Args:
        root: the wrapped module.
        build: returns (structural copy of the plain model, id of tensor -> slot, buffer slots, name of the method that a branch calls).
    """

    def __init__(self, root: nn.Module, build: Build) -> None:
        self.root, self._build = root, build
        self.impure: frozenset[Attribute] = frozenset()  # the attributes that forward was observed to change
        self.generation = 0  # how often the wrapped object has changed
        self.ever_impure = False  # whether forward was observed to change attributes, also in passes that were not kept
        self.dense_slots = DenseSlots()  # slots that must hold dense tensors
        self.watched: set[bool] = set()  # the modes (training or not) in which forward has run
        self._memory: dict[Key, Values] = {}  # impure attributes of branches that have no clone at present
        self._clones: dict[Key, Clone] = {}
        self._current: set[Key] = set()  # the branches of the last call, whose attributes are up to date
        self._kept: Values = {}  # fingerprints of the impure attributes as the last call left them in the wrapped object
        self._last: Clone | None = None
        self._saved: tuple[dict[Key, Values], frozenset[Attribute], set[bool]] = ({}, frozenset(), set())
        self.kept = False  # whether the side effects of the present call have been kept
        self._writes: ParameterWrites | None = None  # of the present call, if it is the first in its mode
        self.undisturbed = True  # whether no function mode or transform is active around the present call
        self._tree: Tree = {}
        self._facts: tuple = ()
        self._shape: tuple = ()
        self.modes: list[bool] = []
        self._modules: ModuleContents | None = None
        self._objects = Contents({}, frozenset())
        self._generators: list[Any] = []
        # by mode (training or not): the buffers that forward changed in its first call there
        self.changed_buffers: dict[bool, frozenset[str]] = {}
        # by mode: whether forward drew from generators other than torch's in that call
        self.drew_outside_torch: dict[bool, bool] = {}
        self.n_hooks = 0  # number of hooks of modules
        # of a network with linear layers only, 0 for others: number of weights, and largest number of inputs or outputs of a layer
        self.n_weights = self.width = 0
        self.kernels: dict[str, int] = {}  # slots of the weights of convolutions, and their sizes

    # ---- clones
    def existing(self) -> list[Clone]:
        """Return the clones that exist."""
        return list(self._clones.values())

    def of(self, plan: Plan, index: Index) -> Clone:
        """Return the clone of a branch, which `begin` has created."""
        return self.at(branch_key(plan, index))

    def at(self, key: Key) -> Clone:
        """Return the clone with a key that `begin` has returned."""
        return self._clones[key]

    def sources(self, leaves: list[Any]) -> RandomSources:
        """Return the sources that the model may draw random numbers from, given the leaves of the inputs."""
        return RandomSources(leaves, self._generators)

    def draws_outside_torch(self) -> bool:
        """Return whether forward drew from generators other than torch's in its first call in this mode; True if unknown."""
        return self.drew_outside_torch.get(self.root.training, True)

    def begin(self, plan: Plan, at_once: bool = False) -> list[Key]:
        """Create missing clones and set the attributes that each branch starts from.

        A branch continues from its last pass. A branch that was not in the last call starts from a branch that was and differs along one axis
        only, or else from the wrapped object. Attributes that the user has changed on the wrapped object since then apply to all branches.

        Args:
            plan: plan of the run.
            at_once: whether all branches run in one pass, on the clone of the first.

        Returns:
            The keys of the prepared clones.
        """
        keys = [branch_key(plan, index) for index in plan.indices[: 1 if at_once else None]]
        self._last = None
        missing = [key for key in keys if key not in self._clones]
        for key in missing:
            self._clones[key] = Clone(*self._build(), plan.rules, self.dense_slots, lambda: self.undisturbed)
        written = self.changed_buffers.get(self.root.training)
        # with gradients every buffer is copied, since the backward pass may need its present values
        if written is not None and (torch.is_grad_enabled() or any(self.modes) or torch.jit.is_tracing()):
            written = None
        for key in keys:
            clone = self._clones[key]
            clone.copied_buffers = (
                clone.buffers if written is None else (clone.written_in_eval | written) & clone.buffers
            )
            if modes_of(clone.tree) != self.modes:
                for module, mode in zip(clone.tree.values(), self.modes, strict=True):
                    if module.training is not mode:
                        module.training = mode
        if self.impure:
            touched = self._touched()
            starts = {key: self._start(key) for key in keys if key in missing or key not in self._current}
            for key in keys:
                clone = self._clones[key]
                if key in starts:
                    clone.copy_attributes(starts[key], self._tree)
                clone.copy_attributes(get_values(touched, self._tree), self._tree)
        return keys

    def _start(self, key: Key) -> Values:
        """Return the initial attributes of a branch whose clone does not have them, referring to the wrapped object's modules."""
        if key in self._memory:
            return self._memory[key]
        for i in range(len(key)):
            relative = key[:i] + key[i + 1 :]
            if relative in self._current:
                return (
                    self._memory[relative] if relative in self._memory else self._attributes_of(self._clones[relative])
                )
        return get_values(self.impure, self._tree)

    def _attributes_of(self, clone: Clone) -> Values:
        return copy_values(get_values(self.impure, clone.tree), clone.tree, self._tree)

    def remembered(self) -> dict[Key, Values]:
        """Return the attributes that forward changes, as they are in each branch."""
        if not self.impure:
            return {}
        present = {key: self._attributes_of(clone) for key, clone in self._clones.items() if key in self._current}
        return {**self._memory, **present}

    def give(self, index: Index, tree: Tree) -> None:
        """Copy the present attributes of a branch to another copy of the wrapped object.

        Args:
            index: index of the branch.
            tree: the modules of the copy.
        """
        self.refresh()
        key = tuple(sorted((name, i) for name, i in index.items() if i))
        touched = self._touched()
        set_values(copy_values(self.remembered().get(key) or self._start(key), self._tree, tree), tree)
        transfer(touched, self._tree, tree)

    def first(self) -> nn.Module:
        """Return a structural copy of the plain model with the present attributes of the first branch."""
        model = self._build()[0]
        self.give({}, modules(model))
        return model

    def _touched(self) -> frozenset[Attribute]:
        """Return the impure attributes that were changed outside forward since the last call."""
        now = fingerprint(self._tree, self.impure)
        return frozenset(name for name in self.impure if now.get(name) != self._kept.get(name))

    def recall(self, branches: dict[Key, Values]) -> None:
        """Restore what `remembered` returned; the wrapped object must have the attributes of its first branch."""
        self._memory, self._current = branches, set(branches)
        self.impure = frozenset(name for values in branches.values() for name in values)
        self.refresh()
        self._kept = fingerprint(self._tree, self.impure)

    def forget(self) -> None:
        """Drop the clones after a discarded pass, and restore the state that `save` has stored."""
        self._memory, self.impure, self.watched = self._saved[0], self._saved[1], set(self._saved[2])
        self._current = set(self._memory)
        self._clones.clear()

    def reset(self) -> None:
        """Recover from a call that raised: `forget` unless its side effects were kept, and inspect the wrapped object again."""
        if self.kept:
            self._memory = self.remembered()
            self._current = set(self._memory)
            self._clones.clear()
        else:
            self.forget()
        self._last, self._modules, self._facts = None, None, ()
        self.dense_slots.running = False

    def save(self) -> None:
        """Store the present state for `forget`."""
        self._saved, self.kept = (self.remembered(), self.impure, set(self.watched)), False
        self._writes = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Return a context manager for extra passes during a call: they start in the state before the call, and their changes are dropped.

        If forward changes no attributes they run on the clones of the call, otherwise on separate ones.
        """
        if not self.impure:
            yield
            return
        names = ("impure", "watched", "kept", "_memory", "_clones", "_current", "_kept", "_last", "_saved", "_writes")
        present = {name: getattr(self, name) for name in names}
        self._memory, self._clones, self._current = self._saved[0], {}, set(self._saved[0])
        self.watched = set(self.watched)
        try:
            yield
        finally:
            for name, value in present.items():
                setattr(self, name, value)

    @contextmanager
    def lent(self, plan: Plan, index: Index) -> Iterator[None]:
        """Return a context manager for an extra pass of a branch during a call, on the clone of the first if it has none of its own.

        With gradients it gets one, since the clone of the first may be run again in a pending backward pass.
        """
        key, first = branch_key(plan, index), branch_key(plan, plan.indices[0])
        if key in self._clones or first not in self._clones or self.impure or torch.is_grad_enabled():
            yield
            return
        self._clones[key] = self._clones[first]
        try:
            yield
        finally:
            self._clones.pop(key, None)

    def refresh(self) -> None:
        """Prepare for a call: drop clones that no longer match the wrapped object, whose layers, attributes or lists may have changed."""
        self.undisturbed = not in_modes()
        same = self._objects.unchanged()
        unchanged = same and self._modules is not None and self._modules.unchanged()
        if unchanged or (same and self._tree and structure(self._tree, self.impure) == self._facts):
            return
        self._modules, self._facts = None, ()  # an interrupt from here on makes the next call inspect the object again
        self._tree = {path: module for path, module in modules(self.root).items() if "@" not in path}
        self.modes = modes_of(self._tree)
        if not same or structure(self._tree, self.impure, modes=False) != self._shape:
            self.generation += 1
            self._memory = self.remembered()
            self._current = set(self._memory)
            self._clones.clear()
            self._generators = find_generators(self._tree)
            self.n_weights, self.width = linear_size(self._tree)
            self.kernels = kernel_sizes(self._tree)
            self.n_hooks = sum(len(vars(module)[kind]) for module in self._tree.values() for kind in HOOKS)
        self._note()

    def _note(self) -> None:
        """Store fingerprints of the wrapped object."""
        facts, shape = structure(self._tree, self.impure), structure(self._tree, self.impure, modes=False)
        contents = ModuleContents(self._tree, self.impure), Contents(self._tree, self.impure)
        self._facts, self._shape, (self._modules, self._objects) = facts, shape, contents

    # ---- attributes
    def allow_resize(self, buffer: str) -> bool:
        """Return whether forward may give a buffer another shape, as it may one that no file holds, and count it among what forward changes."""
        path, _, name = buffer.rpartition(".")
        if not self._is_held_by_no_file(path, name):
            return False
        self.impure |= {(path, name)}
        return True

    def is_table(self, buffer: str) -> bool:
        """Return whether a buffer that forward changes should be the same in all branches: no file holds it, and it is no running statistic."""
        path, _, name = buffer.rpartition(".")
        return not self.root.training and self._is_held_by_no_file(path, name)

    def _is_held_by_no_file(self, path: str, name: str) -> bool:
        return path in self._tree and name in self._tree[path]._non_persistent_buffers_set

    def watching(self, clone: Clone, plan: Plan, first: bool) -> AbstractContextManager[None]:
        """Return a context manager for a pass, which finds the attributes that the first branch changes and resets them for the others.

        Raises:
            PurityError: if forward changes attributes and `plan.purity` is "raise".
            RuntimeError: if forward creates layers, which nothing would train.
        """
        known = self.root.training in self.watched and not self.impure and (first or self._writes is None)
        if known and not (first and plan.purity == "raise"):
            self._last = clone
            return self._watching_later(clone) if first else nullcontext()
        return self._watching_first(clone, plan) if first else self._watching_next(clone, plan)

    @contextmanager
    def _watching_later(self, clone: Clone) -> Iterator[None]:
        """Return a context manager for the first branch of a model that has changed no attribute so far, but may do so in this call."""
        if clone.later is None:
            clone.later = LaterChanges(clone.tree), clone.loose_tensors()
        later, loose = clone.later
        yield
        with clone.with_tensors(loose) if loose else nullcontext():
            changes = later.take()
        if changes:
            clone.refuse_changed_holders(changes)
            self.impure |= changes | held_elsewhere(self.root, clone.tree, changes, {})
            clone.note_kept(get_values(self.impure, clone.tree))
            self.ever_impure = True

    @contextmanager
    def _watching_next(self, clone: Clone, plan: Plan) -> Iterator[None]:
        if plan.purity == "allow" and self._last is not None:
            clone.copy_attributes(get_values(self.impure, self._last.tree), self._last.tree)
        else:
            clone.copy_attributes(get_values(self.impure - self._saved[1], self._tree), self._tree)
        try:
            with nullcontext() if self._writes is None else self._writes.watched():
                yield
        except (RuntimeError, TypeError, ValueError) as error:
            explain_write(self.root, error)
            raise
        self._last = clone
        clone.note_kept(get_values(self.impure, clone.tree))
        if self._writes is not None:
            self._writes.check_next()

    @contextmanager
    def _watching_first(self, clone: Clone, plan: Plan) -> Iterator[None]:
        mode = self.root.training
        new = mode not in self.watched
        private = self._copy_unregistered(clone) if new else {}
        before, contents, loose = fingerprint(clone.tree), registered(clone.tree), clone.loose_tensors()
        writes = ParameterWrites(self.root, clone.tree)
        texts = described(clone.tree) if plan.purity in ("warn", "raise") else {}
        try:
            with writes.watched(), refused_in_threads() if new else nullcontext():
                yield
        except (RuntimeError, TypeError, ValueError) as error:
            explain_write(self.root, error)
            raise
        self._last = clone
        with clone.with_tensors(loose):
            changes = changed(before, fingerprint(clone.tree))
        clone.refuse_changed_holders(changes)
        kept = with_hooks(get_values(changes, clone.tree), clone.tree, clone.tree)
        set_values({name: value for name, value in private.items() if name not in kept}, clone.tree)
        taken_over = {name for *_, name in clone.taken_over}
        caches = new_caches(self.root, clone.tree, contents, registered(clone.tree), taken_over)
        writes.check(clone.tree, plan.bank, more=plan.size > 1)
        if new:
            clone.refuse_lost_writes(plan)
        self._writes = writes if new else None
        if texts and changes:
            _report_changes(self.root, plan.purity, difference(texts, described(clone.tree, changes), changes), new)
        self.impure |= changes | caches | held_elsewhere(self.root, clone.tree, changes, private)
        clone.note_kept(get_values(self.impure, clone.tree))
        self.ever_impure = self.ever_impure or bool(changes)
        self.watched.add(mode)

    def _copy_unregistered(self, clone: Clone) -> Values:
        """Replace all unregistered tensors of a clone by copies, since forward may write into them; return the original attributes."""
        attributes = tensors_in(clone.tree)
        clone.copy_attributes(attributes, clone.tree, temporary=True)
        return attributes

    def keep(self, plan: Plan, at_once: bool) -> None:
        """Update the wrapped object's attributes as if it had been called once.

        Args:
            plan: plan of the run.
            at_once: whether all branches ran on the clone of the first.
        """
        self._store_modes(self.of(plan, plan.indices[0]).tree)
        if not self.impure:
            return
        keys = [branch_key(plan, index) for index in plan.indices]
        source = self._last if plan.purity == "allow" and self._last is not None else self._clones[keys[0]]
        new = copy_values(get_values(self.impure, source.tree), source.tree, self._tree)
        if not at_once and plan.purity != "allow":
            heads = [axis.name for axis in plan.axes if axis.own_first]
            models = [key for key, index in zip(keys, plan.indices, strict=True) if not any(index[a] for a in heads)]
            values = [get_values(self.impure, self._clones[key].tree) for key in models]
            new = with_mean_terms(new, values, self.root._get_name())
        before, kept = get_values(self.impure, self._tree), self._kept
        try:
            set_values(new, self._tree)
            self._kept = fingerprint(self._tree, self.impure)
            self._memory, self._current = {}, set(keys[: 1 if at_once else None])
            self._note()
            self.kept = True
        except BaseException:
            set_values(before, self._tree)
            self._kept = kept
            raise

    def _store_modes(self, tree: Tree) -> None:
        """Keep mode changes that forward made to modules, for example to freeze the running statistics of norms."""
        if modes_of(tree) == self.modes:
            return
        for i, (path, module) in enumerate(self._tree.items()):
            if path in tree and tree[path].training is not self.modes[i]:
                module.__dict__["training"] = self.modes[i] = tree[path].training


def _report_changes(root: nn.Module, purity: str, differences: str, new: bool) -> None:
    message = f"forward of {root._get_name()} changes attributes of the model:\n{differences}"
    if purity == "raise":
        raise PurityError(
            f'{message}\nReturn them as outputs, or wrap with purity="once" (they end as if called once) or "allow"'
        )
    if new:
        warnings.warn(f"{message}\nThey end as if the model had been called once", WorkbenchWarning, stacklevel=2)
