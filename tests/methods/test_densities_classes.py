"""Densities that use classes, neighbours or class scores: compared with scikit-learn, scipy and the papers' formulas."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers.density_rows import correlated, draw, train
from scipy.linalg import eigh
from scipy.special import logsumexp
from scipy.stats import multivariate_normal
from sklearn.covariance import ledoit_wolf as sklearn_ledoit_wolf
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import NearestNeighbors
from torch import Tensor
from torch.nn import functional as F

from workbench.errors import NotFittedError
from workbench.methods.densities import (
    Classwise,
    Density,
    Energy,
    Gaussian,
    GeneralizedEntropy,
    GuidedEnergy,
    Mahalanobis,
    MaxLogit,
    MaxSoftmax,
    Neighbours,
    RelativeMahalanobis,
    Signature,
)
from workbench.methods.densities import (
    classes as last_layer,
)
from workbench.methods.densities.relative import Relative

MAKERS: dict[str, Callable[[], Density]] = {
    "signature": Signature,
    "classwise": Classwise,
    "knn": lambda: Neighbours(k=3),
    "energy": Energy,
    "max_logit": MaxLogit,
    "msp": MaxSoftmax,
    "gen": GeneralizedEntropy,
    "mahalanobis": Mahalanobis,
    "relative": RelativeMahalanobis,
    "nnguide": GuidedEnergy,
}
every = pytest.mark.parametrize("name", MAKERS)


def clusters(n: int, seed: int = 0, d: int = 6) -> tuple[list[Tensor], Tensor, Tensor]:
    """Two layers of features around four centres, class scores that know the centre, and the centre."""
    groups = torch.arange(n) % 4
    centres = 6 * draw(4, d, seed=5)
    x = centres[groups] + draw(n, d, seed=seed) @ draw(d, d, seed=6)
    logits = 8 * F.one_hot(groups, 4) + draw(n, 4, seed=seed + 50)
    return [wide(x, seed), x], logits, groups


def wide(x: Tensor, seed: int) -> Tensor:
    """A layer of 80 noisy units."""
    return x @ draw(x.shape[1], 80, seed=7) / 5 + draw(len(x), 80, seed=seed + 70)


def learned(name: str, n: int = 400) -> Density:
    density = MAKERS[name]()
    layers, logits, _ = clusters(n)
    density.fit(layers if density.needs_features else [], logits)
    return density.eval()


def risk(density: Density, rows: tuple[list[Tensor], Tensor, Tensor]) -> Tensor:
    return density(rows[0] if density.needs_features else [], rows[1]).detach()


# ---- each against an independent computation -------------------------------------------------------------------------
def test_relative_scores_are_differences_of_two_mahalanobis_distances() -> None:
    (wide, x), _, groups = clusters(500)
    relative = Relative().double()
    relative.fit([wide.double(), x.double()], groups)
    fresh = clusters(60, seed=3)[0]
    for scores, rows, new in zip(relative([v.double() for v in fresh]), [wide, x], fresh, strict=True):
        data, labels = rows.double().numpy(), groups.numpy()
        z = (data - data.mean(0)) / data.std(0)
        v = (new.double().numpy() - data.mean(0)) / data.std(0)
        means = np.stack([z[labels == c].mean(0) for c in range(4)])
        within = (z - means[labels]).T @ (z - means[labels]) / len(z)
        within += 1e-4 * (np.diag(np.diag(within)) - within) + 1e-6 * np.eye(len(within))
        between = means.T @ means / 4
        near = min_distance(v, means, np.linalg.inv(within))
        overall = np.einsum("ij,jk,ik->i", v, np.linalg.inv(within + between), v)
        np.testing.assert_allclose(scores, near - overall, rtol=1e-6, atol=1e-6)


def min_distance(v: np.ndarray, means: np.ndarray, precision: np.ndarray) -> np.ndarray:
    away = v[:, None] - means
    return np.einsum("icj,jk,ick->ic", away, precision, away).min(1)


def test_relative_directions_are_those_of_discriminant_analysis() -> None:
    (_, x), _, groups = clusters(500)
    relative = Relative()
    relative.fit([x], groups)
    theirs = LinearDiscriminantAnalysis(solver="svd").fit(x, groups).scalings_[:, :3]
    angles = np.linalg.svd(np.linalg.qr(theirs)[0].T @ np.linalg.qr(relative.directions.numpy())[0])[1]
    np.testing.assert_allclose(angles, 1, atol=1e-3)


def test_classwise_is_a_mixture_of_gaussians() -> None:
    (_, x), logits, groups = clusters(400)
    density = Classwise()
    density.fit([x], logits)
    data = ((x - x.mean(0)) / x.std(0, correction=0)).double().numpy()
    fresh = clusters(50, seed=2)[0][1]
    new = ((fresh - x.mean(0)) / x.std(0, correction=0)).double().numpy()
    logs = []
    for c in range(4):
        rows = data[groups.numpy() == c]
        sd = rows.std(0)
        covariance = sklearn_ledoit_wolf((rows - rows.mean(0)) / sd)[0] * np.outer(sd, sd)
        logs.append(np.log(len(rows) / len(data)) + multivariate_normal(rows.mean(0), covariance).logpdf(new))
    np.testing.assert_allclose(density.score([fresh]), -logsumexp(logs, axis=0), rtol=1e-3)


def test_labels_decide_where_they_are_given() -> None:
    layers, logits, groups = clusters(400)
    by_label, by_guess, wrong = Classwise(), Classwise(), Classwise()
    by_label.fit(layers, logits.roll(1, 1), labels=groups)
    by_guess.fit(layers, logits)
    wrong.fit(layers, draw(400, 4, seed=8))
    fresh = clusters(50, seed=2)[0]
    torch.testing.assert_close(by_label.score(fresh), by_guess.score(fresh))
    assert wrong.score(fresh).mean() > by_guess.score(fresh).mean() + 2
    alone = Classwise()
    alone.fit(layers, labels=groups)
    torch.testing.assert_close(alone.score(fresh), by_guess.score(fresh))


@pytest.mark.parametrize(("n", "k"), [(300, 7), (4, 50)])
def test_neighbours_are_those_of_sklearn(n: int, k: int) -> None:
    x, fresh = correlated(n), correlated(40, seed=1)
    density = Neighbours(k=k)
    density.fit(x)
    theirs = NearestNeighbors(n_neighbors=min(k, n)).fit(F.normalize(x)).kneighbors(F.normalize(fresh))[0][:, -1]
    np.testing.assert_allclose(density.score(fresh), theirs, atol=2e-3)


def test_a_bank_of_neighbours_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_layer, "MAX_NEIGHBOURS", 100)
    density = Neighbours()
    density.fit(draw(250, 2))
    assert 80 <= len(density.get_buffer("bank")) <= 100


def test_scores_of_outputs_are_those_of_the_papers() -> None:
    logits = 5 * draw(100, 4)
    energy, largest = Energy(), MaxLogit()
    energy.fit([], logits)
    largest.fit([], logits)
    np.testing.assert_allclose(energy.score([], logits), -logsumexp(logits, axis=1), rtol=1e-5)
    assert torch.equal(largest.score([], logits), -logits.max(1).values)


def test_the_signature_is_the_sum_of_its_parts_in_units_of_held_out_rows() -> None:
    density = learned("signature", 3000)
    assert isinstance(density, Signature)
    rows = clusters(4000, seed=9)
    relative = density.relative(rows[0])
    joint = Gaussian()
    joint.fit(clusters(3000)[0])
    joint_part = density.weights[0] * joint.score(rows[0]).detach()
    class_part = density.weights[1:] @ relative
    assert len(density.weights) == 3
    torch.testing.assert_close(density.score(rows[0]).detach(), joint_part + class_part)
    for part in (joint_part, class_part):  # each has a standard deviation of 1 on new rows
        assert part.std().item() == pytest.approx(1, abs=0.15)


def test_without_classes_the_signature_is_the_gaussian() -> None:
    layers, logits, _ = clusters(200)
    plain, none, one = Gaussian(), Signature(), Signature()
    plain.fit(layers)
    none.fit(layers)
    one.fit(layers, F.pad(logits[:, :1].abs() + 1, (0, 1)))  # one class is predicted for all
    fresh = clusters(30, seed=4)[0]
    torch.testing.assert_close(none(fresh), plain(fresh))
    torch.testing.assert_close(one(fresh), plain(fresh))


def test_between_classes_and_off_the_data_are_both_found() -> None:
    density = learned("signature")
    layers, _, groups = clusters(400)
    x = layers[1]
    middle = (x[groups == 0][:90] + x[groups == 1][:90]) / 2
    off = x[:90] + 4 * draw(90, 6, seed=3)
    usual = risk(density, clusters(400, seed=7))
    for strange in (middle, off):
        rows = [wide(strange, 11), strange]
        truth = [0] * 400 + [1] * 90
        assert roc_auc_score(truth, torch.cat([usual, density(rows).detach()])) > 0.97


# ---- what all have in common -----------------------------------------------------------------------------------------
@every
@pytest.mark.parametrize("n", [400, 3000])
def test_new_rows_have_mean_0_and_standard_deviation_1(name: str, n: int) -> None:
    risks = risk(learned(name, n), clusters(4000, seed=9))
    assert risks.mean().item() == pytest.approx(0, abs=0.35)
    assert risks.std().item() == pytest.approx(1, abs=0.35)


@every
@pytest.mark.parametrize("fit", [False, True])
def test_a_loaded_density_scores_as_the_saved_one(name: str, fit: bool) -> None:
    density = learned(name) if fit else MAKERS[name]()
    file = io.BytesIO()
    torch.save(density.state_dict(), file)
    file.seek(0)
    loaded = MAKERS[name]()
    loaded.load_state_dict(torch.load(file, weights_only=True))
    again = learned(name, 80)
    again.forget()
    assert not again.fitted
    again.load_state_dict(density.state_dict())
    for other in (loaded, again, copy.deepcopy(density), pickle.loads(pickle.dumps(density))):
        assert other.fitted == fit
        if fit:
            assert torch.equal(risk(other.eval(), clusters(20, seed=9)), risk(density, clusters(20, seed=9)))


@every
def test_rows_that_are_not_finite_have_no_risk(name: str) -> None:
    density = learned(name)
    layers, logits, _ = clusters(20)
    clean = risk(density, clusters(20))
    layers[1][3, 0] = torch.nan
    logits[3, 0] = torch.nan
    risks = risk(density, (layers, logits, logits))
    assert risks.isnan().nonzero()[:, 0].tolist() == [3]
    torch.testing.assert_close(risks[risks.isfinite()], clean[risks.isfinite()])


@every
def test_random_state_and_inputs_are_left_alone(name: str) -> None:
    before = torch.get_rng_state()
    layers, logits, _ = clusters(100)
    copies = [v.clone() for v in (*layers, logits)]
    density = learned(name)
    density.fit(layers if density.needs_features else [], logits)
    risk(density.train(), (layers, logits, logits))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(copies, (*layers, logits), strict=True))


@pytest.mark.parametrize("name", ["classwise", "knn", "energy", "max_logit"])
def test_what_has_no_likelihood_says_that_it_cannot_be_trained(name: str) -> None:
    density = MAKERS[name]()
    layers, logits, _ = clusters(100)
    features = layers if density.needs_features else []
    for training in (True, False):
        with pytest.raises(NotFittedError, match=r"wrapped\.fit\(loader\).*the default, gaussian and flow can"):
            density.train(training)(features, logits)
    density.fit(features, logits)
    loss = density.train()(features, logits).mean()
    with pytest.raises(RuntimeError, match=r"nothing to train by gradient: leave its risk out of the loss"):
        loss.backward()
    with torch.no_grad():
        assert not density(features, logits).requires_grad
    assert not density.eval()(features, logits).requires_grad


def test_the_signature_is_trained_as_a_likelihood_before_and_after_fit() -> None:
    layers, logits, _ = clusters(300)
    density = Signature()
    train(density, [[v[:100] for v in layers]] + [layers] * 150, lr=1e-2)
    closed = Gaussian()
    closed.fit(layers)
    start = Gaussian()
    start([v[:100] for v in layers])
    reached = (density.nll(layers) - start.nll(layers)).mean()
    assert reached < 0.5 * (closed.nll(layers) - start.nll(layers)).mean() < 0
    density.fit(layers, logits)  # what was trained starts anew, in closed form
    before = density.eval()(layers).detach()
    density.train()
    losses = []
    optimizer = torch.optim.Adam(density.parameters(), lr=1e-3)
    for _ in range(30):
        optimizer.zero_grad()
        loss = density(layers).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(before.mean().item(), abs=1e-4)
    assert losses[0] > losses[-1] > losses[0] - 1  # bounded below: the log determinant keeps it from collapsing
    assert (density.eval()([v + 9 for v in layers]) > before.max()).all()


def test_bad_rows_are_refused() -> None:
    layers, logits, groups = clusters(50)
    with pytest.raises(ValueError, match=r"Classwise works on class scores.*output=\"logits\""):
        Classwise().fit(layers)
    with pytest.raises(ValueError, match="Energy works on class scores"):
        Energy().fit(layers)
    with pytest.raises(ValueError, match=r"logits must be \[rows, classes\] with the 50 rows.*\[49, 4\]"):
        Signature().fit(layers, logits[1:])
    with pytest.raises(ValueError, match=r"at least 2 classes, got shape \[50, 1\]"):
        Signature().fit(layers, logits[:, :1])
    with pytest.raises(TypeError, match=r"logits must be a floating-point tensor, got torch\.int64"):
        Energy().fit([], logits.long())
    with pytest.raises(ValueError, match="class numbers from 0 to 3, got 1 to 4"):
        Classwise().fit(layers, logits, labels=groups + 1)
    for labels in (groups.float(), groups + 0j):
        with pytest.raises(ValueError, match=r"labels must be whole numbers \[50\]"):
            Classwise().fit(layers, logits, labels=labels)
    with pytest.raises(ValueError, match="a class with at least 2 rows, got 3 classes in 3 rows"):
        Classwise().fit([v[:4] for v in layers], logits[:4])
    with pytest.raises(ValueError, match="k, the number of neighbours, must be at least 1, got 0"):
        Neighbours(k=0)
    energy = learned("energy")
    with pytest.raises(ValueError, match="logits of size 3, but Energy was fitted on size 4"):
        energy([], logits[:, :3])
    knn = learned("knn")
    with pytest.raises(ValueError, match="last features of size 80, but Neighbours was fitted on size 6"):
        knn(layers[:1])


@pytest.mark.parametrize(("n", "d", "classes"), [(59, 60, 3), (30, 500, 4), (20, 100, 20)])
def test_fewer_rows_than_features_give_the_discriminant_directions_of_all_features(
    n: int, d: int, classes: int
) -> None:
    groups = torch.arange(n) % classes
    x = draw(n, d, seed=1) * torch.linspace(0, 3, d) + 2 * draw(classes, d, seed=2)[groups]
    by_rows = Relative()
    by_rows.fit([x], groups)
    z, shares = x.double().numpy(), np.bincount(groups) / n
    unit = np.maximum(z.std(0), 1e-3 * z.std(0).max())
    unit = np.where(z.std(0) > 0, unit, z.std(0).max())
    z = (z - z.mean(0)) / unit
    means = np.stack([z[groups.numpy() == c].mean(0) for c in range(classes)])
    within = z - means[groups.numpy()]
    covariance = within.T @ within / n
    ridge = 1e-4 * np.maximum(covariance.diagonal(), 1e-3) + 1e-6
    covariance = (1 - 1e-4) * covariance + np.diag(ridge)
    powers, axes = eigh((means.T * shares) @ means, covariance)
    powers, axes = powers[1 - classes :], axes[:, 1 - classes :]
    u, centres = z @ axes, means @ axes
    expected = ((u[:, None] - centres) ** 2).sum(2).min(1) - (u**2 / (1 + powers)).sum(1)
    np.testing.assert_allclose(by_rows([x])[0].numpy(), expected, rtol=1e-3, atol=1e-5 * (u**2).sum(1).max())
