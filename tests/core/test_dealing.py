"""In training mode each row of a batch is answered by one voter; where rows depend on each other, the mean answers with a warning."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.models import mlp
from torch import Tensor, nn

from workbench import Risk, WorkbenchWarning, compose, sculpt, vote


class Constant(nn.Module):
    """x + offset: shows who has answered a row."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.offset


def constants(n: int, **settings: Any) -> Any:
    """A vote of n voters that add 0, 100, 200, ..."""
    wrapped: Any = vote.Wrapper(n, **settings)(Constant())
    wrapped.set_risk_parameters({"offset@vote": 100.0 * torch.arange(n)[:, None]})
    return wrapped.train()


def who(wrapped: Any, x: Tensor, **kwargs: Any) -> list[int]:
    """The voter that answered each row."""
    out = wrapped(x, **kwargs)
    y = out[0] if isinstance(out, tuple) else out
    index = ((y - x) / 100).round()
    assert torch.allclose(x + 100 * index, y, atol=1e-3)  # one voter, and the row in its own place
    return index[:, 0].long().tolist()


# ---- dealing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [3, 7, 12, 32])
def test_each_row_is_answered_by_one_voter_evenly_and_in_its_place(rows: int) -> None:
    wrapped = constants(3)
    x = torch.randn(rows, 1)
    for _ in range(5):
        shares = Counter(who(wrapped, x))
        assert set(shares) == {0, 1, 2}
        assert max(shares.values()) - min(shares.values()) <= 1


def test_rows_are_dealt_at_random() -> None:
    wrapped = constants(2)
    x = torch.randn(10, 1)
    deals = torch.tensor([who(wrapped, x) for _ in range(400)], dtype=torch.float32)
    assert len({tuple(deal.tolist()) for deal in deals}) > 100
    assert bool(((deals.mean(0) - 0.5).abs() < 0.125).all())  # five standard deviations of 400 fair draws
    together = (deals[:, 0] == deals[:, 1]).float().mean()
    assert float(together) == pytest.approx(4 / 9, abs=0.125)


def test_an_uneven_rest_falls_to_every_voter_alike() -> None:
    wrapped = constants(3)
    x = torch.randn(4, 1)
    extra = Counter(Counter(who(wrapped, x)).most_common(1)[0][0] for _ in range(150))
    assert set(extra) == {0, 1, 2}


def test_several_inputs_and_a_tree_of_outputs_are_dealt_alike() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.offset = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor, *, other: Tensor) -> dict[str, Tensor]:
            return {"sum": x + self.offset, "other": other - self.offset, "row": other.long()}

    wrapped: Any = vote.Wrapper(2)(Pair())
    wrapped.set_risk_parameters({"offset@vote": torch.tensor([[0.0], [100.0]])})
    x, other = torch.randn(6, 1), torch.arange(6.0)[:, None]
    out = wrapped(x, other=other)
    first, second = out["sum"] - x, other - out["other"]
    assert torch.allclose(first, second, atol=1e-3)
    assert sorted(first[:, 0].round().tolist()) == [0, 0, 0, 100, 100, 100]
    assert torch.equal(out["row"], other.long())


@pytest.mark.parametrize(
    ("settings", "kwargs", "dealt"),
    [
        ({}, {}, True),
        ({}, {"tile_and_reduce": True}, False),
        ({}, {"tile_and_reduce": False}, True),
        ({}, {"return_risk": True}, False),
        ({}, {"return_risk": True, "tile_and_reduce": True}, False),
        ({"independent": False}, {}, False),
        ({"independent": False}, {"tile_and_reduce": True}, False),
        ({"independent": False}, {"tile_and_reduce": False}, True),
    ],
)
def test_when_rows_are_dealt(settings: dict[str, Any], kwargs: dict[str, Any], dealt: bool) -> None:
    wrapped = constants(2, **settings)
    x = torch.randn(8, 1)
    if dealt:
        assert set(who(wrapped, x, **kwargs)) == {0, 1}
    else:
        out = wrapped(x, **kwargs)
        y = out[0] if isinstance(out, tuple) else out
        assert torch.allclose(y, x + 50, atol=1e-3)
        if isinstance(out, tuple):
            assert torch.allclose(out[1], torch.full((8, 1), 50.0))


def test_in_evaluation_mode_the_mean_answers() -> None:
    wrapped = constants(3).eval()
    x = torch.randn(8, 1)
    assert torch.allclose(wrapped(x), x + 100)


