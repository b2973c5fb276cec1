"""A zoo of awkward models: a table of what PyTorch users do and wrappers trip over.

Each `Case` builds a small model, draws inputs for it and states facts about it as tags. The tests check every fact in both
directions, so that both a tag and its absence are reliable.

Example:
    >>> case = CASES["cnn_bn"]
    >>> args, kwargs = case.inputs(seed=0, rows=6)
    >>> case.build()(*args, **kwargs).shape
    torch.Size([6, 2])
    >>> "cnn_bn" in [c.name for c in cases("buffers")]
    False
"""

from __future__ import annotations

from . import architectures, control, interfaces, layers, objects, parameters, side_effects
from .core import CASES, TAGS, Case, Inputs, cases, float_leaves, leaves, modules, normal, tokens

__all__ = [
    "CASES",
    "TAGS",
    "Case",
    "Inputs",
    "architectures",
    "cases",
    "control",
    "float_leaves",
    "interfaces",
    "layers",
    "leaves",
    "modules",
    "normal",
    "objects",
    "parameters",
    "side_effects",
    "tokens",
]
