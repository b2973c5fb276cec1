"""`diagnose` leaves models, random states, hooks and modes unchanged."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from helpers import troubled_models
from helpers.troubled_models import TROUBLES, Base, ChangesObject, Raises, WritesClass, x
from torch import Tensor, nn

from workbench import diagnose


def facts(model: nn.Module) -> Any:
    """All that could have been changed: classes, attributes by identity and contents, tensors, modes, random states, hooks of Python."""
    held = []
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        attributes = {name: (id(value), repr(value)) for name, value in module.__dict__.items() if name != "_engine"}
        generator = {name: v.get_state().tolist() for name, v in vars(module).items() if isinstance(v, torch.Generator)}
        held.append((path, type(module), module.training, attributes, generator))
    lazy = nn.parameter.is_lazy
    tensors = [
        (name, id(t), None if lazy(t) else t.tolist(), t.requires_grad, t.grad, t._version)
        for name, t in [*model.named_parameters(), *model.named_buffers()]
    ]
    state: Any = np.random.get_state()  # noqa: NPY002
    return (
        (
            held,
            tensors,
            torch.get_rng_state().tolist(),
            state[1].tolist(),
            state[2:],
            random.getstate(),
            sys.gettrace(),
        ),
        (
            troubled_models.LAST,
            list(troubled_models.LOG),
            WritesClass.calls,
            torch.is_grad_enabled(),
            list(warnings.filters),
            sys.stdout,
        ),
        (dict(nn.modules.module._global_forward_hooks), torch.overrides._get_current_function_mode_stack()),
    )


@pytest.mark.parametrize(
    ("kind", "build", "has_line"), TROUBLES, ids=[f"{kind}-{build.__name__}" for kind, build, _ in TROUBLES]
)
def test_nothing_is_changed(kind: str, build: Any, has_line: bool, capsys: pytest.CaptureFixture[str]) -> None:
    model, example = build(), x()
    if isinstance(model, ChangesObject):
        model.statistics.calls = 7
    before, values = facts(model), example.clone()
    diagnose(model, example)
    assert facts(model) == before
    assert torch.equal(example, values)
    assert example._version == 0
    assert capsys.readouterr().out == ""
    if isinstance(model, ChangesObject):
        assert model.statistics.calls == 7


class Shared:
    """Has no copy, so that copies of a model reach the model itself through it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("no copy")


class ReachesOut(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.count = 0
        self.shared = Shared(self)

    def forward(self, x: Tensor) -> Tensor:
        this: Any = self.shared.model
        this.count += 1
        this.a.bias.data.add_(1)
        return this.b(this.norm(this.a(x)))


def test_nothing_is_changed_where_copies_reach_the_model_itself() -> None:
    model = ReachesOut()
    with torch.no_grad():
        values = {name: value.clone() for name, value in model.state_dict().items()}
    diagnose(model, x())
    assert model.count == 0
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


@contextmanager
def tracing() -> Iterator[list[str]]:
    seen: list[str] = []
    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: seen.append(event))
    try:
        yield seen
    finally:
        sys.settrace(before)


def test_a_trace_function_is_put_back_also_after_an_error() -> None:
    with tracing() as seen:
        ours = sys.gettrace()
        diagnose(Raises(), x())
        assert sys.gettrace() is ours
        seen.clear()
        x()
        assert "call" in seen


def test_inference_mode_and_no_grad_do_not_matter() -> None:
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert diagnose(Base(), x()).ok
