"""Atomic file writes: a file is replaced completely or not at all."""

from __future__ import annotations

import glob
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Context manager that writes to a temporary file and moves it over `path` once it is complete and flushed to disk.

    Args:
        path: the file to replace. Readers see either the old or the new content, even if several processes write or this one is killed.

    Yields:
        Path of a hidden temporary file in the same folder, to be written by the block. It is deleted if the block raises (also on Ctrl-C).

    Raises:
        OSError: if the file cannot be written; the error names `path`.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "results.txt"
        >>> with replacing(target) as unfinished:
        ...     _ = unfinished.write_text("all of it")
        >>> [file.name for file in target.parent.iterdir()]
        ['results.txt']
    """
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        yield unfinished
        with unfinished.open("rb+") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:  # the error of a full disk names no file, or the temporary one
        if error.filename in (None, os.fspath(unfinished)) and error.errno is not None:
            raise type(error)(error.errno, error.strerror, os.fspath(path)) from error
        raise
    finally:
        unfinished.unlink(missing_ok=True)


def write(path: Path, content: str | bytes) -> None:
    """Write a file atomically; text is encoded as UTF-8 without translating line endings.

    Args:
        path: the file; see `replacing`.
        content: complete new content.
    """
    with replacing(path) as unfinished:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)


def remove_unfinished(path: Path) -> None:
    """Delete temporary files that killed processes left behind while writing `path`; no other process may be writing it.

    Args:
        path: the target file; need not exist.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "results.txt"
        >>> _ = target.with_name(".results.txt.0123abcd.part").write_text("half of")
        >>> remove_unfinished(target)
        >>> list(target.parent.iterdir())
        []
    """
    for other in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}.part"):
        other.unlink(missing_ok=True)
