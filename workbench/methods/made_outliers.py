"""Inputs that are unlike the training data, made of training inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..engine.tree import tensors, tree_map

FEWEST = 8  # rows of a batch that others are made of


def unlike(inputs: Any, rows: int, seed: int) -> Iterator[Any]:
    """The same inputs with other numbers: the means of two rows, and each value from a row drawn anew.

    Nothing where no input is a floating tensor [rows, ...], as with token numbers, or where rows are fewer than eight.

    Args:
        inputs: a tree; whole numbers, and what has no rows, stay.
        rows: how many rows the batch has.
        seed: of the draws; no global random state is used.
    """
    if rows < FEWEST or not any(_changes(leaf, rows) for leaf in tensors(inputs)):
        return
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(rows, generator=generator)
    yield tree_map(lambda leaf: (leaf + leaf[order.to(leaf.device)]) / 2 if _changes(leaf, rows) else leaf, inputs)

    def drawn(leaf: Any) -> Any:
        if not _changes(leaf, rows):
            return leaf
        return leaf.gather(0, torch.randint(rows, leaf.shape, generator=generator).to(leaf.device))

    yield tree_map(drawn, inputs)


def gathered(made: Sequence[tuple[list[Tensor], Tensor, int]]) -> list[tuple[list[Tensor], Tensor]]:
    """Features and class scores of all batches, by kind."""
    kinds = dict.fromkeys(kind for *_, kind in made)
    parts = [[(features, scores) for features, scores, of in made if of == kind] for kind in kinds]
    return [
        ([torch.cat(layer) for layer in zip(*(f for f, _ in part), strict=True)], torch.cat([s for _, s in part]))
        for part in parts
    ]


def _changes(leaf: Any, rows: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > 1 and len(leaf) == rows


__all__ = ["gathered", "unlike"]
