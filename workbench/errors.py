"""Errors and warnings; every message says what was found, where, and what to do about it."""

from __future__ import annotations

import importlib
from typing import Any


class WorkbenchWarning(UserWarning):
    """Something works, but not as the caller may expect; told once for each object."""


class NotFittedError(RuntimeError):
    """Risk was asked for before the method had seen any training data."""


class SettingsNeededError(ValueError):
    """A wrapper can't take the model with its default settings; nothing is wrong with the model.

    Args:
        message: what was found, and what to write.
        setting: the name of the setting.
    """

    def __init__(self, message: str, setting: str = "") -> None:
        super().__init__(message)
        self.setting = setting


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


class FrozenModelError(RuntimeError):
    """A wrapped object is changed inside of `with wrapped.frozen():`, where it serves as it was."""


def require(module: str, extra: str = "lab") -> Any:
    """Import a module that not every installation has, and name the extra that brings it where it is missing.

    Args:
        module: such as "pandas" or "matplotlib.figure".
        extra: the extra of this package that installs it.

    Returns:
        The module.

    Raises:
        ModuleNotFoundError: it is not installed.

    Example:
        >>> require("math").sqrt(4.0)
        2.0
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:  # it is there, and lacks something itself
            raise
        raise ModuleNotFoundError(
            f"this needs {package}, which is not installed: pip install 'risk-workbench[{extra}]'", name=package
        ) from error
