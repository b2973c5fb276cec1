"""Iteration over predictions and targets of any shape in pieces: only the elements that count, checked, in float64.

Maps and tokens are large, and the float64 intermediates of a metric are larger. Each piece has about `PIECE_SIZE` numbers, so that a metric
needs about ten to thirty times 2 MiB besides its arguments, however many rows, pixels or tokens there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.metrics._inputs import integer_labels, numbers, real, risks, same_rows, same_shape, tensor_of

PIECE_SIZE = 2**18  # numbers per piece: 2 MiB in float64


def reduce_terms(terms: Iterable[Tensor], reduction: str) -> Tensor:
    """Return the mean of the terms of all pieces, or the terms themselves.

    Raises:
        ValueError: If the mean of no terms is requested.
    """
    if not isinstance(reduction, str) or reduction not in ("mean", "none"):
        raise ValueError(f"reduction must be 'mean' or 'none', found {reduction!r:.100}")
    if reduction == "none":
        pieces = list(terms)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.float64)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for piece in terms:
        total, count = piece.sum() if not count else total + piece.sum(), count + piece.numel()
    check_not_empty(count)
    return total / count


def check_not_empty(count: Any) -> None:
    """Raise if there is no target left to score."""
    if not count:
        raise ValueError("no target is left to score: void= and mask= exclude all of them")


def valid_mask(mask: Any, void: Any, target: Tensor | None, shape: torch.Size) -> Tensor | None:
    """Return a boolean mask of the targets that count; None if all do.

    Args:
        mask: booleans, or the numbers 0 and 1; True counts.
        void: number that marks targets without a value or label; may be NaN.
        target: the tensor in which void is looked for.
        shape: required shape of the mask.
    """
    keep = None
    if void is not None:
        if isinstance(void, bool) or not isinstance(void, int | float | np.integer | np.floating):
            raise TypeError(f"void must be the number that marks targets that do not count, found {void!r:.100}")
        assert target is not None
        keep = _not_equal(target, void)
    if mask is None:
        return keep
    mask = tensor_of(mask, "mask")
    if mask.shape != shape:
        raise ValueError(f"mask has shape {tuple(mask.shape)}, expected one boolean per target, {tuple(shape)}")
    if mask.dtype != torch.bool:
        is_integer = not (mask.is_floating_point() or mask.is_complex())
        if not is_integer or mask.to(torch.int64).clamp(0, 1).ne(mask.to(torch.int64)).any():
            raise ValueError(
                f"mask must hold booleans, True for targets that count, found {mask.dtype} (shape {tuple(mask.shape)})"
            )
        mask = mask.to(torch.bool)
    return mask if keep is None else keep & mask.to(keep.device)


def _not_equal(target: Tensor, void: Any) -> Tensor:
    """Return where a target differs from a number, compared in the target's own dtype."""
    if math.isnan(void):
        return ~target.isnan()
    if target.is_floating_point():
        return target != float(void)
    limits = torch.iinfo(target.dtype) if target.dtype != torch.bool else None
    if limits is None or not limits.min <= void <= limits.max or void != int(void):
        return torch.ones_like(target, dtype=torch.bool)  # torch would wrap -100 to 156 in uint8
    try:
        return target != int(void)
    except (RuntimeError, NotImplementedError):  # dtypes without comparison
        return target.to(torch.int64) != int(void)


