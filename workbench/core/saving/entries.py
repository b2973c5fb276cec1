"""Entries of a state that are no tensors, such as the settings that a class adds to its state_dict, as JSON values."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

SCALARS = (bool, int, float, str, type(None))
NAMED = (type, types.FunctionType, types.BuiltinFunctionType)


def to_json(name: str, value: Any) -> Any:
    """Return an entry as a JSON value; functions and classes are stored by name.

    Args:
        name: name of the entry, for errors.
        value: numbers, texts, None, functions and classes, also in lists, tuples and dicts.

    Raises:
        TypeError: if the entry holds anything else.
    """
    if type(value) in SCALARS:
        return value
    if type(value) in (list, tuple):
        return {type(value).__name__: [to_json(name, item) for item in value]}
    if type(value) is dict:
        return {"dict": [[to_json(name, key), to_json(name, item)] for key, item in value.items()]}
    if isinstance(value, NAMED) and "<" not in value.__qualname__:  # no lambda, and none made in a function
        return {"name": _name(value)}
    raise TypeError(
        f"{name} in the state_dict is or holds a {type(value).__name__}, and files hold tensors, numbers and texts: return one of these, or "
        "lists, tuples or dicts of them, from get_extra_state, or save with torch.save(wrapped.state_dict(), path)"
    )


def check_loadable(names: Iterable[str], plain: type[nn.Module]) -> None:
    """Raise TypeError if no `load_state_dict` would read an entry of a state that is no tensor.

    Args:
        names: names of such entries.
        plain: class of the plain model.
    """
    if plain.load_state_dict is not nn.Module.load_state_dict:
        return
    for name in names:
        # torch does not call the load_state_dict of a model's parts
        if name.rpartition(".")[2] != "_extra_state":
            raise TypeError(
                f"{name} in the state_dict is no tensor, and {plain.__name__} has no load_state_dict that reads it: write one, or use "
                "get_extra_state and set_extra_state"
            )


def from_json(name: str, text: Any, current: Any) -> Any:
    """Return an entry from its JSON value.

    Args:
        name: name of the entry, for errors.
        text: result of `to_json`.
        current: the entry of the model into which it is loaded, which has the functions and classes: no code is imported from a file.

    Raises:
        ValueError: if the model lacks a function or class, or the value is not from `to_json`.
    """
    named = {_name(item): item for item in _items(current) if isinstance(item, NAMED)}

    def built(text: Any) -> Any:
        if type(text) in SCALARS:
            return text
        match text:
            case {"list": [*items]}:
                return [built(item) for item in items]
            case {"tuple": [*items]}:
                return tuple(built(item) for item in items)
            case {"dict": [*items]} if all(isinstance(item, list) and len(item) == 2 for item in items):
                return {built(key): built(item) for key, item in items}
            case {"name": str(key)} if key in named:
                return named[key]
            case {"name": str(key)}:
                raise ValueError(f"{name} was saved with {key}, which this model does not have there")
        raise ValueError(f"{name} is {text!r:.80} in the file, which no model saves")

    return built(text)


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _items(value: Any) -> Iterator[Any]:
    """Yield a value and all that its lists, tuples and dicts hold."""
    yield value
    if isinstance(value, list | tuple | dict):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _items(item)


__all__ = ["check_loadable", "from_json", "to_json"]
