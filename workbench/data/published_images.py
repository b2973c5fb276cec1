"""Loaders of CIFAR-10 with human labels, and of CamVid."""

from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.data.columns import Column
from workbench.data.data_set import Data
from workbench.data.files import read
from workbench.data.images import open_image, to_tensor
from workbench.data.registry import card, entries
from workbench.data.split_drawing import partition, subset
from workbench.data.splits import Split
from workbench.data.targets import VOID

HUMAN_LABELS = {
    "aggregate": "aggre_label",
    "worst": "worse_label",
    "random1": "random_label1",
    "random2": "random_label2",
    "random3": "random_label3",
    "clean": "clean_label",
}
CAMVID_VOID = 11


def cifar10(name: str, split: int, n_train: int | None = None, n_test: int | None = None, seed: int = 0) -> Data:
    """Load the 50,000 training and 10,000 test images, or stratified subsets of them."""
    train, test = _cifar_parts(name, read(name))
    drawn = [
        _drawn(name, option, n, images, labels, seed)
        for option, n, (images, labels) in (("n_train", n_train, train), ("n_test", n_test, test))
    ]
    train_rows, test_rows = (Split(x, labels) for x, labels, _ in drawn)
    return _classification(name, split, train_rows, test_rows)


def cifar10n(
    name: str,
    split: int,
    labels: str = "aggregate",
    n_train: int | None = None,
    n_test: int | None = None,
    seed: int = 0,
) -> Data:
    """Load CIFAR-10 with human labels of the training images, and the regions "wrong" and "right" by these labels."""
    if labels not in HUMAN_LABELS:
        raise ValueError(f"{name}: labels must be one of {', '.join(map(repr, HUMAN_LABELS))}; found {labels!r}")
    human, *images = read(name)
    train, test = _cifar_parts(name, images)
    if not np.array_equal(train[1], human["clean_label"]):
        raise ValueError(f"{name}: the labels are in another order than the images")
    x, clean, rows = _drawn(name, "n_train", n_train, *train, seed)
    labels_of_people = torch.from_numpy(human[HUMAN_LABELS[labels]].astype(np.int64)[rows])
    test_images, true_classes, _ = _drawn(name, "n_test", n_test, *test, seed)
    return _classification(
        name,
        split,
        Split(x, labels_of_people, regions={"wrong": labels_of_people != clean, "right": labels_of_people == clean}),
        Split(test_images, true_classes),
    )


def cifar10h(name: str, split: int, n_train: int | None = None, n_test: int | None = None, seed: int = 0) -> Data:
    """Load the test images of CIFAR-10 with the share of people that chose each class, and the regions "unanimous" and "disputed"."""
    *images, votes = read(name)
    pixels, labels = _cifar_parts(name, images)[1]
    counts = np.load(io.BytesIO(votes))
    shares = torch.from_numpy((counts / counts.sum(1, keepdims=True)).astype(np.float32))
    unanimous = (shares == 1).any(1)
    parts = []
    drawn = partition(len(labels), 0.2, split, torch.from_numpy(labels))
    for option, n, rows in zip(("n_train", "n_test"), (n_train, n_test), drawn, strict=True):
        selected = rows[subset(name, option, n, len(rows), torch.from_numpy(labels[rows]), 10, seed)]
        regions = {"unanimous": unanimous[selected], "disputed": ~unanimous[selected]}
        parts.append(Split(_pixels(pixels, selected), shares[selected], regions=regions))
    data = _classification(name, split, parts[0], parts[1], task="probabilities")
    return replace(data, target=Column("share of people", "0 to 1"))


def camvid(name: str, split: int, n_train: int | None = None, n_test: int | None = None, seed: int = 0) -> Data:
    """Load the published training, validation and test scenes, optionally random subsets of training and test; void pixels are -100."""

    def scenes(contents: dict[str, np.ndarray], rows: np.ndarray) -> Split:
        labels = torch.from_numpy(contents["labels"][rows].astype(np.int64))
        return Split(_pixels(_Jpegs(contents), rows), labels.masked_fill(labels == CAMVID_VOID, VOID))

    train, validation, test = read(name)
    parts = []
    for option, n, contents in (("n_train", n_train, train), ("n_test", n_test, test)):
        parts.append(scenes(contents, subset(name, option, n, len(contents["labels"]), None, 1, seed)))
    validation_scenes = scenes(validation, np.arange(len(validation["labels"])))
    return replace(_classification(name, split, parts[0], parts[1]), parts={"validation": validation_scenes})


class _Jpegs(Sequence[np.ndarray]):
    """Sequence of Pillow images, each decoded on access."""

    def __init__(self, contents: dict[str, np.ndarray]) -> None:
        self.bytes, self.ends = contents["jpeg"].tobytes(), contents["offsets"]

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, i: Any) -> Any:
        return open_image(self.bytes[self.ends[i] : self.ends[i + 1]])


def _cifar_parts(name: str, contents: list[Any]) -> tuple[tuple[Any, np.ndarray], tuple[Any, np.ndarray]]:
    """Return images and labels [n] of the training and the test part, from the official archive or from JPEG copies."""
    if isinstance(contents[0], bytes):
        # unpickling is safe, since the checksum of the archive has been verified
        with tarfile.open(fileobj=io.BytesIO(contents[0])) as archive:
            batches = [_batch(archive, f"data_batch_{i}") for i in range(1, 6)] + [_batch(archive, "test_batch")]
        pixels = [batch[b"data"].reshape(-1, 3, 32, 32) for batch in batches]
        labels = [np.array(batch[b"labels"], dtype=np.int64) for batch in batches]
        return (np.concatenate(pixels[:5]), np.concatenate(labels[:5])), (pixels[5], labels[5])
    train, test = ((_Jpegs(part), part["labels"].astype(np.int64)) for part in contents[:2])
    return train, test


def _batch(archive: tarfile.TarFile, name: str) -> dict[bytes, Any]:
    file = archive.extractfile(f"cifar-10-batches-py/{name}")
    assert file is not None
    return pickle.load(file, encoding="bytes")


def _drawn(
    name: str, option: str, n: int | None, images: Any, labels: np.ndarray, seed: int
) -> tuple[Tensor, Tensor, np.ndarray]:
    rows = subset(name, option, n, len(labels), torch.from_numpy(labels), 10, seed)
    return _pixels(images, rows), torch.from_numpy(labels[rows]), rows


def _pixels(images: Any, rows: np.ndarray) -> Tensor:
    """Return images as float32 [n, 3, height, width] in [0, 1]."""
    if isinstance(images, np.ndarray):
        return torch.from_numpy(images[rows].astype(np.float32) / 255)
    return torch.stack([to_tensor(images[row]) for row in rows])


def _classification(name: str, split: int, train: Split, test: Split, *, task: str = "classification") -> Data:
    entry = entries()[name]
    features, target = tuple(Column(*column) for column in entry["features"]), Column(*entry["target"])
    return Data(name, task, train, test, features, target, card(name), tuple(entry["classes"]), split)
