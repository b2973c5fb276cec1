"""Published data sets: contents of their files, their published splits, and that no set stands in for another."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from workbench import data
from workbench.data import files
from workbench.data.registry import entries

ARCHIVE = "cifar10/cifar-10-python.tar.gz"


def needs(name: str) -> Any:
    return pytest.mark.skipif(name not in data.names(available=True), reason=f"{name} is not on this machine")


def file(name: str, number: int = 0) -> Path:
    path = files.locate(list(entries()[name]["files"])[number])
    assert path is not None
    return path


@pytest.fixture
def official(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, dict[bytes, Any]]:
    """A small stand-in for the official archive, with its checksum in the registry."""
    rng = np.random.default_rng(0)
    batches = {
        name: {b"data": rng.integers(0, 255, (20, 3072), dtype=np.uint8), b"labels": [*range(10)] * 2}
        for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
    }
    (tmp_path / "cifar10").mkdir()
    with tarfile.open(tmp_path / ARCHIVE, "w:gz") as archive:
        for name, batch in batches.items():
            raw = pickle.dumps(batch)
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(raw)
            archive.addfile(member, io.BytesIO(raw))
    sha256 = hashlib.sha256((tmp_path / ARCHIVE).read_bytes()).hexdigest()
    for name in ("cifar10", "cifar10h", "cifar10n"):
        monkeypatch.setitem(entries()[name]["files"], ARCHIVE, sha256)
    monkeypatch.setenv("WORKBENCH_DATA", str(tmp_path))
    return batches


def test_cifar10_is_the_official_archive(official: dict[str, dict[bytes, Any]]) -> None:
    d = data.load("cifar10")
    pixels = np.concatenate([official[f"data_batch_{i}"][b"data"] for i in range(1, 6)]).reshape(-1, 3, 32, 32)
    torch.testing.assert_close(d.train.x, torch.from_numpy(pixels.astype(np.float32)) / 255)
    assert d.train.y.tolist() == [*range(10)] * 10
    assert len(d.test) == 20
    few = data.load("cifar10", n_train=20, n_test=10)
    assert torch.bincount(few.train.y).tolist() == [2] * 10
    with pytest.raises(FileNotFoundError, match="no address that it can be downloaded from: JPEG copies"):
        data.load("cifar10-jpeg")


def test_an_archive_of_another_checksum_is_not_unpickled(
    official: dict[str, dict[bytes, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / ARCHIVE).open("ab") as archive:
        archive.write(b"more")
    monkeypatch.setattr(pickle, "load", lambda *args, **kwargs: pytest.fail("it was unpickled"))
    with pytest.raises(ValueError, match="is damaged: expected content with sha256"):
        data.load("cifar10")


def test_cifar10h_has_the_shares_of_people(
    official: dict[str, dict[bytes, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    votes = np.zeros((20, 10), dtype=np.int64)
    votes[np.arange(20), np.arange(20) % 10] = 50
    votes[3] = 5
    (tmp_path / "cifar10h").mkdir()
    np.save(tmp_path / "cifar10h" / "cifar10h-counts.npy", votes)
    raw = (tmp_path / "cifar10h" / "cifar10h-counts.npy").read_bytes()
    monkeypatch.setitem(entries()["cifar10h"]["files"], "cifar10h/cifar10h-counts.npy", hashlib.sha256(raw).hexdigest())
    monkeypatch.setattr("workbench.data.published_images.partition", lambda n, *rest: (np.arange(16), np.arange(16, n)))
    d = data.load("cifar10h")
    torch.testing.assert_close(d.train.y, torch.from_numpy((votes / 50).astype(np.float32))[:16])
    assert d.train.regions["disputed"].nonzero()[:, 0].tolist() == [3]
    assert (d.task, d.n_outputs) == ("probabilities", 10)


@needs("cifar10n-jpeg")
@pytest.mark.slow
def test_cifar10n_says_which_labels_are_wrong() -> None:
    d = data.load("cifar10n-jpeg", labels="worst", n_train=2000, n_test=10)
    assert d.train.regions["wrong"].float().mean() == pytest.approx(0.402, abs=0.04)
    assert "LOSSY" in d.card.notes[0]
    with pytest.raises(ValueError, match="labels must be one of 'aggregate', 'worst'"):
        data.load("cifar10n-jpeg", labels="best")


@needs("camvid")
@pytest.mark.slow
def test_camvid_has_the_published_parts_and_void() -> None:
    d = data.load("camvid", n_train=3, n_test=2)
    assert (d.input_shape, d.train.y.shape, len(d.parts["validation"])) == ((3, 180, 240), (3, 180, 240), 101)
    labels = np.load(file("camvid", 1))["labels"].astype(np.int64)
    assert torch.equal(d.parts["validation"].y, torch.from_numpy(np.where(labels == 11, -100, labels)))


def test_clinc150_numbers_words_and_intents_of_training_sentences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {
        "train": [["pay my bill", "pay"], ["call me", "call"]],
        "val": [["call", "call"]],
        "test": [["Pay me!", "pay"]],
    }
    others = {f"oos_{part}": [["why me now", "oos"]] * rows for part, rows in (("train", 1), ("val", 2), ("test", 3))}
    raw = json.dumps({**known, **others}).encode()
    path = tmp_path / "clinc150" / "clinc150.json.gz"
    path.parent.mkdir()
    path.write_bytes(gzip.compress(raw))
    monkeypatch.setenv("WORKBENCH_DATA", str(tmp_path))
    monkeypatch.setitem(entries()["clinc150"]["files"], "clinc150/clinc150.json.gz", hashlib.sha256(raw).hexdigest())
    d = data.load("clinc150")
    assert d.classes == ("call", "pay")
    # 2 to 6; 0 is padding, 1 a word of no training sentence
    assert d.encoding.words == ("bill", "call", "me", "my", "pay")
    assert (d.train.x.tolist(), d.train.y.tolist()) == ([[6, 5, 2], [3, 4, 0]], [1, 0])
    assert (d.test.x.tolist(), d.test.y.tolist()) == ([[6, 4, 1]], [1])
    assert {name: (part.x.tolist()[0], part.y.tolist()) for name, part in d.parts.items()} == {
        "validation": ([3, 0, 0], [0]),
        "out of scope": ([1, 4, 1], [-100] * 3),
        "out of scope, validation": ([1, 4, 1], [-100] * 2),
        "out of scope, training": ([1, 4, 1], [-100]),
    }


@needs("clinc150")
def test_clinc150_keeps_sentences_without_an_intent_apart() -> None:
    d = data.load("clinc150")
    sentences = json.loads(gzip.decompress(file("clinc150").read_bytes()))
    assert (len(d.train), len(d.test), d.n_outputs) == (15000, 4500, 150)
    assert {name: len(part) for name, part in d.parts.items()} == {
        "validation": 3000, "out of scope": 1000, "out of scope, validation": 100, "out of scope, training": 100,
    }  # fmt: skip
    assert set(d.parts["out of scope"].y.tolist()) == {-100}
    assert d.classes is not None
    assert [d.classes[label] for label in d.test.y[:40].tolist()] == [intent for _, intent in sentences["test"][:40]]
    words = [d.encoding.words[number - 2] for number in d.train.x[0].tolist() if number > 1]
    assert " ".join(words) == sentences["train"][0][0]


@needs("nab")
def test_nab_learns_from_the_first_values_and_marks_the_windows() -> None:
    d = data.load("nab", series="realTweets/Twitter_volume_UPS", window=5)
    whole = json.loads(gzip.decompress(file("nab").read_bytes()))
    frame = pd.read_csv(io.StringIO(whole["series"]["realTweets/Twitter_volume_UPS"]), parse_dates=["timestamp"])
    values = torch.from_numpy(frame["value"].to_numpy(np.float32))
    assert len(d.train) == 750 - 5
    assert torch.equal(torch.cat([d.train.y, d.test.y])[:, 0], values[5:])
    assert torch.equal(d.train.x[7], values[7:12])
    inside = [
        any(start[:19] <= str(time) <= end[:19] for start, end in whole["windows"]["realTweets/Twitter_volume_UPS.csv"])
        for time in frame["timestamp"][750:]
    ]
    assert d.test.regions["anomaly"].tolist() == inside
    with pytest.raises(ValueError, match="there is no series 'x'; there are artificialNoAnomaly/"):
        data.load("nab", series="x")


@needs("adult")
def test_adult_has_its_published_rows_and_says_what_is_missing() -> None:
    d = data.load("adult")
    assert (len(d.train), len(d.test), int(d.train.y.sum()), int(d.test.y.sum())) == (32561, 16281, 7841, 3846)
    missing = [i for i, column in enumerate(d.features) if column.name == "occupation is missing"]
    assert d.train.x[:, missing].sum() == 1843  # as UCI's description counts
    ages = [int(line.split(b",")[0]) for line in gzip.decompress(file("adult").read_bytes()).splitlines()[:50]]
    assert d.train.x[:50, 0].tolist() == ages


@needs("ett-h1")
@pytest.mark.parametrize("horizon", [24, 96])
def test_ett_windows_are_those_of_the_published_months(horizon: int) -> None:
    d = data.load("ett-h1", input_length=48, horizon=horizon)
    frame = pd.read_csv(file("ett-h1")).drop(columns="date").to_numpy(np.float32)
    for split, start, end in ((d.train, 48, 8640), (d.parts["validation"], 8640, 11520), (d.test, 11520, 14400)):
        assert len(split) == end - start - horizon + 1
        for row, first in ((0, start), (len(split) - 1, end - horizon)):
            np.testing.assert_array_equal(split.x[row].numpy(), frame[first - 48 : first].T)
            np.testing.assert_array_equal(split.y[row].numpy(), frame[first : first + horizon, -1])


@needs("mcycle")
@pytest.mark.parametrize(
    ("name", "x", "y", "n_test"), [("mcycle", "times", "accel", 14), ("engel", "income", "foodexp", 24)]
)
def test_curves_hold_the_rows_of_their_tables(name: str, x: str, y: str, n_test: int) -> None:
    frame = pd.read_csv(file(name))
    d, other = data.load(name, split=1), data.load(name, split=2)
    rows = torch.cat([torch.cat([part.x, part.y], 1) for part in (d.train, d.test)])
    assert sorted(rows.tolist()) == sorted(frame[[x, y]].to_numpy(np.float32).tolist())
    assert len(d.test) == n_test
    assert not torch.equal(d.test.x, other.test.x)


@needs("co2")
def test_co2_is_tested_on_the_years_after() -> None:
    d = data.load("co2")
    assert d.train.x.max() < 2010 <= d.test.x.min()
    assert len(d.train) + len(d.test) == 820
    assert data.load("co2", until=2000).test.x.min() >= 2000
    with pytest.raises(ValueError, match="until must lie between 1958 and 2026; found 1900"):
        data.load("co2", until=1900)
