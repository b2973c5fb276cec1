"""What the committed notebooks refuse; ``pytest --notebooks notebooks`` tests that they run and what they record."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import ROOT

from workbench.notebook import run_notebook


@pytest.mark.slow
def test_compare_refuses_unknown_wrappers_before_anything_trains(jupyter_home: Path, tmp_path: Path) -> None:
    parameters = {"data": "diabetes", "wrappers": ["baseline", "vote+skulpt"], "epochs": 10**6}
    run = run_notebook(ROOT / "notebooks" / "compare.ipynb", tmp_path / "compare.ipynb", parameters, timeout=300)
    assert run.status == "failed"
    assert "no wrapper skulpt" in (run.error or "")
