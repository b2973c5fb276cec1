"""Voters with risk heads on class scores, whose probabilities under the noise are those that calibration is fitted to and answers with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import compose, neo, sculpt, vote
from workbench.calibration import calibrate, selective
from workbench.calibration.scaling import fit_temperature


@pytest.fixture(params=["vote", "vote and neo"])
def noisy(request: pytest.FixtureRequest) -> Any:
    """Two voters whose noise, other for each class, changes probabilities and some of the chosen classes."""
    others = [neo.Wrapper()] * ("neo" in request.param)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        wrapped = compose(vote.Wrapper(2), sculpt.Wrapper(n_layers=1), *others, output="logits")(nn.Linear(3, 3))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if name.startswith("bias") and "sculpt" in name:
                parameter.add_(torch.tensor([0.0, 3.0, 9.0]))
            elif "sculpt" not in name:
                parameter.mul_(4)
    wrapped.eval()
    return wrapped.fit([torch.randn(99, 3)]) if others else wrapped


@pytest.fixture
def rows() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(400, 3, generator=draw), torch.randint(3, (400,), generator=draw)


def test_asking_for_risk_changes_the_prediction(noisy: Any, rows: Any) -> None:
    with torch.no_grad():
        differ = noisy(rows[0]).argmax(-1) != noisy(rows[0], return_risk=True)[0].argmax(-1)
    assert 20 < int(differ.sum()) < 380


def test_a_temperature_is_that_of_the_scores_that_it_divides(noisy: Any, rows: Any) -> None:
    x, labels = rows
    calibrated = calibrate(noisy, rows)
    with torch.no_grad():
        scores = noisy(x, return_risk=True)[0]
        y, _ = calibrated(x, return_risk=True)
        torch.testing.assert_close(calibrated(x), y)
    torch.testing.assert_close(y, scores / fit_temperature(scores, labels))
    assert torch.equal(calibrated.predict_set(x, coverage=0.01).int().argmax(-1), y.argmax(-1))


def test_conformal_sets_are_those_of_the_answers(noisy: Any, rows: Any) -> None:
    x, labels = rows
    calibrated = calibrate(noisy, rows, "conformal")
    with torch.no_grad():
        y, _ = calibrated(x, return_risk=True)
        torch.testing.assert_close(calibrated(x), y)
    probs = y.softmax(-1)
    quantile = (1 - probs.gather(1, labels[:, None])[:, 0]).sort().values[int(0.9 * 401 + 1) - 1]
    assert torch.equal(calibrated.predict_set(x, coverage=0.9), 1 - probs <= quantile + 1e-6)


def test_abstaining_by_confidence_keeps_the_share_of_the_held_out_rows(noisy: Any, rows: Any) -> None:
    kept = selective(noisy, rows, "confidence").predictor(coverage=0.7)(rows[0]).kept
    assert int(kept.sum()) == 280
