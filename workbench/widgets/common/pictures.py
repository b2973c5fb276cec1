"""Figures for notebooks: as inline SVG in the colours of the page's theme, as PNG on white, with hover by CSS alone.

Figures are drawn on `matplotlib.figure.Figure`, never through pyplot, so that any thread may draw; no rcParams are set.
In the SVG ink, ground and the colour of the total risk are CSS variables of JupyterLab with fallbacks, so that one
picture fits light and dark pages, follows a change of theme, and needs neither scripts nor a kernel.
"""

from __future__ import annotations

import base64
import html
import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import require
from workbench.notebook.values import UNTYPESET
from workbench.plots import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# near black and near white, so that the same figure is right in a PNG on white; no other colour is like them
INK, GROUND = "#010203", "#fdfefd"
BACKDROP = "#808080"  # ink of what becomes pixels and can't follow the theme: seen on light and on dark
TOTAL = COLOURS["total"]  # too dark for a dark ground
MAX_SHAPES = 60  # points of one cloud in an SVG; more become pixels
FONT = "var(--jp-ui-font-family,sans-serif)"
THEMED = {  # our colour -> (short name in a picture, the theme's colour)
    INK: ("--i", "var(--jp-ui-font-color1,currentColor)"),
    GROUND: ("--g", "var(--jp-layout-color0,Canvas)"),
    TOTAL: ("--t", "var(--jp-ui-font-color2,currentColor)"),
}

#: What every picture needs once on a page; all rules are about classes of our own.
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
    """A name for a place with room for so many letters: its beginning and its end, which tell names of one beginning apart.

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
    """A place in a picture that says more while the pointer is over it.

    Args:
        ax: the Axes that it lies on.
        x: where, in the units of the Axes.
        y: where; None: a column of the full height.
        lines: what is said, line by line.
        width: of a column, in the units of the Axes.
    """

    ax: Axes
    x: float
    y: float | None
    lines: Sequence[str]
    width: float = 0.0


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of a size in inches, known to nobody but the caller.

    Example:
        >>> new_figure(4, 3).get_size_inches().tolist()
        [4.0, 3.0]
    """
    figure: Figure = require("matplotlib.figure").Figure(
        figsize=(width, height), layout="constrained", facecolor="none", dpi=110
    )
    return figure


def themed_figure(width: float, height: float) -> Any:
    """A figure whose Axes have the colours of a page from the start, so that what is drawn on them takes these."""
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
    """Axes in the colours that `svg` turns into those of the theme, whatever rcParams say; before drawing on them."""
    ax.set_facecolor("none")
    ax.tick_params(colors=INK)
    for text in (ax.xaxis.label, ax.yaxis.label, ax.title):
        text.set_color(INK)
        text.set_parse_math(False)  # two dollars in a name are no formula
    for spine in ax.spines.values():
        spine.set_edgecolor(INK)
    return ax


