"""Graphs of torch_geometric as rows, with targets from their `y` and masks."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ...engine.effects.private_random import own_random
from ..outputs.meanings import IGNORED
from .graphs import is_graph, is_graph_batch

MASKS = ("train_mask", "val_mask", "test_mask")
_PAIRS = "give pairs (graphs, y), such as a list of them in DataLoader(pairs, batch_size=None)"


def graphs_paired(data: Any, mask: str | None, targets: bool) -> Any:
    """Convert graphs to rows (graph, y), and batches of graphs to pairs; data in any other form is returned unchanged.

    Args:
        data: a batch of graphs, a list or a Dataset of graphs, a single graph, or a pair of graphs and targets.
        mask: name of the mask of the nodes that count; with None, graphs with masks are refused.
        targets: whether targets are needed; if not, graphs are returned without them.
    """
    if is_graph_batch(data):
        return GraphRows(data.to_data_list(), mask, targets)
    if isinstance(data, list) and data and all(map(is_graph, data)):
        return GraphRows(data, mask, targets)
    if is_graph(data):
        return _one_batch(pair_of(data, mask) if targets else data)
    if isinstance(data, tuple | list) and len(data) == 2 and is_graph(data[0]) and isinstance(data[1], Tensor):
        return _one_batch(tuple(data))
    numbered = isinstance(data, Dataset) and not isinstance(data, IterableDataset) and hasattr(data, "__len__")
    if numbered and len(data):
        with own_random(0):  # a row may be augmented at random
            first = data[0]
        if is_graph(first):
            return GraphRows(data, mask, targets)
    return data


def pair_of(graph: Any, mask: str | None = None) -> tuple[Any, Tensor]:
    """Return a graph (or a batch of graphs) and its targets `y`, with class number -100 for nodes that do not count.

    Raises:
        ValueError: if it has no targets, or it is ambiguous which of them count.
    """
    if "y" not in graph or (y := graph["y"]) is None:
        raise ValueError(f"data: the graphs have no y; {_PAIRS}")
    y = torch.as_tensor(y)
    y = y if y.dim() else y[None]
    counted, why = _counted(graph, y, mask)
    if counted is None:
        return graph, y
    if counted.shape != y.shape[:1] or y.is_floating_point():
        raise ValueError(
            f"data: y is {y.dtype} {list(y.shape)}, and {why} {list(counted.shape)} says which nodes count, which is known for class numbers "
            "[nodes] alone: train with wrapped.loss(criterion, ...), whose criterion takes the nodes that count"
        )
    return graph, y.long().masked_fill(~counted, IGNORED)  # not as bool, in which -100 is True


def _counted(graph: Any, y: Tensor, mask: str | None) -> tuple[Tensor | None, str]:
    """Return a bool mask of the nodes that count, or None for all, and the name of its source."""
    # of a NeighborLoader: only the first nodes are seeds, the others their neighbours
    if "input_id" in graph and "batch_size" in graph:
        return torch.arange(len(y), device=y.device) < int(graph["batch_size"]), "batch_size"
    masks = [name for name in MASKS if name in graph]
    if mask in masks:
        return graph[mask], str(mask)
    if masks:
        raise ValueError(
            f"data: the graphs have {', '.join(masks)}, and it is not known which nodes are meant here: {_PAIRS}, where y is {IGNORED} "
            "for all nodes that do not count"
        )
    return None, ""


def _one_batch(pair: Any) -> DataLoader:
    return DataLoader(cast(Any, [pair]), batch_size=None, generator=torch.Generator())


class GraphRows(Dataset):
    """Dataset of graphs, or of pairs (graph, y).

    Args:
        graphs: indexable graphs.
        mask, targets: as for `graphs_paired`.
    """

    def __init__(self, graphs: Any, mask: str | None, targets: bool) -> None:
        self.user_data, self.mask, self.targets = graphs, mask, targets

    def __len__(self) -> int:
        return len(self.user_data)

    def __getitem__(self, i: int) -> Any:
        graph = self.user_data[int(i)]
        return pair_of(graph, self.mask) if self.targets else graph


__all__ = ["GraphRows", "graphs_paired", "pair_of"]
