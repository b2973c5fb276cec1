"""Models, data sets and metrics as texts, such as ``"mlp(width=20)"``: read without evaluating anything but literals."""

from __future__ import annotations

import ast
import hashlib
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
    """Split at commas that stand outside all brackets.

    Example:
        >>> split("plain, sculpt(Normal(beta=0.5), n_layers=1)+vote")
        ['plain', 'sculpt(Normal(beta=0.5), n_layers=1)+vote']
    """
    pieces, depth = [""], 0
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and not depth:
            pieces.append("")
        else:
            pieces[-1] += sign
    return [piece.strip() for piece in pieces if piece.strip()]


# ---- models, data sets and metrics
def model_of(text: str, data: Data) -> nn.Module:
    """The model that a text names, for a data set.

    Args:
        text: a ready model (auto, linear, mlp, cnn, tabular), "module:factory" or "path/to/file.py:factory"; each with arguments in
            parentheses if need be. A factory with a parameter that has no default is given the data set, any other is called without.
        data: the data set.

    Raises:
        ValueError: there is no such model or argument.
        TypeError: the factory gave no nn.Module.

    Example:
        >>> from workbench import data
        >>> model_of("mlp(width=20)", data.load("diabetes"))[1]
        Linear(in_features=10, out_features=20, bias=True)
    """
    from torch import nn

    function, named = check_model(text)
    model = function(data, **named) if _wants_data(function, named) else function(**named)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model {text!r} gave an object of type {type(model).__name__}; it must give an nn.Module")
    return model


def check_model(text: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function behind the text of a model, and its arguments; raises as `model_of` does."""
    from .models import READY

    if (matched := REFERENCE.fullmatch(text.strip())) is not None:
        node = parsed(matched["call"], "model")
        function = load(f"{matched['place']}:{_model_name(node, text)}")
    else:
        node = parsed(text, "model")
        name = _model_name(node, text)
        if name not in READY:
            raise ValueError(
                f"there is no model {name!r}: {hint(name, READY)}; your own is 'module:factory' or 'path/to/file.py:factory'"
            )
        function = READY[name]
    positional, named = arguments(node, (), f"model {text!r}")
    if positional:
        raise ValueError(f"model {text!r}: write arguments as name=value")
    if not callable(function):
        raise TypeError(
            f"model {text!r} is an object of type {type(function).__name__}, not a function that gives a model"
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
    """The text of a wrapper or a model, with the spaces that Python's style wants.

    Example:
        >>> one_spelling("mlp( width = 20 )"), one_spelling("net.py:build")
        ('mlp(width=20)', 'net.py:build')
    """
    if (matched := REFERENCE.fullmatch(text.strip())) is not None:
        return f"{matched['place']}:{ast.unparse(parsed(matched['call'], 'model'))}"
    return ast.unparse(parsed(text, "text"))


def reference(function: Callable[..., Any] | str, what: str) -> str:
    """A function as a text by which any process of this code finds it.

    Raises:
        TypeError: it is none at the top of a module or script.
    """
    if isinstance(function, str):
        return function
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", "")
    file = getattr(sys.modules.get(module), "__file__", None)
    if not name or "." in name or name == "<lambda>" or file is None:
        raise TypeError(
            f"{what} must be at the top of a module or a .py file, where another process finds it, not {function!r:.100}: put it in a file, and "
            f"give 'path/to/file.py:{name if name.isidentifier() else 'name'}'"
        )
    return f"{os.path.relpath(file)}:{name}" if module == "__main__" else f"{module}:{name}"


def file_of(text: str) -> Path | None:
    """The file of the user's own code that a text refers to; None for what has a name in this package."""
    if (matched := REFERENCE.fullmatch(text.strip())) is None:
        return None
    if matched["place"].endswith(".py"):
        return Path(matched["place"])
    spec = importlib.util.find_spec(matched["place"])
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return Path(spec.origin)


def sources(path: Path) -> dict[str, str]:
    """A file and the files beside it that it imports, directly or not: name -> text."""
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


def digest(*files: Path) -> str:
    """What tells one state of the users' files from another, as "sha256:" and 12 digits."""
    total = hashlib.sha256()
    for file in files:
        for name, text in sorted(sources(file).items()):
            total.update(f"{name}\n{text}\n".encode())
    return f"sha256:{total.hexdigest()[:12]}"
