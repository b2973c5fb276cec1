"""Pack what `gpu.sh` needs on a machine without a network into one small file, and unpack it there.

    python benchmarks/gpu_load.py pack DATA BUILD CHECKOUT_BYTES     DATA, and BUILD/wheels, into BUILD/load.tar.xz
    python benchmarks/gpu_load.py unpack BUILD [NAME...]             into BUILD/data and BUILD/site; packages NAME are not missed

Files that are compressed one by one go in uncompressed, since all of them together make a smaller file: each of 60,000 JPEG images has the same
600 bytes at its start. Nothing but Python's own library is used: this runs before any package is there.
"""

from __future__ import annotations

import gzip
import io
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

MOST = 60 << 20  # bytes that can be carried at once, the checkout included
DATA = (
    *(f"fashion-mnist/{part}-ubyte.gz" for part in ("train-images-idx3", "train-labels-idx1")),
    *(f"fashion-mnist/{part}-ubyte.gz" for part in ("t10k-images-idx3", "t10k-labels-idx1")),
    *("cifar10/train.npz", "cifar10/test.npz", "cifar10/human-train-labels.npz", "cifar10/resnet20.safetensors"),
    "cifar10h/cifar10h-counts.npy",
    *(f"uci-regression/{name}.npz" for name in ("bostonHousing", "concrete", "energy", "power-plant", "yacht")),
    "uci-regression/wine-quality-red.npz",  # the other sets are the larger half, and nothing on a GPU asks for them
)


def pack(data: Path, build: Path, checkout: int) -> Path:
    """Write the file that travels.

    Args:
        data: the folder that WORKBENCH_DATA names.
        build: where the file goes; wheels in its folder wheels go in.
        checkout: bytes that travel beside it.

    Raises:
        SystemExit: data is missing, or it is too much.
    """
    missing = [name for name in DATA if not (data / name).is_file()]
    if missing:
        sys.exit(f"missing in {data}: {', '.join(missing)} (set WORKBENCH_DATA)")
    files = [(f"data/{name}", data / name) for name in DATA]
    files += [(f"wheels/{path.name}", path) for path in sorted((build / "wheels").glob("*.whl"))]
    target = build / "load.tar.xz"
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(".unfinished")
    with tarfile.open(unfinished, "w:xz", preset=6) as packed:
        for name, path in files:
            content = _loose(path)
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            packed.addfile(entry, io.BytesIO(content))
    size = unfinished.stat().st_size
    told = f"{size / 2**20:.1f} MiB of {len(files)} files, and {checkout / 2**20:.1f} MiB of the checkout"
    if size + checkout > MOST:
        unfinished.unlink()
        sys.exit(
            f"too much to be carried at once: {told}, where {MOST >> 20} MiB are the most; take something out of DATA"
        )
    unfinished.replace(target)
    print(f"{target}: {told}")
    return target


def _loose(path: Path) -> bytes:
    """A file's content, without compression of its own if it has one."""
    if path.suffix == ".gz":
        return gzip.compress(gzip.decompress(path.read_bytes()), 0, mtime=0)
    if path.suffix in (".npz", ".whl"):
        loose = io.BytesIO()
        with zipfile.ZipFile(path) as given, zipfile.ZipFile(loose, "w", zipfile.ZIP_STORED) as stored:
            for member in given.infolist():
                stored.writestr(zipfile.ZipInfo(member.filename), given.read(member))
        return loose.getvalue()
    return path.read_bytes()


def unpack(build: Path, unused: Sequence[str] = ()) -> None:
    """Put data where it is found, and packages that the interpreter lacks beside those it has; says what is still missing.

    Args:
        build: holds load.tar.xz, or wheels and data already.
        unused: names of packages that are asked for, and not needed.
    """
    load, site = build / "load.tar.xz", build / "site"
    stamp = build / "unpacked.txt"
    known = f"{load.stat().st_size} {load.stat().st_mtime_ns}" if load.is_file() else ""
    # a second call on the same machine has it already
    if known and not (stamp.is_file() and stamp.read_text() == known):
        for folder in ("data", "wheels"):
            shutil.rmtree(build / folder, ignore_errors=True)
        with tarfile.open(load) as packed:
            packed.extractall(build, filter="data")
        stamp.write_text(known)
    # what is there stays, its torch above all: it was chosen for the machine
    wheels = [wheel for wheel in sorted((build / "wheels").glob("*.whl")) if _lacks(wheel.name.split("-")[0])]
    if wheels and not _installed(site, *wheels):
        for wheel in wheels:
            if not _installed(site, wheel):
                print(f"{wheel.name} can't be installed")
    needed = {
        name: own.metadata["Name"]
        for own in metadata.distributions(path=[str(site)])
        for requirement in own.requires or ()
        if (name := _required(requirement)) and name not in unused and _lacks(name, site)
    }
    for name, by in sorted(needed.items()):
        print(f"{name} is missing, which {by} asks for")


def _installed(site: Path, *wheels: Path) -> bool:
    options = ["--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", site, *wheels]
    return subprocess.run(command, check=False).returncode == 0


def _lacks(name: str, site: Path | None = None) -> bool:
    return not any(True for _ in metadata.distributions(name=name)) and not (
        site and any(True for _ in metadata.distributions(name=name, path=[str(site)]))
    )


def _required(requirement: str) -> str:
    """The name of a package that is required here, "" for one that is not."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return ""
    wanted = Requirement(requirement)
    return wanted.name if wanted.marker is None or wanted.marker.evaluate({"extra": ""}) else ""


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    if what == "pack":
        pack(Path(arguments[0]), Path(arguments[1]), int(arguments[2]))
    else:
        unpack(Path(arguments[0]), arguments[1:])
