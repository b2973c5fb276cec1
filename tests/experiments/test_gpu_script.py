"""benchmarks/gpu.sh, as far as it can be tested without a GPU."""

from __future__ import annotations

import csv
import gzip
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from conftest import ROOT

from workbench.experiments.worker import load_file

SCRIPT = ROOT / "benchmarks" / "gpu.sh"
PARTS = [
    *("tests", "conformance", "throughput", "speed", "large", "compiled", "peers", "wrapping", "quality", "notebooks"),
    *("human", "others"),
]
pytestmark = pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")


def gpu(*arguments: object, **settings: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", SCRIPT, *map(str, arguments)]
    with tempfile.TemporaryDirectory() as build:  # what is packed in the checkout stays out of it
        environment = {**os.environ, "PYTHON": sys.executable, "LIMIT": "1500", "BUILD": build, **settings}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1600, check=False)


def causes(folder: Path, lines: list[str]) -> str:
    """Return why parts failed: the ends of their logs and of what their benchmarks say of cells without results."""
    failed = [line.partition(": ")[0] for line in lines if ": failed" in line or ": ended after" in line]
    told = []
    with tarfile.open(folder / "results.tar.gz") as packed:
        for member in sorted(packed, key=lambda member: member.name):
            name = Path(member.name).name
            if name.endswith(".failed.txt") or name in [f"{part}.txt" for part in failed]:
                text = io.TextIOWrapper(packed.extractfile(member) or io.BytesIO(), errors="replace").read()
                told += [f"---- {member.name}", *text.splitlines()[-60:]]
    return "\n".join(told)


@pytest.mark.slow
def test_every_part_runs_in_small_on_a_cpu(tmp_path: Path) -> None:
    ended = gpu("--smoke", tmp_path)
    lines = ended.stdout.splitlines()
    assert ended.returncode == 0, ended.stdout + ended.stderr + causes(tmp_path, lines)
    assert [line.partition(": ")[0] for line in lines[-len(PARTS) :]] == PARTS
    assert all(": ok, " in line for line in lines[-len(PARTS) :])
    assert (tmp_path / "summary.txt").read_text().splitlines() == lines
    assert {path.name for path in tmp_path.iterdir()} == {"summary.txt", "results.tar.gz"}
    with tarfile.open(tmp_path / "results.tar.gz") as packed:
        names = set(packed.getnames())
        assert {f"run/speed/{name}.txt" for name in ("speed", "large", "compiled", "peers", "others")} <= names
        assert {"run/speed/speed.csv", "run/speed/speed.json"} <= names
        assert "run/throughput/throughput.csv" in names or "WORKBENCH_DATA" not in os.environ  # it trains on images
        rows = list(csv.DictReader(io.TextIOWrapper(packed.extractfile("run/speed/speed.csv") or io.BytesIO())))
    kinds = {row["how"] for row in rows}
    assert {"auto"} | ({"compiled"} if shutil.which("g++") or shutil.which("clang") else set()) <= kinds


def test_each_call_fits_into_the_time_of_a_command() -> None:
    lines = [line.split() for line in gpu("--list").stdout.splitlines()]
    assert [part for _, part, _ in lines] == PARTS
    for call in ("first", "second", "third"):
        # of 600, with what comes before and after
        assert 500 < sum(int(seconds) for name, _, seconds in lines if name == call) <= 550
    readme = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert all(f"`{part}`" in readme for part in PARTS)


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter of which `-m pytest` and `-m workbench` only say what they were asked."""
    stub = tmp_path / "python"
    stub.write_text(
        f"""#!/usr/bin/env bash
