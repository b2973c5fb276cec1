"""Learned amounts of noise: which weights have one, and whether those that have one meet noise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn

from ..core.batches.dealing import tell

if TYPE_CHECKING:
    from ..core.ownership import Table

_NO_SITES = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm)  # their weights meet no data in a matrix product
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)  # all weights meet the data in one call


def noisy_weights(table: Table, weights: list[str]) -> list[str]:
    """Those weights before which noise enters: as an example has shown, or as far as the layers tell.

    A call that uses several weights of one layer (a recurrent one) has one amount, that of the first by name. Without an example the first
    layer is taken to get the model's input, which meets no noise, unless there is one layer only.
    """
    execution = table.record.execution
    only = len(table.layers()) <= 1
    if execution is not None and (execution.noisy or execution.raw):
        slots = {f"{path}.{a}".lstrip("."): name for name in weights for path, a in table.record.slots[name].owners}
        first: set[str] = set()
        for call in (*execution.noisy, *(execution.raw if only else ())):
            by_layer: dict[str, str] = {}  # the fused call of a transformer's layer has those of several
            for name in sorted(slots[name] for name in call if name in slots):
                by_layer.setdefault(table.record.slots[name].owners[0][0], name)
            first.update(by_layer.values())
        return [name for name in weights if name in first] or weights
    return [name for name in weights if only or _meets_noise(table, name, weights)] or weights


def _meets_noise(table: Table, name: str, weights: list[str]) -> bool:
    slots = table.record.slots
    (path, _), *others = slots[name].owners
    module = table.module(path)
    if others:  # of several layers
        return True
    if isinstance(module, _RECURRENT):
        same = [other for other in weights if slots[other].owners[0][0] == path]
        if name != min(same):
            return False
    opens = slots[table.parameters()[0]].owners[0][0] == path  # nothing that computes is registered before it
    return not isinstance(module, _NO_SITES) and not (opens and not isinstance(module, nn.RNNCellBase))


class MetSites:
    """The calls of one pass in which weights meet data.

    Args:
        amounts: the weights that have an amount of their own.
        weights: all that could have one.
    """

    def __init__(self, amounts: Iterable[str], weights: Iterable[str]) -> None:
        self.amounts, self.weights = frozenset(amounts), frozenset(weights)
        self.used: set[str] = set()
        self.unused: set[str] = set()
        self.without: set[str] = set()

    def note(self, names: set[str], noisy: bool) -> str | None:
        """A call with these weights; returns the one whose amount counts, if there is any."""
        known = sorted(names & self.amounts)
        self.unused.update(known if not noisy else known[1:])
        if not noisy:
            return None
        self.used.update(known[:1])
        if not known:
            self.without.update(sorted(names & self.weights)[:1])
        return known[0] if known else None

    def check(self, table: Table) -> None:
        """After a pass in training: tell once which amounts do not fit where noise enters, and freeze those that nothing would train."""
        if "amounts" in table.record.told:
            return
        unused = sorted(self.unused - self.used)
        for name in unused:
            table.get(f"{name}@sample").requires_grad_(False)
        says = [
            *([f"no noise enters before {', '.join(unused[:3])}, whose amount is not trained"] if unused else []),
            *(
                [f"noise enters before {', '.join(sorted(self.without)[:3])}, whose amount is fixed"]
                if self.without
                else []
            ),
        ]
        if says:
            tell(
                table.root,
                "amounts",
                f"sample(trainable=True): {'; '.join(says)}. Wrap with example=x, inputs that the model takes: then each layer that noise "
                "enters has an amount, and no other",
            )
        table.record.told.add("amounts")


__all__ = ["MetSites", "noisy_weights"]
