"""Running the branches outside the graph of `torch.compile`; imported only while it traces, since it brings the compiler with it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..branch import Result
from ..combine import Branched
from ..plan import Plan

if TYPE_CHECKING:
    from ..run import Engine

_WHY = (
    "workbench runs the branches outside torch.compile: in the first call in each mode, which it needs to know the model (call it once before "
    "compiling it with fullgraph=True), and always if the model changes its attributes or inputs, breaks the graph, or draws random numbers "
    "that branches share"
)


# torch has told reasons since 2.8
_TOLD: dict[str, Any] = {"reason": _WHY} if "reason" in inspect.signature(torch.compiler.disable).parameters else {}


@torch.compiler.disable(**_TOLD)
def run(
    engine: Engine, plan: Plan, args: tuple, kwargs: dict[str, Any], strategy: str
) -> tuple[Branched, Sequence[Result]]:
    """As `Engine.eager`."""
    return engine.eager(plan, args, kwargs, strategy)
