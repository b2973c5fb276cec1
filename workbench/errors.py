"""What can go wrong, by name; every message says what was found, where, and what to do about it."""

from __future__ import annotations


class WorkbenchWarning(UserWarning):
    """Something works, but not as the caller may expect; told once for each object."""


class NotFittedError(RuntimeError):
    """Risk was asked for before the method had seen any training data."""


class OptimizerMismatchError(RuntimeError):
    """An optimizer steps with parameters that a wrapped model has replaced, so that it trains nothing there."""


class NonTensorOutputError(TypeError):
    """A part of the output that is no tensor differs between the branches, so there is no one value to return."""


class OutputShapeError(RuntimeError):
    """A part of the output has another shape in another branch, so that the branches can't be averaged."""


class NotDealableError(RuntimeError):
    """The rows of the output do not answer the rows of the input one by one."""


class UnreachedParametersError(RuntimeError):
    """The branches would not differ where they should: the model uses other tensors than those that a wrapper has taken over."""


class PurityError(RuntimeError):
    """Forward changes the model, and the wrapper was told that it must not."""
