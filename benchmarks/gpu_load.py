"""Pack what `gpu.sh` needs on a machine without a network into one small file, and unpack it there.

    python benchmarks/gpu_load.py pack DATA BUILD CHECKOUT_BYTES     pack DATA and BUILD/wheels into BUILD/load.tar.xz
    python benchmarks/gpu_load.py unpack BUILD [NAME...]             unpack into BUILD/data and BUILD/site; packages NAME are not needed

Compressed files are stored uncompressed, since compressing all of them together gives a smaller file: each of 60,000 JPEG images starts with the
same 600 bytes. Only Python's standard library is used, because this runs before any package is installed.
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

MAX_BYTES = 60 << 20  # limit of a transfer, the checkout included
DATA = (
    *(f"fashion-mnist/{part}-ubyte.gz" for part in ("train-images-idx3", "train-labels-idx1")),
    *(f"fashion-mnist/{part}-ubyte.gz" for part in ("t10k-images-idx3", "t10k-labels-idx1")),
    *("cifar10/train.npz", "cifar10/test.npz", "cifar10/human-train-labels.npz", "cifar10/resnet20.safetensors"),
    "cifar10h/cifar10h-counts.npy",
    *(f"uci-regression/{name}.npz" for name in ("bostonHousing", "concrete", "energy", "yacht")),
    "uci-regression/wine-quality-red.npz",  # the other sets are larger, and nothing on a GPU needs them
)


def pack(data: Path, build: Path, checkout: int) -> Path:
    """Write the archive to transfer.

    Args:
        data: folder that WORKBENCH_DATA names.
        build: folder of the archive; its folder `wheels` is packed too.
        checkout: size in bytes of the checkout that is transferred with it.

    Raises:
        SystemExit: data is missing, or the archive is too large.
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
            content = _uncompressed(path)
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            packed.addfile(entry, io.BytesIO(content))
    size = unfinished.stat().st_size
    sizes = f"{size / 2**20:.1f} MiB of {len(files)} files, and {checkout / 2**20:.1f} MiB of the checkout"
    if size + checkout > MAX_BYTES:
        unfinished.unlink()
        sys.exit(
            f"too large to transfer at once: {sizes}, with a limit of {MAX_BYTES >> 20} MiB; remove something from DATA"
        )
    unfinished.replace(target)
    print(f"{target}: {sizes}")
    return target


def _uncompressed(path: Path) -> bytes:
    """Return a file's content; archives are stored again without compression."""
    if path.suffix == ".gz":
        return gzip.compress(gzip.decompress(path.read_bytes()), 0, mtime=0)
    if path.suffix in (".npz", ".whl"):
        content = io.BytesIO()
        with zipfile.ZipFile(path) as archive, zipfile.ZipFile(content, "w", zipfile.ZIP_STORED) as stored:
            for member in archive.infolist():
                stored.writestr(zipfile.ZipInfo(member.filename), archive.read(member))
        return content.getvalue()
    return path.read_bytes()


def unpack(build: Path, unused: Sequence[str] = ()) -> None:
    """Unpack the data, install the packages that the interpreter lacks into BUILD/site, and print which ones are still missing.

    Args:
        build: folder with load.tar.xz, or with wheels and data already unpacked.
        unused: names of required packages that are not reported as missing.
    """
    load, site = build / "load.tar.xz", build / "site"
    stamp = build / "unpacked.txt"
    known = f"{load.stat().st_size} {load.stat().st_mtime_ns}" if load.is_file() else ""
    # a second call on the same machine finds it unpacked
    if known and not (stamp.is_file() and stamp.read_text() == known):
        for folder in ("data", "wheels"):
            shutil.rmtree(build / folder, ignore_errors=True)
        with tarfile.open(load) as packed:
            packed.extractall(build, filter="data")
        stamp.write_text(known)
    # installed packages stay, torch above all: it was chosen for the machine
    wheels = [wheel for wheel in sorted((build / "wheels").glob("*.whl")) if _lacks(wheel.name.split("-")[0])]
    if wheels and not _installed(site, *wheels):
        for wheel in wheels:
            if not _installed(site, wheel):
                print(f"{wheel.name} can't be installed")
    needed = {
        name: package.metadata["Name"]
        for package in metadata.distributions(path=[str(site)])
        for requirement in package.requires or ()
        if (name := _required(requirement)) and name not in unused and _lacks(name, site)
    }
    for name, by in sorted(needed.items()):
        print(f"{name} is missing, which {by} requires")


def _installed(site: Path, *wheels: Path) -> bool:
    options = ["--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", site, *wheels]
    return subprocess.run(command, check=False).returncode == 0


def _lacks(name: str, site: Path | None = None) -> bool:
    return not any(True for _ in metadata.distributions(name=name)) and not (
        site and any(True for _ in metadata.distributions(name=name, path=[str(site)]))
    )


def _required(requirement: str) -> str:
    """Return the name of a requirement that applies here, "" for one that does not."""
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
