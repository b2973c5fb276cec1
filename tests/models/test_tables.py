"""`tabular`: bins from training rows alone, units kept, one network for every task of a table, and refusals of other data."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.bins import through_bins
from torch import Tensor, nn

from workbench import WorkbenchWarning, compose, fit, neo, sculpt, vote
from workbench.data import Data
from workbench.models import NumericColumns, PiecewiseLinear, Standardization, is_table, tabular


def table(n: int = 60, **options: Any) -> Data:
    """A column far from zero, one with ties, a truth value, and one that never varies; test rows are far away."""
    x = torch.stack(
        [
            1000 + 5 * torch.randn(n),
            torch.randint(4, (n,)).float(),
            (torch.rand(n) > 0.5).float(),
            torch.full((n,), 3.0),
        ],
        1,
    )
    return Data.from_arrays(x, x[:, :1] / 10 + x[:, 1:2], test=(x[:20] + 1e6, x[:20, :1]), **options)


def by_hand(model: nn.Sequential, data: Data, x: Tensor, bins: int) -> np.ndarray:
    """What enters the first linear layer, by numpy from the training rows."""
    seen, z = data.train.x.double().numpy(), x.double().numpy()
    mean, scale = seen.mean(0), np.where(seen.std(0) > 0, seen.std(0), 1.0)
    for column in (c for c in range(seen.shape[1]) if len(np.unique(seen[:, c])) == 2):
        mean[column], scale[column] = seen[:, column].min(), np.ptp(seen[:, column])
    seen, z = (seen - mean) / scale, (z - mean) / scale
    columns = [column for column in range(z.shape[1]) if len(np.unique(seen[:, column])) > 2]
    parts = []
    for column in columns:
        different = np.unique(seen[:, column])
        edges = different if len(different) <= bins + 1 else np.quantile(seen[:, column], np.arange(bins + 1) / bins)
        parts.append(np.pad(through_bins(z[:, column], edges), ((0, 0), (0, bins + 1 - len(edges)))))
    return np.concatenate([z, *parts], 1)


def test_the_first_layer_gets_standardized_columns_and_how_far_they_are_through_their_bins() -> None:
    data = table()
    model = tabular(data, embedding="piecewise", bins=5).double()
    for x in (data.train.x, data.test.x - 1e6 + 3, data.test.x):
        expected = by_hand(model, data, x, bins=5)
        assert expected.shape == (len(x), 4 + 2 * 5)
        np.testing.assert_allclose(model[:2](x.double()).numpy(), expected, rtol=1e-4, atol=1e-4)  # float32 edges
    assert model[1].columns.tolist() == [0, 1]


def test_test_rows_change_nothing() -> None:
    data = table()
    other = replace(data, test=data.test.take([0, 3]))
    for one, two in zip(
        tabular(data, embedding="piecewise").buffers(), tabular(other, embedding="piecewise").buffers(), strict=True
    ):
        assert torch.equal(one, two)


@pytest.mark.parametrize("units", [1e-6, 1e6])
def test_answers_do_not_depend_on_units(units: float) -> None:
    data = table()
    model, other = (
        tabular(Data.from_arrays(data.train.x * u, data.train.y, test=[0]), embedding="piecewise") for u in (1.0, units)
    )
    other.load_state_dict({**other.state_dict(), **dict(model.named_parameters())})
    torch.testing.assert_close(other(data.train.x * units), model(data.train.x), rtol=1e-3, atol=1e-3)


class Recorded(nn.Sequential):
    """A model that remembers what it was given."""

    def forward(self, x: Tensor) -> Tensor:
        self.given = x.detach()
        return super().forward(x)


@pytest.mark.parametrize("standardize", [None, True])
def test_fit_leaves_its_inputs_as_they_are_and_standardizes_targets(standardize: bool | None) -> None:
    data = table()
    wrapped = compose()(Recorded(*tabular(data, width=4, embedding="piecewise")))
    fit(wrapped, data, epochs=1, progress=False, standardize=standardize)
    scaling = wrapped.scaling
    assert scaling is not None
    wrapped(data.train.x)
    torch.testing.assert_close(wrapped.given, data.train.x)
    assert float(scaling.y_scale) != 1
    plain = compose()(nn.Linear(4, 1))
    fit(plain, data, epochs=1, progress=False)
    assert plain.scaling is not None
    assert plain.scaling.x_mean is not None  # as ever


class Beside(nn.Module):
    def __init__(self, data: Data) -> None:
        super().__init__()
        self.table, self.other = tabular(data, width=4, embedding="piecewise"), nn.Linear(2, 1)

    def forward(self, table: Tensor, other: Tensor) -> Tensor:
        return self.table(table) + self.other(other)


def test_of_several_inputs_fit_says_that_none_is_standardized() -> None:
    data = table()
    x = {"table": data.train.x, "other": torch.randint(256, (len(data.train), 2), dtype=torch.uint8)}
    wrapped = compose()(Beside(data))
    with pytest.warns(WorkbenchWarning) as told:
        fit(wrapped, (x, data.train.y), epochs=1, progress=False)
    words = "none of the inputs ('table', 'other') is standardized"
    assert [words in str(warning.message) for warning in told].count(True) == 1
    assert wrapped(**x).isfinite().all()  # bytes are still made floating-point numbers, which a linear layer wants


TASKS = {
    "regression": (torch.randn(40, 1), {}, 1),
    "columns": (torch.randn(40, 3), {}, 3),
    "classes": (torch.arange(40) % 4, {}, 4),
    "labels": (torch.rand(40, 2) > 0.5, {}, 2),
    "counts": (torch.randint(9, (40, 2)), {"task": "counts"}, 2),
}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("embedding", ["piecewise", "periodic", "none"])
def test_every_task_of_a_table_is_trained(task: str, embedding: Any) -> None:
    y, options, outputs = TASKS[task]
    data = Data.from_arrays(torch.randn(40, 3), y, **options)
    model = tabular(data, embedding=embedding, width=8, bins=4, dropout=0.1, embedding_dim=2 * (task == "columns"))
    assert model(data.test.x).shape == (len(data.test), outputs)
    assert isinstance(model[1], NumericColumns) is (embedding != "none")
    if task == "counts":
        return
    meaning: Any = {"classes": "logits", "labels": "binary"}.get(task, "values")
    wrapped = vote.Wrapper(2, share="rank1", output=meaning)(model)
    fit(wrapped, data, epochs=1, progress=False)
    assert all(p.grad is None or p.grad.isfinite().all() for p in wrapped.parameters())
    assert wrapped(data.test.x).isfinite().all()


def test_categories_and_gaps_of_a_frame_stay_columns_of_0_and_1() -> None:
    frame = pd.DataFrame(
        {"size": np.r_[np.nan, np.arange(39.0)], "colour": ["red", "blue", "green", "red"] * 10, "y": np.arange(40.0)}
    )
    data = Data.from_dataframe(frame, target="y")
    model = tabular(data, width=4, embedding="piecewise")
    assert [str(data.features[number]) for number in model[1].columns] == ["size"]
    assert model(data.test.x).isfinite().all()


@pytest.mark.slow
def test_rank_one_voters_with_sculpt_and_neo_learn_a_step_and_know_where_it_ends() -> None:
    x = torch.rand(300, 1)
    data = Data.from_arrays(x, (x > 0.37).float() + 0.05 * torch.randn(300, 1))
    wrapped = compose(vote.Wrapper(3, share="rank1"), sculpt.Wrapper(n_layers=1), neo.Wrapper())(
        tabular(data, width=16, embedding="piecewise")
    )
    fit(wrapped, data, epochs=20, lr=0.02, progress=False)
    with torch.no_grad():
        y, risk = wrapped(data.test.x, return_risk=True)
        far = wrapped(torch.tensor([[5.0]]), return_risk=True)[1]
    away = ((data.test.x - 0.37).abs() > 0.05)[:, 0]
    assert float((y - data.test.y)[away].square().mean().sqrt()) < 0.12  # of the best line it is 0.23
    assert float(risk.aleatoric[away].mean()) < 0.2
    assert float(far.vacuitic) > float(risk.vacuitic.max())  # the numbers beyond the bins are handed on as well
    assert float(far.epistemic) > float(risk.epistemic.mean())


@pytest.mark.parametrize("components", [False, True])
def test_saved_copied_and_exported_it_answers_the_same(components: bool) -> None:
    data = table()
    settings: dict[str, Any] = {"width": 6, "embedding": "piecewise", "components": components}
    model, x = tabular(data, embedding_dim=3, **settings).eval(), data.train.x[:7]
    expected = model(x)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    again = tabular(data, embedding_dim=3, **settings)
    again.load_state_dict(torch.load(buffer))
    for other in (again, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), expected)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},)).module()
    torch.testing.assert_close(exported(data.train.x), model(data.train.x))
    wrapped = compose(vote.Wrapper(2), sculpt.Wrapper())(tabular(data, **settings)).eval()
    other = compose(vote.Wrapper(2), sculpt.Wrapper())(tabular(data, **settings)).eval()
    other.load_state_dict(wrapped.state_dict())
    risk, same = other(x, return_risk=True)[1], wrapped(x, return_risk=True)[1]
    assert all(torch.equal(risk[name], same[name]) for name in ("aleatoric", "epistemic", "total"))


def broken(x: Tensor, y: Tensor | None = None) -> Data:
    """Data whose x is replaced unchecked."""
    data = Data.from_arrays(torch.randn(len(x), *x.shape[1:]), torch.randn(len(x), 1) if y is None else y, test=[0])
    data.train.x.copy_(x[1:])
    return data


REFUSED = {
    "images": (
        lambda: Data.from_arrays(torch.rand(9, 3, 4, 4), torch.rand(9, 1)),
        {},
        r"takes tables, x \[n, features\]; a row of your data has shape \[3, 4, 4\]",
    ),
    "whole numbers": (
        lambda: Data.from_arrays(torch.arange(20).reshape(10, 2), torch.rand(10, 1)),
        {},
        "amounts or codes of categories",
    ),
    "nan": (
        lambda: broken(torch.tensor([[0.0, 1.0], [1.0, 2.0], [3.0, float("nan")]])),
        {},
        "is nan in training row 1, column 1",
    ),
    "several inputs": (lambda: Data.from_arrays({"a": torch.rand(9, 2)}, torch.rand(9, 1)), {}, "is a dict of a"),
    "several targets": (
        lambda: Data.from_arrays(torch.rand(9, 2), {"a": torch.rand(9, 1), "b": torch.rand(9, 1)}),
        {},
        "the targets a, b",
    ),
    "maps": (
        lambda: Data.from_arrays(torch.rand(9, 2), torch.rand(9, 4, 4)),
        {},
        r"regression of shape \[4, 4\] per row",
    ),
    "embedding": (
        table,
        {"embedding": "plr"},
        "embedding must be one of 'auto', 'piecewise', 'periodic', 'none'; found 'plr'",
    ),
    "bins": (table, {"bins": 0}, "bins must be a whole number of at least 1; found 0"),
    "components": (table, {"components": 1}, "components must be True, False or None; found 1"),
    "width": (table, {"width": 2.5}, "width must be a whole number of at least 1; found 2.5"),
    "dropout": (table, {"dropout": 1.0}, "dropout must be at least 0 and below 1; found 1.0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_table_is_refused(name: str) -> None:
    make, settings, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        tabular(make(), **settings)


def test_random_state_and_default_dtype_are_respected() -> None:
    data = table()
    torch.set_default_dtype(torch.float64)
    try:
        model = tabular(data, width=4, embedding="piecewise")
    finally:
        torch.set_default_dtype(torch.float32)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float64, torch.int64}
    assert model(data.train.x.double()).isfinite().all()
    assert isinstance(model[0], Standardization)
    assert isinstance(model[1].embedding, PiecewiseLinear)


def test_a_table_is_told_from_what_is_none() -> None:
    classes = Data.from_arrays(torch.rand(30, 2), torch.arange(30) % 3)
    labels = Data.from_arrays(torch.rand(9, 2), torch.rand(9, 3) > 0.5)
    assert all(map(is_table, (table(), classes, labels)))
    several = Data.from_arrays({"a": torch.rand(9, 2), "b": torch.rand(9, 2)}, torch.rand(9))
    tokens = Data.from_arrays(torch.rand(9, 4), torch.arange(36).reshape(9, 4) % 3, task="classification")
    whole = Data.from_arrays(torch.arange(18).reshape(9, 2), torch.rand(9))
    series = Data.from_arrays(torch.rand(9, 4, 2), torch.rand(9))
    maps, targets = (REFUSED[name][0]() for name in ("maps", "several targets"))
    assert not any(map(is_table, (several, tokens, whole, series, maps, targets)))
