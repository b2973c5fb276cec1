"""Loaders of published tables, series and sentences."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from workbench.data.columns import Column
from workbench.data.data_set import Data
from workbench.data.files import read
from workbench.data.frames import FrameEncoding
from workbench.data.registry import card, entries
from workbench.data.split_drawing import partition, whole_number
from workbench.data.splits import Split
from workbench.data.targets import VOID
from workbench.data.texts import Vocabulary
from workbench.errors import require

ETT_HOURS = {"train": (0, 8640), "validation": (8640, 11520), "test": (11520, 14400)}  # 12, 4 and 4 months of 30 days
NAB_PROBATION = 0.15  # share of a series (of at most 5,000 values) that the benchmark does not score: the training rows


def adult(name: str, split: int) -> Data:
    """Load the census rows of the published files, with one-hot encoded categories; "?" marks missing values."""
    pandas, columns = require("pandas"), entries()[name]["columns"]
    frames = [
        pandas.read_csv(io.BytesIO(content), names=columns, skipinitialspace=True, na_values="?")
        for content in read(name)
    ]
    features = [frame.drop(columns="income") for frame in frames]
    encoding = FrameEncoding.of(features[0])
    train, test = (
        Split(encoding(part), torch.from_numpy(frame["income"].str.startswith(">").to_numpy(np.int64)))
        for part, frame in zip(features, frames, strict=True)
    )
    classes = tuple(entries()[name]["classes"])
    data = Data(name, "classification", train, test, encoding.columns, _target(name), card(name), classes, split)
    return replace(data, encoding=encoding)


def curve(name: str, split: int, until: int | None = None) -> Data:
    """Load a curve of one value over another, split 90/10 by a seed, or with `until` into the years before and from then on."""
    entry = entries()[name]
    (content,) = read(name)
    frame = require("pandas").read_csv(io.BytesIO(content))
    x, y = (torch.from_numpy(frame[column].to_numpy(np.float32))[:, None] for column in entry["columns"])
    all_rows = Split(x, y)
    if "until" in entry:
        until = entry["until"] if until is None else whole_number("until", until)
        past = x[:, 0] < until
        if not bool(past.any()) or bool(past.all()):
            raise ValueError(f"{name}: until must lie between {x.min():.0f} and {x.max():.0f}; found {until}")
        train, test = all_rows.take(past), all_rows.take(~past)
    elif until is not None:
        raise TypeError(f"load({name!r}): got an unexpected option 'until'; it takes split")
    else:
        train, test = map(all_rows.take, partition(len(x), 0.1, split))
    features = tuple(Column(*column) for column in entry["features"])
    return Data(name, "regression", train, test, features, _target(name), card(name), split=split)


def ett(name: str, split: int, input_length: int = 96, horizon: int = 96) -> Data:
    """Load windows of seven readings [n, 7, input_length], and the oil temperature in the hours after each [n, horizon]."""
    (content,) = read(name)
    frame = require("pandas").read_csv(io.BytesIO(content))
    for option, value in (("input_length", input_length), ("horizon", horizon)):
        if not 1 <= whole_number(option, value) <= 2880:
            raise ValueError(f"{name}: {option} must lie between 1 and 2880 hours; found {value}")
    readings = torch.from_numpy(frame.drop(columns="date").to_numpy(np.float32))

    def windows(start: int, end: int) -> Split:
        # inputs may reach back into the part before
        rows = readings[max(0, start - input_length) : end]
        both = rows.unfold(0, input_length + horizon, 1)
        return Split(both[:, :, :input_length].contiguous(), both[:, -1, input_length:].contiguous())

    parts = {part: windows(*hours) for part, hours in ETT_HOURS.items()}
    features = tuple(Column(*column) for column in entries()[name]["features"])
    return Data(
        name,
        "regression",
        parts["train"],
        parts["test"],
        features,
        _target(name),
        card(name),
        split=split,
        parts={"validation": parts["validation"]},
        horizon=horizon,
    )


def nab(name: str, split: int, series: str = "realKnownCause/nyc_taxi", window: int = 24) -> Data:
    """Load the values before each value of a series [n, window], that value [n, 1], and the test regions "anomaly" and "normal"."""
    pandas = require("pandas")
    (content,) = read(name)
    benchmark = json.loads(content)
    if series not in benchmark["series"]:
        raise ValueError(f"{name}: there is no series {series!r}; there are {', '.join(benchmark['series'])}")
    frame = pandas.read_csv(io.StringIO(benchmark["series"][series]), parse_dates=["timestamp"])
    probation = int(NAB_PROBATION * min(len(frame), 5000))
    if not 1 <= whole_number("window", window) < probation:
        raise ValueError(f"{name}: window must lie between 1 and {probation - 1} values; found {window}")
    values = torch.from_numpy(frame["value"].to_numpy(np.float32))
    anomaly = np.zeros(len(frame), dtype=bool)
    for start, end in benchmark["windows"][f"{series}.csv"]:
        anomaly |= frame["timestamp"].between(pandas.Timestamp(start), pandas.Timestamp(end)).to_numpy()
    unusual = torch.from_numpy(anomaly)[window:]
    rows = Split(
        values[:-1].unfold(0, window, 1).contiguous(),
        values[window:, None],
        None,
        {"anomaly": unusual, "normal": ~unusual},
    )
    first = torch.arange(len(rows)) < probation - window
    features = tuple(Column(f"{step} steps before") for step in range(window, 0, -1))
    train, test = rows.take(first), rows.take(~first)
    return Data(name, "regression", train, test, features, _target(name), card(name), split=split, horizon=1)


def clinc(name: str, split: int) -> Data:
    """Load word numbers [n, words] and intents [n]; sentences without an intent are in the parts "out of scope", with class -100."""
    (content,) = read(name)
    sentences: dict[str, Any] = json.loads(content)
    vocabulary = Vocabulary.of(sentence for sentence, _ in sentences["train"])
    intents = sorted({intent for _, intent in sentences["train"]})
    numbers = {intent: number for number, intent in enumerate(intents)} | {"oos": VOID}

    def part(key: str) -> Split:
        texts, labels = zip(*sentences[key], strict=True)
        return Split(vocabulary(texts), torch.tensor([numbers[label] for label in labels]))

    other_parts = {
        "validation": "val",
        "out of scope": "oos_test",
        "out of scope, validation": "oos_val",
        "out of scope, training": "oos_train",
    }
    features = tuple(Column(f"word {i + 1}") for i in range(vocabulary.length))
    data = Data(
        name, "classification", part("train"), part("test"), features, _target(name), card(name), tuple(intents), split
    )
    return replace(data, parts={label: part(key) for label, key in other_parts.items()}, encoding=vocabulary)


def _target(name: str) -> Column:
    return Column(*entries()[name]["target"])
