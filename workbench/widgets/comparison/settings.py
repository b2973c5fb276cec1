"""The wrappers that there are and their settings, read from the package, their signatures and their docstrings.

No widgets in here: `Part` is one wrapper with its settings, `Candidate` one or several parts under a name. Both can be
built, and written down as source code.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
import re
import sys
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench import methods as _package
from workbench.core.wrapper import Wrapper, compose

COMMON = tuple(inspect.signature(Wrapper.__init__).parameters)[1:]
PLAIN = "plain"


class Unwritable(ValueError):
    """Something that can't be written down as source code."""


@functools.cache
def wrapper_classes() -> dict[str, type[Wrapper]]:
    """Every wrapper of the package, by the name of its module.

    Example:
        >>> "vote" in wrapper_classes()
        True
    """
    found = {}
    for info in pkgutil.iter_modules(_package.__path__):
        made = getattr(importlib.import_module(f"{_package.__name__}.{info.name}"), "Wrapper", None)
        if isinstance(made, type) and issubclass(made, Wrapper) and made is not Wrapper:
            found[info.name] = made
    return found


def name_of(cls: type[Wrapper]) -> str:
    """What a wrapper is called: by its module in this package, else by its class."""
    return next((name for name, known in wrapper_classes().items() if known is cls), cls.__name__)


def summary(cls: type) -> str:
    """The first sentence of a docstring."""
    return (inspect.getdoc(cls) or cls.__name__).split("\n\n")[0].replace("\n", " ")


@dataclass(frozen=True)
class Setting:
    """One argument of a wrapper (or of a class among its choices), and what may be entered for it.

    Args:
        name: of the argument.
        default: its default.
        help: what the docstring says of it.
        number: int or float where numbers may be entered.
        least: the smallest whole number that is accepted.
        choices: fixed values, None and classes among them.
        text: whether names may be entered, separated by commas.
        several: whether more than one.
    """

    name: str
    default: Any
    help: str = ""
    number: type | None = None
    least: int | None = None
    choices: tuple[Any, ...] = ()
    text: bool = False
    several: bool = False


def settings_of(cls: type, task: str | None = None) -> tuple[Setting, ...]:
    """The settings of a class, from its signature and the Args of its docstring.

    Args:
        cls: a wrapper, or a class among the choices of one.
        task: "regression" or "classification" leaves out output distributions that are of no use there.

    Returns:
        One for each argument that can be entered by hand, in their order; the common ones of all wrappers left out.

    Example:
        >>> from workbench import vote
        >>> [setting.name for setting in settings_of(vote.Wrapper)][:2]
        ['n_voters', 'alpha']
    """
    described = _described(cls)
    hints = typing.get_type_hints(getattr(cls, "__init__"))  # noqa: B009  # of the class itself, not of an instance
    found = []
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) or name in COMMON:
            continue
        setting = _setting(cls, name, parameter.default, hints.get(name, Any), described.get(name, ""), task)
        if setting is not None:
            found.append(setting)
    return tuple(found)


def _setting(cls: type, name: str, default: Any, hint: Any, text: str, task: str | None) -> Setting | None:
    kinds = set(typing.get_args(hint)) if typing.get_origin(hint) in (types.UnionType, typing.Union) else {hint}
    hint = Any if Any in kinds else hint  # Python 3.10 makes Optional[Any] of it where the default is None
    nothing = (None,) if type(None) in kinds or (hint is Any and default is None) else ()
    if bool in kinds:
        return Setting(name, default, text, choices=(*nothing, True, False))
    quoted = tuple(word for word in dict.fromkeys(re.findall(r'"(\w+)"', text)) if _accepts(cls, name, word))
    if name not in ("layer", "layers"):
        known = vars(sys.modules[cls.__module__])
        words = dict.fromkeys(re.findall(r"\b[A-Z]\w+", text)) if hint is Any else ()
        classes = tuple(
            known[word]
            for word in words
            if isinstance(known.get(word), type) and _accepts(cls, name, known[word]) and _fits(known[word], task)
        )
        if classes:
            return Setting(name, classes[0] if default not in classes else default, text, choices=classes)
    number = int if int in kinds else float if float in kinds else None
    if number or quoted:
        least = next((n for n in (0, 1, 2) if _accepts(cls, name, n)), None) if number is int else None
        return Setting(name, default, text, number, least, (*nothing, *quoted))
    if hint is Any or str in kinds:
        return Setting(name, default, text, text=True, several=hint is Any)
    return None


