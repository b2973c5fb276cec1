"""Settings of wrappers: frozen dataclasses whose fields say their type, range and help, checked when one is made."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import numbers
import textwrap
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, dataclass_transform

_METADATA = "workbench"  # the key of a setting in the metadata of its field

MOST = 2**20  # of a setting that counts something


@dataclass(frozen=True)
class Setting:
    """One setting of a class: what its value may be, read from the type and from `setting`.

    Args:
        name: of the setting.
        default: its default.
        help: what it does, in words.
        least, above, below: bounds of numbers: at least, above, below.
        wording: what an error says instead of the bounds, such as "must not be negative".
        classes: classes of which it takes an instance, or the class itself for one with defaults; what texts and files call by name.
        saved: whether a saved state says it, and only fits an object with an equal one.
        read: read(value) gives the value as it is kept, or raises ValueError; instead of all other checks.
        choices: the fixed values: None, those of a `Literal`, True and False.
        number: int or float where numbers are taken.
        text: whether any text is taken.
        several: whether several texts are.
        base: of instances that are taken, of users' own classes as well.
        anything: whether values of any other kind are taken.
    """

    name: str = ""
    default: Any = None
    help: str = ""
    least: float | None = None
    above: float | None = None
    below: float | None = None
    wording: str = ""
    classes: tuple[type, ...] = ()
    saved: bool = False
    read: Callable[[Any], Any] | None = None
    choices: tuple[Any, ...] = ()
    number: type[int] | type[float] | None = None
    text: bool = False
    several: bool = False
    base: type | None = None
    anything: bool = False

    def check(self, value: Any) -> Any:
        """The value as it is kept: a class as an instance of it, texts as a tuple, numbers as their type.

        Raises:
            ValueError: if it is none of those that are taken.
            TypeError: if it should be an instance of a class and is not.
        """
        if self.read is not None:
            return self.read(value)
        if self.anything or any(_same(value, choice) for choice in self.choices):
            return value
        if self.base is not None:
            if isinstance(value, type) and issubclass(value, self.base):
                return value()
            if isinstance(value, self.base):
                return value
        if self.number is not None and (number := self._number(value)) is not None:
            return number
        if self.text and isinstance(value, str):
            return (value,) if self.several else value
        if self.several and isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return tuple(value)
        kind = TypeError if self.base is not None and not self.choices else ValueError
        raise kind(f"{self.name} {self.wording or f'must be {self._taken()}'}, not {value!r}")

    def _number(self, value: Any) -> Any:
        """A number within the bounds; None for anything else."""
        kind: Any = int if self.number is int else numbers.Real
        try:
            if isinstance(value, bool) or not isinstance(value, kind) or not math.isfinite(value):
                return None
        except OverflowError:  # a whole number that no float is large enough for
            return None
        if self.number is int and value > MOST:
            raise ValueError(
                f"{self.name} must be at most {MOST:,}, not {value}: no machine would come to the end of it"
            )
        inside = (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )
        return (value if self.number is int else float(value)) if inside else None

    def _taken(self) -> str:
        """What is taken, in words."""
        words = [choice for choice in self.choices if isinstance(choice, str)]
        if words and words == list(self.choices) and self.base is None and self.number is None:
            return f"one of {', '.join(words)}"
        options = [f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in self.choices]
        options = sorted(options, key="None".__eq__)
        if self.number is not None:
            bounds = (("of at least", self.least), ("above", self.above), ("below", self.below))
            limits = " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)
            options.insert(
                len(words), f"a {'whole number' if self.number is int else 'number'}{limits and ' '}{limits}"
            )
        if self.text:
            options.insert(0, "names" if self.several else "a text")
        if self.base is not None and self.classes and not words:
            return f"{', '.join(cls.__name__ for cls in self.classes)} (a class or an instance)"
        if self.base is not None:
            options.append(f"a {self.base.__name__}")
        return " or ".join(filter(None, [", ".join(options[:-1]), options[-1]]))

    @property
    def menu(self) -> tuple[Any, ...]:
        """What to choose from: the fixed values, else the classes."""
        return self.choices or self.classes

    def for_task(self, task: str | None) -> Setting:
        """The same without output distributions that are of no use for "regression", or for "classification" and "labels"."""
        classes = tuple(cls for cls in self.classes if _fits(cls, task))
        default = self.default if not isinstance(self.default, type) or self.default in classes else classes[0]
        return dataclasses.replace(self, classes=classes, default=default)


def _fits(cls: type, task: str | None) -> bool:
    """Whether an output distribution is of use for a task: those of class labels say probabilities."""
    return (
        task is None
        or not hasattr(cls, "loss_function")
        or hasattr(cls, "probs") == (task in ("classification", "labels"))
    )


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, Settings):
        return type(value) is type(other) and all(
            _same(option, vars(other)[name]) for name, option in vars(value).items()
        )
    try:
        return value is other or (type(value) is type(other) and bool(value == other))
    except (RuntimeError, TypeError, ValueError):  # of tensors with several elements
        return False


def setting(
    *,
    default: Any,
    help: str,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    wording: str = "",
    classes: tuple[type, ...] = (),
    saved: bool = False,
    read: Callable[[Any], Any] | None = None,
) -> Any:
    """A field of a class of settings; see `Setting`.

    Example:
        >>> class Noise(Settings):
        ...     scale: float = setting(default=0.1, least=0, help="standard deviation")
        >>> Noise(scale=2)
        Noise(scale=2.0)
        >>> Noise(scale=-1)
        Traceback (most recent call last):
        ValueError: scale must be a number of at least 0, not -1
    """
    described = Setting("", default, help, least, above, below, wording, classes, saved, read)
    return dataclasses.field(default=default, metadata={_METADATA: described})


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(setting,))
class Settings:
    """Settings that are written once: every subclass is a frozen dataclass of its annotated fields, which `setting` describes.

    The types that a value is checked by: bool, int, float, str, None, `Literal`, `Sequence[str]`, and a class with its `type[...]` where both
    the class and instances are taken; and unions of them. Values of other types are kept as they are.

    A subclass with an `__init__` of its own is left as it is.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        bases = [base for base in cls.__mro__[1:] if issubclass(base, Settings) and base is not Settings]
        if "__init__" not in vars(cls) and all("__dataclass_params__" in vars(base) for base in bases):
            dataclass(frozen=True, repr=False, eq=False)(cls)
            cls.__doc__ = _documented(cls)

    def __post_init__(self) -> None:
        for described in settings_of(self.__class__):
            object.__setattr__(self, described.name, described.check(getattr(self, described.name)))

    def changed(self) -> dict[str, Any]:
        """The settings that differ from their defaults, by name."""
        values = ((described, getattr(self, described.name)) for described in settings_of(self.__class__))
        return {
            described.name: value
            for described, value in values
            if value is not described.default and not _same(value, described.check(described.default))
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.changed().items())})"


