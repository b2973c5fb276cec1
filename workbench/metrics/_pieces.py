"""Predictions and targets of any shape, a piece at a time: only what has a label, in float64, checked.

Maps and tokens are large, and what a metric makes of them in float64 is larger. Each piece has about `NUMBERS` numbers, so that a metric holds
some ten to thirty times 2 MiB beside its arguments, however many rows, pixels or tokens there are; sums over pieces are those over all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.metrics._inputs import numbers, real, risks, same_rows, same_shape, tensor_of

NUMBERS = 2**18  # of a piece: 2 MiB in float64


def mean_of(terms: Iterable[Tensor], reduction: str) -> Tensor:
    """The mean of the terms of all pieces, or the terms themselves.

    Raises:
        ValueError: If a mean of no terms is asked for.
    """
    if not isinstance(reduction, str) or reduction not in ("mean", "none"):
        raise ValueError(f"reduction must be 'mean' or 'none', found {reduction!r:.100}")
    if reduction == "none":
        pieces = list(terms)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.float64)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for piece in terms:
        total, count = piece.sum() if not count else total + piece.sum(), count + piece.numel()
    some(count)
    return total / count


def some(count: Any) -> None:
    """Raise where no target is left to score."""
    if not count:
        raise ValueError("no target is left to score: void= and mask= leave out all of them")


def counted(mask: Any, void: Any, target: Tensor | None, shape: torch.Size) -> Tensor | None:
    """Truth values of a shape, which targets count; None if all do.

    Args:
        mask: truth values, or the numbers 0 and 1; true counts.
        void: the number that marks targets without a value or label; may be NaN.
        target: what it is looked for in.
        shape: what the mask must have.
    """
    keep = None
    if void is not None:
        if isinstance(void, bool) or not isinstance(void, int | float | np.integer | np.floating):
            raise TypeError(f"void must be the number that marks targets that do not count, found {void!r:.100}")
        assert target is not None
        keep = _other_than(target, void)
    if mask is None:
        return keep
    mask = tensor_of(mask, "mask")
    if mask.shape != shape:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}, expected one truth value for each target, {tuple(shape)}"
        )
    if mask.dtype != torch.bool:
        whole = not (mask.is_floating_point() or mask.is_complex())
        if not whole or mask.to(torch.int64).clamp(0, 1).ne(mask.to(torch.int64)).any():
            raise ValueError(
                f"mask must hold truth values, true where a target counts, found {mask.dtype} (shape {tuple(mask.shape)})"
            )
        mask = mask.to(torch.bool)
    return mask if keep is None else keep & mask.to(keep.device)


def _other_than(target: Tensor, void: Any) -> Tensor:
    """Where a target is not that number, compared in the target's own dtype."""
    if math.isnan(void):
        return ~target.isnan()
    if target.is_floating_point():
        return target != float(void)
    limits = torch.iinfo(target.dtype) if target.dtype != torch.bool else None
    if limits is None or not limits.min <= void <= limits.max or void != int(void):
        return torch.ones_like(target, dtype=torch.bool)  # torch would wrap -100 to 156 among bytes
    try:
        return target != int(void)
    except (RuntimeError, NotImplementedError):  # a type without comparisons
        return target.to(torch.int64) != int(void)