def _fits(cls: type, task: str | None) -> bool:
    """Whether an output distribution is of use for a task: those of class labels say probabilities."""
    return task is None or not hasattr(cls, "loss_function") or hasattr(cls, "probs") == (task == "classification")


def _accepts(cls: type, name: str, value: Any) -> bool:
    try:
        cls(**{name: value})
    except (TypeError, ValueError):
        return False
    return True


def _described(cls: type) -> dict[str, str]:
    """What the Args section of a docstring says, by name."""
    section = re.search(r"^Args:\n((?: .*\n?|\n)+)", inspect.getdoc(cls) or "", re.M)
    parts = re.split(r"^ {4}(\w[\w, ]*): ", section[1], flags=re.M)[1:] if section else []
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return {name: re.sub(r"\s+", " ", text).strip() for names, text in pairs for name in names.split(", ")}


@dataclass
class Part:
    """One wrapper and the settings in which it differs from its defaults.

    Args:
        cls: the wrapper's class.
        values: by argument; for a class among the choices an instance of it, or a `Part` of that class.

    Example:
        >>> from workbench import vote
        >>> Part(vote.Wrapper, {"n_voters": 5}).build()
        vote.Wrapper(vote(n_voters=5, use_bias=True))
    """

    cls: type
    values: dict[str, Any] = field(default_factory=dict)

    def build(self, output: str = "values") -> Any:
        """The object; a wrapper that asks for no output is given this one."""
        values = {name: value.build() if isinstance(value, Part) else value for name, value in self.values.items()}
        if issubclass(self.cls, Wrapper) and output != "values":
            values.setdefault("output", output)
        return self.cls(**values)

    def source(self, imports: set[str], output: str = "values") -> str:
        """The expression that builds it; what it needs is added to the imports.

        Raises:
            Unwritable: a value or the class can't be written down.
        """
        values = dict(self.values)
        if issubclass(self.cls, Wrapper) and output != "values":
            values.setdefault("output", output)
        place = reference(self.cls, imports)
        return f"{place}({', '.join(f'{name}={_written(value, imports)}' for name, value in values.items())})"


def part_of(wrapper: Wrapper) -> Part:
    """The part that a wrapper was made of."""
    args, kwargs = wrapper._given
    bound = inspect.signature(type(wrapper)).bind(*args, **kwargs)
    values: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            values |= value
        else:
            values[name] = value
    return Part(type(wrapper), values)


def fitting(part: Part, task: str) -> Part:
    """The part with what its class must be told about a task: an output distribution that suits it."""
    told = {
        setting.name: setting.default
        for setting in settings_of(part.cls, task)
        if setting.name not in part.values
        and isinstance(setting.default, type)
        and not _fits(inspect.signature(part.cls).parameters[setting.name].default, task)
    }
    return Part(part.cls, {**told, **part.values})


@dataclass
class Candidate:
    """What is compared: no wrapper (the plain model), one, or several at once, under a name."""

    name: str
    parts: list[Part] = field(default_factory=list)

    def build(self, output: str = "values") -> Wrapper:
        """The wrapper."""
        built = [part.build(output) for part in self.parts]
        return built[0] if len(built) == 1 else compose(*built)

    def source(self, imports: set[str], output: str = "values") -> str:
        """The expression that builds it; see `Part.source`."""
        written = [part.source(imports, output) for part in self.parts]
        if len(written) == 1:
            return written[0]
        imports.add("from workbench import compose")
        return f"compose({', '.join(written)})"


