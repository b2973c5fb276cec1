"""neo on layers whose rows are not those of the inputs: left out, or refused if no other layer is left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.density_rows import draw
from torch import Tensor, nn

from workbench import neo


class Reordered(nn.Module):
    """A model whose hidden layer runs on rows or steps in another order than that of the inputs."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.body, self.head, self.order = nn.Linear(4, 6), nn.Linear(6, 2), order

    def forward(self, x: Tensor) -> Tensor:  # [rows, steps, 4]
        rows = len(x)
        if self.order == "steps_first":
            h = self.body(x.transpose(0, 1).reshape(-1, 4)).view(-1, rows, 6).mean(0)
        elif self.order == "twins":
            h = self.body(torch.cat([x[:, 0], x[:, 1]])).view(2, rows, 6).sum(0)
        else:
            order = x[:, 0, 0].argsort()
            h = self.body(x[order].mean(1))
            h = torch.relu(h)[order.argsort()] if self.order == "sorted" else torch.relu(h)
        y = self.head(torch.tanh(h))
        return y[order.argsort()] if self.order == "sorted_throughout" else y


@pytest.mark.parametrize("order", ["steps_first", "twins", "sorted"])
def test_layers_that_run_on_reordered_rows_are_left_out(order: str) -> None:
    """The risk of a row is then its own, in whatever batch it comes."""
    torch.manual_seed(0)
    wrapped: Any = neo.Wrapper()(Reordered(order)).eval().fit(torch.randn(60, 7, 4))
    x = torch.cat([torch.randn(3, 7, 4), 8 * torch.randn(3, 7, 4)])
    risk = wrapped(x, return_risk=True)[1]
    torch.testing.assert_close(
        risk, torch.cat([wrapped(row, return_risk=True)[1] for row in x.split(1)]), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("layers", [None, "body"])
def test_a_model_that_only_runs_on_reordered_rows_is_refused(layers: str | None) -> None:
    with pytest.raises(ValueError, match="in the order of the rows"):
        neo.Wrapper(layers=layers)(Reordered("sorted_throughout" if layers is None else "twins")).eval().fit(
            torch.randn(60, 7, 4)
        )


class Neighbors(nn.Module):
    """A graph network, each node of which sees its neighbors alone."""

    def __init__(self, n_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(n_layers)])

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        for layer in self.layers:
            x = layer(torch.zeros_like(x).index_add(0, target, x[source]))
        return x


@pytest.mark.parametrize("n_layers", [1, 2])
def test_nodes_that_do_not_see_themselves_have_the_features_of_their_neighbors(n_layers: int) -> None:
    torch.manual_seed(0)
    model, x, ring = Neighbors(n_layers), torch.randn(9, 3), torch.arange(9)
    edges = torch.stack([torch.cat([ring, ring]), torch.cat([ring.roll(1), ring.roll(-1)])])
    wrapped: Any = neo.Wrapper(density="gaussian")(model).eval()
    wrapped.fit([((x, edges),)])
    x[0] += 50
    risk = wrapped(x, edges, return_risk=True)[1]
    near = {1: {1, 8}, 2: {2, 7, 0}}[n_layers]
    assert {*risk.topk(len(near)).indices.tolist()} == near


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_layers_that_run_on_nested_tensors_are_left_out() -> None:
    class Ragged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:  # [rows, steps, 4]
            rows = torch.nested.as_nested_tensor([row[row[:, 0] > 0] for row in x])
            return self.head(torch.nested.to_padded_tensor(torch.relu(self.body(rows)), 0.0).sum(1))

    torch.manual_seed(0)
    wrapped: Any = neo.Wrapper(density="gaussian")(Ragged()).eval()
    with torch.no_grad():
        wrapped.fit(torch.randn(60, 7, 4))
        risk = wrapped(torch.cat([torch.randn(3, 7, 4), 9 * torch.randn(3, 7, 4)]), return_risk=True)[1]
    assert risk[3:].min() > risk[:3].max()