def finish(figure: Figure) -> Figure:
    """Give what was drawn since `paint` (legends, colour bars, notes) the same colours, and make clouds of points pixels.

    Args:
        figure: it is changed.

    Returns:
        The figure.
    """
    from matplotlib import rcParams
    from matplotlib.collections import LineCollection, PathCollection, QuadMesh
    from matplotlib.colors import to_hex, to_rgba
    from matplotlib.ticker import FixedLocator

    usual = to_rgba(rcParams["axes.facecolor"])
    for ax in figure.get_axes():
        ax.tick_params(colors=INK)
        if to_rgba(ax.get_facecolor()) == usual:  # a ground that was chosen stands for something, such as "no label"
            ax.set_facecolor("none")
        for collection in ax.collections:
            count = len(np.asarray(collection.get_offsets())) if isinstance(collection, PathCollection) else 0
            if isinstance(collection, LineCollection):
                count = len(collection.get_segments())
            if isinstance(collection, PathCollection) and _is(collection.get_facecolor(), "#000000"):
                collection.set_facecolor("#000001")  # an SVG leaves black out, and would take the theme's ink
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
            if to_hex(text.get_color()) not in ("#ffffff", "#111111"):  # which are on grounds of their own
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
    """A figure as inline SVG in the colours of the page.

    Args:
        figure: drawn on Axes that `paint` has seen; it is finished by this.
        alt: what the picture shows, in words.
        spots: places that say more under the pointer.

    Returns:
        An ``<svg>`` element of class wb-picture, as wide as the figure at 96 pixels per inch if there is room, in a ``<div>`` that only
        `STYLE` makes visible: what JupyterLab leaves of an SVG without styles, in a notebook that it does not trust, is loose words.

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
    with _no_words_on_glyphs():
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})
    width, height = (float(v) for v in figure.get_size_inches())
    colours = ";".join(f"{name}:{theme}" for name, theme in THEMED.values())
    # glyphs and the like that have no colour of their own would be black without `fill`
    return (
        f'<div class="wb-figure" style="display:none"><svg class="wb-picture" role="img" '
        f'aria-label="{html.escape(alt)}" width="{width * 96:.0f}" '
        f'style="{colours};fill:var(--i);font-family:{FONT}" viewBox="0 0 {width * 72:g} {height * 72:g}" '
        'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
        f"{_small(buffer.getvalue())}{''.join(_spot(spot, width * 72, height * 72) for spot in spots)}</svg></div>"
    )


@contextmanager
def _no_words_on_glyphs() -> Iterator[None]:
    """No warnings of letters that matplotlib's font lacks: the page's fonts have them, and in pixels the boxes are seen."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def _small(text: str) -> str:
    """The inside of matplotlib's SVG, in our colours, without what only makes it longer."""
    text = text[text.index(">", text.index("<svg")) + 1 : text.rindex("</svg>")]
    # one <style> of matplotlib's would change every element of the page
    text = re.sub(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</defs>", "", text, flags=re.S)
    glyphs = {match[2]: match[1] for match in re.finditer(r'(<path id="([\w-]+)".*?/>)', text, re.S)}
    text = re.sub(_TEXT, _words, text, flags=re.S)
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


# what matplotlib draws glyph by glyph, after a comment that says it
_TEXT = (
    r'<!-- ([^$]*?) -->\s*<g( style="[^"]*")? transform="translate\(([-\d.]+) ([-\d.]+)\)( rotate\([-\d.]+\))? '
    r'scale\(([\d.]+) -[\d.]+\)">(.*?)</g>'
)


def _words(match: re.Match[str]) -> str:
    """Glyphs as text again, as wide as they were drawn: a quarter of the size, in the font of the page."""
    said, style, x, y, turned, scale, inside = match.groups()
    *_, last = ["0", *re.findall(r"<use [^>]*translate\(([-\d.]+)", inside)]
    size = 100 * float(scale)
    wide = (float(last) + 60 if len(said) > 1 else 0) * float(scale)  # the last glyph is about so wide
    length = f' textLength="{wide:.1f}" lengthAdjust="spacingAndGlyphs"' if wide else ""
    return (
        f'<text{style or ""} font-size="{size:.4g}"{length} '
        f'transform="translate({float(x):.1f} {float(y):.1f}){turned or ""}">{said}</text>'
    )


def _path(d: str) -> str:
    return re.sub(r"\s*([A-Za-z])\s*", r"\1", re.sub(r"(\.\d)\d+", r"\1", d)).replace("\n", " ")


def _spot(spot: Spot, width: float, height: float) -> str:
    """One mark with its tip, in the points of an SVG; the layout of the figure has been computed."""
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
    said = [brief(line, int((width - 8) / 5.2)) for line in spot.lines]
    wide, high = 5.2 * max(map(len, said)) + 8, 11.5 * len(said) + 5
    tip_x = x + 8 if x + 8 + wide < width else max(x - 8 - wide, 0)
    tip_y = min(max(y - high / 2, 0) if spot.y is not None else y, height - high)
    lines = "".join(f'<tspan x="{tip_x + 4:.0f}" dy="11.5">{html.escape(line)}</tspan>' for line in said)
    return (
        f'<g class="wb-spot">{mark}<g class="wb-tip"><rect rx="2" x="{tip_x:.0f}" y="{tip_y:.0f}" '
        f'width="{wide:.0f}" height="{high:.0f}"/><text y="{tip_y - 1:.0f}">{lines}</text></g></g>'
    )


def png(figure: Figure, dpi: int = 110) -> bytes:
    """A figure as PNG on white, which every viewer shows.

    Args:
        figure: it is finished by this.
        dpi: pixels per inch.

    Example:
        >>> figure = new_figure(3, 2)
        >>> _ = paint(figure.subplots()).plot([1, 2, 4])
        >>> png(figure)[1:4]
        b'PNG'
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = io.BytesIO()
    with _no_words_on_glyphs():
        FigureCanvasAgg(finish(figure)).print_figure(
            buffer, format="png", dpi=dpi, facecolor="white", metadata={"Software": None}
        )
    return buffer.getvalue()


def small_png(figure: Figure | bytes, dpi: int) -> bytes:
    """A figure, or a PNG of one, as PNG with at most 64 colours, a third of the size; the figure is finished by this."""
    Image = require("PIL.Image")
    buffer, pixels = io.BytesIO(), figure if isinstance(figure, bytes) else png(figure, dpi)
    Image.open(io.BytesIO(pixels)).convert("RGB").quantize(64).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def image(data: bytes, alt: str, kind: str = "image/png", attributes: str = "") -> str:
    """An ``<img>`` element that holds its picture.

    Example:
        >>> image(b"...", "three dots")
        '<img src="data:image/png;base64,Li4u" alt="three dots">'
    """
    text = base64.b64encode(data).decode()
    return f'<img src="data:{kind};base64,{text}" alt="{html.escape(alt)}"{attributes and " " + attributes}>'


def display_static(page: str, figure: Figure | bytes, alt: str, style: str = "", dpi: int = 80) -> None:
    """Display a static picture in the cell that runs: as HTML, and as PNG for viewers that show no HTML.

    JupyterLab takes styles and SVG out of notebooks that it does not trust; the HTML then shows the PNG instead, which
    the style hides otherwise. So the picture is there on reopening without a kernel, trusted or not, and in reports.

    Args:
        page: HTML that shows all that the figure shows, with hover; no scripts.
        figure: the same as one figure, or as PNG.
        alt: what it shows, in words.
        style: CSS that the HTML needs beside `STYLE`.
        dpi: of the PNG, in pixels per inch.
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
