"""Origin of a training: digests of the initial weights of a model and of its structure."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

LIBRARIES = ("torch", "workbench")  # packages whose modules are identified by class name and settings, not by code
PLAIN = (bool, int, float, complex, str, bytes, type(None))


def origin_of(model: nn.Module) -> str:
    """Return the digests of the weights and the structure of a model, joined by a colon."""
    return f"{digest_of(model)}:{structure_of(model)}"


def difference(before: str, now: str) -> str:
    """Describe how two origins differ; "" if they do not. Origins in files of earlier versions have no structure."""
    (weights, _, structure), (weights_now, _, structure_now) = before.partition(":"), now.partition(":")
    if weights != weights_now:
        return "the model started at other weights"
    changed = structure and structure_now and structure != structure_now
    return "the code or the settings of the model were different" if changed else ""


def digest_of(model: nn.Module) -> str:
    """Return a digest of all weights and buffers of a model."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(name.encode())
        if isinstance(value, Tensor) and not is_lazy(value):
            digest.update(f"{value.dtype} {list(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def structure_of(model: nn.Module) -> str:
    """Return a digest of the computation of a model apart from its weights: modules, their plain settings, and the code of the user's classes.

    Comments and formatting of the code are ignored; code of functions outside the classes is not included.

    Example:
        >>> sloped = nn.Sequential(nn.Linear(2, 2), nn.LeakyReLU(0.1))
        >>> structure_of(sloped) == structure_of(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
        False
    """
    digest = hashlib.sha256()
    classes: dict[type, None] = {}
    for path, module in model.named_modules():
        cls = type(module)
        digest.update(f"{path} {cls.__qualname__}({module.extra_repr()})".encode())
        settings = sorted((name, _setting_text(value)) for name, value in vars(module).items() if name[:1] != "_")
        digest.update(repr([pair for pair in settings if pair[0] != "training" and pair[1]]).encode())
        classes |= dict.fromkeys(base for base in cls.__mro__ if not _is_library_class(base))
    for cls in classes:
        for function in _functions(cls):
            digest.update(f"{function.__qualname__} {_source(function)}".encode())
    return digest.hexdigest()


def _is_library_class(cls: type) -> bool:
    return cls is object or cls.__module__.partition(".")[0] in LIBRARIES


def _setting_text(value: Any) -> str:
    """Return a setting as text; "" unless it is a plain value, a function, or a list or tuple of these."""
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, list | tuple):
        parts = [_setting_text(part) for part in value]
        return f"{type(value).__name__}{parts}" if all(parts) else ""
    return getattr(value, "__qualname__", "") if callable(value) else ""


def _functions(cls: type) -> Iterator[FunctionType]:
    for name in sorted(vars(cls)):
        value = vars(cls)[name]
        value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if isinstance(value, FunctionType):
            yield value


def _source(function: FunctionType) -> str:
    return _code_of(function.__code__)


@functools.lru_cache(1024)
def _code_of(code: CodeType) -> str:
    """Return the source of a function without comments and formatting; without source, the names that it uses."""
    try:
        return ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(code))))
    except (OSError, TypeError, SyntaxError):  # entered at a prompt, or compiled
        return repr(code.co_names)
