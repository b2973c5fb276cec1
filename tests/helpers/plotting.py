"""Fixtures for the tests of figures, which a test module imports by name, and inspection of drawn artists."""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

N = 60


@pytest.fixture(autouse=True)
def untouched():
    """Assert that no plot changes rcParams or the random state."""
    settings, torch_state = matplotlib.rcParams.copy(), torch.get_rng_state()
    numpy_state = repr(np.random.get_state())  # noqa: NPY002
    yield
    assert matplotlib.rcParams == settings
    assert repr(np.random.get_state()) == numpy_state  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), torch_state)


@pytest.fixture
def rng():
    return np.random.default_rng(3)


@pytest.fixture
def ax():
    return Figure(figsize=(6.4, 4.8)).subplots()


def legend_texts(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def line(ax, start):
    """Return the only line whose label starts with a text."""
    (artist,) = [item for item in ax.lines if item.get_label().startswith(start)]
    return artist


def band(ax, start):
    (artist,) = [item for item in ax.collections if item.get_label().startswith(start)]
    return artist.get_paths()[0].vertices


def probabilities(rng, n=N, classes=4):
    scores = rng.random((n, classes)) ** 3
    return scores / scores.sum(1, keepdims=True), rng.integers(0, classes, n)
