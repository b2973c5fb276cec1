"""Candidates of a comparison, and the source code that builds them.

No widgets in here: `Part` is one wrapper with its settings, `Candidate` one or several parts under a name. Both can be built, and written down.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.core.registry import PLAIN, name_of, wrapper_class, wrapper_names
from workbench.core.settings import Setting
from workbench.core.settings import settings_of as all_settings_of
from workbench.core.texts import wrapper_of
from workbench.core.wrapper import COMMON, Wrapper, compose, parts_of
from workbench.methods import BUILT_IN


class Unwritable(ValueError):
    """Something that can't be written down as source code."""


def wrapper_classes() -> dict[str, type[Wrapper]]:
    """Every wrapper that has a name.

    Example:
        >>> "vote" in wrapper_classes()
        True
    """
    return {name: wrapper_class(name) for name in wrapper_names()}


def summary(cls: type) -> str:
    """The first sentence of a docstring."""
    return (cls.__doc__ or cls.__name__).strip().split("\n\n")[0].replace("\n", " ")


def settings_of(cls: type, task: str | None = None) -> tuple[Setting, ...]:
    """The settings of a wrapper, or of a class among the choices of one, that can be entered by hand; the options of all wrappers left out.

    Args:
        cls: the class.
        task: "regression" or "classification" leaves out output distributions that are of no use there.

    Example:
        >>> from workbench import vote
        >>> [setting.name for setting in settings_of(vote.Wrapper)][:2]
        ['n_voters', 'alpha']
    """
    common = COMMON if issubclass(cls, Wrapper) else {}
    settings = (setting.for_task(task) for setting in all_settings_of(cls) if setting.name not in common)
    return tuple(s for s in settings if s.menu or s.number is not None or s.text or s.several)


@dataclass
class Part:
    """One wrapper and the settings in which it differs from its defaults.

    Args:
        cls: the wrapper's class.
        values: by argument; for a class among the choices an instance of it, or a `Part` of that class.

    Example:
        >>> from workbench import vote
        >>> Part(vote.Wrapper, {"n_voters": 5}).build()
        vote.Wrapper(n_voters=5)
    """

    cls: type
    values: dict[str, Any] = field(default_factory=dict)

    def build(self, output: Any = "values") -> Any:
        """The object; a wrapper that asks for no output is given this one."""
        values = {name: value.build() if isinstance(value, Part) else value for name, value in self.values.items()}
        if issubclass(self.cls, Wrapper) and output != "values":
            values.setdefault("output", output)
        return self.cls(**values)

    def source(self, imports: set[str], output: Any = "values") -> str:
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
    """The part that a wrapper was made of.

    Raises:
        TypeError: if its settings are not known.
    """
    if "__dataclass_params__" not in vars(type(wrapper)):
        raise TypeError(
            f"wrappers: {type(wrapper).__name__} has an __init__ of its own, which does not say its settings; declare them as fields, "
            "such as n_samples: int = workbench.setting(default=5, least=1, help=...)"
        )
    return Part(type(wrapper), wrapper.changed())


def fitting(part: Part, task: str) -> Part:
    """The part with what its class must be told about a task: an output distribution that suits it."""
    defaults = {setting.name: setting.default for setting in all_settings_of(part.cls)}
    suited = {
        setting.name: setting.default
        for setting in settings_of(part.cls, task)
        if setting.name not in part.values and setting.default is not defaults[setting.name]
    }
    return Part(part.cls, {**suited, **part.values})


@dataclass
class Candidate:
    """What is compared: no wrapper (the plain model), one, or several at once, under a name."""

    name: str
    parts: list[Part] = field(default_factory=list)

    def build(self, output: Any = "values") -> Wrapper:
        """The wrapper."""
        built = [part.build(output) for part in self.parts]
        if not built and output != "values":  # must be said of the plain model, too
            return compose(output=output)
        return built[0] if len(built) == 1 else compose(*built)

    def same(self, other: Candidate) -> bool:
        """Whether another candidate is of the same settings; an object and the `Part` that makes it are the same."""
        return self == other or (self.name == other.name and repr(self.build()) == repr(other.build()))

    def source(self, imports: set[str], output: Any = "values") -> str:
        """The expression that builds it; see `Part.source`."""
        written = [part.source(imports, output) for part in self.parts]
        if len(written) == 1:
            return written[0]
        imports.add("from workbench import compose")
        if not written and output != "values":
            written = [f"output={_written(output, imports)}"]
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
    candidates: list[Candidate] = []
    for name, wrapper in named:
        if name is not None and not (isinstance(name, str) and name.strip()):
            raise TypeError(f"wrappers: a name must be a text, found {name!r}")
        parts = _parts(wrapper)
        taken = {candidate.name for candidate in candidates}
        label = (name or _label(wrapper, parts)).strip()
        candidates.append(Candidate(label if name else numbered(label, taken), parts))
    return candidates


def _label(wrapper: Any, parts: list[Part]) -> str:
    """The names of the parts; of a text with arguments the text."""
    if isinstance(wrapper, str) and any(part.values for part in parts):
        return ast.unparse(ast.parse(wrapper.strip(), mode="eval"))
    return "+".join(name_of(part.cls) for part in parts) or PLAIN


def _parts(wrapper: Any) -> list[Part]:
    if isinstance(wrapper, str):
        if wrapper.strip() == "baseline":
            return []
        try:
            wrapper = wrapper_of(wrapper)
        except ValueError as error:
            raise ValueError(f"wrappers: {error}") from error
    if isinstance(wrapper, type) and issubclass(wrapper, Wrapper):
        wrapper = wrapper()
    if not isinstance(wrapper, Wrapper):
        raise TypeError(
            f"wrappers: found {wrapper!r:.60}; give wrappers such as vote.Wrapper(5), or names such as 'vote'"
        )
    return [part_of(part) for part in parts_of(wrapper)]


def numbered(name: str, taken: Sequence[str] | set[str]) -> str:
    """The name, with a number behind it if it is taken."""
    return next(n for n in (name, *(f"{name} {i}" for i in range(2, len(taken) + 3))) if n not in taken)


def reference(thing: Any, imports: set[str]) -> str:
    """How code refers to a class or function that can be imported.

    Raises:
        Unwritable: it can't, such as one defined in a notebook.
    """
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "")
    for short in BUILT_IN:
        if getattr(sys.modules.get(f"workbench.methods.{short}"), name, None) is thing:
            imports.add(f"from workbench import {short}")
            return f"{short}.{name}"
    known: Any = sys.modules.get(module or "")
    for step in name.split("."):
        known = getattr(known, step, None)
    if module in (None, "__main__", "builtins") or known is not thing:
        raise Unwritable(f"{name or repr(thing)} is not defined in a module that can be imported")
    imports.add(f"from {module} import {name.split('.')[0]}")
    return name


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
