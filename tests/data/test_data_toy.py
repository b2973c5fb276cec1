"""Toy data sets: their formulas, noise and regions, and that a seed fixes them without changing global state."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from scipy import stats

from workbench import data


def cubic_sigma(x: np.ndarray) -> np.ndarray:
    return 2 * np.exp(-((x + 1) ** 2)) + 0.2


def test_cubic_follows_its_recipe():
    d = data.toy.cubic(n_train=20000, n_test=601)
    x, y = d.train.x.double().numpy()[:, 0], d.train.y.double().numpy()[:, 0]
    assert stats.kstest(x, stats.triang(c=0.75, loc=-4, scale=8).cdf).pvalue > 0.01  # peak at 2 of [-4, 4]
    assert stats.kstest((y - x**3 / 6) / cubic_sigma(x), "norm").pvalue > 0.01
    assert d.train.sigma is not None
    assert d.test.sigma is not None
    np.testing.assert_allclose(d.train.sigma.numpy()[:, 0], cubic_sigma(x), rtol=1e-5)
    grid = np.linspace(-6, 6, 601)
    np.testing.assert_allclose(d.test.x.numpy()[:, 0], grid, atol=1e-6)
    np.testing.assert_allclose(d.test.y.numpy()[:, 0], grid**3 / 6, atol=1e-5)
    assert d.test.sigma.argmax() == np.abs(grid + 1).argmin()
    assert d.test.regions["data"].sum() == 401
    assert d.test.regions["outside"].sum() == 200


def test_cubic_test_noise_is_drawn_from_sigma():
    d = data.toy.cubic(n_train=1, n_test=20000, test_noise=True)
    assert d.test.sigma is not None
    z = (d.test.y - d.test.x**3 / 6) / d.test.sigma
    assert stats.kstest(z.numpy()[:, 0], "norm").pvalue > 0.01


def test_sine_gap_leaves_a_gap():
    d = data.toy.sine_gap(n_train=10000, n_test=601, noise=0.3)
    x, y = d.train.x.double().numpy()[:, 0], d.train.y.double().numpy()[:, 0]
    assert (x < 0).sum() == 5000
    assert stats.kstest(np.abs(x), stats.uniform(math.pi, math.pi).cdf).pvalue > 0.01
    assert stats.kstest((y - np.sin(x)) / 0.3, "norm").pvalue > 0.01
    torch.testing.assert_close(d.test.sigma, torch.full((601, 1), 0.3))
    size = d.test.x[:, 0].abs()
    for name, low, high in (("gap", 0, math.pi), ("data", math.pi, 2 * math.pi), ("outside", 2 * math.pi, 3 * math.pi)):
        part = size[d.test.regions[name]]
        assert part.min() >= low - 1e-5
        assert part.max() <= high + 1e-5
    assert torch.stack(list(d.test.regions.values())).sum(0).eq(1).all()


def test_moons_without_noise_are_those_of_scikit_learn():
    from sklearn.datasets import make_moons

    d = data.toy.moons(n_train=201, n_test=12, noise=0.0)
    x, y = make_moons(201, shuffle=False)
    ours, theirs = np.lexsort(d.train.x.numpy().T), np.lexsort(x.T)
    x, y = x[theirs], y[theirs]
    # equal coordinates may sort either way, so the nearest point is what counts
    distance = np.linalg.norm(d.train.x.numpy()[ours][:, None] - x[None], axis=-1)
    assert distance.min(1).max() < 1e-6
    assert distance.min(0).max() < 1e-6
    clean = ~d.train.regions["blob"].numpy()[ours]
    np.testing.assert_array_equal(d.train.y.numpy()[ours][clean], y[distance.argmin(1)][clean])


def test_moons_flip_every_fifth_label_of_the_densest_twelfth():
    d = data.toy.moons(n_train=60000, n_test=3000)
    blob = d.train.regions["blob"]
    density = stats.multivariate_normal([-0.7, 0.7], [0.03, 0.05]).pdf(d.train.x.double().numpy())
    assert blob.sum() == 5000
    assert set(np.argsort(density)[-5000:]) == set(np.flatnonzero(blob.numpy()))
    # the blob lies on the outer moon, class 0: there a label 1 is a wrong one
    assert (d.train.y[blob] == 1).sum() == 1000
    torch.testing.assert_close(d.train.sigma, blob.float()[:, None] * 0.4)
    inside = d.test.regions["blob"]
    assert inside.sum() == pytest.approx(250, rel=0.2)
    assert (d.test.y[inside] == 1).float().mean() == pytest.approx(0.2, abs=0.01)
    assert d.train.y[~blob].float().mean() == pytest.approx(30000 / 55000, abs=1e-6)


@pytest.mark.parametrize("name", ["cubic", "sine_gap", "moons"])
def test_seed_fixes_the_draw_and_global_state_is_left_alone(name):
    torch_state, numpy_state = torch.get_rng_state(), pickle.dumps(np.random.get_state())  # noqa: NPY002
    make = getattr(data.toy, name)
    same, again, other = make(n_train=60, n_test=20), make(n_train=60, n_test=20), make(n_train=60, n_test=20, seed=1)
    assert same.checksum == again.checksum != other.checksum
    assert other.split == 1
    assert data.load(name, split=1, n_train=60, n_test=20).checksum == other.checksum
    assert data.load(name, seed=1, n_train=60, n_test=20).checksum == other.checksum
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert pickle.dumps(np.random.get_state()) == numpy_state  # noqa: NPY002


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("cubic", {"n_train": 0}, "n_train must be at least 1; found 0"),
        ("sine_gap", {"noise": -1.0}, "noise is a standard deviation"),
        ("moons", {"n_train": 11}, "at least 12"),
        ("moons", {"noise": math.nan}, "noise is a standard deviation"),
    ],
)
def test_bad_arguments_are_refused(name, options, says):
    with pytest.raises(ValueError, match=says):
        getattr(data.toy, name)(**options)
