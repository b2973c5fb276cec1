"""What a training starts at: a digest of a model's first weights, and one of what it computes with them."""

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

KNOWN = ("torch", "workbench")  # packages whose modules say by their names and settings what they compute
PLAIN = (bool, int, float, complex, str, bytes, type(None))


def origin_of(model: nn.Module) -> str:
    """Digests of the weights of a model and of its structure, with a colon between."""
    return f"{digest_of(model)}:{structure_of(model)}"


def difference(before: str, now: str) -> str:
    """How two origins differ, in words; empty if they do not. Those of files of earlier versions have no structure."""
    (weights, _, structure), (weights_now, _, structure_now) = before.partition(":"), now.partition(":")
    if weights != weights_now:
        return "the model started at other weights"
    changed = structure and structure_now and structure != structure_now
    return "the code or the settings of the model were others" if changed else ""


def digest_of(model: nn.Module) -> str:
    """Digest of all weights and buffers of a model."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(name.encode())
        if isinstance(value, Tensor) and not is_lazy(value):
            digest.update(f"{value.dtype} {list(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def structure_of(model: nn.Module) -> str:
    """Digest of what a model computes whatever its weights are: its modules, their plain settings, and the code of classes of the user's own.

    Comments and the layout of the code do not count; what functions outside of the classes compute is not seen.

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
        settings = sorted((name, _said(value)) for name, value in vars(module).items() if name[:1] != "_")
        digest.update(repr([pair for pair in settings if pair[0] != "training" and pair[1]]).encode())
        classes |= dict.fromkeys(base for base in cls.__mro__ if not _known(base))
    for cls in classes:
        for function in _functions(cls):
            digest.update(f"{function.__qualname__} {_written(function)}".encode())
    return digest.hexdigest()


def _known(cls: type) -> bool:
    return cls is object or cls.__module__.partition(".")[0] in KNOWN


def _said(value: Any) -> str:
    """A setting as text; empty of what is no plain number, text or function, or several of these."""
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, list | tuple):
        parts = [_said(part) for part in value]
        return f"{type(value).__name__}{parts}" if all(parts) else ""
    return getattr(value, "__qualname__", "") if callable(value) else ""


def _functions(cls: type) -> Iterator[FunctionType]:
    for name in sorted(vars(cls)):
        value = vars(cls)[name]
        value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if isinstance(value, FunctionType):
            yield value


def _written(function: FunctionType) -> str:
    return _code_of(function.__code__)


@functools.lru_cache(1024)
def _code_of(code: CodeType) -> str:
    """The source of a function without comments and layout; the names that it uses where there is no source."""
    try:
        return ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(code))))
    except (OSError, TypeError, SyntaxError):  # written in a prompt, or compiled
        return repr(code.co_names)
