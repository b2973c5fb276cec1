"""Which inputs carry a risk: columns of a table by permutation, places of an image and tokens of a text by occlusion.

Example:
    >>> import torch
    >>> from workbench import attributions, data, vote
    >>> wrapped = vote.Wrapper(3)(torch.nn.Linear(10, 1))
    >>> importance = attributions.permutation_importance(wrapped, data.load("diabetes"), n_repeats=3)
    >>> importance.names, len(importance.ranked("epistemic"))
    (('prediction', 'epistemic', 'total', 'error'), 10)
"""

from __future__ import annotations

from workbench.attributions.occlusion import Occlusion, occlusion
from workbench.attributions.permutation import PermutationImportance, permutation_importance

__all__ = ["Occlusion", "PermutationImportance", "occlusion", "permutation_importance"]