def test_gradients_of_each_voter_come_from_its_rows_only() -> None:
    wrapped: Any = vote.Wrapper(3)(nn.Linear(4, 1))
    x, target = torch.randn(9, 4), torch.randn(9, 1)
    y = wrapped(x)
    (y - target).square().sum().backward()
    named = dict(wrapped.named_parameters())
    weight, bias = named["weight@vote"], named["bias@vote"]
    answers = torch.stack([x @ weight[i].T + bias[i] for i in range(3)]).detach()
    owner = (answers - y.detach()).abs().squeeze(-1).argmin(0)
    for i in range(3):
        mine = owner == i
        assert int(mine.sum()) == 3
        error = 2 * (y.detach() - target)[mine]
        assert torch.allclose(weight.grad[i], error.T @ x[mine], atol=1e-5)
        assert torch.allclose(bias.grad[i], error.sum(0), atol=1e-5)


def test_sculpt_of_vote_by_hand_gives_each_row_its_voters_prediction_and_risk() -> None:
    wrapped: Any = compose(vote.Wrapper(3), sculpt.Wrapper(n_layers=1))(mlp()).train()
    x, target = torch.randn(12, 3), torch.randn(12, 1)
    y, risk = wrapped(x, tile_and_reduce=False, return_risk=True)
    assert isinstance(risk, Risk)
    assert risk.epistemic is None
    assert torch.equal(risk.total, risk.aleatoric)
    named = dict(wrapped.named_parameters())
    hidden = [torch.tanh(x @ named["0.weight@vote"][i].T + named["0.bias@vote"][i]) for i in range(3)]
    locs = [h @ named["2.weight@vote"][i].T + named["2.bias@vote"][i] for i, h in enumerate(hidden)]
    raws = [h @ named["2.weight@sculpt@vote"][i].T + named["2.bias@sculpt@vote"][i] for i, h in enumerate(hidden)]
    owner = (torch.stack(locs) - y).abs().squeeze(-1).argmin(0)
    assert sorted(Counter(owner.tolist()).values()) == [4, 4, 4]
    sigmas = nn.functional.softplus(torch.stack(raws))
    for row in range(12):
        assert torch.allclose(y[row], locs[owner[row]][row], atol=1e-6)
        assert torch.allclose(risk.aleatoric[row], sigmas[owner[row]][row], atol=1e-6)
    sculpt.Normal.loss_function(target, y, risk).backward()
    assert all(p.grad is not None for p in wrapped.parameters())


# ---- what cannot be dealt --------------------------------------------------------------------------------------------


class Graph(nn.Module):
    """Nodes [n, 3] and edges [2, m]: no common number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.fc(x.index_add(0, edges[1], x[edges[0]]))


class OfArrays(nn.Module):
    """A model that makes a tensor of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 1)

    def forward(self, x: Any) -> Tensor:
        return self.fc(torch.as_tensor(x))


def test_an_array_is_called_one() -> None:
    x = torch.randn(6, 3)
    wrapped = vote.Wrapper(3)(OfArrays())
    y = told_once(lambda: wrapped(x.numpy()), r"no input is a tensor with rows \(found ndarray; torch.as_tensor")
    assert torch.allclose(y, wrapped.eval()(x))


def told_once(call: Callable[[], Tensor], match: str) -> Tensor:
    with pytest.warns(WorkbenchWarning, match=match) as caught:
        y = call()
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()
    return y


def test_inputs_of_different_length_fall_back_to_the_mean_with_one_warning() -> None:
    wrapped: Any = vote.Wrapper(3)(Graph())
    x, edges = torch.randn(6, 3), torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    y = told_once(lambda: wrapped(x, edges), "common number of rows")
    assert torch.allclose(y, torch.stack([voter(x, edges) for voter in wrapped.voters()]).mean(0), atol=1e-6)


def test_a_small_batch_falls_back_to_the_mean_with_one_warning() -> None:
    wrapped: Any = vote.Wrapper(4)(mlp())
    x = torch.randn(3, 3)
    y = told_once(lambda: wrapped(x), "3 rows.*4 voters")
    assert torch.allclose(y, torch.stack([voter(x) for voter in wrapped.voters()]).mean(0), atol=1e-6)


def test_batch_norm_never_gets_a_single_row() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    wrapped: Any = vote.Wrapper(3)(model)
    y = told_once(lambda: wrapped(torch.randn(5, 3)), "5 rows.*2.*3 voters")
    assert y.shape == (5, 1)
    assert wrapped(torch.randn(6, 3)).shape == (6, 1)


def test_an_output_without_rows_falls_back_as_if_called_once() -> None:
    class WithMean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.fc = nn.Linear(3, 1)
            self.calls = 0

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            self.calls += 1
            y = self.fc(self.norm(x))
            return y, y.mean()

    wrapped: Any = vote.Wrapper(2)(WithMean())
    copies = wrapped.voters()
    x = torch.randn(8, 3)
    with pytest.warns(WorkbenchWarning, match="row") as caught:
        y, mean = wrapped(x)
    assert len(caught) == 1
    answers = torch.stack([voter.train()(x)[0] for voter in copies])
    assert torch.allclose(y, answers.mean(0), atol=1e-6)
    assert torch.allclose(mean, answers.mean(), atol=1e-6)
    assert wrapped.calls == 1
    for before, after in zip(copies, wrapped.voters(), strict=True):
        assert torch.allclose(after.norm.running_mean, before.norm.running_mean, atol=1e-6)
        assert int(after.norm.num_batches_tracked) == 1


