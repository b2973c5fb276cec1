"""Models that accelerate has spread over devices, and offloaded ones, whose parameters are loaded for each call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from workbench import vote

accelerate = pytest.importorskip("accelerate")
X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def _offloaded(model: nn.Module, kind: str, folder: Path) -> Any:
    device = torch.device("cpu")
    if kind == "cpu":
        return accelerate.cpu_offload(model, execution_device=device)
    return accelerate.disk_offload(model, str(folder), execution_device=device)


@pytest.mark.parametrize("kind", ["cpu", "disk"])
def test_an_offloaded_model_is_refused_when_wrapping(kind: str, tmp_path: Path) -> None:
    model = _offloaded(_net(), kind, tmp_path)
    expected = model(X)
    with pytest.raises(TypeError, match=r"'0' in Sequential is offloaded.*device_map.*remove_hook_from_submodules"):
        vote.Wrapper(2)(model)
    torch.testing.assert_close(model(X), expected)


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("kind", ["cpu", "disk"])
def test_a_wrapped_model_that_is_offloaded_is_refused_when_called(kind: str, called: bool, tmp_path: Path) -> None:
    wrapped = vote.Wrapper(2)(_net())
    if called:
        wrapped(X)
    offloaded = _offloaded(wrapped, kind, tmp_path)
    for call in (lambda: offloaded(X), lambda: offloaded.eval()(X, return_risk=True), lambda: offloaded.voters()):
        with pytest.raises(TypeError, match="is offloaded"):
            call()


def test_what_stays_on_its_devices_votes() -> None:
    model = accelerate.dispatch_model(_net(), {"": "cpu"}, force_hooks=True)
    wrapped = vote.Wrapper(2)(model).eval()
    torch.testing.assert_close(wrapped(X), torch.stack([voter(X) for voter in wrapped.voters()]).mean(0))
