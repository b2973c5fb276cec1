"""Decorated classes, whose instances are wrapped after construction, or after a classmethod such as `from_pretrained` has loaded weights."""

from __future__ import annotations

import functools
import inspect
import re
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from .additions import MARK
from .wrapped import is_wrapped

_LOADS = re.compile(r"(from|load|restore)(_|$)")


class _SkipOriginal:
    """Descriptor for `super(Net, self).name` in methods of a decorated class Net, which skips the user's class.

    After decoration the name Net refers to the class made by `decorated`, whose next class in the MRO is the user's class itself; without this,
    such a method would call itself.
    """

    def __init__(self, cls: type, name: str) -> None:
        self.cls, self.name = cls, name

    def __get__(self, instance: Any, owner: type) -> Any:
        return getattr(super(self.cls, owner if instance is None else instance), self.name)

    @property
    def __wrapped__(self) -> Any:
        return vars(self.cls)[self.name]


class _Depth(threading.local):
    """Number of loading classmethods of a class in progress, per thread."""

    depth = 0


def decorated(cls: type[nn.Module], wrap: Callable[[nn.Module], None]) -> type[nn.Module]:
    """Return a class whose instances, and those of its subclasses, are wrapped after construction.

    Inside classmethods that load (`from_...`, `load...`, `restore...`) instances stay plain, so that names of weights match; they are wrapped
    when the classmethod returns, with these weights in every voter.

    Args:
        cls: the user's class.
        wrap: function that wraps an instance in place.
    """
    meta: Any = type(cls)
    loading = _Depth()

    class Built(meta):
        @property
        def __signature__(self) -> inspect.Signature:
            """The signature of the constructor, which that of __call__ would hide."""
            parameters = list(inspect.signature(self.__init__).parameters.values())  # type: ignore[misc]
            return inspect.Signature(parameters[1:])

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            try:
                instance = super().__call__(*args, **kwargs)
            except TypeError as error:
                if "return_risk" in kwargs:  # which answers have, not constructors
                    name = self.__name__
                    error.add_note(f"{name} is a class: make an instance first, {name}(...)(x, return_risk=True)")
                raise
            if not loading.depth:
                wrap(instance)
            return instance

    namespace, past = namespace_and_past(cls)
    loaders = [name for name in dir(cls) if _LOADS.match(name)]
    for name in loaders:
        static = inspect.getattr_static(cls, name)
        if isinstance(static, classmethod):
            namespace[name] = classmethod(_loader(static, loading, wrap))

    def load_state_dict(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if loading.depth and not _holds_wrapped(self) and any(MARK in key for key in state_dict):
            wrap(self)  # the state was saved from a wrapped instance
            return self.load_state_dict(state_dict, *args, **kwargs)
        return cls.load_state_dict(self, state_dict, *args, **kwargs)

    namespace["load_state_dict"] = functools.wraps(cls.load_state_dict)(load_state_dict)
    return Built(cls.__name__, (past, cls), namespace)


def namespace_and_past(cls: type) -> tuple[dict[str, Any], type]:
    """Return the attributes of the class that takes the place of a user's class, and a base by which `super()` skips the latter."""
    hidden = ("__dict__", "__weakref__", "__slots__")
    namespace = {name: value for name, value in vars(cls).items() if name not in hidden}
    skipped: dict[str, Any] = {
        name: _SkipOriginal(cls, name) for name, value in namespace.items() if hasattr(value, "__get__")
    }
    # the user's class may require keyword arguments here that only its own subclasses give
    skipped["__init_subclass__"] = classmethod(lambda cls, **kwargs: None)
    namespace.pop("__init_subclass__", None)
    return namespace, type("Past", (), skipped)


def _loader(static: Any, loading: _Depth, wrap: Callable[[nn.Module], None]) -> Callable[..., Any]:
    """Return the function of a classmethod that loads plain instances and wraps those that it returns."""

    @functools.wraps(static.__func__)
    def load(cls: type[nn.Module], *args: Any, **kwargs: Any) -> Any:
        loading.depth += 1
        try:
            result = static.__get__(None, cls)(*args, **kwargs)
        finally:
            loading.depth -= 1
        if not loading.depth:
            for instance in result if isinstance(result, tuple | list) else (result,):
                if isinstance(instance, cls) and not _holds_wrapped(instance):
                    _wrap_with_weights(instance, wrap, _saved(args[0] if args else None))
        return result

    return load


def _holds_wrapped(instance: nn.Module) -> bool:
    return any(map(is_wrapped, instance.modules()))


def _wrap_with_weights(instance: Any, wrap: Callable[[nn.Module], None], saved: dict[str, Tensor]) -> None:
    """Wrap an instance with loaded weights, from which every voter starts unless `saved` has the weights of each voter."""
    # not `instance.state_dict`, since an override of the user's may leave out some tensors
    state = nn.Module.state_dict(instance)
    wrap(instance)
    nn.Module.load_state_dict(instance, state)
    if saved:
        known = nn.Module.state_dict(instance).keys()
        instance.load_state_dict({name: value for name, value in saved.items() if name in known})


def _saved(folder: Any) -> dict[str, Tensor]:
    """Return the tensors of a folder written by `save_pretrained` of a wrapped model; {} for any other folder."""
    files = _files(folder)
    if not files:
        return {}
    from safetensors import safe_open

    state: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            state.update({name: tensors.get_tensor(name) for name in tensors.keys()})  # noqa: SIM118  # no dict
    return state if any(MARK in name for name in state) else {}


def _files(folder: Any) -> Iterable[Path]:
    try:
        return sorted(Path(folder).glob("*.safetensors"))
    except TypeError:
        return ()


__all__ = ["decorated"]
