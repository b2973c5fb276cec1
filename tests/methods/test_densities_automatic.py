"""The automatic combination of scores: its components, its discriminator and its synthetic outliers."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from helpers.density_rows import draw
from torch import Tensor, nn

from workbench import metrics, neo
from workbench.methods.densities import Automatic, Signature
from workbench.methods.densities.discriminator import Discriminator
from workbench.methods.made_outliers import concatenate_by_kind, make_outliers
from workbench.outputs import Logits

X = draw(200, 5, seed=1)


def net(*last: nn.Module) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3), *last).eval()


def density(wrapped: Any) -> Automatic:
    return wrapped.get_submodule("extras@workbench").density


def softplus(x: Tensor) -> np.ndarray:
    return np.logaddexp(0, x.double().numpy())


@pytest.mark.slow
def test_the_score_is_made_of_what_each_says() -> None:
    wrapped: Any = neo.Wrapper(density="auto", output="logits")(net()).eval().fit(X)
    whole = density(wrapped)
    assert list(whole.parts) == ["energy", "react", "signature"]
    with torch.no_grad():
        h, y = net()[:2](X), net()(X)
        alone = Signature()
        alone.fit([X, h], y)
        torch.testing.assert_close(whole.parts["signature"]([X, h]), alone.eval()([X, h]), rtol=1e-4, atol=1e-4)
        parts: Any = whole.parts.values()
        energy, react, signature = (
            10 * np.arcsinh(part([X, h] if part.needs_features else [], y).double().numpy() / 10) for part in parts
        )
        mean, unit = (torch.cat([reduce.get_buffer(name) for reduce in alone.reductions]) for name in ("mean", "unit"))
        odds = whole.discriminator((torch.cat([X, h], 1) - mean) / unit)
        score = (
            (energy + react) / 2
            + softplus(torch.from_numpy(2 * (signature - 2.5))) / 2
            + softplus(odds - whole.quiet) / 2
        )
        risk = wrapped(X, return_risk=True)[1]
        expected = (score - whole.centre.item()) / whole.scale.item()
        np.testing.assert_allclose(risk, expected, rtol=1e-3, atol=1e-3)
        new = draw(1000, 5, seed=6)
        loud = whole.discriminator((torch.cat([new, net()[:2](new)], 1) - mean) / unit) > whole.quiet
    assert loud.double().mean().item() == pytest.approx(0.1, abs=0.06)


def test_the_discriminator_ranks_as_the_ratio_of_densities() -> None:
    """Of two Gaussians, one wider and off: log p(x | made up) - log p(x | usual) is known."""
    usual, strange = draw(4000, 2, seed=2), draw(4000, 2, seed=3) * 2 + torch.tensor([1.0, 0.0])
    discriminator = Discriminator()
    before = torch.get_rng_state()
    discriminator.fit(usual, [strange[:2000], strange[2000:]])
    assert torch.equal(torch.get_rng_state(), before)
    x = draw(500, 2, seed=4) * 1.5
    ratio = x.square().sum(1) / 2 - ((x - torch.tensor([1.0, 0.0])) / 2).square().sum(1) / 2 - 2 * np.log(2)
    log_odds = discriminator(x)
    assert np.corrcoef(log_odds.numpy(), ratio.numpy())[0, 1] > 0.9
    assert (log_odds - ratio)[x.norm(dim=1) < 2].abs().mean() < 0.3
    by_hand = 5 * torch.asinh((x - discriminator.mean) / discriminator.unit / 5)
    for i in (0, 1):
        hidden = [
            max(0.0, sum(float(w) * float(z) for w, z in zip(weights, by_hand[i], strict=True)) + float(bias))
            for weights, bias in zip(discriminator.inner_weight, discriminator.inner_bias, strict=True)
        ]
        odds = sum(float(w) * h for w, h in zip(discriminator.outer_weight[0], hidden, strict=True))
        assert float(log_odds[i]) == pytest.approx(odds + float(discriminator.outer_bias), abs=1e-4)


@pytest.mark.slow
def test_it_hears_what_the_class_scores_do_not() -> None:
    """Columns that depend on one another in training, drawn one by one: the energy alone can't tell."""
    x = draw(600, 5, seed=7)
    x[:, 1:] = x[:, :1] + 0.1 * x[:, 1:]
    apart = draw(200, 5, seed=8)
    risk = {}
    for name in ("auto", "energy"):
        wrapped: Any = neo.Wrapper(density=name, output="logits")(net()).eval().fit(x[:400])
        with torch.no_grad():
            risk[name] = metrics.auroc(wrapped(x[400:], return_risk=True)[1], wrapped(apart, return_risk=True)[1])
    assert risk["energy"] < 0.8 < 0.97 < risk["auto"]


