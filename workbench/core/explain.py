"""Explanation of how a wrapped model runs, and why, as text and as a table."""

from __future__ import annotations

import html
from typing import Any

from ..engine.dispatch import EXECUTORS, CallKind, Decision
from .ownership import engine_of
from .parameters import WrappedParameters

COLUMNS = ("call", "branches", "runs on", "cost", "why")


class Explanation(str):
    """String that is displayed as a table in notebooks.

    Args:
        head: lines above the table.
        rows: one row per kind of call so far, with the cells of `COLUMNS`.
    """

    head: list[str]
    rows: list[tuple[str, ...]]

    def __new__(cls, head: list[str], rows: list[tuple[str, ...]]) -> Explanation:
        calls = [
            f"  {call}, {branches}: {executor}, {cost}, because {why}" for call, branches, executor, cost, why in rows
        ]
        text = super().__new__(cls, "\n".join([head[0], *(f"  {line}" for line in head[1:]), *calls]))
        text.head, text.rows = head, rows
        return text

    def __repr__(self) -> str:
        return str(self)  # as lines, also where it is not printed

    def _repr_html_(self) -> str:
        head = "".join(f"<div>{html.escape(line)}</div>" for line in self.head[1:])
        cells = "".join(
            "<tr>" + "".join(f'<td style="text-align:left">{html.escape(cell)}</td>' for cell in row) + "</tr>"
            for row in self.rows
        )
        titles = "".join(f'<th style="text-align:left">{name}</th>' for name in COLUMNS)
        table = f"<table><thead><tr>{titles}</tr></thead><tbody>{cells}</tbody></table>" if cells else ""
        return f"<div><b>{html.escape(self.head[0])}</b>{head}{table}</div>"


def explained(wrapped: Any) -> Explanation:
    """Describe what wrapping added, and for each kind of call so far the executor, its cost in passes of the model, and the reason."""
    record = wrapped._workbench
    added, base = (
        list(parameters(wrapped))
        for parameters in (WrappedParameters.risk_parameters, WrappedParameters.base_parameters)
    )
    head = [
        f"{type(wrapped)._plain_class.__name__}: {', '.join(map(repr, record.methods)) or 'no methods'}",
        f"parameters: {_count(added)} of the methods, {_count(base)} shared with the given model",
    ]
    if record.released:
        head.append(f"taken over: {', '.join(record.released[:4])}{' ...' if len(record.released) > 4 else ''}")
    if hidden := sorted(type(wrapped)._hidden):
        head.append(
            f"the model's own: {', '.join(hidden)}; those of workbench are workbench.Wrapped.{hidden[0]} and so on"
        )
    engine = engine_of(wrapped)
    if engine.clones.impure:
        names = sorted(f"{path}.{name}" if path else name for path, name in engine.clones.impure)
        head.append(f"forward changes {', '.join(names[:6])}: {_PURITY[record.purity]}")
    if replays := wrapped.__dict__["_engine"].recorded.replays:
        head.append(f"{replays:,} {'call was' if replays == 1 else 'calls were'} answered by a graph of all branches")
    n_added = sum(p.numel() for p in added)
    share = n_added / max(n_added + sum(p.numel() for p in base), 1)
    decisions = engine.dispatcher.decisions.items()
    if not decisions:
        head.append("not called yet: how it runs is decided at the first call of each kind")
    return Explanation(head, [_row(kind, decision, share) for kind, decision in decisions])


_PURITY = {
    "once": "they end as if it had been called once",
    "warn": "they end as if it had been called once",
    "raise": "refused",
    "allow": "each pass changes them",
}


def _count(parameters: list[Any]) -> str:
    size = sum(p.numel() * p.element_size() for p in parameters)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{sum(p.numel() for p in parameters):,} ({size:.3g} {unit})"


def _row(kind: CallKind, decision: Decision, share: float) -> tuple[str, ...]:
    call = f"{'training' if kind.training else 'evaluation'}, {'with' if kind.gradients else 'without'} gradients, {kind.device}"
    if kind.autocast:
        call += ", autocast"
    if kind.dealt:
        call += ", rows dealt"
    branches = " x ".join(f"{axis.size} {axis.name}" for axis in kind.axes) or "1 branch"
    n = decision.branches
    if n == 1 or kind.dealt:
        cost = "1 pass"
    elif decision.by_model and decision.executor != "loop":
        models = n // kind.axes[-1].size
        cost = f"{models} {'pass' if models == 1 else 'passes'}, and {n} of the last layers"
    elif decision.shared and decision.executor != "loop":
        cost = f"1 pass, and {n} of the last layers ({share:.0%} of all parameters)"
    elif decision.chunk is not None and EXECUTORS[decision.executor].at_once:
        cost = f"{n} passes, {decision.chunk * n // kind.axes[0].size} at once"
    else:
        cost = f"{n} passes{' in one' if EXECUTORS[decision.executor].at_once else ''}"
    refused = "; ".join(
        f"{executor} refused: {words}" for executor, words in decision.refused.items() if words not in decision.reason
    )
    return call, branches, decision.executor, cost, f"{decision.reason}; {refused}" if refused else decision.reason
