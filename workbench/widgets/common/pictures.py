"""Figures for notebooks: as inline SVG in the colours of the page's theme, or as PNG on white, with tooltips by CSS alone.

Figures are drawn on `matplotlib.figure.Figure`, never through pyplot, so that any thread may draw; no rcParams are set.
In the SVG, text, background and the colour of the total risk are CSS variables of JupyterLab with fallbacks, so that one
picture fits light and dark pages, follows a change of theme, and needs neither scripts nor a kernel.
"""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import require
from workbench.notebook.values import UNTYPESET
from workbench.plots import COLOURS
from workbench.plots._texts import no_glyph_warnings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# unique placeholders that the SVG replaces by theme colours; nearly black and white, so that they also fit a PNG on white
INK, GROUND = "#010203", "#fdfefd"
BACKDROP = "#808080"  # replaces INK in rasterized parts, which can't follow the theme: visible on light and dark
TOTAL = COLOURS["total"]  # too dark for a dark background
MAX_SHAPES = 60  # scatter plots with more points are rasterized
FONT = "var(--jp-ui-font-family,sans-serif)"
THEMED = {  # placeholder -> (CSS variable of the picture, colour of the theme)
    INK: ("--i", "var(--jp-ui-font-color1,currentColor)"),
    GROUND: ("--g", "var(--jp-layout-color0,Canvas)"),
    TOTAL: ("--t", "var(--jp-ui-font-color2,currentColor)"),
}

#: CSS that pictures need once on a page; all selectors are classes of this package.
STYLE = """
.wb-comparison,.wb-explorer{--jp-widgets-dropdown-arrow:url("data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' \
viewBox='0 0 18 18'%3E%3Cpath d='M5.2 6.4 9 10.2l3.8-3.8 1.2 1.2-5 5-5-5z' fill='%23808080'/%3E%3C/svg%3E")}
.wb-figure{display:block!important}
.wb-picture{display:block;max-width:100%;height:auto;stroke-linejoin:round;stroke-linecap:butt}
.wb-spot .wb-mark{fill:transparent;stroke:none}
.wb-spot:hover .wb-mark{stroke:var(--jp-ui-font-color1,currentColor);stroke-width:1.2}
.wb-spot .wb-tip{visibility:hidden;pointer-events:none}
.wb-spot:hover .wb-tip{visibility:visible}
.wb-tip rect{fill:var(--jp-layout-color0,Canvas);stroke:var(--jp-border-color1,#999);stroke-width:.7;opacity:.95}
.wb-tip text{fill:var(--jp-ui-font-color1,currentColor);font-size:9px}
.wb-static .wb-pixels{display:none}
"""


def brief(name: str, most: int = 32) -> str:
    """Shorten a name to `most` characters in the middle, since long names often share their beginning.

    Example:
        >>> brief("height of the barometer above the sea, station 12", 24)
        'height of the…tation 12'
    """
    name = " ".join(name.split())
    if len(name) <= most:
        return name
    end = (most - 1) * 2 // 5
    return f"{name[: most - 1 - end].rstrip()}…{name[-end:].lstrip()}"


@dataclass(frozen=True)
class Spot:
    """A place in a picture with a tooltip.

    Args:
        ax: Axes it lies on.
        x: position in data coordinates.
        y: position in data coordinates; None for a column of full height.
        lines: lines of the tooltip.
        width: width of a column in data coordinates.
    """

    ax: Axes
    x: float
    y: float | None
    lines: Sequence[str]
    width: float = 0.0


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of a size in inches, which is not registered with pyplot.

    Example:
        >>> new_figure(4, 3).get_size_inches().tolist()
        [4.0, 3.0]
    """
    figure: Figure = require("matplotlib.figure").Figure(
        figsize=(width, height), layout="constrained", facecolor="none", dpi=110
    )
    return figure


def themed_figure(width: float, height: float) -> Any:
    """Return a figure whose Axes are painted as they are made, so that what is drawn on them uses the page's colours."""
    figure: Any = new_figure(width, height)
    plain = figure.subplots

    def subplots(*args: Any, **options: Any) -> Any:
        axes = plain(*args, **options)
        for ax in np.ravel(axes):
            paint(ax)
        return axes

    figure.subplots = subplots
    return figure