# ---- values
def value_pieces(
    *, void: Any = None, mask: Any = None, positive: bool = False, **values: Any
) -> Iterator[tuple[Tensor, ...]]:
    """Yield pieces of values of one shape along the first dimension; with void or mask, flattened and without the elements that don't count.

    Args:
        void, mask: as for `valid_mask`; void needs a `target` among the values.
        positive: whether a risk of 0 is an error.
        values: tensors by name; a `risk` is replaced by its total and checked to be a standard deviation.
    """
    same_rows(**values)
    tensors = {name: real(name, getattr(v, "total", v) if name == "risk" else v) for name, v in values.items()}
    same_shape(**tensors)
    first = next(iter(tensors.values()))
    keep = valid_mask(mask, void, tensors.get("target"), first.shape)
    rows = max(1, PIECE_SIZE * len(first) // first.numel()) if first.ndim else 1
    for start in range(0, len(first) if first.ndim else 1, rows):
        part = slice(start, start + rows) if first.ndim else ...
        piece = {name: tensor[part] for name, tensor in tensors.items()}
        if keep is not None:
            if not keep[part].any():
                continue
            piece = {name: tensor[keep[part].to(tensor.device)] for name, tensor in piece.items()}
        yield tuple(
            risks(tensor, positive, tensors[name]) if name == "risk" else numbers(name, tensor, full=tensors[name])
            for name, tensor in piece.items()
        )


def sample_pieces(
    target: Any, *, void: Any, mask: Any, positive: bool = False, **samples: Any
) -> Iterator[tuple[Tensor, ...]]:
    """Yield pieces of samples [m, *piece] and of the target [*piece] along its first dimension; with void or mask, flattened.

    Args:
        target: [...].
        void, mask, positive: as for `value_pieces`.
        samples: tensors [m, *target] by name; a `risk` is checked to be a standard deviation.
    """
    target = real("target", target)
    tensors = {name: real(name, getattr(v, "total", v) if name == "risk" else v) for name, v in samples.items()}
    same_shape(**tensors)
    for name, tensor in tensors.items():
        if tensor.ndim == 0 or tensor.shape[1:] != target.shape:
            axis = "m" if name == "samples" else "voters"
            raise ValueError(
                f"{name} must have shape [{axis}, *target], found {tuple(tensor.shape)} for target {tuple(target.shape)}"
            )
    keep = valid_mask(mask, void, target, target.shape)
    m = len(next(iter(tensors.values())))
    rows = max(1, PIECE_SIZE * len(target) // (m * target.numel())) if target.ndim else 1
    for start in range(0, len(target) if target.ndim else 1, rows):
        part = slice(start, start + rows) if target.ndim else ...
        pieces = {name: tensor[:, part] for name, tensor in tensors.items()}
        target_piece = target[part]
        if keep is not None:
            if not keep[part].any():
                continue
            pieces = {name: piece[:, keep[part].to(piece.device)] for name, piece in pieces.items()}
            target_piece = target_piece[keep[part].to(target.device)]
        yield (
            *(
                risks(piece, positive, tensors[name]) if name == "risk" else numbers(name, piece, full=tensors[name])
                for name, piece in pieces.items()
            ),
            numbers("target", target_piece, full=target),
        )


# ---- classes
def class_pieces(
    scores: Any, target: Any, name: str, dim: Any, void: Any, mask: Any = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield scores [rows, classes] and labels [rows] of the elements that count, in the order of the target.

    Args:
        scores: numbers with a dimension of classes; "probabilities" are checked to sum to one.
        target: integer labels, shaped like scores without that dimension.
        name: name of the scores in error messages.
        dim: dimension of the classes; None is the last one, and an error if another one fits the target as well.
        void, mask: as for `valid_mask`; void is an integer.
    """
    same_rows(**{name: scores, "target": target})
    scores = real(name, scores)
    target = integer_labels(target)
    if void is not None and (isinstance(void, bool) or not isinstance(void, int | np.integer)):
        raise TypeError(f"void must be the class number that marks targets without a label, found {void!r:.100}")
    dim = _class_dimension(scores, target, name, dim)
    classes, inner = scores.shape[dim], math.prod(scores.shape[dim + 1 :])
    keep = valid_mask(mask, void, target, target.shape)
    scores_3d, labels = scores.reshape(-1, classes, inner), target.reshape(-1, inner)
    keep = None if keep is None else keep.reshape(-1, inner)
    for block in _blocks(labels.shape, max(1, PIECE_SIZE // classes)):
        rows = scores_3d[block[0], :, block[1]].movedim(1, -1).flatten(0, 1)
        block_labels = labels[block].flatten().to(torch.int64)  # some integer types don't support comparison
        if keep is not None:
            keep_block = keep[block].flatten()
            if not keep_block.any():
                continue
            rows, block_labels = rows[keep_block.to(rows.device)], block_labels[keep_block.to(block_labels.device)]
        if block_labels.min() < 0 or block_labels.max() >= classes:
            raise ValueError(
                f"labels must lie in [0, {classes}), found {int(block_labels.min())} to {int(block_labels.max())} "
                f"(target {tuple(target.shape)}, {name} {tuple(scores.shape)}); void= ignores one label"
            )
        rows = numbers(name, rows, finite=name == "probabilities", full=scores)
        if name == "probabilities":
            _check_sums(rows, scores)
        yield rows, block_labels.to(rows.device)


def _class_dimension(scores: Tensor, target: Tensor, name: str, dim: Any) -> int:
    """Return the non-negative index of the class dimension."""
    shape = tuple(scores.shape)
    if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int | np.integer)):
        raise TypeError(f"dim must be the dimension of the classes, a whole number, found {dim!r:.100}")
    if dim is not None and not -len(shape) <= dim < len(shape):
        raise ValueError(f"dim={dim}, but {name} has {len(shape)} dimensions, {shape}")
    class_dim = len(shape) - 1 if dim is None else int(dim) % max(1, len(shape))
    if len(shape) < 2 or shape[class_dim] < 2:
        where = "" if dim is None else f" in dimension {dim}"
        raise ValueError(f"{name} must have shape [rows, classes >= 2]{where}, found {shape}")
    rest = shape[:class_dim] + shape[class_dim + 1 :]
    # dimension 0 is no candidate: it may have the same size by chance
    others = [i for i in range(1, len(shape)) if i != class_dim and shape[:i] + shape[i + 1 :] == target.shape]
    if rest == target.shape:
        if dim is None and others:
            options = " or ".join(f"dim={i}" for i in sorted([*others, class_dim]))
            raise ValueError(
                f"{name} {shape} and target {tuple(target.shape)} fit with the classes in more than one dimension; pass {options} "
                "(1 for maps [n, classes, ...], the last for tokens [n, ..., classes])"
            )
        return class_dim
    hint = f"; if the classes are in dimension {others[0]}, pass dim={others[0]}" if others else ""
    if target.shape == shape:
        hint += f". For multi-label targets (yes or no each), pass torch.stack([1 - p, p], -1) of the probabilities p, with dim={len(shape)}"
    raise ValueError(
        f"target has shape {tuple(target.shape)} but {name} has shape {shape}; expected a target of shape {rest}{hint}"
    )


def _blocks(shape: torch.Size, rows: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of [outer, inner] that cover it in order, with at most `rows` elements (at least one) each."""
    outer, inner = shape
    if inner < rows:
        step = rows // inner
        yield from ((slice(i, i + step), slice(None)) for i in range(0, outer, step))
        return
    for i in range(outer):
        yield from ((slice(i, i + 1), slice(j, j + rows)) for j in range(0, inner, rows))


def _check_sums(probs: Tensor, full: Tensor) -> None:
    # rounding error of a softmax in that precision
    tolerance = max(1e-4, 8 * torch.finfo(full.dtype).eps) if full.dtype.is_floating_point else 0.0
    gaps = (probs.sum(-1) - 1).abs()
    if (probs < -tolerance).any() or (gaps > tolerance).any():
        raise ValueError(
            "probabilities must be >= 0 and sum to one over the classes, found a least value of "
            f"{probs.min().item():.6g} and a sum of {probs[gaps.argmax()].sum().item():.6g} (shape {tuple(full.shape)}); "
            "logits need softmax first"
        )
