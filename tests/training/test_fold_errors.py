"""Cross-fitting refuses rows that it cannot divide into folds, and then changes nothing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.fold_models import net, plane, quiet
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from workbench import fit, sculpt, snapshot, vote


@pytest.mark.parametrize(
    ("make", "options", "error", "words"),
    [
        (
            lambda: sculpt.Wrapper()(net()),
            {},
            ValueError,
            r"this model has no voters; wrap it with vote.Wrapper\(n_voters=6\)",
        ),
        (
            lambda: vote.Wrapper(4)(net()),
            {},
            ValueError,
            "4 voters can't be divided evenly into 3 folds; take n_voters=3, 6",
        ),
        (lambda: vote.Wrapper(3)(net()), {"lr": (0.1, 0.2)}, ValueError, "to 3 folds x 2 settings"),
        (
            lambda: vote.Wrapper(3, share=1)(net()),
            {},
            ValueError,
            "the voters share 0.weight, which would be trained on all folds",
        ),
        (lambda: vote.Wrapper(3, share="rank1")(net()), {}, ValueError, "the voters share 0.weight"),
        (lambda: vote.Wrapper(3, use_bias=False)(net()), {}, ValueError, "the voters share 0.bias"),
        (
            lambda: snapshot.Wrapper(3)(net()),
            {},
            ValueError,
            "this model has no voters",
        ),
        (lambda: vote.Wrapper(3)(net()), {"validation": 0.2}, ValueError, "leave validation out"),
        (lambda: vote.Wrapper(3)(net()), {"patience": 2}, ValueError, "leave patience out"),
        (lambda: vote.Wrapper(3)(net()), {"optimizer": torch.optim.SGD}, ValueError, "leave optimizer out"),
        (lambda: vote.Wrapper(3)(net()), {"folds": 31}, ValueError, "31 for 60 rows; there must be at least 2"),
        (lambda: vote.Wrapper(3)(net()), {"folds": 1}, ValueError, "there must be at least 2"),
        (lambda: vote.Wrapper(3)(net()), {"folds": torch.zeros(5)}, ValueError, "one whole number for each of 60 rows"),
        (lambda: vote.Wrapper(3)(net()), {"folds": "5"}, ValueError, "folds must be a whole number"),
        (lambda: vote.Wrapper(3)(net()), {"criterion": "mse"}, TypeError, "criterion: found 'mse'"),
        (
            lambda: vote.Wrapper(3)(net()),
            {"folds": ["a", None] * 30},
            ValueError,
            "folds holds None or NaN .* in 30 of",
        ),
        (
            lambda: vote.Wrapper(3)(net()),
            {"folds": ["a", math.nan] * 30},
            ValueError,
            "folds holds None or NaN .* in 30 of",
        ),
        (
            lambda: vote.Wrapper(3)(net()),
            {"lr": (0.1, 0.2), "weight_decay": (0.1, 0.2, 0.3)},
            ValueError,
            "give equally many of both",
        ),
        (lambda: vote.Wrapper(3)(net()), {"lr": (0.1, 0.2), "folds": None}, ValueError, "several settings need folds="),
    ],
)
def test_bad_input(make: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(error, match=words):
        quiet(model, plane(), **{"folds": 3, **options})
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())


def test_rows_that_are_not_in_memory_cannot_be_cut() -> None:
    x, y = plane()
    labelled: Any = [{"input": row, "labels": target} for row, target in zip(x, y, strict=True)]
    for rows in (TensorDataset(x, y), labelled):
        with pytest.raises(TypeError, match="the rows of a DataLoader can't be split into folds"):
            fit(vote.Wrapper(3)(net()), DataLoader(rows), folds=3, epochs=1)


@pytest.mark.slow
def test_folds_by_name_are_those_by_number() -> None:
    """A column of the frame, such as the patient; rows of another order are refused."""
    x, y = plane()
    frame = pd.DataFrame(x.numpy(), columns=["a", "b"]).set_axis(range(100, 160))
    target, number = pd.DataFrame(y.numpy(), frame.index), np.arange(60) * 7 % 3
    names = pd.Series(np.array(["Ann", "Bo", "Cy"])[number], frame.index)
    trained = []
    for folds in (number, names, names.astype("category"), names.to_list(), pd.Series(number, frame.index)):
        torch.manual_seed(0)
        model = vote.Wrapper(3)(net())
        quiet(model, (frame, target), folds=folds)
        trained.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert all(torch.equal(trained[0], other) for other in trained[1:])
    with pytest.raises(ValueError, match=r"folds: row 0 has index 100 in x and 159 in folds"):
        quiet(vote.Wrapper(3)(net()), (frame, target), folds=names[::-1])


def test_a_model_of_several_outputs_is_refused_before_its_first_step() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.net(x)
            return y, y

    steps = []

    def criterion(prediction: Any, target: Tensor) -> Tensor:
        steps.append(1)
        return (prediction[0] - target).square().mean()

    with pytest.raises(TypeError, match="folds: the model returns a tuple; cross-fitting needs one tensor"):
        fit(vote.Wrapper(3)(Pair()), plane(60), folds=3, epochs=1, criterion=criterion, progress=False)
    assert steps == []
