"""Rows from unusual loaders: right, or refused with what was found and what to write."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, Subset, TensorDataset

from workbench import fit, laplace, vote
from workbench.calibration import calibrate, top_uncertain
from workbench.data import Data
from workbench.errors import WorkbenchWarning

N = 40
X = torch.randn(N, 2, generator=torch.Generator().manual_seed(0))
LABELS = (X[:, 0] > 0).long()
QUIET: dict[str, Any] = {"epochs": 1, "progress": False}


def classifier(classes: int = 2) -> Any:
    torch.manual_seed(0)
    return vote.Wrapper(2, output="logits")(nn.Linear(2, classes))


@pytest.mark.parametrize(
    "weight",
    [{0: 1.0, 1: 5.0}, {1: 5.0, 0: 1.0}, pd.Series([5.0, 1.0], index=[1, 0]), {np.int64(0): 1, np.int64(1): 5}],
)
def test_weights_by_class_are_those_of_a_list(weight: Any) -> None:
    trained = []
    for class_weight in (weight, [1.0, 5.0]):
        fit(wrapped := classifier(), (X, LABELS), class_weight=class_weight, **QUIET)
        trained.append(torch.cat([p.detach().flatten() for p in wrapped.parameters()]))
    assert torch.equal(*trained)


@pytest.mark.parametrize("weight", [{1: 1.0, 2: 5.0}, pd.Series([1.0, 5.0], index=["a", "b"])])
def test_weights_of_other_classes_are_refused(weight: Any) -> None:
    with pytest.raises(ValueError, match=r"class_weight has the classes .*give a weight for each class by its number"):
        fit(classifier(), (X, LABELS), class_weight=weight, **QUIET)


def test_rows_of_several_lengths_ask_for_padding() -> None:
    class Ragged(Dataset):
        def __len__(self) -> int:
            return N

        def __getitem__(self, i: int) -> Any:
            return torch.zeros(3 + i % 2, 2), torch.zeros(1)

    with pytest.raises(ValueError, match=r"rows differ in shape.*\[3, 2\].*collate_fn pads them, .*pad_sequence"):
        fit(vote.Wrapper(2)(nn.Linear(2, 1)), Ragged(), **QUIET)


@pytest.mark.parametrize("dataset", [TensorDataset(X, X), Subset(TensorDataset(X, X), range(30))])
def test_single_rows_are_not_taken_for_batches(dataset: Any) -> None:
    wrapped = vote.Wrapper(2)(nn.Linear(2, 2))
    rows = DataLoader(dataset, batch_size=None)
    for ask in (
        lambda: fit(wrapped, rows, validation=0, **QUIET),
        lambda: calibrate(wrapped, rows),
        lambda: top_uncertain(wrapped, rows, 3),
        lambda: laplace.Wrapper()(nn.Linear(2, 2)).fit(rows),
    ):
        with pytest.raises(ValueError, match="batch_size=None and gives single rows; give it a batch_size"):
            ask()
    whole = DataLoader(dataset, sampler=BatchSampler(SequentialSampler(dataset), 7, False), batch_size=None)
    expected = top_uncertain(wrapped, dataset[:][0], 3)
    assert torch.equal(top_uncertain(wrapped, whole.dataset, 3).indices, expected.indices)
    fit(
        wrapped,
        DataLoader(dataset, batch_sampler=BatchSampler(SequentialSampler(dataset), 7, False)),
        validation=0,
        **QUIET,
    )


def test_a_last_batch_of_one_row_names_drop_last() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    loader = DataLoader(TensorDataset(X[:33], LABELS[:33]), 32)
    with pytest.raises(
        ValueError, match=r"only one row, from which batch norm can't compute statistics: .*drop_last=True"
    ):
        fit(vote.Wrapper(2, output="logits")(model), loader, validation=0, **QUIET)


def test_a_class_without_a_score_in_a_later_batch_is_named() -> None:
    labels = LABELS.clone()
    labels[-1] = 2
    with pytest.raises(
        ValueError,
        match="class numbers of a batch go from 0 to 2, and the model has no score for one of them, in rows of the batch 7 ",
    ):
        fit(classifier(), DataLoader(TensorDataset(X, labels), 8), validation=0, **QUIET)


class Rows(Dataset):
    """Rows that are read one by one."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.y[i]


