"""Format of saved files: safetensors with JSON metadata, including a checksum of each tensor."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...atomic import replacing
from ..sharded import WHOLE, refuse_sharded
from .entries import to_json

KEY = "workbench"  # key of the JSON text in the file's metadata
CHECKSUM = f"{KEY}_checksum"  # key of the checksum of that text
DEFAULT = {"version": 1}  # what torch's modules say of the layout of their state, unless it has changed
VERSION = 4  # version 2 added checksums, version 3 modules around the model, version 4 entries that are no tensors


def tensors_of(wrapped: Any) -> tuple[dict[str, Tensor], list[str], dict[str, Any]]:
    """Return the state with each tensor once and in separate memory, the names of complex tensors that are stored as pairs of reals, and the
    entries that are no tensors, as JSON values.

    Raises:
        TypeError: if the state has parts that are neither tensors nor such values, or is sharded.
        ValueError: if a tensor is on the meta device.
    """
    refuse_sharded(wrapped, WHOLE)
    tensors: dict[str, Tensor] = {}
    split: list[str] = []
    entries: dict[str, Any] = {}
    seen: set[int] = set()
    memory: set[int] = set()
    for name, tensor in wrapped.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            entries[name] = to_json(name, tensor)
            continue
        if tensor.is_meta:
            raise ValueError(
                f"{name} is on the meta device and has no values to save; load or initialize the model first"
            )
        if is_traceable_wrapper_subclass(tensor):
            raise TypeError(
                f"{name} is quantized ({type(tensor).__name__}), of several parts, and safetensors files hold plain tensors: keep it by "
                "torch.save(wrapped.state_dict(), path), and load_state_dict(torch.load(path)) of a model that is quantized and wrapped alike"
            )
        if tensor.layout is not torch.strided:
            raise TypeError(
                f"{name} is sparse ({tensor.layout}), and safetensors files hold dense tensors: keep it by "
                "torch.save(wrapped.state_dict(), path), and load_state_dict(torch.load(path)) of a model that is wrapped alike; or register it "
                "with persistent=False if __init__ makes it"
            )
        if id(tensor) in seen:
            continue  # tied tensors are stored once; loading restores their other names
        seen.add(id(tensor))
        value = tensor.detach().resolve_conj().resolve_neg().contiguous()
        if value.dtype == torch.complex128:  # safetensors does not support this dtype
            split.append(name)
            value = torch.view_as_real(value).contiguous()
        storage = value.untyped_storage()
        if storage.data_ptr() in memory or storage.nbytes() != value.numel() * value.element_size():
            value = value.clone()
        memory.add(value.untyped_storage().data_ptr())
        tensors[name] = value
    return tensors, split, entries


def versions_of(wrapped: Any) -> dict[str, Any]:
    """Return what modules say of the layout of their state (`_metadata` of a state dict), without those that say torch's default.

    Layers such as those of the former `torch.nn.utils.spectral_norm` take a state that says nothing for one of an older layout.
    """
    metadata = getattr(wrapped.state_dict(), "_metadata", {})
    return {path: entry for path, entry in metadata.items() if entry != DEFAULT and _is_json(entry)}


def _is_json(entry: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(entry)) == entry)
    except (TypeError, ValueError):  # of a module of the user's
        return False


def write(path: Path, text: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write a file atomically.

    Raises:
        OSError: it can't be written, as to a full disk.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with replacing(path) as unfinished:
        try:
            save_file(tensors, unfinished, metadata={"format": "pt", **metadata_of(text, tensors)})
        except SafetensorError as error:
            raise OSError(f"{path} can't be written: {error}") from error


def metadata_of(text: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, str]:
    """Return the metadata of a file: `text` as JSON, extended by a checksum of each tensor."""
    checksums = {name: checksum(tensor) for name, tensor in tensors.items()}
    version = VERSION if "entries" in text else 3 if "around" in text else 2
    content = json.dumps({"version": version, **text, "checksums": checksums})
    return {KEY: content, CHECKSUM: digest(content)}


def digest(content: str) -> str:
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()


def checksum(tensor: Tensor) -> str:
    """Return the SHA-256 of dtype, shape and values of a tensor."""
    total = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}\n".encode())
    total.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


__all__ = [
    "CHECKSUM",
    "DEFAULT",
    "KEY",
    "VERSION",
    "checksum",
    "digest",
    "metadata_of",
    "tensors_of",
    "versions_of",
    "write",
]
