"""Validation of the contents of saved files, before anything is built from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..additions import MARK
from ..method import Call
from ..outputs.options import from_json
from ..settings import settings_of
from ..wrapper import Wrapper, compose
from .file_format import CHECKSUM, KEY, VERSION, checksum, digest
from .wrapper_json import LARGEST, OPTIONS, built, options_of, unknown_methods


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the metadata and tensors of a file.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file was not written by `write`, has a newer format, or is damaged.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} {'is a folder, not a file' if path.is_dir() else 'does not exist'}")
    return checked(path, *_open(path))


def checked(
    path: Path, metadata: dict[str, str], tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Validate the metadata and tensors of a file, and return the parsed metadata and the tensors.

    Args:
        path: path of the file, for errors.
        metadata: metadata of the file.
        tensors: name -> tensor.
    """
    if KEY not in metadata:
        raise ValueError(
            f"{path} names no wrappers: it holds the weights of a plain model ({len(tensors)} tensors: {', '.join(list(tensors)[:3])}, ...). "
            "Wrap the model, and wrapped.load_state_dict(safetensors.torch.load_file(path))"
        )
    checksum_differs = CHECKSUM in metadata and metadata[CHECKSUM] != digest(metadata[KEY])
    try:
        text = json.loads(metadata[KEY])
    except (ValueError, RecursionError) as error:
        _refuse(path, f"its settings are not valid JSON ({error})")
    version = text.get("version") if isinstance(text, dict) else None
    if type(version) is int and version > VERSION:
        raise ValueError(
            f"{path} was written by a newer workbench (format {version}, this one reads up to {VERSION}): update workbench"
            + ("; or the file is damaged, since the checksum of its settings is wrong" if checksum_differs else "")
        )
    if checksum_differs:
        _refuse(path, "the checksum of its settings is wrong")
    if type(version) is not int or version < 1:
        _refuse(path, f"it has version={version!r}")
    if version > 1:
        _verify(path, CHECKSUM in metadata, text.get("checksums"), tensors)
    _check_text(path, text, tensors)
    for name in text["complex"]:
        # cloned, since the file aligns tensors to 8 bytes, not 16
        tensors[name] = torch.view_as_complex(tensors[name].clone())
    return text, tensors


def _refuse(path: Path, problem: str) -> NoReturn:
    raise ValueError(f"{path} is damaged: {problem}. Use another copy of the file, or save the model again")


