"""Data and Split: validation, splitting and display."""

from __future__ import annotations

import hashlib
import pickle
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
import torch

from workbench.data import Card, Column, Data, Split
from workbench.data.data_set import digest

CARD = Card("a <small> table", "made up", "none & free", "nobody, 2024", ("beware",))


def labelled(labels: list[int], classes: tuple[str, ...]) -> Data:
    y = torch.tensor(labels)
    part = Split(torch.arange(len(labels) * 2.0).reshape(-1, 2), y)
    return Data("made", "classification", part, part, (Column("a", "m"), Column("b")), Column("c"), CARD, classes)


def valued(n: int = 20) -> Data:
    x = torch.arange(n, dtype=torch.float32)[:, None]
    train = Split(x, 2 * x, 0.1 * x, {"low": x[:, 0] < 5})
    test = Split(torch.tensor([[-0.0], [3.0], [3.5]]), torch.zeros(3, 1))
    return Data("values", "regression", train, test, (Column("time", "s"),), Column("speed", "m/s"), CARD)


def test_take_keeps_rows_together():
    part = valued().train.take([7, 2])
    assert part.x.tolist() == [[7.0], [2.0]]
    assert part.y.tolist() == [[14.0], [4.0]]
    torch.testing.assert_close(part.sigma, torch.tensor([[0.7], [0.2]]))
    assert part.regions["low"].tolist() == [False, True]
    assert len(valued().train.take([])) == 0
    low = valued().train.take(valued().train.regions["low"])
    assert low.x[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_dataset_feeds_a_loader():
    x, y = next(iter(torch.utils.data.DataLoader(valued().train.dataset(), batch_size=8)))
    assert torch.equal(y, 2 * x)
    assert x.shape == (8, 1)


@pytest.mark.parametrize("seed", [0, 1])
def test_validation_partitions_the_training_rows(seed):
    state = torch.get_rng_state()
    d = valued()
    train, validation = d.validation(0.25, seed)
    assert (len(train), len(validation)) == (15, 5)
    assert sorted(torch.cat([train.x, validation.x])[:, 0].tolist()) == list(range(20))
    assert torch.equal(d.validation(0.25, seed)[1].x, validation.x)
    assert not torch.equal(d.validation(0.25, seed + 1)[1].x, validation.x)
    assert torch.equal(torch.get_rng_state(), state)


def test_validation_keeps_the_shares_of_the_classes():
    _, validation = labelled([0] * 80 + [1] * 20, ("a", "b")).validation(0.1)
    assert torch.bincount(validation.y).tolist() == [8, 2]


def test_more_classes_than_test_rows_are_drawn_alike():
    labels = torch.cat([torch.arange(40) % 20, torch.tensor([20, 21])])  # of the last two there is one row each
    d = Data.from_arrays(torch.randn(42, 2), labels, test=0.2)
    assert len(d.test) == 9
    assert len(d.train) == 33
    assert not {20, 21} & set(d.test.y.tolist())
    x = torch.cat([d.train.x, d.test.x])
    assert len(x.unique(dim=0)) == 42


@pytest.mark.parametrize("fraction", [0, 1, -0.1, float("nan")])
def test_validation_refuses_fractions_that_leave_a_part_empty(fraction):
    with pytest.raises(ValueError, match="fraction must lie above 0 and below 1"):
        valued().validation(fraction)


def test_without_repeats_drops_only_test_rows_seen_in_training():
    d = valued()
    fresh = d.without_repeats()
    assert fresh.test.x.tolist() == [[3.5]]  # -0.0 equals the 0.0 in training
    assert len(d.test) == 3
    assert fresh.train is d.train


def test_checksum_sees_every_number():
    d = valued()
    assert d.checksum == valued().checksum
    for other in (
        replace(d, test=replace(d.test, y=torch.ones(3, 1))),
        replace(d, train=replace(d.train, sigma=None)),
        replace(d, train=d.train.take(torch.arange(20).flip(0))),
    ):
        assert other.checksum != d.checksum
    assert pickle.loads(pickle.dumps(d)).checksum == d.checksum


def test_digest_is_sha256_of_header_and_bytes():
    array = np.array([[1.0, 2.0]])
    expected = hashlib.sha256(b"a f8 (1, 2)\n" + array.astype("<f8").tobytes()).hexdigest()
    assert digest({"a": array}) == expected
    assert digest({"a": array.astype(">f8")}) == expected
    assert digest({"a": np.asfortranarray(array)}) == expected
    assert digest({"a": np.zeros((0, 3))}) == hashlib.sha256(b"a f8 (0, 3)\n").hexdigest()


def test_data_is_frozen():
    with pytest.raises(FrozenInstanceError):
        valued().name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"x": torch.zeros(3)}, r"x must be float32 .* found float32 \[3\]"),
        ({"x": torch.zeros(3, 1).double()}, r"found float64 \[3, 1\]"),
        ({"y": torch.zeros(3)}, r"y must be float32 \[3, 1\].*found float32 \[3\]"),
        ({"y": torch.zeros(4, 1)}, r"found float32 \[4, 1\]"),
        ({"y": torch.zeros(3, 1).long()}, r"found int64 \[3, 1\]"),
        ({"sigma": torch.zeros(3)}, r"sigma must be float32 \[3, 1\]"),
        ({"regions": {"gap": torch.zeros(3)}}, "region 'gap' must be a bool mask"),
    ],
)
def test_split_refuses_wrong_tensors(parts, says):
    with pytest.raises(ValueError, match=says):
        Split(**{"x": torch.zeros(3, 1), "y": torch.zeros(3, 1), **parts})


