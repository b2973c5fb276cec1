"""Model cards: what `wrapped.fit` alone, and calibrations, have seen."""

from __future__ import annotations

import copy
import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

import workbench
from workbench import compose, laplace, neo, vote
from workbench.data import Data
from workbench.outputs import Logits

transformers = pytest.importorskip("transformers")
TODAY = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
CLASSES = {"logits": Logits()}


def bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=3
    )
    return transformers.BertForSequenceClassification(config).eval()


def words() -> Data:
    ids, labels = torch.randint(20, (100, 6)), torch.arange(100) % 3
    return Data.from_arrays(ids, labels, test=[*range(20)], features=[*"abcdef"], name="words")


def rows_of(folder: Path) -> list[str]:
    """The lines of the table, without its head."""
    text = (folder / "README.md").read_text()
    lines = text[text.index("## Data") : text.index("## Load it")].splitlines()
    return [line for line in lines if line.startswith("|")][2:]


IDS = torch.randint(20, (24, 6), generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(24) % 3
PAIRS = TensorDataset(IDS, LABELS)


class Named(TensorDataset):
    """With what a Dataset of the package datasets says of itself."""

    column_names = ("input_ids", "labels")
    _fingerprint = "1f2e"


GIVEN: dict[str, tuple[Callable[[], Any], str]] = {
    "tensor": (lambda: IDS, "not recorded | 24 | not recorded | not recorded"),
    "batches": (lambda: [IDS[:10], IDS[10:]], "not recorded | 24 | not recorded | not recorded"),
    "pairs": (
        lambda: [(IDS[:10], LABELS[:10]), (IDS[10:], LABELS[10:])],
        "not recorded | 24 | not recorded | not recorded",
    ),
    "generator": (lambda: (ids for ids in IDS.split(8)), "not recorded | not recorded | not recorded | not recorded"),
    "loader": (lambda: DataLoader(PAIRS, batch_size=8), "not recorded | 24 | not recorded | not recorded"),
    "some": (
        lambda: DataLoader(PAIRS, batch_size=4, sampler=SubsetRandomSampler(range(12))),
        "not recorded | not recorded | not recorded | not recorded",
    ),
    "named": (
        lambda: DataLoader(Named(IDS, LABELS), batch_size=8),
        "not recorded | 24 | input_ids, labels | fingerprint 1f2e",
    ),
}


@pytest.mark.parametrize("form", GIVEN)
def test_the_card_says_what_a_fit_alone_has_seen(form: str, tmp_path: Path) -> None:
    make, expected = GIVEN[form]
    wrapped: Any = neo.Wrapper(output=CLASSES)(bert())
    wrapped.fit(IDS[:3])
    wrapped.fit(make())  # in place of the first
    wrapped.save_pretrained(tmp_path / "folder")
    assert rows_of(tmp_path / "folder") == [f"| {expected} | wrapped.fit of neo, {TODAY} |"]
    assert "that it was trained on: not recorded." in (tmp_path / "folder" / "README.md").read_text()
    workbench.save(workbench.from_pretrained(tmp_path / "folder"), tmp_path / "file.safetensors")
    loaded = workbench.load(tmp_path / "file.safetensors", bert())
    loaded.save_pretrained(tmp_path / "again")
    assert rows_of(tmp_path / "again") == rows_of(tmp_path / "folder")


def test_a_fit_that_fails_is_not_remembered(tmp_path: Path) -> None:
    wrapped: Any = neo.Wrapper(output=CLASSES)(bert())
    wrapped.fit(IDS)
    with pytest.raises(ValueError, match="no"):
        wrapped.fit([])
    wrapped.save_pretrained(tmp_path)
    assert rows_of(tmp_path) == [f"| not recorded | 24 | not recorded | not recorded | wrapped.fit of neo, {TODAY} |"]


def test_a_training_and_a_fit_after_it_are_told_apart(tmp_path: Path) -> None:
    data = words()
    wrapped: Any = laplace.Wrapper(output=CLASSES)(bert())
    options = {"epochs": 1, "validation": 0, "progress": False}
    workbench.fit(wrapped, data, **options)
    trained = f"| words, split 0 | 80 | a, b, c, d, e, f | sha256 {data.checksum} | workbench.fit, {TODAY} |"
    wrapped.save_pretrained(tmp_path)
    assert rows_of(tmp_path) == [trained]  # the posterior is of the same rows
    train, _ = data.validation(0.25)
    assert wrapped.fit(DataLoader(train.dataset(), batch_size=8)) is wrapped
    wrapped.save_pretrained(tmp_path)
    after = f"| not recorded | 60 | not recorded | not recorded | wrapped.fit of laplace, {TODAY} |"
    assert rows_of(tmp_path) == [trained, after]
    workbench.fit(wrapped, train, **options)  # it is fitted anew
    wrapped.save_pretrained(tmp_path)
    assert rows_of(tmp_path) == [
        trained,
        f"| words, split 0 | 60 | a, b, c, d, e, f | not recorded | workbench.fit, {TODAY} |",
    ]


def test_the_card_says_what_a_model_was_calibrated_on(tmp_path: Path) -> None:
    data = words()
    _, held_out = data.validation(0.25)
    wrapped: Any = vote.Wrapper(2, output=CLASSES)(bert()).eval()
    calibrated = workbench.calibrate(wrapped, held_out)
    chosen = workbench.selective(calibrated, data.test).predictor(coverage=0.8)
    chosen.save_pretrained(tmp_path / "folder")
    columns = "a, b, c, d, e, f | not recorded"
    expected = [
        f"| words, split 0, validation rows | 20 | {columns} | `TemperatureScaling`, {TODAY} |",
        f"| words, split 0, test rows | 20 | {columns} | `SelectivePredictor`, {TODAY} |",
    ]
    assert rows_of(tmp_path / "folder") == expected
    again = workbench.from_pretrained(tmp_path / "folder")
    again.save_pretrained(tmp_path / "again")
    assert rows_of(tmp_path / "again") == expected
    workbench.save(again, tmp_path / "file.safetensors")
    loaded = workbench.load(tmp_path / "file.safetensors", bert())
    copy.deepcopy(loaded).save_pretrained(tmp_path / "loaded")
    assert rows_of(tmp_path / "loaded") == expected


def test_pairs_loaders_and_thresholds_by_hand_are_told_as_far_as_they_are_known(tmp_path: Path) -> None:
    wrapped: Any = vote.Wrapper(2, output=CLASSES)(bert()).eval()
    loader = DataLoader(PAIRS, batch_size=4, sampler=SubsetRandomSampler(range(12)))
    for rows, number in (((IDS, LABELS), 24), (loader, 12)):
        workbench.calibrate(wrapped, rows, "conformal", score="lac").save_pretrained(tmp_path)
        expected = f"| not recorded | {number} | not recorded | not recorded | `SplitConformal`, {TODAY} |"
        assert rows_of(tmp_path) == [expected]
    workbench.selective(wrapped, (IDS, LABELS)).predictor(0.3).save_pretrained(tmp_path)
    assert rows_of(tmp_path) == [
        "| not recorded | not recorded | not recorded | not recorded | `SelectivePredictor`, not recorded |"
    ]


def test_files_without_what_is_known_of_the_rows_are_read(tmp_path: Path) -> None:
    wrapped: Any = compose(vote.Wrapper(2, output=CLASSES))(bert()).eval()
    calibrated = workbench.calibrate(wrapped, (IDS, LABELS))
    calibrated.fitted_on = None  # as calibrated by an earlier version
    workbench.save(calibrated, tmp_path / "file.safetensors")
    workbench.load(tmp_path / "file.safetensors", bert()).save_pretrained(tmp_path / "folder")
    assert rows_of(tmp_path / "folder") == [
        "| not recorded | not recorded | not recorded | not recorded | `TemperatureScaling`, not recorded |"
    ]
