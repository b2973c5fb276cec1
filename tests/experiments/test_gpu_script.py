"""benchmarks/gpu.sh, as far as a machine without a GPU can tell."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from conftest import ROOT

PARTS = ("tests", "throughput", "speed", "conformance", "wrapping", "notebooks", "quality")
pytestmark = pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")


def gpu(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "LIMIT": "1500"}
    command = ["bash", ROOT / "benchmarks" / "gpu.sh", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1600, check=False)


@pytest.mark.slow
def test_every_part_runs_in_small_on_a_cpu(tmp_path: Path) -> None:
    ended = gpu("--smoke", tmp_path)
    lines = ended.stdout.splitlines()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [line.partition(": ")[0] for line in lines[-len(PARTS) :]] == list(PARTS)
    assert all(": ok, " in line for line in lines[-len(PARTS) :])
    assert (tmp_path / "summary.txt").read_text().splitlines() == lines
    assert {path.name for path in tmp_path.iterdir()} == {"summary.txt", *(f"{part}.tar.gz" for part in PARTS)}
    with tarfile.open(tmp_path / "speed.tar.gz") as packed:
        assert {"speed/log.txt", "speed/speed.csv", "speed/speed.json"} <= set(packed.getnames())


@pytest.mark.parametrize(
    ("arguments", "word"), [((), "usage"), (("FOLDER", "sped"), "there is no part sped"), (("--quick",), "no option")]
)
def test_what_cannot_be_run_is_said_before_anything_is_written(arguments: tuple[str, ...], word: str) -> None:
    ended = gpu(*arguments)
    assert ended.returncode == 2
    assert word in ended.stderr
    assert not Path("FOLDER").exists()
