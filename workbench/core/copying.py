"""Moving, copying, pickling and loading of wrapped objects, as of any module of torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.clone import attributes, places
from .applied_functions import apply_to_voters
from .calls.frozen import Freezable, refuse_change
from .ownership import MARK, Record, table_of
from .quantised import left_alone
from .runtime import plain_clone, portable, restore
from .saving.savepoint import Savepoint
from .saving.state_dict import SETTINGS, Loading, described


class Persistent(Freezable):
    """What `Wrapped` answers to torch, copy and pickle; its engine and its views are made anew in every copy."""

    _workbench: Record
    _plain_class: type[nn.Module]
    _overridden: frozenset[str]
    _blank: staticmethod[..., Any]  # an object of a class that wraps, which a pickle fills

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        refuse_change(self, "moving or casting")
        precise = _statistics(self)

        def each(tensor: Tensor) -> Tensor:
            try:
                moved = fn(tensor)
            except RuntimeError:
                if tensor.dim() < 5:
                    raise
                return torch.stack([fn(voter) for voter in tensor])  # a memory format is one of single weights
            if id(tensor) in precise and moved.is_floating_point() and moved.dtype.itemsize < 4:
                return tensor.to(moved.device, torch.float32)
            return moved

        with left_alone(self, fn):
            result = super()._apply(each, *args, **kwargs)
        if "_workbench" in self.__dict__:
            restore(self)
        return result

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module; a function that writes into the weights, as initialisations do, writes into those of each voter, one after another.

        Args:
            args, kwargs: the function, which is called with each module.
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
        """As of any module; the state may be that of this wrapping, or of the plain model, which every voter then takes.

        Args:
            state_dict: names and tensors; those of torch.compile and (Distributed)DataParallel are known, too.
            args, kwargs: strict (True) and assign (False), as for any module.

        Raises:
            ValueError: if the state was saved with other wrapper settings.
            RuntimeError: if names or shapes do not fit. Whatever is raised, Ctrl-C included, nothing is changed.
        """
        if "_workbench" not in self.__dict__:
            return super().load_state_dict(state_dict, *args, **kwargs)
        refuse_change(self, "load_state_dict()")
        savepoint = Savepoint(self)
        try:
            return load_state(self, state_dict, *args, **kwargs)
        except BaseException as error:
            savepoint.restore(error)
            raise

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if "_workbench" in self.__dict__:
            refuse_change(self, "load_state_dict()")
            runtime = self.__dict__["_engine"]
            # torch's own `strict` is always True here
            runtime.loading = Loading(
                self, runtime.table, lambda: plain_clone(self)[0], state_dict, prefix, runtime.strict, *args[2:]
            )
            runtime.loading.prepare()
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __copy__(self) -> Any:
        return restore(portable(self), table_of(self).given)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if "_workbench" not in self.__dict__:
            raise TypeError("a model that is still being built cannot be copied")
        memo[id(self)] = new = portable(self)
        stand_ins = {id(tensor) for tensor in new.__dict__["_portable"].values()}
        for container, key, _ in places(new):
            tensor = container[key]
            if id(tensor) not in stand_ins:  # what an earlier call left behind may hang on its graph, which has no copy
                container[key] = copy.deepcopy(tensor, memo) if tensor.is_leaf else tensor.detach().clone()
        return restore(new, table_of(self).given)

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
            "nn.DataParallel makes replicas that share the branches of one device: use DistributedDataParallel(wrapped), with one process for "
            "each device"
        )

    def __prepare_scriptable__(self) -> Any:
        raise TypeError(
            "a wrapped model cannot be scripted: torch.jit cannot see its branches. Deploy it by torch.export.export(wrapped, (x,))"
        )


def load_state(model: nn.Module, state: Any, *args: Any, **kwargs: Any) -> Any:
    """Load the state of a model that may be wrapped; where that fails, a part of it may be loaded already."""
    runtime = model.__dict__.get("_engine")
    if runtime is None or not isinstance(model, Persistent):
        return model.load_state_dict(state, *args, **kwargs)
    runtime.strict = kwargs.get("strict", args[0] if args else True)
    try:
        return super(Persistent, model).load_state_dict(state, *args, **kwargs)
    finally:
        runtime.strict = runtime.loading = None


def _same(wrapped: Any) -> Any:
    return wrapped


def _statistics(wrapped: Any) -> set[int]:
    """The ids of buffers that half precision could not hold."""
    methods = wrapped.__dict__["_workbench"].methods if "_workbench" in wrapped.__dict__ else ()
    marks = {mark for method in methods for mark in method.statistics}
    return {id(b) for name, b in wrapped.named_buffers() if name.rpartition(MARK)[2] in marks} if marks else set()
