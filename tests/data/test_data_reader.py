"""Rows in every form give the same training, posterior, signature, calibration and comparison."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from workbench import calibrate, compose, data, fit, laplace, neo, sculpt, vote
from workbench.core.batches.rows import TensorRows, read
from workbench.data.reader import data_of

X = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True) + 0.1 * X[:, :1] ** 2


class Pairs(Dataset):
    """Rows that are made one by one."""

    def __init__(self, as_dict: bool = False) -> None:
        self.as_dict = as_dict

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> tuple[Any, Tensor]:
        if i >= len(X):
            raise IndexError(i)
        return {"x": X[i]} if self.as_dict else X[i], Y[i]


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(X, Y, strict=True)


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def whole() -> data.Data:
    card = data.Card("sums", "computed", "CC0", "none")
    features, target = tuple(data.Column(f"x{i}") for i in range(3)), data.Column("y")
    return data.Data("sums", "regression", data.Split(X, Y), data.Split(X[:9], Y[:9]), features, target, card)


FORMS: dict[str, Any] = {
    "pair": lambda: (X, Y),
    "arrays": lambda: (X.double().numpy(), Y.double().numpy()),
    "keywords": lambda: ({"x": X}, Y),
    "positional": lambda: ((X,), Y),
    "Split": lambda: data.Split(X, Y),
    "Data": whole,
    "TensorDataset": lambda: TensorDataset(X, Y),
    "Dataset": Pairs,
    "Dataset of dicts": lambda: Pairs(as_dict=True),
    "DataLoader": lambda: DataLoader(Pairs(), batch_size=60),
}
every_form = pytest.mark.parametrize("form", FORMS)


def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Keywords()


quiet = functools.partial(fit, epochs=2, validation=0, standardize=False, progress=False)


# ---- Wrapped.fit
@functools.cache
def risk_after_batches(name: str) -> Tensor:
    return risk_after(name, [(X, Y)])


def risk_after(name: str, rows: Any) -> Tensor:
    wrapper = {"laplace": laplace.Wrapper, "neo": neo.Wrapper}[name]
    return wrapper()(model()).eval().fit(rows)(X[:7], return_risk=True)[1]


@every_form
@pytest.mark.parametrize("name", ["laplace", "neo"])
def test_methods_are_fitted_to_rows_in_every_form(name: str, form: str) -> None:
    torch.testing.assert_close(risk_after(name, FORMS[form]()), risk_after_batches(name))


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.other, self.last = nn.Linear(3, 8), nn.Linear(8, 2), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x).tanh()
        return self.other(h), self.last(h)


@pytest.mark.filterwarnings("ignore:laplace. output.0. does not depend")
def test_a_tuple_beside_an_input_holds_the_targets_of_several_outputs() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = TwoOutputs()
    targets = (X[:, :2], Y)
    forms = [[(X, targets)], (X, targets), (X.numpy(), (X[:, :2].numpy(), Y.numpy())), ({"x": X}, targets)]
    risks = [laplace.Wrapper()(plain).eval().fit(rows)(X[:7], return_risk=True)[1][1] for rows in forms]
    assert risks[0].all()
    for risk in risks[1:]:
        torch.testing.assert_close(risk, risks[0])


@pytest.mark.parametrize(
    "inputs",
    [X.numpy().astype(np.float64), {"x": X}, TensorDataset(X), [X[:30], X[30:]], (X[:20], X[20:]), iter([X])],
    ids=["array", "keywords", "TensorDataset", "two batches", "two unlike batches", "generator"],
)
def test_methods_without_targets_take_inputs_alone(inputs: Any) -> None:
    torch.testing.assert_close(risk_after("neo", inputs), risk_after("neo", X))


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        (3, TypeError, "found int; give workbench Data"),
        ("diabetes", TypeError, "found str"),
        ((X, torch.full_like(Y, math.nan)), ValueError, "y holds NaN or infinite numbers in 60 of 60 rows"),
        (TensorDataset(X, X, Y), TypeError, "TensorDataset of 3 tensors"),
    ],
)
def test_what_methods_cannot_be_fitted_to_is_refused(rows: Any, error: type[Exception], message: str) -> None:
    wrapped = neo.Wrapper()(model())
    before = {name: value.clone() for name, value in wrapped.state_dict().items()}
    with pytest.raises(error, match=message):
        wrapped.fit(rows)
    assert all(torch.equal(before[name], value) for name, value in wrapped.state_dict().items())


# ---- fit
@functools.cache
def weights_after_pair() -> dict[str, Tensor]:
    return weights_after((X, Y))


def weights_after(rows: Any) -> dict[str, Tensor]:
    wrapped = sculpt.Wrapper(n_layers=1)(model())
    quiet(wrapped, rows, **({} if isinstance(rows, DataLoader) else {"batch_size": 60}))
    return {name: value for name, value in wrapped.state_dict().items() if value.is_floating_point()}


@every_form
def test_a_training_takes_rows_in_every_form(form: str) -> None:
    # rows of a loader come in its own order, which means other rounding
    weights = weights_after(FORMS[form]())
    for name, value in weights_after_pair().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)


def test_a_training_takes_the_name_of_a_data_set() -> None:
    plain, states = nn.Linear(10, 1), []
    for rows in ("diabetes", data.load("diabetes")):
        wrapped = compose()(copy.deepcopy(plain))
        fit(wrapped, rows, epochs=1, progress=False)
        states.append(wrapped.state_dict())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


def test_a_dict_can_be_cut_and_checkpointed_but_has_no_folds(tmp_path: Any) -> None:
    rows = {"x": X}, Y
    histories = [
        fit(compose()(model()), rows, epochs=2, progress=False, checkpoint=tmp_path / "state.pt") for _ in range(2)
    ]
    assert histories[0].frame.equals(histories[1].frame)  # the second went on from the end of the first
    with pytest.raises(ValueError, match=r"of another training .*data"):
        fit(compose()(model()), ({"x": X + 1}, Y), epochs=2, progress=False, checkpoint=tmp_path / "state.pt")
    with pytest.raises(TypeError, match="folds: x is a dict"):
        fit(vote.Wrapper(4)(model()), rows, folds=2, progress=False)


def test_rows_of_a_dict_belong_together() -> None:
    rows = read(({"a": X, "b": X.numpy()[:, 0]}, Y))
    assert isinstance(rows, TensorRows)
    assert [tuple(t.shape) for t in rows.take(torch.tensor([4, 2])).inputs] == [(2, 3), (2,)]
    with pytest.raises(ValueError, match="x has 59 rows and y has 60"):
        read(({"a": X, "b": X[1:]}, Y))
    with pytest.raises(TypeError, match=r"x\['b'\] is object and can't"):
        read(({"a": X, "b": object()}, Y))


# ---- calibrate
@pytest.mark.parametrize("form", [*FORMS, "stream"])
def test_a_calibration_takes_rows_in_every_form(form: str) -> None:
    wrapped = sculpt.Wrapper(n_layers=1)(model())
    rows = Stream() if form == "stream" else FORMS[form]()
    if form == "Data":  # they were trained on
        for training_rows in (rows, "diabetes"):
            with pytest.raises(ValueError, match="a Data holds training rows"):
                calibrate(wrapped, training_rows)
        return
    torch.testing.assert_close(calibrate(wrapped, rows).scale, calibrate(wrapped, (X, Y)).scale)


# ---- comparison
@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("keywords", "positional", "Dataset of dicts")])
def test_a_comparison_takes_rows_in_every_form(form: str) -> None:
    expected, dataset = data_of((X, Y), split=3), data_of(FORMS[form](), split=3)
    if form == "Data":
        assert torch.equal(dataset.train.x, X)
        return
    assert dataset.checksum == expected.checksum
    assert (len(dataset.train), len(dataset.test)) == (48, 12)


@pytest.mark.parametrize("form", ["keywords", "positional", "Dataset of dicts"])
def test_a_comparison_needs_one_tensor_of_inputs(form: str) -> None:
    with pytest.raises(TypeError, match="one tensor"):
        data_of(FORMS[form]())


def test_large_values_get_no_class_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """One name for each number up to the largest value would fill the memory."""
    monkeypatch.setattr("workbench.data.reader.class_names", lambda *_: pytest.fail("values have no class names"))
    assert data_of((X, 1e12 * Y)).classes is None
    assert data_of((X, torch.arange(60) * 10**12), task="regression").classes is None
