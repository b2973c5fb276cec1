"""Networks on torch_geometric graphs: predictions, risks and losses equal those of plain voters, each on its own graphs."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import WorkbenchWarning, compose, neo, sample, sculpt, vote
from workbench.core.batches.row_weights import row_weights

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # its own, of torch.jit
    pytest.importorskip("torch_geometric")
    from torch_geometric.data import Batch, Data, HeteroData
    from torch_geometric.nn import GATConv, GCNConv, GINConv, HeteroConv, global_add_pool, global_mean_pool


def graph(nodes: int) -> Data:
    """A ring with chords: more edges than nodes."""
    at = torch.arange(nodes)
    edges = torch.stack([torch.cat([at, at[1:]]), torch.cat([(at + 1) % nodes, at[1:] - 1])])
    x = torch.randn(nodes, 4)
    return Data(x=x, edge_index=edges, edge_attr=torch.rand(edges.shape[1], 1), y=x.mean().reshape(1, 1))


def graphs(n: int = 12) -> list[Data]:
    return [graph(3 + i % 4) for i in range(n)]


class Net(nn.Module):
    """A batch of graphs -> one value for each graph, node or edge."""

    def __init__(self, layer: str = "gcn", level: str = "graph") -> None:
        super().__init__()
        self.conv: nn.Module = {
            "gcn": lambda: GCNConv(4, 8),
            "gat": lambda: GATConv(4, 8),
            "gin": lambda: GINConv(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))),
        }[layer]()
        self.head, self.level = nn.Linear(8, 1), level

    def forward(self, data: Any) -> Tensor:
        h = self.conv(data.x, data.edge_index).relu()
        if self.level == "graph":
            h = global_mean_pool(h, data.batch)
        if self.level == "edge":
            h = h[data.edge_index[0]] * data.edge_attr
        return self.head(h)


class Both(Net):
    """A value for each graph, and one for each node."""

    def forward(self, data: Any) -> dict[str, Tensor]:
        h = self.conv(data.x, data.edge_index).relu()
        return {"graph": self.head(global_mean_pool(h, data.batch)), "node": self.head(h)}


class Loose(Net):
    """The same on tensors."""

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        h = self.conv(x, edge_index, edge_weight).relu()
        return self.head(global_mean_pool(h, batch) if self.level == "graph" else h)


def owners(batch: Batch, level: str) -> Tensor:
    """The number of the graph that each row of an output is of."""
    if level == "graph":
        return torch.arange(batch.num_graphs)
    return batch.batch if level == "node" else batch.batch[batch.edge_index[0]]


def check_dealt(y: Tensor, answers: list[Tensor], of: Tensor) -> None:
    """Each graph is answered by one voter as by a plain copy, and graphs are dealt evenly."""
    right = torch.stack([torch.isclose(y, answer, atol=1e-6).all(1) for answer in answers])
    who = []
    for number in of.unique():
        each = right[:, of == number].all(1)
        assert int(each.sum()) == 1, f"graph {int(number)} is not that of one voter"
        who.append(int(each.long().argmax()))
    counts = torch.bincount(torch.tensor(who), minlength=len(answers))
    assert int(counts.max() - counts.min()) <= 1


@pytest.mark.parametrize("layer", ["gcn", "gat", "gin"])
@pytest.mark.parametrize("level", ["graph", "node", "edge"])
def test_prediction_and_risk_are_those_of_plain_voters(layer: str, level: str) -> None:
    wrapped: Any = vote.Wrapper(3)(Net(layer, level)).eval()
    batch = Batch.from_data_list(graphs())
    y, risk = wrapped(batch, return_risk=True)
    plain = torch.stack([voter.eval()(batch) for voter in wrapped.voters()])
    torch.testing.assert_close(y, plain.mean(0))
    torch.testing.assert_close(risk, plain.std(0, correction=0))


@pytest.mark.parametrize("layer", ["gcn", "gat", "gin"])
@pytest.mark.parametrize("level", ["graph", "node", "edge"])
def test_each_graph_is_answered_by_one_voter(layer: str, level: str) -> None:
    wrapped: Any = vote.Wrapper(3)(Net(layer, level)).train()
    batch = Batch.from_data_list(graphs(14))
    answers = [voter(batch) for voter in wrapped.voters()]
    for _ in range(3):
        check_dealt(wrapped(batch), answers, owners(batch, level))


def test_outputs_by_graph_and_by_node_are_dealt_alike() -> None:
    wrapped: Any = vote.Wrapper(3)(Both()).train()
    batch = Batch.from_data_list(graphs())
    answers = [voter(batch) for voter in wrapped.voters()]
    y = wrapped(batch)
    check_dealt(y["graph"], [answer["graph"] for answer in answers], owners(batch, "graph"))
    check_dealt(y["node"], [answer["node"] for answer in answers], owners(batch, "node"))


@pytest.mark.parametrize("level", ["graph", "node"])
@pytest.mark.parametrize("by_name", [False, True])
def test_graphs_that_come_as_tensors_are_dealt_as_well(level: str, by_name: bool) -> None:
    wrapped: Any = vote.Wrapper(3)(Loose("gcn", level)).train()
    batch = Batch.from_data_list(graphs())
    weight = batch.edge_attr[:, 0]
    answers = [voter(batch.x, batch.edge_index, batch.batch, weight) for voter in wrapped.voters()]
    if by_name:
        y = wrapped(batch.x, batch=batch.batch, edge_index=batch.edge_index, edge_weight=weight)
    else:
        y = wrapped(batch.x, batch.edge_index, batch.batch, weight)
    check_dealt(y, answers, owners(batch, level))


class Bonds(nn.Module):
    """Sums over the nodes and edges of each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.atom, self.bond = nn.Linear(4, 1), nn.Linear(1, 1)

    def forward(self, atoms: Tensor, edge_index: Tensor, bonds: Tensor, batch: Tensor) -> Tensor:
        edges = global_add_pool(self.bond(bonds), batch[edge_index[0]], size=int(batch.max()) + 1)
        return global_add_pool(self.atom(atoms), batch) + edges


