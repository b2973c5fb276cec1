"""Messy real-world frames: compared with what pandas computes."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from workbench import compose, fit, metrics, plots
from workbench.data import Data

N = 60
FRAME = pd.DataFrame(np.random.default_rng(0).normal(size=(N, 3)), columns=["a", "b", "y"])
SHUFFLED = FRAME.sample(frac=1, random_state=1)
DATED = FRAME.set_axis(pd.date_range("2024-01-01", periods=N))


@pytest.mark.parametrize(
    ("frame", "test"),
    [
        (SHUFFLED, FRAME["a"] > 0),  # a mask in the order of another frame
        (SHUFFLED, SHUFFLED["a"] > 0),
        (SHUFFLED, (SHUFFLED["a"] > 0).to_numpy()),
        (SHUFFLED, SHUFFLED.index[SHUFFLED["a"] > 0]),  # labels, not places
        (SHUFFLED, (SHUFFLED["a"] > 0).astype("boolean")),
        (DATED, DATED.index[DATED["a"] > 0]),
        (DATED, (DATED["a"] > 0).reset_index(drop=True)),
        (DATED, DATED["a"] > 0),
        (FRAME, np.flatnonzero(FRAME["a"] > 0)),
        (FRAME, pd.Series(np.flatnonzero(FRAME["a"] > 0))),
    ],
)
def test_the_rows_to_test_on_are_those_that_pandas_would_take(frame: pd.DataFrame, test: Any) -> None:
    data = Data.from_dataframe(frame, "y", test=test)
    expected = frame[frame["a"] > 0]
    np.testing.assert_array_equal(data.test.x.numpy(), expected[["a", "b"]].to_numpy(np.float32))
    np.testing.assert_array_equal(data.test.y[:, 0].numpy(), expected["y"].to_numpy(np.float32))


@pytest.mark.parametrize("test", [0.2, FRAME.set_axis(range(900, 900 + N))])
def test_a_number_that_is_not_finite_is_found_in_the_frame(test: Any) -> None:
    """Not by its place among the training rows, which are drawn at random, nor in both frames together."""
    frame = FRAME.copy()
    frame.loc[7, "a"] = np.inf
    with pytest.raises(ValueError, match=r"'a' holds NaN or infinite numbers in 1 of \d+ rows, first at index 7;"):
        Data.from_dataframe(frame, "y", test=test)
    if not isinstance(test, float):
        with pytest.raises(ValueError, match="first at index 907;"):
            Data.from_dataframe(FRAME, "y", test=frame.set_axis(test.index))


@pytest.mark.parametrize("test", [DATED.index[:3], pd.Series(True, index=[*range(N - 1), 999]), FRAME.index[[1, 1]]])
def test_labels_that_the_frame_lacks_are_refused(test: Any) -> None:
    frame = SHUFFLED if not isinstance(test, pd.Series) else DATED
    with pytest.raises(
        ValueError, match=r"names rows by their labels, such as .*, and the frame has .*test\.to_numpy\(\)"
    ):
        Data.from_dataframe(frame, "y", test=test)


@pytest.mark.parametrize(
    ("columns", "target"),
    [([0, 1, 2], 2), ([("x", "a"), ("x", "b"), ("t", "y")], ("t", "y")), (["a", 1, None], None)],
)
def test_columns_may_have_any_name(columns: Any, target: Any) -> None:
    named = pd.MultiIndex.from_tuples(columns) if isinstance(columns[0], tuple) else columns
    data = Data.from_dataframe(FRAME.set_axis(named, axis=1), target, test=np.arange(N) >= 50)
    assert [column.name for column in data.features] == [str(name) for name in columns[:2]]
    np.testing.assert_array_equal(data.train.x.numpy(), FRAME[["a", "b"]].to_numpy(np.float32)[:50])


def test_targets_may_be_an_index_of_columns() -> None:
    assert Data.from_dataframe(FRAME, FRAME.columns[1:]).train.y.shape[1:] == (2,)


@pytest.mark.parametrize("twice", ["a", "y"])
def test_a_name_that_stands_twice_is_refused(twice: str) -> None:
    with pytest.raises(ValueError, match=f"several columns have the same name: {twice}; frame.loc"):
        Data.from_dataframe(pd.concat([FRAME, FRAME[[twice]]], axis=1), "y")


def test_categories_of_another_type_are_not_nothing() -> None:
    frame = FRAME.assign(kind=pd.Categorical([1, 2, 3] * 20))
    data = Data.from_dataframe(frame, "y")
    texts = frame.assign(kind=frame["kind"].astype(str))
    with pytest.raises(
        ValueError, match=r"'kind' holds '1' \(str\) here, and 1 \(int\) .*frame\['kind'\]\.astype\(int\)"
    ):
        data.encoding(texts)
    mended = texts.assign(kind=texts["kind"].astype(int).astype("category"))
    assert torch.equal(data.encoding(mended), data.encoding(frame))
    assert not data.encoding(frame.assign(kind=pd.Categorical([4] * N)))[:, 2:].any()  # a new one, as documented


def test_amounts_that_came_as_texts_are_no_categories() -> None:
    texts = FRAME["b"].round(1).astype(str)
    texts[3] = "?"
    with pytest.raises(
        ValueError,
        match=r"'b' holds numbers as texts, such as .* besides '\?': pandas\.to_numeric\(frame\['b'\], errors='coerce'\)",
    ):
        Data.from_dataframe(FRAME.assign(b=texts), "y")
    mended = Data.from_dataframe(FRAME.assign(b=pd.to_numeric(texts, errors="coerce")), "y")
    assert [column.name for column in mended.features][:2] == ["a", "b"]
    assert len(Data.from_dataframe(FRAME.assign(b=texts.astype("category")), "y").features) > 20
    few = Data.from_dataframe(FRAME.assign(b=["1", "2"] * 30), "y")
    assert any("if these texts are amounts, pandas.to_numeric" in note for note in few.card.notes)


def test_amounts_that_came_as_texts_are_no_classes() -> None:
    texts = FRAME["b"].round(2).astype(str)
    for make in (
        lambda y, **k: Data.from_dataframe(FRAME.assign(y=y), "y", **k),
        lambda y, **k: Data.from_arrays(FRAME[["a"]], y, **k),
    ):
        with pytest.raises(ValueError, match=r"y.* holds numbers as texts, such as '-?\d+\.\d+': pandas\.to_numeric"):
            make(texts)
        with pytest.raises(ValueError, match=r"of 60 rows are the only one of their class; if the targets are amounts"):
            make(texts.str.replace(".", ",", regex=False))
        assert len(make([str(i) for i in range(20)] * 3, test=0.5).classes) == 20
        few = ["0.5", "1.5"] * 30
        assert make(few).classes == ("0.5", "1.5")
    coarse = [f"{i / 4}" for i in range(20)] * 3
    assert Data.from_arrays(FRAME[["a"]], coarse, test=0.5, classes=sorted(set(coarse))).n_outputs == 20


@pytest.mark.parametrize("classes", [["a", "b", "a"], {0: "a", 1: "b", 2: "a"}])
def test_classes_of_one_name_get_their_number(classes: Any) -> None:
    """Two pairs of ImageNet's classes share a name."""
    assert Data.from_arrays(FRAME[["a"]], np.array([0, 1, 2] * 20), classes=classes).classes == ("a (0)", "b", "a (2)")
    with pytest.raises(ValueError, match=r"y: 'a' is none of the classes a \(0\), b, a \(2\)"):
        Data.from_arrays(FRAME[["a"]], ["a", "b"] * 30, classes=classes)


