"""Embeddings with padding in clones, whose padding gets no gradient in any branch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .rank_one import LayerForward

_is_batched: Any = torch._C._functorch.is_batchedtensor


class LookUpForward(LayerForward):
    """Forward of an embedding in a clone, which gives its padding no gradient where branches look up different tokens.

    If tokens and weights both differ, vmap knows the padding of the first branch only (torch 2.13).
    """

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tokens = args[0] if args else kwargs.get("input")
        if type(tokens) is not Tensor or not _is_batched(tokens):
            return super().__call__(*args, **kwargs)
        layer: Any = self._layer()
        padding, layer.padding_idx = layer.padding_idx, None
        try:
            out = super().__call__(tokens)
        finally:
            layer.padding_idx = padding
        return out.detach().where((tokens == padding % layer.num_embeddings).unsqueeze(-1), out)


def has_padding(layer: nn.Module) -> bool:
    """Return whether `LookUpForward` can be used for a layer: an embedding with padding and the forward of torch."""
    return (
        isinstance(layer, nn.Embedding)
        and layer.padding_idx is not None
        and type(layer).forward is nn.Embedding.forward
        and type(vars(layer).get("forward")) in (type(None), LayerForward)
    )


__all__ = ["LookUpForward", "has_padding"]
