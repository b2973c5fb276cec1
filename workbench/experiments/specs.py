"""Parsing of models, data sets and metrics given as texts, such as ``"mlp(width=20)"``. Only literals are evaluated."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.settings import hint
from ..core.texts import arguments, parsed
from .worker import load

if TYPE_CHECKING:
    from torch import nn

    from ..data import Data

REFERENCE = re.compile(r"(?P<place>.+\.py|[A-Za-z_][\w.]*):(?P<call>[A-Za-z_]\w*(?:\(.*\))?)", re.DOTALL)


def split(text: str) -> list[str]:
    """Split a text at the commas outside of brackets.

    Example:
        >>> split("plain, sculpt(Normal(beta=0.5), n_layers=1)+vote")
        ['plain', 'sculpt(Normal(beta=0.5), n_layers=1)+vote']
    """
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [piece.strip() for piece in parts if piece.strip()]


# ---- models, data sets and metrics
def model_of(text: str, data: Data) -> nn.Module:
    """Build the model that a text describes for a data set.

    Args:
        text: a ready model (auto, linear, mlp, cnn, tabular), "module:factory" or "path/to/file.py:factory", each optionally with arguments in
            parentheses. A factory with a parameter without default is called with the data set, any other without it.
        data: data set.

    Raises:
        ValueError: there is no such model or argument.
        TypeError: the factory returned no nn.Module.

    Example:
        >>> from workbench import data
        >>> model_of("mlp(width=20)", data.load("diabetes"))[1]
        Linear(in_features=10, out_features=20, bias=True)
    """
    from torch import nn

    function, named = check_model(text)
    model = function(data, **named) if _wants_data(function, named) else function(**named)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model {text!r} returned an object of type {type(model).__name__}; it must return an nn.Module"
        )
    return model


def check_model(text: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the factory function and the keyword arguments that the text of a model names; raises as `model_of` does."""
    from .models import READY

    if (matched := REFERENCE.fullmatch(text.strip())) is not None:
        node = parsed(matched["call"], "model")
        function = load(f"{matched['place']}:{_model_name(node, text)}")
    else:
        node = parsed(text, "model")
        name = _model_name(node, text)
        if name not in READY:
            raise ValueError(
                f"there is no model {name!r}: {hint(name, READY)}; write a model of yours as 'module:factory' or 'path/to/file.py:factory'"
            )
        function = READY[name]
    positional, named = arguments(node, (), f"model {text!r}")
    if positional:
        raise ValueError(f"model {text!r}: write arguments as name=value")
    if not callable(function):
        raise TypeError(
            f"model {text!r} is an object of type {type(function).__name__}, not a function that returns a model"
        )
    parameters = inspect.signature(function).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for argument in named:
            if argument not in parameters:
                raise ValueError(f"model {text!r} has no argument {argument!r}: {hint(argument, parameters)}")
    return function, named


def _model_name(node: ast.expr, text: str) -> str:
    function = node.func if isinstance(node, ast.Call) else node
    if not isinstance(function, ast.Name):
        raise ValueError(
            f"model {text!r} can't be read; write a name such as 'mlp(width=100)', or 'path/to/file.py:factory'"
        )
    return function.id


def _wants_data(function: Callable[..., Any], named: Mapping[str, Any]) -> bool:
    return any(
        p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and name not in named
        for name, p in inspect.signature(function).parameters.items()
    )


def one_spelling(text: str) -> str:
    """Return the text of a wrapper or a model with normalized spacing.

    Example:
        >>> one_spelling("mlp( width = 20 )"), one_spelling("net.py:build")
        ('mlp(width=20)', 'net.py:build')
    """
    if (matched := REFERENCE.fullmatch(text.strip())) is not None:
        return f"{matched['place']}:{ast.unparse(parsed(matched['call'], 'model'))}"
    return ast.unparse(parsed(text, "text"))


def reference(function: Callable[..., Any] | str, what: str) -> str:
    """Return the text by which another process finds a function.

    Args:
        function: function, or such a text, which is returned unchanged.
        what: what the function is, for the error message.

    Raises:
        TypeError: the function is not defined at the top level of a module or script.
    """
    if isinstance(function, str):
        return function
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", "")
    file = getattr(sys.modules.get(module), "__file__", None)
    if not name or "." in name or name == "<lambda>" or file is None:
        raise TypeError(
            f"{what} must be defined at the top level of a module or a .py file, so that other processes find it, not {function!r:.100}: put it "
            f"in a file, and give 'path/to/file.py:{name if name.isidentifier() else 'name'}'"
        )
    return f"{os.path.relpath(file)}:{name}" if module == "__main__" else f"{module}:{name}"


def file_of(text: str) -> Path | None:
    """Return the file of the user's code that a text refers to; None for the names of ready models and data sets."""
    if (matched := REFERENCE.fullmatch(text.strip())) is None:
        return None
    if matched["place"].endswith(".py"):
        return Path(matched["place"])
    spec = importlib.util.find_spec(matched["place"])
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return Path(spec.origin)


def sources(path: Path) -> dict[str, str]:
    """Return the texts of a file and of the files beside it that it imports, directly or indirectly: name -> text."""
    texts: dict[str, str] = {}
    waiting = [path.resolve()]
    while waiting:
        file = waiting.pop()
        if file.name in texts:
            continue
        texts[file.name] = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(texts[file.name], file.name)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            siblings = [file.with_name(f"{name.partition('.')[0]}.py") for name in names]
            waiting += [other for other in siblings if other.is_file()]
    return texts
