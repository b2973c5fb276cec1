"""Forms of calls that one recorded graph can answer: inputs, structure of the answer, and torch's modes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ...engine.traced_graph import RefusedError
from ...engine.tree import tree_map, values_of
from ...introspect.objects import GLOBAL_HOOKS
from ...introspect.pure_functions import is_record
from ...risk import Risk

_FUNCTORCH: Any = torch._C._functorch
# whether kinds of kernels are allowed, and their order: torch chooses among them before an operation is recorded
_CHOICES = (
    torch.backends.mha.get_fastpath_enabled,
    torch._C._get_mkldnn_enabled,
    torch._C._get_cudnn_enabled,
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
    torch._C._get_math_sdp_enabled,
    *(
        getattr(torch._C, name)
        for name in ("_get_sdp_priority_order", "_get_math_sdp_allow_fp16_bf16_reduction", "_get_fa3_sdp_enabled")
        if hasattr(torch._C, name)  # not in all versions of torch
    ),
)


def in_special_mode() -> bool:
    """Return whether torch is, in this thread, in a mode that changes what a call computes or records it."""
    return bool(
        torch._C._is_any_autocast_enabled()
        or torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or _FUNCTORCH.maybe_current_level() is not None
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
        or any(GLOBAL_HOOKS)
    )


def torch_settings() -> tuple[Any, ...]:
    """Return torch's global settings that affect the result of a call."""
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        *(is_enabled() for is_enabled in _CHOICES),
    )


def form_of(args: tuple) -> Any:
    """Return the key of inputs that can share a graph: their device, shapes, strides and dtypes.

    Returns:
        None for inputs that cannot be recorded, and for all while a stream of their device is captured, for example in a CUDA graph.
    """
    device = args[0].device if args and type(args[0]) is Tensor else None
    form: list[Any] = [device]
    for tensor in args:
        if (
            type(tensor) is not Tensor
            or tensor.device != device
            or tensor.layout is not torch.strided
            or tensor.is_nested
            or tensor.requires_grad
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return None
        form += (tensor.shape, tensor.stride(), tensor.dtype)
    if len(args) > 1:
        form += ([id(tensor) for tensor in args].index(id(tensor)) for tensor in args)
    return None if device is None or (not args[0].is_cpu and _is_captured(device)) else tuple(form)


def _is_captured(device: torch.device) -> bool:
    """Return whether a graph of the device, such as a CUDA graph, is being captured from its current stream."""
    ask = getattr(getattr(torch, device.type, None), "is_current_stream_capturing", None)
    return ask is not None and bool(ask())


def leaves_of(answer: Any) -> list[Tensor]:
    """Return the tensors of an answer made of tuples, lists, dicts, records and `Risk`.

    Raises:
        RefusedError: if it holds anything else.
    """
    if answer is None:
        return []
    if type(answer) is Tensor:
        return [answer]
    if type(answer) not in (tuple, list, dict, Risk) and not is_record(type(answer)):
        raise RefusedError(f"a {type(answer).__name__} in the answer")
    parts = vars(answer).values() if type(answer) is Risk else values_of(answer) or ()
    return [leaf for part in parts for leaf in leaves_of(part)]


def rebuilding(answer: Any) -> Callable[[Sequence[Tensor]], Any]:
    """Return a function from tensors to an answer of the same structure."""
    if type(answer) is Tensor:
        return operator.itemgetter(0)
    if type(answer) is tuple and [*map(type, answer)] == [Tensor, Tensor]:
        return operator.itemgetter(0, 1)
    shape = tree_map(lambda leaf: leaf is not None, answer)

    def rebuild(results: Sequence[Tensor]) -> Any:
        remaining = iter(results)
        return tree_map(lambda is_tensor: next(remaining) if is_tensor else None, shape)

    return rebuild


__all__ = ["form_of", "in_special_mode", "leaves_of", "rebuilding", "torch_settings"]
