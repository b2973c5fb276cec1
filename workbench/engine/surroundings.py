"""Surroundings of a call: what torch keeps for a whole thread, put back where the call ends before its time.

A Ctrl-C may come between any two steps, also while a block is being entered or left, whose own end then never runs. So whoever starts something
larger looks at the surroundings before, and puts them back whatever is raised; doing so twice does no harm.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_functorch: Any = torch._C._functorch
_autograd: Any = torch._C._autograd
_LOCAL = threading.local()
_BLOCK = contextlib._GeneratorContextManager
_EDGES = (_BLOCK.__enter__.__code__, _BLOCK.__exit__.__code__)
_MODE_EDGES = (torch.inference_mode.__enter__.__code__, torch.inference_mode.__exit__.__code__)
T = TypeVar("T")


def _open_blocks() -> list[Reverted]:
    """The blocks that this thread is inside of, outermost first."""
    if not hasattr(_LOCAL, "blocks"):
        _LOCAL.blocks = []
    return _LOCAL.blocks


class PassEnded(BaseException):
    """The engine ends a pass, to run it otherwise; no `Exception`, since the model is not to handle it."""


class Reverted:
    """A block that changes something for as long as it lasts. A subclass says what (`begin`), and how to take it back (`revert`).

    `revert` may come twice, and before `begin` has come to its end.
    """

    def begin(self) -> None:
        raise NotImplementedError

    def revert(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> None:
        _open_blocks().append(self)
        try:
            self.begin()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: Any) -> None:
        self.revert()
        blocks = _open_blocks()
        if self in blocks:
            del blocks[blocks.index(self) :]


_LEAVE = {
    "Vmap": "_vmap_decrement_nesting",
    "Grad": "_grad_decrement_nesting",
    "Jvp": "_jvp_decrement_nesting",
    "Functionalize": "_func_decrement_nesting",
}


class Surroundings:
    """What torch is in this thread: gradients, function transforms, modes, default dtype; in the main thread also where random draws stand."""

    def __init__(self) -> None:
        self._blocks = len(_open_blocks())
        self._depth = _functorch.get_dynamic_layer_stack_depth()
        self._function_modes = _function_modes()
        self._handled = sys.exc_info()[1]
        self._dispatch_modes = torch._C._len_torch_dispatch_stack()
        self._gradients = torch.is_grad_enabled()
        self._no_hooks = _autograd._saved_tensors_hooks_get_disabled_error_message()
        self._dtype = torch.get_default_dtype()
        # tensors have values, and no other thread draws from there
        known = threading.current_thread() is threading.main_thread() and not (
            self._depth or self._dispatch_modes or torch.compiler.is_compiling()
        )
        self._random = torch.default_generator.get_state() if known else None

    def restore(self, error: BaseException) -> None:
        """Put it back; random draws only after what is no `Exception`, such as Ctrl-C: other errors leave them where they are, as torch does.

        Args:
            error: what ended the call.

        Raises:
            BaseException: the interrupt, where the error is only what came of it.
        """
        interrupt = interruption(error, self._handled)
        if interrupt is not None:
            _end_blocks(interrupt)
        leave_transforms(self._depth)
        if _function_modes() != self._function_modes:  # torch takes one away while it handles a call
            while torch._C._len_torch_function_stack():
                torch._C._pop_torch_function_stack()
            for mode in self._function_modes:
                torch._C._push_on_torch_function_stack(mode)
        while torch._C._len_torch_dispatch_stack() > self._dispatch_modes:
            torch._C._pop_torch_dispatch_stack(None)
        torch.set_grad_enabled(self._gradients)
        if self._no_hooks is None:
            _autograd._saved_tensors_hooks_enable()
        else:
            _autograd._saved_tensors_hooks_disable(self._no_hooks)
        if torch.get_default_dtype() is not self._dtype:
            torch.set_default_dtype(self._dtype)
        for block in reversed(_open_blocks()[self._blocks :]):
            block.__exit__()
        if interrupt is None:
            return
        _functorch._set_vmap_fallback_warning_enabled(True)  # as it is but in a pass under vmap
        if self._random is not None:
            torch.default_generator.set_state(self._random)
        if interrupt is not error:
            raise interrupt from None


def leave_transforms(depth: int) -> None:
    """End the function transforms of torch that are open above a depth of their stack, innermost first."""
    # one by one: torch 2.11 has pop_dynamic_layer_stack_and_undo_to_depth end two for each
    while _functorch.get_dynamic_layer_stack_depth() > depth:
        kind = _functorch.peek_interpreter_stack().key().name
        getattr(_functorch, _LEAVE[kind])()


def _function_modes() -> list[Any]:
    return [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]


def _end_blocks(interrupt: BaseException) -> None:
    """End what was being entered or left; else it ends where Python drops it, and changes what has been put back."""
    for frame, _ in traceback.walk_tb(interrupt.__traceback__):
        if frame.f_code in _EDGES:
            with contextlib.suppress(Exception):
                frame.f_locals["self"].gen.close()
        elif frame.f_code in _MODE_EDGES and hasattr(mode := frame.f_locals["self"], "_inference_mode_context"):
            mode._inference_mode_context.__exit__(None, None, None)  # twice does no harm


def interruption(error: BaseException | None, handled: BaseException | None) -> BaseException | None:
    """What is no `Exception`, such as Ctrl-C, among an error and those that were under way when it came.

    Args:
        error: the last of them.
        handled: what was being handled before all of this.
    """
    while error is not None and error is not handled:
        if not isinstance(error, Exception | PassEnded):
            return error
        error = error.__context__
    return None


def guarded(function: Callable[..., T], *args: Any) -> T:
    """Call a function; whatever it raises, the surroundings are as before."""
    if torch.compiler.is_compiling():
        return function(*args)
    surroundings = Surroundings()
    try:
        return function(*args)
    except BaseException as error:
        surroundings.restore(error)
        raise


__all__ = ["Reverted", "Surroundings", "guarded", "interruption"]
