"""Conversion of wrappers to and from JSON values, for saved files."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..method import Method
from ..outputs.options import from_json, to_json
from ..registry import wrapper_class, wrapper_names
from ..settings import settings_of

OPTIONS = ("output", "state", "strategy", "purity", "chunk")  # options common to all wrappers of a model
LARGEST = 2**16  # maximum of integer settings that are not a size of any tensor in the file


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
    """Restore what `described` says about the training data; files of earlier versions only contain the number of rows."""
    record.rows, record.data, record.trainings = part["rows"], part.get("data"), tuple(part.get("trainings", ()))


def _arguments(wrapped: Any, method: Method) -> dict[str, Any]:
    """Return the arguments of the wrapper of a method; for unregistered classes only the import path, for error messages."""
    is_registered = method.name in wrapper_names() and type(method.wrapper) is wrapper_class(method.name)
    if not is_registered or type(method) not in map(type, method.wrapper.make()):
        return {"foreign": import_path(type(method))}
    classes = {setting.name: setting.classes for setting in settings_of(type(method.wrapper))}
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
    """Convert an option of a class to a JSON value; parameters are saved with their current value, generators are not saved."""
    if isinstance(option, nn.Parameter):
        return {"learned": option.item()}
    if isinstance(option, Tensor):
        return option.item()
    return None if isinstance(option, torch.Generator) else option


def unknown_methods(part: dict[str, Any]) -> list[str]:
    """Return the wrappers of a part that are neither built in nor registered, so that they cannot be built from a file."""
    return [
        method.get("foreign", name)
        for name, method in part["methods"].items()
        if "foreign" in method or name not in wrapper_names()
    ]


def built(name: str, arguments: dict[str, Any], sizes: set[int]) -> Any:
    """Build a wrapper from the arguments in a file.

    Args:
        name: name of a registered wrapper.
        arguments: argument name -> JSON value.
        sizes: sizes of tensors in the file; other integers above `LARGEST` are refused, since the settings may be damaged.

    Raises:
        ValueError: if the wrapper does not accept the arguments.
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
    """Return the options common to all wrappers of a part, as arguments of `with_options`."""
    return {name: part[name] for name in OPTIONS if name in part} | {"output": from_json(part["output"])}


__all__ = ["LARGEST", "OPTIONS", "built", "described", "import_path", "options_of", "recall_data", "unknown_methods"]
