"""Files of wrapped models as they are written: tensors, and beside them a JSON text with a checksum of each."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...atomic import replacing

KEY = "workbench"  # in the file's metadata
CHECKSUM = f"{KEY}_checksum"  # beside it: that of the text under KEY
VERSION = 3  # since 2 there are checksums, since 3 modules around the model


def tensors_of(wrapped: Any) -> tuple[dict[str, Tensor], list[str]]:
    """The state, each tensor once and with memory of its own; and the names of those that are stored as pairs of real numbers."""
    tensors: dict[str, Tensor] = {}
    split: list[str] = []
    seen: set[int] = set()
    memory: set[int] = set()
    for name, tensor in wrapped.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{name} in the state_dict is a {type(tensor).__name__}, and safetensors files hold tensors only: return a tensor from "
                "get_extra_state, or save with torch.save(wrapped.state_dict(), path)"
            )
        if tensor.is_meta:
            raise ValueError(
                f"{name} is on the meta device and has no values to save; load or initialise the model first"
            )
        if id(tensor) in seen:
            continue  # tied; loading gives it its other names
        seen.add(id(tensor))
        value = tensor.detach().resolve_conj().resolve_neg().contiguous()
        if value.dtype == torch.complex128:  # the one dtype of torch that the format does not know
            split.append(name)
            value = torch.view_as_real(value).contiguous()
        storage = value.untyped_storage()
        if storage.data_ptr() in memory or storage.nbytes() != value.numel() * value.element_size():
            value = value.clone()
        memory.add(value.untyped_storage().data_ptr())
        tensors[name] = value
    return tensors, split


def write(path: Path, text: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write a file whole or not at all."""
    from safetensors.torch import save_file

    with replacing(path) as unfinished:
        save_file(tensors, unfinished, metadata={"format": "pt", **metadata_of(text, tensors)})


def metadata_of(text: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, str]:
    """What a file says beside its tensors, with a checksum of each."""
    checksums = {name: checksum(tensor) for name, tensor in tensors.items()}
    content = json.dumps({"version": VERSION if "around" in text else 2, **text, "checksums": checksums})
    return {KEY: content, CHECKSUM: digest(content)}


def digest(content: str) -> str:
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()


def checksum(tensor: Tensor) -> str:
    """sha256 of type, shape and values."""
    total = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}\n".encode())
    total.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


__all__ = ["CHECKSUM", "KEY", "VERSION", "checksum", "digest", "metadata_of", "tensors_of", "write"]
