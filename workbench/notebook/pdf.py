"""Printing of reports as PDF files by an installed Chromium-based browser."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from ..atomic import replacing

# not nbconvert's webpdf, which needs playwright and only uses the Chromium downloaded by it
_NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "microsoft-edge",
    "msedge",
    "brave-browser",
)
_PLACES = (
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Microsoft Edge.app/Contents/MacOS/Microsoft Edge",
    r"C:\Program Files\Google\Chrome\Application\chrome.exe",
    r"C:\Program Files (x86)\Microsoft\Edge\Application\msedge.exe",
)
_TIMEOUT = 120  # seconds per page


def find_chromium() -> str:
    """Return the path of a browser that prints PDF files: Chromium, Chrome, Edge or Brave.

    Raises:
        FileNotFoundError: none is installed; the message says what to install.
    """
    browser = next((path for name in _NAMES if (path := shutil.which(name))), None)
    browser = browser or next((path for path in _PLACES if Path(path).is_file()), None)
    if browser is None:
        raise FileNotFoundError(
            "PDF files are printed by Chromium, Chrome or Edge, and none of them is installed: install one (Debian, "
            "Ubuntu: apt install chromium; macOS: brew install --cask chromium), or omit --pdf and print the HTML file yourself"
        )
    return browser


def print_pdf(page: Path, chromium: str) -> Path:
    """Print an HTML file as a PDF file beside it.

    Args:
        page: path of the HTML file.
        chromium: path of the browser, from `find_chromium`.

    Returns:
        Path of the PDF file, which is replaced atomically.

    Raises:
        RuntimeError: the browser wrote no PDF file, or took too long.
    """
    target = page.with_suffix(".pdf")
    with (
        tempfile.TemporaryDirectory(prefix="workbench-", ignore_cleanup_errors=True) as profile,
        replacing(target) as unfinished,
    ):
        options = ["--headless", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
        options += ["--no-pdf-header-footer", f"--user-data-dir={profile}", f"--print-to-pdf={unfinished.resolve()}"]
        # Chromium's sandbox does not run as root (in containers); our pages contain no foreign scripts
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            options.append("--no-sandbox")
        try:
            done = subprocess.run(
                [chromium, *options, page.resolve().as_uri()], capture_output=True, timeout=_TIMEOUT, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{chromium} took longer than {_TIMEOUT} s to print {page.name}") from error
        if not unfinished.is_file():
            last_lines = done.stderr.decode(errors="replace").strip().splitlines()[-3:]
            raise RuntimeError(
                f"{chromium} printed no PDF of {page.name}: {' '.join(last_lines) or 'it gave no reason'}"
            )
    return target
