"""What a type checker says about calls of wrappers: mypy on a few lines, each marked with the expected message.

Of a decorated class mypy knows nothing more than before, since it leaves out what class decorators give: `Net().voters()` and the decorator
without parentheses are errors there.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

LINES = """\
from typing import Literal

import torch
from torch import nn

from workbench import Wrapper, neo, sample, sculpt, setting, vote

vote.Wrapper(5, share="rank1", output="logits")
vote.Wrapper(n_voter=5)  # wrong
vote.Wrapper(output="logit")  # wrong
vote.Wrapper(strategy="fast")  # wrong
vote.Wrapper(share="rank2")  # wrong
vote.Wrapper("5")  # wrong
vote.Wrapper().n_voters = 3  # wrong
sculpt.Wrapper(sculpt.Normal)
sculpt.Wrapper(sculpt.Normal(beta=0.5), n_layers=1)
sculpt.Wrapper(nn.Linear)  # wrong
neo.Wrapper(layers=["0"], density="knn")
neo.Wrapper(density="nearest")  # wrong
sample.Wrapper(distribution=sample.Bernoulli(0.2), where="weights")
sample.Wrapper(where="bias")  # wrong


class Own(Wrapper):
    size: int = setting(default=3, least=1, help="how large")
    mode: Literal["slow", "fast"] = setting(default="slow", help="how")


Own(4, mode="fast", chunk=2)
Own(mode="quick")  # wrong
Own().size.bit_length()
Own().size.upper()  # wrong


@vote.Wrapper()
class Net(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


y, risk = vote.Wrapper()(nn.Linear(2, 1))(torch.ones(1, 2), return_risk=True)
"""


@pytest.mark.slow
def test_mypy_sees_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "calls.py"
    file.write_text(LINES)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(file)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    wrong = {int(number) for number in re.findall(r"calls\.py:(\d+): error", said)}
    assert wrong == {i for i, line in enumerate(LINES.splitlines(), 1) if line.endswith("# wrong")}, said
