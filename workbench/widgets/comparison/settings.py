"""Candidates of a comparison, and the source code that builds them; no widgets.

A `Part` is one wrapper with its settings, a `Candidate` one or several parts under a name. Both can be built, and written as source code.
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
    """Something that can't be written as source code."""


def wrapper_classes() -> dict[str, type[Wrapper]]:
    """Return all registered wrappers by name.

    Example:
        >>> "vote" in wrapper_classes()
        True
    """
    return {name: wrapper_class(name) for name in wrapper_names()}


def summary(cls: type) -> str:
    """Return the first paragraph of a docstring, on one line."""
    return (cls.__doc__ or cls.__name__).strip().split("\n\n")[0].replace("\n", " ")


def settings_of(cls: type, task: str | None = None) -> tuple[Setting, ...]:
    """Return the settings of a wrapper, or of a class it can choose, that a form can show, without the options common to all wrappers.

    Args:
        cls: class.
        task: "regression" or "classification", to leave out output distributions that do not apply.

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
    """One wrapper with the settings that differ from its defaults.

    Args:
        cls: class of the wrapper.
        values: values by argument; where a class can be chosen, an instance of it or a `Part` of that class.

    Example:
        >>> from workbench import vote
        >>> Part(vote.Wrapper, {"n_voters": 5}).build()
        vote.Wrapper(n_voters=5)
    """

    cls: type
    values: dict[str, Any] = field(default_factory=dict)

    def build(self, output: Any = "values") -> Any:
        """Build the object; a wrapper without `output` gets this one."""
        values = {name: value.build() if isinstance(value, Part) else value for name, value in self.values.items()}
        if issubclass(self.cls, Wrapper) and output != "values":
            values.setdefault("output", output)
        return self.cls(**values)

    def source(self, imports: set[str], output: Any = "values") -> str:
        """Return the expression that builds the object, and add its imports to `imports`.

        Raises:
            Unwritable: if a value or the class can't be written as source code.
        """
        values = dict(self.values)
        if issubclass(self.cls, Wrapper) and output != "values":
            values.setdefault("output", output)
        place = reference(self.cls, imports)
        return f"{place}({', '.join(f'{name}={_source(value, imports)}' for name, value in values.items())})"


def part_of(wrapper: Wrapper) -> Part:
    """Return the part for a wrapper object.

    Raises:
        TypeError: if its settings are not declared as fields.
    """
    if "__dataclass_params__" not in vars(type(wrapper)):
        raise TypeError(
            f"wrappers: {type(wrapper).__name__} has a custom __init__, which does not declare its settings; declare them as fields, "
            "such as n_samples: int = workbench.setting(default=5, least=1, help=...)"
        )
    return Part(type(wrapper), wrapper.changed())


def fitting(part: Part, task: str) -> Part:
    """Return the part with defaults that fit the task, such as an output distribution."""
    defaults = {setting.name: setting.default for setting in all_settings_of(part.cls)}
    suited = {
        setting.name: setting.default
        for setting in settings_of(part.cls, task)
        if setting.name not in part.values and setting.default is not defaults[setting.name]
    }
    return Part(part.cls, {**suited, **part.values})


@dataclass
class Candidate:
    """A named model to compare: with no wrapper (the plain model), one, or several combined."""

    name: str
    parts: list[Part] = field(default_factory=list)

    def build(self, output: Any = "values") -> Wrapper:
        """Build the wrapper."""
        built = [part.build(output) for part in self.parts]
        if not built and output != "values":  # the plain model also needs its output stated
            return compose(output=output)
        return built[0] if len(built) == 1 else compose(*built)

    def same(self, other: Candidate) -> bool:
        """Return whether another candidate has the same settings; an object equals the `Part` that makes it."""
        return self == other or (self.name == other.name and repr(self.build()) == repr(other.build()))

    def source(self, imports: set[str], output: Any = "values") -> str:
        """Return the expression that builds it; see `Part.source`."""
        sources = [part.source(imports, output) for part in self.parts]
        if len(sources) == 1:
            return sources[0]
        imports.add("from workbench import compose")
        if not sources and output != "values":
            sources = [f"output={_source(output, imports)}"]
        return f"compose({', '.join(sources)})"


def candidates(wrappers: Any) -> list[Candidate]:
    """Return the candidates for wrappers given by the user: a dict name -> wrapper, or a list of wrappers or names such as "vote+sculpt".

    Raises:
        TypeError, ValueError: for anything else, an unknown wrapper, or a name that is not a text.
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
    """Return the names of the parts, or the text itself for one with arguments."""
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
    """Return the name, with a number appended if it is taken."""
    return next(n for n in (name, *(f"{name} {i}" for i in range(2, len(taken) + 3))) if n not in taken)


def reference(value: Any, imports: set[str]) -> str:
    """Return the expression for an importable class or function, and add its import to `imports`.

    Raises:
        Unwritable: if it can't be imported, such as one defined in a notebook.
    """
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    for short in BUILT_IN:
        if getattr(sys.modules.get(f"workbench.methods.{short}"), name, None) is value:
            imports.add(f"from workbench import {short}")
            return f"{short}.{name}"
    known: Any = sys.modules.get(module or "")
    for step in name.split("."):
        known = getattr(known, step, None)
    if module in (None, "__main__", "builtins") or known is not value:
        raise Unwritable(f"{name or repr(value)} is not defined in a module that can be imported")
    imports.add(f"from {module} import {name.split('.')[0]}")
    return name


def _source(value: Any, imports: set[str]) -> str:
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
    cls = type(value)  # try objects whose repr is the call that makes them, such as Normal(beta=0.5)
    try:
        again = eval(text, {cls.__name__: cls})
    except Exception as error:
        raise Unwritable(f"{text:.60} can't be written as source code") from error
    if repr(again) != text:
        raise Unwritable(f"{text:.60} can't be written as source code")
    return reference(cls, imports) + text[len(cls.__name__) :]