@pytest.mark.parametrize("test", [slice(50, None), {1, 2}, ["a", "b"], [[0], [1, 2]], {"a": 1}])
def test_rows_to_test_on_that_are_no_rows_are_refused(test: Any) -> None:
    message = f"test: give a share, a mask .* found {type(test).__name__}"
    with pytest.raises(TypeError, match=message):
        Data.from_arrays(FRAME[["a"]], FRAME["y"], test=test)
    with pytest.raises(TypeError, match=f"{message}; pandas.Index"):
        Data.from_dataframe(FRAME, "y", test=test)
    with pytest.raises(TypeError, match=message):
        Data.from_dataset([(torch.zeros(2), 0.5)] * 9, test=test)


def test_a_mask_that_leaves_rows_open_is_refused() -> None:
    mask = (FRAME["a"] > 0).astype("boolean").mask(FRAME["b"] > 1)
    with pytest.raises(ValueError, match=r"test: the mask is missing in \d+ of 60 rows; .*test\.fillna\(False\)"):
        Data.from_dataframe(FRAME, "y", test=mask)


def test_a_mask_of_pandas_picks_the_rows_of_a_dataset() -> None:
    rows = [(torch.full((2,), float(i)), float(i)) for i in range(9)]
    mask = pd.Series([False, True, True] * 3)
    assert Data.from_dataset(rows, test=mask).test.load().x[:, 0].tolist() == [1, 2, 4, 5, 7, 8]
    assert Data.from_dataset(rows, test=pd.Index([1, 2])).test.load().x[:, 0].tolist() == [1, 2]


