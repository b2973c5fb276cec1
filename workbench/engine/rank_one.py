"""Rank-one weights inside a branch: a shared weight, and factors that scale the inputs and outputs of its layer."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .surroundings import PassEnded
from .tree import flatten

# layers whose forward uses the weight only as an argument of one of the operations below
LAYERS = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Embedding,
)
_TRANSPOSED = frozenset([F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d])
_OPERATIONS = frozenset([F.linear, F.conv1d, F.conv2d, F.conv3d, F.embedding]) | _TRANSPOSED
_METADATA = frozenset(  # metadata, which is the same for the product
    getattr(attribute, "__get__", attribute)
    for attribute in (
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
SMALL = 1 << 15  # weight elements below which forming the product takes less time than Python's overhead of avoiding it


def product(weight: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return W * s r^T for W [out, in, ...], s [..., out] and r [..., in]."""
    lead, tail = left.shape[:-1], (1,) * (weight.dim() - 2)
    return weight * left.reshape(*lead, -1, 1, *tail) * right.reshape(*lead, 1, -1, *tail)


class FactoredWeightUsed(PassEnded):
    """Raised if a pass uses a factored weight outside the forward of its layer."""


class DenseSlots(set[str]):
    """Slots whose factored weights were used outside their layers, and that hold the products from then on."""

    running = False  # whether a pass is running that can be started again


class FactoredWeight(Tensor):
    """Placeholder for the weight W * s r^T of a layer, computed as y = ((x * r) W^T) * s + b (Wen et al. 2020, BatchEnsemble, eq. 5).

    Only the layer's own forward can use it. Any other use ends the pass, which is then run again with the product: in a custom autograd
    function, for example, gradients would not reach the factors. After the pass (in a backward hook) the product is used directly.

    Args:
        slot: slot of the weight.
        weight: W [out, in, ...].
        left, right: s [out] and r [in].
        dense_slots: set to which the slot is added when the weight is used elsewhere.
    """

    slot: str
    factors: tuple[Tensor, Tensor, Tensor]
    dense_slots: DenseSlots
    open: bool | None = None  # while the layer's forward runs: whether gradients were enabled at its start

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
        if function in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        weight = args[1] if function in _OPERATIONS and len(args) > 1 else None
        if type(weight) is FactoredWeight and weight.open is torch.is_grad_enabled():
            if function is F.embedding:
                return weight._look_up(*args, **kwargs)
            return weight._apply_layer(function, *args, **kwargs)
        return cls._with_products(function, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return cls._with_products(func, args, kwargs or {})

    @staticmethod
    def _with_products(function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call a function with the products, or end the pass if it can be started again."""
        leaves, rebuild = flatten((args, kwargs))
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, FactoredWeight):
                leaf.dense_slots.add(leaf.slot)
                if leaf.dense_slots.running:
                    raise FactoredWeightUsed(f"the model itself uses the factored weight {leaf.slot}, in {function}")
                leaves[i] = product(*leaf.factors)
        args, kwargs = rebuild(leaves)
        return function(*args, **kwargs)

    def _look_up(self, tokens: Tensor, _: Any, **options: Any) -> Tensor:
        """Return rows of the product, by rows of W and s unless options treat some rows in a special way."""
        weight, left, right = self.factors
        special = options.get("padding_idx") is not None or options.get("max_norm") or options.get("scale_grad_by_freq")
        if special or tokens.numel() > weight.shape[0]:  # the product of all rows is less work
            return F.embedding(tokens, product(*self.factors), **options)
        # multiplied in the order of `product`, so that no bit differs
        return F.embedding(tokens, weight) * F.embedding(tokens, left[:, None]) * right

    def _apply_layer(self, function: Any, x: Tensor, _: Any, bias: Tensor | None, *rest: Any, **kwargs: Any) -> Tensor:
        """Compute the operation of a layer with scaled input and output, or with the product if that is less work."""
        weight, left, right = self.factors
        groups = rest[3] if len(rest) > 3 else kwargs.get("groups", 1)  # same position for transposed convolutions
        if groups > 1:
            right = right.repeat(groups)
        inner, outer = (left, right) if function in _TRANSPOSED else (right, left)
        if not (self._is_supported(x, inner) and self._is_cheaper(x, inner, outer)):
            return function(x, product(*self.factors), bias, *rest, **kwargs)
        if weight.dim() > 2:  # channels come before the spatial dimensions
            ones = (1,) * (weight.dim() - 2)
            inner, outer = inner.reshape(-1, *ones), outer.reshape(-1, *ones)
            bias = None if bias is None else bias.reshape(-1, *ones)
        y = function(x * inner, weight, None, *rest, **kwargs)
        # under autocast y has lower precision than the factors
        return (y * outer if bias is None else torch.addcmul(bias, y, outer)).to(y.dtype)

    def _is_supported(self, x: Any, inner: Tensor) -> bool:
        """Return whether x has a valid type, shape and dtype; otherwise the operation itself is called and raises its own error."""
        if type(x) not in PLAIN or x.layout is not torch.strided:
            return False
        weight = self.factors[0]
        channels = x.dim() - weight.dim() + 1
        if channels < 0 or x.shape[channels] != inner.shape[0]:
            return False
        return x.dtype is weight.dtype or (x.is_floating_point() and torch.is_autocast_enabled(x.device.type))

    def _is_cheaper(self, x: Tensor, inner: Tensor, outer: Tensor) -> bool:
        """Return whether scaling x and y takes fewer multiplications than forming the weight.

        Always True under vmap on a GPU, where scaling is cheap compared with reading a separate weight for every branch.
        """
        if x.is_cuda and torch._C._functorch.peek_interpreter_stack() is not None:
            return True
        n_in, n_out = inner.shape[0], outer.shape[0]
        return x.numel() * (n_in + n_out) <= 2 * n_in * self.factors[0].numel()


class LayerForward:
    """Forward of a layer in a clone: calls the forward of its class, and allows use of the factored weight meanwhile.

    Args:
        layer: the layer, which holds this object; it is referenced weakly to avoid a reference cycle.
    """

    __slots__ = ("_layer",)

    def __init__(self, layer: nn.Module) -> None:
        self._layer = weakref.ref(layer)

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerForward:
        """Return the forward of the copy of the layer, which a model may make in its own forward."""
        layer: Any = self._layer()
        new = copy.copy(self)
        new._layer = weakref.ref(memo.get(id(layer), layer))
        return new

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
