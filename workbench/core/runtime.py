"""Ownership table and engine of a wrapped object, which are made anew in every copy of it."""

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
from .calls.feedback import Marks
from .calls.frozen import Frozen
from .calls.recorded_calls import RecordedCalls
from .offloaded import refuse_offloaded
from .optimizer_guard import watch
from .ownership import MARK, Table, engine_of, plain, table_of
from .quantised import own_copy
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
BRANCHES = f"branches{MARK}"  # in a copy that is under way: what attributes are in each branch


class Runtime:
    """What a wrapped object needs to run and can make anew: its table of tensors and its engine; and of a load what it has to remember."""

    strict: bool | None = None
    loading: Loading | None = None
    frozen: Frozen | None = None  # inside of a block in which nobody may change the object
    observe: Callable[[Branched], None] | None = None  # is shown what the branches of a call have given

    def __init__(self, root: Any, views: dict[str, Tensor], originals: dict[str, weakref.ref[Tensor]]) -> None:
        # by thread: whether its last call asked for the risk, where something surrounds the calls
        self.asked: dict[int, bool] = {}
        # by the kind of labels: how they become targets of risk heads, or why that cannot be told
        self.pairings: dict[Any, Any] = {}
        self.marks = Marks(root._workbench.token)
        self.recorded = RecordedCalls(root)
        self.table = Table(root, root._workbench, views, originals)
        self.engine = Engine(
            root,
            functools.partial(plain_clone, root),
            self._originals,
            self.table.homes,
            functools.partial(plain_forward, root),
        )

    def _originals(self) -> dict[str, Tensor]:
        originals = ((name, self.table.given.get(name, lambda: None)()) for name in self.table.record.released)
        return {name: tensor for name, tensor in originals if tensor is not None}

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None


def plain_forward(root: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the method that answers with risk as the user's class has it."""
    return getattr(type(root)._plain_class, root._workbench.method)(root, *args, **kwargs)


def finish_load(module: nn.Module, incompatible: Any) -> None:
    """Hook after load_state_dict: complete its report, and show the first branch again."""
    if "_workbench" in module.__dict__:
        runtime = module.__dict__["_engine"]
        if runtime.loading is not None:
            runtime.loading.finish(incompatible)
            runtime.loading = None
        runtime.table.show()


show = finish_load  # its name in objects that were pickled by the version before


def plain_clone(root: Any) -> tuple[nn.Module, dict[int, str], set[str], str]:
    """A clone for the engine: the plain structure, and which of its tensors the branches replace."""
    record, table = root._workbench, table_of(root)
    refuse_offloaded(root)
    table.verify()
    sharded = [path for path, module in root.named_modules() if path and type(module).__name__.startswith("FSDP")]
    if sharded:
        raise RuntimeError(
            f"{sharded[0]} is sharded by itself (fully_shard), and branches run on copies that cannot gather its shards; call fully_shard on "
            "the wrapped model only"
        )
    new = plain(root, record, "", table.views)
    del new.__dict__["_workbench"]
    new.__class__ = type(root)._plain_class
    for key in HOOKS if record.method == "forward" else ():
        new.__dict__[key] = new.__dict__.pop(key + MARK, OrderedDict())
    hooks = new._load_state_dict_post_hooks
    new._load_state_dict_post_hooks = OrderedDict((key, hook) for key, hook in hooks.items() if hook is not finish_load)
    new.__dict__.pop(record.method, None)  # set on the wrapped object: it surrounds a call, and is in no branch
    if record.method + MARK in new.__dict__:
        new.__dict__[record.method] = new.__dict__.pop(record.method + MARK)
    slots = {id(table.value(name)): name for name in record.slots if name in record.rules or record.slots[name].buffer}
    return new, slots, {name for name, slot in record.slots.items() if slot.buffer}, record.method


def portable(wrapped: Any) -> Any:
    """A structural copy that can be copied and pickled: no engine, and small stand-ins for the views."""
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
    """Make engine and views anew, after copying, unpickling or moving.

    Args:
        wrapped: the object.
        originals: the tensors of the given model; by default those that the object knows.
        views: what it holds in the places of released slots; by default what it, or its stand-ins, say.
    """
    old = wrapped.__dict__.get("_engine")
    stand_ins = wrapped.__dict__.pop("_portable", None)
    views = views or stand_ins or (old.table.views if old is not None else {})
    if originals is None:
        originals = old.table.given if old is not None else {}
    branches = wrapped.__dict__.pop(BRANCHES, None)
    wrapped.__dict__["_engine"] = runtime = Runtime(wrapped, dict(views), dict(originals))
    if branches:
        runtime.engine.clones.recall(branches)
    runtime.table.show()
    watch(wrapped)
    return wrapped


def copy_rest(model: nn.Module, known: set[int]) -> None:
    """Give a plain clone tensors of its own where no method reaches: what a wrapped method other than forward does not use."""
    rest = {id(t): t for t in (*model.parameters(), *model.buffers()) if id(t) not in known}
    for key, tensor in rest.items():
        rest[key] = own_copy(tensor) if isinstance(tensor, nn.Parameter) else tensor.detach().clone()
    for container, key, name in places(model, {key: str(key) for key in rest}):
        container[key] = rest[int(name)]


def untie(wrapped: Any, axis: str) -> None:
    """Give the heads along an axis a trunk of their own, equal to the model's, so that both can be taken from different times of a training.

    Args:
        wrapped: the object; its voters share nothing that is trained.
        axis: name of the method with heads beside the model's own.
    """
    record, table = wrapped._workbench, table_of(wrapped)
    heads = next(len(rule.options) for rule in record.rules.values() if isinstance(rule, Split) and rule.axis == axis)
    for slot, rule in list(record.rules.items()):
        if isinstance(rule, Stacked):
            present = table.get(rule.name)
            new = table.register(
                f"{slot}@{axis}@{rule.axis}", present.clone(), like=present, buffer=record.slots[slot].buffer
            )
            record.rules[slot] = Split(axis, (rule, *[Stacked(rule.axis, new)] * (heads - 1)))
    next(method for method in record.methods if method.name == axis).untie(table)
    restore(wrapped)
