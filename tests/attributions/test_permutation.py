"""Permutation importance: compared with closed forms, and refusals."""

from __future__ import annotations

import copy
from typing import Any

import pandas as pd
import pytest
import torch
from helpers.calibration_models import inputs, known, rng
from torch import Tensor, nn

from workbench import attributions, compose, neo, sample, vote
from workbench.data import Data


def linear(weights: list[list[float]]) -> Any:
    """Voters that are linear in x, without offsets: voter i says weights[i] @ x."""
    plain = nn.Linear(len(weights[0]), 1, bias=False).double()
    wrapped = vote.Wrapper(len(weights), use_bias=False)(plain)
    voters = wrapped.voters()
    assert len(voters) == len(weights)
    state = {name: p.detach().clone() for name, p in wrapped.named_risk_parameters()}
    ((name, stacked),) = state.items()
    wrapped.set_risk_parameters({name: torch.tensor(weights, dtype=torch.float64).view_as(stacked)})
    return wrapped.eval()


def test_the_column_that_alone_carries_the_noise_has_all_of_its_importance() -> None:
    """y ~ N(x0, softplus(x1)): the prediction is column 0, the aleatoric risk column 1, exactly."""
    mu = torch.randn(200, 1, generator=rng(1), dtype=torch.float64)
    sigma = 0.2 + torch.rand(200, 1, generator=rng(2), dtype=torch.float64)
    x = inputs(mu, sigma)
    importance = attributions.permutation_importance(known(), x, columns=["load", "noise"], n_repeats=60)
    assert importance.names == ("prediction", "aleatoric", "total")
    assert importance.values["prediction"][1].abs().max() == 0  # not by little: not at all
    assert importance.values["aleatoric"][0].abs().max() == 0
    # over all permutations the index is exactly 1; sixty tell it up to their standard error
    for name, column in (("prediction", 0), ("aleatoric", 1), ("total", 1)):
        assert abs(importance.mean[name][column] - 1) < 4 * importance.standard_error[name][column] < 0.1
    assert importance.ranked("aleatoric") == ("noise", "load")
    # one permutation, computed by hand
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randperm(200, generator=generator) for _ in range(120)]
    moved = (mu - mu[drawn[7]]).square().mean() / (2 * mu.var(correction=0))
    torch.testing.assert_close(importance.values["prediction"][0, 7], moved)


def test_shares_of_a_linear_prediction_are_those_of_its_variance_and_of_the_error_the_rise() -> None:
    """f = 3 a + 4 b of independent columns of variance 1: shares 9/25 and 16/25."""
    x = torch.randn(4000, 3, generator=rng(1), dtype=torch.float64)
    wrapped = linear([[3.0, 4.0, 0.0]] * 2)
    importance = attributions.permutation_importance(
        wrapped, (x, x @ torch.tensor([[3.0], [4.0], [0.0]]).double()), max_rows=4000
    )
    wanted = torch.tensor([9 / 25, 16 / 25, 0.0], dtype=torch.float64)
    torch.testing.assert_close(importance.mean["prediction"], wanted, atol=0.04, rtol=0)
    # without noise the error of the rows as they are is 0, and |3 (a - a')| has mean 3 * 2 / sqrt(pi)
    torch.testing.assert_close(
        importance.mean["error"], torch.tensor([3.0, 4.0, 0.0]).double() * 2 / torch.pi**0.5, atol=0.15, rtol=0
    )
    # all voters agree: no column carries an epistemic risk that there is none of
    assert importance.mean["epistemic"].isnan().all()
    assert importance.ranked("epistemic") == ("x1", "x2", "x3")


def test_epistemic_risk_is_carried_by_the_column_that_voters_disagree_on() -> None:
    x = torch.randn(300, 3, generator=rng(1), dtype=torch.float64)
    importance = attributions.permutation_importance(
        linear([[5.0, 1.0, 0.0], [5.0, -1.0, 0.0], [5.0, 2.0, 0.0]]), x, n_repeats=3
    )
    torch.testing.assert_close(importance.mean["epistemic"][[0, 2]], torch.zeros(2).double(), atol=1e-12, rtol=0)
    assert importance.mean["epistemic"][1] > 0.8
    assert importance.mean["prediction"][0] > 0.8


