"""The zoo of awkward models, re-exported from the package, where users have it too."""

from workbench.testing.zoo import CASES, TAGS, Case, cases, float_leaves, leaves, modules, side_effects
from workbench.testing.zoo.interfaces import ModelOutput, Moments, Prediction

__all__ = [
    "CASES",
    "TAGS",
    "Case",
    "ModelOutput",
    "Moments",
    "Prediction",
    "cases",
    "float_leaves",
    "leaves",
    "modules",
    "side_effects",
]
