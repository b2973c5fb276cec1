"""Checks of a page's legibility: contrast, clipped text, overlapping controls, overflow, and accessible names."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

LOOKED_AT = (390, 900, 1440)
LEAST, LEAST_LARGE = 4.5, 3.0  # contrast of text, Web Content Accessibility Guidelines 2.2, level AA
PATIENCE = 8.0  # seconds in which a page must have settled into one without problems

AUDIT = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")
# sizes of all elements, so that it is seen when they stand still; transitions would have colours on the way between two
SETTLED = """async selector => {
    if (!document.getElementById('no-transitions')) {
        const style = document.createElement('style');
        style.id = 'no-transitions';
        style.textContent = '*,*::before,*::after{transition:none!important;animation:none!important}';
        document.head.append(style);
    }
    await document.fonts.ready;
    const frame = () => new Promise(resolve => requestAnimationFrame(resolve));
    const state = () => [...document.querySelectorAll(selector)].flatMap(root => [root, ...root.querySelectorAll('*')]).map(e => {
        const r = e.getBoundingClientRect();
        return [r.x, r.y, r.width, r.height].map(Math.round).join();
    }).join(';');
    let before = state(), same = 0;
    for (let i = 0; i < 300 && same < 4; i++) {
        await frame();
        const now = state();
        same = now === before ? same + 1 : 0;
        before = now;
    }
}"""


def problems(page: Any, selector: str = "body") -> list[str]:
    """What cannot be read, seen or told of the elements of a page, once it stands still.

    Args:
        page: of Playwright.
        selector: of the elements.
    """
    page.evaluate(SETTLED, selector)
    return page.evaluate(AUDIT, [selector, LEAST, LEAST_LARGE])


def check(page: Any, selector: str, what: str) -> None:
    """Fail if a page has problems and keeps them: pictures and layout may come a little later."""
    deadline = time.monotonic() + PATIENCE
    while (remaining := problems(page, selector)) and time.monotonic() < deadline:
        page.wait_for_timeout(200)
    assert not remaining, f"{what}:\n  " + "\n  ".join(remaining)
