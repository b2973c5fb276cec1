"""Which inputs carry a risk: columns of a table by permutation, parts of images and tokens by occlusion, single numbers by gradients.

Example:
    >>> import torch
    >>> from workbench import attributions, data, vote
    >>> wrapped = vote.Wrapper(3)(torch.nn.Linear(10, 1))
    >>> importance = attributions.permutation_importance(wrapped, data.load("diabetes"), n_repeats=3)
    >>> importance.names, len(importance.ranked("epistemic"))
    (('prediction', 'epistemic', 'total', 'error'), 10)
"""

from __future__ import annotations

from workbench.attributions.gradients import IntegratedGradients, integrated_gradients
from workbench.attributions.occlusion import Occlusion, occlusion
from workbench.attributions.permutation import PermutationImportance, permutation_importance

__all__ = [
    "IntegratedGradients",
    "Occlusion",
    "PermutationImportance",
    "integrated_gradients",
    "occlusion",
    "permutation_importance",
]
