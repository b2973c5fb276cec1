"""Local lookup and download of the files of data sets. Every file is verified by its checksum before use."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from workbench.console import progress_bar
from workbench.data.digests import digest
from workbench.data.registry import entries, resolve
from workbench.errors import require

TIMEOUT = 30  # seconds without a response before a download counts as failed
RETRIES = 1
MAX_UNPACKED_BYTES = 2**31  # limit for unpacked files, against decompression bombs; the largest data set has 7e7
REPOSITORY = Path(__file__).parents[2]  # the repository in a checkout; an unrelated folder if the package is installed


def roots() -> list[Path]:
    """Return the folders in which files are searched: WORKBENCH_DATA if set, datasets in a checkout, the user cache."""
    configured, checkout = os.environ.get("WORKBENCH_DATA"), checkout_folder()
    folders = [*([Path(configured).expanduser()] if configured else []), *([checkout] if checkout else [])]
    with contextlib.suppress(FileNotFoundError):  # a user without a home has no cache
        folders.append(cache_folder())
    return folders


def checkout_folder() -> Path | None:
    """Return the folder datasets of the repository that the package is imported from; None if it is not a checkout."""
    marker_files = ("pyproject.toml", "datasets/README.md")
    return REPOSITORY / "datasets" if all((REPOSITORY / file).is_file() for file in marker_files) else None


def cache_folder() -> Path:
    """Return the user cache: the folder workbench in XDG_CACHE_HOME or ~/.cache.

    Raises:
        FileNotFoundError: there is neither, as for a user of a container without an account.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "workbench"
    except RuntimeError as error:
        raise FileNotFoundError(
            "this user has no home folder for downloads: set XDG_CACHE_HOME to a folder for them"
        ) from error


def download_folder() -> Path:
    """Return the folder for downloads: datasets in a checkout, else the user cache."""
    return checkout_folder() or cache_folder()


def locate(file: str) -> Path | None:
    """Return the path of a file in the first root that has it, or None."""
    return next((root / file for root in roots() if (root / file).is_file()), None)


def is_local(name: str) -> bool:
    """Return whether a data set can be loaded without network access."""
    return all(locate(file) for file in entries()[name].get("files", ()))


def to_download(name: str) -> int | None:
    """Return the size in bytes of the missing files of a data set; None if one of them can't be downloaded."""
    entry, total = entries()[name], 0
    for file, size in zip(entry.get("files", ()), entry.get("bytes") or repeat(0), strict=False):
        if locate(file):
            continue
        if not entry["addresses"] or entry.get("remote", {}).get(file, "") is None:
            return None
        total += size
    return total


def fetch(name: str) -> list[Path]:
    """Download the missing files of a data set.

    Args:
        name: name of the data set, as for `load`.

    Returns:
        Paths of the files; empty for a data set without files. Files that exist already are not verified.

    Raises:
        ValueError: there is no such data set, or a download has the wrong checksum (it is then deleted).
        FileNotFoundError: a file is missing and can't be downloaded.
        ModuleNotFoundError: a file has to be downloaded, and pooch is not installed.

    Example:
        >>> from workbench import data
        >>> data.fetch("digits")
        []
    """
    name = resolve(name)
    return [locate(file) or _download(name, file) for file in entries()[name].get("files", ())]


def read(name: str) -> list[Any]:
    """Read and verify the files of a data set. Each yields a dict of arrays (.npz), an array (idx) or unpacked bytes.

    Raises:
        ValueError: a file is damaged: its content does not have the checksum in the registry.
        FileNotFoundError: as for `fetch`.
    """
    contents = []
    for path, (file, expected) in zip(fetch(name), entries()[name]["files"].items(), strict=True):
        content, checksum = _content(path, file)
        if checksum != expected:
            raise ValueError(
                f"{path} is damaged: expected content with sha256 {expected}, found {checksum}. "
                f"Delete the file and run `workbench data fetch {name}`."
            )
        contents.append(content)
    return contents


