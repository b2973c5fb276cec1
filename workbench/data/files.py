"""Finds the files of a data set on this machine, or downloads them; no file is used before its checksum agrees."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import os
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.data.core import digest
from workbench.data.registry import entries, resolve

if TYPE_CHECKING:
    from tqdm import tqdm

TIMEOUT = 30  # seconds without an answer before a download counts as failed


def roots() -> list[Path]:
    """Where files are looked for: the folder in WORKBENCH_DATA, if set, then the user cache."""
    given = os.environ.get("WORKBENCH_DATA")
    return [*([Path(given).expanduser()] if given else []), cache_folder()]


def cache_folder() -> Path:
    """Where downloads go: workbench in XDG_CACHE_HOME, or in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "workbench"


def locate(file: str) -> Path | None:
    """The first root that holds this file, or None."""
    return next((root / file for root in roots() if (root / file).is_file()), None)


def is_local(name: str) -> bool:
    """Whether a data set can be loaded without a network."""
    return all(locate(file) for file in entries()[name].get("files", ()))


def fetch(name: str) -> list[Path]:
    """Make sure that the files of a data set are on this machine, downloading what is missing.

    Args:
        name: as `load` takes it.

    Returns:
        Paths of the files; none for a data set that needs no file. Files that are already there are not read.

    Raises:
        ValueError: no such data set, or what was downloaded has the wrong checksum (it is then deleted).
        FileNotFoundError: a file is neither here nor to be downloaded.

    Example:
        >>> from workbench import data
        >>> data.fetch("digits")
        []
    """
    name = resolve(name)
    return [locate(file) or _download(name, file) for file in entries()[name].get("files", ())]


def read(name: str) -> list[Any]:
    """The verified contents of the files of a data set: a dict of arrays (.npz) or one array (.gz) for each.

    Raises:
        ValueError: a file is damaged: its content has another checksum than the registry says.
        FileNotFoundError: as `fetch`.
    """
    contents = []
    for path, (file, expected) in zip(fetch(name), entries()[name]["files"].items(), strict=True):
        content, found = _content(path, file)
        if found != expected:
            raise ValueError(
                f"{path} is damaged: expected content with sha256 {expected}, found {found}. "
                f"Delete the file and run `workbench data fetch {name}`."
            )
        contents.append(content)
    return contents


def _content(path: Path, file: str) -> tuple[Any, str]:
    """What a file holds, and the sha256 of its content (packing again changes the file, but not the data)."""
    try:
        return (_npz if file.endswith(".npz") else _idx)(path)
    except Exception as error:  # damage surfaces as almost any error of gzip, zipfile, zlib or numpy
        return None, f"something unreadable ({type(error).__name__}: {error})"


def _npz(path: Path) -> tuple[dict[str, np.ndarray], str]:
    with np.load(path) as archive:
        arrays = {key: archive[key] for key in archive.files}
    return arrays, digest(arrays)


def _idx(path: Path) -> tuple[np.ndarray, str]:
    """The idx format of MNIST: two zeros, a type byte (8: uint8), the number of axes, big-endian lengths, values."""
    raw = gzip.decompress(path.read_bytes())
    if raw[:3] != b"\0\0\x08":
        raise ValueError(f"not an idx file of uint8: starts with {raw[:4].hex()}")
    axes = raw[3]
    shape = np.frombuffer(raw, ">u4", axes, offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape), hashlib.sha256(raw).hexdigest()


def _download(name: str, file: str) -> Path:
    from tqdm.auto import tqdm

    entry = entries()[name]
    expected = entry["files"][file]
    target = cache_folder() / file
    failures: list[str] = []
    wrong = False
    target.parent.mkdir(parents=True, exist_ok=True)
    for address in entry["addresses"]:
        part = target.with_name(f"{target.name}.{uuid.uuid4().hex}.part")
        try:
            with tqdm(desc=f"{name}: {target.name}", unit="B", unit_scale=True, leave=False) as bar:
                if file.endswith(".npz"):
                    _standard_splits(address, entry["splits"], part, bar)
                else:
                    part.write_bytes(_get(address + target.name, bar))
            _, found = _content(part, file)
            if found == expected:
                os.replace(part, target)
                return target
            wrong = True
            failures.append(f"{address} gave content with sha256 {found}, expected {expected}; it was deleted")
        except urllib.error.HTTPError as error:
            failures.append(f"{error.url} answered {error.code} {error.reason}")
        except (urllib.error.URLError, TimeoutError, ConnectionError, http.client.HTTPException) as error:
            failures.append(f"{address} could not be reached ({getattr(error, 'reason', error)})")
        except (ValueError, IndexError) as error:
            wrong = True
            failures.append(f"{address} gave something unreadable ({error})")
        finally:
            part.unlink(missing_ok=True)
    places = " and ".join(str(root / file) for root in roots())
    message = (
        f"{file}, which data set {name!r} needs, is neither at {places}, nor could it be downloaded: "
        f"{'; '.join(failures)}. Set WORKBENCH_DATA to a folder that holds {file}, "
        f"or run `workbench data fetch {name}` online."
    )
    raise (ValueError if wrong else FileNotFoundError)(message)


def _get(url: str, bar: tqdm) -> bytes:
    request = urllib.request.Request(url, headers={"User-Agent": "workbench"})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        bar.total = (bar.total or 0) + int(response.headers.get("Content-Length") or 0)
        pieces = []
        while piece := response.read(1 << 16):
            pieces.append(piece)
            bar.update(len(piece))
    return b"".join(pieces)


def _standard_splits(address: str, n_splits: int, path: Path, bar: tqdm) -> None:
    """The text files of the standard UCI splits, as one .npz with X, y, train_idx and test_idx."""

    def table(name: str, dtype: type) -> np.ndarray:
        # through float, since some of the files write whole numbers as 1.000e+00
        lines = _get(f"{address}{name}.txt", bar).decode().splitlines()
        return np.loadtxt(lines, ndmin=1).astype(dtype)

    values = table("data", np.float64)
    columns, target = table("index_features", np.int32), table("index_target", np.int32)
    arrays: dict[str, Any] = {
        "X": values[:, columns],
        "y": values[:, target[0]],
        "train_idx": np.stack([table(f"index_train_{k}", np.int32) for k in range(n_splits)]),
        "test_idx": np.stack([table(f"index_test_{k}", np.int32) for k in range(n_splits)]),
    }
    with path.open("wb") as stream:
        np.savez_compressed(stream, **arrays)
