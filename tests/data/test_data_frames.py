"""Frames as Data: compared with what pandas computes."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from workbench.data import Data
from workbench.data.frames import FrameEncoding
from workbench.errors import WorkbenchWarning

N = 40
FRAME = pd.DataFrame(
    {
        "size": [1.0, None, 3.0, 5.0] * 10,
        "city": ["rome", "oslo", None, "bonn"] * 10,
        "when": pd.date_range("2020-01-01", periods=N, freq="36h"),
        "open": [True, False] * 20,
        "grade": pd.Categorical([1, 2, 2, 3] * 10),
        "price": np.linspace(0, 1, N),
        "kind": ["a", "b"] * 20,
        "count": np.arange(N) % 7,
    }
)
LAST = np.arange(N) >= 30


def test_columns_are_those_of_pandas() -> None:
    data = Data.from_dataframe(FRAME.drop(columns=["kind", "count"]), "price", test=LAST)
    train = FRAME[:30]
    expected = pd.DataFrame(
        {
            "size": train["size"].fillna(train["size"].median()),
            "size is missing": train["size"].isna(),
            **{f"city = {city}": train["city"] == city for city in ("bonn", "oslo", "rome")},
            "city is missing": train["city"].isna(),
            "when": (train["when"] - train["when"].min()).dt.total_seconds() / 86400,
            "open": train["open"],
            **{f"grade = {grade}": train["grade"] == grade for grade in (1, 2, 3)},
        }
    ).astype("float32")
    assert [column.name for column in data.features] == list(expected)
    assert str(data.features[6]) == "when (days since 2020-01-01)"
    assert torch.equal(data.train.x, torch.from_numpy(expected.to_numpy()))
    torch.testing.assert_close(data.test.y[:, 0], torch.from_numpy(FRAME["price"].to_numpy(np.float32)[30:]))
    assert torch.equal(data.encoding(FRAME[30:]), data.test.x)
    said = " ".join(data.card.notes)
    assert "size: missing in 8 training and 2 test rows; filled with the median 3, and a column says where" in said
    assert "city: missing in 7 training and 3 test rows; a column says where" in said
    assert "when: dates, as days since 2020-01-01" in said


def test_medians_and_categories_are_those_of_the_training_rows() -> None:
    train, test = FRAME[:20], FRAME[20:].assign(city="kiev", size=None)
    data = Data.from_dataframe(train[["size", "city", "price"]], "price", test=test[["size", "city", "price"]])
    cities = [column.name.startswith("city") for column in data.features]
    assert data.test.x[:, cities].sum() == 0
    assert data.test.x[:, 0].unique().tolist() == [train["size"].median()]
    assert any("20 test rows have a category of no training row" in note for note in data.card.notes)


@pytest.mark.parametrize(
    ("target", "options", "task", "shape"),
    [
        ("price", {}, "regression", (40, 1)),
        ("kind", {}, "classification", (40,)),
        ("open", {}, "classification", (40,)),
        ("count", {"task": "counts"}, "counts", (40, 1)),
        ("count", {"task": "classification"}, "classification", (40,)),
        ("grade", {"task": "classification"}, "classification", (40,)),
        (["price", "when_"], {}, "regression", (40, 2)),
        (["price", "kind"], {}, {"price": "regression", "kind": "classification"}, None),
    ],
)
def test_targets_are_what_their_columns_hold(target: Any, options: Any, task: Any, shape: Any) -> None:
    frame = FRAME.assign(when_=FRAME["price"] * 2, grade=FRAME["grade"].astype(int))
    data = Data.from_dataframe(frame, target, **options)
    assert data.task == task
    names = [target] if isinstance(target, str) else target
    assert all(not column.name.startswith(tuple(names)) or column.name == "when" for column in data.features)
    if shape is not None:
        assert (len(data.train) + len(data.test), *data.train.y.shape[1:]) == shape
    else:
        assert data.classes == {"kind": ("a", "b")}


@pytest.mark.parametrize(
    ("frame", "target", "error", "says"),
    [
        (FRAME, "prize", ValueError, "there is no column 'prize'; there are size, city"),
        (FRAME, "count", ValueError, r"'count' holds whole numbers from 0 to 6: are they classes \(task='classification'\)"),
        (FRAME, "size", ValueError, r"'size' is missing in 10 of 40 rows; frame\.dropna\(subset=\['size'\]\)"),
        (FRAME.assign(id=[f"{i}" for i in range(N)] * 1).loc[[*range(N)] * 4].assign(id=lambda f: [f"n{i}" for i in range(4 * N)]), "price",
         ValueError, r"'id' has 128 different texts .*astype\('category'\), or dates, pandas.to_datetime"),
        (FRAME.assign(file=[f"{i}.png" for i in range(N)]), "price",
         ValueError, r"'file' has a different text in each of the 32 training rows, such as '.*png', .* Data.from_dataset"),
        (FRAME.assign(span=FRAME["when"] - FRAME["when"].min()), "price", TypeError, "'span' holds time spans"),
        (FRAME.assign(mixed=["a", 1] * 20), "price", TypeError, "'mixed' holds mixed"),
        (FRAME.assign(size=np.inf), "price", ValueError, "'size' holds NaN or infinite"),
        (FRAME.assign(size=np.nan), "price", ValueError, "'size' has no value in the training rows"),
        (FRAME[["price"]], "price", ValueError, "no column besides the target"),
        (FRAME.to_dict(), "price", TypeError, r"found dict of builtins, not of pandas; give a pandas\.DataFrame"),
        (pa.table({"price": [1.0]}), "price", TypeError, r"found Table of pyarrow, not of pandas; frame\.to_pandas\(\)"),
    ],
)  # fmt: skip
def test_what_cannot_be_made_numbers_is_refused(frame: Any, target: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        Data.from_dataframe(frame, target)


def test_new_rows_must_have_the_columns_of_the_training_rows() -> None:
    data = Data.from_dataframe(FRAME.drop(columns=["kind", "count"]), "price")
    with pytest.raises(ValueError, match="the columns size, open are missing"):
        data.encoding(FRAME.drop(columns=["size", "open"]))
    with pytest.raises(ValueError, match="'size' is a category here, and a number in the training rows"):
        data.encoding(FRAME.assign(size="large"))


def test_nullable_and_pandas_string_columns_are_read() -> None:
    frame = pd.DataFrame(
        {
            "n": pd.array([1, None, 3, 4] * 5, dtype="Int64"),
            "s": pd.array(["x", "y", None, "x"] * 5, dtype="string"),
            "b": pd.array([True, None, False, True] * 5, dtype="boolean"),
            "t": pd.to_datetime(["2021-03-01", None, "2021-03-03", "2021-03-05"] * 5, utc=True),
            "y": [0.5, 1.0, 1.5, 2.0] * 5,
        }
    )
    data = Data.from_dataframe(frame, "y", test=[18, 19])
    row = dict(zip([column.name for column in data.features], data.train.x[1].tolist(), strict=True))
    assert row == {
        "n": 3, "n is missing": 1, "s = x": 0, "s = y": 1, "s is missing": 0,
        "b": 1, "b is missing": 1, "t": 2, "t is missing": 1,
    }  # fmt: skip


def test_gaps_that_no_column_marks_are_told() -> None:
    encoding = FrameEncoding.of(FRAME)
    with pytest.warns(WorkbenchWarning, match=r"values of 'when', 'count' are missing here and in no training row"):
        x = encoding(FRAME[:2].assign(count=[np.nan, 1], when=pd.NaT, size=np.nan, kind=None))
    columns = [column.name for column in encoding.columns]
    assert x[0, columns.index("count")] == FRAME["count"].median()
    encoding(FRAME[:2].assign(size=np.nan))  # a column says where


def test_many_categories_take_up_the_memory_of_their_columns_once() -> None:
    """2,000 rows with 500 categories: 4 MB in float32."""
    frame = pd.DataFrame({"c": pd.Categorical([str(i % 500) for i in range(2000)])})
    encoding = FrameEncoding.of(frame)
    tracemalloc.start()
    try:
        x = encoding(frame)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert x.sum(1).tolist() == [1.0] * 2000
    assert [encoding.columns[i].name for i in x[:3].argmax(1)] == ["c = 0", "c = 1", "c = 2"]
    assert most < 8e6


def test_more_columns_than_the_memory_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = pd.DataFrame({"shop": pd.Categorical([str(i) for i in range(200)]), "size": np.arange(200.0), "t": 1.0})
    monkeypatch.setattr("workbench.data.frames._memory", lambda: 1e5)
    with pytest.raises(
        ValueError, match=r"160 rows with 161 columns .* 'shop' alone makes 160 columns, one for each category"
    ):
        Data.from_dataframe(frame, target="t", task="regression")
    assert Data.from_dataframe(frame.drop(columns="shop"), target="t", task="regression").train.x.shape == (160, 1)
