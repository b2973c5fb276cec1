"""The software, the machine and the state of the code that computed a result."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from workbench.version import __version__


def environment(folder: Path | str | None = None, ask_torch: bool = True) -> dict[str, str]:
    """What a result was computed with.

    Args:
        folder: a folder of the repository whose state is described; default: the current one.
        ask_torch: False leaves out the device, which takes a second where torch is not imported yet.

    Returns:
        python, platform, device, git (``git describe`` of the folder's repository, "none" outside one) and the versions
        of the packages that decide the numbers and the pictures.

    Example:
        >>> sorted(environment())[:4]
        ['device', 'git', 'matplotlib', 'numpy']
    """
    return {
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        **({"device": device()} if ask_torch else {}),
        "git": _git(folder),
        **versions(),
    }


def device() -> str:
    """Name of what computes: the GPU if there is one, else the processor and its number of cores."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    if torch.backends.mps.is_available():
        return "Apple GPU (mps)"
    return processor()


def processor() -> str:
    """Name of the processor, and its number of cores."""
    try:
        line = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:  # not Linux
        line = None
    name = line[1] if line else platform.processor()
    return f"CPU{f' ({name})' if name else ''}, {os.cpu_count()} cores"


def version(file: Path) -> str:
    """The code that makes a result: ``git describe``, with a digest of the sources where that does not tell.

    Args:
        file: the module whose results they are; its repository is described, and the digest covers it and this package.

    Example:
        >>> len(version(Path("/none.py")).rpartition("none+")[2])  # not in a repository
        8
    """
    git = _git(file.parent)
    return f"{git}+{source_digest(file)[:8]}" if git == "none" or git.endswith("-dirty") else git


def versions() -> dict[str, str]:
    """Versions of the packages that decide numbers and pictures; "none" for one that is not installed."""
    installed = {"workbench": __version__}
    for package in ("torch", "numpy", "pandas", "matplotlib", "papermill"):
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed[package] = "none"
    return installed


def usage() -> dict[str, Any]:
    """What this process has used so far.

    Returns:
        peak_memory (MiB that it held at most; None where the system does not tell), peak_device_memory (MiB of the GPU
        that torch held at most; None without one), device (name of what computes) and data (name -> sha256 of the data sets that it has loaded).

    Example:
        >>> usage()["peak_memory"] > 1
        True
    """
    torch, loading = sys.modules.get("torch"), sys.modules.get("workbench.data.loading")
    on_device = torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "peak_memory": peak_memory(),
        "peak_device_memory": round(torch.cuda.max_memory_allocated() / 2**20, 1) if torch and on_device else None,
        "device": device() if torch else processor(),
        "data": _used() if loading else {},
    }


def _used() -> dict[str, str]:
    from workbench.data.provenance import used

    return used()


def peak_memory() -> float | None:
    """MiB that this process held at most; None where the system does not tell (Windows)."""
    try:
        import resource
    except ImportError:
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in KiB, on macOS in bytes
    return round(most / (2**20 if sys.platform == "darwin" else 2**10), 1)


def source_digest(*more: Path) -> str:
    """SHA-256 of the source of this package, and of more files, in hexadecimal digits."""
    digest = hashlib.sha256()
    for path in (*sorted(Path(__file__).parent.parent.rglob("*.py")), *filter(Path.is_file, more)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def cause(exit_code: int | None) -> str:
    """In words, how a process died of which this is the exit code (negative: the number of a signal).

    Example:
        >>> cause(-9)
        'killed by SIGKILL (as the system does when memory runs out)'
    """
    if exit_code is None or exit_code >= 0:
        return f"exit code {exit_code or 0}"
    name = signal.Signals(-exit_code).name
    hints = {"SIGKILL": "as the system does when memory runs out", "SIGSEGV": "a crash in native code"}
    return f"killed by {name} ({hints.get(name, 'sent from outside, or a crash in native code')})"


def _git(folder: Path | str | None) -> str:
    describe = ["git", "describe", "--always", "--dirty", "--tags", "--abbrev=12"]
    try:
        described = subprocess.run(describe, cwd=folder, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "none"
    return described.stdout.strip() or "none"
