"""Degrees of freedom of Student's t: fixed, per element, fitted, and learned with a wrapped model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import torch
from torch import Tensor, nn

from workbench import compose, fit, load, save, sculpt, vote
from workbench.distributions import Normal, StudentT


def triple(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Targets, locations and risks [n, 1], float64."""
    y, loc, risk = torch.rand(3, n, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4 + 0.1
    return y, loc, risk


def test_many_degrees_of_freedom_are_a_normal_and_learned_ones_have_gradients() -> None:
    y, loc, risk = triple(200)
    torch.testing.assert_close(
        StudentT(df=1e7).log_prob(y, loc, risk), Normal.log_prob(y, loc, risk), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        StudentT(df=1e5).log_prob(*(t.float() for t in (y, loc, risk))).double(),
        StudentT(df=1e5).log_prob(y, loc, risk),
        rtol=1e-4,
        atol=1e-4,
    )
    df = torch.nn.Parameter(torch.tensor(6.0, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda df: StudentT(df).loss_function(y, loc, risk), (df,))
    draw = StudentT(df).sample((loc, risk), generator=torch.Generator().manual_seed(0))
    assert torch.autograd.grad(draw.sum(), df)[0].isfinite()
    residuals = torch.as_tensor(scipy.stats.t(4.0).rvs(20_000, random_state=0)).unsqueeze(-1)
    fitted = StudentT.fit(residuals, torch.zeros_like(residuals), torch.full_like(residuals, 2**0.5))
    assert float(fitted.df) == pytest.approx(4.0, rel=0.1)
    for bad in (2.0, torch.tensor([3.0, 1.0])):
        with pytest.raises(ValueError, match="df must be"):
            StudentT(bad)


def test_each_element_can_have_degrees_of_freedom_of_its_own() -> None:
    y, loc, risk = triple(3)
    df = torch.tensor([[2.5], [4.0], [50.0]], dtype=torch.float64)
    each = StudentT(df)
    for method in ("log_prob", "cdf", "crps"):
        values = getattr(each, method)(y, loc, risk)
        expected = [getattr(StudentT(df[i].item()), method)(y[i], loc[i], risk[i]) for i in range(3)]
        torch.testing.assert_close(values, torch.stack(expected))
    expected = [StudentT(df[i].item()).icdf(0.1, loc[i], risk[i]) for i in range(3)]
    torch.testing.assert_close(each.icdf(0.1, loc, risk), torch.stack(expected))
    with pytest.raises(ValueError, match=r"df has shape \(3,\) but y_pred has shape \(3, 1\)"):
        StudentT(df[:, 0]).log_prob(y, loc, risk)


def wrap(df: Any) -> Any:
    torch.manual_seed(0)
    return compose(vote.Wrapper(2), sculpt.Wrapper(StudentT(df)))(nn.Linear(1, 1))


X = torch.linspace(-1, 1, 800)[:, None]
Y = 2 * X + torch.as_tensor(scipy.stats.t(3.0).rvs((800, 1), random_state=0)).float()


def df_of(wrapped: Any) -> Any:
    return wrapped._workbench.methods[-1].distribution.df


@pytest.mark.slow
def test_a_parameter_is_learned_with_the_model_that_it_is_given_to() -> None:
    torch.manual_seed(0)
    df = nn.Parameter(torch.tensor(10.0))
    wrapped = sculpt.Wrapper(StudentT(df))(nn.Linear(1, 1))
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.1)
    for _ in range(400):
        optimizer.zero_grad()
        wrapped.loss(lambda prediction, target: 0 * prediction.sum(), X, Y).backward()
        optimizer.step()
    assert dict(wrapped.named_risk_parameters())["extras@workbench.noise.df"] is df
    loc, risk = (t.detach().double().numpy() for t in wrapped(X, return_risk=True))

    def loss(value: float) -> float:
        return -scipy.stats.t(value, loc, risk * np.sqrt((value - 2) / value)).logpdf(Y.numpy()).mean()

    assert df.item() == pytest.approx(scipy.optimize.minimize_scalar(loss, bounds=(2.1, 20)).x, rel=0.05)


@pytest.mark.parametrize(
    "how",
    [copy.copy, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_copies_learn_their_own(how: Callable[[Any], Any]) -> None:
    wrapped = wrap(nn.Parameter(torch.tensor(10.0)))
    other = how(wrapped)
    other(X)
    wrapped(X)
    for model in (wrapped, other):
        assert dict(model.named_parameters())["extras@workbench.noise.df"] is df_of(model)
    assert (df_of(other) is df_of(wrapped)) == (how is copy.copy)


def test_it_is_trained_by_fit_saved_and_loaded(tmp_path: Any) -> None:
    wrapped = wrap(nn.Parameter(torch.tensor(10.0)))
    fit(wrapped, (X, Y), epochs=5, progress=False)
    learned = df_of(wrapped).item()
    assert 2 < learned < 10
    save(wrapped, tmp_path / "model.safetensors")
    again = load(tmp_path / "model.safetensors", nn.Linear(1, 1))
    assert isinstance(df_of(again), nn.Parameter)
    other = wrap(nn.Parameter(torch.tensor(3.0)))
    other.load_state_dict(wrapped.state_dict())
    assert df_of(again).item() == df_of(other).item() == learned