def _content(path: Path, file: str) -> tuple[Any, str]:
    """Return the content of a file and its sha256, computed from the unpacked content, which does not depend on the compression."""
    try:
        reader = _npz if file.endswith(".npz") else _idx if file.endswith("-ubyte.gz") else _bytes
        return reader(path)
    except Exception as error:  # damage surfaces as almost any error of gzip, zipfile, zlib or numpy
        return None, f"something unreadable ({type(error).__name__}: {error})"


def _npz(path: Path) -> tuple[dict[str, np.ndarray], str]:
    with zipfile.ZipFile(path) as packed:
        _check_size(sum(member.file_size for member in packed.infolist()))
    with np.load(path) as archive:
        arrays = {key: archive[key] for key in archive.files}
    return arrays, digest(arrays)


def _idx(path: Path) -> tuple[np.ndarray, str]:
    """The idx format of MNIST: two zeros, a type byte (8: uint8), the number of axes, big-endian lengths, values."""
    with gzip.open(path) as packed:
        raw = packed.read(MAX_UNPACKED_BYTES + 1)  # the size stored in the file can't be trusted
    _check_size(len(raw))
    if raw[:3] != b"\0\0\x08":
        raise ValueError(f"not an idx file of uint8: starts with {raw[:4].hex()}")
    axes = raw[3]
    shape = np.frombuffer(raw, ">u4", axes, offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape), hashlib.sha256(raw).hexdigest()


def _bytes(path: Path) -> tuple[bytes, str]:
    """Return the bytes of a file and their sha256; a .gz file is unpacked, a .tar.gz archive is not."""
    packed = path.suffix == ".gz" and not path.name.endswith(".tar.gz")
    with gzip.open(path) if packed else path.open("rb") as file:
        raw = file.read(MAX_UNPACKED_BYTES + 1)
    _check_size(len(raw))
    return raw, hashlib.sha256(raw).hexdigest()


def _check_size(size: int) -> None:
    if size > MAX_UNPACKED_BYTES:
        raise ValueError(f"it holds more than {MAX_UNPACKED_BYTES:,} bytes unpacked, more than any data set")


def _download(name: str, file: str) -> Path:
    entry = entries()[name]
    remote = entry.get("remote", {}).get(file, Path(file).name)
    if not entry["addresses"] or remote is None:
        searched_paths = " and ".join(str(root / file) for root in roots())
        raise FileNotFoundError(
            f"{file}, which data set {name!r} needs, is not at {searched_paths}, and there is no address that it can be downloaded from: "
            f"{entry['card']['source']}. Set WORKBENCH_DATA to a folder that holds it"
        )
    pooch, requests = require("pooch"), require("requests")  # requests is a dependency of pooch
    expected = entry["files"][file]
    target = download_folder() / file
    failures: list[str] = []
    is_damaged = False
    target.parent.mkdir(parents=True, exist_ok=True)
    for address in entry["addresses"]:
        # downloads are verified in a folder beside the target, so that os.replace can move them atomically
        with tempfile.TemporaryDirectory(prefix=".download-", dir=target.parent) as folder, _quiet(pooch):
            try:
                part = _fetched(entry, address, remote, Path(folder), f"{name}: {target.name}", target.suffix)
                _, checksum = _content(part, file)
                if checksum == expected:
                    # a copy has the permissions of the umask; pooch's file is readable by its user only
                    os.replace(shutil.copyfile(part, Path(folder) / "verified"), target)
                    return target
                is_damaged = True
                failures.append(f"{address} gave content with sha256 {checksum}, expected {expected}; it was deleted")
            except requests.HTTPError as error:
                answer = error.response
                failures.append(f"{answer.url} answered {answer.status_code} {answer.reason}")
            except requests.RequestException as error:
                cause = next(iter(error.args), error)
                failures.append(f"{address} could not be reached ({getattr(cause, 'reason', cause)})")
            except (ValueError, IndexError) as error:
                is_damaged = True
                failures.append(f"{address} gave something unreadable ({error})")
    searched_paths = " and ".join(str(root / file) for root in roots())
    message = (
        f"{file}, which data set {name!r} needs, is neither at {searched_paths}, nor could it be downloaded: "
        f"{'; '.join(failures)}. Set WORKBENCH_DATA to a folder that holds {file}, "
        f"or run `workbench data fetch {name}` online."
    )
    raise (ValueError if is_damaged else FileNotFoundError)(message)