def test_columns_of_one_group_are_shuffled_together() -> None:
    """x1 - x2 is -1 in all rows, and stays so where both columns move together."""
    x = torch.randn(100, 1, generator=rng(1), dtype=torch.float64).expand(100, 3).clone()
    x[:, 1] += 1
    x[:, 2] = torch.randn(100, generator=rng(2))
    wrapped = linear([[1.0, -1.0, 1.0]] * 2)
    alone = attributions.permutation_importance(wrapped, x, n_repeats=2)
    both = attributions.permutation_importance(wrapped, x, columns={"both": [0, 1], "other": [2]}, n_repeats=2)
    assert alone.mean["prediction"][0] > 0.5
    assert both.mean["prediction"][0] < 1e-20
    assert both.columns == ("both", "other")


def test_columns_made_of_one_column_of_a_frame_are_shuffled_together() -> None:
    frame = pd.DataFrame({"colour": ["red", "blue"] * 40, "size": torch.rand(80, generator=rng(1)).tolist()})
    frame["y"] = frame["size"] * 2
    importance = attributions.permutation_importance(
        vote.Wrapper(2)(nn.Linear(3, 1)), Data.from_dataframe(frame, "y"), n_repeats=2
    )
    assert importance.columns == ("colour", "size")
    assert importance.rows == 16


