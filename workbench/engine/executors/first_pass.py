"""The first pass under vmap: what is noted of its operations, and what is refused since vmap would answer wrongly."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor

from ..branch import Clone, is_batched
from ..effects.outside import OutsideTensors, OutsideWatch
from ..effects.random import RandomSources
from ..plan import Plan
from ..tree import flatten
from .wrong_rules import wrong_rule

_functorch: Any = torch._C._functorch
References = list[weakref.ref[Tensor]]
_ATTENTION = frozenset(["scaled_dot_product_attention", "multi_head_attention_forward"])
_AUTOGRAD = frozenset(getattr(Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "grad_fn"))


class Watch:
    """What is noted of the operations of a first pass: weak references to their outputs, and tensors from outside the model."""

    def __init__(self) -> None:
        self.outputs: References = []
        self.outside = OutsideTensors(keep=True)


def refuse_surviving(outputs: References) -> None:
    """Raise RuntimeError if a batched tensor of a pass is still alive; it would stand for all branches at once."""
    survives = any(is_batched(ref()) for ref in outputs)
    if survives:
        for generation in (1, 2):  # reference cycles of the pass are mostly young, and a full collection takes long
            gc.collect(generation)
            survives = any(is_batched(ref()) for ref in outputs)
            if not survives:
                return
        raise RuntimeError(
            "the model, or a hook on it, keeps a tensor outside its modules (in a global variable, a class or a list)"
        )


class FirstPass(OutsideWatch):
    """Function mode that notes tensors from outside the model and the outputs of every operation, and refuses what vmap answers wrongly.

    Generators are looked at if `sources` are given.

    Batched tensors never require gradients: these lie a level below. Code that asks (hooks on gradients, implicit layers) would do
    without them.
    """

    watches = True  # see `joint_layers`

    def __init__(self, watch: Watch, clone: Clone, plan: Plan, sources: RandomSources | None) -> None:
        super().__init__(watch.outside)
        self._watch, self._clone, self._plan, self._sources = watch, clone, plan, sources

    def __enter__(self) -> FirstPass:
        self._watch.outside.know_model(self._clone.tree)  # which holds the tensors of the pass by now
        self._watch.outside.know_plan(self._plan)
        return super().__enter__()

    def __torch_function__(
        self, function: Any, kinds: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _AUTOGRAD and is_batched(args[0]) and _requires_grad(args[0]):
            raise RuntimeError("the model asks whether a tensor requires gradients, which vmap hides")
        if wrong := wrong_rule(function, args, kwargs or {}):
            raise RuntimeError(wrong)
        if getattr(function, "__name__", "") in _ATTENTION and any(map(_is_on_gpu, flatten((args, kwargs))[0])):
            # it is also slower than a loop over branches where attention is large
            raise RuntimeError("on a GPU, vmap has no rule for fused attention that keeps what gradients need")
        generator = (kwargs or {}).get("generator")
        if generator is not None and self._sources is not None and not self._sources.hold(generator):
            raise RuntimeError(
                "the model draws from a generator that none of its modules holds, perhaps a new one in each call"
            )
        out = super().__torch_function__(function, kinds, args, kwargs)
        self._watch.outputs.extend(weakref.ref(leaf) for leaf in flatten(out)[0] if isinstance(leaf, Tensor))
        return out


def _is_on_gpu(value: Any) -> bool:
    """Return whether a value is a batched tensor that is not on the CPU."""
    return is_batched(value) and not value.is_cpu


def _requires_grad(tensor: Tensor) -> bool:
    """Return whether a tensor requires gradients outside vmap."""
    while is_batched(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor.requires_grad


__all__ = ["FirstPass", "Watch", "refuse_surviving"]
