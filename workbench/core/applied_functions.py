"""Functions that `wrapped.apply` calls with each module: what they write into weights, they write into those of every voter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..engine.plan import Rule, Split, Stacked
from .ownership import table_of
from .parameters import stacked_names


def apply_to_voters(
    root: Any, apply: Callable[[Callable[[nn.Module], None]], Any], fn: Callable[[nn.Module], None]
) -> Any:
    """Apply a function once, and where that wrote into weights of the first voter, as initialisations do, to the others one after another.

    Args:
        root: the wrapped object.
        apply: its own `nn.Module.apply`.
        fn: what is called with each module.
    """
    table = table_of(root)
    given = {name: view.detach().clone() for name, view in table.views.items()}
    result = apply(fn)
    if all(view.is_meta or torch.equal(view, given[name]) for name, view in table.views.items()):
        return result
    rules = [table.record.rules[name] for name in given]
    voters = {rule.axis: len(table.get(rule.name)) for rule in map(_own, rules) if isinstance(rule, Stacked)}
    stacks = stacked_names(rules)
    tensors = [*nn.Module.named_parameters(root), *nn.Module.named_buffers(root)]
    shared = [(tensor, tensor.detach().clone()) for name, tensor in tensors if name not in stacks]
    try:
        for voter in range(1, max(voters.values(), default=1)):
            table.show(dict.fromkeys(voters, voter))
            apply(fn)
    finally:
        table.show()
        with torch.no_grad():
            for tensor, value in shared:  # written once
                tensor.copy_(value)
    return result


def _own(rule: Rule) -> Rule:
    """That of the model's own layers, beside risk heads."""
    return _own(rule.options[0]) if isinstance(rule, Split) else rule


__all__ = ["apply_to_voters"]