class Windowed(nn.Module):
    """Attention-like mixing of the steps of a window: a layer sees [rows * windows, steps, d], as in Swin transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:  # [rows, 8, 3]
        windows = self.embed(x).reshape(-1, 4, 5)
        windows = self.body(torch.tanh(windows - windows.mean(1, keepdim=True)))
        return self.head(torch.tanh(windows).reshape(len(x), -1, 5).mean(1))


def test_as_many_steps_in_a_window_as_rows_in_a_batch_are_no_rows() -> None:
    torch.manual_seed(0)
    wrapped: Any = neo.Wrapper()(Windowed()).eval().fit([torch.randn(4, 8, 3) for _ in range(20)])
    x = torch.cat([torch.randn(2, 8, 3), 8 * torch.randn(2, 8, 3)])
    risk = wrapped(x, return_risk=True)[1]
    rows = torch.cat([wrapped(row, return_risk=True)[1] for row in x.split(1)])
    torch.testing.assert_close(risk, rows, rtol=1e-3, atol=1e-3)


class Typed(nn.Module):
    """A network on the nodes of two types, which answers for both, as heterogeneous graph networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"user": nn.Linear(3, 4), "item": nn.Linear(3, 4)})
        self.heads = nn.ModuleDict({"user": nn.Linear(4, 2), "item": nn.Linear(4, 2)})

    def forward(self, x: dict[str, Tensor], edges: Tensor) -> dict[str, Tensor]:  # edges [2, n] from users to items
        h = {name: torch.tanh(self.layers[name](nodes)) for name, nodes in x.items()}
        received = torch.zeros_like(h["item"]).index_add(0, edges[1], h["user"][edges[0]])
        return {"user": self.heads["user"](h["user"]), "item": self.heads["item"](h["item"] + received)}


def test_as_many_outputs_by_name_as_an_input_has_rows_are_no_list_of_rows() -> None:
    """The edges of a graph have two rows, sources and targets; two types of nodes are two outputs."""
    torch.manual_seed(0)
    edges = torch.tensor([[0, 1, 5], [3, 1, 2]])
    wrapped: Any = neo.Wrapper()(Typed()).eval()
    wrapped.fit([({"user": torch.randn(6, 3), "item": torch.randn(4, 3)}, edges) for _ in range(10)])
    x = {"user": torch.randn(6, 3), "item": torch.randn(4, 3)}
    x["user"][2] *= 100
    risk = wrapped(x, edges, return_risk=True)[1]
    assert risk.shape == (6,)
    assert risk.argmax() == 2


