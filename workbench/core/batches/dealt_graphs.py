"""Dealing of graphs to voters: which nodes, edges and rows of inputs and outputs belong to which graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...engine.tree import flatten
from .call_arguments import positional_names
from .graphs import is_graph_batch

NODES = ("x", "z", "pos")  # torch_geometric's names of arguments with one row per node


class DealtGraphs:
    """The graphs among the inputs of a call, to be dealt to voters; see `of`.

    Args:
        count: number of graphs.
        owners: for each kind of part (nodes and edges, of each type) the graph number of each part.
        cut: function(leaves of the inputs, sorted graph numbers) that returns the leaves with only these graphs.
    """

    def __init__(self, count: int, owners: Sequence[Tensor], cut: Callable[[Sequence[Any], Tensor], list[Any]]) -> None:
        self.count, self.cut = count, cut
        self.owners = [owner.cpu() for owner in owners]

    @classmethod
    def of(cls, wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> DealtGraphs | None:
        """Find the graphs in batches among the inputs, or in tensors passed as `edge_index` and `batch`.

        Returns:
            None if there are no graphs, or if it is ambiguous what the rows of a tensor are: their number equals that of both nodes and edges,
            and its name indicates neither.
        """
        if torch.compiler.is_dynamo_compiling():
            return None
        leaves = flatten((args, kwargs))[0]
        batches = [leaf for leaf in leaves if is_graph_batch(leaf)]
        if batches:
            return cls._of_batches(batches)
        # cheap test for edges before the slower lookup of argument names
        if not any(_is_int64(leaf, 2) and len(leaf) == 2 for leaf in leaves):
            return None
        named = {**dict(zip(positional_names(wrapped), args, strict=False)), **kwargs}
        edges: Any = named.get("edge_index")
        nodes: Any = named.get("batch")
        if not (_is_int64(edges, 2) and _is_int64(nodes, 1) and len(edges) == 2 and len(nodes)):
            return None
        return cls._of_tensors(leaves, named, edges, nodes)

    @classmethod
    def _of_batches(cls, batches: Sequence[Any]) -> DealtGraphs | None:
        if len({int(batch.num_graphs) for batch in batches}) > 1:
            return None
        count = int(batches[0].num_graphs)

        def cut(leaves: Sequence[Any], graphs: Tensor) -> list[Any]:
            return [_graphs_of(leaf, graphs) if is_graph_batch(leaf) else _rows(leaf, graphs, count) for leaf in leaves]

        return cls(count, [owner for batch in batches for owner in _owners(batch)], cut)

    @classmethod
    def _of_tensors(
        cls, leaves: Sequence[Any], named: dict[str, Any], edges: Tensor, nodes: Tensor
    ) -> DealtGraphs | None:
        count = int(nodes.max()) + 1
        of_edges = nodes[edges[0]]
        sizes = {"node": len(nodes), "edge": len(of_edges), "graph": count}
        names = {id(value): name for name, value in named.items() if isinstance(value, Tensor)}
        known = [names.get(id(leaf), "") for leaf in leaves]
        kinds = [_kind_of(leaf, name, sizes) for leaf, name in zip(leaves, known, strict=True)]
        if None in kinds:
            return None

        def cut(leaves: Sequence[Any], graphs: Tensor) -> list[Any]:
            selected = {
                "node": _parts(nodes, graphs, count),
                "edge": _parts(of_edges, graphs, count),
                "graph": graphs.to(nodes.device),
            }
            new_node = torch.full_like(nodes, -1)
            new_node[selected["node"]] = torch.arange(len(selected["node"]), device=nodes.device)
            new_graph = nodes.new_full((count,), -1)
            new_graph[selected["graph"]] = torch.arange(len(graphs), device=nodes.device)
            new = []
            for leaf, name, kind in zip(leaves, known, kinds, strict=True):
                if name == "edge_index":
                    new.append(new_node[leaf[:, selected["edge"]]])
                elif name == "batch":
                    new.append(new_graph[leaf[selected["node"]]])
                else:
                    new.append(leaf.index_select(0, selected[kind].to(leaf.device)) if kind else leaf)
            return new

        return cls(count, [nodes, of_edges], cut)

    def parts(self, rows: Sequence[Tensor] | Tensor) -> list[list[Tensor]]:
        """Return for each kind of part, and for each voter, the numbers of the parts that belong to the voter's graphs."""
        return [[_parts(owner, graphs, self.count) for graphs in rows] for owner in self.owners]


def _kind_of(leaf: Any, name: str, sizes: dict[str, int]) -> str | None:
    """Return what the rows of a leaf are, by their number: "node", "edge" or "graph"; "" if none of these, None if ambiguous."""
    if not isinstance(leaf, Tensor) or not leaf.dim() or name in ("edge_index", "batch"):
        return ""
    kinds = [kind for kind, size in sizes.items() if len(leaf) == size]
    if len(kinds) < 2:
        return kinds[0] if kinds else ""
    named = "node" if name in NODES else name.partition("_")[0]
    return named if named in kinds else None


def _graphs_of(batch: Any, graphs: Tensor) -> Any:
    followed = {key for store in batch.stores for key in store.keys() if f"{key}_batch" in store}  # noqa: SIM118
    return type(batch).from_data_list(batch.index_select(graphs), follow_batch=sorted(followed))


def _owners(batch: Any) -> list[Tensor]:
    """Return the graph number of each node and of each edge, one tensor per type."""
    several = hasattr(batch, "node_items")
    nodes = {kind: store["batch"] for kind, store in (batch.node_items() if several else [("", batch)])}
    edges = [(kind[0], store) for kind, store in batch.edge_items()] if several else [("", batch)]
    return [*nodes.values(), *(nodes[kind][store["edge_index"][0]] for kind, store in edges if "edge_index" in store)]


def _parts(owner: Tensor, graphs: Tensor, count: int) -> Tensor:
    chosen = torch.zeros(count, dtype=torch.bool, device=owner.device)
    chosen[graphs.to(owner.device)] = True
    return chosen[owner].nonzero()[:, 0]


def _rows(leaf: Any, graphs: Tensor, count: int) -> Any:
    """Select rows of a tensor with one row per graph; anything else is returned unchanged."""
    if not isinstance(leaf, Tensor) or not leaf.dim() or len(leaf) != count:
        return leaf
    return leaf.index_select(0, graphs.to(leaf.device))


def _is_int64(value: Any, dims: int) -> bool:
    return isinstance(value, Tensor) and value.dim() == dims and value.dtype == torch.int64


__all__ = ["DealtGraphs"]