def test_days_of_pyarrow_are_dates_and_days_of_python_are_told_how_to_become_some() -> None:
    days = pd.Series(pd.date_range("2024-02-28", periods=N))
    objects = FRAME.assign(day=list(days.dt.date))
    read = FRAME.assign(day=objects["day"].astype("date32[pyarrow]"))
    read.loc[7, "day"] = None
    expected = FRAME.assign(day=days)
    expected.loc[7, "day"] = pd.NaT
    data, wanted = (Data.from_dataframe(frame, "y", test=np.arange(N) >= 50) for frame in (read, expected))
    assert list(map(str, data.features)) == list(map(str, wanted.features))
    assert "day (days since 2024-02-28)" in map(str, data.features)
    assert torch.equal(data.train.x, wanted.train.x)
    assert torch.equal(data.test.x, wanted.test.x)
    for frame in (objects, FRAME.assign(day=list(days))):
        with pytest.raises(TypeError, match=r"'day' holds date.*pandas\.to_datetime\(frame\['day'\], utc=True\)"):
            Data.from_dataframe(frame.astype({"day": object}), "y")


@pytest.mark.parametrize(
    ("values", "names"), [([7, 10], ("7", "10")), ([True, False], ("False", "True")), (["b", "a"], ("a", "b"))]
)
def test_a_target_of_categories_is_classes(values: Any, names: tuple[str, ...]) -> None:
    frame = FRAME.assign(y=pd.Categorical(values * 30))
    data = Data.from_dataframe(frame, "y", test=np.arange(N) >= 50)
    assert data.classes == names
    assert [names[i] for i in data.train.y] == [str(value) for value in frame["y"][:50]]


@pytest.mark.parametrize("values", [[0.0, 1.0], [-1.0, 1.0]])
def test_yes_and_no_as_floats_are_asked_about(values: list[float]) -> None:
    frame = FRAME.assign(y=values * 30)
    with pytest.raises(ValueError, match=r"'y' holds -?\d and 1 alone: are they classes, frame\['y'\]\.astype\(int\)"):
        Data.from_dataframe(frame, "y")
    assert Data.from_dataframe(frame, "y", task="regression").task == "regression"
    assert Data.from_dataframe(frame.assign(y=(frame["y"] > 0).astype(int)), "y", task="classification").n_outputs == 2


def test_a_class_of_one_row_is_trained_on() -> None:
    kinds = ["a"] * 30 + ["b"] * 29 + ["c"]
    for data in (Data.from_dataframe(FRAME.assign(y=kinds), "y"), Data.from_arrays(FRAME[["a", "b"]], kinds)):
        assert torch.bincount(data.train.y, minlength=3).tolist() == [24, 23, 1]
        assert torch.bincount(data.test.y, minlength=3).tolist() == [6, 6, 0]


def test_what_a_target_may_be_besides_is_said() -> None:
    gaps = Data.from_arrays(FRAME[["a"]], np.array([1, 3] * 30))
    assert "no training row is of class 0, 2" in gaps.card.notes
    floats = Data.from_arrays(FRAME[["a"]], np.array([1.0, 3.0] * 30))
    assert any(note.startswith("the target is 1, 3, taken for values; for classes") for note in floats.card.notes)
    assert not any("taken for values" in note for note in Data.from_dataframe(FRAME, "y").card.notes)


