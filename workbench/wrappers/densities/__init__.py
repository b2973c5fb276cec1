"""Density models of the inner features of a network: how unlike the training data is this row?"""

from __future__ import annotations

from workbench.wrappers.densities.base import Density
from workbench.wrappers.densities.flow import Flow
from workbench.wrappers.densities.gaussian import Gaussian
from workbench.wrappers.densities.reduce import Reduce, pool

__all__ = ["Density", "Flow", "Gaussian", "Reduce", "pool"]
