"""Out-of-distribution scores of logits and last-layer features: compared with the papers' formulas in numpy, row by row."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.density_rows import draw
from torch import Tensor, nn

from workbench import neo, vote
from workbench.methods.densities import (
    BoundaryDistance,
    ClippedEnergy,
    Density,
    GeneralizedEntropy,
    GuidedEnergy,
    Mahalanobis,
    MaxSoftmax,
    PrunedEnergy,
    RelativeMahalanobis,
    ScaledEnergy,
    VirtualLogit,
)
from workbench.outputs import Logits

N, D, C = 200, 8, 3
WEIGHT, BIAS = draw(C, D, seed=1), draw(C, seed=2)
HEADED = ("vim", "fdbd", "react", "ash", "scale")


def rows(n: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features as after a ReLU, the class scores that the last layer makes of them, and labels that are not always the largest."""
    groups = torch.arange(n) % C
    x = torch.relu(3 * draw(C, D, seed=5)[groups] + draw(n, D, seed=seed))
    return x, x @ WEIGHT.T + BIAS, groups


X, LOGITS, LABELS = rows(N, 3)
NEW, NEW_LOGITS, _ = rows(20, 4)
x, new, w, b = (part.double().numpy() for part in (X, NEW, WEIGHT, BIAS))
labels = LABELS.numpy()


def logits_of(row: np.ndarray) -> np.ndarray:
    return np.array([sum(w[c, i] * row[i] for i in range(D)) + b[c] for c in range(C)])


def energy(logits: np.ndarray) -> float:
    return -float(np.log(np.sum(np.exp(logits))))


def softmax(logits: np.ndarray) -> np.ndarray:
    return np.exp(logits) / np.exp(logits).sum()


def msp(row: np.ndarray) -> float:
    """The log odds against the largest probability, which rank as it does."""
    p = softmax(logits_of(row)).max()
    return float(np.log((1 - p) / p))


def gen(row: np.ndarray) -> float:
    return sum(p**0.1 * (1 - p) ** 0.1 for p in softmax(logits_of(row)))


MEANS = np.stack([x[labels == c].mean(0) for c in range(C)])
TIED = sum(np.outer(row - MEANS[y], row - MEANS[y]) for row, y in zip(x, labels, strict=True)) / N


def mahalanobis(row: np.ndarray) -> float:
    return min((row - mean) @ np.linalg.inv(TIED) @ (row - mean) for mean in MEANS)


def relative(row: np.ndarray) -> float:
    away = row - x.mean(0)
    return mahalanobis(row) - away @ np.linalg.inv(np.cov(x.T, bias=True)) @ away


