"""Wrappers as texts, such as ``"vote(n_voters=5) + sculpt"``: read without evaluating anything but literals."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from .registry import PLAIN, wrapper_class
from .settings import Setting, hint, settings_of

if TYPE_CHECKING:
    from .wrapper import Wrapper

_HOW = "write names joined by +, such as 'vote(n_voters=5) + sculpt'"


def wrapper_of(text: str, classes: bool = False, output: Any = None) -> Wrapper:
    """The wrapper that a text names.

    Args:
        text: names of wrappers joined by ``+``, each with arguments in parentheses if need be: literals, or classes that the setting knows by
            name, such as ``sculpt(StudentT(df=4))``; "plain" for the plain model.
        classes: whether the model gives class scores: wrappers then have output="logits", and an output distribution of class labels, where the
            text does not say otherwise.
        output: the same for scores of this meaning, such as `Logits(dim=1)`.

    Raises:
        ValueError: the text can't be read, there is no such wrapper or argument, or the wrapper refuses its value.

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
    output = "logits" if output is None and classes else output
    return compose(*(_wrapper(name, term, text, output) for name, term in zip(names, terms, strict=True)))


def parsed(text: str, what: str) -> ast.expr:
    """The syntax of a text of names and calls; `what` it is, for messages."""
    if not isinstance(text, str):
        raise TypeError(f"{what} must be a text, not {text!r:.60}; {_HOW}")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{what} {text!r} can't be read; {_HOW}") from error


def arguments(node: ast.expr, settings: tuple[Setting, ...], what: str) -> tuple[list[Any], dict[str, Any]]:
    """The positional and named arguments of a call; none if it is a name alone.

    Args:
        node: the call.
        settings: those of what is called, which know classes by name.
        what: it is, for messages.
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
    if isinstance(function, ast.Attribute) and function.attr == "Wrapper":  # as it is written in Python
        function = function.value
    if not isinstance(function, ast.Name):
        raise ValueError(f"wrapper {text!r}: {ast.unparse(node)!r} is no name of a wrapper; {_HOW}")
    return function.id


def _wrapper(name: str, node: ast.expr, text: str, output: Any) -> Wrapper:
    from .wrapper import COMMON

    cls = wrapper_class(name)
    settings = settings_of(cls)
    positional, named = arguments(node, settings, f"wrapper {text!r}")
    of_wrapper = [setting for setting in settings if setting.name not in COMMON]
    for argument in named:
        if argument not in (setting.name for setting in settings):
            raise ValueError(f"{name} has no argument {argument!r}: {hint(argument, [s.name for s in of_wrapper])}")
    options: dict[str, Any] = {}
    if output is not None:
        suited = [(setting, setting.for_task("classification").default) for setting in of_wrapper[len(positional) :]]
        options = {setting.name: default for setting, default in suited if default is not setting.default}
        options["output"] = output
    try:
        return cls(*positional, **{**options, **named})
    except (TypeError, ValueError) as error:
        raise ValueError(f"wrapper {text!r}: {error}") from error


def _value(node: ast.expr, classes: tuple[type, ...], what: str) -> Any:
    """A literal, or an object of one of the classes."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        pass
    function = node.func if isinstance(node, ast.Call) else node
    known = {cls.__name__: cls for cls in classes}
    if not isinstance(function, ast.Name) or function.id not in known:
        raise ValueError(
            f"{what}: {ast.unparse(node)!r} is neither a literal nor a distribution or noise that it knows; put texts in quotes"
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
