"""Density models of the inner features of a network: how unlike the training data is this row?"""

from __future__ import annotations

from typing import Literal

from workbench.methods.densities.base import Density
from workbench.methods.densities.classes import Classwise, Neighbours
from workbench.methods.densities.flow import Flow
from workbench.methods.densities.gaussian import Gaussian
from workbench.methods.densities.pooling import pool
from workbench.methods.densities.reduce import Reduce
from workbench.methods.densities.scores import Energy, MaxLogit
from workbench.methods.densities.signature import Signature

# by what `neo.Wrapper(density=...)` calls them
DensityName = Literal["signature", "gaussian", "flow", "classwise", "knn", "energy", "max_logit"]
DENSITIES: dict[str, type[Density]] = {
    "signature": Signature,
    "gaussian": Gaussian,
    "flow": Flow,
    "classwise": Classwise,
    "knn": Neighbours,
    "energy": Energy,
    "max_logit": MaxLogit,
}

__all__ = [
    "DENSITIES",
    "Classwise",
    "Density",
    "DensityName",
    "Energy",
    "Flow",
    "Gaussian",
    "MaxLogit",
    "Neighbours",
    "Reduce",
    "Signature",
    "pool",
]
