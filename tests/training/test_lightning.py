"""Lightning: a wrapped LightningModule stays one, and one that contains a wrapped model works as usual."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from helpers.default_suite import one_in
from helpers.reference_from_state import (
    KINDS,
    Net,
    assert_answer,
    close,
    data,
    expected,
    expected_loss,
    parts,
    seeded,
    state_of,
    wrap,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.filterwarnings("ignore")
KIND_OF = ["vote", "vote_last2", "sculpt", "sample_weights", "vote_sculpt"]
RATE = 0.05


class Holder(lightning.LightningModule):
    """A LightningModule that has a wrapped model."""

    def __init__(self, wrapped: Any) -> None:
        super().__init__()
        self.wrapped = wrapped
        self.losses: list[float] = []

    def training_step(self, batch: Any, number: int) -> Tensor:
        loss = self.wrapped.loss(nn.functional.mse_loss, *batch)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        y, risk = self.wrapped(batch[0], return_risk=True)
        self.log("rmse", (y - batch[1]).square().mean().sqrt())
        self.log("risk", parts((y, risk))["total" if hasattr(risk, "total") else "risk"].mean())

    def predict_step(self, batch: Any, number: int) -> Any:
        return self.wrapped(batch[0], return_risk=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=RATE)


class Itself(lightning.LightningModule):
    """A LightningModule that is wrapped itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, number: int) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("rmse", nn.functional.mse_loss(self(batch[0]), batch[1]).sqrt())

    def predict_step(self, batch: Any, number: int) -> Any:
        return self(batch[0], return_risk=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=RATE)


def loader(rows: int = 24) -> DataLoader[Any]:
    # what a loader draws is not taken from the stream that noise comes from
    generator = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(*data(rows)), batch_size=12, generator=generator)


def trainer(folder: Path, epochs: int, **settings: Any) -> lightning.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    return lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, default_root_dir=folder, **{**quiet, **settings}
    )


