"""Check at the first calls that the layers which voters or risk heads have of their own reach every part of an output.

`layer_order` knows the layers of an output as a whole, but boxes and scores that a detector concatenates end in different ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.combine import Branched
from ..engine.effects.private_random import own_random
from ..engine.effects.random import values_unavailable
from ..engine.tree import flatten, is_float, map_tensors, paths
from ..introspect.source_lines import some_of
from .single_warnings import warn_once

_SETTLED = "reached"
_DRAWS = 3  # changes of the weights after which a number that is still the same does not depend on them

Place = tuple[int, int, Tensor]  # a leaf, one of its dimensions, and the indices along it


def check_reached(wrapped: Any, branched: Branched, args: tuple, kwargs: dict[str, Any]) -> None:
    """Compare the branches of a call; where they are equal in a part of an output, call the model with other weights to see why.

    Voters get a warning if it is since all of them share the layers that this part depends on: its risk is 0.

    Raises:
        ValueError: if risk heads do not reach a part, so that its risk would be made of the prediction.
    """
    record = wrapped._workbench
    without_values = values_unavailable() or any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in branched.leaves)
    if _SETTLED in record.warned or without_values:
        return
    weights = {name for name, slot in record.slots.items() if not slot.buffer}
    settled = True
    for dim, axis in enumerate(branched.axes):
        separate = {name for name in weights & record.rules.keys() if axis in record.rules[name].axes()}
        if not separate or separate == weights:
            continue
        places = _equal_places(branched, dim, record.execution.names if record.execution else ())
        if places is None:  # voters that start at the same weights
            settled = False
        elif left_out := _not_reached(wrapped, places, separate, weights - separate, args, kwargs):
            record.warned.add(_SETTLED)
            _report(wrapped, next(m for m in record.methods if m.name == axis), _described(branched, left_out))
    if settled:
        record.warned.add(_SETTLED)


def keep_settled(trial: Any, wrapped: Any) -> None:
    """Do not check, and report, again what calls of a copy have settled."""
    wrapped._workbench.warned |= trial._workbench.warned & {_SETTLED}


def _equal_places(branched: Branched, dim: int, main: Sequence[str]) -> list[Place] | None:
    """Return where varying numbers are equal along an axis for all rows; None if all numbers are.

    Args:
        branched: the outputs of all branches.
        dim: position of the axis.
        main: names of outputs that none of the others is computed from; these are looked at also where all of their numbers are equal.
    """
    names = paths(branched.rebuild(branched.leaves)) if main else [""] * len(branched.leaves)
    places: list[Place] = []
    looked, differs, depth = False, False, len(branched.axes)
    for i, leaf in enumerate(branched.leaves):
        if not isinstance(leaf, Tensor) or not is_float(leaf) or leaf.dim() < depth + 2 or not leaf.numel():
            continue
        leaf = leaf.detach().movedim(dim, 0)
        equal = (leaf == leaf[:1]).flatten(0, depth - 1).all(0)
        whole = bool(equal.all())
        looked, differs = True, differs or not whole
        if whole and names[i] not in main:
            continue
        value = leaf.flatten(0, depth - 1)[0]
        for d in range(1, equal.dim()) if bool(equal.any()) else ():
            columns, numbers = equal.movedim(d, 0).flatten(1), value.movedim(d, 0).flatten(1)
            indices = (columns.all(1) & (numbers != numbers[:, :1]).any(1)).nonzero().flatten()
            if len(indices):
                places.append((i, d, indices))
    return places if differs or not looked else None


def _not_reached(
    wrapped: Any, places: list[Place], separate: set[str], shared: set[str], args: tuple, kwargs: dict[str, Any]
) -> list[Place]:
    """Return the places that do not depend on some weights, but on others that are shared."""
    if not places:
        return []
    model, record = super(type(wrapped), wrapped).voters()[0].eval(), wrapped._workbench
    parameters = dict(nn.Module.named_parameters(model, remove_duplicate=False))

    def answer() -> list[Any]:
        return flatten(
            getattr(model, record.method)(*map_tensors(torch.clone, args), **map_tensors(torch.clone, kwargs))
        )[0]

    def changes(names: set[str]) -> dict[int, Tensor]:
        """Return leaf -> which of its numbers change with the weights."""
        chosen = [p for name in names if (p := parameters.get(name)) is not None and is_float(p)]
        kept, before = [p.clone() for p in chosen], answer()
        changed: dict[int, Tensor] = {}
        for _ in range(_DRAWS):
            for p, value in zip(chosen, kept, strict=True):
                p.copy_(value + torch.randn_like(value) * (value.abs().mean() + 0.1))
            for i, (old, new) in enumerate(zip(before, answer(), strict=True)):
                if is_float(old):
                    changed[i] = changed.get(i, False) | (old != new)
        for p, value in zip(chosen, kept, strict=True):
            p.copy_(value)
        return changed

    devices = sorted({p.device for p in parameters.values()}, key=str)
    try:
        with own_random(0, *devices), torch.no_grad():
            by_separate, by_shared = changes(separate), changes(shared)
            return [
                (i, d, indices)
                for i, d, indices in places
                if not by_separate[i].index_select(d, indices).any() and by_shared[i].index_select(d, indices).any()
            ]
    except Exception:  # the model does not take other weights; what it answers is not known then
        return []


def _described(branched: Branched, places: list[Place]) -> str:
    """Name parts of the output, each by one dimension only."""
    names, depth = paths(branched.rebuild(branched.leaves)), len(branched.axes)
    words: dict[int, str] = {}
    for i, d, indices in places:
        first, last = int(indices[0]), int(indices[-1])
        shown = some_of(indices.tolist(), 8)
        if last - first == len(indices) - 1 and first < last:
            shown = f"{first} to {last}"
        whole = len(indices) == branched.leaves[i].shape[depth + d]
        words.setdefault(i, names[i] if whole else f"{names[i]} at {shown} of dimension {d}")
    return " and ".join(words.values())


def _report(wrapped: Any, method: Any, where: str) -> None:
    if not method.members:
        raise ValueError(
            f"{method.name}: no layer that the risk head has of its own reaches {where}, and the risk there would be made of the prediction: "
            "give a larger n_layers="
        )
    warn_once(
        wrapped,
        "part not reached",
        f"{method.name}: no layer that each voter has of its own reaches {where}: all share the layers that compute this, and its epistemic "
        "risk is 0. Give a larger share=, or share=None",
    )


__all__ = ["check_reached", "keep_settled"]
