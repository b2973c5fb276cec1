"""Files are written completely or not at all."""

from __future__ import annotations

import errno
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from workbench import atomic


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_text_and_bytes_are_written_as_they_are(tmp_path: Path) -> None:
    atomic.write(tmp_path / "a.txt", "é\n")
    atomic.write(tmp_path / "a.txt", "ü\r\n")
    atomic.write(tmp_path / "b", b"\0")
    assert content(tmp_path) == {"a.txt": b"\xc3\xbc\r\n", "b": b"\0"}


@pytest.mark.parametrize("name", [251 * "x" + ".csv", 125 * "é" + ".csv"])
def test_names_may_be_as_long_as_file_systems_allow(tmp_path: Path, name: str) -> None:
    atomic.write(tmp_path / name, "a")
    assert content(tmp_path) == {name: b"a"}
    with atomic.replacing(tmp_path / name) as unfinished:
        unfinished.write_text("a")
        unfinished.with_name(f"{unfinished.name[:-13]}0123abcd.part").touch()  # of a process that was killed
    assert len(content(tmp_path)) == 2
    atomic.remove_unfinished(tmp_path / name)
    assert content(tmp_path) == {name: b"a"}


def test_a_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    atomic.write(tmp_path / "ours", "")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("usual", "ours")}
    assert len(modes) == 1


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit(1)])
def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: BaseException) -> None:
    def half() -> None:
        with atomic.replacing(tmp_path / "a") as unfinished:
            unfinished.write_text("half")
            raise error

    (tmp_path / "a").write_text("old")
    with pytest.raises(type(error)):
        half()
    assert content(tmp_path) == {"a": b"old"}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=f"can't be replaced by a file; give another path: '{tmp_path / 'pipe'}'"):
        atomic.write(tmp_path / "pipe", "new")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert os.listdir(tmp_path) == ["pipe"]


@pytest.mark.parametrize("path", ["", ".", "..", "folder", "folder/"])
def test_a_folder_is_not_replaced(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder" if path in ("", ".", "..") else tmp_path)
    with pytest.raises(IsADirectoryError, match=f"this is a folder; give the path of a file: '{Path(path)}'"):
        atomic.write(Path(path), "new")
    assert not list((tmp_path / "folder").iterdir())
    assert os.listdir(tmp_path) == ["folder"]


def test_an_error_names_the_file_that_was_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(FileNotFoundError) as missing:
        atomic.write(tmp_path / "no" / "a", "")
    assert missing.value.filename == str(tmp_path / "no" / "a")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as failed:
        atomic.write(tmp_path / "a", "new")
    assert (failed.value.errno, failed.value.filename) == (28, str(tmp_path / "a"))
    assert content(tmp_path) == {}


def test_writers_at_the_same_time_do_not_meet(tmp_path: Path) -> None:
    wanted = {str(i).encode() * 100_000 for i in range(8)}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda whole: atomic.write(tmp_path / "a", whole), wanted))
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]
    assert (tmp_path / "a").read_bytes() in wanted


@pytest.mark.parametrize(
    ("code", "raised", "says"),
    [
        (
            errno.ENOLCK,
            OSError,
            "No locks available: the file can't be locked, .* choose a folder on a file system with locks",
        ),
        (errno.EOPNOTSUPP, OSError, "not supported: the file can't be locked"),
        (errno.EPERM, PermissionError, "not permitted: the file can't be locked, .*make it and its folder writable"),
        (errno.EACCES, BlockingIOError, "^busy. Or the file system denies locks of"),
        (errno.EWOULDBLOCK, BlockingIOError, "^busy$"),
    ],
)
def test_a_lock_that_cannot_be_had_says_why(
    code: int, raised: type[OSError], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    with atomic.locked(tmp_path / "lock", "busy"):
        pass  # leaves the file
    monkeypatch.setattr("fcntl.flock", refused)
    with pytest.raises(raised, match=says) as caught, atomic.locked(tmp_path / "lock", "busy"):
        pass
    assert raised is BlockingIOError or caught.value.filename == str(tmp_path / "lock")
    monkeypatch.undo()
    with atomic.locked(tmp_path / "lock", "busy"):
        pass


@pytest.mark.filterwarnings("ignore:flock not supported")
def test_a_run_that_was_killed_where_there_are_no_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    (tmp_path / "lock").touch()
    monkeypatch.setattr("fcntl.flock", missing)
    says = r"^busy\. If there is none, one was killed: .*lock marks a run; delete it"
    with pytest.raises(BlockingIOError, match=says), atomic.locked(tmp_path / "lock", "busy"):
        pass
    (tmp_path / "lock").unlink()
    with atomic.locked(tmp_path / "lock", "busy"):
        pass
