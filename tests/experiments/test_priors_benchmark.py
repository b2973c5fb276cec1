"""The benchmark `priors`: rows at the ends of a column are never trained on."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import ROOT

from workbench.experiments.worker import load_file


@pytest.fixture(scope="module")
def priors() -> ModuleType:
    return load_file(ROOT / "benchmarks" / "priors.py")


def test_ends_are_those_of_the_column_that_tells_most_and_has_some(priors: ModuleType) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(200, 3, generator=draw)
    x[:, 0] = (x[:, 0] > 0).float()
    y = 9 * x[:, :1] - x[:, 2:] ** 3
    ends = priors.ends_of(x, y)
    low, high = np.quantile(x[:, 2].double(), [0.15, 0.85])
    np.testing.assert_array_equal(ends, (x[:, 2] < low) | (x[:, 2] > high))


@pytest.mark.slow
def test_cells_run_and_are_summed_up(priors: ModuleType) -> None:
    rows = [cell | priors.run(**cell) for cell in priors.cells(smoke=True)]
    assert all(np.isfinite(value) for row in rows for value in row.values() if isinstance(value, float))
    assert [row["scale"] for row in rows][:2] == [0, 300]
    page = priors.summary(pd.DataFrame(rows), ROOT)
    assert page.count("| diabetes |") == 3
