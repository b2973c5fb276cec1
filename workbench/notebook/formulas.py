r"""Formulas in a notebook's text, such as ``$\sigma^2$``, as SVG for pages that can't load MathJax."""

from __future__ import annotations

import html
import io
import re
import warnings
from typing import Any

from ..errors import WorkbenchWarning, require

_FONT_SIZE = 10.0  # points; the output is in em, relative to the surrounding text


def formula(tex: str, *, block: bool = False) -> str:
    r"""Draw a formula with matplotlib's mathtext.

    Args:
        tex: formula without dollar signs, in mathtext's subset of TeX (no environments such as align).
        block: whether it is a display formula, on a separate line.

    Returns:
        HTML: an inline SVG in the colour of the text, with the TeX source for screen readers; or, if mathtext can't draw
        the formula, its TeX as code.

    Warns:
        WorkbenchWarning: mathtext can't draw the formula.

    Example:
        >>> formula(r"\sigma^2").startswith('<svg class="formula" role="img" aria-label="\\sigma^2"')
        True
    """
    require("matplotlib")
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties
    from matplotlib.mathtext import MathTextParser

    tex = " ".join(tex.split())
    font = FontProperties(size=_FONT_SIZE, math_fontfamily="stix")
    try:
        width, height, depth, *_ = MathTextParser("path").parse(f"${tex}$", dpi=72, prop=font)
    except ValueError as error:
        reason = str(error).strip().splitlines()[-1]
        message = f"the formula {tex!r} is shown as TeX, since it can't be drawn: {reason}"
        warnings.warn(message, WorkbenchWarning, stacklevel=2)
        return f"<code>{html.escape(tex)}</code>"
    figure = Figure(figsize=(width / 72, height / 72))
    # whatever the user's settings: black is what pages replace by the colour of their text, and LaTeX may be missing
    figure.text(0, depth / height, f"${tex}$", fontproperties=font, color="black", usetex=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="svg", dpi=72, transparent=True)
    svg = picture.getvalue().decode()
    view = re.search(r'viewBox="([^"]*)"', svg)
    assert view is not None
    inside = svg[svg.index(">", view.end()) + 1 : svg.rindex("</svg>")]
    inside = re.sub(r"<metadata>.*?</metadata>|\s*\n\s*", " ", inside, flags=re.DOTALL)
    alignment = "" if block else f";vertical-align:{-depth / _FONT_SIZE:.3f}em"
    return (
        f'<svg class="formula{" block" if block else ""}" role="img" aria-label="{html.escape(tex)}" '
        f'style="width:{width / _FONT_SIZE:.3f}em;height:{height / _FONT_SIZE:.3f}em{alignment}" '
        f'viewBox="{view.group(1)}">{inside}</svg>'
    )


def markdown_to_html(source: str, **options: Any) -> str:
    """Render Markdown with its formulas as SVG, so that no script is needed.

    Args:
        source: Markdown text.
        **options: arguments of nbconvert's IPythonRenderer.

    Returns:
        HTML.
    """
    require("nbconvert")
    from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

    class FormulaRenderer(IPythonRenderer):
        def inline_math(self, body: str) -> str:
            return formula(body)

        def block_math(self, body: str) -> str:
            return formula(body, block=True)

        def latex_environment(self, name: str, body: str) -> str:
            return formula(
                body if name.startswith("equation") else rf"\begin{{{name}}}{body}\end{{{name}}}", block=True
            )

    return str(MarkdownWithMath(renderer=FormulaRenderer(**options)).render(source))
