"""Code that uses a `Risk` as a tensor gets an error that says which risk to take and what to write."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from workbench import Risk, compose, sculpt, vote

X = torch.ones(2, 3)
USES: dict[str, Callable[[Any], Any]] = {
    "shape": lambda risk: risk.shape,
    "method": lambda risk: risk.detach().cpu(),
    "add": lambda risk: risk + 1,
    "add_to": lambda risk: 0 + risk,
    "add_to_tensor": lambda risk: X + risk,
    "weigh": lambda risk: X * risk,
    "negate": lambda risk: -risk,
    "compare": lambda risk: risk > 0.5,
    "rows": lambda risk: risk[0],
    "slices": lambda risk: risk[..., 1:],
    "cat": lambda risk: torch.cat([risk, risk]),
    "stack": lambda risk: torch.stack([risk]),
    "sum": lambda risk: sum([risk, risk]),
    "float": float,
    "numpy": np.asarray,
    "items": lambda risk: [item.shape for item in risk],
    "misspelled": lambda risk: risk.epistemc,
}


@pytest.mark.parametrize("name", USES)
def test_the_error_names_the_risks_and_the_line_to_write(name: str) -> None:
    risk = Risk(aleatoric=X, epistemic=X, total=X)
    with pytest.raises(
        (TypeError, AttributeError), match=r"lambda x: wrapped\(x, return_risk=True\)\[1\]\.(total|aleatoric)"
    ):
        USES[name](risk)
    only = Risk(vacuitic=X)
    with pytest.raises((TypeError, AttributeError), match=r"\[1\]\.vacuitic"):
        USES[name](only)


def test_a_risk_stays_a_tree_of_named_tensors() -> None:
    risk = Risk(aleatoric=X, total=2 * X)
    assert list(risk) == ["aleatoric", "total"]
    assert {name: risk[name] for name in risk}.keys() == {"aleatoric", "total"}
    assert not hasattr(risk, "shape")
    for other in (copy.copy(risk), copy.deepcopy(risk), pickle.loads(pickle.dumps(risk))):
        assert torch.equal(other.total, 2 * X)
    halved = torch.utils._pytree.tree_map(lambda t: t / 2, risk)
    assert torch.equal(halved.total, X)
    leaves, spec = torch.utils._pytree.tree_flatten(risk)
    assert type(spec.context[0]) is str
    assert len(leaves) == 2


def sliding(x: Tensor, predictor: Callable[[Tensor], Any], width: int = 4, step: int = 2) -> list[Tensor]:
    """Windows whose outputs are weighted and added, as sliding-window inference of image libraries has it."""
    sums: list[Tensor] = []
    count = torch.zeros(x.shape[-1])
    weights = torch.linspace(1, 2, width)
    for start in range(0, x.shape[-1] - width + 1, step):
        outputs = predictor(x[..., start : start + width])
        outputs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
        if not sums:
            sums = [torch.zeros(*output.shape[:-1], x.shape[-1]) for output in outputs]
        for total, output in zip(sums, outputs, strict=True):
            total[..., start : start + width] += weights * output
        count[start : start + width] += weights
    return [total / count for total in sums]


def test_windows_of_predictions_and_risks_are_added() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 2, 12)
    single: Any = vote.Wrapper(3)(nn.Conv1d(2, 1, 3, padding=1)).eval()
    both: Any = compose(vote.Wrapper(3), sculpt.Wrapper(n_layers=1))(nn.Conv1d(2, 1, 3, padding=1)).eval()
    y, risk = sliding(x, lambda window: single(window, return_risk=True))
    each = [sliding(x, voter)[0] for voter in single.voters()]
    torch.testing.assert_close(y, torch.stack(each).mean(0))
    assert bool((risk > 0).all())
    assert sliding(x, lambda window: both(window, return_risk=True)[1].total)[0].shape == (2, 1, 12)
    for predictor in (lambda w: both(w, return_risk=True), lambda w: both(w, return_risk=True)[1]):
        with pytest.raises(AttributeError, match=r"take one risk, such as risk\.(total|aleatoric)"):
            sliding(x, predictor)
