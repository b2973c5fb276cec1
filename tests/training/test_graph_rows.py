"""Graphs of torch_geometric in `fit`, `calibrate` and files: loaders, lists, `y` and masks."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from workbench import calibrate, compose, fit, neo, sculpt, selective, top_uncertain, vote
from workbench.calibration import adapt_batch_norm

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # its own, of torch.jit
    pytest.importorskip("torch_geometric")
    from torch_geometric.data import Batch, Data
    from torch_geometric.loader import DataLoader
    from torch_geometric.nn import GCNConv, global_mean_pool


class Net(nn.Module):
    def __init__(self, by_node: bool = False, outputs: int = 1) -> None:
        super().__init__()
        self.conv, self.head, self.by_node = GCNConv(4, 8), nn.Linear(8, outputs), by_node

    def forward(self, data: Any) -> Tensor:
        h = self.conv(data.x, data.edge_index).relu()
        return self.head(h if self.by_node else global_mean_pool(h, data.batch))


class BatchNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = GCNConv(4, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.norm(self.conv(x, edges))


def graphs(n: int = 40, by_node: bool = False) -> list[Data]:
    several = []
    for i in range(n):
        nodes = 3 + i % 4
        at = torch.arange(nodes)
        x = torch.randn(nodes, 4)
        y = x[:, :1] if by_node else x.mean().reshape(1, 1)
        several.append(Data(x=x, edge_index=torch.stack([at, (at + 1) % nodes]), y=y))
    return several


def by_hand(wrapped: Any, batches: list[Batch], epochs: int) -> list[nn.Module]:
    """Plain voters, each trained on every graph as `fit` trains them, with a third of the loss."""
    voters = [copy.deepcopy(voter).train() for voter in wrapped.voters()]
    for voter in voters:
        optimizer = torch.optim.SGD(voter.parameters(), lr=0.1)
        for _ in range(epochs):
            for batch in batches:
                optimizer.zero_grad()
                (F.mse_loss(voter(batch), batch.y) / len(voters)).backward()
                optimizer.step()
    return [voter.eval() for voter in voters]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize("by_node", [False, True])
def test_fit_trains_plain_voters_by_the_batches_of_a_loader(by_node: bool) -> None:
    wrapped: Any = vote.Wrapper(3)(Net(by_node))
    loader = DataLoader(graphs(by_node=by_node), batch_size=10)
    voters = by_hand(wrapped, list(loader), epochs=2)
    fit(wrapped, loader, epochs=2, optimizer=sgd, validation=0, progress=False)
    batch = Batch.from_data_list(graphs(5, by_node))
    y, risk = wrapped(batch, return_risk=True)
    plain = torch.stack([voter(batch) for voter in voters])
    torch.testing.assert_close(y, plain.mean(0))
    torch.testing.assert_close(risk, plain.std(0, correction=0))


@pytest.mark.parametrize("form", ["list", "batch", "pair"])
def test_fit_takes_graphs_in_every_form(form: str) -> None:
    rows = graphs(8)
    wrapped: Any = vote.Wrapper(2)(Net())
    whole = Batch.from_data_list(rows)
    voters = by_hand(wrapped, [whole], epochs=3)
    data = {"list": rows, "batch": whole, "pair": (whole, whole.y)}[form]
    size = {} if form == "pair" else {"batch_size": 8}
    fit(wrapped, data, epochs=3, optimizer=sgd, validation=0, progress=False, **size)
    torch.testing.assert_close(wrapped(whole), torch.stack([voter(whole) for voter in voters]).mean(0))


@pytest.mark.parametrize("target", [int, torch.tensor, lambda number: torch.tensor([number])])
def test_a_dataset_gives_targets_as_numbers_or_tensors(target: Any) -> None:
    rows = graphs(8)
    for i, row in enumerate(rows):
        row.y = torch.tensor([i % 2])
    pairs = [(row, target(row.y.item())) for row in rows]
    trained = []
    for data in (rows, Pairs(pairs)):
        torch.manual_seed(0)
        wrapped: Any = vote.Wrapper(2, output="logits")(Net(outputs=2))
        fit(wrapped, data, epochs=2, batch_size=4, optimizer=sgd, validation=0, progress=False)
        trained.append(wrapped.state_dict())
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])


class Pairs(Dataset):
    def __init__(self, pairs: list[Any]) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, i: int) -> Any:
        return self.pairs[i]


def test_a_share_of_the_graphs_validates() -> None:
    wrapped: Any = vote.Wrapper(2)(Net())
    history = fit(wrapped, graphs(20), epochs=2, progress=False)
    assert all(record[2] is not None for record in history.records)


@pytest.mark.parametrize("by_node", [False, True])
def test_calibrating_is_that_of_the_answers_as_tensors(by_node: bool) -> None:
    wrapped: Any = compose(vote.Wrapper(2), sculpt.Wrapper())(Net(by_node)).eval()
    batch = Batch.from_data_list(graphs(by_node=by_node))
    with torch.no_grad():
        y, risk = wrapped(batch, return_risk=True)
    factor = ((y - batch.y).square() / risk.total.square()).mean().sqrt()
    for data in (DataLoader(batch.to_data_list(), batch_size=7), batch.to_data_list(), (batch, batch.y)):
        calibrated = calibrate(wrapped, data)
        torch.testing.assert_close(calibrated(batch, return_risk=True)[1].total, factor * risk.total)
    lower, upper = calibrate(wrapped, DataLoader(batch.to_data_list(), batch_size=7), "conformal").interval(batch, 0.8)
    assert 0.8 <= float(((lower <= batch.y) & (batch.y <= upper)).float().mean()) < 0.9


def test_answers_that_are_trusted_are_chosen_by_graph() -> None:
    wrapped: Any = vote.Wrapper(2)(Net()).eval()
    rows = graphs()
    chosen = selective(wrapped, DataLoader(rows, batch_size=7))
    assert len(chosen.risk) == len(rows)
    top = top_uncertain(wrapped, rows, k=3)
    risk = wrapped(Batch.from_data_list(rows), return_risk=True)[1][:, 0]
    assert top.indices.tolist() == risk.argsort(descending=True)[:3].tolist()


def test_masks_say_which_nodes_are_trained_on() -> None:
    one = graphs(1, by_node=True)[0]
    one.x, one.edge_index = torch.randn(30, 4), torch.randint(30, (2, 60))
    one.y, one.train_mask = torch.arange(30) % 3, torch.arange(30) < 12
    one.val_mask = (torch.arange(30) >= 12) & ~(torch.arange(30) >= 20)
    wrapped: Any = vote.Wrapper(2, output="logits")(Net(True, outputs=3))
    voters = [copy.deepcopy(voter).train() for voter in wrapped.voters()]
    for voter in voters:
        optimizer = sgd(voter.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            (F.cross_entropy(voter(one)[one.train_mask], one.y[one.train_mask]) / 2).backward()
            optimizer.step()
    history = fit(wrapped, one, epochs=3, optimizer=sgd, validation=one, progress=False)
    expected = sum(F.cross_entropy(voter.eval()(one)[one.val_mask], one.y[one.val_mask]).item() / 2 for voter in voters)
    assert history.records[-1][2] == pytest.approx(expected, abs=1e-5)
    by_bool = copy.copy(one)
    by_bool.y = one.y == 0  # which has no -100
    scores: Any = vote.Wrapper(2, output="logits")(Net(True, outputs=2))
    numbers = copy.deepcopy(scores)
    fit(scores, by_bool, epochs=2, optimizer=sgd, validation=0, progress=False)
    by_number = copy.copy(one)
    by_number.y = by_bool.y.long()
    fit(numbers, by_number, epochs=2, optimizer=sgd, validation=0, progress=False)
    assert all(torch.equal(scores.state_dict()[name], value) for name, value in numbers.state_dict().items())
    binary: Any = vote.Wrapper(2, output="binary")(Net(True))
    with pytest.raises(ValueError, match="-100 marks missing labels"):
        fit(binary, by_bool, epochs=1, validation=0, progress=False)
    with pytest.raises(ValueError, match=r"train_mask, val_mask.* -100 for all nodes that do not count"):
        calibrate(wrapped, one)


def test_batch_norms_are_adapted_to_the_nodes_of_graphs() -> None:
    net = Net()
    net.conv = BatchNormed()
    wrapped: Any = vote.Wrapper(2)(net)
    rows = [graph for graph in graphs() if len(graph.x) != 3]
    whole = Batch.from_data_list(rows)
    hidden = [voter.conv.conv(whole.x, whole.edge_index) for voter in wrapped.voters()]
    adapted = adapt_batch_norm(wrapped, rows, batch_size=1024)
    for h, voter in zip(hidden, adapted.voters(), strict=True):
        torch.testing.assert_close(voter.conv.norm.running_mean, h.mean(0))
        torch.testing.assert_close(voter.conv.norm.running_var, h.var(0))


def test_what_cannot_be_known_is_refused() -> None:
    wrapped: Any = vote.Wrapper(2)(Net(True))
    rows = graphs(4, by_node=True)
    for row in rows:
        row.train_mask = torch.ones(len(row.x), dtype=torch.bool)
    with pytest.raises(ValueError, match=r"train_mask \[3\] says which nodes count, which is known for class numbers"):
        fit(wrapped, rows, epochs=1, progress=False)
    for row in rows:
        del row.y
    with pytest.raises(ValueError, match="the graphs have no y"):
        fit(wrapped, rows, epochs=1, progress=False)


def test_a_graph_with_nan_is_named() -> None:
    """The error said that all inputs were finite."""
    rows = graphs()
    rows[7].x[1, 0] = torch.nan
    wrapped = vote.Wrapper(2)(Net())
    before = copy.deepcopy(wrapped.state_dict())
    with pytest.raises(FloatingPointError, match=r"x holds NaN or infinite numbers in .*\b7\b"):
        fit(wrapped, rows, epochs=1, progress=False, validation=0)
    after = wrapped.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items() if isinstance(value, Tensor))


def test_a_trained_model_is_saved_and_loaded(tmp_path: Path) -> None:
    wrapped: Any = compose(vote.Wrapper(2), sculpt.Wrapper())(Net())
    fit(wrapped, graphs(), epochs=1, progress=False)
    torch.save(wrapped.state_dict(), tmp_path / "state.pt")
    other: Any = compose(vote.Wrapper(2), sculpt.Wrapper())(Net()).eval()
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    batch = Batch.from_data_list(graphs(6))
    # heads of a trained model share a pass, those of a new one run one after another in its first call
    risks = [model(batch, return_risk=True)[1].total for model in (other, wrapped)]
    torch.testing.assert_close(*risks, atol=0, rtol=1e-6)
    state = Net().state_dict()
    assert other.load_state_dict(state).missing_keys == []
    torch.testing.assert_close(other.voters()[1].conv.lin.weight, state["conv.lin.weight"])


def test_a_density_is_fitted_to_graphs() -> None:
    wrapped: Any = compose(vote.Wrapper(2), neo.Wrapper())(Net())
    fit(wrapped, DataLoader(graphs(), batch_size=10), epochs=1, validation=0, progress=False)
    batch = Batch.from_data_list(graphs(6))
    assert wrapped(batch, return_risk=True)[1].vacuitic.shape == (6,)