def test_two_kinds_of_fallback_are_told_once_each() -> None:
    wrapped: Any = vote.Wrapper(3)(Graph())
    edges = torch.tensor([[0, 1], [1, 0]])
    told_once(lambda: wrapped(torch.randn(6, 3), edges), "common number of rows")
    told_once(lambda: wrapped(torch.randn(2, 3), edges), "2 rows.*3 voters")


class Recurrent(nn.Module):
    """(y, state), as recurrent networks give it: the state is [layers, rows, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, state = self.rnn(x)
        return self.head(h), state


@pytest.mark.parametrize(
    ("model", "x", "match"),
    [
        (mlp, torch.zeros(2, 3), "2 rows"),
        (Recurrent, torch.zeros(6, 5, 3), r"output\[1\] is \[1, 6, 4\] for 6 rows"),
    ],
)
def test_the_fallback_says_whose_loss_it_is_and_names_the_remedy(model: Any, x: Tensor, match: str) -> None:
    wrapped: Any = vote.Wrapper(3)(model())
    told_once(lambda: wrapped(x), match)
    with pytest.warns(WorkbenchWarning, match=r"loss is now that of the mean of the voters.*wrapped\.loss\(criterion"):
        vote.Wrapper(3)(model())(x)


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.head(x)
        return {"loss": y.square().mean(), "y": y}


def test_a_loss_of_the_models_own_is_that_of_each_voter_and_said_to_be() -> None:
    wrapped, x = vote.Wrapper(3)(WithLoss()), torch.randn(6, 3)
    with pytest.warns(WorkbenchWarning, match=r"output\['loss'\].*that number is the mean over voters") as told:
        loss = wrapped(x)["loss"]
    assert "loss is now" not in str(told[0].message)
    torch.testing.assert_close(loss, torch.stack([voter(x)["loss"] for voter in wrapped.voters()]).mean())


class Whole(nn.Module):
    """A loss, as models give that compute it of their labels."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).square().mean()


@pytest.mark.parametrize(("make", "rows"), [(mlp, 2), (Whole, 6)])
def test_warnings_name_the_line_that_calls(make: Any, rows: int) -> None:
    wrapped: Any = vote.Wrapper(3)(make())
    with pytest.warns(WorkbenchWarning) as caught:
        wrapped(torch.randn(rows, 3))
    assert [warning.filename for warning in caught] == [__file__]


# ---- what a model keeps of each row ----------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Goes on from the hidden state of the last call, with gradients cut off, as in truncated backpropagation through time."""

    def __init__(self, nested: bool = False) -> None:
        super().__init__()
        self.cell, self.head, self.nested = nn.GRUCell(3, 4), nn.Linear(4, 1), nested
        self.memory: Any = None

    def forward(self, x: Tensor) -> Tensor:
        before = self.memory["h"] if self.nested and self.memory else self.memory
        h = self.cell(x, None if before is None else before.detach())
        self.memory = {"h": h} if self.nested else h
        return self.head(h)


@pytest.mark.parametrize("nested", [False, True])
def test_rows_whose_state_a_model_keeps_are_not_dealt_anew(nested: bool) -> None:
    wrapped: Any = vote.Wrapper(3)(Recurrent(nested)).train()
    copies = wrapped.voters()
    steps = [torch.randn(6, 3) for _ in range(3)]
    with pytest.warns(WorkbenchWarning, match="memory keeps a value for each row until the next call"):
        answers = [wrapped(steps[0])]
    answers += [wrapped(x) for x in steps[1:]]
    for x, y in zip(steps, answers, strict=True):
        torch.testing.assert_close(y, torch.stack([copy(x) for copy in copies]).mean(0))


class Keeps(nn.Module):
    """Keeps features for later inspection, counts its calls, and draws dropout masks."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.calls, self.features = nn.Linear(3, 1), 0, torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.features = nn.functional.dropout(x, training=True)
        return self.fc(self.features)


def test_what_a_model_keeps_and_does_not_use_again_leaves_rows_dealt() -> None:
    wrapped: Any = vote.Wrapper(3)(Keeps()).train()
    for calls in (1, 2, 3):
        wrapped(torch.randn(6, 3))  # a warning would be an error
        assert wrapped.calls == calls
        assert len(wrapped.features) == 2