def candidates(wrappers: Any) -> list[Candidate]:
    """Candidates of what a user names: a dict name -> wrapper, or a list of wrappers or of names such as "vote+sculpt".

    Raises:
        TypeError, ValueError: anything else, a wrapper that there is not, or two of one name.
    """
    if isinstance(wrappers, str | Wrapper):
        wrappers = [wrappers]
    if not isinstance(wrappers, dict | list | tuple):
        raise TypeError(f"wrappers: found {type(wrappers).__name__}; give a list or a dict name -> wrapper")
    named = wrappers.items() if isinstance(wrappers, dict) else ((None, wrapper) for wrapper in wrappers)
    made: list[Candidate] = []
    for name, wrapper in named:
        if name is not None and not (isinstance(name, str) and name.strip()):
            raise TypeError(f"wrappers: a name must be a text, found {name!r}")
        parts = _parts(wrapper)
        names = {candidate.name for candidate in made}
        label = (name or "+".join(name_of(part.cls) for part in parts) or PLAIN).strip()
        made.append(Candidate(label if name else numbered(label, names), parts))
    return made


def _parts(wrapper: Any) -> list[Part]:
    if isinstance(wrapper, str):
        words = [word.strip() for word in wrapper.split("+")]
        known = wrapper_classes()
        if words in ([PLAIN], ["baseline"]):
            return []
        for word in words:
            if word not in known:
                raise ValueError(f"wrappers: there is no wrapper {word!r}; there are {PLAIN}, {', '.join(known)}")
        return [Part(known[word]) for word in words]
    if isinstance(wrapper, type) and issubclass(wrapper, Wrapper):
        wrapper = wrapper()
    if not isinstance(wrapper, Wrapper):
        raise TypeError(
            f"wrappers: found {wrapper!r:.60}; give wrappers such as vote.Wrapper(5), or names such as 'vote'"
        )
    inside = getattr(wrapper, "wrappers", None)
    return [part_of(wrapper)] if inside is None else [part_of(part) for part in inside]


def numbered(name: str, taken: Sequence[str] | set[str]) -> str:
    """The name, with a number behind it if it is taken."""
    return next(n for n in (name, *(f"{name} {i}" for i in range(2, len(taken) + 3))) if n not in taken)


def reference(thing: Any, imports: set[str]) -> str:
    """How code refers to a class or function that can be imported.

    Raises:
        Unwritable: it can't, such as one defined in a notebook.
    """
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "")
    short = next((n for n in wrapper_classes() if getattr(_package, n, None) is not None and _has(n, thing)), None)
    if short is not None:
        imports.add(f"from workbench import {short}")
        return f"{short}.{thing.__name__}"
    found: Any = sys.modules.get(module or "")
    for step in name.split("."):
        found = getattr(found, step, None)
    if module in (None, "__main__", "builtins") or found is not thing:
        raise Unwritable(f"{name or repr(thing)} is not defined in a module that can be imported")
    imports.add(f"from {module} import {name.split('.')[0]}")
    return name


def _has(module: str, thing: Any) -> bool:
    """Whether a wrapper's module offers this class under its own name."""
    return getattr(getattr(_package, module), getattr(thing, "__name__", ""), None) is thing


def _written(value: Any, imports: set[str]) -> str:
    if isinstance(value, Part):
        return value.source(imports)
    if isinstance(value, type):
        return reference(value, imports)
    text = repr(value)
    try:
        if ast.literal_eval(text) == value:
            return text
    except (ValueError, SyntaxError):
        pass
    cls = type(value)  # an object whose text is the call that makes it, such as Normal(beta=0.5)
    try:
        again = eval(text, {cls.__name__: cls})
    except Exception as error:
        raise Unwritable(f"{text:.60} can't be written as source code") from error
    if repr(again) != text:
        raise Unwritable(f"{text:.60} can't be written as source code")
    return reference(cls, imports) + text[len(cls.__name__) :]
