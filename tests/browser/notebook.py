"""A notebook open in JupyterLab, driven the way a user would."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .lab import Lab

READY = "() => window.jupyterapp?.shell.currentWidget?.context?.isReady"
IDLE = "() => window.jupyterapp.shell.currentWidget.context.sessionContext.session?.kernel?.status === 'idle'"
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
WIDTHS, HEIGHT = {"laptop": 1280, "half": 640}, 800


class Notebook:
    """An open notebook.

    Args:
        page: of Playwright.
        lab: the server.
        name: of the file.
        shots: the folder for screenshots.
    """

    def __init__(self, page: Any, lab: Lab, name: str, shots: Path) -> None:
        self.page, self.lab, self.name, self._shots = page, lab, name, shots
        page.goto(f"{lab.url}/lab/tree/{name}?token={lab.token}&reset", wait_until="domcontentloaded")
        self._ready()

    def _ready(self) -> None:
        self.page.wait_for_function(READY)
        self.page.wait_for_function(IDLE)

    @property
    def file(self) -> Path:
        """The file on the disk."""
        return self.lab.root / self.name

    def reload(self) -> None:
        """Load the page again, as F5 does."""
        self.page.reload(wait_until="domcontentloaded")
        self.page.wait_for_function(READY)

    def command(self, name: str, **arguments: Any) -> None:
        """Carry out a command of JupyterLab, and wait for its end."""
        script = "async ([name, args]) => { await window.jupyterapp.commands.execute(name, args) }"
        self.page.evaluate(script, [name, arguments])

    def start(self, name: str) -> None:
        """Carry out a command, and do not wait."""
        self.page.evaluate("name => { window.jupyterapp.commands.execute(name) }", name)

    def run(self, cell: str) -> None:
        """Run one cell, by its id, and wait for its end."""
        script = """async id => {
            const panel = window.jupyterapp.shell.currentWidget.content;
            panel.activeCellIndex = panel.widgets.findIndex(cell => cell.model.id === id);
            await window.jupyterapp.commands.execute('notebook:run-cell');
        }"""
        self.page.evaluate(script, cell)

    def insert(self, source: str) -> Any:
        """Add a cell at the end, run it, and give its output."""
        script = """async source => {
            const panel = window.jupyterapp.shell.currentWidget.content;
            panel.activeCellIndex = panel.widgets.length - 1;
            await window.jupyterapp.commands.execute('notebook:insert-cell-below');
            panel.activeCell.model.sharedModel.setSource(source);
            await window.jupyterapp.commands.execute('notebook:run-cell');
        }"""
        self.page.evaluate(script, source)
        return self.page.locator(".jp-Cell").last.locator(".jp-OutputArea-output")

    def save(self) -> None:
        self.command("docmanager:save")

    def until(self, selector: str, text: str, seconds: float = 30) -> float:
        """Wait until an element that can be seen holds a text, and say how many seconds that took."""
        start = time.perf_counter()
        self.page.locator(f"{selector}:visible", has_text=text).first.wait_for(timeout=1000 * seconds)
        return time.perf_counter() - start

    def measure(self, what: str, act: Callable[..., None], *args: Any, shown: str, text: str = "") -> None:
        """Act, wait until an element is shown and holds a text, and print how long that took; a test fails after half a minute.

        The clock runs in the page, from the event to the first frame in which it can be seen.

        Args:
            what: is measured.
            act: a method of this object.
            args: of the method.
            shown: selector of the element.
            text: that it holds.
        """
        watch = """([selector, text]) => {
            const start = performance.now();
            window.measured = new Promise(resolve => {
                const look = () => {
                    const found = document.querySelector(selector), time = performance.now() - start;
                    if ((found?.offsetParent && found.innerText.includes(text)) || time > 30000) resolve(time);
                    else requestAnimationFrame(look);
                };
                look();
            });
        }"""
        self.page.evaluate(watch, [shown, text])
        act(*args)
        seconds = self.page.evaluate("() => window.measured") / 1000
        print(f"\n[browser] {what}: {1000 * seconds:.0f} ms", end=" ")
        assert seconds < 30, f"{what}: not shown"

    def press(self, selector: str) -> None:
        """Click on an element at once, without Playwright's looking whether it stands still."""
        self.page.evaluate("s => document.querySelector(s).click()", selector)

    def choose(self, selector: str, option: str | int) -> None:
        """Choose from a list, by what it says or by its place."""
        by = "label" if isinstance(option, str) else "index"
        self.page.locator(selector).select_option(**{by: option})

    def key(self, name: str) -> None:
        """Press a key."""
        self.page.keyboard.press(name)

    def wear(self, theme: str) -> None:
        """Change the theme; JupyterLab fails in its own splash screen where one change follows another before that is gone."""
        self.command("apputils:change-theme", theme=theme)
        self.page.wait_for_timeout(50)
        self.page.locator("#jupyterlab-splash").wait_for(state="detached")

    def photograph(self, name: str, selector: str) -> None:
        """Keep pictures of an element in both themes, as wide as a laptop's screen and as half of it, and as high as need be."""
        page, look = self.page, "s => document.querySelector(s).scrollIntoView()"
        self.command("application:toggle-left-area")
        for size, width in WIDTHS.items():
            page.set_viewport_size({"width": width, "height": HEIGHT})
            page.wait_for_timeout(150)
            height = page.locator(selector).first.evaluate("e => e.getBoundingClientRect().height")
            page.set_viewport_size({"width": width, "height": max(HEIGHT, int(height) + 160)})
            for theme, full in THEMES.items():
                self.wear(full)
                page.evaluate(look, selector)
                page.wait_for_timeout(150)
                page.screenshot(path=self._shots / f"{name}-{theme}-{size}.png")
        self.wear(THEMES["light"])
        page.set_viewport_size({"width": WIDTHS["laptop"], "height": HEIGHT})
        self.command("application:toggle-left-area")
