"""Runtime state of a wrapped object (ownership table, engine, caches), rebuilt in every copy of it."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.clone import places, structural_copy
from ..engine.plan import Split, Stacked
from ..engine.run import Branched, Engine
from .additions import MARK
from .calls.feedback import Marks
from .calls.frozen import Frozen
from .calls.recorded_calls import RecordedCalls
from .offloaded import refuse_offloaded
from .optimizer_guard import watch
from .ownership import Table, engine_of, table_of
from .peft_layers import merge_for_voters
from .plain_copies import plain
from .quantized import own_copy
from .saving.state_dict import Loading

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_hooks",
    "_backward_pre_hooks",
)
BRANCHES = f"branches{MARK}"  # key under which a copy in progress carries the attributes of each branch


class Runtime:
    """State that a wrapped object needs to run and that can be rebuilt: its ownership table, its engine, and a load in progress.

    Args:
        root: the wrapped object.
        views: released slot -> tensor shown in its place.
        originals: slot -> weak reference to the tensor of the given model.
    """

    strict: bool | None = None  # argument of the load in progress
    loading: Loading | None = None
    frozen: Frozen | None = None  # set inside `with wrapped.frozen():`
    injection: Any = None  # savepoint from before peft adds layers
    observe: Callable[[Branched], None] | None = None  # callback that receives the outputs of all branches of a call

    def __init__(self, root: Any, views: dict[str, Tensor], originals: dict[str, weakref.ref[Tensor]]) -> None:
        # thread id -> whether its last call requested risk; only used if hooks or functions are set around calls
        self.risk_requested: dict[int, bool] = {}
        # kind of labels -> how they become targets of risk heads, or why that is unknown
        self.pairings: dict[Any, Any] = {}
        self.marks = Marks(root._workbench.token)
        self.recorded = RecordedCalls(root)
        self.table = Table(root, root._workbench, views, originals)
        self.engine = Engine(
            root,
            functools.partial(plain_clone, root),
            self._originals,
            lambda: self.table.views,
            self.table.homes,
            functools.partial(plain_forward, root),
        )

    def _originals(self) -> dict[str, Tensor]:
        originals = ((name, self.table.originals.get(name, lambda: None)()) for name in self.table.record.released)
        return {name: tensor for name, tensor in originals if tensor is not None}

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None


def plain_forward(root: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the user's implementation of the method that answers with risk."""
    return getattr(type(root)._plain_class, root._workbench.method)(root, *args, **kwargs)


def finish_load(module: nn.Module, incompatible: Any) -> None:
    """Hook after load_state_dict that completes its report of keys and shows the first branch again."""
    if "_workbench" in module.__dict__:
        runtime = module.__dict__["_engine"]
        if runtime.loading is not None:
            runtime.loading.finish(incompatible)
            runtime.loading = None
        runtime.table.show()


show = finish_load  # name of the hook in objects pickled by the previous version


def plain_clone(root: Any) -> tuple[nn.Module, dict[int, str], set[str], str]:
    """Return a clone for the engine to run branches on.

    Returns:
        The plain clone, id of each tensor that branches replace -> slot, the slots that are buffers, and the name of the method.
    """
    record, table = root._workbench, table_of(root)
    refuse_offloaded(root)
    table.verify()
    sharded = [path for path, module in root.named_modules() if path and type(module).__name__.startswith("FSDP")]
    if sharded:
        raise RuntimeError(
            f"the sub-module {sharded[0]} is sharded (fully_shard), and branches run on copies that cannot gather its shards; call fully_shard "
            "only on the whole wrapped model"
        )
    new = plain(root, record, "", table.views, {"_workbench"})
    del new.__dict__["_workbench"]
    new.__class__ = type(root)._plain_class
    for key in HOOKS if record.method == "forward" else ():
        new.__dict__[key] = new.__dict__.pop(key + MARK, OrderedDict())
    hooks = new._load_state_dict_post_hooks
    new._load_state_dict_post_hooks = OrderedDict((key, hook) for key, hook in hooks.items() if hook is not finish_load)
    new.__dict__.pop(record.method, None)  # a function set on the wrapped object runs around a call, not in branches
    if record.method + MARK in new.__dict__:
        new.__dict__[record.method] = new.__dict__.pop(record.method + MARK)
    slots = {id(table.value(name)): name for name in record.slots if name in record.rules or record.slots[name].buffer}
    return new, slots, {name for name, slot in record.slots.items() if slot.buffer}, record.method


def portable(wrapped: Any) -> Any:
    """Return a structural copy that can be copied and pickled: without engine, and with empty tensors in place of views."""
    views = table_of(wrapped).views
    if branches := engine_of(wrapped).clones.remembered():
        wrapped.__dict__[BRANCHES] = branches
    try:
        new = structural_copy(wrapped)
    finally:
        wrapped.__dict__.pop(BRANCHES, None)
    stand_ins = {name: torch.empty(0) for name in views}
    for container, key, name in places(new, {id(view): name for name, view in views.items()}):
        container[key] = stand_ins[name]
    new.__dict__["_portable"] = stand_ins
    return new


def restore(wrapped: Any, originals: dict[str, weakref.ref[Tensor]] | None = None, views: Any = None) -> Any:
    """Rebuild engine and views after copying, unpickling or moving.

    Args:
        wrapped: the wrapped object, changed in place.
        originals: slot -> weak reference to the tensor of the given model; None for those that the object already has.
        views: released slot -> tensor in its place; None for the current views or stand-ins.

    Returns:
        The object itself.
    """
    old = wrapped.__dict__.get("_engine")
    stand_ins = wrapped.__dict__.pop("_portable", None)
    views = views or stand_ins or (old.table.views if old is not None else {})
    if originals is None:
        originals = old.table.originals if old is not None else {}
    branches = wrapped.__dict__.pop(BRANCHES, None)
    wrapped.__dict__["_engine"] = runtime = Runtime(wrapped, dict(views), dict(originals))
    if branches:
        runtime.engine.clones.recall(branches)
    runtime.table.show()
    merge_for_voters(wrapped)
    watch(wrapped)
    return wrapped


def copy_rest(model: nn.Module, known: set[int]) -> None:
    """Copy the tensors of a plain clone that are not slots (those that a wrapped method other than forward does not use).

    Args:
        model: the clone, changed in place.
        known: ids of the tensors of slots.
    """
    rest = {id(t): t for t in (*model.parameters(), *model.buffers()) if id(t) not in known}
    for key, tensor in rest.items():
        rest[key] = own_copy(tensor) if isinstance(tensor, nn.Parameter) else tensor.detach().clone()
    for container, key, name in places(model, {key: str(key) for key in rest}):
        container[key] = rest[int(name)]


def untie(wrapped: Any, axis: str) -> None:
    """Give the heads along an axis a separate copy of the trunk, so that model and heads can be taken from different epochs of a training.

    Args:
        wrapped: the wrapped object; its voters share no trained parameters.
        axis: name of the method with the heads.
    """
    record, table = wrapped._workbench, table_of(wrapped)
    heads = next(len(rule.options) for rule in record.rules.values() if isinstance(rule, Split) and rule.axis == axis)
    for slot, rule in list(record.rules.items()):
        if isinstance(rule, Stacked):
            current = table.get(rule.name)
            new = table.register(
                f"{slot}@{axis}@{rule.axis}", current.clone(), like=current, buffer=record.slots[slot].buffer
            )
            record.rules[slot] = Split(axis, (rule, *[Stacked(rule.axis, new)] * (heads - 1)))
    next(method for method in record.methods if method.name == axis).untie(table)
    restore(wrapped)