def settings_of(cls: Any) -> tuple[Setting, ...]:
    """The settings of a dataclass, in their order.

    Example:
        >>> from workbench import vote
        >>> settings_of(vote.Wrapper)[0].name
        'n_voters'
    """
    return _settings_of(cls)


@functools.cache
def _settings_of(cls: Any) -> tuple[Setting, ...]:
    if not dataclasses.is_dataclass(cls):
        return ()
    hints = typing.get_type_hints(cls)
    return tuple(
        _typed(field.metadata.get(_METADATA, Setting(help=field.metadata.get("help", ""))), field, hints[field.name])
        for field in sorted(dataclasses.fields(cls), key=lambda field: bool(field.kw_only))
        if field.init
    )


def _typed(described: Setting, field: dataclasses.Field[Any], hint: Any) -> Setting:
    """A setting with what its type says."""
    choices: list[Any] = []
    kinds: dict[str, Any] = {"name": field.name, "default": field.default}
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    for kind in typing.get_args(hint) if union else (hint,):
        origin = typing.get_origin(kind)
        if kind is type(None):
            choices.insert(0, None)
        elif kind is bool:
            choices += [True, False]
        elif kind in (int, float):
            kinds["number"] = kind
        elif origin is Literal:
            choices += typing.get_args(kind)
        elif kind is str:
            kinds["text"] = True
        elif origin is not None and origin is not type and typing.get_args(kind)[:1] == (str,):
            kinds["several"] = True
        elif described.classes and isinstance(kind, type):
            kinds["base"] = kind
        elif origin is not type:
            kinds["anything"] = True
    return dataclasses.replace(described, choices=tuple(choices), **kinds)


def _documented(cls: Any) -> str:
    """The docstring with a line on each setting, so that it need not be written again."""
    text = inspect.cleandoc(cls.__doc__ or f"Settings of {cls.__name__}.")
    annotations = vars(cls).get("__annotations__", {})
    lines = [
        f"    {field.name}: {field.metadata[_METADATA].help}"
        for field in dataclasses.fields(cls)
        if _METADATA in field.metadata and field.name in annotations
    ]
    common = [field.name for field in dataclasses.fields(cls) if field.kw_only and field.name not in annotations]
    if lines and common:
        lines.append(f"    {', '.join(common)}: those of all wrappers, by name; see `workbench.Wrapper`.")
    head, mark, example = text.partition("\nExample:")
    wrapped = [textwrap.fill(line, 140, subsequent_indent=" " * 8, break_on_hyphens=False) for line in lines]
    return "\n".join([head.rstrip(), "", "Args:", *wrapped, ""]) + f"{mark}{example}" if lines else text


def hint(word: str, known: Iterable[str]) -> str:
    """What a wrong word may have meant, and what there is.

    Example:
        >>> hint("voter", ["sculpt", "vote"])
        'did you mean vote? there are sculpt, vote'
    """
    import difflib

    known = list(known)
    near = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    question = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{question}there are {', '.join(known) or 'none'}"


__all__ = ["Setting", "Settings", "hint", "setting", "settings_of"]
