"""Metric classes in two processes (gloo, on the CPU), of which one may have seen no rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.metric_cases import CASES, fed
from helpers.two_processes import in_two_processes

from workbench import metrics

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]

SPLITS = ([slice(0, 15), slice(15, 40)], [slice(0, 40), None], [None, slice(0, 40)])


def gathered(rank: int) -> None:
    for name, (new, function, arguments) in CASES.items():
        for rows in SPLITS:
            metric: Any = new()
            if rows[rank] is not None:
                fed(name, metric, rows[rank])
            torch.testing.assert_close(metric.compute(), function(*arguments), rtol=1e-12, atol=1e-12)
    turns = metrics.AUROC()
    risk = torch.arange(20.0)
    turns.update(risk_in=risk) if rank else turns.update(risk_out=risk + 3)
    torch.testing.assert_close(turns.compute(), metrics.auroc(risk, risk + 3))
    zeros = metrics.AURC()
    zeros.update(torch.zeros(2), torch.zeros(2))  # rows all the same, though they are zeros
    assert zeros.compute() == 0
    with pytest.raises(ValueError, match="has seen no rows yet"):
        metrics.AURC().compute()


def test_two_processes_agree_with_the_function_of_all_rows(tmp_path: Path) -> None:
    in_two_processes(gathered, tmp_path)