def paint(ax: Axes) -> Axes:
    """Set Axes to the colours that `svg` turns into those of the theme, whatever the rcParams; call it before drawing."""
    ax.set_facecolor("none")
    ax.tick_params(colors=INK)
    for text in (ax.xaxis.label, ax.yaxis.label, ax.title):
        text.set_color(INK)
        text.set_parse_math(False)  # names may contain dollar signs
    for spine in ax.spines.values():
        spine.set_edgecolor(INK)
    return ax


def finish(figure: Figure) -> Figure:
    """Give what was drawn since `paint` (legends, colour bars, notes) the same colours, and rasterize large scatter plots.

    Args:
        figure: figure to change.

    Returns:
        The figure.
    """
    from matplotlib import rcParams
    from matplotlib.collections import LineCollection, PathCollection, QuadMesh
    from matplotlib.colors import to_hex, to_rgba
    from matplotlib.ticker import FixedLocator

    default_ground = to_rgba(rcParams["axes.facecolor"])
    for ax in figure.get_axes():
        ax.tick_params(colors=INK)
        if to_rgba(ax.get_facecolor()) == default_ground:  # any other background has a meaning, such as "no label"
            ax.set_facecolor("none")
        for collection in ax.collections:
            count = len(np.asarray(collection.get_offsets())) if isinstance(collection, PathCollection) else 0
            if isinstance(collection, LineCollection):
                count = len(collection.get_segments())
            if isinstance(collection, PathCollection) and _is(collection.get_facecolor(), "#000000"):
                # SVG omits black, the default, so that the theme's text colour would apply
                collection.set_facecolor("#000001")
            if count > MAX_SHAPES or isinstance(collection, QuadMesh):
                collection.set_rasterized(True)
                for get, put in (
                    (collection.get_facecolor, collection.set_facecolor),
                    (collection.get_edgecolor, collection.set_edgecolor),
                ):
                    if _is(get(), INK, TOTAL):
                        put(BACKDROP)
        named = [axis for axis in (ax.xaxis, ax.yaxis) if isinstance(axis.get_major_locator(), FixedLocator)]
        ticks = (label for axis in named for label in axis.get_ticklabels())
        for text in (ax.xaxis.label, ax.yaxis.label, ax.title, *ax.texts, *ticks):
            text.set_parse_math(False)
        box = ax.get_window_extent()
        for text, room in ((ax.xaxis.label, box.width), (ax.yaxis.label, box.height)):
            letters = room * 72 / ax.figure.figure.dpi / (0.5 * text.get_fontproperties().get_size_in_points())
            text.set_text("\n".join(brief(line, max(24, int(letters))) for line in text.get_text().split("\n")))
        for text in (ax.xaxis.label, ax.yaxis.label, ax.title, *ax.texts):
            if to_hex(text.get_color()) not in ("#ffffff", "#010101"):  # these have backgrounds of their own
                text.set_color(text.get_color() if text.get_color() in COLOURS.values() else INK)
        legend = ax.get_legend()
        if legend is not None:
            legend.get_frame().set_facecolor(GROUND)
            for text in legend.get_texts():
                text.set_color(INK)
    of_legends = (text for legend in figure.legends for text in (*legend.get_texts(), legend.get_title()))
    for text in (*figure.texts, *of_legends):
        text.set_color(INK)
        text.set_parse_math(False)
    return figure


def _is(colours: Any, *wanted: str) -> bool:
    from matplotlib.colors import to_hex

    return len(colours) > 0 and to_hex(colours[0][:3]) in wanted


