"""Whether a model adds something behind the layers that risk heads have of their own: it would be part of their raw numbers as well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.batches.dealing import tell
from ..core.ownership import engine_of, table_of
from ..engine.plan import Bank, Plan, Split
from ..engine.tree import flatten, is_float, paths

SMALL = 0.1  # share of the spread of the predictions over rows that is no matter


def tell_of_skips(wrapped: Any, name: str, places: Mapping[str, int], args: tuple, kwargs: dict[str, Any]) -> None:
    """Warn once where a part of the output differs from row to row although all layers of the heads give zero.

    Args:
        wrapped: the model, in evaluation mode.
        name: of the method of the heads.
        places: a branch with a risk head, axis -> position.
        args, kwargs: a batch.
    """
    table, record = table_of(wrapped), wrapped._workbench
    own = {
        tensor
        for slot, rule in record.rules.items()
        if isinstance(rule, Split) and rule.axis == name and not record.slots[slot].buffer
        for tensor in rule.names(dict(places))
    }
    sources = engine_of(wrapped).clones.sources(flatten((args, kwargs))[0])
    before = sources.all()

    def answer(zero: bool) -> tuple[list[Any], list[str]]:
        bank = Bank(lambda key: torch.zeros_like(table.get(key)) if zero and key in own else table.get(key))
        plan = Plan((), record.rules, bank, keep_state=False, fixed=dict(places), state=record.state or ())
        branched, _ = engine_of(wrapped).run(plan, args, kwargs)
        return branched.leaves, paths(branched.rebuild(branched.leaves))

    try:
        with torch.no_grad():
            (added, at), (again, _), (whole, _) = answer(True), answer(True), answer(False)
    except Exception:  # what cannot be run without its last layers is not looked at
        return
    finally:
        sources.restore(before)
    for place, base, other, prediction in zip(at, added, again, whole, strict=True):
        if not (is_float(base) and base.dim() and len(base) > 1 and torch.equal(base, other)):
            continue
        if _spread(base) > SMALL * _spread(prediction):
            layers = ", ".join(path or "the model itself" for path in sorted(table.last_layers()))
            tell(
                wrapped,
                "skip",
                f"{name}: {place} is what the last layer ({layers}) gives and something that is added behind it, such as the latest value of "
                "a window. It is added to the raw numbers of the risk heads as well, so that the risk follows it. Let the model give the rest "
                "alone, such as the change, train it on that, and add it outside",
            )
            return


def _spread(values: Tensor) -> float:
    """The largest standard deviation over the rows; 0 where something is not finite, of which nothing is said."""
    spread = values.detach().flatten(1).std(0) if values.dim() > 1 else values.detach().std()[None]
    return float(spread.abs().max()) if spread.numel() and bool(spread.isfinite().all()) else 0.0


__all__ = ["tell_of_skips"]
