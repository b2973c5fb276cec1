"""All computations give the same on another device: a simulated one, registered with torch in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
        reason="this torch cannot register a device from Python",
    ),
]


@pytest.mark.parametrize("name", ["calls", "recorded_calls", "training", "steps", "tools"])
def test_on_another_device(name: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n0",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        f"{name}_on_another_device.py",
    ]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1] / "helpers", capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
