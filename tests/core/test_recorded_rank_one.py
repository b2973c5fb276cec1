"""Graphs of rank-one voters: their answers are those of plain copies with the products of the factors as weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.recorded_calls import calls_of, record_early
from torch import Tensor, nn

from workbench import vote
from workbench.core.ownership import engine_of
from workbench.engine import branch, rank_one


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    record_early(monkeypatch)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm, self.out = nn.Embedding(40, 4), nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(self.words(x))[0][:, -1])


def _images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 3)
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)), (5, 3)),
    "images": (_images, (4, 2, 5, 5)),
    "recurrent": (Recurrent, (4, 6)),
}


def _inputs(name: str) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    shape = MODELS[name][1]
    return [
        torch.randint(9, shape, generator=draw) if name == "recurrent" else torch.randn(*shape, generator=draw)
        for _ in range(10)
    ]


def _plain(model: nn.Module, state: dict[str, Tensor], i: int) -> nn.Module:
    """Return a copy of the given model with the weights of one voter, computed from the state of the wrapped one."""
    plain = copy.deepcopy(model)
    for name, value in [*plain.named_parameters(), *plain.named_buffers()]:
        if f"{name}@vote" in state:
            new = state[f"{name}@vote"][i]
        elif f"{name}@vote_in" in state:
            left, right = state[f"{name}@vote_out"][i], state[f"{name}@vote_in"][i]
            new = torch.einsum("oi...,o,i->oi...", state[name], left, right)
        else:
            new = state[name] * state[f"{name}@vote_out"][i]
        value.data.copy_(new)
    return plain.eval()


@pytest.mark.parametrize("factored", [False, True], ids=["products", "factors"])
@pytest.mark.parametrize("n", [2, 5])
@pytest.mark.parametrize("name", MODELS)
def test_graphs_answer_as_plain_copies(name: str, n: int, factored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if factored:
        monkeypatch.setattr(branch, "SMALL", 0)
        monkeypatch.setattr(rank_one.FactoredWeight, "_is_cheaper", lambda *_: True)
    torch.manual_seed(0)
    model = MODELS[name][0]()
    wrapped: Any = vote.Wrapper(n, share="rank1")(model).eval()
    with torch.no_grad():
        for i, x in enumerate(_inputs(name)):
            if i == 7:  # graphs read the factors and the shared weights anew
                for parameter in wrapped.parameters():
                    parameter.mul_(1.1)
            voters = [_plain(model, wrapped.state_dict(), k) for k in range(n)]
            outputs = torch.stack([voter(x) for voter in voters])
            y, risk = wrapped(x, return_risk=True)
            torch.testing.assert_close(y, outputs.mean(0), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(risk, outputs.std(0, correction=0), rtol=1e-4, atol=1e-6)
    assert calls_of(wrapped).off == ""
    assert calls_of(wrapped).replays > 0


def test_a_weight_that_becomes_dense_is_recorded_anew() -> None:
    """Otherwise eager calls would be rounded in another way than the graph."""
    torch.manual_seed(0)
    wrapped: Any = vote.Wrapper(3, share="rank1")(nn.Linear(200, 200)).eval()
    x = torch.randn(1, 200)
    with torch.no_grad():
        for _ in range(12):  # the next run of the graph is not compared
            wrapped(x, return_risk=True)
        replays = calls_of(wrapped).replays
        assert replays > 0
        engine_of(wrapped).clones.dense_slots.add("weight")
        wrapped(x, return_risk=True)
        assert calls_of(wrapped).replays == replays
        for _ in range(20):  # without a warning of other numbers
            wrapped(x, return_risk=True)
        assert calls_of(wrapped).replays > replays
    assert calls_of(wrapped).off == ""
