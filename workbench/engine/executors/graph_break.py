"""Graph breaks of `torch.compile`. Imported only while tracing, since it imports the compiler."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ..combine import Branched
from ..request import Request
from ..results import Result

_WHY = (
    "workbench runs the branches outside torch.compile: in the first call in each mode, which it needs to know the model (call it once before "
    "compiling it with fullgraph=True), and always if the model hands on state (compile with state= goes without fullgraph=True), changes its "
    "attributes or inputs, breaks the graph, gives detections, or draws random numbers that branches share"
)
# the argument `reason` exists since torch 2.8
_REASON: dict[str, Any] = {"reason": _WHY} if "reason" in inspect.signature(torch.compiler.disable).parameters else {}


class _Eager(Protocol):
    def eager(self, request: Request, strategy: str) -> tuple[Branched, Sequence[Result]]: ...


@torch.compiler.disable(**_REASON)
def outside(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function outside the graph."""
    return function(*args)


@torch.compiler.disable(**_REASON)
def run(engine: _Eager, request: Request, strategy: str) -> tuple[Branched, Sequence[Result]]:
    """Run `Engine.eager` outside the graph."""
    return engine.eager(request, strategy)