def test_draws_of_the_method_are_not_taken_for_the_columns() -> None:
    """The same noise in each call: a column that no weight reads moves nothing, not even a little."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    with torch.no_grad():
        model[0].weight[:, 1] = 0
    importance = attributions.permutation_importance(
        sample.Wrapper(3)(model), torch.randn(60, 3, generator=rng(1)), n_repeats=2
    )
    assert importance.mean["epistemic"][1] == 0
    assert importance.mean["epistemic"][0] > 0


def test_rows_in_any_form_that_calibrate_takes_have_the_importance_of_their_tensors() -> None:
    x = torch.randn(40, 3, generator=rng(1))
    y = x[:, :1] + 1
    wrapped = vote.Wrapper(2)(nn.Linear(3, 1))
    frame = pd.DataFrame(x.numpy(), columns=["a", "b", "c"])
    data = Data.from_arrays(frame, y, test=range(39))
    expected = attributions.permutation_importance(wrapped, (data.test.x, data.test.y), n_repeats=3)
    tested, target = frame[:-1], y[:-1].numpy()
    forms = (data.test, (tested.to_numpy(), target), (tested, target), (tested, pd.DataFrame(target)))
    for rows in forms:
        importance = attributions.permutation_importance(wrapped, rows, n_repeats=3)
        assert all(torch.equal(importance.values[name], expected.values[name]) for name in expected.names), type(rows)
        assert importance.columns == (
            ("a", "b", "c") if isinstance(rows, tuple) and rows[0] is tested else expected.columns
        )
    alone = attributions.permutation_importance(wrapped, tested, n_repeats=3)
    assert alone.columns == ("a", "b", "c")
    assert alone.names == expected.names[:-1]


def test_classes_count_by_all_probabilities_and_by_minus_log_p() -> None:
    x = torch.randn(200, 4, generator=rng(1))
    y = (x[:, 0] > 0).long()
    model = nn.Linear(4, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-2.0, 0, 0, 0], [2.0, 0, 0, 0]]))
        model.bias.zero_()
    wrapped = compose(output="logits")(model)  # the plain baseline: the entropy of one model
    importance = attributions.permutation_importance(wrapped, (x, y), n_repeats=4)
    assert importance.names == ("prediction", "aleatoric", "total", "error")
    assert importance.mean["prediction"][1:].abs().max() == 0
    generator = torch.Generator().manual_seed(0)
    moved = x.clone()
    moved[:, 0] = x[torch.randperm(200, generator=generator), 0]
    losses = [nn.functional.cross_entropy(model(inputs), y) for inputs in (x, moved)]
    torch.testing.assert_close(importance.values["error"][0, 0], (losses[1] - losses[0]).double(), rtol=1e-4, atol=1e-6)


def test_the_same_seed_gives_the_same_numbers_and_nothing_else_changes() -> None:
    wrapped, x = vote.Wrapper(3)(nn.Linear(3, 1)), torch.randn(50, 3, generator=rng(1))
    wrapped.train()
    before, x_before, state = torch.get_rng_state(), x.clone(), copy.deepcopy(wrapped.state_dict())
    first, again, other = (
        attributions.permutation_importance(wrapped, x, n_repeats=2, seed=seed) for seed in (0, 0, 1)
    )
    assert all(torch.equal(first.values[name], again.values[name]) for name in first.names)
    assert not torch.equal(first.values["epistemic"], other.values["epistemic"])
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(x, x_before)
    assert wrapped.training
    assert all(
        torch.equal(value, state[name]) for name, value in wrapped.state_dict().items() if isinstance(value, Tensor)
    )
    drawn = attributions.permutation_importance(wrapped, torch.randn(50, 3, generator=rng(1)), n_repeats=2, max_rows=20)
    assert drawn.rows == 20


def test_a_table_of_means_and_standard_errors() -> None:
    importance = attributions.permutation_importance(known(), torch.randn(30, 2, generator=rng(1)), n_repeats=4)
    frame = importance.frame()
    assert list(frame.columns) == ["prediction", "prediction ±", "aleatoric", "aleatoric ±", "total", "total ±"]
    spread = importance.values["aleatoric"][1]
    assert frame["aleatoric ±"]["x2"] == pytest.approx((spread.var() / 4).sqrt().item())
    assert repr(importance) == "PermutationImportance(2 columns of 30 rows: prediction, aleatoric, total)"


X = torch.randn(30, 2, generator=rng(1))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data": torch.rand(30, 1, 6, 6)}, r"x has shape \[30, 1, 6, 6\].*occlusion images"),
        ({"data": X[:1]}, "two rows are needed"),
        ({"data": X * torch.nan}, "NaN or infinite in 30 of 30 rows"),
        ({"data": (X, X[:9, :1])}, "30 rows of x and 9 of y"),
        ({"data": (X, X)}, r"targets have shape \[30, 2\], predictions \[30, 1\]"),
        ({"columns": ["a"]}, "expected 2 different names"),
        ({"columns": {"a": [2]}}, r"columns\['a'\]: expected different column numbers from 0 to 1"),
        ({"columns": {"a": []}}, r"columns\['a'\]"),
        ({"columns": {}}, "the dict of groups is empty"),
        ({"n_repeats": 1}, "n_repeats must be a whole number of at least 2"),
        ({"max_rows": True}, "max_rows"),
    ],
)
def test_what_is_refused(change: dict[str, Any], said: str) -> None:
    arguments = {"data": X, **change}
    with pytest.raises(ValueError, match=said):
        attributions.permutation_importance(known(), arguments.pop("data"), **arguments)
    with pytest.raises(TypeError, match="not wrapped"):
        attributions.permutation_importance(nn.Linear(2, 1), X)
    with pytest.raises(TypeError, match="expected a Data"):
        attributions.permutation_importance(known(), [1, 2, 3])
    with pytest.raises(ValueError, match="importance is known for prediction"):
        attributions.permutation_importance(known(), X, n_repeats=2).ranked("vacuitic")


def test_vacuitic_risk_is_carried_by_the_column_that_is_strange() -> None:
    """Of test rows, all as in training but for one column, the strangeness is that column's."""
    torch.manual_seed(0)
    train = torch.randn(400, 3, generator=rng(1))
    wrapped = neo.Wrapper()(nn.Linear(3, 1))
    wrapped.fit((train, train[:, :1]))
    test = torch.randn(200, 3, generator=rng(2))
    test[::4, 2] += 8
    importance = attributions.permutation_importance(wrapped, test, n_repeats=3)
    assert importance.names[-1] == "vacuitic"
    assert importance.ranked("vacuitic")[0] == "x3"