def _open(path: Path, retry: bool = True) -> tuple[dict[str, str], dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        if error.errno is not None:  # no permission, or a failing disk
            raise
        raise ValueError(
            f"{path} is not a safetensors file ({error}). Give a file written by workbench.save"
        ) from error
    except (SafetensorError, RuntimeError, TypeError, ValueError, LookupError) as error:
        if retry:  # safetensors reports a Ctrl-C while it reads as a faulty file
            return _open(path, retry=False)
        with path.open("rb") as raw:
            pickled = raw.read(4)[:2] in (b"PK", b"\x80\x02")
        raise ValueError(
            f"{path} is not a safetensors file, or a damaged one ({error}). "
            + (
                "It looks like a file of torch.save: wrap the model, and wrapped.load_state_dict(torch.load(path, weights_only=True))"
                if pickled
                else "Give a file written by workbench.save"
            )
        ) from error


def _verify(path: Path, signed: bool, checksums: Any, tensors: dict[str, Tensor]) -> None:
    """Compare every tensor with its checksum."""
    if not signed or not isinstance(checksums, dict):
        _refuse(path, "its checksums are missing")
    for name in (*checksums, *tensors):
        if name not in checksums or name not in tensors:
            _refuse(
                path, f"the tensor {name!r} is {'missing' if name in checksums else 'not one of those that were saved'}"
            )
        if checksum(tensors[name]) != checksums[name]:
            shape = tuple(tensors[name].shape)
            _refuse(path, f"the checksum of the tensor {name!r} ({tensors[name].dtype}, {shape}) is wrong")


def _check_text(path: Path, text: Any, tensors: dict[str, Tensor]) -> None:
    """Raise ValueError if the metadata differ in structure from those of `save`, or contain invalid options."""

    def require(valid: bool, name: str, value: Any) -> None:
        if not valid:
            _refuse(path, f"{name} in its settings is {value!r:.80}")

    split: Any = text.get("complex")
    parts: Any = text.get("parts")
    require(isinstance(text.get("model"), str), "model", text.get("model"))
    require(isinstance(split, list) and all(isinstance(name, str) for name in split), "complex", split)
    for name in split:
        pairs = name in tensors and tensors[name].shape[-1:] == (2,) and tensors[name].is_floating_point()
        require(pairs, "complex", name)
    require(
        isinstance(parts, dict) and parts != {} and all(isinstance(part, dict) for part in parts.values()),
        "parts",
        parts,
    )
    require(isinstance(text.get("entries", {}), dict), "entries", text.get("entries"))
    versions = text.get("versions", {})
    well_formed = isinstance(versions, dict) and all(isinstance(entry, dict) for entry in versions.values())
    require(well_formed, "versions", versions)
    options = {described.name: described for described in settings_of(Wrapper)}
    for part in parts.values():
        methods, rows = part.get("methods"), part.get("rows")
        require(isinstance(methods, dict), "methods", methods)
        for name, method in methods.items():
            known = isinstance(method, dict) and (
                isinstance(method.get("foreign"), str) or isinstance(method.get("arguments"), dict)
            )
            require(known, name, method)
        require(isinstance(part.get("method"), str), "method", part.get("method"))
        require(rows is None or (type(rows) is int and rows >= 0), "rows", rows)
        require(part.get("data") is None or isinstance(part["data"], str), "data", part.get("data"))
        trainings = part.get("trainings", [])
        require(
            isinstance(trainings, list)
            and all(isinstance(entry, dict) and {"by", "date"} <= entry.keys() for entry in trainings),
            "trainings",
            trainings,
        )
        order = part.get("order", [[], []])
        lists = isinstance(order, list) and len(order) == 2 and all(isinstance(items, list) for items in order)
        paths = [*order[1], *(path for outputs in order[0] for path in outputs)] if lists else [None]
        require(all(isinstance(name, str) for name in paths), "order", order)
        for name in OPTIONS:
            try:
                options[name].check(from_json(part.get(name)) if name == "output" else part.get(name))
            except (AttributeError, TypeError, ValueError) as error:
                _refuse(path, f"{name}: {error}")


# ---- wrappers named in files
def named_wrapper(path: Path, part: dict[str, Any], at: str, tensors: dict[str, Tensor]) -> Wrapper:
    """Build the wrapper that a file names for a part of a model.

    Args:
        path: path of the file, for errors.
        part: metadata of the part.
        at: dotted path of the part, "" for the whole model.
        tensors: name -> tensor of the file.

    Raises:
        ValueError: if a wrapper is unknown, or its settings are invalid or do not match the tensors of the file.
    """
    if foreign := unknown_methods(part):
        raise ValueError(
            f"{path} was saved with {', '.join(foreign)}, which is not part of workbench, and code is never imported from a file: give the "
            "wrapper yourself, load(path, model, wrapper=...), or register it before (workbench.register)"
        )
    sizes = {size for tensor in tensors.values() for size in tensor.shape}
    wrappers = []
    for name, method in part["methods"].items():
        try:
            wrapper = built(name, method.get("arguments", {}), sizes)
            for made in wrapper.make():
                _check_members(made, f"{at}." if at else "", tensors)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} has settings of {name} that this version of workbench does not accept ({error}): the file is damaged, changed by hand, "
                "or written by another version"
            ) from error
        wrappers.append(wrapper)
    return compose(*wrappers).with_options(**options_of(part))


def _check_members(method: Any, prefix: str, tensors: dict[str, Tensor]) -> None:
    """Raise ValueError if sizes in the settings, such as the number of members, do not match the tensors of the file.

    This runs before any tensor is created, so that damaged settings cannot exhaust the memory.
    """
    axis = method.axis(Call(training=False, return_risk=True))
    if not method.members or axis is None:
        return
    marks = {method.name, *method.member_marks}
    sizes = {
        tensor.shape[0] if tensor.dim() else 0
        for name, tensor in tensors.items()
        if name.startswith(prefix) and name.rpartition(MARK)[2] in marks
    }
    if sizes != {axis.size}:
        raise ValueError(
            f"they name {axis.size} members, but the tensors are those of {' or '.join(map(str, sorted(sizes))) or 'none'}"
        )
    for setting in settings_of(type(method.wrapper)):
        value = getattr(method.wrapper, setting.name)
        if type(value) is int and value > LARGEST and all(value not in tensor.shape for tensor in tensors.values()):
            raise ValueError(f"{setting.name}={value}, which is not a size of any tensor in the file")


__all__ = ["checked", "named_wrapper", "read"]
