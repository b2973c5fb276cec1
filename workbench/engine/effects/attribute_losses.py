"""Terms of a loss that forward keeps in attributes for its caller, such as `self.aux_loss` of a mixture of experts."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ...errors import WorkbenchWarning
from ..tree import flatten, is_float
from .attributes import Values


def with_mean_terms(shown: Values, branches: list[Values], model: str) -> Values:
    """What attributes are to show after a call whose branches have kept values of their own.

    A number with a gradient is a term of a loss: its mean over the branches is shown, so that all of them learn from it as each would by
    itself. Other tensors are those of the first branch; a loss that takes one of them is told when its gradient arrives.

    Args:
        shown: copies of the first branch's attributes.
        branches: the attributes of all branches that count, the first one's first.
        model: name of the model, for the warning.
    """
    if len(branches) < 2 or not torch.is_grad_enabled():
        return shown
    return {name: _shown(name, value, branches, model) for name, value in shown.items()}


def _shown(name: tuple[str, str], value: Any, branches: list[Values], model: str) -> Any:
    if not isinstance(value, Tensor | list | tuple | dict):
        return value
    leaves, rebuild = flatten(value)
    if not any(map(_learns, leaves)):
        return value
    others = [flatten(branch.get(name))[0] for branch in branches]
    for i, leaf in enumerate(leaves):
        if not _learns(leaf):
            continue
        terms = [other[i] for other in others if len(other) == len(leaves) and _learns(other[i])]
        if not leaf.dim() and len(terms) == len(branches) and not any(term.dim() for term in terms):
            leaves[i] = torch.stack(terms).mean()
        else:
            leaf.register_hook(_Told(".".join(filter(None, name)), model, len(branches)))
    return rebuild(leaves) if not isinstance(value, Tensor) else leaves[0]


def _learns(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and is_float(leaf) and leaf.requires_grad and not leaf.is_leaf


class _Told:
    """On a tensor: warns where a gradient arrives at it, once."""

    def __init__(self, name: str, model: str, n: int) -> None:
        self.name, self.model, self.n, self.told = name, model, n, False

    def __call__(self, grad: Tensor) -> None:
        if not self.told:
            self.told = True
            warnings.warn(
                f"the loss takes the attribute {self.name} of {self.model}, in which forward keeps a tensor: it holds that of the first of "
                f"{self.n} branches, and the others learn nothing from it. Return it from forward, or keep a number there "
                "(a mean or a sum), which is averaged over the branches",
                WorkbenchWarning,
                stacklevel=2,
            )


__all__ = ["with_mean_terms"]
