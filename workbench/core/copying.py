"""Moving, copying, pickling and loading of wrapped objects with the interfaces of any torch module."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.clone import attributes, copy_tensor, places
from .additions import MARK
from .applied_functions import apply_to_voters
from .calls.frozen import Freezable, refuse_change
from .optimizer_guard import note_assignment
from .ownership import Record, table_of
from .quantized import is_quantized, left_alone
from .runtime import plain_clone, portable, restore
from .saving.saved_settings import SETTINGS, described
from .saving.savepoint import Savepoint
from .saving.state_dict import Loading


class Persistent(Freezable):
    """Mix-in of `Wrapped` with the protocols of torch, copy and pickle; engine and views are rebuilt in every copy."""

    _workbench: Record
    _plain_class: type[nn.Module]
    _overridden: frozenset[str]
    _blank: staticmethod[..., Any]  # creates an uninitialized wrapped object for unpickling

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        refuse_change(self, "moving or casting")
        float32_ids = _statistics(self)

        def each(tensor: Tensor) -> Tensor:
            try:
                moved = fn(tensor)
            except RuntimeError:
                if tensor.dim() < 5:
                    raise
                # a memory format such as channels_last applies to single weights
                return torch.stack([fn(voter) for voter in tensor])
            if id(tensor) in float32_ids and moved.is_floating_point() and moved.dtype.itemsize < 4:
                return tensor.to(moved.device, torch.float32)
            return moved

        with _without_swaps(), left_alone(self, fn):
            result = super()._apply(each, *args, **kwargs)
        if "_workbench" in self.__dict__:
            restore(self)
        return result

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """Apply a function to every module, like `nn.Module.apply`; initializations are applied to the weights of each voter in turn.

        Args:
            args, kwargs: the function, called with each module.
        """
        apply = super().apply
        if "_workbench" not in self.__dict__ or self._plain_class.apply is not nn.Module.apply:
            return apply(*args, **kwargs)
        return apply_to_voters(self, apply, *args, **kwargs)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if "_workbench" in self.__dict__:
            destination[prefix + SETTINGS] = described(self)

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a state, like `nn.Module.load_state_dict`; a state of the plain model is loaded into every voter.

        Args:
            state_dict: name -> tensor; prefixes of torch.compile and (Distributed)DataParallel are supported.
            args, kwargs: strict (default True) and assign (default False), as for any module.

        Raises:
            ValueError: if the state was saved with other wrapper settings.
            RuntimeError: if names or shapes do not match. After any error, including Ctrl-C, nothing is changed.
        """
        if "_workbench" not in self.__dict__:
            return super().load_state_dict(state_dict, *args, **kwargs)
        refuse_change(self, "load_state_dict()")
        with Savepoint(self):
            return load_state(self, state_dict, *args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if "_workbench" in self.__dict__:
            refuse_change(self, "load_state_dict()")
            runtime = self.__dict__["_engine"]
            # the `strict` that torch passes here is always True
            runtime.loading = Loading(
                self, runtime.table, lambda: plain_clone(self)[0], state_dict, prefix, runtime.strict, *args[2:]
            )
            runtime.loading.prepare()
            local_metadata = args[0] if args else {}
            if local_metadata.get("assign_to_params_buffers"):
                note_assignment(self)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __copy__(self) -> Any:
        return restore(portable(self), table_of(self).originals)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if "_workbench" not in self.__dict__:
            raise TypeError("a model that is still being built cannot be copied")
        # models of peft give what they do not have themselves to the model inside, this method as well
        around = sys._getframe(1).f_locals.get("x")
        if around is not self and isinstance(around, nn.Module) and around.__deepcopy__ == self.__deepcopy__:
            memo[id(around)] = outer = object.__new__(type(around))
            outer.__setstate__(copy.deepcopy(around.__dict__, memo))
            return outer
        memo[id(self)] = new = portable(self)
        stand_ins = {id(tensor) for tensor in new.__dict__["_portable"].values()}
        for container, key, _ in places(new):
            if id(container[key]) not in stand_ins:
                container[key] = _deep_copy(container[key], key, memo)
        return restore(new, table_of(self).originals)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if "_workbench" not in self.__dict__:
            return super().__reduce_ex__(protocol)
        if "_portable" not in self.__dict__:
            return _same, (portable(self),)
        slots = {name: value for name, value in attributes(self) if name not in self.__dict__}
        return (
            self._blank,
            (type(self)._plain_class, type(self)._overridden, self._workbench.method),
            {**self.__dict__, f"slots{MARK}": slots},
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_workbench" not in state:
            super().__setstate__(state)
            return
        for name, value in state.pop(f"slots{MARK}").items():
            object.__setattr__(self, name, value)
        self.__dict__.update(state)
        restore(self)

    def _replicate_for_data_parallel(self) -> Any:
        raise TypeError(
            "nn.DataParallel makes replicas that share the branches of one device: use DistributedDataParallel(wrapped), with one process per "
            "device"
        )

    def __prepare_scriptable__(self) -> Any:
        raise TypeError(
            "a wrapped model cannot be scripted: torch.jit cannot see its branches. Deploy it with torch.export.export(wrapped, (x,))"
        )


# torch.distributed.checkpoint looks up every key of a state as an attribute, also that of the settings
setattr(Persistent, SETTINGS, property(described))


def _deep_copy(tensor: Tensor, name: Any, memo: dict[int, Any]) -> Tensor:
    try:
        return copy_tensor(tensor, memo)
    except RuntimeError as error:
        if not is_quantized(tensor):
            raise
        raise RuntimeError(
            f"a {name} of this model is quantized ({type(tensor).__name__}), and has no copies: quantize another plain model alike, wrap it, "
            "and load_state_dict(wrapped.state_dict())"
        ) from error


def load_state(model: nn.Module, state: Any, *args: Any, **kwargs: Any) -> Any:
    """Load the state of a model, wrapped or not; if loading fails, a part of the state may already have been loaded."""
    runtime = model.__dict__.get("_engine")
    if runtime is None or not isinstance(model, Persistent):
        return model.load_state_dict(state, *args, **kwargs)
    runtime.strict = kwargs.get("strict", args[0] if args else True)
    try:
        with _without_swaps():
            return super(Persistent, model).load_state_dict(state, *args, **kwargs)
    finally:
        runtime.strict = runtime.loading = None


@contextmanager
def _without_swaps() -> Iterator[None]:
    """Context manager in which torch changes parameters in place, whatever its setting: it can't swap those that branches refer to."""
    setting = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(False)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(setting)


def _same(wrapped: Any) -> Any:
    return wrapped


def _statistics(wrapped: Any) -> set[int]:
    """Return the ids of buffers that must keep at least float32 precision."""
    methods = wrapped.__dict__["_workbench"].methods if "_workbench" in wrapped.__dict__ else ()
    marks = {mark for method in methods for mark in method.statistics}
    return {id(b) for name, b in wrapped.named_buffers() if name.rpartition(MARK)[2] in marks} if marks else set()