def svg(figure: Figure, alt: str, spots: Sequence[Spot] = ()) -> str:
    """Return a figure as inline SVG in the colours of the page.

    Args:
        figure: figure drawn on Axes prepared by `paint`; it is finished by this.
        alt: alternative text.
        spots: places with tooltips.

    Returns:
        An ``<svg>`` element of class wb-picture, as wide as the figure at 96 pixels per inch if there is room. It is in a ``<div>`` that only
        `STYLE` makes visible, since an untrusted notebook drops styles and shapes and would show the bare texts.

    Example:
        >>> figure = new_figure(3, 2)
        >>> _ = paint(figure.subplots()).plot([1, 2, 4], color=INK)
        >>> picture = svg(figure, "a curve that rises")
        >>> '<svg class="wb-picture"' in picture, "var(--jp-ui-font-color1" in picture
        (True, True)
    """
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    finish(figure)
    buffer = io.StringIO()
    with no_glyph_warnings():
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})
    width, height = (float(v) for v in figure.get_size_inches())
    colours = ";".join(f"{name}:{theme}" for name, theme in THEMED.values())
    # without `fill`, elements without a colour, such as glyphs, would be black
    return (
        f'<div class="wb-figure" style="display:none"><svg class="wb-picture" role="img" '
        f'aria-label="{html.escape(alt)}" width="{width * 96:.0f}" '
        f'style="{colours};fill:var(--i);font-family:{FONT}" viewBox="0 0 {width * 72:g} {height * 72:g}" '
        'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
        f"{_compact_svg(buffer.getvalue())}{''.join(_spot(spot, width * 72, height * 72) for spot in spots)}</svg></div>"
    )


def _compact_svg(text: str) -> str:
    """Return the content of matplotlib's SVG with CSS variables as colours, texts as text, and shorter numbers."""
    text = text[text.index(">", text.index("<svg")) + 1 : text.rindex("</svg>")]
    # a <style> of matplotlib would apply to the whole page
    text = re.sub(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</defs>", "", text, flags=re.S)
    glyphs = {match[2]: match[1] for match in re.finditer(r'(<path id="([\w-]+)".*?/>)', text, re.S)}
    text = re.sub(_TEXT, _text_element, text, flags=re.S)
    lost = sorted(set(re.findall(r'href="#([\w-]+)"', text)) - set(re.findall(r'id="([\w-]+)"', text)))
    text = f"<defs>{''.join(glyphs[name] for name in lost)}</defs>{text}" if lost else text
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r' d="([^"]*)"', lambda match: f' d="{_path(match[1])}"', text)
    text = re.sub(r'( (?:x|y|width|height)="-?\d+\.\d\d)\d+"', r'\1"', text)
    for colour, (name, _) in THEMED.items():
        text = text.replace(colour, f"var({name})")
    text = re.sub(r'style="[^"]*"', lambda match: re.sub(r"([;:]) ", r"\1", match[0]), text)
    return re.sub(r"\s*\n\s*", "\n", text)


# a text that matplotlib draws glyph by glyph, after a comment with the text
_TEXT = (
    r'<!-- ([^$]*?) -->\s*<g( style="[^"]*")? transform="translate\(([-\d.]+) ([-\d.]+)\)( rotate\([-\d.]+\))? '
    r'scale\(([\d.]+) -[\d.]+\)">(.*?)</g>'
)


def _text_element(match: re.Match[str]) -> str:
    """Replace glyphs by text of the same width in the font of the page, which takes a quarter of the bytes."""
    words, style, x, y, turned, scale, inside = match.groups()
    *_, last = ["0", *re.findall(r"<use [^>]*translate\(([-\d.]+)", inside)]
    size = 100 * float(scale)
    wide = (float(last) + 60 if len(words) > 1 else 0) * float(scale)  # 60 is about the width of the last glyph
    length = f' textLength="{wide:.1f}" lengthAdjust="spacingAndGlyphs"' if wide else ""
    return (
        f'<text{style or ""} font-size="{size:.4g}"{length} '
        f'transform="translate({float(x):.1f} {float(y):.1f}){turned or ""}">{words}</text>'
    )


def _path(d: str) -> str:
    return re.sub(r"\s*([A-Za-z])\s*", r"\1", re.sub(r"(\.\d)\d+", r"\1", d)).replace("\n", " ")


