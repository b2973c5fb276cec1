"""Batches of graphs as torch_geometric makes them, known by their structure."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ...introspect.objects import is_graph


def is_graph_batch(value: Any) -> bool:
    """Whether something is a batch of graphs that can be given one by one."""
    return is_graph(value) and hasattr(type(value), "from_data_list") and hasattr(type(value), "index_select")


def mapped(graph: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A graph whose tensors are those that a function makes of its own."""
    return copy.copy(graph).apply(function)


def batched(graphs: Sequence[Any]) -> Any:
    """One batch of several graphs."""
    from torch_geometric.data import Batch  # the graphs are of it, and it is imported by now

    return Batch.from_data_list(list(graphs))


__all__ = ["batched", "is_graph", "is_graph_batch", "mapped"]
