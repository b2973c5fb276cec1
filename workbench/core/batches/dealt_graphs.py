"""Graphs dealt to voters: which parts of the inputs and of the outputs are of which graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...engine.tree import flatten
from .call_arguments import positional_names
from .graphs import is_graph_batch

NODES = ("x", "z", "pos")  # arguments that hold something of each node, by their names in torch_geometric


class DealtGraphs:
    """The graphs among the inputs of a call, of which each voter can be given some; see `of`.

    Args:
        count: how many there are.
        owners: for each kind of part (nodes and edges, of each type) the number of the graph that each part is of.
        cut: leaves of the inputs, numbers of graphs in rising order -> leaves that hold these graphs alone.
    """

    def __init__(self, count: int, owners: Sequence[Tensor], cut: Callable[[Sequence[Any], Tensor], list[Any]]) -> None:
        self.count, self.cut = count, cut
        self.owners = [owner.cpu() for owner in owners]

    @classmethod
    def of(cls, wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> DealtGraphs | None:
        """The graphs of batches among the inputs, or of tensors that are given as `edge_index` and `batch`.

        Returns:
            None if there are none, or if it cannot be told of which parts a tensor is: it has as many rows as there are nodes and as there are
            edges, and its name says neither.
        """
        if torch.compiler.is_dynamo_compiling():
            return None
        leaves = flatten((args, kwargs))[0]
        batches = [leaf for leaf in leaves if is_graph_batch(leaf)]
        if batches:
            return cls._of_batches(batches)
        if not any(_are_numbers(leaf, 2) and len(leaf) == 2 for leaf in leaves):  # edges; names take longer to find out
            return None
        named = {**dict(zip(positional_names(wrapped), args, strict=False)), **kwargs}
        edges: Any = named.get("edge_index")
        nodes: Any = named.get("batch")
        if not (_are_numbers(edges, 2) and _are_numbers(nodes, 1) and len(edges) == 2 and len(nodes)):
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
            kept = {
                "node": _parts(nodes, graphs, count),
                "edge": _parts(of_edges, graphs, count),
                "graph": graphs.to(nodes.device),
            }
            place = torch.full_like(nodes, -1)
            place[kept["node"]] = torch.arange(len(kept["node"]), device=nodes.device)
            number = nodes.new_full((count,), -1)
            number[kept["graph"]] = torch.arange(len(graphs), device=nodes.device)
            new = []
            for leaf, name, kind in zip(leaves, known, kinds, strict=True):
                if name == "edge_index":
                    new.append(place[leaf[:, kept["edge"]]])
                elif name == "batch":
                    new.append(number[leaf[kept["node"]]])
                else:
                    new.append(leaf.index_select(0, kept[kind].to(leaf.device)) if kind else leaf)
            return new

        return cls(count, [nodes, of_edges], cut)

    def parts(self, rows: Sequence[Tensor] | Tensor) -> list[list[Tensor]]:
        """For each kind of part the numbers of those that are of some graphs, for each voter."""
        return [[_parts(owner, graphs, self.count) for graphs in rows] for owner in self.owners]


def _kind_of(leaf: Any, name: str, sizes: dict[str, int]) -> str | None:
    """Of which parts a leaf holds one each: "node", "edge" or "graph", by their numbers; "" if of none, None where that cannot be told."""
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
    """The graph that each node and each edge is of, for each type of them."""
    several = hasattr(batch, "node_items")
    nodes = {kind: store["batch"] for kind, store in (batch.node_items() if several else [("", batch)])}
    edges = [(kind[0], store) for kind, store in batch.edge_items()] if several else [("", batch)]
    return [*nodes.values(), *(nodes[kind][store["edge_index"][0]] for kind, store in edges if "edge_index" in store)]


def _parts(owner: Tensor, graphs: Tensor, count: int) -> Tensor:
    chosen = torch.zeros(count, dtype=torch.bool, device=owner.device)
    chosen[graphs.to(owner.device)] = True
    return chosen[owner].nonzero()[:, 0]


def _rows(leaf: Any, graphs: Tensor, count: int) -> Any:
    """The rows of a tensor that has one for each graph; all else as it is."""
    if not isinstance(leaf, Tensor) or not leaf.dim() or len(leaf) != count:
        return leaf
    return leaf.index_select(0, graphs.to(leaf.device))


def _are_numbers(value: Any, dims: int) -> bool:
    return isinstance(value, Tensor) and value.dim() == dims and value.dtype == torch.int64


__all__ = ["DealtGraphs"]