ORIGIN = -np.linalg.pinv(w) @ b
# the axes by the singular values of the rows, not by the eigenvalues of their covariance
REST = np.linalg.svd(x - ORIGIN)[2][D // 2 :]


def outside(row: np.ndarray) -> float:
    return float(np.linalg.norm(REST @ (row - ORIGIN)))


def vim(row: np.ndarray) -> float:
    """The log odds of the probability that the paper's softmax gives the virtual logit."""
    alpha = sum(logits_of(each).max() for each in x) / sum(outside(each) for each in x)
    p = softmax(np.append(logits_of(row), alpha * outside(row)))[-1]
    return float(np.log(p / (1 - p)))


def fdbd(row: np.ndarray) -> float:
    logits = logits_of(row)
    p = int(logits.argmax())
    far = [abs(logits[p] - logits[c]) / np.linalg.norm(w[p] - w[c]) for c in range(C) if c != p]
    return -float(np.mean(far)) / float(np.linalg.norm(row - x.mean(0)))


def nnguide(row: np.ndarray) -> float:
    guides = [-energy(logits_of(each)) * (each @ row) / np.linalg.norm(each) / np.linalg.norm(row) for each in x]
    return energy(logits_of(row)) * float(np.mean(sorted(guides)[-10:]))


def react(row: np.ndarray) -> float:
    return energy(logits_of(np.minimum(row, np.percentile(x, 90))))


def ash(row: np.ndarray) -> float:
    kept = np.sort(row)[-(D - round(0.65 * D)) :]
    return energy(logits_of(np.where(row >= kept[0], row, 0) * np.exp(row.sum() / kept.sum())))


def scale(row: np.ndarray) -> float:
    kept = np.sort(row)[-(D - round(0.85 * D)) :]
    return energy(logits_of(row * np.exp(row.sum() / kept.sum())))


CASES: list[tuple[Density, Callable[[np.ndarray], float]]] = [
    (MaxSoftmax(), msp),
    (GeneralizedEntropy(), gen),
    (Mahalanobis(shrinkage=0.0), mahalanobis),
    (RelativeMahalanobis(shrinkage=0.0), relative),
    (VirtualLogit(), vim),
    (BoundaryDistance(), fdbd),
    (GuidedEnergy(), nnguide),
    (ClippedEnergy(), react),
    (PrunedEnergy(percentile=65), ash),
    (ScaledEnergy(), scale),
]


@pytest.mark.parametrize(("density", "by_hand"), CASES, ids=[f.__name__ for _, f in CASES])
def test_a_score_is_that_of_its_paper_and_its_risk_is_standardized(
    density: Density, by_hand: Callable[[np.ndarray], float]
) -> None:
    density = copy.deepcopy(density).double()
    density.fit(X.double(), LOGITS.double(), LABELS, head=(WEIGHT.double(), BIAS.double()))
    expected = np.array([by_hand(row) for row in new])
    np.testing.assert_allclose(density.score(NEW.double(), NEW_LOGITS.double()), expected, rtol=1e-5, atol=1e-8)
    risk = density.eval()(NEW.double(), NEW_LOGITS.double())
    slope = np.polyfit(expected, risk, 1)[0]
    assert slope > 0  # the stranger, the higher
    assert 1 / slope == pytest.approx(float(density.scale))


def test_the_generalized_entropy_is_of_the_largest_hundred() -> None:
    logits = 3 * draw(50, 130)
    density = GeneralizedEntropy()
    density.fit([], logits)
    p = logits.double().softmax(1).sort(1).values[:, -100:]
    np.testing.assert_allclose(density.score([], logits), (p**0.1 * (1 - p) ** 0.1).sum(1), rtol=1e-4)


def test_certain_probabilities_and_empty_features_have_finite_scores() -> None:
    density = GeneralizedEntropy()
    density.fit([], LOGITS)
    assert density.score([], torch.tensor([[200.0, 0.0, 0.0]])).item() < 1e-3
    for pruned in (PrunedEnergy(), ScaledEnergy()):
        pruned.fit(X, LOGITS, head=(WEIGHT, BIAS))
        np.testing.assert_allclose(pruned.score(torch.zeros(1, D)), -torch.logsumexp(BIAS, 0), rtol=1e-6)


# ---- on whole models
def net(outputs: int = C) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, outputs)).eval()


INPUTS = draw(120, 5, seed=8)


@pytest.mark.parametrize("name", HEADED)
def test_the_last_layer_is_found_by_what_it_does(name: str) -> None:
    class Heads(nn.Module):
        """A second head of the same size, registered and run last."""

        def __init__(self) -> None:
            super().__init__()
            self.body, self.main, self.other = net()[:2], nn.Linear(16, C, bias=False), nn.Linear(16, C)

        def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
            h = self.body(inputs)
            return self.main(h), self.other(h)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Heads().eval()
    wrapped: Any = neo.Wrapper(density=name, output={0: "logits"})(model).eval().fit(INPUTS)
    plain = neo.DENSITIES[name]()
    with torch.no_grad():
        h = model.body(INPUTS)
        plain.fit([INPUTS, h], model.main(h), head=(model.main.weight, torch.zeros(C)))
        torch.testing.assert_close(wrapped(INPUTS, return_risk=True)[1], plain.eval()([INPUTS, h]))


@pytest.mark.parametrize("name", HEADED)
def test_one_score_a_row_stands_against_a_score_of_zero(name: str) -> None:
    model = net(1)
    wrapped: Any = neo.Wrapper(density=name, output="binary")(model).eval().fit(INPUTS)
    plain = neo.DENSITIES[name]()
    with torch.no_grad():
        h, weight, bias = model[:2](INPUTS), torch.zeros(2, 16), torch.zeros(2)
        weight[1], bias[1] = model[2].weight[0], model[2].bias[0]
        plain.fit([INPUTS, h], h @ weight.T + bias, head=(weight, bias))
        torch.testing.assert_close(wrapped(INPUTS, return_risk=True)[1], plain.eval()([INPUTS, h]))


