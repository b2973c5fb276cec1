"""Settings of wrappers: frozen dataclasses whose fields declare type, range and help text, validated on construction."""

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

_METADATA = "workbench"  # key of a setting in the metadata of its dataclass field

MAX_COUNT = 2**20  # upper limit of integer settings


@dataclass(frozen=True)
class Setting:
    """Description of one setting: its allowed values, derived from the type annotation and the arguments of `setting`.

    Args:
        name: name of the setting.
        default: default value.
        help: description for users.
        least, above, below: bounds of numbers: minimum (inclusive), exclusive lower bound, exclusive upper bound.
        wording: text of the error in place of the bounds, such as "must not be negative".
        classes: classes whose instances are allowed, or the class itself for an instance with defaults; strings and files name these classes.
        saved: whether it is saved in a state, which then only loads into an object with an equal value.
        read: function that returns the value to store or raises ValueError; replaces all other checks.
        trains: whether it changes a training that is not `saved` with it: a checkpoint of `fit` then only resumes with an equal value.
        choices: allowed constants: None, those of a `Literal`, True and False.
        number: int or float if numbers are allowed.
        text: whether any string is allowed.
        several: whether a sequence of strings is allowed.
        base: base class of allowed instances, including those of users' subclasses.
        anything: whether values of any other type are allowed.
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
    trains: bool = False
    choices: tuple[Any, ...] = ()
    number: type[int] | type[float] | None = None
    text: bool = False
    several: bool = False
    base: type | None = None
    anything: bool = False

    def check(self, value: Any) -> Any:
        """Validate a value and return it as stored: a class as an instance, strings as a tuple, numbers converted to the declared type.

        Raises:
            ValueError: if the value is not allowed.
            TypeError: if the value is not an instance of the required class.
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
        raise kind(f"{self.name} {self.wording or f'must be {self._expected()}'}, not {_shown(value)}")

    def _number(self, value: Any) -> Any:
        """Return the value as a number if it is within the bounds; None otherwise."""
        kind: Any = int if self.number is int else numbers.Real
        try:
            if isinstance(value, bool) or not isinstance(value, kind) or not math.isfinite(value):
                return None
        except OverflowError:  # an integer beyond the range of float
            return None
        if self.number is int and value > MAX_COUNT:
            raise ValueError(
                f"{self.name} must be at most {MAX_COUNT:,}, not {value}: larger values are not computable in practice"
            )
        inside = (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )
        return (value if self.number is int else float(value)) if inside else None

    def _expected(self) -> str:
        """Return a description of the allowed values for error messages."""
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
        """The values to choose from: the constants if there are any, otherwise the classes."""
        return self.choices or self.classes

    def for_task(self, task: str | None) -> Setting:
        """Return a copy without output distributions that do not suit the task: "regression", "classification" or "labels"; None for any."""
        classes = tuple(cls for cls in self.classes if _fits(cls, task))
        default = self.default if not isinstance(self.default, type) or self.default in classes else classes[0]
        return dataclasses.replace(self, classes=classes, default=default)


def _shown(value: Any) -> str:
    """Return a value as code; of one that takes several lines, such as a tensor, the class."""
    code = repr(value)
    return code if "\n" not in code else f"an object of type {type(value).__name__}"


def _fits(cls: type, task: str | None) -> bool:
    """Return whether an output distribution suits a task; those for class labels have `probs`."""
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
    except (RuntimeError, TypeError, ValueError):  # comparison of tensors with several elements
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
    trains: bool = False,
) -> Any:
    """Declare a field of a `Settings` class; see `Setting` for the arguments.

    Example:
        >>> class Noise(Settings):
        ...     scale: float = setting(default=0.1, least=0, help="standard deviation")
        >>> Noise(scale=2)
        Noise(scale=2.0)
        >>> Noise(scale=-1)
        Traceback (most recent call last):
        ValueError: scale must be a number of at least 0, not -1
    """
    described = Setting("", default, help, least, above, below, wording, classes, saved, read, trains)
    return dataclasses.field(default=default, metadata={_METADATA: described})


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(setting,))
class Settings:
    """Base class of validated settings: every subclass becomes a frozen dataclass of its annotated fields, described by `setting`.

    Values are checked against these types: bool, int, float, str, None, `Literal`, `Sequence[str]`, a class together with its `type[...]` if
    both the class and its instances are allowed, and unions of these. Values of other types are not checked.

    A subclass that defines `__init__` is not made a dataclass.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        bases = [base for base in cls.__mro__[1:] if issubclass(base, Settings) and base is not Settings]
        if "__init__" not in vars(cls) and all("__dataclass_params__" in vars(base) for base in bases):
            dataclass(frozen=True, repr=False, eq=False)(cls)
            cls.__init__ = _checking_names(cls)  # type: ignore[method-assign]
            cls.__doc__ = _documented(cls)

    def __post_init__(self) -> None:
        for described in settings_of(self.__class__):
            object.__setattr__(self, described.name, described.check(getattr(self, described.name)))

    def changed(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults, by name."""
        values = ((described, getattr(self, described.name)) for described in settings_of(self.__class__))
        return {
            described.name: value
            for described, value in values
            if value is not described.default and not _same(value, described.check(described.default))
        }

    def __repr__(self) -> str:
        return f"{self._display_name()}({', '.join(f'{name}={value!r}' for name, value in self.changed().items())})"

    @classmethod
    def _display_name(cls) -> str:
        return f"{cls.__module__.rpartition('.')[2]}.Wrapper" if cls.__name__ == "Wrapper" else cls.__name__


def _checking_names(cls: type[Settings]) -> Callable[..., None]:
    """Return the `__init__` of a class, with an error for unknown settings that says which ones there are."""
    init = cls.__init__

    @functools.wraps(init)
    def checked(self: Settings, *args: Any, **kwargs: Any) -> None:
        known = [described.name for described in settings_of(cls)]
        for name in kwargs:
            if name not in known:
                raise TypeError(f"{cls._display_name()} has no setting {name!r}: {hint(name, known)}")
        init(self, *args, **kwargs)

    return checked


def settings_of(cls: Any) -> tuple[Setting, ...]:
    """Return the settings of a dataclass, positional ones first.

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
    """Return a setting completed with what its type annotation says."""
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
    """Return the docstring of a class with an Args section generated from the help of its settings."""
    text = inspect.cleandoc(cls.__doc__ or f"Settings of {cls.__name__}.")
    annotations = vars(cls).get("__annotations__", {})
    lines = [
        f"    {field.name}: {field.metadata[_METADATA].help}"
        for field in dataclasses.fields(cls)
        if _METADATA in field.metadata and field.name in annotations
    ]
    common = [field.name for field in dataclasses.fields(cls) if field.kw_only and field.name not in annotations]
    if lines and common:
        lines.append(f"    {', '.join(common)}: keyword-only options common to all wrappers; see `workbench.Wrapper`.")
    head, mark, example = text.partition("\nExample:")
    wrapped = [textwrap.fill(line, 140, subsequent_indent=" " * 8, break_on_hyphens=False) for line in lines]
    return "\n".join([head.rstrip(), "", "Args:", *wrapped, ""]) + f"{mark}{example}" if lines else text


def hint(word: str, known: Iterable[str]) -> str:
    """Return suggestions for a misspelled name, and the list of known names.

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
