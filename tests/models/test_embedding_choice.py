"""`tabular(embedding="auto")`: the leave-one-out error compared with a plain loop, and which targets get bins."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from workbench.data import Data
from workbench.models import NumericColumns, PiecewiseLinear, PrincipalComponents, tables, tabular
from workbench.models import embedding_choice as choice


def rows(n: int = 300, seed: int = 0) -> Tensor:
    return 4 * torch.rand(n, 3, generator=torch.Generator().manual_seed(seed)) - 2


def test_the_error_of_rows_left_out_is_that_of_a_loop_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "WIDTHS", (0.7,))
    monkeypatch.setattr(choice, "NOISES", (0.05,))
    x = rows(30).double().numpy()
    y = np.stack([np.sin(x[:, 0]), x[:, 1]], 1)
    squared = ((x[:, None] - x) ** 2).sum(2)
    median = float(torch.tensor(squared[squared > 0]).median())
    kernel = np.exp(-squared / (2 * 0.7 * median))
    errors = []
    for i in range(len(x)):
        rest = np.arange(len(x)) != i
        weights = np.linalg.solve(kernel[np.ix_(rest, rest)] + 0.05 * np.eye(len(x) - 1), y[rest])
        errors.append((y[i] - kernel[i, rest] @ weights) ** 2)
    assert choice.left_out_error(torch.tensor(x), torch.tensor(y)) == pytest.approx(np.mean(errors), rel=1e-6)


@pytest.mark.parametrize(
    ("target", "bins"),
    [
        (lambda x: (x[:, :1] + x[:, 1:2]).sin() + 0.1 * x[:, 2:], False),
        (lambda x: (x[:, :1] > 0.3).float() - 2 * (x[:, 1:2] > 1).float(), True),
        (lambda x: (x.sum(1) > 0).long(), False),
        (lambda x: (x[:, 0] > 0.3).long() + (x[:, 1] > 1).long(), True),
    ],
    ids=["smooth", "steps", "smooth classes", "classes by steps"],
)
def test_targets_with_steps_want_bins_and_smooth_ones_do_not(target: Callable[[Tensor], Tensor], bins: bool) -> None:
    x = rows()
    before = torch.get_rng_state()
    model = tabular(Data.from_arrays(x, target(x), test=[0]), width=4, depth=0)
    assert any(isinstance(module, NumericColumns) for module in model) == bins
    torch.set_rng_state(before)
    named = tabular(
        Data.from_arrays(x, target(x), test=[0]), embedding="piecewise" if bins else "none", width=4, depth=0
    )
    assert [tuple(p.shape) for p in model.parameters()] == [tuple(p.shape) for p in named.parameters()]
    assert all(map(torch.equal, model.parameters(), named.parameters()))  # the choice draws nothing


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "bins"),
    [
        (
            lambda x: x[:, :1] - x[:, 1:2] + 0.3 * torch.randn(len(x), 1, generator=torch.Generator().manual_seed(1)),
            False,
        ),
        (lambda x: (3 * x[:, :1]).round() % 2 - 2 * (x[:, 1:2] > 1).float(), True),
        (lambda x: (3 * x[:, 0]).round().long() % 2, True),
    ],
    ids=["smooth", "steps", "classes by steps"],
)
def test_on_large_tables_short_trainings_choose(
    target: Callable[[Tensor], Tensor], bins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "MIN_TRAINED_ROWS", 1000)
    monkeypatch.setattr(tables, "best_judged", None)
    x = rows(1200)
    data, before = Data.from_arrays(x, target(x), test=[0]), torch.get_rng_state()
    model = tabular(data, width=16)
    after = torch.get_rng_state()
    embedding = next((module for module in model if isinstance(module, NumericColumns)), None)
    assert (embedding is not None) == bins
    torch.set_rng_state(before)
    if embedding is None:
        named = tabular(data, embedding="none", width=16)
    else:
        inside = embedding.embedding
        dim = 0 if isinstance(inside, PiecewiseLinear) else 12
        n_bins = (inside if isinstance(inside, PiecewiseLinear) else inside[0]).start.shape[1]
        named = tabular(data, embedding="piecewise", bins=n_bins, embedding_dim=dim, width=16)
    assert all(map(torch.equal, model.parameters(), named.parameters()))  # the choice draws nothing
    assert torch.equal(torch.get_rng_state(), after)


def collinear(n: int = 200) -> Data:
    """Two columns that differ by a hundredth of their spread, and by that the target."""
    x = rows(n)
    x[:, 1] = x[:, 0] + 0.01 * x[:, 2]
    return Data.from_arrays(x[:, :2], x[:, 2:], test=[0])


@pytest.mark.slow
def test_small_differences_of_columns_become_inputs_if_they_tell_the_target() -> None:
    data, before = collinear(), torch.get_rng_state()
    model = tabular(data, width=8)
    after = torch.get_rng_state()
    assert isinstance(model[1], PrincipalComponents)
    torch.set_rng_state(before)
    named = tabular(data, embedding="none", components=True, width=8)
    assert all(map(torch.equal, model.state_dict().values(), named.state_dict().values()))
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.slow
def test_components_are_tried_where_columns_are_nearly_collinear_and_no_choice_was_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(
        tables, "best_trained", lambda candidates, build, data: asked.extend(candidates) or candidates[0]
    )
    independent = Data.from_arrays(rows(200), rows(200)[:, :1], test=[0])
    for data, settings in (
        (independent, {}),
        (collinear(15), {}),  # too few rows for the small component
        (collinear(), {"embedding": "none"}),
        (collinear(), {"components": False}),
    ):
        assert not any(isinstance(module, PrincipalComponents) for module in tabular(data, width=4, **settings))
    assert asked == []
    assert not isinstance(tabular(collinear(), width=4)[1], PrincipalComponents)
    assert asked == [("none", 16, 0, False), ("none", 16, 0, True)]


def test_settings_that_are_given_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(tables, "MIN_TRAINED_ROWS", 50)
    monkeypatch.setattr(
        tables, "best_trained", lambda candidates, build, data: asked.extend(candidates) or candidates[-1]
    )
    x = rows(80)
    data = Data.from_arrays(x, x[:, :1], test=[0])
    tabular(data, width=4)
    assert asked == [("none", 0, 0), ("piecewise", 16, 0), ("piecewise", 48, 0), ("piecewise", 48, 12)]
    asked.clear()
    tabular(data, width=4, bins=5)
    assert asked == [("none", 0, 0), ("piecewise", 5, 0), ("piecewise", 5, 12)]
    asked.clear()
    tabular(data, width=4, bins=5, embedding_dim=3)
    assert asked == [("none", 0, 0), ("piecewise", 5, 3)]


@pytest.mark.slow
def test_rows_without_a_class_are_not_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    x = rows(100)
    y = (x[:, 0] > 0).long()
    y[::2] = -100
    seen: list[tuple[Tensor, Tensor]] = []
    fit = choice.fit
    monkeypatch.setattr(
        choice, "fit", lambda wrapped, pair, **options: seen.append(pair) or fit(wrapped, pair, **options)
    )
    data = Data.from_arrays(x, y, test=[0])
    choice.best_trained([(4,)], lambda width: nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 2)), data)
    assert sorted(seen[0][0][:, 0].tolist()) == sorted(x[1::2, 0].tolist())
    assert torch.equal(seen[0][1], (seen[0][0][:, 0] > 0).long())


def test_rows_that_are_there_twice_do_not_choose() -> None:
    """With each row twice, the twin of a row that is left out tells its target, whatever the embedding."""
    x = rows(100)
    twice = torch.cat([x, x])
    assert choice.chosen_rows(twice).tolist() == list(range(100))
    many = rows(5000)
    assert len(choice.chosen_rows(many)) == choice.MAX_ROWS
    assert int(choice.chosen_rows(many).max()) == 4999


@pytest.mark.parametrize("y", [torch.ones(20, 1), torch.arange(20.0)[:, None]], ids=["one value", "values"])
def test_what_tells_nothing_goes_without_bins(y: Tensor) -> None:
    few = Data.from_arrays(rows(20), y, test=list(range(13, 20)))
    assert not any(isinstance(module, NumericColumns) for module in tabular(few))


def test_the_hidden_layers_have_the_activation_that_was_asked_for() -> None:
    x = rows(40)
    data = Data.from_arrays(x, x[:, :1], test=[0])
    model = tabular(data, embedding="none")
    assert [type(module) for module in model] == [type(model[0]), nn.Linear, nn.SiLU, nn.Linear, nn.SiLU, nn.Linear]
    assert sum(isinstance(module, nn.ReLU) for module in tabular(data, activation="relu")) == 2
    with pytest.raises(ValueError, match="activation must be one of 'silu', 'relu'; found 'gelu'"):
        tabular(data, activation="gelu")  # type: ignore[arg-type]


def test_the_number_of_threads_is_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(choice, "left_out_error", lambda x, y: float(seen.append(torch.get_num_threads()) or 0))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        choice.best_judged(rows(20), rows(20), torch.arange(3), rows(20)[:, :1], None, None)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 1]
