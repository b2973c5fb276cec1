"""Classes of wrapped objects: dynamic subclasses of both `Wrapped` and the user's model class."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from .additions import MARK
from .calls.encoded_inputs import encoders_of
from .calls.lone_calls import watched_methods
from .hidden_names import noting_hidden
from .refused_methods import refusals_of
from .saving.adapters import loading_adapters
from .saving.save_pretrained import saving_pretrained

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class _InstanceAttribute:
    """Descriptor that returns the user's sub-module or parameter in place of a public name of `Wrapped`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else nn.Module.__getattr__(instance, self.name)


def subclass(
    ours: Any, public: Iterable[str], call: Callable[..., Any], cls: Any, overridden: frozenset[str], method: str
) -> Any:
    """Create the class of wrapped objects of a user's class.

    Args:
        ours: `Wrapped`.
        public: public names of `Wrapped`; attributes of the user's class take precedence.
        call: call(object, method, args, kwargs, return_risk, tile_and_reduce) computes the answer.
        cls: the user's class.
        overridden: public names of `Wrapped` that the model to be wrapped has as instance attributes.
        method: name of the method that answers with risk.
    """
    namespace: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_plain_class": cls,
        "_overridden": overridden,
        **{name: _InstanceAttribute(name) for name in overridden},
    }

    for name in (*public, "forward"):
        if name not in overridden and inspect.getattr_static(cls, name, None) is not None:
            namespace[name] = inspect.getattr_static(cls, name)

    namespace.update(
        (name, function) for name, function in watched_methods(cls) if name not in vars(ours) or name in namespace
    )
    hidden = [name for name in public if name in namespace]
    namespace["_hidden"] = frozenset(hidden)
    for name in hidden:
        if isinstance(namespace[name], types.FunctionType):
            namespace[name] = noting_hidden(ours, name, namespace[name])

    @functools.wraps(getattr(cls, method, ours.forward))
    def answer(
        self: Any, *args: Any, return_risk: bool = False, tile_and_reduce: bool | None = None, **kwargs: Any
    ) -> Any:
        return call(self, method, args, kwargs, return_risk, tile_and_reduce)

    answer.__signature__ = _signature(answer, ours.forward)  # type: ignore[attr-defined]  # torch.export binds keywords to it
    namespace[method] = answer
    if inspect.isfunction(save := getattr(cls, "save_pretrained", None)):
        namespace["save_pretrained"] = saving_pretrained(save)
    if hasattr(cls, "load_adapter") and any(base.__module__.partition(".")[0] == "peft" for base in cls.__mro__):
        namespace["load_adapter"] = loading_adapters(cls.load_adapter)
    namespace.update({**refusals_of(cls), **encoders_of(cls)})
    # a __call__ of the user's class runs inside each branch
    if method == "forward" and cls.__call__ is not nn.Module.__call__:
        namespace["__call__"] = nn.Module.__call__
    if issubclass(cls, _CONTAINERS):  # what wrapping adds must not appear among the user's layers
        methods = ("__len__", "__iter__", "__getitem__")
        is_default = any(all(getattr(cls, m) is getattr(base, m) for m in methods) for base in _CONTAINERS)
        namespace["__len__"] = lambda self: len(_contained(self, is_default))
        namespace["__iter__"] = lambda self: iter(_contained(self, is_default))
        namespace["__getitem__"] = lambda self, key: _contained(self, is_default)[key]
    bases, options = ((ours, cls), {}) if _first_base(cls) is object else _after_another_base(ours, cls)
    return types.new_class(cls.__name__, bases, options, lambda ns: ns.update(namespace))


def _first_base(cls: type) -> type:
    """Return the base of the first class that gave the instances of a class their attributes: object, or one such as ABC, Generic."""
    while cls.__base__ is not None and cls.__base__.__dictoffset__:
        cls = cls.__base__
    return cls.__base__ or object


def _after_another_base(ours: type, cls: type) -> tuple[tuple[type, type], dict[str, Any]]:
    """Return bases and options of a subclass for which objects of `class Net(ABC, nn.Module)` can be exchanged.

    Python lets an object change its class only if both have the same first base, which is that of the first of their bases. So the user's
    class is the first, and the order in which methods are looked up is set apart.
    """
    bases, order = (cls, ours), [*(base for base in ours.__mro__ if base not in cls.__mro__), *cls.__mro__]

    def mro(self: Any) -> list[type]:
        return [self, *order] if self.__bases__ == bases else type.mro(self)

    return bases, {"metaclass": type(type(cls).__name__, (type(cls),), {"mro": mro})}


def _signature(answer: Callable[..., Any], forward: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of the model's method with the additional arguments of wrapped objects."""
    parameters = [*inspect.signature(answer).parameters.values()]
    additional = inspect.signature(forward).parameters
    added = [
        additional[name] for name in ("return_risk", "tile_and_reduce") if name not in {p.name for p in parameters}
    ]
    return inspect.Signature(sorted([*parameters, *added], key=lambda parameter: parameter.kind))


def _contained(container: Any, is_default: bool) -> Any:
    """Return a view of a container without what wrapping added.

    Args:
        container: the wrapped container.
        is_default: whether the container methods are those of torch; the view then only has `_modules`, which torch.compile can trace.
    """
    view = object.__new__(type(container)._plain_class)
    if not is_default:
        view.__dict__.update({name: value for name, value in container.__dict__.items() if name != "_workbench"})
    modules = {name: module for name, module in container._modules.items() if MARK not in name}
    object.__setattr__(view, "_modules", modules)
    return view


__all__ = ["subclass"]
