"""What wrapping adds to the layers follows the model's own training or evaluation mode, however it was set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import workbench
from workbench import laplace, neo, sculpt, vote

X = torch.linspace(-2, 2, 240).reshape(80, 3).sin()
Y = X.sum(1, keepdim=True)
MAKERS: dict[str, Callable[[], Any]] = {
    "neo": lambda: neo.Wrapper(),
    "classwise": lambda: neo.Wrapper(density="classwise", output="logits"),
    "laplace": lambda: laplace.Wrapper(),
    "sculpt": lambda: sculpt.Wrapper(n_layers=1),
    "vote": lambda: vote.Wrapper(2),
}


def model(outputs: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs)).eval()


def modes(wrapped: nn.Module) -> set[bool]:
    return {module.training for module in wrapped.modules()}


@pytest.mark.parametrize("name", MAKERS)
def test_modes_agree_after_wrapping_fitting_and_loading(name: str, tmp_path: Path) -> None:
    outputs, y = (2, (X[:, 0] > 0).long()) if name == "classwise" else (1, Y)
    wrapped = MAKERS[name]()(model(outputs))
    assert modes(wrapped) == {False}
    if wrapped.needs_fit:
        wrapped.fit([(X, y)])
        assert modes(wrapped) == {False}
    workbench.fit(wrapped, (X, y), epochs=1, progress=False, standardize=name != "classwise")
    assert modes(wrapped) == {False}
    workbench.save(wrapped, tmp_path / "model")
    assert modes(workbench.load(tmp_path / "model", model(outputs))) == {False}
    assert modes(workbench.load(tmp_path / "model", model(outputs).train())) == {True}
    other = MAKERS[name]()(model(outputs))
    other.load_state_dict(wrapped.state_dict())
    assert modes(other) == {False}
    assert modes(wrapped.train()) == {True}


@pytest.mark.parametrize("density", ["signature", "gaussian", "flow"])
def test_predictions_of_a_loaded_signature_teach_it_nothing(density: str, tmp_path: Path) -> None:
    """A model that was in evaluation mode when it was given to `load` stays in it as a whole."""
    trained = neo.Wrapper(density=density)(model()).train()
    for _ in range(3):
        trained(X, return_risk=True)
    workbench.save(trained, tmp_path / "model")
    loaded = workbench.load(tmp_path / "model", model())
    first = loaded(X[:3], return_risk=True)[1]
    loaded(X * 50, return_risk=True)
    assert torch.equal(loaded(X[:3], return_risk=True)[1], first)


def test_an_interrupt_before_the_training_leaves_one_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first batch was tried, in evaluation mode."""
    from workbench.training import fitting

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    wrapped = sculpt.Wrapper(n_layers=1)(model()).train()
    before = [name for name, _ in wrapped.named_modules()]
    monkeypatch.setattr(fitting, "choose_standardization", interrupted)
    with pytest.raises(KeyboardInterrupt):
        workbench.fit(wrapped, (X, Y), epochs=1, progress=False)
    assert modes(wrapped) == {True}
    assert [name for name, _ in wrapped.named_modules()] == before
