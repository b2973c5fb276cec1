"""What changes between the steps of a training is noticed by those that are replayed from a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import replayed_steps, traced_models
from helpers.default_suite import one_in
from helpers.replayed_steps import assert_same, train, waves
from helpers.traced_models import ListItem, ReadsGlobal, Residual, mlp
from torch import Tensor, nn
from torch.nn import functional as F

from workbench import fit, vote
from workbench.errors import WorkbenchWarning
from workbench.training.traced_step import TracedStep

made = replayed_steps.made  # the fixture


def _by_callback(
    change: Callable[[Any, int], None], build: Callable[[], nn.Module] = mlp, **options: Any
) -> tuple[Any, Any]:
    def run(**more: Any) -> tuple[Any, ...]:
        def callback(progress: Any) -> None:
            if not progress.epoch_ended:
                change(progress.wrapped, progress.step)

        return train(build, vote.Wrapper(3), callback=callback, **options, **more)

    return run(), run(strategy="eager")


def _freeze(wrapped: Any, step: int) -> None:
    next(wrapped.parameters()).requires_grad_(step % 20 < 10)


def _hook(wrapped: Any, step: int) -> None:
    if step == 20:
        list(wrapped.modules())[1].register_forward_hook(lambda module, args, out: 2 * out)


def _hook_gradient(wrapped: Any, step: int) -> None:
    if step == 20:
        next(wrapped.parameters()).register_hook(lambda gradient: 2 * gradient)


def _global_hook(wrapped: Any, step: int) -> None:
    if step == 20:
        _HANDLES.append(nn.modules.module.register_module_forward_hook(_doubling))
    if step == 35:
        _HANDLES.pop().remove()


_HANDLES: list[Any] = []


def _doubling(module: nn.Module, args: Any, out: Any) -> Any:
    return 2 * out if type(module) is nn.Tanh else out


def _swap_layer(wrapped: Any, step: int) -> None:
    if step == 20:
        wrapped[1] = nn.ReLU()


class Doubled(nn.Tanh):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x.tanh()


def _class(wrapped: Any, step: int) -> None:
    if step == 20:
        wrapped[1].__class__ = Doubled


def _weights(wrapped: Any, step: int) -> None:
    if step % 15 == 0:
        with torch.no_grad():
            for parameter in wrapped.parameters():
                parameter.mul_(0.9)


def _predict(wrapped: Any, step: int) -> None:
    wrapped(torch.randn(5, 3), return_risk=True)
    wrapped.eval()(torch.zeros(2, 3))


def _grad_left(wrapped: Any, step: int) -> None:
    if step % 10 == 0:
        wrapped.loss(F.mse_loss, *waves(20)).backward()


def _rate(wrapped: Any, step: int) -> None:
    wrapped[2].p = 0.1 if step < 20 else 0.7


def _patch_torch(wrapped: Any, step: int) -> None:
    nn.Tanh.forward = _TANH if not 20 <= step < 30 else lambda self, x: 2 * x.tanh()  # type: ignore[assignment,misc]


_TANH = nn.Tanh.forward
CHANGES = (
    _freeze,
    _hook,
    _hook_gradient,
    _global_hook,
    _swap_layer,
    _class,
    _weights,
    _predict,
    _grad_left,
    _rate,
    _patch_torch,
)


@pytest.mark.parametrize("folds", one_in(2, [None, 3]))
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_from_outside_are_noticed(
    change: Callable[[Any, int], None], folds: int | None, made: list[TracedStep]
) -> None:
    options = {} if folds is None else {"folds": folds, "epochs": 9}
    try:
        assert_same(*_by_callback(change, lambda: mlp(nn.Dropout(0.1)), **options))
    finally:
        nn.Tanh.forward = _TANH  # type: ignore[method-assign]
        for handle in _HANDLES:
            handle.remove()
        _HANDLES.clear()
    assert made[0].replays > 5


@pytest.mark.slow
def test_a_global_and_an_attribute_that_change(made: list[TracedStep]) -> None:
    def change(wrapped: Any, step: int) -> None:
        traced_models.SCALE = 1.0 if step < 20 else 0.25

    def build() -> nn.Module:
        traced_models.SCALE = 1.0
        return ReadsGlobal()

    assert_same(*_by_callback(change, build))
    traced_models.SCALE = 1.0

    def switch(wrapped: Any, step: int) -> None:
        wrapped.deep, wrapped.scale = step < 20, 0.5 if step < 30 else 0.1

    assert_same(*_by_callback(switch, Residual))
    assert all(steps.replays > 20 for steps in made)


@pytest.mark.slow
def test_list_items_that_a_callback_changes(made: list[TracedStep]) -> None:
    def change(wrapped: Any, step: int) -> None:
        wrapped.scales[0] = 1.0 if step < 20 else 0.25

    assert_same(*_by_callback(change, ListItem))
    assert made[0].replays == 0


@pytest.mark.slow
def test_a_difference_ends_tracing_and_is_told(made: list[TracedStep], monkeypatch: pytest.MonkeyPatch) -> None:
    """Something that no guard sees: an operation of torch is exchanged under it."""
    layer = F.gelu

    def change(progress: Any) -> None:
        if progress.step == 20:
            monkeypatch.setattr(F, "gelu", lambda *args, **kwargs: 2 * layer(*args, **kwargs))

    wrapped = vote.Wrapper(3)(mlp(nn.GELU()))
    with pytest.warns(WorkbenchWarning, match="changed what a training step computes"):
        fit(wrapped, waves(), epochs=10, batch_size=16, progress=False, callback=change)
    assert "other numbers" in made[0].off
