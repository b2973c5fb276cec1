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


def bad_graphs(batch: Any) -> list[int]:
    """Return the numbers of the graphs of a batch that contain NaN or infinity in any tensor."""

    def is_bad(graph: Any) -> bool:
        finite: list[bool] = []

        def noted(value: Tensor) -> Tensor:
            finite.append(bool(value.isfinite().all()))
            return value

        mapped(graph, noted)
        return not all(finite)

    return [number for number, graph in enumerate(batch.to_data_list()) if is_bad(graph)]


__all__ = ["bad_graphs", "batched", "is_graph", "is_graph_batch", "mapped"]
