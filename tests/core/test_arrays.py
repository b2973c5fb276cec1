"""Rows in forms other than tensors: read as numpy, pandas and scikit-learn read them, or refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from workbench import fit, laplace, metrics, neo, vote
from workbench.attributions import integrated_gradients, permutation_importance
from workbench.calibration import calibrate, selective, top_uncertain
from workbench.core.batches.arrays import numbers_of
from workbench.data import Data
from workbench.widgets import Explorer

N = 40
X = np.random.default_rng(0).normal(size=(N, 2))
FRAME = pd.DataFrame(X, columns=["a", "b"]).assign(y=X @ [1.0, 2.0])
SHUFFLED = FRAME.sample(frac=1, random_state=1)


def linear(outputs: int = 1) -> Any:
    return vote.Wrapper(2)(nn.Linear(2, outputs))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (pd.DataFrame({"a": [True, False], "b": [1.5, 2.5]}), [[1.0, 1.5], [0.0, 2.5]]),
        (pd.DataFrame({"a": pd.array([1, None], dtype="Int64"), "b": [1.5, 2.5]}), [[1.0, 1.5], [np.nan, 2.5]]),
        (pd.Series(pd.array([1, 2], dtype="Int64")), [1, 2]),
        (pd.Series(pd.array([1, None], dtype="Float64")), [1.0, np.nan]),
        (np.array([1.5, 2, np.float32(3)], dtype=object), [1.5, 2.0, 3.0]),
        (np.array([True, False], dtype=object), [True, False]),
        (np.array([3, np.uint8(4)], dtype=object), [3, 4]),
        (np.ma.masked_values([[1.0, -999.0]], -999.0), [[1.0, np.nan]]),
        (np.ma.masked_equal([1, -999, 2], -999), [1.0, np.nan, 2.0]),
        (np.array([1.5, 2.5], dtype=">f4"), [1.5, 2.5]),
        (np.asfortranarray(X), X),
    ],
)
def test_numbers_are_those_that_were_given(value: Any, expected: Any) -> None:
    numbers, wanted = numbers_of(value), np.asarray(expected)
    assert numbers.dtype.isnative
    assert numbers.dtype.kind == wanted.dtype.kind
    np.testing.assert_array_equal(numbers, wanted)


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (FRAME.assign(b="red")[["a", "b"]], r"of its column 'b': it holds texts, such as 'red'; .*Data.from_dataframe"),
        (pd.DataFrame({"a": X[:, 0], "t": pd.date_range("2024", periods=N)}), r"of its column 't': .*from_dataframe"),
        (np.array(["a", "b"] * (N // 2)), r"texts, such as 'a'; give numbers: .*Data.from_arrays\(x, y\)"),
        (np.array([{}] * N), r"objects, such as \{\} of type dict"),
        (pd.date_range("2024", periods=N).to_numpy(), r"dates or spans of time .* days"),
        (np.zeros(N, dtype=[("a", float)]), "give numbers"),
    ],
)
@pytest.mark.parametrize("read", [lambda x: fit(linear(), (x, X[:, :1])), lambda x: Data.from_arrays(x, X)])
def test_what_holds_no_numbers_is_refused_by_what_it_holds(read: Any, x: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        read(x)


LABELS = torch.arange(N) % 2
COMPLEX = {
    "tensors": (torch.tensor(X), LABELS + 1j),
    "arrays": (X, (LABELS + 1j).numpy()),
    "rows": Subset(TensorDataset(torch.tensor(X).float(), LABELS + 1j), range(N)),
    "batches": DataLoader(TensorDataset(torch.tensor(X).float(), LABELS + 1j), batch_size=8),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_targets_are_no_class_numbers(name: str) -> None:
    """Of which only the real part would be left, without its fraction."""
    rows: Any = COMPLEX[name]
    wrapped = vote.Wrapper(2, output="logits")(nn.Linear(2, 2))
    before = [p.clone() for p in wrapped.parameters()]
    for use in (lambda: fit(wrapped, rows, epochs=1, validation=0, progress=False), lambda: calibrate(wrapped, rows)):
        with pytest.raises(TypeError, match=r"y holds complex numbers \(torch.complex\d+\).*torch.view_as_real"):
            use()
    assert all(torch.equal(p, q) for p, q in zip(before, wrapped.parameters(), strict=True))
    if isinstance(rows, tuple):
        with pytest.raises(TypeError, match=r"y is .*complex.*give real numbers"):
            Data.from_arrays(*rows)
    with pytest.raises(TypeError, match=r"y is .*complex.*give real numbers"):
        Data.from_dataset(COMPLEX["rows"])


@pytest.mark.parametrize("name", COMPLEX)
def test_targets_that_are_ignored_may_be_complex_or_unknown(name: str) -> None:
    wrapped: Any = vote.Wrapper(2)(nn.Linear(2, 2))
    expected = top_uncertain(wrapped, torch.tensor(X).float(), 3)
    for rows in (COMPLEX[name], (X, np.full(N, np.nan))):
        torch.testing.assert_close(top_uncertain(wrapped, rows, 3), expected)


class ComplexOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_complex(self.layer(x).reshape(-1, 2, 2))


def test_complex_predictions_are_refused_where_real_numbers_are_compared() -> None:
    wrapped: Any = vote.Wrapper(2)(ComplexOutput())
    x, y = torch.tensor(X).float(), torch.tensor(X).float()
    before = [p.clone() for p in wrapped.parameters()]
    for use in (
        lambda: top_uncertain(wrapped, x, 3),
        lambda: calibrate(wrapped, (x, y), method="conformal"),
        lambda: selective(wrapped, (x, y)),
        lambda: integrated_gradients(wrapped, x),
        lambda: permutation_importance(wrapped, x),
        lambda: Explorer(wrapped, (x, y)),
        lambda: fit(wrapped, (x, y), epochs=1, progress=False),
    ):
        with pytest.raises(TypeError, match=r"model returns complex numbers \(torch.complex64\).*view_as_real"):
            use()
    assert all(torch.equal(p, q) for p, q in zip(before, wrapped.parameters(), strict=True))


def test_a_loss_of_ones_own_may_compare_complex_numbers() -> None:
    wrapped = vote.Wrapper(2)(nn.Linear(2, 1))
    x, y = torch.tensor(X).float(), torch.tensor(X[:, :1]) + 0.5j
    loss = wrapped.loss(lambda p, t: (p - t).abs().square().mean(), x, y)
    each = [(voter(x) - y).abs().square().mean() for voter in wrapped.voters()]
    torch.testing.assert_close(loss, torch.stack(each).mean(), check_dtype=False)


def test_targets_of_unequal_length_are_refused_with_what_to_write() -> None:
    with pytest.raises(TypeError, match=r"y is a list of 40 .* its rows differ in shape; .*pad_sequence"):
        fit(linear(), (X, [[1.0], [1.0, 2.0]] * 20), epochs=1, progress=False)


def test_sparse_matrices_are_refused_with_the_line_to_write() -> None:
    sparse = pytest.importorskip("scipy.sparse")
    for read in (lambda x: fit(linear(), (x, X[:, :1])), lambda x: Data.from_arrays(x, X)):
        with pytest.raises(TypeError, match=r"sparse matrix; give x\.toarray\(\)"):
            read(sparse.csr_matrix(X))


def test_what_a_mask_leaves_out_is_missing_not_a_number() -> None:
    masked = np.ma.masked_where(np.arange(2 * N).reshape(N, 2) == 6, X)
    masked.data[3, 0] = -999.0
    for read in (lambda: fit(linear(), (masked, X[:, :1])), lambda: Data.from_arrays(masked, X)):
        with pytest.raises(ValueError, match="NaN or infinite numbers in 1 of 40 rows, first in row 3"):
            read()
    with pytest.raises(ValueError, match="prediction has 1 NaN"):
        metrics.rmse(masked, X)


@pytest.mark.parametrize(
    "pair",
    [
        (SHUFFLED[["a", "b"]], FRAME[["y"]]),  # the same rows in another order
        (FRAME[["a", "b"]], SHUFFLED[["y"]]),
        ({"input": SHUFFLED[["a", "b"]]}, FRAME[["y"]]),
        tuple(part.set_axis(pd.date_range(day, periods=N)) for part, day in ((FRAME[["a", "b"]], "2024-01-01"), (FRAME[["y"]], "2024-01-02"))),
    ],
)  # fmt: skip
def test_rows_that_the_index_says_do_not_belong_together_are_refused(pair: Any) -> None:
    readers = [lambda: fit(linear(), pair), lambda: calibrate(linear(), pair), lambda: Data.from_arrays(*pair)]
    for read in readers:
        with pytest.raises(ValueError, match=r"row 0 has index .*give y\.loc\[x\.index\]; or, .* y\.to_numpy\(\)"):
            read()


def test_rows_in_one_order_are_taken_whatever_their_index() -> None:
    part = SHUFFLED[:20]  # of a split; its columns were scaled by something that dropped the index
    x, y = pd.DataFrame(part[["a", "b"]].to_numpy()), part[["y"]]
    for pair in ((part[["a", "b"]], y), (x, y), (part[["a", "b"]], y.to_numpy()), (part[["a", "b"]], y.reset_index())):
        data = Data.from_arrays(*pair, test=[0])
        np.testing.assert_array_equal(data.train.x.numpy(), part[["a", "b"]].to_numpy(np.float32)[1:])


class Rows(Dataset):
    """Rows of three: input, weight, target."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return torch.tensor(X[i]).float(), torch.tensor([1.0 + i]), torch.tensor([X[i] @ [1.0, 2.0]]).float()