def _spot(spot: Spot, width: float, height: float) -> str:
    """Return a spot with its tooltip as SVG, in points; the layout of the figure must have been computed."""
    figure: Any = spot.ax.figure.figure
    scale = 72 / figure.dpi
    box = spot.ax.get_window_extent()
    left, right, top, bottom = box.x0 * scale, box.x1 * scale, height - box.y1 * scale, height - box.y0 * scale
    x, y = (v * scale for v in spot.ax.transData.transform((spot.x, spot.y or 0.0)))
    y = height - y
    if spot.y is None:
        half = abs(spot.ax.transData.transform((spot.x + spot.width / 2, 0))[0] * scale - x)
        first, last = max(x - half, left), min(x + half, right)
        if last <= first:
            return ""
        mark = (
            f'<rect class="wb-mark" style="stroke:none" x="{first:.1f}" y="{top:.1f}" width="{last - first:.1f}" '
            f'height="{bottom - top:.1f}"/><path class="wb-mark" d="M{x:.1f} {top:.1f}V{bottom:.1f}"/>'
        )
        y = top + 4
    elif not (left <= x <= right and top <= y <= bottom):
        return ""
    else:
        mark = f'<circle class="wb-mark" cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
    texts = [brief(line, int((width - 8) / 5.2)) for line in spot.lines]
    wide, high = 5.2 * max(map(len, texts)) + 8, 11.5 * len(texts) + 5
    tip_x = x + 8 if x + 8 + wide < width else max(x - 8 - wide, 0)
    tip_y = min(max(y - high / 2, 0) if spot.y is not None else y, height - high)
    lines = "".join(f'<tspan x="{tip_x + 4:.0f}" dy="11.5">{html.escape(line)}</tspan>' for line in texts)
    return (
        f'<g class="wb-spot">{mark}<g class="wb-tip"><rect rx="2" x="{tip_x:.0f}" y="{tip_y:.0f}" '
        f'width="{wide:.0f}" height="{high:.0f}"/><text y="{tip_y - 1:.0f}">{lines}</text></g></g>'
    )


def png(figure: Figure, dpi: int = 110) -> bytes:
    """Return a figure as PNG on white, which every viewer shows.

    Args:
        figure: figure; it is finished by this.
        dpi: pixels per inch.

    Example:
        >>> figure = new_figure(3, 2)
        >>> _ = paint(figure.subplots()).plot([1, 2, 4])
        >>> png(figure)[1:4]
        b'PNG'
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = io.BytesIO()
    with no_glyph_warnings():
        FigureCanvasAgg(finish(figure)).print_figure(
            buffer, format="png", dpi=dpi, facecolor="white", metadata={"Software": None}
        )
    return buffer.getvalue()


def small_png(figure: Figure | bytes, dpi: int) -> bytes:
    """Return a figure, or the PNG of one, as PNG with at most 64 colours, a third of the size; the figure is finished by this."""
    Image = require("PIL.Image")
    buffer, pixels = io.BytesIO(), figure if isinstance(figure, bytes) else png(figure, dpi)
    Image.open(io.BytesIO(pixels)).convert("RGB").quantize(64).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def image(data: bytes, alt: str, kind: str = "image/png", attributes: str = "") -> str:
    """Return an ``<img>`` element with embedded data.

    Example:
        >>> image(b"...", "three dots")
        '<img src="data:image/png;base64,Li4u" alt="three dots">'
    """
    text = base64.b64encode(data).decode()
    return f'<img src="data:{kind};base64,{text}" alt="{html.escape(alt)}"{attributes and " " + attributes}>'


def display_static(page: str, figure: Figure | bytes, alt: str, style: str = "", dpi: int = 80) -> None:
    """Display a static picture in the running cell: as HTML, and as PNG for viewers without HTML.

    JupyterLab removes styles and SVG from untrusted notebooks; the HTML then shows the PNG instead, which the style hides
    otherwise. So the picture is shown when a notebook is reopened without a kernel, trusted or not, and in reports.

    Args:
        page: HTML of the picture, with tooltips; no scripts.
        figure: the same as one figure, or as PNG.
        alt: alternative text.
        style: CSS that the HTML needs in addition to `STYLE`.
        dpi: pixels per inch of the PNG.
    """
    display = require("IPython.display").display
    pixels = small_png(figure, dpi)
    fallback = image(pixels, alt, attributes='class="wb-pixels"')
    data = {
        "text/html": f'<div class="wb-static {UNTYPESET}"><style>{STYLE}{style}</style>{page}{fallback}</div>',
        "image/png": base64.b64encode(pixels).decode(),
        "text/plain": alt,
    }
    display(data, raw=True, metadata={"image/png": {"alt": alt}})


__all__ = [
    "GROUND",
    "INK",
    "STYLE",
    "Spot",
    "display_static",
    "finish",
    "image",
    "new_figure",
    "paint",
    "png",
    "svg",
    "themed_figure",
]