def _fetched(entry: dict[str, Any], address: str, remote: str, folder: Path, title: str, suffix: str) -> Path:
    """Download a file into a folder, and return its path.

    Args:
        entry: entry of the data set.
        address: address of its files.
        remote: name of the file there, or an address of its own.
        folder: folder to download to.
        title: title of the progress bar.
        suffix: ".gz" to compress the file if it is not.
    """
    if entry["kind"] == "uci":
        return _standard_splits(address, entry["splits"], folder, title)
    if "://" in remote:
        address, remote = remote.rsplit("/", 1)
    (part,) = _retrieve(address, [remote], folder, title)
    return _packed(part) if suffix == ".gz" and not remote.endswith(".gz") else part


def _packed(file: Path) -> Path:
    """Compress a file by gzip, and return the path of the new file beside it."""
    packed = file.with_name(f"{file.name}.gz")
    with file.open("rb") as source_file, gzip.open(packed, "wb") as target:
        shutil.copyfileobj(source_file, target)
    return packed


@contextlib.contextmanager
def _quiet(pooch: Any) -> Iterator[None]:
    """Silence pooch's message per file, since there is a progress bar."""
    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel("WARNING")
    try:
        yield
    finally:
        logger.setLevel(level)


def _retrieve(address: str, files: Sequence[str], folder: Path, title: str) -> list[Path]:
    """Download files below an address into a folder, each with one retry. Progress is shown in bytes for one file, else in files."""
    pooch = require("pooch")
    source = pooch.create(path=folder, base_url=address, registry=dict.fromkeys(files), retry_if_failed=RETRIES)
    # "identity": servers must not decompress files that are stored compressed
    options = {"timeout": TIMEOUT, "headers": {"User-Agent": "workbench", "Accept-Encoding": "identity"}}
    if len(files) == 1:
        # the total must not be 0, since pooch tests the truth value of the bar
        with progress_bar(total=1, desc=title, unit="B", unit_scale=True, leave=False) as bar:
            downloader = pooch.HTTPDownloader(progressbar=bar, chunk_size=1 << 16, **options)
            return [Path(source.fetch(files[0], downloader=downloader))]
    downloader = pooch.HTTPDownloader(**options)
    return [
        Path(source.fetch(file, downloader=downloader))
        for file in progress_bar(files, desc=title, unit="file", leave=False)
    ]


def _standard_splits(address: str, n_splits: int, folder: Path, title: str) -> Path:
    """Download the text files of the standard UCI splits, and convert them to one .npz with X, y, train_idx and test_idx."""
    splits = [f"index_{kind}_{k}.txt" for kind in ("train", "test") for k in range(n_splits)]
    _retrieve(address, ["data.txt", "index_features.txt", "index_target.txt", *splits], folder, title)

    def table(name: str, dtype: type) -> np.ndarray:
        # read as float, since some files write integers as 1.000e+00
        return np.loadtxt((folder / f"{name}.txt").read_text(encoding="utf-8").splitlines(), ndmin=1).astype(dtype)

    values = table("data", np.float64)
    columns, target = table("index_features", np.int32), table("index_target", np.int32)
    arrays: dict[str, Any] = {
        "X": values[:, columns],
        "y": values[:, target[0]],
        "train_idx": np.stack([table(f"index_train_{k}", np.int32) for k in range(n_splits)]),
        "test_idx": np.stack([table(f"index_test_{k}", np.int32) for k in range(n_splits)]),
    }
    np.savez_compressed(folder / "all.npz", **arrays)
    return folder / "all.npz"