# ---- values
def value_pieces(
    *, void: Any = None, mask: Any = None, positive: bool = False, **values: Any
) -> Iterator[tuple[Tensor, ...]]:
    """Pieces of values of one shape along the first dimension; flat, without what does not count, if void or mask is given.

    Args:
        void, mask: as `counted` takes them; void needs a `target` among the values.
        positive: whether a risk of 0 is refused.
        values: by name; of a `risk` the total is taken, and it is checked to be a standard deviation.
    """
    same_rows(**values)
    tensors = {name: real(name, getattr(v, "total", v) if name == "risk" else v) for name, v in values.items()}
    same_shape(**tensors)
    first = next(iter(tensors.values()))
    keep = counted(mask, void, tensors.get("target"), first.shape)
    rows = max(1, NUMBERS * len(first) // first.numel()) if first.ndim else 1
    for start in range(0, len(first) if first.ndim else 1, rows):
        at = slice(start, start + rows) if first.ndim else ...
        piece = {name: tensor[at] for name, tensor in tensors.items()}
        if keep is not None:
            if not keep[at].any():
                continue
            piece = {name: tensor[keep[at].to(tensor.device)] for name, tensor in piece.items()}
        yield tuple(
            risks(tensor, positive, tensors[name]) if name == "risk" else numbers(name, tensor, whole=tensors[name])
            for name, tensor in piece.items()
        )


def sample_pieces(
    target: Any, *, void: Any = None, mask: Any = None, positive: bool = False, **samples: Any
) -> Iterator[tuple[Tensor, ...]]:
    """Pieces of samples [m, *piece] and of the target [*piece], along its first dimension; flat if void or mask is given.

    Args:
        target: [...].
        void, mask, positive: as `value_pieces` takes them.
        samples: [m, *target] by name; a `risk` is checked to be a standard deviation.
    """
    target = real("target", target)
    tensors = {name: real(name, getattr(v, "total", v) if name == "risk" else v) for name, v in samples.items()}
    same_shape(**tensors)
    for name, tensor in tensors.items():
        if tensor.ndim == 0 or tensor.shape[1:] != target.shape:
            what = "m" if name == "samples" else "voters"
            raise ValueError(
                f"{name} must have shape [{what}, *target], found {tuple(tensor.shape)} for target {tuple(target.shape)}"
            )
    keep = counted(mask, void, target, target.shape)
    m = len(next(iter(tensors.values())))
    rows = max(1, NUMBERS * len(target) // (m * target.numel())) if target.ndim else 1
    for start in range(0, len(target) if target.ndim else 1, rows):
        at = slice(start, start + rows) if target.ndim else ...
        chosen = None if keep is None else keep[at]
        if chosen is not None and not chosen.any():
            continue
        pieces = [(name, tensor[:, at] if target.ndim else tensor, tensor) for name, tensor in tensors.items()]
        if chosen is not None:
            pieces = [(name, piece[:, chosen.to(piece.device)], whole) for name, piece, whole in pieces]
        yield (
            *(
                risks(piece, positive, whole) if name == "risk" else numbers(name, piece, whole=whole)
                for name, piece, whole in pieces
            ),
            numbers("target", target[at] if chosen is None else target[at][chosen.to(target.device)], whole=target),
        )


# ---- classes
def class_pieces(
    scores: Any, target: Any, name: str, dim: Any = None, void: Any = None, mask: Any = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Scores [rows, classes] and labels [rows] of what has a label, in the order of the target.

    Args:
        scores: numbers with one dimension of classes; "probabilities" are checked to sum to one.
        target: integer labels, shaped like scores without that dimension.
        name: of the scores.
        dim: the dimension of the classes; None is the last, and is refused where another fits the target as well.
        void, mask: as `counted` takes them; void is a whole number.
    """
    same_rows(**{name: scores, "target": target})
    scores = real(name, scores)
    target = tensor_of(target, "target")
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise ValueError(
            f"target must hold integer class labels, found {target.dtype} of shape {tuple(target.shape)}; "
            "convert it with .long()"
        )
    if void is not None and (isinstance(void, bool) or not isinstance(void, int | np.integer)):
        raise TypeError(f"void must be the class number that marks targets without a label, found {void!r:.100}")
    dim = _class_dimension(scores, target, name, dim)
    classes, inner = scores.shape[dim], math.prod(scores.shape[dim + 1 :])
    keep = counted(mask, void, target, target.shape)
    scores_3d, labels = scores.reshape(-1, classes, inner), target.reshape(-1, inner)
    keep = None if keep is None else keep.reshape(-1, inner)
    for at in _blocks(labels.shape, max(1, NUMBERS // classes)):
        rows = scores_3d[at[0], :, at[1]].movedim(1, -1).flatten(0, 1)
        chosen = labels[at].flatten().to(torch.int64)  # some types have no order
        if keep is not None:
            counts = keep[at].flatten()
            if not counts.any():
                continue
            rows, chosen = rows[counts.to(rows.device)], chosen[counts.to(chosen.device)]
        if chosen.min() < 0 or chosen.max() >= classes:
            raise ValueError(
                f"labels must lie in [0, {classes}), found {int(chosen.min())} to {int(chosen.max())} "
                f"(target {tuple(target.shape)}, {name} {tuple(scores.shape)}); void= leaves out those of one number"
            )
        rows = numbers(name, rows, finite=name == "probabilities", whole=scores)
        if name == "probabilities":
            _check_sums(rows, scores)
        yield rows, chosen.to(rows.device)


def _class_dimension(scores: Tensor, target: Tensor, name: str, dim: Any) -> int:
    """The dimension of the classes from the front."""
    shape = tuple(scores.shape)
    if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int | np.integer)):
        raise TypeError(f"dim must be the dimension of the classes, a whole number, found {dim!r:.100}")
    if dim is not None and not -len(shape) <= dim < len(shape):
        raise ValueError(f"dim={dim}, but {name} has {len(shape)} dimensions, {shape}")
    at = len(shape) - 1 if dim is None else int(dim) % max(1, len(shape))
    if len(shape) < 2 or shape[at] < 2:
        where = "" if dim is None else f" in dimension {dim}"
        raise ValueError(f"{name} must have shape [rows, classes >= 2]{where}, found {shape}")
    rest = shape[:at] + shape[at + 1 :]
    # dimension 0 may have the same size by chance, of a square batch
    others = [i for i in range(1, len(shape)) if i != at and shape[:i] + shape[i + 1 :] == target.shape]
    if rest == target.shape:
        if dim is None and others:
            lines = " or ".join(f"dim={i}" for i in sorted([*others, at]))
            raise ValueError(
                f"{name} {shape} and target {tuple(target.shape)} fit with classes in more than one dimension; write {lines} "
                "(1 for maps [n, classes, ...], the last for tokens [n, ..., classes])"
            )
        return at
    hint = f"; if the classes lie in dimension {others[0]}, write dim={others[0]}" if others else ""
    if target.shape == shape:
        hint += f". Several labels at once, yes or no each: give torch.stack([1 - p, p], -1) of the probabilities p, with dim={len(shape)}"
    raise ValueError(
        f"target has shape {tuple(target.shape)} but {name} has shape {shape}; expected a target of shape {rest}{hint}"
    )


def _blocks(shape: torch.Size, rows: int) -> Iterator[tuple[slice, slice]]:
    """Slices of [outer, inner] of at most so many elements, or one, in their order."""
    outer, inner = shape
    if inner < rows:
        step = rows // inner
        yield from ((slice(i, i + step), slice(None)) for i in range(0, outer, step))
        return
    for i in range(outer):
        yield from ((slice(i, i + 1), slice(j, j + rows)) for j in range(0, inner, rows))


def _check_sums(probs: Tensor, whole: Tensor) -> None:
    # what rounding does to a softmax in that precision
    tolerance = max(1e-4, 8 * torch.finfo(whole.dtype).eps) if whole.dtype.is_floating_point else 0.0
    gaps = (probs.sum(-1) - 1).abs()
    if (probs < -tolerance).any() or (gaps > tolerance).any():
        raise ValueError(
            "probabilities must be >= 0 and sum to one over the classes, found a least value of "
            f"{probs.min().item():.6g} and a sum of {probs[gaps.argmax()].sum().item():.6g} (shape {tuple(whole.shape)}); "
            "logits need softmax first"
        )
