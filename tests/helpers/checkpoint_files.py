"""Files of wrapped models, read and changed by hand."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file


def contents(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the settings in a file, and its tensors."""
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["workbench"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def rewrite(path: Path, text: Any, tensors: dict[str, torch.Tensor], signed: bool = True) -> None:
    """Write a file with changed contents, with or without updated checksums."""
    written = text if isinstance(text, str) else json.dumps(text)
    metadata = {"format": "pt", "workbench": written}
    if signed:
        metadata["workbench_checksum"] = hashlib.sha256(written.encode()).hexdigest()
    save_file(tensors, path, metadata=metadata)
