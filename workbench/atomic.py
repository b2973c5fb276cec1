"""Files that are written whole or not at all."""

from __future__ import annotations

import glob
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write to another file beside this one, which takes its place once it is complete and on disk.

    Args:
        path: the file; at any moment it is the old one or the new one, whoever else writes it and whatever ends this process.

    Yields:
        Path of the file to write, hidden. It is gone where the block raises, on Ctrl-C too.

    Raises:
        OSError: the file can't be written; the error names `path`.

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
    except OSError as error:  # a full disk does not say which file
        if error.filename in (None, os.fspath(unfinished)) and error.errno is not None:
            raise type(error)(error.errno, error.strerror, os.fspath(path)) from error
        raise
    finally:
        unfinished.unlink(missing_ok=True)


def write(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all; text as UTF-8, with the line ends that it has.

    Args:
        path: the file; see `replacing`.
        content: all that it shall hold.
    """
    with replacing(path) as unfinished:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)


def remove_unfinished(path: Path) -> None:
    """Remove what was to become this file when the process that wrote it was killed; nobody may write it meanwhile.

    Args:
        path: the file, which need not be there.

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