def fit(*args: Any, **kwargs: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args[0].fit(*args[1:], **kwargs)


# ---- with a wrapped model inside -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KIND_OF)
def test_the_trainer_trains_as_a_loop_over_plain_models(name: str, tmp_path: Path) -> None:
    module = Holder(wrap(name))
    state = {
        key: tensor.detach().requires_grad_(tensor.requires_grad) for key, tensor in state_of(module.wrapped).items()
    }
    optimizer = torch.optim.Adam([tensor for tensor in state.values() if tensor.requires_grad], lr=RATE)

    def by_hand() -> list[float]:
        losses = []
        for _ in range(2):
            for x, target in zip(*(rows.split(12) for rows in data(24)), strict=True):
                moved = torch.get_rng_state()
                buffers = expected(name, state, x, training=True, loss=True).buffers
                torch.set_rng_state(moved)
                loss = expected_loss(name, state, x, target)
                losses.append(float(loss.detach()))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                state.update(buffers)
        return losses

    seeded(fit, trainer(tmp_path, 2, enable_checkpointing=False), module, loader())
    torch.testing.assert_close(module.losses, seeded(by_hand))
    for key, tensor in module.wrapped.state_dict().items():
        if "@workbench" not in key:
            close(tensor, state[key].detach(), key)


@pytest.mark.parametrize("name", KIND_OF)
def test_validation_and_prediction_give_the_numbers_of_plain_models(name: str, tmp_path: Path) -> None:
    module = Holder(wrap(name))
    state = state_of(module.wrapped)
    runner = trainer(tmp_path, 1, enable_checkpointing=False)
    measured = seeded(runner.validate, module, loader(12), verbose=False)[0]
    answers: Any = seeded(runner.predict, module, loader(12))
    answer = seeded(expected, name, state, data(12)[0])
    assert len(answers) == 1
    assert_answer(answers[0], answer)
    rmse = (answer.y - data(12)[1]).square().mean().sqrt()
    torch.testing.assert_close(measured["rmse"], float(rmse.detach()))


@pytest.mark.parametrize("name", KIND_OF)
def test_training_goes_on_from_a_checkpoint_as_if_it_had_never_stopped(name: str, tmp_path: Path) -> None:
    whole, half = Holder(wrap(name)), Holder(wrap(name))
    seeded(fit, trainer(tmp_path / "whole", 4, enable_checkpointing=False), whole, loader())
    first = trainer(tmp_path / "half", 2)
    seeded(fit, first, half, loader())
    path = tmp_path / "half.ckpt"
    first.save_checkpoint(path)
    fresh = Holder(wrap(name, Net()))
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.add_(1)
    again = trainer(tmp_path / "again", 4, enable_checkpointing=False)
    seeded(fit, again, fresh, loader(), ckpt_path=path)
    assert again.current_epoch == 4
    assert len(fresh.losses) == 4, "two epochs of two batches were left"
    if name != "sample_weights":
        for key, tensor in whole.state_dict().items():
            close(fresh.state_dict()[key], tensor, key)
        torch.testing.assert_close(half.losses + fresh.losses, whole.losses)


@pytest.mark.parametrize("name", [*KINDS, "neo"])
def test_a_checkpoint_holds_the_whole_wrapped_model(name: str, tmp_path: Path) -> None:
    module = Holder(wrap(name))
    runner = trainer(tmp_path, 1)
    if name == "neo":
        runner.strategy.connect(module)
    else:
        fit(runner, module, loader())
    path = tmp_path / "model.ckpt"
    runner.save_checkpoint(path)
    loaded = Holder.load_from_checkpoint(path, wrapped=wrap(name, Net()), weights_only=False)
    x = data()[0]
    module.eval()
    loaded.eval()
    pairs = zip(*(parts(seeded(m.wrapped, x, return_risk=True)).values() for m in (module, loaded)), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


# ---- wrapped itself --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", one_in(4, KINDS))
def test_a_wrapped_module_is_trained_and_asked(name: str, tmp_path: Path) -> None:
    wrapped = wrap(name, seeded(Itself))
    assert isinstance(wrapped, Itself)
    before = copy.deepcopy(wrapped.state_dict())
    runner = trainer(tmp_path, 3)
    fit(runner, wrapped, loader(), loader(12))
    for key, parameter in wrapped.named_parameters():  # its own loss never asks for the risk
        assert torch.equal(parameter, before[key]) == ("@sculpt" in key), key
    assert set(runner.callback_metrics) == {"rmse"}
    measured = seeded(runner.validate, wrapped, loader(12), verbose=False)[0]
    answers: Any = seeded(runner.predict, wrapped, loader(12))
    assert len(answers) == 1
    assert_answer(answers[0], seeded(expected, name, state_of(wrapped), data(12)[0], make=Itself))
    y = seeded(expected, name, state_of(wrapped), data(12)[0], risk=False, make=Itself).y
    torch.testing.assert_close(measured["rmse"], float((y - data(12)[1]).square().mean().sqrt().detach()))


RUNNERS: list[lightning.Trainer] = []


class Logging(Itself):
    """Whose forward uses the trainer."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self._trainer is not None:
            assert self._trainer in RUNNERS, "a copy of the trainer"
            self.log("size", y.detach().abs().mean())
        return y


@pytest.mark.parametrize("name", ["vote", "sculpt", "sample_weights"])
def test_forward_reaches_the_trainer_itself(name: str, tmp_path: Path) -> None:
    """Branches run on copies of the modules, but there is one trainer: a copy of it would be slow, and deaf."""
    wrapped = wrap(name, seeded(Logging))
    runner = trainer(tmp_path, 1, enable_checkpointing=False)
    RUNNERS[:] = [runner]
    fit(runner, wrapped, loader())
    assert runner.callback_metrics["size"] > 0


@pytest.mark.parametrize("name", ["vote", "sculpt", "sample_weights", "vote_sculpt"])
def test_a_wrapped_module_resumes_from_its_checkpoint(name: str, tmp_path: Path) -> None:
    wrapped = wrap(name, seeded(Itself))
    first = trainer(tmp_path / "first", 2)
    fit(first, wrapped, loader())
    path = tmp_path / "half.ckpt"
    first.save_checkpoint(path)
    fresh = wrap(name, Itself())
    again = trainer(tmp_path / "again", 3, enable_checkpointing=False)
    fit(again, fresh, loader(), ckpt_path=path)
    assert again.current_epoch == 3
    assert again.global_step == 6
    loaded = wrap(name, Itself())
    loaded.load_state_dict(torch.load(path, weights_only=False)["state_dict"])
    x = data()[0]
    pairs = zip(*(parts(seeded(m.eval(), x, return_risk=True)).values() for m in (wrapped, loaded)), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    assert not torch.equal(seeded(fresh.eval(), x), seeded(loaded, x)), "the last epoch moved it"
