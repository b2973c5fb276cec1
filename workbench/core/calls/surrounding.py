"""Code around the calls of a wrapped object: a forward that a user has set on it, and forward hooks. Both must pass the risk through."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Proxy

from ...introspect.source_lines import line_name

_OPTIONS = ("return_risk", "tile_and_reduce")


class Surrounding:
    """A forward that was set on a wrapped object: it runs once per call and must call the previous forward.

    Args:
        wrapped: the wrapped object.
        function: the callable that was set, such as a closure, a bound method or a partial function.
    """

    def __init__(self, wrapped: Any, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function, updated=())
        self.wrapped, self.function = wrapped, function
        # whether it has called the previous forward at least once; one that caches answers need not call it always
        self.reaches = False

    def __getattr__(self, name: str) -> Any:
        if name in ("function", "wrapped", "reaches") or name.startswith("__deepcopy"):
            raise AttributeError(name)  # not set yet while this object is copied
        return getattr(self.function, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        requested = self.wrapped.__dict__["_engine"].risk_requested
        thread = current_thread()
        requested.pop(thread, None)
        try:
            output = self.function(*args, **kwargs)
        except Exception as error:
            unknown = next((name for name in _OPTIONS if name in kwargs and name in str(error)), None)
            if isinstance(error, TypeError) and unknown is not None and thread not in requested:
                raise TypeError(
                    f"{self._describe()} takes no {unknown}: let it take **kwargs and pass them on to the previous forward, "
                    "def forward(*args, **kwargs): return before(*args, **kwargs)"
                ) from error
            if kwargs.get("return_risk") and requested.get(thread) and not from_model(error):
                raise TypeError(f"{self._describe()} cannot work on {_PAIR}: {error}; {_REMEDY}") from error
            raise
        self.reaches = self.reaches or thread in requested
        if not self.reaches:
            raise RuntimeError(
                f"{self._describe()} does not call the previous forward, so that the branches do not differ and there is no risk. Keep the "
                "previous one and call it (before = wrapped.forward), or set this forward on the plain model and wrap that"
            )
        if kwargs.get("return_risk"):
            if requested.get(thread) is False:
                raise TypeError(
                    f"{self._describe()} was asked for the risk and does not pass return_risk on to the previous forward; call that with "
                    "**kwargs, def forward(*args, **kwargs): return before(*args, **kwargs)"
                )
            _check_pair(output, self._describe())
        return output

    def _describe(self) -> str:
        function = self.function
        while not hasattr(function, "__code__") and (
            inner := getattr(function, "func", getattr(function, "__wrapped__", None))
        ):
            function = inner
        code = getattr(function, "__code__", None)
        place = f" ({line_name(code.co_filename, code.co_firstlineno)})" if code is not None else ""
        return f"the forward that was set on the wrapped {type(self.wrapped).__name__}{place}"


_PAIR = "the pair (prediction, risk) that return_risk=True gives"
_REMEDY = "let it change the first of the two and pass the second on, or use it on the plain model before wrapping, where each branch runs it"


def current_thread() -> int:
    """Return the id of the current thread, 0 in compiled code."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


def surrounded(wrapped: Any, method: str, function: Any) -> Any:
    """Return the object to store for a callable that is set as the wrapped method, None if it is the method itself.

    Args:
        wrapped: the wrapped object.
        method: name of the wrapped method.
        function: the callable that is set.
    """
    if isinstance(function, Surrounding) and function.wrapped is wrapped:
        return function
    plain = getattr(type(wrapped)._plain_class, method, None)
    plain_functions = (getattr(type(wrapped), method), plain)
    if isinstance(function, types.MethodType) and function.__self__ is wrapped and function.__func__ in plain_functions:
        return None
    return Surrounding(wrapped, function)


def hooked(wrapped: Any, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call an object that has forward hooks with `return_risk=True`.

    Raises:
        TypeError: if the hooks do not return a pair (prediction, risk).
    """
    description = f"a forward hook of the wrapped {type(wrapped).__name__}"
    requested, thread = wrapped.__dict__["_engine"].risk_requested, current_thread()
    requested.pop(thread, None)
    try:
        output = call(*args, **kwargs)
    except Exception as error:
        if thread not in requested or from_model(error):
            raise
        raise TypeError(f"{description} cannot work on {_PAIR}: {error}; {_REMEDY}") from error
    _check_pair(output, description)
    return output


def apply_pre_hooks(wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Apply the user's forward pre-hooks of the object to inputs, for methods such as `loss` that do not go through its call."""
    for key, hook in wrapped._forward_pre_hooks.items():
        if str(getattr(hook, "__module__", "")).startswith("torch."):
            continue  # hooks of torch, such as for sharded modules, apply to calls only
        if key in wrapped._forward_pre_hooks_with_kwargs:
            result = hook(wrapped, args, kwargs)
            if result is not None:
                args, kwargs = result
        elif (result := hook(wrapped, args)) is not None:
            args = result if isinstance(result, tuple) else (result,)
    return args, kwargs


def refuse_proxies(wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raise TypeError if an input is a proxy of torch.fx.symbolic_trace, which cannot trace the branches."""
    if any(isinstance(value, Proxy) for value in (*args, *kwargs.values())):
        raise TypeError(
            f"a wrapped {type(wrapped).__name__} cannot be traced by torch.fx.symbolic_trace, which cannot follow its branches: trace the plain "
            "model and wrap the GraphModule, or use torch.export.export(wrapped, (x,))"
        )


def _check_pair(output: Any, description: str) -> None:
    if not isinstance(output, tuple) or len(output) != 2:
        count = f" of {len(output)}" if isinstance(output, tuple | list) else ""
        raise TypeError(f"{description} returns a {type(output).__name__}{count} instead of {_PAIR}; {_REMEDY}")


def from_model(error: BaseException) -> bool:
    """Return whether an error was raised inside the wrapped call, not by the code around it."""
    trace = error.__traceback__
    while trace is not None:
        if (
            trace.tb_frame.f_code.co_name == "predict"
            and trace.tb_frame.f_globals.get("__name__") == f"{__package__}.predict"
        ):
            return True
        trace = trace.tb_next
    return False