class EdgeAttributes(Bonds):
    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor) -> Tensor:
        return super().forward(x, edge_index, edge_attr, batch)


def test_tensors_with_as_many_nodes_as_edges_are_told_apart_by_name_or_not_dealt() -> None:
    batch, even = Batch.from_data_list(graphs()), Batch.from_data_list(graphs())
    kept = torch.randperm(even.num_edges)[: even.num_nodes]
    even.edge_index, even.edge_attr = even.edge_index[:, kept], even.edge_attr[kept]
    named, nameless = (vote.Wrapper(3)(net()).train() for net in (EdgeAttributes, Bonds))
    for wrapped in (named, nameless):
        inputs = batch.x, batch.edge_index, batch.edge_attr, batch.batch
        check_dealt(wrapped(*inputs), [voter(*inputs) for voter in wrapped.voters()], torch.arange(12))
    inputs = even.x, even.edge_index, even.edge_attr, even.batch
    check_dealt(named(*inputs), [voter(*inputs) for voter in named.voters()], torch.arange(12))
    with pytest.warns(WorkbenchWarning, match="no common number of rows"):
        y = nameless(*inputs)
    torch.testing.assert_close(y, torch.stack([voter(*inputs) for voter in nameless.voters()]).mean(0))


def test_what_forward_writes_into_a_batch_is_seen_by_no_other_voter() -> None:
    class Doubled(Net):
        def forward(self, data: Any) -> Tensor:
            data.x = data.x * 2
            return super().forward(data)

    wrapped: Any = vote.Wrapper(3)(Doubled()).eval()
    batch = Batch.from_data_list(graphs())
    plain = torch.stack([voter.eval()(copy.copy(batch)) for voter in wrapped.voters()])
    for _ in range(2):
        copied = copy.copy(batch)
        torch.testing.assert_close(wrapped(copied, return_risk=True)[0], plain.mean(0))
        torch.testing.assert_close(copied.x, 2 * batch.x)  # as if called once


@pytest.mark.parametrize("by_node", [False, True])
@pytest.mark.parametrize("features", [False, True])
def test_a_graph_has_its_weight_in_every_batch(features: bool, by_node: bool) -> None:
    """Voters that start alike learn different things only so, where many graphs are of one class."""
    rows = [Data(x=torch.randn(n, 2) if features else None, num_nodes=n, edge_index=edges) for n, edges in various()]
    for row in rows:
        row.y = torch.zeros(row.num_nodes if by_node else 1, dtype=torch.long)

    def weights(numbers: list[int]) -> dict[int, Tensor]:
        batch = Batch.from_data_list([rows[i] for i in numbers])
        drawn = row_weights(batch, batch.y, 3)
        sizes = [len(rows[i].y) for i in numbers]
        return dict(zip(numbers, drawn.split(sizes, 1), strict=True))

    together, apart = weights(list(range(8))), weights([5, 2, 7])
    if not by_node or features:  # nodes without features may be alike
        assert all(torch.equal(apart[i], together[i]) for i in apart)
    assert len({float(drawn[0, 0]) for drawn in together.values()}) == 8


