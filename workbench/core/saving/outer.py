"""Modules around a wrapped model, such as calibrations: their description in files, and how they are restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...engine.clone import eager
from ..registry import OUTER, outer_class
from .file_format import tensors_of, versions_of

INNER = "wrapped."  # prefix of the inner model in the state of such a module


def split_outer(model: Any) -> tuple[list[Any], Any]:
    """Return the modules around a wrapped model, outermost first, and the model itself."""
    outer = []
    while f"{type(model).__module__}:{type(model).__name__}" in OUTER.values():
        outer.append(model)
        model = eager(model.wrapped)
    return outer, eager(model)


def contents_of(outer: list[Any], model: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what the metadata of a file say about a model and the modules around it, and all tensors."""
    described, around = around_of(outer)
    tensors, split, entries = tensors_of(model)
    prefix = INNER * len(outer)
    text: dict[str, Any] = {"complex": [prefix + name for name in split]}
    if described:
        text["around"] = described
    if entries:
        text["entries"] = entries
    text["versions"] = versions_of(model)
    return text, {prefix + name: tensor for name, tensor in tensors.items()} | around


def around_of(outer: list[Any]) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Return the descriptions of the modules around a model, and their own tensors by name in the outermost module."""
    described: list[dict[str, Any]] = []
    named: dict[str, Tensor] = {}
    for level, module in enumerate(outer):
        arguments, functions = module.arguments()
        fitted_on = {} if module.fitted_on is None else {"data": module.fitted_on}
        described.append({"class": type(module).__name__, "arguments": arguments, "functions": functions, **fitted_on})
        state = module.state_dict().items()
        tensors = {name: value for name, value in state if isinstance(value, Tensor) and not name.startswith(INNER)}
        named |= {INNER * level + name: value.clone() for name, value in tensors.items()}
    return described, named


def check_outer(path: Path, described: Any, outer: list[Any], call: str = "load(path, ") -> None:
    """Raise ValueError if the modules around a model cannot be restored as a file says.

    Args:
        path: path of the file, for errors.
        described: descriptions in the file.
        outer: existing modules around the model; empty if they are to be created.
        call: beginning of a call that loads into an existing module, for errors.
    """
    if not isinstance(described, list) or any(entry.get("class") not in OUTER for entry in described):
        raise ValueError(
            f"{path} has modules around its model that this version of workbench does not know ({described!r:.80}): update workbench"
        )
    saved, existing = [entry["class"] for entry in described], [type(module).__name__ for module in outer]
    if outer and saved != existing:
        raise ValueError(
            f"{path} holds {' of '.join([*saved, 'a wrapped model'])}, and this is a {' of '.join(existing)}"
        )
    for entry in () if outer else described:
        if entry["functions"]:
            functions = ", ".join(f"{name}=" for name in entry["functions"])
            raise ValueError(
                f"{path} holds a {entry['class']} that was made with {functions}, functions, which files cannot hold: load it into one made in "
                f"the same way, {call}{entry['class']}(wrapper(model), {functions}...))"
            )


def load_outer(described: list[dict[str, Any]], outer: list[Any], model: Any, tensors: dict[str, Tensor]) -> Any:
    """Create modules around a model, or load existing ones, and return the outermost.

    Args:
        described, outer: as for `check_outer`.
        model: the wrapped model.
        tensors: tensors of the file by name in the outermost module.

    Raises:
        ValueError: if tensors are missing or do not fit.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    for level in reversed(range(len(described))):
        module = (
            outer[level] if outer else outer_class(described[level]["class"])(model, **described[level]["arguments"])
        )
        prefix = INNER * level
        at_this_level = {
            name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)
        }
        at_this_level = {name: tensor for name, tensor in at_this_level.items() if not name.startswith(INNER)}
        missing: list[str] = []
        errors: list[str] = []
        module._load_from_state_dict(at_this_level, "", {}, False, missing, [], errors)
        if missing or errors:
            raise ValueError(f"{type(module).__name__} lacks {', '.join(missing) or 'nothing'}; {'; '.join(errors)}")
        module.fitted_on = described[level].get("data")
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer if buffer is None else buffer.to(device)
        model = module
    return model


__all__ = ["INNER", "around_of", "check_outer", "contents_of", "load_outer", "split_outer"]
