"""A wrapped LightningModule is a LightningModule: a Trainer trains it, and its predictions may carry risks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from limits import WRAPPERS, Net
from torch import Tensor, nn

pytestmark = [pytest.mark.usefixtures("seeded"), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("kind", ["vote", "vote_sculpt"])
def test_lightning_trains_and_predicts(kind: str) -> None:
    import lightning

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Any, number: int) -> Tensor:
            return nn.functional.mse_loss(self(batch[0]), batch[1])

        def predict_step(self, batch: Any, number: int) -> Any:
            return self(batch[0], return_risk=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.05)

    x = torch.randn(60, 3)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.flip(1)), batch_size=20)
    trainer: Any = lightning.Trainer(max_epochs=8, accelerator="cpu", barebones=True)
    wrapped: Any = WRAPPERS[kind]("auto", 0.0)(Lit())
    assert isinstance(wrapped, Lit)
    before = nn.functional.mse_loss(wrapped.eval()(x), x.flip(1))
    trainer.fit(wrapped.train(), loader)
    assert nn.functional.mse_loss(wrapped.eval()(x), x.flip(1)) < 0.5 * before
    answers = trainer.predict(wrapped, loader)
    y, risk = wrapped(x, return_risk=True)
    torch.testing.assert_close(torch.cat([part for part, _ in answers]), y)
    if kind == "vote":
        torch.testing.assert_close(torch.cat([part for _, part in answers]), risk)
    else:
        torch.testing.assert_close(torch.cat([part.total for _, part in answers]), risk.total)
