"""Density models of the inner features of a network: how unlike the training data is this row?"""

from __future__ import annotations

from workbench.wrappers.densities.base import Density
from workbench.wrappers.densities.flow import Flow
from workbench.wrappers.densities.gaussian import Gaussian
from workbench.wrappers.densities.last_layer import Classwise, Neighbours
from workbench.wrappers.densities.outputs import Energy, MaxLogit
from workbench.wrappers.densities.pooling import pool
from workbench.wrappers.densities.reduce import Reduce
from workbench.wrappers.densities.signature import Signature

# by what `neo.Wrapper(density=...)` calls them
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
    "Energy",
    "Flow",
    "Gaussian",
    "MaxLogit",
    "Neighbours",
    "Reduce",
    "Signature",
    "pool",
]
