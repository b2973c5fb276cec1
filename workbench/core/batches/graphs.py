"""Batches of torch_geometric graphs, recognized by their interface."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ...introspect.objects import is_graph


def is_graph_batch(value: Any) -> bool:
    """Return whether a value is a batch of graphs that can be split into single graphs."""
    return is_graph(value) and hasattr(type(value), "from_data_list") and hasattr(type(value), "index_select")


def mapped(graph: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of a graph with a function applied to its tensors."""
    return copy.copy(graph).apply(function)


def batched(graphs: Sequence[Any]) -> Any:
    """Combine several graphs into one batch."""
    from torch_geometric.data import Batch  # already imported, since the graphs are of this package

    return Batch.from_data_list(list(graphs))


__all__ = ["batched", "is_graph", "is_graph_batch", "mapped"]
