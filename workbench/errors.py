"""Exceptions and warnings. Every message says what was found, where, and what to do about it."""

from __future__ import annotations

import importlib
import importlib.util
import operator
import random
import sys
from typing import Any


class WorkbenchWarning(UserWarning):
    """Something works, but perhaps not as the caller expects; issued once per object."""


class NotFittedError(RuntimeError):
    """Risk was requested before the method was fitted to training data."""


class SettingsNeededError(ValueError):
    """The default settings of a wrapper do not fit a valid model, so a setting must be given explicitly.

    Args:
        message: what was found, and what to write instead.
        setting: name of the setting to give.
    """

    def __init__(self, message: str, setting: str = "") -> None:
        super().__init__(message)
        self.setting = setting


class OptimizerMismatchError(RuntimeError):
    """An optimizer holds parameters that a wrapped model has replaced, so its steps do not train that model."""


class NonTensorOutputError(TypeError):
    """A non-tensor part of the output differs between branches, so there is no single value to return."""


class OutputShapeError(RuntimeError):
    """A part of the output differs in shape between branches, so the branches cannot be averaged."""


class NotDealableError(RuntimeError):
    """The rows of the output do not correspond one to one to the rows of the input, so they cannot be dealt to voters."""


class UnreachedParametersError(RuntimeError):
    """The model does not use the tensors that a wrapper has taken over, so branches would be identical where they should differ."""


class PurityError(RuntimeError):
    """Forward changes attributes of the model although the wrapper has `purity="raise"`."""


class FrozenModelError(RuntimeError):
    """A wrapped object was changed inside `with wrapped.frozen():`, where it must stay constant."""


def require(module: str, extra: str = "lab") -> Any:
    """Import an optional dependency; if it is missing, the error names the extra that installs it.

    Args:
        module: module name, such as "pandas" or "matplotlib.figure".
        extra: name of the extra of this package that installs it.

    Returns:
        The imported module.

    Raises:
        ModuleNotFoundError: if it is not installed.

    Example:
        >>> require("math").sqrt(4.0)
        2.0
    """
    state = None if module in sys.modules else random.getstate()  # some packages draw while they are imported
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise  # the module is installed, but one of its own imports is missing
        raise ModuleNotFoundError(
            f"this needs {package}, which is not installed: pip install 'risk-workbench[{extra}]'", name=package
        ) from error
    finally:
        if state is not None:
            random.setstate(state)


def check_packages(*modules: str, extra: str = "lab") -> None:
    """Raise as `require` if one of the modules is not installed, without importing them, which may take long."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            require(module, extra)


def check_flag(name: str, value: Any) -> None:
    """Raise a TypeError unless an argument is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, found {value!r:.100}")


def check_timeout(timeout: Any) -> None:
    """Raise a ValueError unless a time limit is None or a positive number."""
    if timeout is not None and not (hasattr(timeout, "__float__") and timeout > 0):
        raise ValueError(f"timeout must be a positive number of seconds, or None for no limit, not {timeout!r:.100}")


def as_seed(value: Any) -> int:
    """Return a seed of torch's generators as an int, whatever its type.

    Raises:
        ValueError: the value is no whole number of at most 64 bits.
    """
    try:
        number = operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # arrays and tensors have errors of their own
        number = 2**64
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"seed must be a whole number of at most 64 bits; found {value!r:.100}")
    return number


def as_count(name: str, value: Any, least: int = 1) -> int:
    """Return an argument that counts something as an int, whatever its type.

    Args:
        name: name of the argument.
        value: an integer of Python, numpy or another library; True and False are none.
        least: smallest value.

    Raises:
        ValueError: the value is no whole number, or below the smallest.

    Example:
        >>> as_count("jobs", torch.tensor(2))
        2
        >>> as_count("jobs", 0)
        Traceback (most recent call last):
        ValueError: jobs must be a whole number of at least 1; found 0
    """
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # arrays and tensors have errors of their own
        number = least - 1
    if number < least:
        raise ValueError(f"{name} must be a whole number of at least {least}; found {value!r:.100}")
    return number
