"""Surroundings of a call: the thread-wide state of torch, restored if the call raises.

Ctrl-C may interrupt between any two steps, also while a context manager is entered or left, so that its cleanup never runs. Larger operations
therefore save the surroundings before they start, and restore them whatever is raised; restoring twice does no harm.
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
_BLOCK_EDGES = (_BLOCK.__enter__.__code__, _BLOCK.__exit__.__code__)
_MODE_EDGES = (torch.inference_mode.__enter__.__code__, torch.inference_mode.__exit__.__code__)
# torch before 2.7 has one flag for both, which it sets during torch.export only
_EXPORTING = "_is_exporting_flag" if hasattr(torch.compiler, "_is_exporting_flag") else "_is_compiling_flag"
T = TypeVar("T")


def is_exporting() -> bool:
    """Return whether torch.export is tracing.

    In torch 2.11, `torch.compiler.is_exporting` is also true inside torch.compile.
    """
    return getattr(torch.compiler, _EXPORTING)


def is_symbolic() -> bool:
    """Return whether this thread's tensors have no values that can be read: under make_fx and FakeTensorMode."""
    keys = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) is not None for key in (keys.PROXY, keys.FAKE))


def is_compiling_frames() -> bool:
    """Return whether Dynamo, which has given up this frame, would compile the frames that it calls, one by one."""
    return callable(torch._C._dynamo.eval_frame.get_eval_frame_callback())


def _open_blocks() -> list[Reverted]:
    """Return the `Reverted` blocks that are open in this thread, outermost first."""
    if not hasattr(_LOCAL, "blocks"):
        _LOCAL.blocks = []
    return _LOCAL.blocks


class PassEnded(BaseException):
    """Raised by the engine to end a pass and run it in another way; not an `Exception`, so that the model does not handle it."""


class Reverted:
    """Context manager for a temporary change, made by a subclass's `begin` and undone by its `revert`.

    `revert` may be called twice, and before `begin` has finished.
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


_END_TRANSFORM = {
    "Vmap": "_vmap_decrement_nesting",
    "Grad": "_grad_decrement_nesting",
    "Jvp": "_jvp_decrement_nesting",
    "Functionalize": "_func_decrement_nesting",
}


class Surroundings:
    """Snapshot of torch's state in this thread: gradients, function transforms, modes and default dtype.

    In the main thread it includes the state of the CPU's random generator.
    """

    def __init__(self) -> None:
        self._blocks = len(_open_blocks())
        self._depth = _functorch.get_dynamic_layer_stack_depth()
        self._function_modes = _function_modes()
        self._handled = sys.exc_info()[1]
        self._dispatch_modes = torch._C._len_torch_dispatch_stack()
        self._gradients = torch.is_grad_enabled()
        self._no_hooks = _autograd._saved_tensors_hooks_get_disabled_error_message()
        self._dtype = torch.get_default_dtype()
        # only if values of tensors can be read, and in the main thread: others draw from private generators
        known = threading.current_thread() is threading.main_thread() and not (
            self._depth or self._dispatch_modes or torch.compiler.is_compiling()
        )
        self._random = torch.default_generator.get_state() if known else None

    def restore(self, error: BaseException) -> None:
        """Restore the snapshot after an error.

        The random generator is restored only after an interrupt (no `Exception`, such as Ctrl-C); after other errors it stays where it is, as in
        torch.

        Args:
            error: the error that ended the call.

        Raises:
            BaseException: the interrupt, if the error is only a consequence of one.
        """
        interrupt = interruption(error, self._handled)
        if interrupt is not None:
            _end_blocks(interrupt)
        leave_transforms(self._depth)
        if _function_modes() != self._function_modes:  # torch removes a mode while that handles a call
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
        _functorch._set_vmap_fallback_warning_enabled(True)  # it is disabled during a pass under vmap only
        if self._random is not None:
            torch.default_generator.set_state(self._random)
        if interrupt is not error:
            raise interrupt from None


def leave_transforms(depth: int) -> None:
    """End torch's function transforms above a depth of their stack, innermost first."""
    # one by one, since pop_dynamic_layer_stack_and_undo_to_depth of torch 2.11 ends two per step
    while _functorch.get_dynamic_layer_stack_depth() > depth:
        kind = _functorch.peek_interpreter_stack().key().name
        getattr(_functorch, _END_TRANSFORM[kind])()


def _function_modes() -> list[Any]:
    return [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]


def _end_blocks(interrupt: BaseException) -> None:
    """Close the context managers that were being entered or left when the interrupt came.

    Otherwise garbage collection would close them later and change the restored state.
    """
    for frame, _ in traceback.walk_tb(interrupt.__traceback__):
        if frame.f_code in _BLOCK_EDGES:
            with contextlib.suppress(Exception):
                frame.f_locals["self"].gen.close()
        elif frame.f_code in _MODE_EDGES and hasattr(mode := frame.f_locals["self"], "_inference_mode_context"):
            mode._inference_mode_context.__exit__(None, None, None)  # calling it twice does no harm


def interruption(error: BaseException | None, handled: BaseException | None) -> BaseException | None:
    """Return the interrupt (no `Exception`, such as Ctrl-C) in the context chain of an error, None if there is none.

    Args:
        error: the last error.
        handled: the exception that was already being handled before the call, at which the search ends.
    """
    while error is not None and error is not handled:
        if not isinstance(error, Exception | PassEnded):
            return error
        error = error.__context__
    return None


def guarded(function: Callable[..., T], *args: Any) -> T:
    """Call a function, and restore the surroundings if it raises."""
    if torch.compiler.is_compiling():
        return function(*args)
    surroundings = Surroundings()
    try:
        return function(*args)
    except BaseException as error:
        surroundings.restore(error)
        raise


__all__ = ["Reverted", "Surroundings", "guarded", "interruption"]
