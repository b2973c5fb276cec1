"""Warm calls never synchronize with the device: meta tensors, which have no values to read, stand in for GPU tensors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.device_models import WRAPPERS, mlp, quiet, trained
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from workbench import laplace, neo, snapshot, swag, vote
from workbench.core.outputs.options import has_classes
from workbench.core.wrapper import Wrapper
from workbench.methods.densities import DENSITIES

aten = torch.ops.aten


class Made(TorchFunctionMode):
    """Refuses tensors that are made of numbers on another device, which are copied there."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, function: Any, kinds: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        made = function in (torch.tensor, torch.as_tensor, Tensor.new_tensor) and not isinstance(args[-1], Tensor)
        if made and out.device.type == self.device != "cpu":
            raise AssertionError(f"{function} from the CPU makes the program wait")
        return out


class Waiting(TorchDispatchMode):
    """Refuses what makes a program wait for a GPU: copies between the devices that the host stands still for, and values that it reads.

    Meta tensors refuse to be read by themselves; the mode sees what would read a tensor on the CPU as well.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.made = Made(device)

    def __enter__(self) -> Any:
        self.made.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.made.__exit__(*error)

    def __torch_dispatch__(self, op: Any, kinds: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        out = op(*args, **kwargs)
        if op in (aten._to_copy.default, aten.copy_.default):
            source, target = (args[0], out) if op is aten._to_copy.default else (args[1], args[0])
            blocking = not kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            if blocking and source.device.type != target.device.type and source.device.type == "cpu":
                raise AssertionError(f"{op} from the CPU makes the program wait")
        if op is aten._local_scalar_dense.default and args[0].device.type == self.device:
            raise AssertionError("a value is read")
        return out


def test_the_mode_sees_what_waits() -> None:
    x = torch.ones(3, device="meta")
    with Waiting("meta"):
        with pytest.raises(AssertionError, match="wait"):
            torch.ones(3).to("meta")
        with pytest.raises(AssertionError, match="wait"):
            x.copy_(torch.ones(3))
        with pytest.raises(AssertionError, match="wait"):
            torch.tensor([1.0, 2.0], device="meta")
        torch.ones(3).to("meta", non_blocking=True)
        for look in (lambda: bool(x.any()), lambda: x.sum().item(), lambda: x[x > 0], lambda: x.tolist()):
            with pytest.raises(RuntimeError):  # NotImplementedError is one
                look()
    with Waiting("cpu"), pytest.raises(AssertionError, match="read"):
        torch.ones(3).sum().item()


@pytest.mark.parametrize(
    ("name", "model"),
    [(name, "cnn") for name in WRAPPERS]
    + [(name, "transformer") for name in ("vote", "sculpt", "sample", "neo", "vote of sample of sculpt")]
    + [(name, "mlp") for name in ("vote of sculpt, with neo", "class probabilities")],
)
def test_warm_calls_and_losses_do_not_wait(name: str, model: str) -> None:
    with quiet():
        wrapped, x, y = trained(WRAPPERS[name], model)
    wrapped.to("meta")
    x, y = x.to("meta"), y.to("meta")
    criterion = nn.CrossEntropyLoss() if has_classes(wrapped._workbench.output) else nn.MSELoss()
    neo_alone = wrapped.methods == ("neo",)
    with quiet(), Waiting("meta"):
        for training in (False, True):
            wrapped.train(training)
            for gradients in (False, True):
                with torch.set_grad_enabled(gradients):
                    for risk in (False, True):
                        answer = wrapped(x, return_risk=risk)
                        assert (answer[0] if risk else answer).shape == (12, 3)
            if training:  # the one that neo is trained by is its own risk
                loss = wrapped(x, return_risk=True)[1].mean() if neo_alone else wrapped.loss(criterion, x, y)
                loss.backward()
    assert any(p.grad is not None and p.grad.is_meta for p in wrapped.parameters())


@pytest.mark.parametrize("name", DENSITIES)
def test_signatures_do_not_wait(name: str) -> None:
    with quiet():
        wrapped, x, _ = trained(neo.Wrapper(density=name, output="logits"), "relu mlp", rows=60)
    wrapped.to("meta").eval()
    x = x.to("meta")
    with torch.no_grad(), Waiting("meta"):
        _, risk = wrapped(x, return_risk=True)
    assert risk.is_meta


def test_class_scores_are_looked_at_once_elsewhere_than_on_the_cpu() -> None:
    """On the CPU at each call."""
    wrong = vote.Wrapper(2, output="probs")(mlp()).eval()
    for _ in range(2):
        with torch.no_grad(), pytest.raises(ValueError, match="logits"):
            wrong(torch.ones(5, 4))
    right = vote.Wrapper(2, output="probs")(nn.Sequential(mlp(), nn.Softmax(-1))).eval().to("meta")
    with torch.no_grad(), Waiting("meta"):
        assert right(torch.zeros(5, 4, device="meta"), return_risk=True)[1].total.is_meta


@pytest.mark.parametrize(
    "wrapper", [laplace.Wrapper(noise=0.1), swag.Wrapper(n_samples=3, rank=3), snapshot.Wrapper(3)], ids=repr
)
def test_whether_there_is_a_risk_is_looked_at_again_only_after_a_change(wrapper: Wrapper) -> None:
    with quiet():
        wrapped, x, _ = trained(wrapper, "mlp")
    wrapped.eval()
    (method,) = wrapped._workbench.methods
    with torch.no_grad():
        wrapped(x, return_risk=True)
        with Waiting("cpu"):
            method.check_ready(wrapped)
        for again in (copy.deepcopy(wrapped), wrapped):
            method.forget(again.__dict__["_engine"].table)
            with pytest.raises(RuntimeError, match=r"fit|epochs"):
                again(x, return_risk=True)
