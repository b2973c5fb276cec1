"""Parsing of wrappers written as strings, such as ``"vote(n_voters=5) + sculpt"``; only literals are evaluated."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from .registry import PLAIN, wrapper_class
from .settings import Setting, hint, settings_of

if TYPE_CHECKING:
    from .wrapper import Wrapper

_HOW = "write names joined by +, such as 'vote(n_voters=5) + sculpt'"


def wrapper_of(text: str, output: Any = None) -> Wrapper:
    """Return the wrapper described by a string.

    Args:
        text: names of wrappers joined by ``+``, optionally with arguments in parentheses: literals, or classes that the setting allows by
            name, such as ``sculpt(StudentT(df=4))``; "plain" for the plain model.
        output: meaning of the output, such as "logits" or `Logits(dim=1)`; for class scores, sculpt then defaults to a distribution of
            class labels.

    Raises:
        ValueError: if the string cannot be parsed, a wrapper or argument does not exist, or the wrapper refuses its value.

    Example:
        >>> wrapper_of("vote(n_voters=5) + sculpt")
        compose(vote.Wrapper(n_voters=5), sculpt.Wrapper())
    """
    from .wrapper import compose

    terms = _terms(parsed(text, "wrapper"))
    names = [_name(term, text) for term in terms]
    if PLAIN in names:
        if len(terms) > 1 or isinstance(terms[0], ast.Call):
            raise ValueError(f"wrapper {text!r}: {PLAIN} is the model without a wrapper, and stands alone")
        return compose(output=output)
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"wrapper {text!r}: {', '.join(sorted(repeated))} can't be there twice")
    return compose(*(_wrapper(name, term, text, output) for name, term in zip(names, terms, strict=True)))


def parsed(text: str, what: str) -> ast.expr:
    """Parse a string of names and calls; `what` names it in error messages."""
    if not isinstance(text, str):
        raise TypeError(f"{what} must be a text, not {text!r:.60}; {_HOW}")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{what} {text!r} can't be read; {_HOW}") from error


def arguments(node: ast.expr, settings: tuple[Setting, ...], what: str) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and keyword arguments of a call; none if the node is only a name.

    Args:
        node: syntax node of the call.
        settings: settings of the called class, with the classes allowed as values.
        what: name of the string in error messages.
    """
    if not isinstance(node, ast.Call):
        return [], {}
    classes = {setting.name: setting.classes for setting in settings}
    positions = [*classes.values(), *[()] * len(node.args)]
    named = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError(f"{what}: {ast.unparse(keyword)!r} can't be read; write arguments as name=value")
        named[keyword.arg] = _value(keyword.value, classes.get(keyword.arg, ()), what)
    return [_value(node, known, what) for node, known in zip(node.args, positions, strict=False)], named


def _terms(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*_terms(node.left), *_terms(node.right)]
    return [node]


def _name(node: ast.expr, text: str) -> str:
    function = node.func if isinstance(node, ast.Call) else node
    if isinstance(function, ast.Attribute) and function.attr == "Wrapper":  # Python style, as in vote.Wrapper(5)
        function = function.value
    if not isinstance(function, ast.Name):
        raise ValueError(f"wrapper {text!r}: {ast.unparse(node)!r} is not the name of a wrapper; {_HOW}")
    return function.id


def _wrapper(name: str, node: ast.expr, text: str, output: Any) -> Wrapper:
    from .wrapper import COMMON

    cls = wrapper_class(name)
    settings = settings_of(cls)
    positional, named = arguments(node, settings, f"wrapper {text!r}")
    own_settings = [setting for setting in settings if setting.name not in COMMON]
    for argument in named:
        if argument not in (setting.name for setting in settings):
            raise ValueError(f"{name} has no argument {argument!r}: {hint(argument, [s.name for s in own_settings])}")
    options: dict[str, Any] = {}
    if output is not None:
        defaults = [
            (setting, setting.for_task("classification").default) for setting in own_settings[len(positional) :]
        ]
        options = {setting.name: default for setting, default in defaults if default is not setting.default}
        options["output"] = output
    try:
        return cls(*positional, **{**options, **named})
    except (TypeError, ValueError) as error:
        raise ValueError(f"wrapper {text!r}: {error}") from error


def _value(node: ast.expr, classes: tuple[type, ...], what: str) -> Any:
    """Evaluate a literal, or create an object of one of the classes."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        pass
    function = node.func if isinstance(node, ast.Call) else node
    known = {cls.__name__: cls for cls in classes}
    if not isinstance(function, ast.Name) or function.id not in known:
        raise ValueError(
            f"{what}: {ast.unparse(node)!r} is neither a literal nor a known distribution or noise; put strings in quotes"
        )
    cls = known[function.id]
    if not isinstance(node, ast.Call):
        return cls
    positional, named = arguments(node, (), what)
    try:
        return cls(*positional, **named)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: {ast.unparse(node)}: {error}") from error


__all__ = ["PLAIN", "arguments", "parsed", "wrapper_of"]
