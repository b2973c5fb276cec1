"""Dict inputs: keyword arguments if the model takes the items, one positional argument if it takes the dict."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from workbench import calibrate, compose, fit, neo, sculpt, vote

X = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


class OneDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.fc(batch["x"])


class Keywords(OneDict):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return self.fc(x)


class Rows(Dataset):
    def __init__(self, plain: bool) -> None:
        self.plain = plain

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> tuple[Any, Tensor]:
        return X[i] if self.plain else {"x": X[i]}, Y[i]


def trained(kind: type[OneDict], plain: bool) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind()
    wrapped = compose(vote.Wrapper(2), sculpt.Wrapper(n_layers=1), neo.Wrapper())(model)
    fit(wrapped, DataLoader(Rows(plain), batch_size=16), epochs=2, validation=0, standardize=False, progress=False)
    return wrapped


@pytest.mark.parametrize("kind", [OneDict, Keywords])
def test_a_dict_trains_as_a_tensor_does(kind: type[OneDict]) -> None:
    wrapped, plain = trained(kind, plain=False), trained(Keywords, plain=True)
    y, risk = wrapped({"x": X}, return_risk=True) if kind is OneDict else wrapped(x=X, return_risk=True)
    expected, others = plain(X, return_risk=True)
    torch.testing.assert_close(y, expected)
    for name in ("aleatoric", "epistemic", "vacuitic"):
        torch.testing.assert_close(risk[name], others[name])


@pytest.mark.parametrize("kind", [OneDict, Keywords])
def test_a_dict_calibrates_as_a_tensor_does(kind: type[OneDict]) -> None:
    held = [DataLoader(Rows(plain), batch_size=16) for plain in (False, True)]
    scale = calibrate(trained(kind, plain=False), held[0]).scale
    torch.testing.assert_close(scale, calibrate(trained(Keywords, plain=True), held[1]).scale)


def test_loss_of_a_dict_is_that_of_its_tensor() -> None:
    model = Keywords()
    wrapped = sculpt.Wrapper(n_layers=1)(model)
    torch.testing.assert_close(wrapped.loss(nn.MSELoss(), {"x": X}, Y), wrapped.loss(nn.MSELoss(), X, Y))