@pytest.mark.slow
def test_a_head_that_is_not_linear_leaves_the_scores_that_need_none() -> None:
    wrapped: Any = neo.Wrapper(density="auto", output="logits")(net(nn.Tanh())).eval().fit(X)
    assert list(density(wrapped).parts) == ["energy", "signature"]
    other: Any = neo.Wrapper(density="auto", output="logits")(net(nn.Tanh())).eval()
    other.load_state_dict(wrapped.state_dict())
    for copied in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped)), other):
        assert torch.equal(copied(X, return_risk=True)[1], wrapped(X, return_risk=True)[1])


def test_without_outliers_it_is_the_mean_of_eight_scores() -> None:
    class Tokens(nn.Module):
        """Class scores of the mean embedding."""

        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(9, 5), net()

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.table(ids).mean(1))

    ids = torch.randint(9, (60, 4), generator=torch.Generator().manual_seed(0))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Tokens().eval()
    wrapped: Any = neo.Wrapper(density="auto", output="logits")(model).eval().fit(ids)
    whole = density(wrapped)
    assert not whole.discriminator.fitted
    assert list(whole.parts) == ["energy", "react", "signature", "knn", "relative", "vim", "fdbd", "scale"]
    with torch.no_grad():
        pooled = model.table(ids).mean(1)
        h, y = model.head[:2](pooled), model(ids)
        alone: Any = neo.DENSITIES["relative"]()
        alone.fit([h], y)
        torch.testing.assert_close(whole.parts["relative"]([h], y), alone.eval()([h], y), rtol=1e-3, atol=1e-3)
        risks = [part([pooled, h] if part.needs_features else [], y) for part in whole.parts.values()]
        score = sum(10 * torch.asinh(risk / 10) for risk in risks) / 8
        risk = wrapped(ids, return_risk=True)[1]
        torch.testing.assert_close(risk, (score - whole.centre) / whole.scale, rtol=1e-3, atol=1e-3)
    other: Any = neo.Wrapper(density="auto", output="logits")(copy.deepcopy(model)).eval()
    other.load_state_dict(wrapped.state_dict())
    assert torch.equal(other(ids, return_risk=True)[1], risk)
    few: Any = neo.Wrapper(density="auto", output="logits")(net()).eval().fit(X.split(4))
    assert not density(few).discriminator.fitted


def test_what_has_no_class_scores_of_rows_is_refused() -> None:
    for output in (None, "logits"):
        with pytest.raises(ValueError, match=r"density=Automatic.*no output \[rows, classes\]|one score per row"):
            neo.Wrapper(density="auto", output=output)(nn.Linear(5, 1)).fit(X)
    with pytest.raises(ValueError, match="Automatic works on logits"):
        neo.Wrapper(density="auto", output="probs")(net(nn.Softmax(1)))
    with pytest.raises(ValueError, match="Automatic works on one vector per row"):
        neo.Wrapper(density="auto", output=Logits(dim=1))(nn.Conv2d(1, 3, 1))


