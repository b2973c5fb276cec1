"""Pooling of a layer's feature maps to one short vector per row."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.core.outputs.class_scores import at_least_float32
from workbench.engine.effects.random import values_unavailable
from workbench.methods.densities.moments import full_precision

_BINS = 2


def pool(
    feature: Tensor, rows: int, *, row_dim: int = 0, channel_dim: int | None = None, keep: Tensor | None = None
) -> Tensor:
    """Average a feature map of any shape over a coarse grid, one vector per row.

    A 2x2 grid keeps rough positions, which a global mean discards.

    Args:
        feature: Real tensor with `rows` entries along `row_dim`: one vector per row [rows, d] is kept unchanged, a map
            [rows, c, h, w] (or with one or three axes in place of h, w) is averaged over two bins per axis, a
            sequence [rows, t, c] over two bins of t.
        rows: Number of rows of the batch.
        row_dim: Dimension of the rows; 1 for the [t, rows, c] of recurrent layers.
        channel_dim: Dimension of the channels, counted with the rows first. Default: the last of three dimensions, otherwise 1;
            give 1 for the [rows, c, length] of a 1-D convolution and -1 for [rows, h, w, c].
        keep: Mask [rows, t] of the steps of a sequence that are not padding. The bins of a row are then the two halves
            of its kept steps, so that padding has no influence; a row without kept steps gets zeros.

    Returns:
        Tensor [rows, d], at least float32. Axes of size 1 are not split, except t of a sequence, so that d does not
        depend on its length.

    Raises:
        TypeError: If the feature is complex.
        ValueError: If the feature does not have `rows` entries along `row_dim`, has nothing to average, or does not match
            `keep`.

    Example:
        >>> pool(torch.ones(8, 16, 7, 7), rows=8).shape
        torch.Size([8, 64])
        >>> pool(torch.ones(8, 20, 16), rows=8).shape
        torch.Size([8, 32])
    """
    if feature.is_complex():
        raise TypeError(f"cannot pool a complex feature {list(feature.shape)}; choose layers with real outputs")
    if feature.dim() <= row_dim or feature.shape[row_dim] != rows:
        raise ValueError(
            f"a feature of shape {list(feature.shape)} does not have the {rows} rows of the batch in dimension {row_dim}; "
            "leave its layer out, or give the dimension of the rows, row_dim="
        )
    feature = at_least_float32(feature)
    feature = feature.movedim(row_dim, 0) if row_dim else feature
    if feature.dim() <= 2:
        return feature if feature.dim() == 2 else feature[:, None]
    is_sequence = channel_dim is None and feature.dim() == 3
    if channel_dim is None:
        channel_dim = -1 if is_sequence else 1
    feature = feature.movedim(channel_dim, 1)
    if feature.dim() > 5:  # at most three axes are split: flatten the trailing ones into the third
        feature = feature.flatten(4)
    axes = tuple(feature.shape[2:])
    if 0 in feature.shape[1:]:
        raise ValueError(f"a feature of shape {list(feature.shape)} has nothing to average; leave its layer out")
    with full_precision(feature):
        if keep is not None and keep.shape != (rows, *axes):
            raise ValueError(f"keep must be a mask {[rows, *axes]} of rows and steps, got {list(keep.shape)}")
        if is_sequence:  # in the order of its memory, many times as fast as with the steps last
            weights = _grid(axes, (_BINS,), feature) if keep is None else _halves(keep, feature).mT
            return (weights @ feature.mT).mT.flatten(1)
        if keep is not None:
            return (feature @ _halves(keep, feature)).flatten(1)
        sizes = tuple(min(_BINS, size) for size in axes)
        if len(axes) == 2 and not feature.is_contiguous() and feature.is_contiguous(memory_format=torch.channels_last):
            return F.adaptive_avg_pool2d(feature, (sizes[0], sizes[1])).flatten(1)  # the product would copy it
        # a product with a few columns: on many CPUs twice as fast as pooling (unlike `@ weights.T`)
        return F.linear(feature.flatten(2), _grid(axes, sizes, feature)).flatten(1)


def _grid(axes: tuple[int, ...], bins: tuple[int, ...], like: Tensor) -> Tensor:
    """Return weights [bins, steps] of the means over a grid; bins overlap if they do not divide the axes evenly."""
    # a tensor from elsewhere cannot be part of a graph that a dispatch mode records
    anew = values_unavailable() or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
    build = _cached_grid.__wrapped__ if anew else _cached_grid
    return build(axes, bins, like.dtype, like.device)


@functools.lru_cache(maxsize=64)
def _cached_grid(axes: tuple[int, ...], bins: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        weights = torch.ones(1, 1, dtype=dtype, device=device)
        for size, n in zip(axes, bins, strict=True):
            lines = []
            for i in range(n):
                first, last = i * size // n, -(-(i + 1) * size // n)
                line = torch.full((1, last - first), 1 / (last - first), dtype=dtype, device=device)
                lines.append(F.pad(line, (first, size - last)))
            weights = torch.kron(weights, torch.cat(lines))
        return weights


def _halves(keep: Tensor, like: Tensor) -> Tensor:
    """Return weights [rows, t, 2] of the means over the first and the second half of the kept steps."""
    kept = keep.to(like.dtype)
    count = kept.sum(1, keepdim=True)
    before = kept.cumsum(1) - kept  # number of kept steps before each step
    first = kept * (before < (count / 2).ceil())
    second = kept * (before >= (count / 2).floor())
    both = torch.stack([first, second], 2)
    return both / both.sum(1, keepdim=True).clamp_min(1)
