"""Fixtures of the browser tests: one JupyterLab and one Chromium for the session, one page per test."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .lab import CHROMIUM_ARGUMENTS, REQUIRED, Lab, chromium, jupyterlab, missing
from .notebook import HEIGHT, WIDTHS, Notebook

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
if missing() and not REQUIRED:  # the header says so
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker("browser")


# seldom, of JupyterLab's own, when a page is loaded again while the kernel writes: a message comes without its header
GARBLED = re.compile(r"stream\.std(err|out)\W*is not valid JSON")


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    if missing():
        pytest.fail(f"browser tests need {missing()}", pytrace=False)
    root, home = tmp_path_factory.mktemp("root"), tmp_path_factory.mktemp("home")
    for name in ("comparison", "explorer"):
        shutil.copy(NOTEBOOKS / f"{name}.ipynb", root)
    with jupyterlab(root, home) as server:
        yield server


@pytest.fixture(scope="package")  # not of the session: an event loop runs in it, which other tests have no use for
def browser(lab: Lab) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium(), args=CHROMIUM_ARGUMENTS)
        yield started
        started.close()


@pytest.fixture(scope="session")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where screenshots are kept: WORKBENCH_SCREENSHOTS, or a temporary folder."""
    named = os.environ.get("WORKBENCH_SCREENSHOTS")
    folder = Path(named) if named else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def notebook(
    lab: Lab, browser: Any, shots: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[[str], Notebook]]:
    """Opens a notebook by its name; at the end there may have been no error in the page, and no request to elsewhere."""
    errors: list[str] = []
    page = browser.new_page(viewport={"width": WIDTHS["laptop"], "height": HEIGHT})
    page.set_default_timeout(30_000)
    page.on("pageerror", lambda error: errors.append(f"error in the page: {error.stack or error}"))
    here = (f"{lab.url}/", lab.url.replace("http", "ws", 1), "data:", "blob:")
    page.on("request", lambda r: None if r.url.startswith(here) else errors.append(f"asked elsewhere: {r.url}"))
    yield lambda name: Notebook(page, lab, name, shots)
    page.screenshot(path=shots / f"{request.node.name}-end.png")
    page.close()
    lab.end_kernels()
    errors = [error for error in errors if not GARBLED.search(error)]
    assert not errors, "\n".join(errors)
