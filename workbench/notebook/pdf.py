"""Print reports as PDF files, by a Chromium of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from ..atomic import replacing

# nbconvert's webpdf starts the Chromium that playwright has downloaded and no other, and needs playwright for it
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
_TIME = 120  # seconds for one page


def find_chromium() -> str:
    """Path of a browser that prints PDF files: Chromium, Chrome, Edge or Brave.

    Returns:
        Path of the program.

    Raises:
        FileNotFoundError: if there is none; the message says what to install.
    """
    browser = next((path for name in _NAMES if (path := shutil.which(name))), None)
    browser = browser or next((place for place in _PLACES if Path(place).is_file()), None)
    if browser is None:
        raise FileNotFoundError(
            "PDF files are printed by Chromium, Chrome or Edge, and none of them is on this machine: install one (Debian, "
            "Ubuntu: apt install chromium; macOS: brew install --cask chromium), or leave --pdf out and print the HTML file"
        )
    return browser


def print_pdf(page: Path, chromium: str) -> Path:
    """Print an HTML file as a PDF file beside it.

    Args:
        page: path of the HTML file.
        chromium: path of the browser, from `find_chromium`.

    Returns:
        Path of the PDF file, replaced in one step.

    Raises:
        RuntimeError: if the browser prints none.
    """
    target = page.with_suffix(".pdf")
    with (
        tempfile.TemporaryDirectory(prefix="workbench-", ignore_cleanup_errors=True) as profile,
        replacing(target) as unfinished,
    ):
        options = ["--headless", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
        options += ["--no-pdf-header-footer", f"--user-data-dir={profile}", f"--print-to-pdf={unfinished.resolve()}"]
        if hasattr(os, "geteuid") and os.geteuid() == 0:  # root, in containers mostly; our pages run nothing
            options.append("--no-sandbox")
        try:
            done = subprocess.run(
                [chromium, *options, page.resolve().as_uri()], capture_output=True, timeout=_TIME, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{chromium} took longer than {_TIME} s to print {page.name}") from error
        if not unfinished.is_file():
            last_lines = done.stderr.decode(errors="replace").strip().splitlines()[-3:]
            raise RuntimeError(
                f"{chromium} printed no PDF of {page.name}: {' '.join(last_lines) or 'it gave no reason'}"
            )
    return target
