"""Trainings whose steps are replayed from a graph early."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.training import traced_step
from workbench.training.traced_step import TracedStep


def replay_early(monkeypatch: pytest.MonkeyPatch) -> list[TracedStep]:
    """Make graphs from the fourth step on, used even where they are slower; return the list of what replays the steps of each training."""
    made: list[TracedStep] = []
    init = TracedStep.__init__

    def noted(self: TracedStep, *args: Any) -> None:
        init(self, *args)
        made.append(self)

    monkeypatch.setattr(TracedStep, "__init__", noted)
    monkeypatch.setattr(traced_step, "MIN_STEPS", 2)
    monkeypatch.setattr(traced_step, "MIN_LONG_STEPS", 2)
    monkeypatch.setattr(traced_step, "_faster", lambda recorded: True)
    return made