@pytest.mark.parametrize("name", HEADED)
def test_a_model_whose_last_layer_is_not_linear_is_refused_unchanged(name: str) -> None:
    model = nn.Sequential(net(), nn.Tanh())
    wrapped: Any = neo.Wrapper(density=name, output="logits")(model)
    before = copy.deepcopy(wrapped.state_dict())
    with pytest.raises(
        ValueError, match=r"no layer of the model computes the class scores from the input of 0\.2 \(16 features\)"
    ):
        wrapped.fit(INPUTS)
    after = wrapped.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items() if isinstance(value, Tensor))
    with pytest.raises(ValueError, match="its last name must be that layer"):
        neo.Wrapper(density=name, layers="0", output="logits")(net()).fit(INPUTS)
    with pytest.raises(ValueError, match="works on logits"):
        neo.Wrapper(density=name, output="probs")(nn.Sequential(net(), nn.Softmax(1)))


@pytest.mark.parametrize("name", [*HEADED, "nnguide"])
def test_positions_are_refused(name: str) -> None:
    maps = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, C, 1))
    with pytest.raises(ValueError, match="works on one vector per row before the last layer"):
        neo.Wrapper(density=name, output=Logits(dim=1))(maps)
    with pytest.raises(ValueError, match="per='image'"):
        neo.Wrapper(density=name, per="image")(maps)


@pytest.mark.parametrize("name", ["msp", "gen", "mahalanobis", "vim", "nnguide", "react"])
def test_regression_is_refused_by_name(name: str) -> None:
    model = net()
    wrapped: Any = neo.Wrapper(density=name)(model)
    kind = neo.DENSITIES[name].__name__
    with pytest.raises(
        ValueError, match=rf"density={kind} is to use class scores, but the targets are values of shape \[40, 3\]"
    ):
        wrapped.fit([(part, part[:, :3]) for part in INPUTS.split(40)])
    with pytest.raises(ValueError, match=rf"density={kind}.*no output \[rows, classes\]"):
        neo.Wrapper(density=name)(net(1)).fit(INPUTS)
    with pytest.raises(ValueError, match=f"{kind} works on class scores, and classes=False"):
        neo.Wrapper(density=name, classes=False)
    shares = [(part, part[:, :3].softmax(1)) for part in INPUTS.split(40)]
    assert neo.Wrapper(density=name)(model).fit(shares).eval()(INPUTS, return_risk=True)[1].isfinite().all()


def test_features_that_can_be_negative_are_refused_where_they_are_divided_by() -> None:
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, C))
    for name in ("ash", "scale"):
        with pytest.raises(ValueError, match="must not be negative, as after a ReLU; the smallest is -"):
            neo.Wrapper(density=name, output="logits")(model).fit(INPUTS)
    assert neo.Wrapper(density="react", output="logits")(model).fit(INPUTS)


@pytest.mark.parametrize("name", [*HEADED, "nnguide"])
def test_with_voters_the_risk_is_that_of_the_first_of_them(name: str) -> None:
    both: Any = vote.Wrapper(3)(neo.Wrapper(density=name, output="logits")(net())).eval().fit(INPUTS)
    plain: Any = neo.Wrapper(density=name, output="logits")(both.voters()[0]).eval().fit(INPUTS)
    risk = both(INPUTS, return_risk=True)[1]
    torch.testing.assert_close(risk.vacuitic, plain(INPUTS, return_risk=True)[1], rtol=1e-4, atol=1e-4)


def test_bad_settings_and_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="head must be the weight"):
        VirtualLogit().fit(X, LOGITS, head=(WEIGHT.T, BIAS))
    with pytest.raises(
        ValueError, match=r"VirtualLogit works with the weights of the last layer.*head=\(weight, bias\)"
    ):
        VirtualLogit().fit(X, LOGITS)
    with pytest.raises(ValueError, match="keeps 8 principal axes of 8 features"):
        VirtualLogit(n_components=8).fit(X, LOGITS, head=(WEIGHT, BIAS))
    for make, message in (
        (lambda: VirtualLogit(n_components=-1), "n_components must not be negative, got -1"),
        (lambda: GeneralizedEntropy(gamma=1), "gamma must lie strictly between 0 and 1, got 1"),
        (lambda: Mahalanobis(shrinkage=2), "shrinkage is a share between 0 and 1, got 2"),
        (lambda: ClippedEnergy(percentile=101), "percentile must be a number from 0 to 100, got 101"),
        (lambda: GuidedEnergy(k=0), "k, the number of neighbours, must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
