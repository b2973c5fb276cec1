"""`apply` of wrapped objects: functions that write into weights, such as initializations, write into those of every voter."""

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
    """Apply a function to every module; if it wrote into weights of the first voter, apply it again for every other voter.

    Args:
        root: the wrapped object.
        apply: `nn.Module.apply` bound to it.
        fn: function called with each module.

    Returns:
        Result of the first `apply`.
    """
    table = table_of(root)
    old_values = {name: view.detach().clone() for name, view in table.views.items()}
    result = apply(fn)
    if all(view.is_meta or torch.equal(view, old_values[name]) for name, view in table.views.items()):
        return result
    rules = [table.record.rules[name] for name in old_values]
    voters = {rule.axis: len(table.get(rule.name)) for rule in map(_model_rule, rules) if isinstance(rule, Stacked)}
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
            for tensor, value in shared:  # shared tensors keep the result of the first application
                tensor.copy_(value)
    return result


def _model_rule(rule: Rule) -> Rule:
    """Return the rule for the model's own layers, without those for risk heads."""
    return _model_rule(rule.options[0]) if isinstance(rule, Split) else rule


__all__ = ["apply_to_voters"]
