"""A line of the user's code is named alike in every message, and quoted errors are cut at the end of a sentence or word."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from workbench import diagnose, vote
from workbench.introspect.source_lines import first_sentence

WRITTEN = """\
import torch
from torch import nn

class Signed(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        h = self.fc(x)
        if h.sum() > 0:
            return h
        return -h

class Counting(Signed):
    def forward(self, x):
        global calls
        calls = 1
        return self.fc(x)
"""


def written(file: Path, name: str) -> nn.Module:
    """An instance of a class that a file defines; kernels compile their cells in the same way."""
    file.parent.mkdir(exist_ok=True)
    file.write_text(WRITTEN, encoding="utf-8")
    space: dict[str, Any] = {"__name__": "written"}
    exec(compile(WRITTEN, str(file), "exec"), space)
    return space[name]().eval()


@pytest.mark.parametrize(
    ("file", "place"),
    [("ipykernel_712/3921.py", "cell:11"), ("model.py", "model.py:11"), ("site-packages/lib.py", "lib.py:11")],
)
@pytest.mark.parametrize("strategy", ["vmap", "rescue"])
def test_a_forced_strategy_and_diagnose_name_the_same_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str, place: str, strategy: str
) -> None:
    monkeypatch.chdir(tmp_path)
    model = written(tmp_path / file, "Signed")
    with pytest.raises(RuntimeError) as refusal:
        vote.Wrapper(3, strategy=strategy)(model).eval()(torch.ones(4, 3))
    said = re.search(r"; at (\S+)\)\. Use strategy", str(refusal.value))
    assert said is not None, str(refusal.value)
    assert said[1] == place
    assert place in {finding.line for finding in diagnose(model, torch.ones(4, 3)).findings}
    assert "file an issue" not in str(refusal.value)  # torch's advice is not ours


def test_what_writes_a_global_is_named_by_the_same_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    model = written(tmp_path / "ipykernel_712" / "1.py", "Counting")
    with pytest.raises(ValueError, match=re.escape("; at cell:16). Use strategy")):
        vote.Wrapper(3, strategy="vmap")(model).eval()(torch.ones(4, 3))


def test_the_reason_in_explain_names_it_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    model = written(tmp_path / "ipykernel_712" / "1.py", "Signed")
    wrapped = vote.Wrapper(16)(model).eval()
    wrapped(torch.ones(1, 3))
    said = str(wrapped.explain())
    assert "; at cell:11" in said
    assert str(tmp_path) not in said


@pytest.mark.parametrize(
    ("message", "short"),
    [
        ("", ""),
        ("one line\nand another", "one line"),
        ("It is so. Please file an issue at https://example.org", "It is so"),
        ("a generator, e.g. numpy.random.Generator, or version 2.13 of i.e. Torch", None),
        ("word " * 50, "word " * 31 + "..."),
        ("x" * 500, "x" * 156 + " ..."),
        ("expected [2, 3]. got [3, 2]", None),
    ],
)
def test_cut_where_a_sentence_or_a_word_ends(message: str, short: str | None) -> None:
    assert first_sentence(message) == (message if short is None else short)
    assert len(first_sentence(message)) <= 160
