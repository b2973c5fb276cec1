"""The scale of priors chosen by training rows at the ends of a column."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import compose, fit, sculpt, vote
from workbench.training import prior_scale


def _net(columns: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(columns, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 1))


def _curve(bent: float) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = 4 * torch.rand(150, 1, generator=draw) - 2
    return x, x + bent * x**3 + 0.05 * torch.randn(150, 1, generator=draw)


def _scale(rows: Any, start: float = 100.0, **settings: Any) -> float:
    torch.manual_seed(0)
    return prior_scale(vote.Wrapper(5, prior=start), _net(rows[0].shape[1]), rows, epochs=40, **settings)


@pytest.mark.slow
def test_bands_at_ends_left_out_hold_as_many_rows_as_asked_and_a_straight_line_needs_less() -> None:
    x, y = _curve(bent=0.5)
    chosen = _scale((x, y))
    inside = (x >= x.quantile(0.15)) & (x <= x.quantile(0.85))
    torch.manual_seed(0)
    wrapped = vote.Wrapper(5, prior=chosen)(_net())
    fit(wrapped, (x[inside.flatten()], y[inside.flatten()]), epochs=40, progress=False)
    with torch.no_grad():
        said, risk = wrapped(x, return_risk=True)
    held = ((y - said).abs() <= 1.645 * (risk.square() + 0.05**2).sqrt())[~inside].float().mean()
    assert 0.75 <= held <= 1
    assert _scale(_curve(bent=0.0)) < 0.7 * chosen


def test_the_model_stays_as_it_is_and_columns_without_ends_are_left_alone() -> None:
    x, y = _curve(bent=0.5)
    net = _net()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    torch.manual_seed(0)
    alone = prior_scale(vote.Wrapper(2, prior=10), net, (x, y), epochs=2)
    assert type(net) is nn.Sequential
    assert all(torch.equal(net.state_dict()[key], value) for key, value in before.items())
    assert alone > 0
    with pytest.raises(ValueError, match="no column has rows at its ends"):
        _scale((torch.ones(20, 1), torch.randn(20, 1)))


@pytest.mark.parametrize("unit", [1e-15, 1e9])
def test_the_scale_does_not_depend_on_the_unit_of_the_targets(unit: float) -> None:
    x, y = _curve(bent=0.5)

    def scale(unit: float) -> float:
        return prior_scale(vote.Wrapper(2, prior=10), _net(), (x, y * unit), epochs=2)

    assert scale(unit) == pytest.approx(scale(1.0), rel=1e-3)


@pytest.mark.slow
def test_rows_in_another_precision_than_the_model_choose_about_the_same() -> None:
    x, y = _curve(bent=0.5)
    chosen = _scale((x, y))
    assert _scale((x.double(), y.double())) == pytest.approx(chosen, rel=1e-3)
    assert _scale((x.double().numpy(), y.numpy())) == pytest.approx(chosen, rel=1e-3)
    assert _scale((x, y), dtype=torch.float64) == pytest.approx(chosen, rel=0.1)


@pytest.mark.slow
def test_noise_is_that_of_risk_heads_where_there_are_some() -> None:
    x, y = _curve(bent=0.0)
    torch.manual_seed(0)
    wrapper = compose(vote.Wrapper(3, prior=50), sculpt.Wrapper())
    assert prior_scale(wrapper, _net(), (x, y), epochs=5) >= 0


def test_what_has_no_ends_or_no_prior_is_refused() -> None:
    x, y = _curve(bent=0.0)
    with pytest.raises(ValueError, match="no voters with a prior"):
        prior_scale(vote.Wrapper(2), _net(), (x, y))
    with pytest.raises(ValueError, match="table x"):
        prior_scale(vote.Wrapper(2, prior=1), _net(), (x, (y > 0).long()[:, 0]))
    with pytest.raises(ValueError, match=r"share must lie"):
        prior_scale(vote.Wrapper(2, prior=1), _net(), (x, y), share=0.6)
    with pytest.raises(ValueError, match=r"columns must be 1 or more; found 0.15, 0.9 and 0"):
        prior_scale(vote.Wrapper(2, prior=1), _net(), (x, y), columns=0)
