"""Targets and inputs of every kind: what Data makes of them, and refusals."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from workbench import fit, neo, vote
from workbench.data import Data, LazySplit, Split
from workbench.data.reader import data_of
from workbench.outputs import Logits

X = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randint(0, 255, (30, 3, 6, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
MAPS = torch.randint(0, 3, (30, 6, 5), generator=torch.Generator().manual_seed(2))
LABELS = torch.arange(50) % 3


def whole(data: Data) -> tuple[Tensor, Tensor]:
    """All rows, sorted by their first input, so that they can be compared with those given."""
    x, y = (torch.cat([getattr(data.train, axis), getattr(data.test, axis)]) for axis in "xy")
    order = x.flatten(1)[:, 0].argsort()
    return x[order], y[order]


# ---- from_arrays
@pytest.mark.parametrize(
    ("y", "options", "task", "stored"),
    [
        (X[:, 0], {}, "regression", X[:, :1]),
        (X[:, :3].double().numpy(), {}, "regression", X[:, :3]),
        (LABELS.numpy().astype(np.uint8), {}, "classification", LABELS),
        (LABELS[:, None], {}, "classification", LABELS),
        (X > 0, {}, "labels", (X > 0).long()),
        ((X > 0).float(), {"task": "labels"}, "labels", (X > 0).long()),
        (LABELS, {"task": "counts"}, "counts", LABELS[:, None].float()),
        (LABELS, {"task": "regression"}, "regression", LABELS[:, None].float()),
        (X.softmax(1), {"task": "probabilities"}, "probabilities", X.softmax(1)),
        (LABELS[:, None].expand(50, 4), {"task": "classification"}, "classification", LABELS[:, None].expand(50, 4)),
        (X[:, None].expand(50, 3, 4), {}, "regression", X[:, None].expand(50, 3, 4)),
    ],
)
def test_targets_of_every_kind_are_kept(y: Any, options: dict[str, Any], task: str, stored: Tensor) -> None:
    data = Data.from_arrays(X, y, **options)
    x, targets = whole(data)
    order = X[:, 0].argsort()
    assert data.task == task
    assert (len(data.train), len(data.test)) == (40, 10)
    torch.testing.assert_close(x, X[order])
    torch.testing.assert_close(targets, stored[order])


def test_what_has_no_class_is_minus_100() -> None:
    maps = MAPS.masked_fill(MAPS == 1, 255)
    data = Data.from_arrays(IMAGES, maps, void=255, classes={0: "sky", 2: "road"}, test=[0, 1])
    expected = torch.full_like(maps, -100)
    expected[maps == 0], expected[maps == 2] = 0, 1
    assert torch.equal(data.train.y, expected[2:])
    assert torch.equal(data.test.y, expected[:2])
    assert data.train.x.dtype == torch.uint8
    assert data.classes == ("sky", "road")
    assert f"none ({int((expected[2:] == -100).sum())})" in repr(data).replace("\n            ", " ")
    assert data._repr_html_()


def test_tokens_beyond_their_length_are_left_out() -> None:
    tokens, lengths = torch.randint(1, 9, (50, 7)), 1 + torch.arange(50) % 7
    inputs = {"ids": tokens, "mask": torch.arange(7) < lengths[:, None]}
    data = Data.from_arrays(inputs, tokens % 4, lengths=lengths, test=torch.arange(50) >= 40)
    for row, length in enumerate(lengths[:40].tolist()):
        assert data.train.y[row].tolist() == [*(tokens[row, :length] % 4).tolist(), *[-100] * (7 - length)]
    assert torch.equal(data.test.x["ids"], tokens[40:])
    assert data.train.x["mask"].dtype == torch.bool
    assert len(data.repeats()) == 10
    assert data.checksum == pickle.loads(pickle.dumps(data)).checksum
    assert len(data.validation(0.25)[1].x["ids"]) == 10


def test_names_are_classes_and_other_rows_have_their_numbers() -> None:
    names = np.array(["dog", "cat"] * 25)
    data = Data.from_arrays(X, names, test=(X[:3], ["dog", "dog", "cat"]))
    assert data.classes == ("cat", "dog")
    assert data.test.y.tolist() == [1, 1, 0]
    assert data.train.y[:2].tolist() == [1, 0]
    with pytest.raises(ValueError, match="'cow' is none of the classes cat, dog"):
        Data.from_arrays(X, names, test=(X[:1], ["cow"]))
    assert Data.from_arrays(X, LABELS, test=(X[:1], [7])).n_outputs == 8


@pytest.mark.parametrize("missing", [None, math.nan, pandas.NA])
def test_missing_names_are_no_class(missing: Any) -> None:
    """numpy makes a text "nan" of a NaN among texts."""
    names = ["dog", missing, "cat", "dog", "cat"] * 10
    says = "y holds None or NaN instead of a name in 10 of 50 rows, first in row 1; drop these rows or give them a name"
    for y in (names, tuple(names), np.array(names, dtype=object), pandas.Series(names), pandas.Categorical(names)):
        with pytest.raises(ValueError, match=says):
            Data.from_arrays(X, y)
    with pytest.raises(ValueError, match=says.replace("y holds", r"y\['kind'\] holds")):
        Data.from_arrays(X, {"kind": names, "size": X})
    assert Data.from_arrays(X, [name or "none" for name in ["dog", None] * 25]).classes == ("dog", "none")


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("names", [["0", "10", "2"], ["3", "7", "9"], ["a", "b", "c"]])
def test_names_have_the_same_numbers_in_test_rows_without_some_of_them(names: list[str], several: bool) -> None:
    """Also names that look like numbers: postcodes, digits read from a file."""
    y, y_test = [names[i % 3] for i in range(len(X))], [names[2], names[1]]
    targets = ({"kind": y, "size": X[:, 0]}, {"kind": y_test, "size": X[:2, 0]}) if several else (y, y_test)
    data = Data.from_arrays(X, targets[0], test=(X[:2], targets[1]))
    train, test = (part.y["kind"] if several else part.y for part in (data.train, data.test))
    assert train[:3].tolist() == [0, 1, 2]
    assert test.tolist() == [2, 1]


def test_numbers_of_classes_are_replaced_in_test_rows_as_well() -> None:
    y = [0 if i % 3 else 255 for i in range(len(X))]
    data = Data.from_arrays(X, y, classes={0: "background", 255: "object"}, test=(X[:2], [255, 0]))
    assert data.train.y[:3].tolist() == [1, 0, 0]
    assert data.test.y.tolist() == [1, 0]


def test_targets_of_several_kinds_have_tasks_of_their_own() -> None:
    data = Data.from_arrays(
        X, {"kind": LABELS, "size": X[:, :2], "tags": X > 0}, classes={"kind": ["a", "b", "c"]}, test=range(5)
    )
    assert data.task == {"kind": "classification", "size": "regression", "tags": "labels"}
    assert data.classes == {"kind": ("a", "b", "c"), "tags": ("0", "1", "2", "3")}
    assert torch.equal(data.train.y["size"], X[5:, :2])
    assert "kind: a, b, c" in repr(data)


NAN = X.masked_fill(torch.arange(50)[:, None] == 7, math.nan)


@pytest.mark.parametrize(
    ("x", "y", "options", "says"),
    [
        (X, LABELS[:49], {}, "x has 50 rows and y has 49"),
        (NAN, LABELS, {}, "x holds NaN or infinite numbers in 1 of 50 rows, first in row 7"),
        (X, NAN, {}, "y holds NaN or infinite numbers in 1 of 50 rows, first in row 7"),
        (X.double() * 1e300, LABELS, {}, "x in float32 holds NaN or infinite"),
        ({"a": X, "b": X[1:]}, LABELS, {}, r"differ in their number of rows; found \{a: float32 \[50, 4\]"),
        (X, (X > 0).long(), {}, r"task='classification', or lengths=\[n\].*task='labels'.*task='counts'"),
        (X, LABELS, {"task": "clasification"}, "task must be one of 'regression'"),
        (X, X, {"task": "classification"}, "classification needs whole numbers; found float32"),
        (X, X, {"void": 255}, "values can't be ignored"),
        (X, X, {"classes": 3}, "regression has no classes"),
        (X, -LABELS, {"task": "counts"}, "counts are 0, 1, 2, ...; found -2 to 0"),
        (X, LABELS, {"classes": 2}, "between 0 and 1, as there are 2 classes; found 0 to 2"),
        (X, LABELS, {"task": "labels"}, r"at least two of them; found int64 \[50\]"),
        (X, LABELS[:, None].expand(50, 3), {"task": "labels"}, "labels are 0 or 1"),
        (X, X, {"task": "probabilities"}, "sum to one in each row"),
        (X, LABELS, {"classes": {0: "a", 1: "b"}}, "2 is neither void nor a key of classes"),
        (X, LABELS, {"lengths": [1] * 50}, r"lengths: found int64 \[50\] for y int64 \[50\]"),
        (X, LABELS, {"test": 1.0}, "must lie above 0 and below 1; found 1.0"),
        (X, LABELS, {"test": [50]}, "row numbers go from 0 to 49; found 50 to 50"),
        (None, LABELS, {}, "x is None; its first dimension must be the rows"),
        (X, None, {}, "y is None; its first dimension must be the rows"),
        (X, LABELS, {"test": [1, 0, 1, 3]}, "4 row numbers name only 3 rows, each must be given once$"),
        (X, LABELS, {"test": [0, 1] * 25}, "50 row numbers name only 2 rows, .*; a mask is of bool, test == 1"),
        (X, LABELS, {"features": ["one"]}, f"features: 1 names for {X.shape[1]} columns of x"),
        (X, LABELS, {"features": ["a"] * X.shape[1]}, "features: several columns have the same name: a"),
        (X, LABELS, {"test": range(50)}, "50 of 50 rows leave 0"),
        (X, LABELS, {"test": torch.ones(49, dtype=torch.bool)}, r"a mask must be bool \[50\]"),
        (IMAGES, MAPS.masked_fill(MAPS == 1, 255), {}, r"does 255 mean no class \(void=255\)"),
    ],
)
def test_what_does_not_fit_is_refused(x: Any, y: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Data.from_arrays(x, y, **options)


@pytest.mark.parametrize(
    ("x", "y", "says"),
    [
        ([[1, 2], [3]], [0, 1], "x is a list of 2 and can't be made a tensor.*pad_sequence"),
        (np.array([object()] * 50), LABELS, "x is ndarray .* it holds object"),
    ],
)
def test_what_is_no_number_is_refused(x: Any, y: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        Data.from_arrays(x, y)


# ---- training
class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kind, self.size = nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"kind": self.kind(x), "size": self.size(x)}


def weights(model: nn.Module, data: Any, output: Any) -> list[Tensor]:
    wrapped = vote.Wrapper(2, output=output)(copy.deepcopy(model))
    fit(wrapped, data, epochs=2, batch_size=8, validation=0, standardize=False, progress=False)
    return list(wrapped.parameters())


def test_maps_and_several_targets_are_trained_on_as_tensors_are() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net, heads = nn.Conv2d(3, 3, 1), Heads()
    maps = Data.from_arrays(IMAGES / 255, MAPS.masked_fill(MAPS == 1, 255), void=255, classes=3, test=range(6))
    plain = (IMAGES / 255)[6:], MAPS.masked_fill(MAPS == 1, -100)[6:]
    for one, other in zip(weights(net, maps, Logits(dim=1)), weights(net, plain, Logits(dim=1)), strict=True):
        assert torch.equal(one, other)
    y = {"kind": LABELS, "size": X[:, :2]}
    several, output = Data.from_arrays(X, y, test=range(10)), {"kind": "logits", "size": "values"}
    rows = X[10:], {name: target[10:] for name, target in y.items()}
    for one, other in zip(weights(heads, several, output), weights(heads, rows, output), strict=True):
        assert torch.equal(one, other)


# ---- rows that are read when they are asked for
class Rows(Dataset):
    def __init__(self, x: Any = X, y: Any = LABELS) -> None:
        self.x, self.y = x, y
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        self.asked.append(i)
        return self.x[i], self.y[i]


def test_rows_of_a_dataset_are_read_when_they_are_asked_for() -> None:
    rows = Rows()
    data = Data.from_dataset(rows, classes=["a", "b", "c"], test=range(10))
    assert set(rows.asked) <= {0, 10}  # the first of each part
    assert isinstance(data.train, LazySplit)
    assert (data.input_shape, data.n_outputs, data.task) == ((4,), 3, "classification")
    rows.asked.clear()
    train, held = data.validation(0.25)
    assert (len(train), len(held), rows.asked) == (30, 10, [])
    assert torch.equal(data.train[3][0], X[13])
    assert torch.equal(data.test.load().x, X[:10])
    assert torch.equal(next(iter(data.train.loader(5)))[1], LABELS[10:15])
    assert torch.equal(data.train.take(torch.arange(40) < 2).y, LABELS[10:12])
    assert "read when asked for" in repr(data)
    assert pickle.loads(pickle.dumps(data)).checksum == data.checksum


def test_labels_of_a_dataset_have_the_names_that_it_says() -> None:
    class Pictures(list[Any]):
        classes = ("red", "green", "blue")

    rows = Pictures((torch.rand(4), torch.tensor([True, i % 2 == 0, False])) for i in range(20))
    data = Data.from_dataset(rows)
    assert (data.task, data.classes, data.train.load().y.shape) == ("labels", ("red", "green", "blue"), (16, 3))
    assert "labels: red, green, blue" in repr(data)
    rows.classes = ("red", "green")  # names of something else
    assert Data.from_dataset(rows).classes == ("0", "1", "2")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_training_on_read_rows_is_that_on_tensors(workers: int) -> None:
    # a forked process draws no numbers of this one
    state = torch.get_rng_state()
    data = Data.from_dataset(Rows(), workers=workers, test=range(10))
    assert data.classes == ("0", "1", "2")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Linear(4, 3)
    for one, other in zip(weights(net, data, "logits"), weights(net, (X[10:], LABELS[10:]), "logits"), strict=True):
        torch.testing.assert_close(one, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_methods_are_fitted_to_read_rows() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    data = Data.from_dataset(Rows(), test=range(10))
    risks = [
        neo.Wrapper()(copy.deepcopy(net)).eval().fit(rows)(X[:5], return_risk=True)[1]
        for rows in (data, data.train, (X[10:], LABELS[10:]))
    ]
    torch.testing.assert_close(risks[0], risks[2])
    torch.testing.assert_close(risks[1], risks[2])


def test_a_comparison_reads_rows_or_says_what_goes_instead() -> None:
    data = Data.from_dataset(Rows(), test=range(10))
    compared = data_of(data)
    assert torch.equal(compared.train.x, X[10:])
    assert torch.equal(compared.test.y, LABELS[:10])
    assert data_of(Data.from_arrays(IMAGES, torch.arange(30) % 3)).train.x.dtype == torch.float32
    assert data_of(Data.from_arrays(X, LABELS, task="counts")).task == "regression"
    for refused, reason in (
        (Data.from_arrays(IMAGES, MAPS), r"targets int64 \[n, 6, 5\]"),
        (Data.from_arrays(X, X[:, :2]), r"targets float32 \[n, 2\]"),
        (Data.from_arrays(X, X > 0), "4 labels a row"),
        (Data.from_arrays(X, {"a": LABELS, "b": X}), "the targets a, b"),
        (Data.from_arrays({"a": X, "b": X}, LABELS), "the inputs a, b"),
    ):
        with pytest.raises(ValueError, match=rf"has {reason}; this takes one"):
            data_of(refused)


@pytest.mark.parametrize(
    ("rows", "error", "says"),
    [
        (Rows([X[0], X[1, :3]], [0, 1]), ValueError, r"row 1: x is float32 \[3\].*the first row has float32 \[4\]"),
        (Rows(NAN, LABELS), ValueError, "row 7: x holds NaN"),
        (Rows(X, ["a"] * 50), TypeError, "row 0: y is the text 'a'"),
        (Rows(X, [(X[0], X[1])] * 50), TypeError, "a tuple of 2; give a dict"),
    ],
)
def test_rows_that_do_not_fit_are_named(rows: Dataset, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        Data.from_dataset(rows, test=[0]).train.load()


def test_what_is_no_dataset_of_pairs_is_refused() -> None:
    with pytest.raises(TypeError, match="no numbered rows"):
        Data.from_dataset(iter([(X[0], 1)]))
    with pytest.raises(TypeError, match=r"a dict with 'image', 'mask' for row 0.*from_huggingface"):
        Data.from_dataset([{"image": X[0], "mask": X[1]}] * 9)
    with pytest.raises(ValueError, match="has no row"):
        Data.from_dataset([])
    assert isinstance(Data.from_dataset(TensorDataset(X, LABELS)).train, Split)
    assert isinstance(DataLoader(Data.from_dataset(Rows()).train).dataset, LazySplit)


# ---- a dataset of dicts
class Table:
    """What a dataset of the package datasets looks like."""

    column_names = ("ids", "mask", "label")

    def __init__(self, n: int = 30) -> None:
        self.n = n
        self.features = {"label": type("ClassLabel", (), {"names": ["no", "yes"]})()}

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"ids": [i, i + 1], "mask": [1, 1], "label": i % 2}


def test_columns_of_a_hugging_face_dataset_are_inputs_and_targets() -> None:
    data = Data.from_huggingface(Table(), x=["ids", "mask"], test=range(4))
    assert data.classes == ("no", "yes")
    assert data.train.x["ids"].tolist() == [[i, i + 1] for i in range(4, 30)]
    assert data.train.y.tolist() == [i % 2 for i in range(4, 30)]
    both = Data.from_huggingface({"train": Table(), "validation": Table(5), "extra": Table(2)}, x="ids")
    assert (len(both.train), len(both.test)) == (30, 5)
    assert any("extra is left out" in note for note in both.card.notes)
    with pytest.raises(ValueError, match="x: found None; give one of the columns ids, mask, label"):
        Data.from_huggingface(Table())
    with pytest.raises(TypeError, match=r"has no column_names; .*Data\.from_dataset"):
        Data.from_huggingface(Rows())


def test_a_split_of_dicts_trains_a_model_of_keywords() -> None:
    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.head(a + b)

    data = Data.from_arrays({"a": X, "b": X}, LABELS)
    wrapped = vote.Wrapper(2, output="logits")(Keywords())
    assert math.isfinite(fit(wrapped, data, epochs=1, progress=False).frame["loss"].iloc[-1])
    pairs = data.train.dataset()
    assert torch.equal(pairs[2][0]["a"], data.train.x["a"][2])
    with pytest.raises(ValueError, match="x of your data is a dict of a, b"):
        _ = data.input_shape
    with pytest.raises(ValueError, match="differ in shape"):
        replace(data, test=Split({"a": X[:, :2], "b": X}, LABELS))


YES = torch.arange(50) % 3 == 0


@pytest.mark.parametrize(
    "y", [YES, YES.numpy(), YES.tolist(), pandas.Series(YES.numpy()), pandas.Series(YES.numpy(), dtype="boolean")]
)
def test_true_and_false_keep_their_names(y: Any) -> None:
    data = Data.from_arrays(X, y)
    assert data.classes == data_of((X, y)).classes == ("False", "True")
    assert sorted(torch.cat([data.train.y, data.test.y]).tolist()) == sorted(YES.long().tolist())
    assert Data.from_arrays(X, y, classes=["no", "yes"]).classes == ("no", "yes")


class WithTargets(Dataset):
    """A Dataset whose rows have the targets of a list, or a dict of them."""

    def __init__(self, y: Any) -> None:
        self.y = y

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> tuple[Tensor, Any]:
        return X[i], {name: y[i] for name, y in self.y.items()} if isinstance(self.y, dict) else self.y[i]


@pytest.mark.parametrize("y", [YES, YES.numpy(), YES.tolist(), torch.zeros(50, dtype=torch.bool)])
def test_true_and_false_of_a_dataset_keep_their_names(y: Any) -> None:
    data = Data.from_dataset(WithTargets(y), test=WithTargets(y))
    assert data.classes == ("False", "True")
    assert data.train.load().y.tolist() == data.test.load().y.tolist() == [int(value) for value in y]
    assert Data.from_dataset(WithTargets(y), classes=["no", "yes"]).classes == ("no", "yes")
    for rows in (WithTargets(y), DataLoader(WithTargets(y), 10), TensorDataset(X, torch.as_tensor(y))):
        assert data_of(rows).classes == ("False", "True")
    both: Any = Data.from_dataset(WithTargets({"yes": y, "number": LABELS})).classes
    assert both == {"yes": ("False", "True"), "number": ("0", "1", "2")}
    assert Data.from_dataset(WithTargets(LABELS % 2)).classes == ("0", "1")
    assert Data.from_dataset(WithTargets([True, *LABELS.tolist()[1:]])).classes == ("0", "1", "2")


@pytest.mark.parametrize("dtype", ["bool", "boolean", "object"])
def test_a_column_of_true_and_false_is_classes_by_these_names(dtype: str) -> None:
    frame = pandas.DataFrame({"a": X[:, 0], "passed": pandas.Series(YES.numpy()).astype(dtype)})
    data = Data.from_dataframe(frame, target="passed")
    assert data.classes == ("False", "True")
    assert float(torch.cat([data.train.y, data.test.y]).float().mean()) == float(YES.float().mean())


def test_too_few_rows_are_counted() -> None:
    with pytest.raises(ValueError, match="found 1 row; at least 2 are needed"):
        Data.from_arrays(X[:1], YES[:1])


def test_sparse_tensors_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"x is a tensor \[50, 4\] of torch.sparse_.*; give x.to_dense\(\)"):
        Data.from_arrays(X.to_sparse(), LABELS)
    with pytest.raises(TypeError, match=r"x\['b'\] is a tensor .*give x\['b'\].to_dense\(\)"):
        Data.from_arrays({"a": X, "b": X.to_sparse()}, LABELS)
    with pytest.raises(TypeError, match=r"y is a tensor .*give y.to_dense\(\)"):
        Data.from_arrays(X, X.to_sparse())
