"""Windows of series."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from workbench import fit, vote
from workbench.data import Data, windows
from workbench.errors import WorkbenchWarning
from workbench.experiments import sweep


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("target", [None, 1, [1], [2, 0]])
def test_windows_by_a_plain_loop(every: int, target: int | list[int] | None) -> None:
    series = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    x, y, origin = windows(series, 5, 4, every=every, target=target)
    wanted = series if target is None else series[:, target]
    starts = [t for t in range(5, 17) if (t - 5) % every == 0]
    assert origin.tolist() == starts
    assert torch.equal(x, torch.stack([series[t - 5 : t] for t in starts]))
    assert torch.equal(y, torch.stack([wanted[t : t + 4] for t in starts]))


def test_one_series_arrays_and_frames() -> None:
    values = np.arange(10.0)
    x, y, _ = windows(values, 3, 2)
    assert (x.shape, y.shape, x.dtype) == ((6, 3), (6, 2), torch.float64)
    frame = windows(pd.DataFrame({"a": values, "b": values}), 3, 2)
    assert torch.equal(frame.x[..., 1], x)
    assert windows([1, 2, 3, 4], 2).y.dtype == torch.float32


def test_training_rows_end_before_test_targets_begin() -> None:
    data = Data.from_series(torch.arange(100.0)[:, None].expand(100, 2), window=8, horizon=3, test=0.3, target=0)
    assert data.train.x.shape == (60, 8, 2)
    assert data.train.y.max() == 69
    assert data.test.y.min() == 70
    assert len(data.test) == 28


@pytest.mark.parametrize("wrong", [{"window": 8.0}, {"window": "8"}, {"window": None}, {"horizon": 2.0}])
def test_windows_of_no_whole_number_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"{next(iter(wrong))} must be a whole number"):
        Data.from_series(torch.arange(60.0), **{"window": 8, "horizon": 2} | wrong)


def test_what_is_no_series_is_refused() -> None:
    series = torch.zeros(9, 2)
    for call, message in (
        (lambda: windows(series, 8, 2), "9 values are fewer than window \\+ horizon = 8 \\+ 2"),
        (lambda: windows(series, 0), "window must be at least 1; found 0"),
        (lambda: windows(series[None], 2), r"found torch.float32 \[1, 9, 2\]"),
        (lambda: windows(series, 2, target=2), "have 2 columns"),
        (lambda: windows(series[:, 0], 2, target=0), "have 0 columns"),
        (lambda: Data.from_series(series, window=2, test=3), "give the share"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="must hold numbers"):
        windows(["a", "b"], 1)
    for several in ([series[:, 0], series[:4, 0]], [series[:, 0].numpy()] * 20, (pd.Series(np.arange(9.0)),) * 20):
        with pytest.raises(TypeError, match=rf"{len(several)} series.*torch\.stack\(series, 1\).*join"):
            windows(several, 3)
    assert windows([[float(i), 0.0] for i in range(9)], 3).x.shape == (6, 3, 2)


def test_windows_follow_the_times_of_pandas_or_are_refused() -> None:
    days = pd.Series(np.arange(40.0), index=pd.date_range("2024-01-01", periods=40))
    with pytest.raises(
        ValueError, match=r"are not increasing; sort them by series\.sort_index\(\).*series\.to_numpy\(\)"
    ):
        windows(days.sample(frac=1, random_state=0), 3)
    with pytest.raises(ValueError, match="are repeated in 1 rows"):
        windows(pd.concat([days[:3], days[2:]]), 3)
    below_each_other = pd.concat({"Oslo": days, "Rome": days}, names=["town", "day"])
    with pytest.raises(ValueError, match=r"its index has 2 levels \(town, day\).*series\.unstack\('town'\)"):
        windows(below_each_other, 3)
    with pytest.raises(ValueError, match=r"2 levels \(0, 1\).*series\.unstack\(1\)"):
        windows(below_each_other.swaplevel().rename_axis([None, None]), 3)
    assert windows(below_each_other.unstack("town"), 3).x.shape == (37, 3, 2)
    expected = windows(torch.arange(40.0, dtype=torch.float64), 3)
    months = pd.Series(np.arange(40.0), index=pd.date_range("2020-01-01", periods=40, freq="MS"))
    working = pd.Series(np.arange(40.0), index=pd.bdate_range("2020-01-01", periods=40))
    texts = days.set_axis([f"t{i}" for i in range(40)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for series in (
            days,
            months,
            working,
            texts,
            days.to_frame()[0],
            months.to_period(),
            days.reset_index(drop=True),
        ):
            assert torch.equal(windows(series, 3).x, expected.x)
    with pytest.warns(WorkbenchWarning, match="1 steps between its times differ from the others"):
        windows(days.drop(days.index[10]), 3)


def test_times_that_a_file_gives_as_texts_are_times() -> None:
    hours = pd.date_range("2024-01-01", periods=40, freq="h")
    for texts in (hours.astype(str), hours.strftime("%Y-%m-%dT%H:%M:%S+02:00")):
        series = pd.Series(np.arange(40.0), index=texts)
        assert windows(series, 3).x.shape == (37, 3)
        with pytest.raises(ValueError, match="are not increasing"):
            windows(series[::-1], 3)
        with pytest.raises(ValueError, match="are repeated in 1 rows"):
            windows(pd.concat([series[:3], series[2:]]), 3)
        with pytest.warns(WorkbenchWarning, match="1 steps between its times differ"):
            windows(series.drop(series.index[10]), 3)
    with pytest.raises(TypeError, match=r"'date': it holds texts.*frame\.set_index\('date'\)"):
        windows(series.rename_axis("date").rename("load").reset_index(), 3)


def test_columns_of_a_frame_are_targets_by_name() -> None:
    frame = pd.DataFrame(np.arange(60.0).reshape(20, 3), columns=["load", "wind", "sun"])
    for named, numbered in (("wind", 1), (["sun", "load"], [2, 0]), (("wind",), [1])):
        expected = windows(frame, 4, 2, target=numbered)
        assert torch.equal(windows(frame, 4, 2, target=named).y, expected.y)
        by_name, by_number = (Data.from_series(frame, window=4, target=target) for target in (named, numbered))
        assert torch.equal(by_name.test.y, by_number.test.y)
    with pytest.raises(ValueError, match=r"0 columns are named 'rain'; the columns are \['load', 'wind', 'sun'\]"):
        windows(frame, 4, target="rain")
    with pytest.raises(TypeError, match="whole number"):
        windows(torch.zeros(20, 3), 4, target="wind")


def test_what_a_mask_leaves_out_of_a_series_is_no_value() -> None:
    masked = np.ma.masked_equal(np.append(np.arange(20.0), -999.0), -999.0)
    assert windows(masked, 3).y[-1].isnan().all()


def test_a_few_steps_have_names_so_that_each_score_says_which_it_is() -> None:
    series = torch.arange(200.0)
    assert Data.from_series(series, window=8, horizon=3).target.name == "step 1, step 2, step 3"
    assert Data.from_series(series, window=8, horizon=1).target.name == "y"
    assert Data.from_series(series, window=8, horizon=24).target.name == "y"  # scored together
    assert Data.from_series(torch.stack([series, series], 1), window=8, horizon=3).target.name == "y"


@pytest.mark.parametrize("horizon", [1, 3])
def test_validation_windows_come_after_those_trained_on(horizon: int) -> None:
    data = Data.from_series(torch.arange(100.0), window=8, horizon=horizon)
    train, held_out = data.validation(0.2)
    assert len(held_out) == round(0.2 * len(data.train))
    assert train.y.max() + 1 == held_out.y.min()  # no target is in both, and none is lost between them
    assert held_out.y.max() == data.train.y.max()
    with pytest.raises(ValueError, match="windows of a series are too few"):
        data.validation(0.999)


def test_held_out_errors_of_a_smooth_series_are_like_those_of_test_rows() -> None:
    # of windows drawn at random, neighbours would be trained on: then the mean is .15, and the least .07
    shares = torch.tensor([_share_within_held_out_errors(seed) for seed in range(8)])
    assert shares.mean() > 0.85
    assert shares.min() > 0.7


def _share_within_held_out_errors(seed: int) -> float:
    """Share of test targets within the 90 % quantile of the held-out errors of the nearest window that was trained on."""
    state, level, values = 0.0, 0.0, []
    for shock in torch.randn(400, generator=torch.Generator().manual_seed(seed)).tolist():
        level = 0.9 * level + shock
        state = 0.9 * state + level
        values.append(state)
    data = Data.from_series(torch.tensor(values), window=24, horizon=12)
    train, held_out = data.validation(0.2)
    errors, test_errors = (
        (part.y - train.y[torch.cdist(part.x, train.x).argmin(1)]).abs() for part in (held_out, data.test)
    )
    return float((test_errors <= errors.quantile(0.9, 0)).double().mean())


def test_training_holds_out_the_latest_windows() -> None:
    data = Data.from_series(torch.arange(100.0).sin(), window=8, horizon=3)
    train, held_out = data.validation(0.1)
    models = [vote.Wrapper(2)(nn.Linear(8, 3)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    fit(models[0], data, epochs=3, batch_size=16)
    fit(models[1], train, validation=held_out, epochs=3, batch_size=16)
    assert all(map(torch.equal, models[0].state_dict().values(), models[1].state_dict().values()))
    history = fit(vote.Wrapper(2)(nn.Linear(8, 3)), data, folds=2, epochs=1)
    assert history.out_of_fold is not None
    assert history.out_of_fold.fold.tolist() == sorted(history.out_of_fold.fold.tolist())


@pytest.mark.parametrize(("rows", "options"), [(None, {}), (40, {}), (None, {"folds": 2}), (40, {"folds": 2})])
def test_windows_of_a_series_are_held_out_in_time(
    monkeypatch: pytest.MonkeyPatch, rows: int | None, options: dict[str, Any]
) -> None:
    series = Data.from_series(torch.arange(100.0), window=8, horizon=3)
    splits: list[tuple[Any, Any]] = []

    def spied(wrapped: Any, train: Any, *, validation: Any = None, **settings: Any) -> Any:
        history = fit(wrapped, train, validation=validation, **settings)
        splits.append((train, history.out_of_fold if validation is None else validation))
        return history

    monkeypatch.setattr(sweep, "_load", lambda name, seed: series)
    monkeypatch.setattr("workbench.training.fit", spied)
    sweep.run("linear", "vote(n_voters=2) + sculpt", "series", 0, 1, rows, **options)
    train, held_out = splits[-1]
    if options:
        assert held_out.fold.tolist() == sorted(held_out.fold.tolist())
        assert torch.equal(held_out.target[:, 0], held_out.target[:, 0].sort().values)
    else:
        assert train.y.max() < held_out.y.min()