def test_the_second_of_three_is_not_taken_for_the_target() -> None:
    says = r"(a tuple|a list) of 3.* collate_fn=lambda rows: .*WeightedRandomSampler"
    for wrapper, data in ((laplace.Wrapper(), DataLoader(Rows(), 8)), (neo.Wrapper(), DataLoader(Rows(), 8))):
        with pytest.raises(TypeError, match=says):
            wrapper(nn.Linear(2, 1)).fit(data)
    for data in (Rows(), DataLoader(Rows(), 8)):
        with pytest.raises(TypeError, match=says):
            fit(linear(), data, validation=0, progress=False)
        with pytest.raises(TypeError, match=says):
            top_uncertain(linear(), data, 3)

    def collate(rows: Any) -> Any:  # what the error says
        return torch.utils.data.default_collate([(row[0], row[1]) for row in rows])

    fit(linear(), DataLoader(Rows(), 8, collate_fn=collate), validation=0, epochs=1, progress=False)


def test_batches_of_arrays_train_as_batches_of_tensors() -> None:
    def as_arrays(rows: Any) -> Any:
        return tuple(np.stack([row[i].numpy() for row in rows]) for i in range(2))

    dataset = TensorDataset(torch.tensor(X).float(), torch.tensor(X[:, :1]).float())
    weights = []
    for collate in (as_arrays, None):
        torch.manual_seed(0)
        wrapped = linear()
        fit(wrapped, DataLoader(dataset, 8, collate_fn=collate), validation=0, epochs=2, progress=False)
        weights.append([p.detach().clone() for p in wrapped.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


def test_rows_that_workers_mix_have_no_numbers() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter(torch.tensor(X).float())

    wrapped = linear()
    expected = top_uncertain(wrapped, torch.tensor(X).float(), 3)
    assert torch.equal(top_uncertain(wrapped, DataLoader(Stream(), 8), 3).indices, expected.indices)
    with pytest.raises(ValueError, match=r"2 workers read the Stream, .* num_workers=0"):
        top_uncertain(wrapped, DataLoader(Stream(), 8, num_workers=2), 3)


def test_frames_alone_are_inputs_and_pairs_of_frames_are_pairs() -> None:
    frame, x = FRAME[["a", "b"]], torch.tensor(X).float()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    risks = []
    for data in (frame, x.numpy(), (frame, FRAME[["y"]])):
        wrapped = neo.Wrapper()(model)
        wrapped.fit(data)
        risks.append(wrapped(x, return_risk=True)[1].detach())
    assert torch.equal(risks[0], risks[1])
    assert torch.equal(risks[0], risks[2])
    wrapped = vote.Wrapper(2)(model)
    assert torch.equal(top_uncertain(wrapped, frame, 3).indices, top_uncertain(wrapped, x, 3).indices)
    for y in (FRAME[["y"]], FRAME[["y"]].to_numpy()):
        laplace.Wrapper()(model).fit((frame, y))
    with pytest.raises(ValueError, match=r"give y\.loc\[x\.index\]"):
        laplace.Wrapper()(model).fit((frame, SHUFFLED[["y"]]))


def test_metrics_pair_rows_by_their_place_only_where_the_index_agrees() -> None:
    prediction, target = FRAME["a"], FRAME["y"]
    expected = float(np.sqrt(np.mean((prediction - target) ** 2)))
    assert float(metrics.rmse(prediction, target)) == pytest.approx(expected)
    shares = pd.DataFrame({0: (FRAME["a"] > 0) * 0.8 + 0.1, 1: (FRAME["a"] <= 0) * 0.8 + 0.1})
    labels = (FRAME["y"] > 0).astype(int)
    assert float(metrics.accuracy(shares, labels)) == pytest.approx(
        float((shares.to_numpy().argmax(1) == labels).mean())
    )
    says = r"row 0 has index 0 in \w+ and \d+ in target, .*target\.loc\[\w+\.index\]"
    for score in (
        lambda: metrics.rmse(prediction, SHUFFLED["y"]),
        lambda: metrics.nll(prediction, prediction.abs() + 1, SHUFFLED["y"]),
        lambda: metrics.brier(shares, labels.loc[SHUFFLED.index]),
    ):
        with pytest.raises(ValueError, match=says):
            score()


def test_predictions_of_arrays_and_frames_name_the_line_to_write() -> None:
    wrapped = linear()
    fit(wrapped, (FRAME[["a", "b"]], FRAME[["y"]]), epochs=1, progress=False)
    for x in (X, FRAME[["a", "b"]]):
        with pytest.raises(
            TypeError,
            match=r"the input is (ndarray|DataFrame), .*torch\.tensor\(numpy\.asarray\(x\), dtype=torch\.float32\)",
        ):
            wrapped(x)
    assert wrapped(torch.tensor(np.asarray(X), dtype=torch.float32)).shape == (N, 1)


def test_reversed_views_are_read_in_their_order() -> None:
    y, risk = np.arange(6.0)[::-1], np.arange(1.0, 7.0)[::-1]
    assert metrics.mae(y, np.zeros(6)) == 2.5
    assert metrics.crps(y, risk, y) == metrics.crps(y.copy(), risk.copy(), y.copy())
    data = [(x, x[:, :1]) for x in (X[::-1, ::-1], X[::-1, ::-1].copy())]
    model = linear().state_dict()
    losses = []
    for rows in data:
        wrapped = linear()
        wrapped.load_state_dict(model)
        losses.append(fit(wrapped, rows, epochs=1, seed=0).frame["loss"].tolist())
    assert losses[0] == losses[1]
