"""What surrounds the calls of a wrapped object: another forward that somebody set on it, and forward hooks, which must let the risk through."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Proxy

from ...introspect.source_lines import line_name

_OURS = ("return_risk", "tile_and_reduce")


class Surrounding:
    """Another forward that was set on a wrapped object: it runs once a call, and is to call the forward that was there.

    Args:
        wrapped: the object.
        function: what was set, such as a closure, a bound method or a partial function.
    """

    def __init__(self, wrapped: Any, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function, updated=())
        self.wrapped, self.function = wrapped, function
        self.reaches = (
            False  # whether it was seen to call the forward that was there; one that keeps answers need not always
        )

    def __getattr__(self, name: str) -> Any:
        if name in ("function", "wrapped", "reaches") or name.startswith("__deepcopy"):  # not there yet, in a copy
            raise AttributeError(name)
        return getattr(self.function, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        asked = self.wrapped.__dict__["_engine"].asked
        thread = current_thread()
        asked.pop(thread, None)
        try:
            output = self.function(*args, **kwargs)
        except Exception as error:
            unknown = next((name for name in _OURS if name in kwargs and name in str(error)), None)
            if isinstance(error, TypeError) and unknown is not None and thread not in asked:
                raise TypeError(
                    f"{self._where()} takes no {unknown}: let it take **kwargs and hand them on to the forward that was there, "
                    "def forward(*args, **kwargs): return before(*args, **kwargs)"
                ) from error
            if kwargs.get("return_risk") and asked.get(thread) and not from_model(error):
                raise TypeError(f"{self._where()} cannot work on {_PAIR}: {error}; {_REMEDY}") from error
            raise
        self.reaches = self.reaches or thread in asked
        if not self.reaches:
            raise RuntimeError(
                f"{self._where()} does not call the forward that was there, so that nothing differs between its branches and there is no "
                "risk. Keep the old one and call it (before = wrapped.forward), or set this forward on the plain model and wrap that"
            )
        if kwargs.get("return_risk"):
            if asked.get(thread) is False:
                raise TypeError(
                    f"{self._where()} was asked for the risk and does not hand return_risk on to the forward that was there; call that with "
                    "**kwargs, def forward(*args, **kwargs): return before(*args, **kwargs)"
                )
            _check_pair(output, self._where())
        return output

    def _where(self) -> str:
        function = self.function
        while not hasattr(function, "__code__") and (
            inner := getattr(function, "func", getattr(function, "__wrapped__", None))
        ):
            function = inner
        code = getattr(function, "__code__", None)
        place = f" ({line_name(code.co_filename, code.co_firstlineno)})" if code is not None else ""
        return f"the forward that was set on the wrapped {type(self.wrapped).__name__}{place}"


_PAIR = "the pair (prediction, risk) that return_risk=True gives"
_REMEDY = "let it change the first of the two and hand the second on, or use it on the plain model before wrapping, where each branch runs it"


def current_thread() -> int:
    """Of which thread a call is; one for all that is compiled."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


def surrounded(wrapped: Any, method: str, function: Any) -> Any:
    """What to keep of a callable that is set in the place of the method that answers with risk; None for nothing, the method itself is back.

    Args:
        wrapped: the object.
        method: the name of the method.
        function: what is set.
    """
    if isinstance(function, Surrounding) and function.wrapped is wrapped:
        return function
    plain = getattr(type(wrapped)._plain_class, method, None)
    plain_functions = (getattr(type(wrapped), method), plain)
    if isinstance(function, types.MethodType) and function.__self__ is wrapped and function.__func__ in plain_functions:
        return None
    return Surrounding(wrapped, function)


def hooked(wrapped: Any, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """A call with its risk of an object that has forward hooks; they must leave a pair.

    Raises:
        TypeError: if they do not.
    """
    who = f"a forward hook of the wrapped {type(wrapped).__name__}"
    asked, thread = wrapped.__dict__["_engine"].asked, current_thread()
    asked.pop(thread, None)
    try:
        output = call(*args, **kwargs)
    except Exception as error:
        if thread not in asked or from_model(error):
            raise
        raise TypeError(f"{who} cannot work on {_PAIR}: {error}; {_REMEDY}") from error
    _check_pair(output, who)
    return output


def entered(wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The inputs as the user's forward pre-hooks on the object hand them on, for what does not go through its call, such as its loss."""
    for key, hook in wrapped._forward_pre_hooks.items():
        if str(getattr(hook, "__module__", "")).startswith("torch."):
            continue  # of a sharded module: it belongs to a call
        if key in wrapped._forward_pre_hooks_with_kwargs:
            result = hook(wrapped, args, kwargs)
            if result is not None:
                args, kwargs = result
        elif (result := hook(wrapped, args)) is not None:
            args = result if isinstance(result, tuple) else (result,)
    return args, kwargs


def refuse_proxies(wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raise TypeError where torch.fx.symbolic_trace wants to see the branches."""
    if any(isinstance(value, Proxy) for value in (*args, *kwargs.values())):
        raise TypeError(
            f"a wrapped {type(wrapped).__name__} cannot be traced by torch.fx.symbolic_trace, which cannot follow its branches: trace the plain "
            "model and wrap the GraphModule, or use torch.export.export(wrapped, (x,))"
        )


def _check_pair(output: Any, who: str) -> None:
    if not isinstance(output, tuple) or len(output) != 2:
        count = f" of {len(output)}" if isinstance(output, tuple | list) else ""
        raise TypeError(f"{who} makes a {type(output).__name__}{count} of {_PAIR}; {_REMEDY}")


def from_model(error: BaseException) -> bool:
    """Whether an error comes from inside the wrapped call, not from what surrounds it."""
    trace = error.__traceback__
    while trace is not None:
        if (
            trace.tb_frame.f_code.co_name == "predict"
            and trace.tb_frame.f_globals.get("__name__") == f"{__package__}.predict"
        ):
            return True
        trace = trace.tb_next
    return False
