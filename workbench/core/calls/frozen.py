"""`frozen` blocks, in which a wrapped object serves predictions: changes to it are refused, or detected before the next answer."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

from ...engine.effects.attributes import HOOKS, ModuleContents, modules, structure
from ...engine.effects.contents import Contents
from ...engine.surroundings import guarded
from ...errors import FrozenModelError
from ...introspect.source_lines import some_of
from ..ownership import engine_of
from .own_train import merging_refused

_KINDS = ("_parameters", "_buffers", "_modules", *HOOKS)
_VERSION = operator.attrgetter("_version")
_LOCK = threading.Lock()
_ACTIVE: list[Frozen] = []  # the objects inside a block, over all threads


class Frozen:
    """Snapshot of a wrapped object at the beginning of its block.

    It detects writes that torch counts, and changes to everything that the modules hold. Writes through `.data` or a numpy view are not
    detected; they take effect in the next call.

    Args:
        wrapped: the object, in evaluation mode.
    """

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped
        self.blocks = 0
        self._look()

    def _look(self) -> None:
        root = self._wrapped
        self._impure = engine_of(root).clones.impure
        self._tree = modules(root)
        # must come first, since recurrent layers recreate lists when their parameters are read
        self._objects = Contents(self._tree, self._impure)
        named = [*nn.Module.named_parameters(root), *root.named_buffers()]
        self._tensors = [tensor for _, tensor in named]
        # tensors created in inference mode do not count writes
        counted = [(name, tensor) for name, tensor in named if not tensor.is_inference()]
        self._names, self._counted = [name for name, _ in counted], [tensor for _, tensor in counted]
        self._versions = list(map(_VERSION, self._counted))
        self._held = {
            (path, kind): dict(module.__dict__ if not kind else module.__dict__[kind])
            for path, module in self._tree.items()
            for kind in ("", *_KINDS)
        }
        self._modules = ModuleContents(self._tree, self._impure)
        self._facts = structure(self._tree, self._impure) if self._impure else ()

    def same_numbers(self) -> bool:
        """Return whether no tensor has been written into."""
        return list(map(_VERSION, self._counted)) == self._versions

    def unchanged(self) -> bool:
        """Return whether the object is unchanged."""
        if not self.same_numbers() or not self._objects.unchanged():
            return False
        if self._impure:  # attributes that forward itself changes
            return structure(self._tree, self._impure) == self._facts
        return self._modules.unchanged()

    def check(self) -> None:
        """Raise FrozenModelError if the object was changed."""
        if not self.unchanged():
            raise FrozenModelError(
                f"{self._wrapped._workbench_name()} was changed inside `with wrapped.frozen():` ({self._changes()}), where the model must not "
                "change: make changes outside the block, or to copy.deepcopy(wrapped)"
            )

    def go_on(self) -> None:
        """Take a new snapshot after an eager call, whose forward may have changed the object legitimately."""
        if not self.unchanged():
            self._look()

    def holds(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether any of the tensors belongs to the object."""
        own_ids = set(map(id, self._tensors))
        return any(id(tensor) in own_ids for tensor in tensors)

    def _changes(self) -> str:
        """Describe what was changed."""
        written = [
            name
            for name, tensor, before in zip(self._names, self._counted, self._versions, strict=True)
            if tensor._version != before
        ]
        if written:
            return f"{some_of(written)} {'was' if len(written) == 1 else 'were'} written into"
        for (path, kind), before in self._held.items():
            contents = self._tree[path].__dict__
            contents = contents[kind] if kind else contents
            for name in {**before, **contents}:
                if (path, name) not in self._impure and before.get(name, _KINDS) is not contents.get(name, _KINDS):
                    label = "a hook" if "hooks" in kind else str(name)
                    return f"{path}.{label}" if path else label
        return "a list, a dict or another object that it holds"


def enter(wrapped: Any) -> Frozen:
    """Begin a block; blocks of one object may be nested, and open in several threads.

    Raises:
        RuntimeError: if the object is in training mode.
    """
    with _LOCK:
        runtime = wrapped.__dict__["_engine"]
        if runtime.frozen is None:
            if wrapped.training:
                raise RuntimeError(
                    f"{wrapped._workbench_name()} is in training mode, and frozen() is for predictions: call wrapped.eval() first"
                )
            runtime.frozen = Frozen(wrapped)
            _ACTIVE.append(runtime.frozen)
        runtime.frozen.blocks += 1
        return runtime.frozen


