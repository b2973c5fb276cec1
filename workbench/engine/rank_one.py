"""Rank-one weights inside a branch: one shared tensor, and factors that scale what enters and what leaves its layer."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .surroundings import PassEnded
from .tree import flatten

# Their forward hands the weight to one of the operations below, and does nothing else with it.
LAYERS = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
_TRANSPOSED = frozenset([F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d])
_OPERATIONS = frozenset([F.linear, F.conv1d, F.conv2d, F.conv3d]) | _TRANSPOSED
_FACTS = frozenset(  # the same for the product that is not there
    getattr(fact, "__get__", fact)
    for fact in (
        *(Tensor.shape, Tensor.dtype, Tensor.device, Tensor.layout, Tensor.ndim, Tensor.requires_grad),
        *(Tensor.is_cuda, Tensor.is_cpu, Tensor.is_meta),
    )
) | frozenset(
    [
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__),
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size, Tensor.get_device),
        *(torch.is_floating_point, torch.is_complex, torch.numel),
    ]
)
PLAIN = (Tensor, nn.Parameter)
SMALL = 1 << 15  # numbers that one branch multiplies in less time than Python takes to go another way


def product(weight: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """W * s r^T for W [out, in, ...], s [..., out] and r [..., in]."""
    lead, tail = left.shape[:-1], (1,) * (weight.dim() - 2)
    return weight * left.reshape(*lead, -1, 1, *tail) * right.reshape(*lead, 1, -1, *tail)


class FactoredWeightUsed(PassEnded):
    """A pass has done more with a factored weight than its layer does."""


class DenseSlots(set[str]):
    """The slots whose factored weights were used by others than their layers; from then on they hold the products."""

    running = False  # within the passes of a call, which can be started again


class FactoredWeight(Tensor):
    """Stands for W * s r^T in the place of a layer's weight: y = ((x * r) W^T) * s + b (Wen et al. 2020, BatchEnsemble, eq. 5).

    Only the layer's own forward can use it. Whatever else is done with it, by anybody, ends the pass, which is to be run again with the product
    in its place: in a function with a backward pass of its own, for one, gradients would not find the factors. After the pass (in a hook of the
    backward pass) the product is used right away.

    Args:
        slot: whose place it stands in.
        weight: W [out, in, ...].
        left, right: s [out] and r [in].
        dense_slots: is told when anything else is done with it.
    """

    slot: str
    factors: tuple[Tensor, Tensor, Tensor]
    dense_slots: DenseSlots
    open: bool | None = None  # while the layer's forward runs: whether gradients were on when it began

    @staticmethod
    def __new__(cls, slot: str, weight: Tensor, left: Tensor, right: Tensor, dense_slots: DenseSlots) -> FactoredWeight:
        factors = (weight, left, right)
        learns = torch.is_grad_enabled() and any(factor.requires_grad for factor in factors)
        self = Tensor._make_wrapper_subclass(
            cls, weight.shape, dtype=weight.dtype, device=weight.device, requires_grad=learns
        )
        self.slot, self.factors, self.dense_slots = slot, factors, dense_slots
        return self

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        weight = args[1] if function in _OPERATIONS and len(args) > 2 else None
        if type(weight) is FactoredWeight and weight.open is torch.is_grad_enabled():
            return weight._operate(function, *args, **kwargs)
        return cls._with_products(function, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return cls._with_products(func, args, kwargs or {})

    @staticmethod
    def _with_products(function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call with the products in place; ends the pass where it can be started again."""
        leaves, rebuild = flatten((args, kwargs))
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, FactoredWeight):
                leaf.dense_slots.add(leaf.slot)
                if leaf.dense_slots.running:
                    raise FactoredWeightUsed(f"the model itself uses the factored weight {leaf.slot}, in {function}")
                leaves[i] = product(*leaf.factors)
        args, kwargs = rebuild(leaves)
        return function(*args, **kwargs)

    def _operate(self, function: Any, x: Tensor, _: Any, bias: Tensor | None, *rest: Any, **more: Any) -> Tensor:
        """The operation of a layer, scaled on both sides where that is less work than the product."""
        weight, left, right = self.factors
        groups = rest[3] if len(rest) > 3 else more.get("groups", 1)  # of both kinds of convolutions
        if groups > 1:
            right = right.repeat(groups)
        inner, outer = (left, right) if function in _TRANSPOSED else (right, left)
        if not (self._fits(x, inner) and self._pays(x, inner, outer)):
            return function(x, product(*self.factors), bias, *rest, **more)
        if weight.dim() > 2:  # channels come before the places
            ones = (1,) * (weight.dim() - 2)
            inner, outer = inner.reshape(-1, *ones), outer.reshape(-1, *ones)
            bias = None if bias is None else bias.reshape(-1, *ones)
        y = function(x * inner, weight, None, *rest, **more)
        # under autocast y has fewer bits than the factors
        return (y * outer if bias is None else torch.addcmul(bias, y, outer)).to(y.dtype)

    def _fits(self, x: Any, inner: Tensor) -> bool:
        """Whether x is such that to scale it is as good as another weight; else the operation itself says what is wrong with it."""
        if type(x) not in PLAIN or x.layout is not torch.strided:
            return False
        weight = self.factors[0]
        channels = x.dim() - weight.dim() + 1
        if channels < 0 or x.shape[channels] != inner.shape[0]:
            return False
        return x.dtype is weight.dtype or (x.is_floating_point() and torch.is_autocast_enabled(x.device.type))

    def _pays(self, x: Tensor, inner: Tensor, outer: Tensor) -> bool:
        """Whether there are fewer numbers in x and y than in the two products that make the weight; on a GPU, what all branches do at once
        always pays, since each number more is cheap beside a kernel that reads a weight of every branch."""
        if x.is_cuda and torch._C._functorch.peek_interpreter_stack() is not None:
            return True
        enters, leaves = inner.shape[0], outer.shape[0]
        return x.numel() * (enters + leaves) <= 2 * enters * self.factors[0].numel()


class LayerForward:
    """The forward of a layer in a clone, around the one of its class: while that runs, the layer's weight can be used.

    Args:
        layer: it holds this object, and so is not held by it: nothing is to wait for the garbage collector.
    """

    __slots__ = ("_layer",)

    def __init__(self, layer: nn.Module) -> None:
        self._layer = weakref.ref(layer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer: Any = self._layer()
        weight = layer._parameters["weight"]
        if type(weight) is not FactoredWeight:
            return type(layer).forward(layer, *args, **kwargs)
        weight.open = torch.is_grad_enabled()
        try:
            return type(layer).forward(layer, *args, **kwargs)
        finally:
            weight.open = None
