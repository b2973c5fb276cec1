"""Learned amounts of noise: which weights have one, and a check that noise enters where those weights are used."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn

from ..core.single_warnings import warn_once

if TYPE_CHECKING:
    from ..core.ownership import Table

_NO_SITES = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm)  # layers whose weights are not in a matrix product with data
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)  # layers that use all their weights in one call


def noisy_weights(table: Table, weights: list[str]) -> list[str]:
    """Return the weights whose layer's input gets noise, known from an example, otherwise from the types of the layers.

    A call that uses several weights of one layer (a recurrent one) has one amount, that of the first by name. Without an example, the first
    layer is assumed to take the model's input, which gets no noise unless there is only one layer.
    """
    execution = table.record.execution
    single_layer = len(table.layers()) <= 1
    if execution is not None and (execution.noisy or execution.raw):
        slots = {f"{path}.{a}".lstrip("."): name for name in weights for path, a in table.record.slots[name].owners}
        first: set[str] = set()
        for call in (*execution.noisy, *(execution.raw if single_layer else ())):
            by_layer: dict[str, str] = {}  # the fused call of a transformer layer uses weights of several layers
            for name in sorted(slots[name] for name in call if name in slots):
                by_layer.setdefault(table.record.slots[name].owners[0][0], name)
            first.update(by_layer.values())
        return [name for name in weights if name in first] or weights
    return [name for name in weights if single_layer or _gets_noise(table, name, weights)] or weights


def _gets_noise(table: Table, name: str, weights: list[str]) -> bool:
    slots = table.record.slots
    (path, _), *others = slots[name].owners
    module = table.module(path)
    if others:  # tied: used by several layers
        return True
    if isinstance(module, _RECURRENT):
        same = [other for other in weights if slots[other].owners[0][0] == path]
        if name != min(same):
            return False
    is_first = slots[table.parameters()[0]].owners[0][0] == path
    return not isinstance(module, _NO_SITES) and not (is_first and not isinstance(module, nn.RNNCellBase))


class SitesWithAmounts:
    """Record of one pass: which weights are used where noise enters, and whether they have a learned amount.

    Args:
        amounts: names of the weights that have a learned amount.
        weights: names of all weights that could have one.
    """

    def __init__(self, amounts: Iterable[str], weights: Iterable[str]) -> None:
        self.amounts, self.weights = frozenset(amounts), frozenset(weights)
        self.used: set[str] = set()
        self.unused: set[str] = set()
        self.without: set[str] = set()

    def note(self, names: set[str], noisy: bool) -> str | None:
        """Record a call that uses these weights, and return the name of the one whose amount applies, None if there is none."""
        known = sorted(names & self.amounts)
        self.unused.update(known if not noisy else known[1:])
        if not noisy:
            return None
        self.used.update(known[:1])
        if not known:
            self.without.update(sorted(names & self.weights)[:1])
        return known[0] if known else None

    def check(self, table: Table) -> None:
        """Warn once, after a training pass, about amounts that do not match where noise enters, and freeze amounts that nothing would train."""
        if "amounts" in table.record.warned:
            return
        unused = sorted(self.unused - self.used)
        for name in unused:
            table.get(f"{name}@sample").requires_grad_(False)
        problems = [
            *([f"no noise enters before {', '.join(unused[:3])}, whose amount is not trained"] if unused else []),
            *(
                [f"noise enters before {', '.join(sorted(self.without)[:3])}, whose amount is fixed"]
                if self.without
                else []
            ),
        ]
        if problems:
            warn_once(
                table.root,
                "amounts",
                f"sample(trainable=True): {'; '.join(problems)}. Wrap with example=x, inputs that the model takes: then exactly the layers "
                "that noise enters have an amount",
            )
        table.record.warned.add("amounts")


__all__ = ["SitesWithAmounts", "noisy_weights"]