def various() -> list[tuple[int, Tensor]]:
    """Nodes and edges of graphs, some with as many."""
    return [(n, torch.randint(n, (2, m))) for n, m in [(4, 6), (4, 8), (5, 6), (6, 9), (7, 7), (4, 7), (9, 8), (6, 6)]]


def test_a_dealt_step_gives_each_voter_the_gradient_of_its_graphs() -> None:
    wrapped: Any = vote.Wrapper(2)(Net()).train()
    batch = Batch.from_data_list(graphs(8))
    voters = [copy.deepcopy(voter) for voter in wrapped.voters()]
    y = wrapped(batch)
    who = [int(torch.isclose(y, voter(batch), atol=1e-6)[0]) for voter in voters]
    mine = torch.isclose(y, voters[0](batch), atol=1e-6)[:, 0]
    assert sum(who) == 1
    assert int(mine.sum()) == 4
    nn.functional.mse_loss(y, batch.y).backward()
    for k, voter in enumerate(voters):
        dealt = mine if k == 0 else ~mine
        ((voter(batch) - batch.y)[dealt].square().sum() / len(batch.y)).backward()
        torch.testing.assert_close(wrapped.get_parameter("head.weight@vote").grad[k], voter.head.weight.grad)


def test_risk_heads_and_samples_answer_by_graph_and_by_node() -> None:
    batch = Batch.from_data_list(graphs())
    for level, rows in (("graph", batch.num_graphs), ("node", batch.num_nodes)):
        wrapped: Any = compose(vote.Wrapper(2), sculpt.Wrapper())(Net("gcn", level)).eval()
        y, risk = wrapped(batch, return_risk=True)
        assert y.shape == risk.aleatoric.shape == risk.epistemic.shape == (rows, 1)
        y, risk = wrapped.train()(batch, return_risk=True, tile_and_reduce=False)
        assert y.shape == risk.aleatoric.shape == (rows, 1)
        assert "epistemic" not in risk.names()
        y, risk = sample.Wrapper(3)(Net("gcn", level)).eval()(batch, return_risk=True)
        assert y.shape == risk.shape == (rows, 1)
        strange: Any = neo.Wrapper()(Net("gcn", level))
        strange.fit([batch])
        assert strange.eval()(batch, return_risk=True)[1].shape == (rows,)


def test_graphs_of_several_types_are_dealt() -> None:
    class Hetero(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of nodes that nothing is sent to
                self.conv = HeteroConv({("a", "to", "b"): GATConv((3, 2), 8, add_self_loops=False)})
            self.graph, self.node = nn.Linear(8, 1), nn.Linear(8, 1)

        def forward(self, data: Any) -> dict[str, Tensor]:
            h = self.conv(data.x_dict, data.edge_index_dict)["b"]
            return {"graph": self.graph(global_add_pool(h, data["b"].batch)), "b": self.node(h)}

    several = []
    for n in range(8):
        one = HeteroData()
        one["a"].x, one["b"].x = torch.randn(3 + n % 2, 3), torch.randn(2 + n % 3, 2)
        one["a", "to", "b"].edge_index = torch.cartesian_prod(torch.arange(3), torch.arange(2)).T
        several.append(one)
    batch = Batch.from_data_list(several)
    wrapped: Any = vote.Wrapper(2)(Hetero()).train()
    answers = [voter(batch) for voter in wrapped.voters()]
    y = wrapped(batch)
    check_dealt(y["graph"], [answer["graph"] for answer in answers], torch.arange(8))
    check_dealt(y["b"], [answer["b"] for answer in answers], batch["b"].batch)


@pytest.mark.parametrize("case", ["one", "few", "mixed", "changed"])
def test_what_cannot_be_dealt_is_the_mean_and_is_told(case: str) -> None:
    class Mixed(Net):
        def forward(self, data: Any) -> Tensor:
            y = super().forward(data)
            return y - y.mean()

    class Changed(Net):
        def forward(self, data: Any) -> Tensor:
            data.x = data.x * 2
            return super().forward(data)

    wrapped: Any = vote.Wrapper(3)({"mixed": Mixed, "changed": Changed}.get(case, Net)()).train()
    batch = graph(5) if case == "one" else Batch.from_data_list(graphs(2 if case == "few" else 9))
    said = {
        "one": "a single graph",
        "few": "2 graphs",
        "mixed": "depend on each other",
        "changed": "changes an object",
    }[case]
    plain = torch.stack([voter(copy.copy(batch)) for voter in wrapped.voters()]).mean(0)
    with pytest.warns(WorkbenchWarning, match=said):
        y = wrapped(batch)
    torch.testing.assert_close(y, plain)
