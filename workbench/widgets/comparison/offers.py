"""Data and models that a comparison can be made of: variables of the notebook, data sets by name, ready models.

Variables are only inspected; no code of the user is called.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import FrameType, FunctionType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from workbench.core.wrapped import is_wrapped
from workbench.data import Data, card, names
from workbench.data.files import is_local, to_download
from workbench.data.registry import entries
from workbench.models import is_table

from ..common.inputs import STOCK

Variables = Callable[[], dict[str, Any]]
IMAGES = ("images", "cifar10", "cifar10n", "cifar10h")  # kinds of data sets
TABLES = ("toy", "uci", "scikit-learn", "adult", "curve")
READY = {
    "tabular": "for tables: two hidden layers of 100 units, columns embedded where that helps",
    "mlp": "for inputs of any shape: two hidden layers of 50 units",
    "cnn": "for images: two convolutions and a hidden layer",
    "linear": "for inputs of any shape: one linear layer",
}


@dataclass(frozen=True)
class Offer:
    """Data or a model that can be chosen.

    Args:
        label: entry in the menu.
        code: code that refers to it; for a DataFrame only its name.
        kind: "name" of a data set, "ready" model, or the kind of variable.
        note: one-line description.
        images, table: whether a row is an image, or a vector of numbers, as far as known.
        bytes: size of the download it needs; None if it needs none, 0 if the size is not known.
    """

    label: str
    code: str
    kind: str
    note: str = ""
    images: bool = False
    table: bool = False
    bytes: int | None = None


def variables_from(frame: FrameType) -> Variables:
    """Return a function that gives the variables visible in a frame: the current ones of notebook or module, and the frame's locals now."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    shared: dict[str, Any] = frame.f_globals if shell is None else shell.user_ns
    inner = {} if frame.f_locals is frame.f_globals else dict(frame.f_locals)
    home = str(shared.get("__name__", ""))
    inner = {name: value for name, value in inner.items() if data_kind(value) or model_kind(value, home)}
    return lambda: {**shared.copy(), **inner}


def data_kind(value: Any) -> str | None:
    """Return the kind of data a variable holds; None if a comparison does not take it."""
    kind = type(value)  # unlike `__class__`, this runs no code of the user
    if issubclass(kind, Data):
        return "Data"
    pandas = sys.modules.get("pandas")
    if pandas is not None and issubclass(kind, getattr(pandas, "DataFrame", ())):
        return "DataFrame"
    if issubclass(kind, DataLoader):
        return "DataLoader"
    if issubclass(kind, Dataset) and not issubclass(kind, IterableDataset):
        return "Dataset"
    if kind in (tuple, list) and len(value) == 2 and all(type(part) in (Tensor, np.ndarray) for part in value):
        return "pair (x, y)" if all(part.ndim for part in value) and len(value[0]) == len(value[1]) else None
    return None


def model_kind(value: Any, home: str = "__main__") -> str | None:
    """Return the kind of model, or of model factory, a variable holds; None if it is neither.

    Args:
        value: value of the variable.
        home: name of the user's module, whose functions without arguments may make models.
    """
    kind = type(value)
    if issubclass(kind, nn.Module):
        try:
            wrapped = any(is_wrapped(module) for module in nn.Module.modules(value))
            return "model" if not wrapped and next(nn.Module.parameters(value), None) is not None else None
        except (AttributeError, TypeError):  # a module whose __init__ did not finish, or a proxy
            return None
    if issubclass(kind, type):
        ours = not value.__module__.startswith(("torch.", "workbench."))
        return "class" if ours and issubclass(value, nn.Module) and _callable_without_arguments(value) else None
    if kind is FunctionType and _callable_without_arguments(value):
        if inspect.iscoroutinefunction(value) or inspect.isgeneratorfunction(value):
            return None
        returned = value.__annotations__.get("return", value)
        if returned is value:
            return "function" if value.__module__ == home else None
        gives = issubclass(returned, nn.Module) if type(returned) is type else str(returned).endswith("Module")
        return "function" if gives else None
    return None


def _callable_without_arguments(callable_: Any) -> bool:
    """Return whether something can be called without arguments."""
    try:
        parameters = inspect.signature(callable_).parameters.values()
    except (TypeError, ValueError):
        return False
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def data_offers(variables: Mapping[str, Any]) -> list[Offer]:
    """Return the data among the variables, the data sets available locally, and those that can be downloaded."""
    variables_with_data = [
        _variable_offer(name, value, kind)
        for name, value in _named(variables)
        if (kind := data_kind(value)) is not None  # other variables are not inspected further
    ]
    local, remote = [], []
    for name in names():
        images = _has_images(name)
        table = not images and entries()[name]["kind"] in TABLES
        offer = Offer(name, repr(name), "name", card(name).description, images, table)
        if is_local(name):
            local.append(offer)
        elif (size := to_download(name)) is not None:
            label = f"{name} (to download: {size_in_words(size)})"
            remote.append(replace(offer, label=label, bytes=size))
    return [*variables_with_data, *local, *remote]


def _variable_offer(name: str, value: Any, kind: str) -> Offer:
    images, table, shape = False, False, ""
    if kind == "Data":
        x = getattr(value.train, "x", None)
        images = type(x) is Tensor and x.ndim == 4
        table = type(x) is Tensor and is_table(value)
        shape = f" {value.name}"
    elif kind == "DataFrame":
        shape = " " + " × ".join(f"{n:,}" for n in value.shape)
        table = True
    elif kind.startswith("pair"):
        images = value[0].ndim == 4
        table = value[0].ndim == 2 and "float" in str(value[0].dtype)
        shape = f" of {len(value[0]):,} rows"
    return Offer(f"{name}: your {kind}{shape}", name, kind, "A variable of this notebook.", images, table)


def model_offers(variables: Mapping[str, Any]) -> list[Offer]:
    """Return the models and model factories among the variables, and the ready models."""
    home = str(variables.get("__name__", "__main__"))
    notes = {
        "model": "A variable of this notebook; it is never changed.",
        "class": "A class of this notebook; it is called without arguments for each seed.",
        "function": "A function of this notebook; it is called without arguments for each seed and must return a model.",
    }
    offers = []
    for name, value in _named(variables):
        kind = model_kind(value, home)
        if kind is not None:
            label = f"{name}: your {type(value).__name__}" if kind == "model" else f"{name}(): your {kind}"
            offers.append(Offer(label, name, kind, notes[kind]))
    return [*offers, *(Offer(f"{name}: a ready model", repr(name), "ready", READY[name]) for name in STOCK)]


def _named(variables: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    return [(name, value) for name, value in variables.items() if not name.startswith("_")]


def _has_images(name: str) -> bool:
    return entries()[name]["kind"] in IMAGES or name == "digits"


def size_in_words(size: int) -> str:
    """Format a number of bytes.

    Example:
        >>> size_in_words(170498071), size_in_words(12398), size_in_words(0)
        ('170 MB', '12 kB', 'size unknown')
    """
    if not size:
        return "size unknown"
    return (
        f"{size / 1e6:.0f} MB" if size >= 9.95e6 else f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"
    )