def test_made_inputs_are_means_of_two_rows_and_values_of_others() -> None:
    before = torch.get_rng_state()
    x, ids = draw(40, 3, 2), torch.arange(40)
    made = dict(make_outliers(((x,), {"ids": ids, "scale": torch.ones(3)}), 40, 0))
    assert list(made) == ["mixed", "extrapolated", "drawn", "noisy"]
    assert torch.equal(torch.get_rng_state(), before)
    for _, kwargs in made.values():
        assert torch.equal(kwargs["ids"], ids)
        assert torch.equal(kwargs["scale"], torch.ones(3))
    mixed, away, values, noisy = (args[0] for args, _ in made.values())
    pairs = (x[:, None] + x[None]) / 2
    assert all(any(torch.equal(row, pair) for pair in pairs[i]) for i, row in enumerate(mixed))
    torch.testing.assert_close((mixed + away) / 2, x)
    assert all(value in x[:, i, j] for i in range(3) for j in range(2) for value in values[:, i, j])
    assert not torch.equal(values, x)
    assert (noisy <= x.amax(0)).all()
    assert (noisy >= x.amin(0)).all()
    assert 0 < (noisy - x).abs().mean() < x.std()
    assert list(make_outliers((ids,), 40, 0)) == list(make_outliers((x[:7],), 7, 0)) == []
    parts = [([x[:2, 0]], x[:2, 1], "a"), ([x[2:4, 0]], x[2:4, 1], "b"), ([x[4:6, 0]], x[4:6, 1], "a")]
    first, second = concatenate_by_kind(parts)
    assert torch.equal(first[0][0], x[[0, 1, 4, 5], 0])
    assert torch.equal(second[1], x[2:4, 1])


def test_of_pictures_pieces_shapes_and_colours_are_changed() -> None:
    x = draw(16, 3, 12, 9, seed=5)
    made = {name: args[0] for name, (args, _) in make_outliers(((x,), {}), 16, 0)}
    assert len(made) == 20
    assert all(changed.shape == x.shape and changed.isfinite().all() for changed in made.values())
    assert all(not torch.equal(changed, x) for changed in made.values())
    for name in ("pieces", "shuffled", "upside down", "turned"):
        torch.testing.assert_close(made[name].flatten(2).sort(2).values, x.flatten(2).sort(2).values)
    low, high = x.min(), x.max()
    torch.testing.assert_close(made["inverted"], low + high - x)
    assert set(made["black and white"].unique().tolist()) == {low.item(), high.item()}
    assert torch.equal(made["colours"], x[:, [2, 0, 1]])
    torch.testing.assert_close(
        made["smooth"][3, 1, 5, 4], torch.stack([x[3, 1, i, j] for i in (4, 5, 6) for j in (3, 4, 5)]).mean()
    )
    for name, most in (("faded", 0.6), ("flat", 0.021)):
        spread = (made[name] - made[name].mean((2, 3), keepdim=True)).std((1, 2, 3)) / x.std((1, 2, 3))
        assert (spread < most + 0.02).all(), name
    collage = made["collage"]
    quarters = [(slice(6), slice(4)), (slice(6), slice(4, 9)), (slice(6, 12), slice(4)), (slice(6, 12), slice(4, 9))]
    sources = [
        [
            next(i for i in range(16) if torch.equal(collage[n][:, rows, columns], x[i][:, rows, columns]))
            for rows, columns in quarters
        ]
        for n in range(16)
    ]
    assert all(row[0] == row[3] == n for n, row in enumerate(sources))
    assert any(len(set(row)) == 3 for row in sources)
    window = made["window"]
    assert (window == low).all(1).float().mean((1, 2)).min() > 0.8
    small = made["shrunk"]
    torch.testing.assert_close(small[2, 0, 3, 2], x[2, 0, :2, :2].mean())
    grey = [name for name, _ in make_outliers((x[:, :1],), 16, 0)]
    assert "colours" not in grey
    assert len(grey) == 19
    assert len(list(make_outliers((x[..., :7],), 16, 0))) == 4
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert {args[0].dtype for _, args in make_outliers((x.to(dtype),), 16, 0)} == {dtype}


@pytest.mark.slow
def test_autocast_around_fit_changes_nothing() -> None:
    plain, cast = Automatic(), Automatic()
    plain.fit([X], X[:, :3], outliers=[([X + 3], X[:, :3])])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast.fit([X], X[:, :3], outliers=[([X + 3], X[:, :3])])
    assert torch.equal(plain.eval()([X], X[:, :3]), cast.eval()([X], X[:, :3]))
