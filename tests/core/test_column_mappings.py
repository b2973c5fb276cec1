"""Inputs and outputs in mappings that are more than their items, such as a TensorDict."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from workbench import fit, vote


class Columns(MutableMapping):
    """Columns of equally many rows, over which it iterates, as a TensorDict does."""

    def __init__(self, columns: dict[str, Tensor]) -> None:
        self.columns, self.n_rows = {}, len(next(iter(columns.values())))
        for name, column in columns.items():
            self[name] = column

    def __bool__(self) -> bool:
        raise RuntimeError("columns have no truth value")

    def __copy__(self) -> Columns:
        new = object.__new__(Columns)
        new.columns, new.n_rows = dict(self.columns), self.n_rows
        return new

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    def __setitem__(self, name: str, column: Tensor) -> None:
        if not isinstance(name, str) or len(column) != self.n_rows:
            raise RuntimeError(f"expected {self.n_rows} rows of a named column")
        self.columns[name] = column

    def __delitem__(self, name: str) -> None:
        del self.columns[name]

    def __iter__(self) -> Any:
        return iter({name: column[i] for name, column in self.columns.items()} for i in range(self.n_rows))

    def __len__(self) -> int:
        return self.n_rows

    def keys(self) -> Any:
        return self.columns.keys()

    def items(self) -> Any:
        return self.columns.items()

    def values(self) -> Any:
        return self.columns.values()


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, columns: Columns) -> Columns:
        return Columns({"seen": columns["seen"], "action": self.net(columns["seen"])})


@pytest.mark.parametrize("share", [None, 1, "rank1"])
def test_a_mapping_that_iterates_over_its_rows_keeps_its_class(share: Any) -> None:
    wrapped: Any = vote.Wrapper(3, share=share)(Policy()).eval()
    columns = Columns({"seen": torch.randn(5, 3)})
    y, risk = wrapped(columns, return_risk=True)
    answers = torch.stack([voter(columns)["action"] for voter in wrapped.voters()])
    assert type(y) is type(risk) is Columns
    torch.testing.assert_close(y["action"], answers.mean(0))
    torch.testing.assert_close(risk["action"], answers.std(0, correction=0))
    assert list(columns.keys()) == ["seen"]


def test_fit_takes_batches_of_such_mappings() -> None:
    x = torch.randn(12, 3)
    rows = TensorDataset(x, x[:, :2])

    def collated(batch: list[tuple[Tensor, Tensor]]) -> tuple[Columns, Tensor]:
        return Columns({"seen": torch.stack([seen for seen, _ in batch])}), torch.stack([target for _, target in batch])

    def criterion(y: Columns, target: Tensor) -> Tensor:
        return (y["action"] - target).square().mean()

    wrapped: Any = vote.Wrapper(2)(Policy())
    before = [criterion(voter(Columns({"seen": x})), x[:, :2]) for voter in wrapped.voters()]
    loader = DataLoader(rows, batch_size=4, collate_fn=collated)
    fit(wrapped, loader, epochs=5, lr=0.05, validation=0, criterion=criterion)
    after = [criterion(voter(Columns({"seen": x})), x[:, :2]) for voter in wrapped.voters()]
    assert all(new < old for new, old in zip(after, before, strict=True))
    assert wrapped.eval()(Columns({"seen": x}), return_risk=True)[1]["action"].shape == (12, 2)
