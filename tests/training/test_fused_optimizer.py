"""The optimizer that `fit` chooses computes a step in one kernel, and resumes from checkpoints of one that did not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training_models import Interrupt, net, plain, plane, quiet, same, weights
from torch import nn

from workbench import compose
from workbench.core.batches.rows import TensorRows
from workbench.errors import WorkbenchWarning
from workbench.training import checkpoint as checkpoint_module
from workbench.training import defaults
from workbench.training.batches import Batches


def one_by_one(parameters: list[torch.Tensor], **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **settings)


def made(model: nn.Module) -> torch.optim.Optimizer:
    batches = Batches(TensorRows((torch.zeros(8, 2),), torch.zeros(8, 1)), 4, torch.device("cpu"), torch.float32)
    return defaults.make_optimizer(compose()(model), None, 0.01, 0.0, batches, 2)[0]


def test_a_step_is_one_kernel_where_torch_has_one() -> None:
    assert made(nn.Linear(2, 1)).defaults["fused"] is True
    assert not made(nn.Linear(2, 1, dtype=torch.complex64)).defaults["fused"]


def test_a_fused_step_is_that_of_adam() -> None:
    model = net()
    other = net()
    other.load_state_dict(model.state_dict())
    ours, reference = made(model), torch.optim.AdamW(other.parameters(), lr=0.01, weight_decay=0.0)
    for group in ours.param_groups:
        group["lr"] = 0.01  # the schedule's warm-up is not what is compared
    x, y = plane(40)
    for _ in range(5):
        for part, optimizer in ((model, ours), (other, reference)):
            optimizer.zero_grad()
            nn.functional.mse_loss(part(x), y).backward()
            optimizer.step()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_training_goes_on_from_a_checkpoint_of_an_optimizer_that_was_not_fused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_module, "WRITE_INTERVAL", 0.0)
    data = plane(60)
    settings: dict[str, Any] = {"epochs": 5, "batch_size": 16, "validation": 0.2, "standardize": True}
    criterion = Interrupt(12)
    with monkeypatch.context() as before:
        before.setattr(defaults, "_adam", one_by_one)
        whole = plain()
        quiet(whole, data, **settings)
        with pytest.warns(WorkbenchWarning, match="interrupted"):
            quiet(plain(), data, **settings, criterion=criterion, checkpoint=tmp_path / "state.pt")
    assert (tmp_path / "state.pt").exists()
    resumed = plain()
    quiet(resumed, data, **settings, criterion=criterion, checkpoint=tmp_path / "state.pt")
    assert same(weights(resumed), weights(whole))
