"""Prior precision of last-layer Laplace, chosen by held-out classes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.laplace_models import FEATURES, ROWS, net, normal
from torch import Tensor, nn

from workbench import compose, fit, laplace, vote
from workbench.core.ownership import table_of

X = normal(ROWS, FEATURES)
LABELS = torch.arange(ROWS) % 3


def test_tuning_takes_the_prior_that_makes_held_out_classes_most_likely() -> None:
    model = net(3)
    with torch.no_grad():
        model[2].weight.mul_(8)  # a confident network
    held, labels = normal(200, FEATURES, seed=8), torch.arange(200) % 3
    labels = torch.where(
        torch.rand(200, generator=torch.Generator().manual_seed(0)) < 0.6, model(held).argmax(1), labels
    )
    wrapped = compose(vote.Wrapper(2, finetune=True), laplace.Wrapper(output="logits"))(model).eval().fit(X)
    start = table_of(wrapped).get("2.weight@laplace_prior").tolist()
    losses = {}
    for factor in 10.0 ** torch.arange(-1, 4.5, 0.5):
        fixed = laplace.Wrapper(prior_precision=start[0] * float(factor), output="logits")(model).eval().fit(X)
        losses[float(factor)] = nn.functional.nll_loss(fixed(held), labels).item()
    best = min(losses, key=lambda factor: losses[factor])
    assert laplace.tune(wrapped, [(held[:90], labels[:90]), (held[90:], labels[90:])]) is wrapped
    assert table_of(wrapped).get("2.weight@laplace_prior").tolist() == pytest.approx([best * value for value in start])
    assert nn.functional.nll_loss(wrapped(held), labels).item() == pytest.approx(losses[best], abs=1e-6)


@pytest.mark.parametrize(
    ("held_out", "says"),
    [
        ([(X, LABELS), (X, LABELS + 1)], "class numbers go from 1 to 3, but the model gives 3 scores"),
        ([(X, LABELS), (X, LABELS * 0.5)], "it got"),
        ([(X * torch.nan, LABELS)], "the likelihood of the held-out classes is NaN"),
        ([(X, LABELS * 0 - 100)], "equally likely under every prior precision, as without any row that has a class"),
        ([], "equally likely under every prior precision"),
    ],
)
def test_held_out_rows_that_cannot_decide_leave_the_prior(held_out: list[Any], says: str) -> None:
    wrapped = laplace.Wrapper(output="logits")(net(3)).eval().fit(X)
    before = copy.deepcopy(wrapped.state_dict())
    with pytest.raises(ValueError, match=says):
        laplace.tune(wrapped, held_out)
    after = wrapped.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items() if isinstance(value, Tensor))


def test_fit_tunes_by_its_validation_rows_and_leaves_a_given_prior_alone() -> None:
    labels = (X[:, 0] > 0).long()
    for prior in (None, 3.0):
        wrapped = laplace.Wrapper(prior_precision=prior, output="logits")(net(2))
        fit(wrapped, (X, labels), epochs=5, progress=False)
        by_hand = laplace.Wrapper(prior_precision=prior, output="logits")(copy.deepcopy(wrapped.unwrap())).eval()
        by_hand.fit([(X, None)])
        tuned, plain = (float(table_of(w).get("2.weight@laplace_prior")) for w in (wrapped, by_hand))
        assert (tuned == plain == 3.0) if prior else tuned != plain
