"""torch's thread-local state after interrupts at points where a `with` block cannot exit."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from workbench.engine.surroundings import guarded, leave_transforms


class Mode(TorchFunctionMode):
    def __torch_function__(self, function: Any, kinds: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """As torch takes a mode away while it handles a call."""
    mode = torch._C._pop_torch_function_stack()
    try:
        yield
    finally:
        torch._C._push_on_torch_function_stack(mode)


@contextlib.contextmanager
def one_level() -> Iterator[None]:
    torch._C._functorch._vmap_increment_nesting(2, "error")
    try:
        yield
    finally:
        torch._C._functorch._vmap_decrement_nesting()


def interrupted(block: Any, edge: str) -> None:
    """Enter and leave a block, with a Ctrl-C as soon as it is open, before the `with` statement knows of it, or before it begins to end."""

    def profile(frame: Any, event: str, function: Any) -> None:
        opened = event == "c_return" and function is next
        if frame.f_code.co_name == edge and (opened if edge == "__enter__" else event == "call"):
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        with block:
            pass
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("edge", ["__enter__", "__exit__"])
@pytest.mark.parametrize("make", [without_modes, one_level])
def test_a_block_that_was_being_entered_or_left_ends_before_the_surroundings_are_put_back(make: Any, edge: str) -> None:
    def call() -> None:
        with Mode():
            interrupted(make(), edge)

    depth = torch._C._functorch.get_dynamic_layer_stack_depth
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            guarded(call)
        assert torch._C._len_torch_function_stack() == 0
        assert depth() == 0
        with one_level():  # another call's
            del caught
            gc.collect()
            assert torch._C._len_torch_function_stack() == 0
            assert depth() == 1
    finally:
        while torch._C._len_torch_function_stack():
            torch._C._pop_torch_function_stack()


@pytest.mark.parametrize("depth", range(5))
def test_transforms_are_left_down_to_a_depth_and_no_further(depth: int) -> None:
    functorch = torch._C._functorch
    functorch._vmap_increment_nesting(2, "error")
    functorch._grad_increment_nesting()
    functorch._func_increment_nesting(False)
    functorch._vmap_increment_nesting(3, "error")
    leave_transforms(depth)
    assert functorch.get_dynamic_layer_stack_depth() == depth
    leave_transforms(0)
    assert functorch.get_dynamic_layer_stack_depth() == 0
    assert torch.vmap(torch.func.grad(torch.square))(torch.ones(2)).tolist() == [2, 2]
