"""Loss terms that forward stores in attributes for its caller, such as `self.aux_loss` of a mixture of experts."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ...errors import WorkbenchWarning
from ..tree import flatten, is_float
from .attributes import Values


def with_mean_terms(shown: Values, branches: list[Values], model: str) -> Values:
    """Return the attribute values to set on the wrapped object after a call whose branches have different values.

    A scalar that requires gradients is taken for a loss term and replaced by its mean over the branches, so that each branch learns from it
    as it would alone. Other tensors are those of the first branch; they warn when a gradient reaches them.

    Args:
        shown: copies of the first branch's attributes.
        branches: attributes of all models, without auxiliary branches such as risk heads; the first branch's come first.
        model: name of the model, for the warning.
    """
    if len(branches) < 2 or not torch.is_grad_enabled():
        return shown
    replaced: dict[int, Any] = {}  # by id of the value: modules may share a list
    for name, value in shown.items():
        if id(value) not in replaced:
            replaced[id(value)] = _shown_value(name, value, branches, model)
    return {name: replaced[id(value)] for name, value in shown.items()}


def _shown_value(name: tuple[str, str], value: Any, branches: list[Values], model: str) -> Any:
    if not isinstance(value, Tensor | list | tuple | dict):
        return value
    leaves, rebuild = flatten(value)
    if not any(map(_requires_gradient, leaves)):
        return value
    others = [flatten(branch.get(name))[0] for branch in branches]
    for i, leaf in enumerate(leaves):
        if not _requires_gradient(leaf):
            continue
        terms = [other[i] for other in others if len(other) == len(leaves) and _requires_gradient(other[i])]
        if not leaf.dim() and len(terms) == len(branches) and not any(term.dim() for term in terms):
            leaves[i] = torch.stack(terms).mean()
        else:
            leaf.register_hook(_GradientWarning(".".join(filter(None, name)), model, len(branches)))
    return rebuild(leaves) if not isinstance(value, Tensor) else leaves[0]


def _requires_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and is_float(leaf) and leaf.requires_grad and not leaf.is_leaf


class _GradientWarning:
    """Tensor hook that warns once when a gradient reaches the tensor."""

    def __init__(self, name: str, model: str, n: int) -> None:
        self.name, self.model, self.n, self.warned = name, model, n, False

    def __call__(self, grad: Tensor) -> None:
        if not self.warned:
            self.warned = True
            warnings.warn(
                f"the loss uses the attribute {self.name} of {self.model}, in which forward keeps a tensor: it holds that of the first of "
                f"{self.n} branches, and the others do not learn from it. Return it from forward, or keep a scalar there (a mean or a sum), "
                "which is averaged over the branches",
                WorkbenchWarning,
                stacklevel=2,
            )


__all__ = ["with_mean_terms"]
