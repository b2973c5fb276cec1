"""Small synthetic data sets whose true risk is known, so that a plot shows whether a risk is right."""

from __future__ import annotations

import math
import operator

import numpy as np
import torch
from torch import Tensor

from workbench.data.columns import Column
from workbench.data.data_set import Data
from workbench.data.registry import card
from workbench.data.split_drawing import whole_number
from workbench.data.splits import Split


def cubic(n_train: int = 2000, n_test: int = 500, seed: int = 0, test_noise: bool = False) -> Data:
    """Cubic curve with a noisy region and few points at its ends: y = x^3 / 6 + N(0, sigma(x)).

    sigma(x) = 2 exp(-(x + 1)^2) + 0.2; training x is triangular on [-4, 4] with its peak at 2. The test grid covers
    [-6, 6] evenly, so |x| > 4 lies outside the data: aleatoric risk should peak at x = -1, epistemic and vacuitic
    risk should rise outside (the introductory example of Lolla et al., Capsa, 2023).

    Args:
        n_train: number of training rows.
        n_test: number of test rows.
        seed: seed of the draw; the global random state is not changed.
        test_noise: whether test targets are drawn from N(curve, sigma), as scores of calibration and likelihood need; False:
            they lie on the curve.

    Returns:
        Data with x [n, 1], y [n, 1], sigma [n, 1] and the test regions "data" and "outside".

    Example:
        >>> from workbench import data
        >>> d = data.toy.cubic(n_train=200)
        >>> len(d.train), sorted(d.test.regions)
        (200, ['data', 'outside'])
    """
    rng = _generator(n_train, n_test, seed)
    x = rng.triangular(-4, 2, 4, n_train)
    grid = np.linspace(-6, 6, n_test)

    def curve(x: np.ndarray) -> np.ndarray:
        return x**3 / 6

    def sigma(x: np.ndarray) -> np.ndarray:
        return 2 * np.exp(-((x + 1) ** 2)) + 0.2

    train = _split(x, curve(x) + sigma(x) * rng.standard_normal(n_train), sigma(x), {})
    noise = sigma(grid) * rng.standard_normal(n_test) if test_noise else 0.0
    data = np.abs(grid) <= 4
    test = _split(grid, curve(grid) + noise, sigma(grid), {"data": data, "outside": ~data})
    return Data("cubic", "regression", train, test, (Column("x"),), Column("y"), card("cubic"), split=seed)


def sine_gap(
    n_train: int = 2000, n_test: int = 500, noise: float = 0.1, seed: int = 0, test_noise: bool = False
) -> Data:
    """Sine with training data on both sides of a gap: y = sin(x) + N(0, noise), x uniform on [-2 pi, -pi] and [pi, 2 pi].

    The test grid covers [-3 pi, 3 pi] evenly: epistemic risk should rise in the gap (|x| < pi) and outside
    (|x| > 2 pi), aleatoric risk should stay at `noise`.

    Args:
        n_train: number of training rows, half on each side.
        n_test: number of test rows.
        noise: standard deviation of the noise.
        seed: seed of the draw; the global random state is not changed.
        test_noise: whether test targets have noise; False: they lie on the sine.

    Returns:
        Data with x [n, 1], y [n, 1], sigma [n, 1] and the test regions "data", "gap" and "outside".

    Example:
        >>> from workbench import data
        >>> d = data.toy.sine_gap(n_train=100)
        >>> bool((d.test.take(d.test.regions["gap"]).x.abs() < 3.1416).all())
        True
    """
    rng = _generator(n_train, n_test, seed)
    _check_noise(noise)
    side = np.where(np.arange(n_train) % 2, 1.0, -1.0)
    x = side * rng.uniform(math.pi, 2 * math.pi, n_train)
    train = _split(x, np.sin(x) + noise * rng.standard_normal(n_train), np.full(n_train, noise), {})
    grid = np.linspace(-3 * math.pi, 3 * math.pi, n_test)
    gap, outside = np.abs(grid) < math.pi, np.abs(grid) > 2 * math.pi
    regions = {"data": ~gap & ~outside, "gap": gap, "outside": outside}
    extra = noise * rng.standard_normal(n_test) if test_noise else 0.0
    test = _split(grid, np.sin(grid) + extra, np.full(n_test, noise), regions)
    return Data("sine-gap", "regression", train, test, (Column("x"),), Column("y"), card("sine-gap"), split=seed)


