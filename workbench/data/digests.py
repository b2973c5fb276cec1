"""Checksums of arrays, and rows as bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from workbench.engine.tree import tensors


def digest(arrays: Mapping[str, np.ndarray]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and values of arrays, which does not depend on byte order or file format.

    Example:
        >>> import numpy as np
        >>> digest({"a": np.zeros(2)}) == digest({"a": np.zeros((2, 1))})
        False
    """
    hasher = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        little_endian = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        hasher.update(f"{name} {little_endian.dtype.str.lstrip('<|')} {array.shape}\n".encode())
        hasher.update(little_endian.data if little_endian.size else b"")
    return hasher.hexdigest()


def arrays_of(prefix: str, tree: Any) -> dict[str, np.ndarray]:
    """Return the tensors of nested dicts as arrays by dotted names."""
    if not isinstance(tree, Mapping):
        return {prefix: tree.detach().cpu().numpy()}
    return {
        name: a
        for key, value in tree.items()
        for name, a in arrays_of(f"{prefix}.{key}" if prefix else key, value).items()
    }


def row_bytes(x: Any) -> list[bytes]:
    """Return each row of inputs as bytes, by which equal rows are found."""
    # adding 0 turns -0.0 into 0.0, which is equal but has other bytes
    parts = [[row.tobytes() for row in (t.detach().cpu().flatten(1) + 0).numpy()] for t in tensors(x)]
    return [b"".join(row) for row in zip(*parts, strict=True)]
