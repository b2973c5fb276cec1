"""`load()`: every name with its splits and options, and the errors of wrong calls."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import workbench.data
from workbench import data
from workbench.data.registry import entries

ROOT = Path(workbench.data.__file__).parents[2]
OFFLINE = ["cubic", "sine-gap", "moons", "diabetes", "breast-cancer", "digits", "wine"]


def test_names_and_what_is_available(monkeypatch, tmp_path):
    monkeypatch.setenv("WORKBENCH_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data.names(available=True) == OFFLINE
    (tmp_path / "uci-regression").mkdir()
    (tmp_path / "uci-regression" / "yacht.npz").touch()
    assert data.names(available=True) == [*OFFLINE, "yacht"]
    assert len(data.names()) == 33


@pytest.mark.parametrize("name", data.names())
def test_every_set_has_a_whole_card(name):
    card = data.card(name)
    assert all([card.description, card.source, card.licence, card.citation])
    assert all(len(sha256) == 64 for sha256 in entries()[name].get("files", {}).values())
    assert f"`{name}`" in (ROOT / "docs" / "datasets.md").read_text(encoding="utf-8")


# WORKBENCH_DATA decides how many of these there are; the first seven need nothing
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if "jpeg" in name or name == "camvid" else [])
        for name in data.names(available=True)
    ],
)
def test_every_available_set_loads(name):
    few = {"n_train": 40, "n_test": 40} if name.startswith("cifar10") or name == "camvid" else {}
    d = data.load(name, **few)
    assert d.name == name
    assert len(d.features) == d.input_shape[0]
    assert d.n_outputs == (len(d.classes) if d.classes else d.train.y.shape[1])
    for part in (d.train, d.test):
        assert torch.isfinite(part.x).all()
        assert torch.isfinite(part.y).all()
    if d.task == "classification":
        assert torch.bincount(d.train.y[d.train.y >= 0], minlength=d.n_outputs).min() > 0
    assert d.card.licence in repr(d).replace("\n" + " " * 12, " ")


def test_bundled_sets_hold_the_rows_of_scikit_learn():
    from sklearn.datasets import load_breast_cancer, load_diabetes

    d = data.load("diabetes")
    raw, target = load_diabetes(scaled=False, return_X_y=True)
    whole = torch.cat([torch.cat([part.x, part.y], 1) for part in (d.train, d.test)])
    reference = np.column_stack([raw, target]).astype(np.float32)
    assert sorted(map(tuple, whole.tolist())) == sorted(map(tuple, reference.tolist()))
    d = data.load("breast-cancer")
    counts = torch.bincount(torch.cat([d.train.y, d.test.y])).tolist()
    assert d.classes is not None
    assert dict(zip(d.classes, counts, strict=True)) == {"malignant": 212, "benign": 357}
    assert [c.name for c in d.features] == list(load_breast_cancer().feature_names)


def test_digits_are_images_between_0_and_1():
    from sklearn.datasets import load_digits

    d = data.load("digits")
    assert d.input_shape == (1, 8, 8)
    assert (d.train.x.min(), d.train.x.max()) == (0, 1)
    first = torch.from_numpy(load_digits().images[0] / 16).float()
    assert any(torch.equal(image[0], first) for image in torch.cat([d.train.x, d.test.x]))


def test_splits_of_bundled_sets_differ_repeat_and_keep_shares():
    state = pickle.dumps(np.random.get_state())  # noqa: NPY002
    zero, again, one = data.load("wine"), data.load("wine", split=0), data.load("wine", split=1)
    assert zero.checksum == again.checksum != one.checksum
    assert (len(zero.train), len(zero.test)) == (142, 36)
    shares = torch.bincount(zero.test.y) / 36 - torch.bincount(zero.train.y) / 142
    assert shares.abs().max() < 0.02
    assert pickle.dumps(np.random.get_state()) == state  # noqa: NPY002


def test_card_tells_the_traps():
    assert any("race" in note for note in data.card("boston").notes)
    assert any("26.6 %" in note for note in data.card("wine-red").notes)
    assert any("constant" in note for note in data.card("naval").notes)


@pytest.mark.parametrize(
    ("name", "split", "options", "error", "says"),
    [
        ("concret", 0, {}, ValueError, "no data set 'concret'; did you mean 'concrete'.*fashion-mnist"),
        ("zzzz", 0, {}, ValueError, "no data set 'zzzz'. Known names: cubic"),
        (3, 0, {}, TypeError, "must be a string; found int"),
        ("concrete", 20, {}, ValueError, "concrete takes split=0 to 19; found split=20"),
        ("protein", 5, {}, ValueError, "protein takes split=0 to 4; found split=5"),
        ("mnist", 1, {}, ValueError, "mnist takes split=0 only; found split=1"),
        ("wine", -1, {}, ValueError, "wine takes split=0 or more"),
        ("wine", 0.5, {}, TypeError, "integer"),
        ("cubic", 0, {"n_trian": 5}, TypeError, "'n_trian'.*it takes split, n_train, n_test, seed, test_noise"),
        ("concrete", 0, {"n_train": 5}, TypeError, "'n_train'.*it takes split$"),
        ("fashion-mnist", 0, {"n": 5}, TypeError, "it takes split, n_train, n_test, seed"),
    ],
)
def test_wrong_calls_are_told_what_to_do(name, split, options, error, says):
    with pytest.raises(error, match=says):
        data.load(name, split, **options)


def test_registry_is_tidy():
    text = Path(workbench.data.__file__).with_name("registry.json").read_text(encoding="utf-8")
    assert json.loads(text) == entries()
    for entry in entries().values():
        assert all(a.startswith(("https://", "http://")) and a.endswith("/") for a in entry.get("addresses", ()))
        assert ("files" in entry) == ("addresses" in entry)
