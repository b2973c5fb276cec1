"""Record of the software, the machine and the version of the code that computed a result."""

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
    """Return the software and the machine that results are computed with.

    Args:
        folder: folder in the repository to describe; default: the current folder.
        ask_torch: whether to include the device, which imports torch (about a second).

    Returns:
        python, platform, device, git (``git describe`` of the folder's repository, "none" outside a repository) and the versions
        of the packages that affect numbers and pictures.

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
    """Return the name of the GPU, or of the processor with its number of cores if there is no GPU."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    if torch.backends.mps.is_available():
        return "Apple GPU (mps)"
    return processor()


def processor() -> str:
    """Return the name of the processor and its number of cores."""
    try:
        line = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:  # not Linux
        line = None
    name = line[1] if line else platform.processor()
    return f"CPU{f' ({name})' if name else ''}, {os.cpu_count()} cores"


def version(file: Path) -> str:
    """Return the version of the code that computes a result: ``git describe``, plus a digest of the sources if that does not identify it.

    Args:
        file: module that computes the results. Its repository is described, and the digest covers the module and this package.

    Example:
        >>> len(version(Path("/none.py")).rpartition("none+")[2])  # not in a repository
        8
    """
    git = _git(file.parent)
    return f"{git}+{source_digest(file)[:8]}" if git == "none" or git.endswith("-dirty") else git


def versions() -> dict[str, str]:
    """Return the versions of the packages that affect numbers and pictures; "none" for packages that are not installed."""
    installed = {"workbench": __version__}
    for package in ("torch", "numpy", "pandas", "matplotlib", "papermill"):
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed[package] = "none"
    return installed


def usage() -> dict[str, Any]:
    """Return the resources and data that this process has used so far.

    Returns:
        peak_memory (MiB; None if the system does not report it), peak_device_memory (peak of torch's GPU memory, MiB; None without
        a GPU), device (its name) and data (name -> sha256 of the data sets that were loaded).

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
    """Return the peak memory of this process in MiB; None if the system does not report it (Windows)."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in KiB, on macOS in bytes
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10), 1)


def source_digest(*more: Path) -> str:
    """Return the SHA-256, in hexadecimal digits, of the source of this package and of more files."""
    digest = hashlib.sha256()
    for path in (*sorted(Path(__file__).parent.parent.rglob("*.py")), *filter(Path.is_file, more)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def cause(exit_code: int | None) -> str:
    """Describe in words how a process died.

    Args:
        exit_code: exit code of the process; negative: number of the signal that killed it.

    Example:
        >>> cause(-9)
        'killed by SIGKILL (as the system does when memory runs out)'
    """
    if exit_code is None or exit_code >= 0:
        return f"exit code {exit_code or 0}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:  # most of the real-time signals have no name
        name = f"signal {-exit_code}"
    hints = {"SIGKILL": "as the system does when memory runs out", "SIGSEGV": "a crash in native code"}
    return f"killed by {name} ({hints.get(name, 'sent by another process, or a crash in native code')})"


def _git(folder: Path | str | None) -> str:
    describe = ["git", "describe", "--always", "--dirty", "--tags", "--abbrev=12"]
    try:
        described = subprocess.run(describe, cwd=folder, capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "none"
    return described.stdout.decode(errors="replace").strip() or "none"  # whatever the system's encoding
