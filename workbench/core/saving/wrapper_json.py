"""Wrappers as JSON texts, for the files of wrapped models: what made a model, and the same wrappers out of it."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..method import Method
from ..outputs.options import from_json, to_json
from ..registry import wrapper_class, wrapper_names
from ..settings import settings_of

OPTIONS = ("output", "state", "strategy", "purity", "chunk")  # settings that all wrappers of a model share
LARGEST = 2**16  # of a whole number among the settings that is no size of a tensor in the file


def import_path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def described(part: Any) -> dict[str, Any]:
    record = part._workbench
    return {
        "methods": {method.name: _arguments(part, method) for method in record.methods},
        "method": record.method,
        "rows": record.rows,
        "trainings": list(record.trainings),
        "data": record.data,
        **({} if record.execution is None else {"order": [record.execution.outputs, record.execution.names]}),
        **{name: getattr(record, name) for name in OPTIONS},
        "output": to_json(record.output),
    }


def recall_data(record: Any, part: dict[str, Any]) -> None:
    """Let a wrapped model know what `described` says of the data; files of earlier versions say the number of rows alone."""
    record.rows, record.data, record.trainings = part["rows"], part.get("data"), tuple(part.get("trainings", ()))


def _arguments(wrapped: Any, method: Method) -> dict[str, Any]:
    """The arguments of the wrapper that made a method; of what is not known by name the import path, for the message only."""
    named = method.name in wrapper_names() and type(method.wrapper) is wrapper_class(method.name)
    if not named or type(method) not in map(type, method.wrapper.make()):
        return {"foreign": import_path(type(method))}
    classes = {known.name: known.classes for known in settings_of(type(method.wrapper))}
    arguments: dict[str, Any] = {}
    for name, value in method.arguments(wrapped).items():
        if type(value) in classes[name]:
            options = {key: getattr(value, key, None) for key in inspect.signature(type(value)).parameters}
            value = {"class": type(value).__name__, **{key: _number(option) for key, option in options.items()}}
        elif not all(
            isinstance(item, bool | int | float | str | None)
            for item in (value if isinstance(value, list | tuple) else (value,))
        ):
            return {"foreign": import_path(type(value))}
        arguments[name] = value
    return {"arguments": arguments}


def _number(option: Any) -> Any:
    """An option as JSON: a number that is learned with its value now; generators are not kept."""
    if isinstance(option, nn.Parameter):
        return {"learned": option.item()}
    if isinstance(option, Tensor):
        return option.item()
    return None if isinstance(option, torch.Generator) else option


def unknown_methods(part: dict[str, Any]) -> list[str]:
    """What a part was wrapped with that is none of ours and not registered, and that code is never imported for."""
    return [
        method.get("foreign", name)
        for name, method in part["methods"].items()
        if "foreign" in method or name not in wrapper_names()
    ]


def built(name: str, arguments: dict[str, Any], sizes: set[int]) -> Any:
    """The wrapper of a name with the arguments that a file has.

    Args:
        name: of a registered wrapper.
        arguments: by name.
        sizes: of the tensors in the file: no larger whole number is taken from a text that may be damaged.

    Raises:
        ValueError: if it does not take them.
    """
    wrapper = wrapper_class(name)
    known = {setting.name: setting for setting in settings_of(wrapper)}
    values = dict(arguments)
    for argument, value in arguments.items():
        if argument not in known:
            raise ValueError(f"there is no setting {argument!r}")
        if isinstance(value, dict):
            cls = next((cls for cls in known[argument].classes if cls.__name__ == value.get("class")), None)
            if cls is None:
                raise ValueError(f"{argument} cannot be {value.get('class')!r}")
            for option, number in value.items():
                if type(number) is int and number > LARGEST and number not in sizes:
                    raise ValueError(f"{argument}: {option}={number}, which is no size of a tensor in the file")
            options = {
                option: nn.Parameter(torch.tensor(number["learned"])) if isinstance(number, dict) else number
                for option, number in value.items()
                if option != "class" and number is not None
            }
            values[argument] = cls(**options)
    return wrapper(**values)


def options_of(part: dict[str, Any]) -> dict[str, Any]:
    """What all wrappers of a part share, as `with_options` takes it."""
    return {name: part[name] for name in OPTIONS if name in part} | {"output": from_json(part["output"])}


__all__ = ["LARGEST", "OPTIONS", "built", "described", "import_path", "options_of", "recall_data", "unknown_methods"]
