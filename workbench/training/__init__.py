"""Training of any wrapped model, with each method trained as in its paper; results are reproducible and in original units.

Example:
    >>> import torch
    >>> from workbench import compose, data
    >>> from workbench.training import fit
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    >>> history = fit(compose()(net), data.load("cubic", n_train=100), epochs=3)
    >>> len(history.frame)
    3
"""

from __future__ import annotations

from workbench.training.augmentation import RandomCrop, RandomFlip
from workbench.training.backward import Backward
from workbench.training.fitting import fit
from workbench.training.history import History
from workbench.training.prior_scale import prior_scale
from workbench.training.progress import Progress

__all__ = ["Backward", "History", "Progress", "RandomCrop", "RandomFlip", "fit", "prior_scale"]
