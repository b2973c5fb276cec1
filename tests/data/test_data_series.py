"""Windows of series."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from workbench.data import Data, windows


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


def test_what_is_no_series_is_refused() -> None:
    series = torch.zeros(9, 2)
    for call, message in (
        (lambda: windows(series, 8, 2), "9 values are fewer than window \\+ horizon = 8 \\+ 2"),
        (lambda: windows(series, 0), "window must be at least 1; found 0"),
        (lambda: windows(series[None], 2), r"found torch.float32 \[1, 9, 2\]"),
        (lambda: windows(series, 2, target=2), "have 2 columns"),
        (lambda: windows(series[:, 0], 2, target=0), "have 0 columns"),
        (lambda: Data.from_series(series, window=2, test=3), "give a share"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="must hold numbers"):
        windows(["a", "b"], 1)