def test_data_refuses_parts_that_disagree():
    d = valued()
    with pytest.raises(ValueError, match="task must be"):
        replace(d, task="ranking")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="classes to classification only"):
        replace(d, classes=("a",))
    with pytest.raises(ValueError, match="does not fit targets float32"):
        replace(d, task="classification", classes=("a",))
    with pytest.raises(ValueError, match="differ in shape"):
        replace(d, test=Split(torch.zeros(1, 2), torch.zeros(1, 1)))
    with pytest.raises(ValueError, match="between 0 and 1, as there are 2 classes; found 0 to 2"):
        labelled([0, 1, 2], ("a", "b"))


def test_repr_is_an_aligned_table():
    text = repr(valued())
    assert text.splitlines()[0] == "values: a <small> table"
    for line in (
        "  task      regression",
        "  rows      20 training, 3 test (split 0)",
        "  input     [1]: time (s)",
        "  target    speed (m/s), 0 to 38 in training",
        "  licence   none & free",
        "  citation  nobody, 2024",
        "  note      beware",
    ):
        assert line in text.splitlines()
    of_ones_own = repr(Data.from_arrays(torch.zeros(20, 2), torch.zeros(20)))
    assert [line.split()[0] for line in of_ones_own.splitlines()[1:]] == ["task", "rows", "input", "target", "note"]
    assert "target    c: a (2), b (1)" in repr(labelled([0, 1, 0], ("a", "b")))
    assert all(len(line) <= 104 for line in repr(labelled([0, 1] * 9, ("a" * 80, "b" * 80))).splitlines())


def test_counts_have_separators_everywhere():
    text = repr(Data.from_arrays(torch.zeros(5000, 2), torch.arange(5000) % 2, test=0.2))
    for shown in ("5,000 rows", "4,000 training, 1,000 test", "0 (2,000), 1 (2,000)"):
        assert shown in text


def test_targets_in_different_units_have_a_range_each():
    y = torch.tensor([[1234.0, 0.25], [18993.0, 0.5]] * 5)
    text = repr(Data.from_arrays(torch.zeros(10, 2), y, target="cost (€), leak (m³/h)", task="regression"))
    assert "  target  cost (€), 1234 to 18990; leak (m³/h), 0.25 to 0.5 in training" in text.splitlines()


def test_html_escapes_text():
    shown = valued()._repr_html_()
    assert "a &lt;small&gt; table" in shown
    assert "none &amp; free" in shown
    assert "<small>" not in shown