# ---- batches whose number of rows does not tell ----------------------------------------------------------------------
def agrees_row_by_row(wrapped: Any, x: Tensor, dim: int = 0) -> bool:
    """Whether the risk of each row is the same alone and in the batch."""
    risk = wrapped(x, return_risk=True)[1]
    alone = torch.cat([wrapped(row, return_risk=True)[1] for row in x.split(1, dim)])
    return torch.allclose(risk, alone, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("order", ["steps_first", "twins", "sorted"])
def test_a_first_batch_of_one_row_does_not_hide_reordered_rows(order: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(60, 7, 4)
    wrapped: Any = neo.Wrapper()(Reordered(order)).eval().fit(x.split(1))
    loaded: Any = neo.Wrapper()(Reordered(order)).eval()
    loaded.load_state_dict(wrapped.state_dict())
    for model in (wrapped, loaded):
        with pytest.raises(RuntimeError, match="begin with a batch of several rows"):
            model(x[:5], return_risk=True)
        model.fit(x.split(10))
        assert agrees_row_by_row(model, x[:5])


def test_a_fit_of_single_rows_is_right_where_the_order_is_kept() -> None:
    torch.manual_seed(0)
    x, model = torch.randn(60, 4), nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    wrapped: Any = neo.Wrapper()(model).eval().fit(x.split(1))
    expected: Any = neo.Wrapper()(model).eval().fit(x)
    torch.testing.assert_close(wrapped(x, return_risk=True)[1], expected(x, return_risk=True)[1])


class StepsFirst(nn.Module):
    """A network of each step, on [steps, rows, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(x)).mean(0))


class ColumnsFirst(StepsFirst):
    """The same with a vector for each column of [rows, columns, 4] in place of steps."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1))


@pytest.mark.parametrize("kind", [StepsFirst, ColumnsFirst])
@pytest.mark.parametrize("sizes", [7, [7, 13, 40]])
def test_as_many_rows_as_steps_in_the_fit_do_not_hide_the_axis_of_rows(
    kind: type[StepsFirst], sizes: int | list[int]
) -> None:
    torch.manual_seed(0)
    dim = 0 if kind is ColumnsFirst else 1
    x = torch.randn(60, 7, 4).cumsum(1)
    x = x if dim == 0 else x.transpose(0, 1)
    model = kind()
    wrapped: Any = neo.Wrapper()(model).eval().fit(x.split(sizes, dim))
    expected: Any = neo.Wrapper()(model).eval().fit([x])
    new = x.narrow(dim, 0, 9)
    torch.testing.assert_close(
        wrapped(new, return_risk=True)[1], expected(new, return_risk=True)[1], rtol=1e-3, atol=1e-3
    )


class ColumnAttention(nn.Module):
    """Attention over the columns of each step, on [rows * steps, columns, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(1, 8), nn.Linear(8, 2)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # [rows, steps, columns]
        h = self.embed(x.flatten(0, 1)[..., None])
        return self.head(self.attention(h, h, h)[0].mean(1).unflatten(0, x.shape[:2]).mean(1))


def test_attention_over_columns_of_as_many_steps_as_rows() -> None:
    torch.manual_seed(0)
    wrapped: Any = neo.Wrapper()(ColumnAttention()).eval().fit(torch.randn(60, 4, 6).split(4))
    assert agrees_row_by_row(wrapped, torch.randn(5, 4, 6))


class Memory(nn.Module):
    """Attention over a table of constants, which pass through the layer of the data before these."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(4, 6))
        self.key, self.head = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        keys, queries = self.key(self.table * 2), self.key(x)
        return self.head((queries @ keys.T).softmax(1) @ keys + queries)


@pytest.mark.parametrize("rows", [60, 4, 2])
def test_constants_that_pass_through_a_layer_before_the_data_are_no_features(rows: int) -> None:
    """In a batch of as many rows as constants, or of a divisor."""
    torch.manual_seed(0)
    x = torch.randn(60, 6)
    wrapped: Any = neo.Wrapper()(Memory()).eval().fit(x.split(rows))
    loaded: Any = neo.Wrapper()(Memory()).eval()
    loaded.load_state_dict(wrapped.state_dict())
    expected = wrapped(x, return_risk=True)[1]
    for model in (wrapped, loaded):
        for n in (1, 2, 4, 5):
            torch.testing.assert_close(model(x[:n], return_risk=True)[1], expected[:n], rtol=1e-3, atol=1e-3)


# ---- rows second ------------------------------------------------------------------------------------------------------
class Tokens(nn.Module):
    """A network of each step, and the mean over steps."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(3, 6), nn.Linear(6, 1)
        self.steps = 1 if batch_first else 0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(x)).mean(self.steps))


def test_layers_of_steps_are_features_whichever_axis_is_first() -> None:
    rows_first, steps_first = Tokens(batch_first=True).eval(), Tokens(batch_first=False).eval()
    steps_first.load_state_dict(rows_first.state_dict())
    x = draw(200, 10, 3).cumsum(1)
    expected: Any = neo.Wrapper()(rows_first).fit([x])
    wrapped: Any = neo.Wrapper()(steps_first).fit([x.transpose(0, 1)])
    assert wrapped._workbench.methods[0].sites == ["hidden.weight", "head.weight"]
    risk = wrapped(x[:9].transpose(0, 1), return_risk=True)[1]
    torch.testing.assert_close(risk, expected(x[:9], return_risk=True)[1])


class ColumnByColumn(nn.Module):
    """Each column has an embedding of its own, columns first."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Parameter(draw(5, 1, 4))
        self.hidden, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        columns = torch.bmm(x.T[:, :, None], self.embeddings)
        return self.head(torch.tanh(self.hidden(columns)).mean(0))


def test_a_loaded_model_knows_the_axis_of_rows_in_a_batch_of_as_many_rows_as_columns() -> None:
    x = draw(300, 5)
    wrapped: Any = neo.Wrapper(layers="hidden")(ColumnByColumn()).eval().fit(x)
    other: Any = neo.Wrapper(layers="hidden")(ColumnByColumn()).eval()
    other.load_state_dict(wrapped.state_dict())
    risk = other(x[:5], return_risk=True)[1]
    torch.testing.assert_close(risk, wrapped(x[:7], return_risk=True)[1][:5])


# ---- outputs with steps first ----------------------------------------------------------------------------------------
class Tagger(nn.Module):
    """A value for each step, on [steps, rows, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.LSTM(3, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x)[0])


class Words(nn.Module):
    """A recurrent layer over the characters of each word, on [rows, words, characters, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.GRU(3, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        last = self.recurrent(x.flatten(0, 1).transpose(0, 1))[1][-1]
        return self.head(last.unflatten(0, x.shape[:2]).mean(1))


@pytest.mark.parametrize("rows", [8, 9])
def test_steps_of_recurrent_layers_are_no_rows(rows: int) -> None:
    with pytest.raises(
        ValueError, match=r"dimension of the output, 4, counts steps.* recurrent.*output.transpose\(0, 1\)"
    ):
        neo.Wrapper()(Tagger()).eval().fit([torch.randn(4, rows, 3)])
    wrapped: Any = neo.Wrapper(per="position")(Tagger()).eval().fit([torch.randn(4, rows, 3)])
    assert wrapped(torch.randn(4, rows, 3), return_risk=True)[1].shape == (4, rows, 1)


def test_as_many_characters_as_rows_are_no_rows() -> None:
    torch.manual_seed(0)
    wrapped: Any = neo.Wrapper()(Words()).eval().fit(torch.randn(60, 3, 5, 3).split(5))
    assert agrees_row_by_row(wrapped, torch.randn(7, 3, 5, 3))