def leave(wrapped: Any) -> None:
    """End a block."""
    with _LOCK:
        runtime = wrapped.__dict__["_engine"]
        runtime.frozen.blocks -= 1
        if not runtime.frozen.blocks:
            _ACTIVE.remove(runtime.frozen)
            runtime.frozen = None


def refuse_change(wrapped: Any, what: str) -> None:
    """Raise FrozenModelError if a wrapped object is inside a block.

    Args:
        wrapped: the object.
        what: the operation that would change it, for the message.
    """
    runtime = wrapped.__dict__.get("_engine")
    if runtime is not None and runtime.frozen is not None:
        raise FrozenModelError(
            f"{what} would change {wrapped._workbench_name()}, which is inside `with wrapped.frozen():`; call it outside the block, or on "
            "copy.deepcopy(wrapped)"
        )


def refuse_step(optimizer: Any) -> None:
    """Raise FrozenModelError if an optimizer is about to update an object that is inside a block."""
    for frozen in list(_ACTIVE):
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if frozen.holds(trained):
            refuse_change(frozen._wrapped, f"{type(optimizer).__name__}.step()")


def call_guarded(function: Callable[..., Any], wrapped: Any, *args: Any) -> Any:
    """Call a function by `guarded`; inside a `frozen` block also without gradients and with the object checked before."""
    if (frozen := wrapped.__dict__["_engine"].frozen) is None:
        return guarded(function, wrapped, *args)
    frozen.check()
    with torch.no_grad():
        answer = guarded(function, wrapped, *args)
    frozen.go_on()
    return answer


class Freezable(nn.Module):
    """Module with `frozen` blocks, inside which methods that change the module raise."""

    @contextlib.contextmanager
    def frozen(self) -> Iterator[Self]:
        """Context manager for serving predictions: the model must not change inside, and calls compute no gradients.

        Answers are the same as outside the block. Operations that would change the model raise: `train()`, `fit`, `load_state_dict`, `to`,
        hooks, optimizer steps, new attributes. Changes that bypass these methods, such as a write into a parameter or a layer, raise at the
        next call or at the end of the block. Writes through `.data` or a numpy view, which torch does not count, are not detected and take
        effect at once, as outside. Copies made inside are not frozen.

        Yields:
            The object itself.

        Raises:
            RuntimeError: if the object is in training mode.
            FrozenModelError: if the object was changed inside.

        Example:
            >>> import torch
            >>> from workbench import vote
            >>> model = vote.Wrapper(5)(torch.nn.Linear(2, 1)).eval()
            >>> with model.frozen() as served:
            ...     y, risk = served(torch.zeros(4, 2), return_risk=True)
            >>> y.requires_grad
            False
        """
        frozen = enter(self)
        try:
            yield self
            frozen.check()
        finally:
            leave(self)

    def train(self, mode: bool = True) -> Any:
        runtime = self.__dict__.get("_engine")
        if runtime is None:
            return super().train(mode)
        if runtime.frozen is not None and all(module.training is mode for module in self.modules()):
            return self
        refuse_change(self, "train()" if mode else "eval()")
        with merging_refused(self):
            return super().train(mode)

    def __delattr__(self, name: str) -> None:
        refuse_change(self, f"del {name}")
        super().__delattr__(name)

    def register_buffer(self, name: str, tensor: Any, persistent: bool = True) -> None:
        refuse_change(self, "register_buffer()")
        # torch looks for `persistent` in the signature, which that of the user's class need not have
        super().register_buffer(name, tensor, *(() if persistent else (False,)))

    def register_parameter(self, *args: Any, **kwargs: Any) -> None:
        refuse_change(self, "register_parameter()")
        super().register_parameter(*args, **kwargs)

    def add_module(self, *args: Any, **kwargs: Any) -> None:
        refuse_change(self, "add_module()")
        super().add_module(*args, **kwargs)

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        refuse_change(self, "register_forward_hook()")
        return super().register_forward_hook(*args, **kwargs)

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        refuse_change(self, "register_forward_pre_hook()")
        return super().register_forward_pre_hook(*args, **kwargs)


__all__ = ["Freezable", "Frozen", "call_guarded", "enter", "leave", "refuse_change", "refuse_step"]
