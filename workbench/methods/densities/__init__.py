"""Densities of a network's inner features, which score how unlike the training data a row is."""

from __future__ import annotations

from typing import Literal

from workbench.methods.densities.automatic import Automatic
from workbench.methods.densities.base import Density
from workbench.methods.densities.classes import Classwise, Neighbours
from workbench.methods.densities.distances import Mahalanobis, RelativeMahalanobis
from workbench.methods.densities.flow import Flow
from workbench.methods.densities.gaussian import Gaussian
from workbench.methods.densities.head import BoundaryDistance, VirtualLogit
from workbench.methods.densities.neighbour_guidance import GuidedEnergy
from workbench.methods.densities.pooling import pool
from workbench.methods.densities.reduce import Reduce
from workbench.methods.densities.scores import Energy, GeneralizedEntropy, MaxLogit, MaxSoftmax
from workbench.methods.densities.shaping import ClippedEnergy, PrunedEnergy, ScaledEnergy
from workbench.methods.densities.signature import Signature

# names of the densities in `neo.Wrapper(density=...)`
DensityName = Literal[
    "signature",
    "gaussian",
    "flow",
    "classwise",
    "knn",
    "energy",
    "max_logit",
    "msp",
    "gen",
    "mahalanobis",
    "relative",
    "vim",
    "fdbd",
    "nnguide",
    "react",
    "ash",
    "scale",
    "auto",
]
DENSITIES: dict[str, type[Density]] = {
    "signature": Signature,
    "gaussian": Gaussian,
    "flow": Flow,
    "classwise": Classwise,
    "knn": Neighbours,
    "energy": Energy,
    "max_logit": MaxLogit,
    "msp": MaxSoftmax,
    "gen": GeneralizedEntropy,
    "mahalanobis": Mahalanobis,
    "relative": RelativeMahalanobis,
    "vim": VirtualLogit,
    "fdbd": BoundaryDistance,
    "nnguide": GuidedEnergy,
    "react": ClippedEnergy,
    "ash": PrunedEnergy,
    "scale": ScaledEnergy,
    "auto": Automatic,
}

__all__ = [
    "DENSITIES",
    "Automatic",
    "BoundaryDistance",
    "Classwise",
    "ClippedEnergy",
    "Density",
    "DensityName",
    "Energy",
    "Flow",
    "Gaussian",
    "GeneralizedEntropy",
    "GuidedEnergy",
    "Mahalanobis",
    "MaxLogit",
    "MaxSoftmax",
    "Neighbours",
    "PrunedEnergy",
    "Reduce",
    "RelativeMahalanobis",
    "ScaledEnergy",
    "Signature",
    "VirtualLogit",
    "pool",
]
