"""Output distributions that `sculpt` fits around a prediction; usable as a class, or as an instance with options.

Example:
    >>> import torch
    >>> from workbench.distributions import Normal
    >>> y, y_pred, y_risk = torch.tensor([[1.0]]), torch.tensor([[0.0]]), torch.tensor([[2.0]])
    >>> Normal.loss_function(y, y_pred, y_risk)
    tensor(1.7371)
    >>> Normal(beta=0.5).loss_function(y, y_pred, y_risk)
    tensor(3.4742)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.deprecation import deprecated_names
from workbench.distributions.base import Distribution
from workbench.distributions.censored import Censored
from workbench.distributions.evidential import NormalInverseGamma
from workbench.distributions.from_torch import FromTorch
from workbench.distributions.joint import JointNormal
from workbench.distributions.logits import LogitNormal
from workbench.distributions.mixture import Mixture
from workbench.distributions.mixture_density import MixtureDensity
from workbench.distributions.quantiles import Quantiles
from workbench.distributions.values import Cauchy, Laplace, LogNormal, Normal, StudentT

_FAMILIES: tuple[type[Distribution], ...] = (
    Normal,
    Laplace,
    StudentT,
    Cauchy,
    LogNormal,
    NormalInverseGamma,
    Quantiles,
    JointNormal,
    MixtureDensity,
    FromTorch,
    Censored,
    LogitNormal,
)
__all__ = [
    "Cauchy",
    "Censored",
    "Distribution",
    "FromTorch",
    "JointNormal",
    "Laplace",
    "LogNormal",
    "LogitNormal",
    "Mixture",
    "MixtureDensity",
    "Normal",
    "NormalInverseGamma",
    "Quantiles",
    "StudentT",
]

if not TYPE_CHECKING:
    __getattr__ = deprecated_names(
        __name__, {"FAMILIES": (f"{__name__}:_FAMILIES", "the classes of workbench.distributions by name")}
    )