def moons(n_train: int = 6000, n_test: int = 2000, noise: float = 0.1, seed: int = 0) -> Data:
    """Two interlocking half circles; in one blob every fifth label is wrong.

    Outer moon (cos t, sin t), inner moon (1 - cos t, 1/2 - sin t), t evenly spaced on [0, pi], plus N(0, noise) in both
    coordinates (as scikit-learn's make_moons). The blob holds the n / 12 training points of highest density under a
    normal distribution with mean (-0.7, 0.7) and variances (0.03, 0.05), so 5000 of 60000 (Lolla et al., Capsa, 2023),
    and the test points of at least the same density.

    Args:
        n_train: number of training rows, at least 12.
        n_test: number of test rows.
        noise: standard deviation of the points around the moons.
        seed: seed of the draw; the global random state is not changed.

    Returns:
        Data with x [n, 2], labels y [n], sigma = sqrt(p (1 - p)) [n, 1], where p is the true probability of a wrong
        label (0.2 in the blob, 0 elsewhere), and the regions "blob" and "clean".

    Example:
        >>> from workbench import data
        >>> d = data.toy.moons(n_train=600)
        >>> int(d.train.regions["blob"].sum()), d.classes
        (50, ('outer', 'inner'))
    """
    if n_train < 12:
        raise ValueError(f"moons needs n_train of at least 12, so that the blob holds a point; found {n_train}")
    rng = _generator(n_train, n_test, seed)
    _check_noise(noise)
    train_x, train_y = _two_moons(n_train, noise, rng)
    test_x, test_y = _two_moons(n_test, noise, rng)
    radius = np.sort(_distance(train_x))[n_train // 12 - 1]
    parts: list[Split] = []
    for x, y in ((train_x, train_y), (test_x, test_y)):
        blob = _distance(x) <= radius
        # rows are in random order, so that every fifth is a random sample of the blob
        wrong = np.flatnonzero(blob)[::5]
        y[wrong] = 1 - y[wrong]
        sigma = np.where(blob, math.sqrt(0.2 * 0.8), 0.0)
        parts.append(
            Split(_float(x), torch.from_numpy(y), _float(sigma)[:, None], _masks({"blob": blob, "clean": ~blob}))
        )
    (train, test), features, classes = parts, (Column("x1"), Column("x2")), ("outer", "inner")
    return Data("moons", "classification", train, test, features, Column("moon"), card("moons"), classes, seed)


def _generator(n_train: int, n_test: int, seed: int) -> np.random.Generator:
    for name, n in (("n_train", n_train), ("n_test", n_test)):
        if whole_number(name, n) < 1:
            raise ValueError(f"{name} must be at least 1; found {n}")
    if whole_number("seed", seed) < 0:
        raise ValueError(f"the seed (or split) must be at least 0; found {seed}")
    return np.random.default_rng(operator.index(seed))


def _check_noise(noise: float) -> None:
    if not isinstance(noise, int | float | np.floating) or not (noise >= 0 and math.isfinite(noise)):
        raise ValueError(f"noise is a standard deviation: 0 or more, and finite; found {noise}")


def _two_moons(n: int, noise: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    n_outer = n // 2
    outer, inner = np.linspace(0, math.pi, n_outer), np.linspace(0, math.pi, n - n_outer)
    x = np.concatenate(
        [np.stack([np.cos(outer), np.sin(outer)], 1), np.stack([1 - np.cos(inner), 0.5 - np.sin(inner)], 1)]
    )
    y = (np.arange(n) >= n_outer).astype(np.int64)
    order = rng.permutation(n)
    return x[order] + noise * rng.standard_normal((n, 2)), y[order]


def _distance(x: np.ndarray) -> np.ndarray:
    """Return the squared Mahalanobis distance to the centre of the blob, which is smallest where the density is highest."""
    return (x[:, 0] + 0.7) ** 2 / 0.03 + (x[:, 1] - 0.7) ** 2 / 0.05


def _split(x: np.ndarray, y: np.ndarray, sigma: np.ndarray, regions: dict[str, np.ndarray]) -> Split:
    return Split(_float(x)[:, None], _float(y)[:, None], _float(sigma)[:, None], _masks(regions))


def _float(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.astype(np.float32))


def _masks(regions: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(mask) for name, mask in regions.items()}
