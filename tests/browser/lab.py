"""A private JupyterLab server on this machine and a Chromium that opens it, for the browser tests."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import nbformat

from workbench.widgets.comparison.export import KERNEL

REQUIRED = os.environ.get("WORKBENCH_BROWSER") == "required"  # then what is missing is an error

CHROMIUM_ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SETTINGS = {
    "@jupyterlab/apputils-extension:notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": True,
    },
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},  # every cell is in the page
    "@jupyterlab/docmanager-extension:plugin": {"autosave": False},
}
OURS = ("JUPYTER_CONFIG", "JUPYTER_DATA", "JUPYTER_RUNTIME", "JUPYTERLAB_SETTINGS", "JUPYTERLAB_WORKSPACES")


def chromium() -> str | None:
    """The path of Chromium, or of what is like it."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for name in names if (path := shutil.which(name))), None)


def missing() -> str:
    """What is missing for browser tests, and how to get it; "" if nothing is."""
    lacking = [] if chromium() else ["Chromium (apt-get install chromium)"]
    if importlib.util.find_spec("playwright") is None:
        lacking.append("playwright (pip install playwright)")
    return " and ".join(lacking)


class Lab(NamedTuple):
    """A running JupyterLab: its address, its token, and the folder that it shows."""

    url: str
    token: str
    root: Path

    def ask(self, path: str, method: str = "GET") -> Any:
        """What its REST interface says."""
        request = urllib.request.Request(f"{self.url}/api/{path}", method=method)
        request.add_header("Authorization", f"token {self.token}")
        with urllib.request.urlopen(request, timeout=10) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def write(self, name: str, cells: str) -> None:
        """Put a notebook with these cells, separated by lines of three dashes, into the folder."""
        made = [nbformat.v4.new_code_cell(source.strip()) for source in cells.split("---\n")]
        nb = nbformat.v4.new_notebook(cells=made, metadata={"kernelspec": KERNEL})
        nbformat.write(nb, self.root / name)

    def end_kernels(self) -> None:
        """Shut all kernels down, as on closing the server."""
        for session in self.ask("sessions"):
            self.ask(f"sessions/{session['id']}", "DELETE")


@contextlib.contextmanager
def jupyterlab(root: Path, home: Path) -> Iterator[Lab]:
    """A JupyterLab with settings and state of its own, until the end of the context.

    Args:
        root: the folder that it shows.
        home: an empty folder for all that it writes.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token, app = secrets.token_hex(16), home / "app"
    app.mkdir()
    (app / "overrides.json").write_text(json.dumps(SETTINGS))
    folders = {f"{name}_DIR": str(home / name.lower()) for name in OURS}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ServerApp.ip=127.0.0.1"]
    command += [f"--ServerApp.port={port}", "--ServerApp.port_retries=0", f"--IdentityProvider.token={token}"]
    command += [f"--ServerApp.root_dir={root}", "--ServerApp.allow_root=True", "--LabApp.expose_app_in_browser=True"]
    command += ["--LabApp.news_url=", "--LabApp.extension_manager=readonly", f"--LabApp.app_settings_dir={app}"]
    inherited = {name: value for name, value in os.environ.items() if name not in ("MPLBACKEND", "WORKBENCH_HEADLESS")}
    environment = {**inherited, **folders, "IPYTHONDIR": str(home / "ipython")}
    lab, log = Lab(f"http://127.0.0.1:{port}", token, root), home / "lab.log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            command, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            _wait(lab, server, log)
            yield lab
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)


def _wait(lab: Lab, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while True:
        with contextlib.suppress(OSError):
            lab.ask("status")
            return
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"JupyterLab does not start:\n{log.read_text()[-2000:]}")
        time.sleep(0.2)
