"""Errors of fit: NaN losses, and bad input, which gets a clear error and changes nothing."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.training_models import Stream, net, options, plain, plane, quiet, same, weights
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from workbench import compose, fit, vote


def test_a_nan_loss_names_epoch_and_step_and_keeps_the_best_weights() -> None:
    class Breaks(nn.Module):
        def __init__(self, call: int) -> None:
            super().__init__()
            self.calls, self.call = 0, call

        def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
            self.calls += 1
            return F.mse_loss(prediction, target) * (math.nan if self.calls == self.call else 1)

    x, y = plane(40)
    wrapped = plain()
    with pytest.raises(
        FloatingPointError, match=r"nan at epoch 3, step 2 .*lr.*standardize=False.*weights of epoch \d"
    ):
        quiet(wrapped, (x, y), epochs=9, criterion=Breaks(8), batch_size=18)
    assert not wrapped.training
    assert wrapped(x).isfinite().all()

    wrapped = plain()
    start = weights(wrapped)
    with pytest.raises(FloatingPointError, match=r"epoch 1, step 1 .*weights from before the training"):
        quiet(wrapped, (x, y), epochs=9, criterion=Breaks(1))
    assert same(weights(wrapped), start)
    assert wrapped.scaling is None
    with pytest.raises(FloatingPointError, match="validation of epoch 1"):
        quiet(wrapped, (x, y), epochs=9, criterion=Breaks(3), batch_size=18)


def test_a_nan_that_a_loader_brings_is_told_by_row() -> None:
    x, y = plane(20)
    x[13] = math.nan
    loader = DataLoader(TensorDataset(x, y), batch_size=10)
    with pytest.raises(FloatingPointError, match=r"step 2 .*x holds NaN or infinite numbers in rows of the batch 3"):
        quiet(plain(), loader, epochs=1, validation=0)


def test_a_rate_that_is_too_high_ends_in_an_error_and_finite_weights() -> None:
    wrapped = plain()
    sgd = functools.partial(torch.optim.SGD, lr=1e30)
    with pytest.raises(FloatingPointError, match="epoch 1"):
        quiet(wrapped, plane(), epochs=5, optimizer=sgd)
    assert wrapped(plane()[0]).isfinite().all()


def nan_rows(part: int, value: float = math.nan) -> tuple[Tensor, Tensor]:
    rows = plane(20)
    rows[part][[3, 8]] = value
    return rows


class Text(Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> str:
        return "abc"


x20, y20 = plane(20)
BAD: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (nan_rows(0), {}, ValueError, "x holds NaN or infinite numbers in 2 of 20 rows, first in row 3"),
    (nan_rows(1), {}, ValueError, "y holds NaN or infinite numbers in 2 of 20 rows, first in row 3"),
    (nan_rows(1, math.inf), {}, ValueError, "y holds NaN or infinite"),
    ((x20, y20[:, 0]), {}, ValueError, r"targets are \[n\], but the model gives \[n, 1\].*y\[:, None\]"),
    ((x20, y20[:, 0]), {"criterion": F.huber_loss}, ValueError, r"targets are \[n\]"),
    ((x20, torch.cat([y20, y20], 1)), {}, ValueError, r"targets are \[n, 2\], but the model gives \[n, 1\]"),
    ((x20, y20[:-1]), {}, ValueError, "x has 20 rows and y has 19"),
    ((x20, torch.arange(20)), {}, ValueError, "class numbers go from 0 to 19, but the model gives 1 scores"),
    ((x20, torch.zeros(20, 1, dtype=torch.int64)), {}, ValueError, r"class numbers are \[n, 1\]"),
    ((x20[:1], y20[:1]), {"validation": 0}, ValueError, "found 1 row; training needs at least 2"),
    ((x20[:2], y20[:2]), {}, ValueError, "2 rows are too few: validation=0.1 holds out 1"),
    ((np.array(["a", "b"]), y20[:2]), {}, TypeError, "x is .*can't be made a tensor"),
    ((x20, 3.0), {}, ValueError, "y is a single number"),
    ((x20, None), {}, ValueError, "y is None; its first dimension must be the rows"),
    (x20, {}, TypeError, "found a tensor.*workbench Data"),
    ((x20, x20, y20), {}, TypeError, "found a tuple of 3"),
    (TensorDataset(x20, x20, y20), {}, TypeError, "TensorDataset of 3"),
    (TensorDataset(x20), {}, TypeError, r"TensorDataset of one tensor; it must hold two, TensorDataset\(x, y\)"),
    (((), y20), {}, TypeError, r"x: found a tuple of no inputs, but the model takes \(input\)"),
    (((x20, x20), y20), {}, TypeError, r"x: found a tuple of 2 inputs, but the model takes \(input\)"),
    (Text(), {}, TypeError, r"must give a pair \(x, y\)"),
    (Stream(), {}, TypeError, "give it in a DataLoader"),
    (DataLoader(TensorDataset(x20, y20)), {}, ValueError, "validation: the rows of a DataLoader can't be split"),
    (DataLoader(TensorDataset(x20, y20)), {"validation": 0, "batch_size": 4}, ValueError, "batch_size"),
    (
        DataLoader(TensorDataset(x20, y20)),
        {"validation": 0, "standardize": True},
        ValueError,
        "standardize: this needs tensors",
    ),
    (DataLoader(Stream(), batch_size=4), {"validation": 0}, TypeError, "no length"),
    ((x20, y20), {"validation": 1.0}, ValueError, "validation must be a share"),
    ((x20, y20), {"validation": -0.1}, ValueError, "validation must be a share"),
    ((x20, y20), {"validation": (x20[:, :1], y20)}, ValueError, "validation: its rows have shapes"),
    ((x20, y20), {"validation": (x20[:0], y20[:0])}, ValueError, "validation: it has no rows"),
    ((x20, y20), {"validation": 0, "patience": 3}, ValueError, "patience: there are no validation rows"),
    ((x20, y20), {"patience": 0}, ValueError, "patience must be"),
    ((x20, y20), {"epochs": 0}, ValueError, "epochs must be a whole number of at least 1; found 0"),
    ((x20, y20), {"batch_size": 1}, ValueError, "batch_size must be a whole number of at least 2"),
    ((x20, y20), {"lr": 0.0}, ValueError, "lr must be above 0"),
    ((x20, y20), {"lr": math.nan}, ValueError, "lr must be above 0"),
    ((x20, y20), {"weight_decay": -1.0}, ValueError, "weight_decay must be"),
    ((x20, y20), {"dtype": torch.int64}, ValueError, "dtype must be a floating-point type"),
    ((x20, y20), {"optimizer": torch.optim.SGD([torch.zeros(1)], lr=1.0)}, TypeError, "give a callable"),
    ((x20, y20), {"optimizer": lambda parameters: None}, TypeError, "must return a torch Optimizer"),
    ((x20, y20), {"optimizer": torch.optim.SGD, "lr": 0.1}, ValueError, "lr and weight_decay apply to the default"),
    ((x20, y20), {"criterion": lambda p, t: t.mean()}, ValueError, "depends on no trainable parameter"),
    ((x20, y20), {"epochs": "10"}, ValueError, "epochs must be a whole number of at least 1; found '10'"),
    ((x20, y20), {"epochs": None}, ValueError, "epochs must be a whole number of at least 1; found None"),
    ((x20, y20), {"batch_size": 32.0}, ValueError, "batch_size must be a whole number of at least 2; found 32.0"),
    ((x20, y20), {"patience": 1.5}, ValueError, "patience must be a whole number of at least 1; found 1.5"),
    ((x20, y20), {"lr": "0.01"}, TypeError, "lr must be a number; found '0.01'"),
    ((x20, y20), {"weight_decay": None}, TypeError, "weight_decay must be a number; found None"),
    ((x20, y20), {"seed": 0.5}, ValueError, "seed must be a whole number of at most 64 bits; found 0.5"),
    ((x20, y20), {"seed": 2**70}, ValueError, "seed must be a whole number of at most 64 bits"),
    ((x20, y20), {"dtype": "float64"}, ValueError, "dtype must be a floating-point type .* found 'float64'"),
    ((x20, y20), {"standardize": "no"}, TypeError, "standardize must be True, False or None; found 'no'"),
    ((x20, y20), {"optimizer": torch.optim.LBFGS}, TypeError, "LBFGS.step needs a closure"),
    ((x20, y20), {"optimizer": lambda _: torch.optim.SGD([torch.zeros(1)], lr=1.0)}, ValueError, "holds none of the"),
    (
        (x20, y20),
        {"criterion": "mse"},
        TypeError,
        r"criterion: found 'mse'; give a function criterion\(prediction, target\)",
    ),
    ((x20, y20), {"criterion": nn.MSELoss}, TypeError, r"criterion: found the class MSELoss; .*MSELoss\(\)"),
    ((x20, y20), {"criterion": lambda p, t: F.mse_loss(p, t).item()}, TypeError, "criterion: it returned float"),
    ((x20, y20), {"callback": 5}, TypeError, r"callback: found 5; give a function callback\(progress\)"),
    ((x20, y20), {"checkpoint": 5}, TypeError, "checkpoint: found 5; give the path of a file"),
]


@pytest.mark.parametrize(
    ("rows", "kwargs", "error", "message"), BAD, ids=[f"{i}-{row[3][:24]}" for i, row in enumerate(BAD)]
)
def test_bad_input_gets_a_clear_error_and_changes_nothing(
    rows: Any, kwargs: dict[str, Any], error: type[Exception], message: str
) -> None:
    wrapped = plain()
    start = weights(wrapped)
    state = torch.get_rng_state()
    with pytest.raises(error, match=message):
        quiet(wrapped, rows, **options(**kwargs))
    assert same(weights(wrapped), start)
    assert wrapped.scaling is None
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", ["whole", "part"])
def test_an_exported_model_is_refused_before_anything_with_what_to_train(place: str) -> None:
    exported: Any = torch.export.export(nn.Linear(2, 1).eval(), (x20,)).module()
    wrapped = compose()(exported if place == "whole" else nn.Sequential(exported, nn.Linear(1, 1)))
    start = weights(wrapped)
    with pytest.raises(TypeError, match=r"exported by torch.export.*train the nn.Module that it was exported from"):
        quiet(wrapped, (x20, y20), **options())
    assert same(weights(wrapped), start)


def test_an_error_leaves_every_layer_in_its_mode() -> None:
    wrapped = plain()
    wrapped[2].eval()
    with pytest.raises(ValueError, match="targets are"):
        quiet(wrapped, (x20, y20[:, 0]))
    assert [layer.training for layer in wrapped] == [True, True, False, True]
    assert wrapped.training


def test_what_is_not_wrapped_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Sequential is not wrapped: wrap it first, as in vote\.Wrapper\(5\)\(model\)"):
        quiet(net(), plane())
    function: Any = F.relu
    with pytest.raises(TypeError, match=r"found function; give a wrapped model"):
        quiet(function, plane())
    with pytest.raises(ValueError, match=r"its parameter 0\.weight is on the device 'meta', which holds no numbers"):
        quiet(compose()(net().to("meta")), plane())
    frozen = compose()(net().requires_grad_(False))
    with pytest.raises(ValueError, match="nothing to train"):
        quiet(frozen, plane())


@pytest.mark.parametrize("options", [{}, {"folds": 3}], ids=["validation", "folds"])
def test_a_criterion_that_takes_a_mean_over_no_class_is_named(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(60, 3), torch.randint(3, (60,))
    y[torch.rand(60) < 0.8] = -100
    wrapped = vote.Wrapper(3, output="logits")(nn.Linear(3, 3))
    with pytest.raises(FloatingPointError, match=r"without any class \(all are -100\)"):
        fit(wrapped, (x, y), epochs=2, batch_size=4, progress=False, criterion=nn.CrossEntropyLoss(), **options)
