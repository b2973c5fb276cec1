"""The automatic combination of scores: its weights, what it is made of, and the outliers that are made for it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from helpers.density_rows import draw
from scipy.optimize import minimize
from torch import Tensor, nn

from workbench import neo
from workbench.methods.densities import Automatic, Signature
from workbench.methods.densities.automatic import _regressed
from workbench.methods.made_outliers import gathered, unlike
from workbench.outputs import Logits

X = draw(200, 5, seed=1)


def net(*last: nn.Module) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3), *last).eval()


def density(wrapped: Any) -> Automatic:
    return wrapped.get_submodule("extras@workbench").density


def test_weights_are_those_of_a_logistic_regression() -> None:
    usual, strange = draw(300, 3, seed=2), [draw(100, 3, seed=3) + torch.tensor([2.0, 0, -1]), draw(50, 3, seed=4) * 3]
    unit = usual.double().std(0).numpy()

    def loss(free: np.ndarray) -> float:
        """With weights instead of their softplus: the same minimum, where it is inside."""
        z = usual.double().numpy() / unit @ free[:3] + free[3]
        value = np.logaddexp(0, z).mean() + 0.01 * free[:3].sum()
        for rows in strange:
            value += np.logaddexp(0, -(rows.double().numpy() / unit @ free[:3] + free[3])).mean() / 2
        return float(value)

    best = minimize(loss, np.full(4, 0.1), bounds=[(0, None)] * 3 + [(None, None)]).x
    np.testing.assert_allclose(_regressed(usual, strange), best[:3] / unit, atol=2e-2)


def test_the_score_is_the_weighted_sum_of_what_each_says() -> None:
    wrapped: Any = neo.Wrapper(density="auto", output="logits")(net()).eval().fit(X)
    whole = density(wrapped)
    assert list(whole.shares) == ["signature", "knn", "energy", "relative", "vim", "fdbd", "react", "scale"]
    assert min(whole.shares.values()) >= 0
    assert len(set(whole.shares.values())) > 1
    with torch.no_grad():
        h = net()[:2](X)
        alone = Signature()
        alone.fit([X, h], net()(X))
        torch.testing.assert_close(whole.parts["signature"]([X, h]), alone.eval()([X, h]), rtol=1e-4, atol=1e-4)
        parts: Any = whole.parts.values()
        risks = [part([X, h] if part.needs_features else [], net()(X)) for part in parts]
        score = sum(w * 10 * torch.asinh(r / 10) for w, r in zip(whole.shares.values(), risks, strict=True))
        found = wrapped(X, return_risk=True)[1]
        torch.testing.assert_close(found, (score - whole.centre) / whole.scale, rtol=1e-4, atol=1e-4)


def test_a_head_that_is_not_linear_leaves_the_scores_that_need_none() -> None:
    found: Any = neo.Wrapper(density="auto", output="logits")(net(nn.Tanh())).eval().fit(X)
    assert list(density(found).shares) == ["signature", "knn", "energy", "relative"]
    for other in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert torch.equal(other(X, return_risk=True)[1], found(X, return_risk=True)[1])


def test_without_outliers_all_scores_weigh_the_same() -> None:
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
    assert set(density(wrapped).shares.values()) == {1.0}
    few: Any = neo.Wrapper(density="auto", output="logits")(net()).eval().fit(X.split(4))
    assert set(density(few).shares.values()) == {1.0}


def test_what_has_no_class_scores_of_rows_is_refused() -> None:
    for output in (None, "logits"):
        with pytest.raises(ValueError, match=r"density=Automatic.*no output \[rows, classes\]|one score a row"):
            neo.Wrapper(density="auto", output=output)(nn.Linear(5, 1)).fit(X)
    with pytest.raises(ValueError, match="Automatic works on logits"):
        neo.Wrapper(density="auto", output="probs")(net(nn.Softmax(1)))
    with pytest.raises(ValueError, match="Automatic works on one vector a row"):
        neo.Wrapper(density="auto", output=Logits(dim=1))(nn.Conv2d(1, 3, 1))


def test_made_inputs_are_means_of_two_rows_and_values_of_others() -> None:
    before = torch.get_rng_state()
    x, ids = draw(40, 3, 2), torch.arange(40)
    mixed, drawn = unlike(((x,), {"ids": ids, "scale": torch.ones(3)}), 40, 0)
    assert torch.equal(torch.get_rng_state(), before)
    for _, kwargs in (mixed, drawn):
        assert torch.equal(kwargs["ids"], ids)
        assert torch.equal(kwargs["scale"], torch.ones(3))
    pairs = (x[:, None] + x[None]) / 2
    assert all(any(torch.equal(row, pair) for pair in pairs[i]) for i, row in enumerate(mixed[0][0]))
    values = drawn[0][0]
    assert all(value in x[:, i, j] for i in range(3) for j in range(2) for value in values[:, i, j])
    assert not torch.equal(values, x)
    assert list(unlike((ids,), 40, 0)) == list(unlike((x[:7],), 7, 0)) == []
    made = [([x[:2, 0]], x[:2, 1], 0), ([x[2:4, 0]], x[2:4, 1], 1), ([x[4:6, 0]], x[4:6, 1], 0)]
    first, second = gathered(made)
    assert torch.equal(first[0][0], x[[0, 1, 4, 5], 0])
    assert torch.equal(second[1], x[2:4, 1])
