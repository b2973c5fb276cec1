"""Atomic file writes: a file is replaced completely or not at all. Locks, so that only one process writes it."""

from __future__ import annotations

import errno
import glob
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import require


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
    if path.is_dir():  # as "" is: the current one
        raise IsADirectoryError(errno.EISDIR, "this is a folder; give the path of a file", os.fspath(path))
    if path.exists() and not path.is_file():  # /dev/null would become a file, for all programs
        raise OSError(errno.EINVAL, "a device or pipe can't be replaced by a file; give another path", os.fspath(path))
    unfinished = path.with_name(f"{_hidden(path.name)}.{uuid.uuid4().hex[:8]}.part")
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
    for other in path.parent.glob(f"{glob.escape(_hidden(path.name))}.{'[0-9a-f]' * 8}.part"):
        other.unlink(missing_ok=True)


def _hidden(name: str) -> str:
    """Return how the names of unfinished files begin, which may have 255 bytes with the 14 after it."""
    return f".{os.fsencode(name)[:240].decode(errors='ignore')}"


@contextmanager
def locked(file: Path, busy: str | None = None) -> Iterator[None]:
    """Context manager that holds a lock, which no other process holds meanwhile.

    Args:
        file: the lock file.
        busy: message of the error if another process holds it; None: wait for it.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: the file can't be locked; the error says why.
    """
    filelock = require("filelock")
    lock = filelock.FileLock(file)
    try:
        lock.acquire(blocking=busy is None)
    except filelock.Timeout as error:
        raise BlockingIOError(f"{busy}{_doubt(file)}") from error
    except OSError as error:
        if error.errno is None:
            raise
        remedy = (
            "make it and its folder writable, or choose another folder"
            if isinstance(error, PermissionError)
            else "choose a folder on a file system with locks, such as a local disk"
        )
        reason = f"{error.strerror}: the file can't be locked, so that another process could write at the same time; {remedy}"
        raise type(error)(error.errno, reason, os.fspath(file)) from error
    try:
        yield
    finally:
        lock.release()


def _doubt(file: Path) -> str:
    """Return what else may be the reason that a lock is taken, by trying it: on file systems without locks the file itself is the lock."""
    try:
        import fcntl

        with file.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except ImportError:
        return ""
    except OSError as error:
        if error.errno == errno.EACCES:
            return f". Or the file system denies locks of {file}: then choose a folder on a local disk"
        if error.errno != errno.ENOSYS:
            return ""
        return (
            f". If there is none, one was killed: the file system has no locks, so that {file} marks a run; delete it"
        )
    return ""
