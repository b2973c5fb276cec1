"""Copies of the state of a model, to which a training can return."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


def copied_state(model: nn.Module) -> dict[str, Any]:
    """Return a copy of `model.state_dict()` that later training leaves as it is.

    `copy.deepcopy` does not support tensors in a compressed sparse layout, which are cloned.
    """
    state = model.state_dict()
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    return copy.deepcopy(state, {id(t): t.clone() for t in tensors if t.layout is not torch.strided})


__all__ = ["copied_state"]
