"""The exact mixture of predictive distributions: compared with torch's own and with its definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from workbench import compose, sample, sculpt, vote
from workbench.distributions import Cauchy, Laplace, LogNormal, Normal, StudentT
from workbench.distributions.base import Distribution
from workbench.distributions.joint import JointNormal
from workbench.distributions.mixture import Mixture

FAMILIES = [Normal(), Laplace(), StudentT(4.0), Cauchy(), LogNormal()]


def parts(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    loc = torch.rand(3, 5, 2, generator=generator, dtype=dtype) * 4 + 1
    return loc, torch.rand(3, 5, 2, generator=generator, dtype=dtype) + 0.2, torch.tensor([0.5, 0.3, 0.2], dtype=dtype)


def test_a_mixture_of_normals_is_that_of_torch() -> None:
    loc, risk, weights = parts()
    ours = Mixture(Normal(), loc, risk, weights)
    theirs = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(weights.expand(5, 2, 3)),
        torch.distributions.Normal(loc.movedim(0, -1), risk.movedim(0, -1)),
    )
    y = torch.linspace(-3, 8, 10, dtype=torch.float64).reshape(5, 2)
    torch.testing.assert_close(ours.log_prob(y), theirs.log_prob(y))
    torch.testing.assert_close(ours.cdf(y), theirs.cdf(y))
    torch.testing.assert_close(ours.mean, theirs.mean)
    torch.testing.assert_close(ours.stddev, theirs.stddev)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: type(family).__name__)
def test_quantiles_turn_the_distribution_round(family: Distribution) -> None:
    mixture = Mixture(family, *parts())
    for q in (0.001, 0.3, 0.5, 0.99):
        torch.testing.assert_close(
            mixture.cdf(mixture.icdf(q)), torch.full((5, 2), q, dtype=torch.float64), atol=1e-9, rtol=1e-9
        )


def test_one_member_is_its_family() -> None:
    loc, risk, _ = parts()
    mixture = Mixture(Laplace(), loc[:1], risk[:1], torch.ones(1))
    torch.testing.assert_close(mixture.log_prob(loc[1]), Laplace.log_prob(loc[1], loc[0], risk[0]))
    torch.testing.assert_close(mixture.icdf(0.2), Laplace.icdf(0.2, loc[0], risk[0]))
    for level in (0.2, 1e-9, 1 - 1e-9):  # of which float32 has not all
        exact = torch.tensor(level, dtype=torch.float64)
        expected = Laplace.icdf(exact, loc[0], risk[0])
        torch.testing.assert_close(mixture.icdf(level), expected, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(mixture.icdf(exact), expected, atol=1e-12, rtol=1e-12)


def test_draws_follow_it() -> None:
    mixture = Mixture(Normal(), *parts())
    draws = mixture.sample((20_000,), torch.Generator().manual_seed(0))
    assert draws.shape == (20_000, 5, 2)
    for y in (mixture.icdf(0.1), mixture.icdf(0.7)):
        torch.testing.assert_close((draws <= y).double().mean(0), mixture.cdf(y), atol=0.015, rtol=0)


def test_it_is_a_distribution_of_torch() -> None:
    loc, risk, weights = parts()
    mixture = Mixture(Normal(), loc, risk, weights)
    theirs = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(weights.expand(5, 2, 3)),
        torch.distributions.Normal(loc.movedim(0, -1), risk.movedim(0, -1)),
    )
    assert isinstance(mixture, torch.distributions.Distribution)
    assert (mixture.batch_shape, mixture.event_shape) == (theirs.batch_shape, theirs.event_shape)
    torch.testing.assert_close(mixture.variance, theirs.variance)
    y = torch.linspace(-3, 8, 60, dtype=torch.float64).reshape(6, 5, 2)
    torch.testing.assert_close(mixture.log_prob(y), theirs.log_prob(y))
    torch.testing.assert_close(mixture.cdf(y), theirs.cdf(y))
    assert not mixture.has_rsample
    with pytest.raises(NotImplementedError):
        mixture.rsample((2,))
    assert mixture.support is torch.distributions.constraints.real
    assert Mixture(LogNormal(), loc, risk, weights).support is torch.distributions.constraints.positive
    assert repr(mixture) == "Mixture(Normal(beta=0.0), 3 members, batch_shape=(5, 2))"


@pytest.mark.parametrize("shape", [(), (3,), (2, 4)])
def test_draws_have_the_shape_asked_for_and_no_gradient(shape: tuple[int, ...]) -> None:
    loc, risk, weights = parts()
    draws = Mixture(Normal(), loc.requires_grad_(), risk, weights).sample(shape)
    assert draws.shape == (*shape, 5, 2)
    assert not draws.requires_grad


def test_levels_and_batches_broadcast() -> None:
    mixture = Mixture(Normal(), *parts())
    levels = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    quantiles = mixture.icdf(levels[:, None, None])
    assert quantiles.shape == (3, 5, 2)
    for level, quantile in zip(levels, quantiles, strict=True):
        torch.testing.assert_close(quantile, mixture.icdf(float(level)))
    larger = mixture.expand((4, 5, 2))
    assert larger.batch_shape == (4, 5, 2)
    for batch in larger.mean:
        torch.testing.assert_close(batch, mixture.mean)
    torch.testing.assert_close(larger.icdf(0.3)[2], mixture.icdf(0.3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_neither_weights_nor_levels(dtype: torch.dtype) -> None:
    alike = Mixture(
        Normal(), torch.full((3, 1), 100.0, dtype=dtype), torch.ones(3, 1, dtype=dtype), torch.full((3,), 1 / 3)
    )
    one = torch.distributions.Normal(torch.tensor([100.0]), 1.0)
    assert alike.cdf(torch.tensor([150.0])) <= 1
    torch.testing.assert_close(alike.mean, one.mean)
    torch.testing.assert_close(alike.variance, one.variance)
    for level in (0.975, 0.9999):
        torch.testing.assert_close(alike.icdf(level), one.icdf(torch.tensor(level)))


@pytest.mark.parametrize(("loc", "risk"), [(1.7e9, 1.7), (1e30, 1e21), (1e-30, 1e-32)])
def test_members_that_agree_far_from_one_have_no_spread(loc: float, risk: float) -> None:
    alike = Mixture(Normal(), torch.full((7, 1), loc), torch.full((7, 1), risk), torch.full((7,), 1 / 7))
    torch.testing.assert_close(alike.mean, torch.tensor([loc]), rtol=0, atol=0)
    torch.testing.assert_close(alike.stddev, torch.tensor([risk]), rtol=1e-6, atol=0)
    joint = Mixture(JointNormal(1), torch.full((7, 1, 1), 1.7e9), torch.zeros(1, 7, 1, 1), torch.full((7,), 1 / 7))
    torch.testing.assert_close(joint.covariance_matrix, torch.ones(1, 1, 1))


def test_quantiles_of_members_of_very_different_risks() -> None:
    wide = Mixture(Normal(), torch.zeros(2, 1), torch.tensor([[1e9], [1.0]]), torch.tensor([0.5, 0.5]))
    # half of the wide member and the share 0.1 of the narrow one lie below
    torch.testing.assert_close(wide.icdf(0.3), torch.tensor([-1.2815515]))


def test_a_level_near_one_is_not_rounded_to_float32() -> None:
    level, risk = 1 - 1e-9, torch.tensor([[1.0], [1.0]])
    mixture = Mixture(Normal(), 0 * risk, risk, torch.tensor([0.5, 0.5]))
    torch.testing.assert_close(mixture.icdf(level), torch.tensor([5.9978070]))


def test_a_number_of_draws_is_deprecated() -> None:
    mixture = Mixture(Normal(), *parts())
    expected = mixture.sample((7,), torch.Generator().manual_seed(0))
    with pytest.warns(DeprecationWarning, match=r"sample\(\(7,\)\)"):
        draws = mixture.sample(7, torch.Generator().manual_seed(0))
    assert torch.equal(draws, expected)


def test_bad_input() -> None:
    loc, risk, weights = parts()
    with pytest.raises(ValueError, match=r"3 numbers >= 0 that sum to one, found .* that sum to 2"):
        Mixture(Normal(), loc, risk, 2 * weights)
    with pytest.raises(ValueError, match=r"y has shape \(5,\)"):
        Mixture(Normal(), loc, risk, weights).log_prob(torch.zeros(5))
    with pytest.raises(ValueError, match="above 0 and below 1; found 1"):
        Mixture(Normal(), loc, risk, weights).icdf(1)
    with pytest.raises(ValueError, match=r"found 0\.0, rounded to torch\.float64"):
        Mixture(Normal(), loc.float(), risk.float(), weights).icdf(1e-400)


def test_of_a_wrapped_model() -> None:
    """Voters, samples and risk heads: the mean and the total risk that the model itself says."""
    model = compose(vote.Wrapper(3), sample.Wrapper(2, where="weights"), sculpt.Wrapper(n_layers=1))(
        torch.nn.Linear(2, 1)
    ).eval()
    x = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    with torch.random.fork_rng():
        torch.manual_seed(3)
        y, risk = model(x, return_risk=True)
        torch.manual_seed(3)
        predictive = model.predictive(x)
    assert predictive.loc.shape == (6, 4, 1)
    torch.testing.assert_close(predictive.mean, y)
    torch.testing.assert_close(predictive.stddev, risk.total)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (vote.Wrapper(2)(torch.nn.Linear(2, 1)), "compose with sculpt.Wrapper"),
        (
            vote.Wrapper(2, output="logits")(torch.nn.Linear(2, 3)),
            "class probabilities, which are the predictive distribution",
        ),
        (sculpt.Wrapper(sculpt.NormalInverseGamma)(torch.nn.Linear(2, 1)), "no member predicts a distribution"),
        (sculpt.Wrapper(sculpt.Quantiles)(torch.nn.Linear(2, 1)), r"those of Quantiles.*wrapped.quantiles\(x\)"),
    ],
)
def test_models_without_a_distribution(model: torch.nn.Module, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        model.predictive(torch.zeros(3, 2))


@pytest.mark.parametrize("family", [Normal(), JointNormal(3)])
def test_paths_have_the_covariance_of_the_members(family: Distribution) -> None:
    generator = torch.Generator().manual_seed(0)
    loc = torch.randn(4, 2, 3, generator=generator, dtype=torch.float64)  # members, rows, steps
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    heads = () if isinstance(family, Normal) else (3,)
    risk = torch.randn(*heads, 4, 2, 3, generator=generator, dtype=torch.float64)
    risk = risk if heads else risk.abs() + 0.1
    mixture = Mixture(family, loc, risk, weights)
    paths = mixture.sample_paths((60_000,), generator)
    assert paths.shape == (60_000, 2, 3)
    for row in range(2):
        mean = sum(float(w) * loc[m, row] for m, w in enumerate(weights))
        expected = torch.zeros(3, 3, dtype=torch.float64)
        for m, w in enumerate(weights):
            apart = loc[m, row] - mean
            inside = (
                family.covariance(loc[m, row], risk[:, m, row])
                if isinstance(family, JointNormal)
                else risk[m, row].square().diag()
            )
            expected += w * (inside + apart[:, None] * apart)
        assert torch.allclose(paths[:, row].T.cov(), expected, rtol=0.03, atol=0.03)
        assert torch.allclose(paths[:, row].mean(0), mean, atol=0.03)
    # rows are forecasts by themselves: what members speak for one says nothing of the other
    assert float(torch.corrcoef(torch.stack([paths[:, 0, 0], paths[:, 1, 0]]))[0, 1]) == pytest.approx(0, abs=0.02)


def test_steps_drawn_by_themselves_lose_what_members_agree_on() -> None:
    loc = torch.tensor([-5.0, 5.0])[:, None, None].expand(2, 1, 4)
    mixture = Mixture(Normal(), loc, torch.full((2, 1, 4), 0.1), torch.tensor([0.5, 0.5]))
    torch.manual_seed(0)
    assert mixture.sample((400,)).sign().diff(dim=-1).any()
    assert not mixture.sample_paths((400,)).sign().diff(dim=-1).any()
    assert mixture.sample_paths().shape == (1, 4)