@pytest.mark.parametrize("seed", range(4))
def test_errors_name_rows_by_their_numbers_in_the_dataset(seed: int) -> None:
    """Not in the part that `fit` draws for training or validation."""
    settings = {**QUIET, "seed": seed, "validation": 0.5, "batch_size": 4}
    labels = LABELS.repeat(3)
    labels[115] = 2  # behind the first rows, which are checked before the training
    with pytest.raises(ValueError, match="no score for one of them, in rows 115 "):
        fit(classifier(), Rows(X.repeat(3, 1), labels), **settings)
    x = X.clone()
    x[39] = torch.nan
    with pytest.raises(FloatingPointError, match="x holds NaN or infinite numbers in rows 39"):
        fit(classifier(), Rows(x, LABELS), **settings)
    with pytest.raises(FloatingPointError, match="x holds NaN or infinite numbers in rows 9"):  # of what was given
        fit(classifier(), Subset(Rows(x, LABELS), range(30, 40)), **settings)


@pytest.mark.parametrize(
    ("y", "outputs", "says"),
    [
        (F.one_hot(LABELS), 2, r"convert one-hot rows to class numbers, y\.argmax\(1\)"),
        (LABELS + 1, 2, r"0 to 1; .*torch\.unique\(y, return_inverse=True\)\[1\] numbers the classes from 0"),
        (2 * LABELS - 1, 2, r"go from -1 to 1, .*torch\.unique\(y, return_inverse=True\)"),
        (3 * LABELS, 1, r"for values rather than classes give y as float \[n, 1\]"),
    ],
)
def test_labels_of_another_form_are_refused_with_the_line_to_write(y: Any, outputs: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        fit(vote.Wrapper(2)(nn.Linear(2, outputs)), (X, y), **QUIET)
    if "argmax" in says:
        with pytest.raises(ValueError, match=says):
            calibrate(classifier(), (X, y))


def test_a_missing_gpu_is_named() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="torch sees no GPU here, found 'cuda'; device='auto'"):
        fit(classifier(), (X, LABELS), device="cuda", **QUIET)


def test_a_criterion_that_compares_all_rows_with_all_is_told() -> None:
    def squares(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((prediction - target) ** 2).mean()

    y = X.sum(1)
    wrapped = vote.Wrapper(2)(nn.Linear(2, 1))
    with pytest.warns(
        WorkbenchWarning, match=r"squares makes \[40, 40\] of a prediction \[40, 1\] and a target \[40\].*y\[:, None\]"
    ):
        silent = wrapped.loss(squares, X, y)
    voters = [voter(X) for voter in wrapped.voters()]
    # which is not what was meant
    torch.testing.assert_close(silent, torch.stack([squares(v, y) for v in voters]).mean())
    flat = vote.Wrapper(2)(nn.Sequential(nn.Linear(2, 1), nn.Flatten(0)))
    with pytest.warns(WorkbenchWarning, match=r"of a prediction \[40\] and a target \[40, 1\].*y\[:, 0\]"):
        flat.loss(squares, X, y[:, None])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vote.Wrapper(2)(nn.Linear(2, 1)).loss(squares, X, y[:, None])
        vote.Wrapper(2)(nn.Linear(2, 1)).loss(lambda p, t: ((p[:, 0] - t) ** 2).mean(), X, y)
        vote.Wrapper(2)(nn.Linear(2, 1)).loss(lambda p, t: ((p - t[:, None]) ** 2).mean(), X, y)


def test_classes_of_an_ordered_target_keep_their_order() -> None:
    grades = pd.Categorical(
        ["low", "high", "middle", "low"] * 10, categories=["low", "middle", "high", "none"], ordered=True
    )
    data = Data.from_dataframe(pd.DataFrame(X.numpy()).assign(grade=grades), "grade", test=np.arange(N) >= 30)
    assert data.classes == ("low", "middle", "high")
    assert data.train.y[:3].tolist() == [0, 2, 1]