case "$1 $2" in
"-m pytest") echo "asked: $*"; head -c "${{LONG:-0}}" /dev/urandom | base64; exit "${{CODE:-0}}" ;;
"-m workbench") echo "asked: $*" ;;
*) exec {sys.executable} "$@" ;;
esac
"""
    )
    stub.chmod(0o755)
    return str(stub)


@pytest.mark.slow
def test_a_part_or_a_call_runs_alone_and_goes_on_after_a_failure(tmp_path: Path, python: str) -> None:
    ended = gpu("--smoke", tmp_path / "found", "second", "tests", PYTHON=python, CODE="3")
    assert ended.returncode == 1
    lines = ended.stdout.splitlines()[-5:]
    assert [line.partition(",")[0] for line in lines] == [
        *("large: ok", "compiled: ok", "peers: ok", "wrapping: ok", "tests: failed (3)")
    ]
    told = [line for line in causes(tmp_path / "found", lines).splitlines() if line.startswith(("----", "asked"))]
    assert [line.partition(" -q")[0] for line in told] == [*("---- run/tests/tests.txt", "asked: -m pytest")]


@pytest.mark.slow
def test_what_a_newer_torch_announces_is_no_failure(tmp_path: Path, python: str) -> None:
    ended = gpu("--smoke", tmp_path / "found", "tests", "conformance", "notebooks", PYTHON=python)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    asked = [line for line in ended.stdout.splitlines() if "asked: " in line]
    assert len(asked) == 3
    for line in asked:
        for name in ("DeprecationWarning", "PendingDeprecationWarning", "FutureWarning"):
            assert f"-W default::{name}" in line


@pytest.mark.slow
def test_a_long_log_is_cut_and_what_does_not_come_back_is_said(tmp_path: Path, python: str) -> None:
    folder = tmp_path / "found"
    ended = gpu("--smoke", folder, "tests", PYTHON=python, LONG=str(4 << 20))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (folder / "results.tar.gz").stat().st_size < 1.5 * 2**20
    with (folder / "large.bin").open("wb") as large:
        large.truncate(17 << 20)
    for i in range(6):
        (folder / f"{i}.txt").touch()
    ended = gpu("--smoke", folder, "tests", PYTHON=python)
    assert ended.returncode == 1
    assert "has 9 files, where 8 are the most" in ended.stderr
    assert f"larger than the 16 MiB that come back: {folder / 'large.bin'}" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "word"), [((), "usage"), (("FOLDER", "sped"), "there is no part sped"), (("--quick",), "no option")]
)
def test_what_cannot_be_run_is_said_before_anything_is_written(arguments: tuple[str, ...], word: str) -> None:
    ended = gpu(*arguments)
    assert ended.returncode == 2
    assert word in ended.stderr
    assert not Path("FOLDER").exists()


# ---- what travels
@pytest.fixture(scope="module")
def load() -> ModuleType:
    return load_file(ROOT / "benchmarks" / "gpu_load.py")


@pytest.fixture
def data_folder(load: ModuleType, tmp_path: Path) -> Path:
    """Small files of the names that are packed."""
    data = tmp_path / "given"
    for name in load.DATA:
        path = data / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(name.encode()))
        elif path.suffix == ".npz":
            np.savez_compressed(path, numbers=np.arange(5), name=np.array(name))
        else:
            path.write_text(name)
    return data


def wheel(folder: Path, name: str, *required: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    about = f"{name}-1.0.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {one}" for one in required)]
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr(f"{name}.py", "VALUE = 7")
        packed.writestr(f"{about}/METADATA", "\n".join(lines))
        packed.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any"
        )
        packed.writestr(f"{about}/RECORD", "")


@pytest.mark.slow
def test_what_was_packed_is_found_on_the_machine(
    load: ModuleType, data_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    wheel(here / "wheels", "found_by_nobody", "numpy", "absent_package", "useless>=2", "other; extra == 'more'")
    wheel(here / "wheels", "numpy")  # which the interpreter has
    there.mkdir()
    shutil.copy(load.pack(data_folder, here, checkout=1000), there)
    load.unpack(there, ["useless"])
    for name in load.DATA:
        original, other = (folder / name for folder in (data_folder, there / "data"))
        if original.suffix == ".npz":
            with np.load(original) as a, np.load(other) as b:
                assert {key: a[key].tolist() for key in a} == {key: b[key].tolist() for key in b}
        elif original.suffix == ".gz":
            assert gzip.decompress(original.read_bytes()) == gzip.decompress(other.read_bytes())
        else:
            assert original.read_bytes() == other.read_bytes()
    assert (there / "site" / "found_by_nobody.py").is_file()
    assert not (there / "site" / "numpy.py").exists()
    told = [line for line in capfd.readouterr().out.splitlines() if "is missing" in line]
    assert told == ["absent_package is missing, which found_by_nobody requires"]


@pytest.mark.slow
def test_a_wheel_that_is_broken_costs_itself_alone(
    load: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wheel(tmp_path / "wheels", "found_by_nobody")
    (tmp_path / "wheels" / "broken_one-1.0-py3-none-any.whl").write_text("no zip file")
    load.unpack(tmp_path)
    assert (tmp_path / "site" / "found_by_nobody.py").is_file()
    assert "broken_one-1.0-py3-none-any.whl can't be installed" in capfd.readouterr().out


def test_too_much_to_be_carried_is_refused(load: ModuleType, data_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        SystemExit,
        match=r"too large to transfer at once: 0.0 MiB of \d+ files, and 60.0 MiB of the checkout, with a limit of 60 MiB",
    ):
        load.pack(data_folder, tmp_path / "here", checkout=60 << 20)
    assert not (tmp_path / "here" / "load.tar.xz").exists()
    (data_folder / load.DATA[0]).unlink()
    with pytest.raises(SystemExit, match=f"missing in {data_folder}: {load.DATA[0]} "):
        load.pack(data_folder, tmp_path / "here", checkout=0)