def test_plots_of_rows_pair_them_as_trainings_do() -> None:
    from workbench import vote

    model = vote.Wrapper(2)(torch.nn.Linear(2, 1))
    with pytest.raises(ValueError, match=r"row 0 has index .*give y\.loc\[x\.index\]"):
        plots.matrix({"vote": model}, (SHUFFLED[["a", "b"]], FRAME[["y"]]))
    plots.matrix({"vote": model}, (SHUFFLED[["a", "b"]], SHUFFLED[["y"]]))


def test_a_plain_frame_gives_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Data.from_dataframe(FRAME, "y", test=(FRAME["a"] > 0).to_numpy())


def test_ordered_categories_keep_their_order() -> None:
    sizes = pd.Series(pd.Categorical(["M", "S", "XL", "L"] * 15, categories=["S", "M", "L", "XL", "XXL"], ordered=True))
    expected = sizes.map({"S": 0, "M": 1, "L": 2, "XL": 3}).to_numpy()
    frame = FRAME.assign(size=sizes)
    for categories in (sizes, sizes.array):
        data = Data.from_arrays(FRAME[["a"]], categories, test=np.arange(N) % 2 == 0)
        assert data.classes == ("S", "M", "L", "XL")
        np.testing.assert_array_equal(data.train.y.numpy(), expected[1::2])
    data = Data.from_dataframe(frame, "y", test=np.arange(N) % 2 == 0)
    assert [column.name for column in data.features[2:]] == ["size = S", "size = L"]  # those of the training rows
    np.testing.assert_array_equal(data.train.x[:, 2:].argmax(1).numpy(), expected[1::2] // 2)
    unordered = Data.from_arrays(FRAME[["a"]], sizes.astype("object"))
    assert unordered.classes == ("L", "M", "S", "XL")


def test_columns_in_another_order_are_refused() -> None:
    """Rows are matched by their index, and columns by their place: each would be taken for another one."""
    x, y, both = FRAME[["a", "b"]], FRAME[["y"]], FRAME[["a", "b"]] * 2
    says = r"{}: its columns are b, a, but must be a, b; give them in that order: {}\[\['a', 'b'\]\]"
    with pytest.raises(ValueError, match="test: " + says.format("x", "x")):
        Data.from_arrays(x, y, test=(x[["b", "a"]], y))
    with pytest.raises(ValueError, match="test: " + says.format(r"x\['main'\]", r"x\['main'\]")):
        Data.from_arrays({"main": x}, y, test=({"main": x[["b", "a"]]}, y))
    wrapped = compose()(nn.Linear(2, 2))
    before = wrapped.weight.clone()
    with pytest.raises(ValueError, match="validation: " + says.format("x", "x")):
        fit(wrapped, (x, both), validation=(x[["b", "a"]], both), epochs=1, progress=False)
    with pytest.raises(ValueError, match="validation: " + says.format("y", "y")):
        fit(wrapped, (x, both), validation=(x, both[["b", "a"]]), epochs=1, progress=False)
    assert torch.equal(wrapped.weight, before)
    with pytest.raises(ValueError, match="metric: " + says.format("target", "target")):
        metrics.rmse(both, both[["b", "a"]])
    with pytest.raises(ValueError, match="plot: " + says.format("target", "target")):
        plots.predicted_against_true(both, both[["b", "a"]])
    assert metrics.rmse(both, both.set_axis(["c", "d"], axis=1)) == 0
    assert Data.from_arrays(x, y, test=(x[:5].to_numpy(), y[:5])).test.x.shape == (5, 2)


@pytest.mark.parametrize("row", [FRAME.iloc[0], {"a": 1.0, "b": 2.0}, torch.zeros(1, 2), FRAME[["a", "b"]].to_numpy()])
def test_one_row_is_a_frame_of_one_row(row: Any) -> None:
    encoding = Data.from_dataframe(FRAME, "y").encoding
    with pytest.raises(
        TypeError, match=rf"frame: found {type(row).__name__}.*frame\.iloc\[\[0\]\].*DataFrame\(\[row\]\)"
    ):
        encoding(row)
    assert encoding(FRAME.iloc[[0]]).shape == (1, 2)
