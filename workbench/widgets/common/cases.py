"""Cases as HTML: predictions of single rows, with the risk split by cause; no scripts, no kernel, no widgets.

Colours follow JupyterLab's theme where there is one. In an untrusted notebook, which drops the style sheet, bars keep their
colours and the numbers shown on hover are always visible.
"""

from __future__ import annotations

import html
import io
import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.calibration.models import output_of
from workbench.data import Data, Split
from workbench.errors import require
from workbench.plots import COLOURS
from workbench.widgets.common.pictures import brief, image
from workbench.widgets.common.predictions import Predictions, per_row, predict_cases, risk_unit

MAX_COLUMNS = 8  # features shown in a row of a table
MAX_PIXELS = 64  # height and width of a thumbnail, which the page enlarges
CAUSES = ("aleatoric", "epistemic")
MAX_RANGED = 2**22  # pixels among which black and white of thumbnails are found
FULL_VACUITIC = 4.0  # vacuitic risk, in standard deviations, at which its bar is full

#: CSS that cases need once on a page; all selectors are classes of this package.
STYLE = """
.wb-cases{display:flex;flex-wrap:wrap;gap:8px;line-height:1.35;font-size:12px;color:var(--jp-ui-font-color1,inherit)}
.wb-case{position:relative;box-sizing:border-box;padding:6px;border-radius:4px;text-align:left;overflow-wrap:anywhere;
border:1px solid var(--jp-border-color2,color-mix(in srgb,currentColor 25%,transparent));
background:var(--jp-layout-color1,transparent);line-height:1.35}
.wb-cases .wb-case{width:128px}
.wb-case img{display:block;width:100%;image-rendering:pixelated;border-radius:2px;margin:2px 0 4px;max-height:150px;object-fit:contain}
.wb-case b,.wb-listing b{font-weight:600}
.wb-name{color:var(--jp-ui-font-color2,color-mix(in srgb,currentColor 72%,transparent))}
.wb-wrong{color:color-mix(in srgb,var(--jp-error-color1,#d32f2f) 65%,var(--jp-ui-font-color1,currentColor))}
.wb-split{margin:4px 0 1px;min-width:80px;text-align:left}
.wb-split div{font-size:0;line-height:0;border-radius:1px;overflow:hidden;
background:var(--jp-layout-color3,color-mix(in srgb,currentColor 15%,transparent))}
.wb-split .wb-shares{height:9px}
.wb-split .wb-far{height:5px;margin-top:2px}
.wb-more{visibility:hidden;position:absolute;left:0;right:0;bottom:0;min-height:60%;box-sizing:border-box;padding:5px 6px;z-index:2;
background:var(--jp-layout-color0,Canvas);color:var(--jp-ui-font-color1,CanvasText);
border-radius:4px;font-size:11px;pointer-events:none}
.wb-case:hover .wb-more,.wb-case:focus .wb-more,tr:hover>td>.wb-more,tr:focus>td>.wb-more{visibility:visible}
.wb-wide{overflow-x:auto;max-width:100%;padding-bottom:20px}
.wb-listing{border-collapse:collapse;font-size:12px;line-height:1.35;color:var(--jp-ui-font-color1,inherit)}
.wb-listing caption,.wb-caption{text-align:left;font-size:12px;line-height:1.35;padding:2px 0 4px;
color:var(--jp-ui-font-color2,color-mix(in srgb,currentColor 72%,transparent))}
.wb-listing th,.wb-listing td{padding:3px 8px;text-align:right;position:relative;
border-bottom:1px solid var(--jp-border-color2,color-mix(in srgb,currentColor 20%,transparent))}
.wb-listing th{font-weight:600;vertical-align:bottom;box-sizing:content-box;min-width:7em;max-width:14em;overflow-wrap:break-word}
.wb-listing th:first-child,.wb-listing td:first-child{text-align:left}
.wb-listing th:first-child{overflow-wrap:normal;min-width:0}
.wb-listing td{white-space:nowrap;font-variant-numeric:tabular-nums}
.wb-listing td>b{display:inline-block;max-width:22em;white-space:normal;overflow-wrap:break-word}
.wb-listing tr:hover>td{background:rgba(128,128,128,.15)}
.wb-listing .wb-more{right:auto;bottom:auto;top:-1px;min-height:100%;width:280px;white-space:normal;text-align:left;
box-shadow:0 1px 4px rgba(0,0,0,.4)}
.wb-listing .wb-split{min-width:110px}
"""


@dataclass(frozen=True)
class Case:
    """One row with its prediction and risks as text, ready for display.

    Args:
        name: name of the row, such as "row 17".
        inputs: (name and unit, value) of each feature; empty for images.
        picture: an ``<img>`` element, or "".
        prediction: prediction with its total risk and unit.
        truth: target; "" if not known.
        wrong: whether the predicted class is not the true one.
        risks: (name, value with unit) of each risk.
        shares: shares of aleatoric and epistemic risk in the total, which sum to 1; empty without these risks.
        vacuitic: vacuitic risk, in standard deviations; None if not measured.
        likely: (class, probability) of the most likely classes.
    """

    name: str
    inputs: tuple[tuple[str, str], ...]
    picture: str
    prediction: str
    truth: str
    wrong: bool
    risks: tuple[tuple[str, str], ...]
    shares: dict[str, float]
    vacuitic: float | None
    likely: tuple[tuple[str, float], ...] = ()


# ---- rows as text
def cases(
    data: Data, x: Tensor, answers: Predictions, names: Sequence[str], y: Tensor | None = None, output: str = "values"
) -> list[Case]:
    """Return a `Case` for each row.

    Args:
        data: has names and units of columns and classes; its training rows set the range from black to white of thumbnails.
        x: inputs [n, ...].
        answers: predictions and risks of the rows.
        names: name of each row.
        y: targets, values [n, 1] or class numbers [n]; None if not known.
        output: what the model gives: "values", "logits" or "probs".
    """
    pictured = x.ndim > 2
    described = []
    for i, name in enumerate(names):
        risks = {risk: values[i].item() for risk, values in answers.risk.items()}
        likely: tuple[tuple[str, float], ...] = ()
        truth, wrong = "", False
        if data.classes is None or answers.probs is None:
            prediction = with_spread(answers.y[i].item(), risks.get("total"), data.target.unit)
            truth = "" if y is None else format_number(y[i].item(), data.target.unit)
        else:
            best = answers.probs[i].topk(min(3, len(data.classes)))
            likely = tuple(
                (data.classes[j], p) for p, j in zip(best.values.tolist(), best.indices.tolist(), strict=True)
            )
            prediction = class_and_share(*likely[0])
            if y is not None:
                truth = data.classes[int(y[i])]
                wrong = truth != likely[0][0]
        described.append(
            Case(
                name,
                () if pictured else tuple(zip(map(str, data.features), map(_feature, x[i]), strict=False)),
                thumbnail(x[i], data.train.x, name) if pictured else "",
                prediction,
                truth,
                wrong,
                tuple((risk, format_number(value, risk_unit(data, output, risk), 3)) for risk, value in risks.items()),
                shares(risks, output),
                risks.get("vacuitic"),
                likely,
            )
        )
    return described


def shares(risks: dict[str, float], output: str) -> dict[str, float]:
    """Return the aleatoric and epistemic shares of the total: of the variance for values, of the entropy for classes.

    Example:
        >>> shares({"aleatoric": 3.0, "epistemic": 4.0}, "values")
        {'aleatoric': 0.36, 'epistemic': 0.64}
    """
    power = 2 if output == "values" else 1
    parts = {name: max(risks[name], 0.0) ** power for name in CAUSES if name in risks}
    whole = sum(parts.values())
    return {name: variance / whole for name, variance in parts.items()} if 0 < whole < math.inf else {}


def exact(value: Tensor) -> str:
    """Format a number with the fewest digits that identify it in its precision, which are usually those of the data file.

    Example:
        >>> exact(torch.tensor(209.8)), torch.tensor(209.8).item(), exact(torch.tensor(491.0))
        ('209.8', 209.8000030517578, '491')
    """
    value = value.detach().cpu()
    number: Any = (value.float() if value.dtype == torch.bfloat16 else value).numpy()[()]
    if value.is_floating_point() and 1e-4 <= abs(number) < 1e9:
        return np.format_float_positional(number, trim="-")
    return str(number).removesuffix(".0")


def description_options(label: str) -> dict[str, Any]:
    r"""Return the arguments that set a label as description of a widget.

    The label is plain text, or escaped HTML if it has two dollar signs or a backslash, from which JupyterLab would typeset a formula.

    Example:
        >>> description_options("price <$>")
        {'description': 'price <$>', 'description_allow_html': False}
        >>> description_options("<$10k to $20k")["description"]
        '&lt;<span>&#36;</span>10k to <span>&#36;</span>20k'
        >>> description_options(r"\(z\)")["description"]
        '<span>&#92;</span>(z<span>&#92;</span>)'
    """
    if label.count("$") < 2 and "\\" not in label:
        return {"description": label, "description_allow_html": False}
    separated = html.escape(label).replace("$", "<span>&#36;</span>").replace("\\", "<span>&#92;</span>")
    return {"description": separated, "description_allow_html": True}


def _feature(value: Tensor) -> str:
    """Format a feature as in the data, rounded if it has more than six digits."""
    text = exact(value)
    return text if len(text.strip("-0.").replace(".", "")) <= 6 else format_number(value.item())


def isolated(name: str) -> str:
    """Return a name for use beside numbers, which one written from right to left would otherwise move to its other side."""
    leftward = any(unicodedata.bidirectional(letter) in ("R", "AL") for letter in name)
    return f"\u2068{name}\u2069" if leftward else name


def class_and_share(name: str, share: float) -> str:
    """Format a class with its probability, or share of votes.

    Example:
        >>> class_and_share("top", 0.428)
        'top, 43 %'
    """
    return f"{isolated(name)}, {100 * share:.0f} %"


def table_head(name: str, attributes: str = "", most: int = 48) -> str:
    """Return the head of a column or row of a table as HTML; a long name is shortened, and in full in its tooltip."""
    short = brief(name, most)
    title = "" if short == name else f' title="{html.escape(name)}"'
    return f"<th{attributes}{title}>{html.escape(short)}</th>"


def format_number(value: float, unit: str = "", digits: int = 4) -> str:
    """Format a number with a few digits and its unit.

    Example:
        >>> format_number(34.1234, "MPa"), format_number(0.0), format_number(1234.5, digits=2)
        ('34.12 MPa', '0', '1234')
    """
    text = f"{value:.0f}" if 10**digits <= abs(value) < 1e7 else f"{value:.{digits}g}"
    text = f"{value:.0f}" if "e+" in text and abs(value) < 1e7 else text  # rounded up to the next power of ten
    return f"{text} {unit}" if unit else text


def with_spread(value: float, spread: float | None, unit: str = "") -> str:
    """Format a value ± its standard deviation, the latter with two significant digits and the value to the same precision.

    Example:
        >>> with_spread(34.1234, 4.126, "MPa"), with_spread(34.1234, None), with_spread(242.1, 104.3)
        ('34.1 ± 4.1 MPa', '34.12', '242 ± 104')
    """
    if spread is None or not 0 < spread < math.inf:
        return format_number(value, unit)
    digits = max(1 - math.floor(math.log10(spread)), 0)
    if digits > 8 or spread >= 1e7:
        return f"{format_number(value)} ± {spread:.2g} {unit}".rstrip()
    return f"{value:.{digits}f} ± {spread:.{digits}f} {unit}".rstrip()


def thumbnail(x: Tensor, like: Tensor, alt: str) -> str:
    """Return an image as an ``<img>`` element.

    Args:
        x: [channels, height, width] or [height, width]; more or fewer than three channels are averaged.
        like: rows whose minimum and maximum are black and white; of large images, those of some pixels of each.
        alt: alternative text.
    """
    Image = require("PIL.Image")
    step = max(1, math.isqrt(like.numel() // MAX_RANGED))
    low, high = pixel_range(like[..., ::step, ::step])
    pixels = x.detach().float()
    factor = min(x.shape[-2:]) // (4 * MAX_PIXELS)
    if factor > 1:  # large images are reduced before anything else is made of them
        pixels = F.avg_pool2d(pixels if x.ndim == 3 else pixels[None], factor).reshape(
            *x.shape[:-2], x.shape[-2] // factor, x.shape[-1] // factor
        )
    pixels = pixels.cpu()
    if pixels.ndim == 3:
        pixels = pixels.permute(1, 2, 0) if len(pixels) == 3 else pixels.mean(0)
    shade = ((pixels - low) / (high - low)).clamp(0, 1).mul(255).round().byte().numpy()
    picture = Image.fromarray(shade)
    picture.thumbnail((MAX_PIXELS, MAX_PIXELS))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return image(buffer.getvalue(), alt)


def pixel_range(like: Tensor) -> tuple[float, float]:
    """Return minimum and maximum of the pixels of at most a few hundred rows; the maximum is always larger."""
    low, high = (float(v) for v in like[:: max(1, len(like) // 500)].aminmax())
    return low, high if high > low else low + 1.0


# ---- HTML
def split_bar(case: Case, output: str = "values") -> str:
    """Return the risk of a case as a bar split by cause, with vacuitic risk as a second bar below."""
    words = [f"{name} {100 * share:.0f} %" for name, share in case.shares.items()]
    parts = []
    if case.shares:
        strips = "".join(_strip(COLOURS[name], share, 9) for name, share in case.shares.items())
        parts.append(f'<div class="wb-shares" style="max-width:320px">{strips}</div>')
    if case.vacuitic is not None:
        words.append(f"vacuitic {case.vacuitic:.2g} of {FULL_VACUITIC:g} sd")
        strip = _strip(COLOURS["vacuitic"], min(max(case.vacuitic / FULL_VACUITIC, 0.0), 1.0), 5)
        parts.append(f'<div class="wb-far" style="max-width:320px">{strip}</div>')
    if not parts:
        return ""
    of = "variance" if output == "values" else "entropy"
    return (
        f'<div class="wb-split" role="img" aria-label="share of the {of}: {html.escape(", ".join(words))}">'
        f"{''.join(parts)}</div>"
    )


def _strip(colour: str, share: float, height: int) -> str:
    return f'<span style="display:inline-block;height:{height}px;width:{100 * share:.1f}%;background-color:{colour}"></span>'


def figures(case: Case, separator: str = "<br>") -> str:
    """Return all numbers of a case as HTML: each risk with its share, and the most likely classes."""
    lines = []
    for name, value in case.risks:
        share = f" ({100 * case.shares[name]:.0f} %)" if name in case.shares and len(case.shares) > 1 else ""
        colour = "currentColor" if name == "total" else COLOURS[name]
        lines.append(f'<span style="color:{colour}">■</span> {name} {html.escape(value)}{share}')
    likely = [html.escape(class_and_share(name, p)) for name, p in case.likely]
    return separator.join([*lines, *likely])


def verdict(case: Case) -> str:
    """Return prediction and truth as HTML, marked if the class is wrong."""
    truth = f"<br>true: {html.escape(case.truth)}" if case.truth else ""
    return f'<b class="{"wb-wrong" if case.wrong else "wb-right"}">{html.escape(case.prediction)}</b>{truth}'


def card(case: Case, output: str = "values", hover: bool = True) -> str:
    """Return a case as a card, whose numbers appear on hover or focus, or always."""
    more = figures(case)
    shown = f'<div class="wb-more">{more}</div>' if hover else f'<div class="wb-figures">{more}</div>'
    kind, focus = "wb-case wb-pictured" if case.picture else "wb-case", " tabindex=0" if hover else ""
    return (
        f'<div class="{kind}"{focus}><span class="wb-name">{html.escape(case.name)}</span>{case.picture}'
        f"<div>{verdict(case)}</div>{split_bar(case, output)}{shown if more else ''}</div>"
    )


def gallery(described: Iterable[Case], caption: str = "", output: str = "values") -> str:
    """Return cases as a grid of cards."""
    head = f'<div class="wb-caption">{html.escape(caption)}</div>' if caption else ""
    return f'{head}<div class="wb-cases">{"".join(card(case, output) for case in described)}</div>'


def listing(described: Sequence[Case], caption: str = "", output: str = "values") -> str:
    """Return cases as the rows of a table: prediction, truth, risk split by cause, and feature values with units."""
    if not described:
        return f'<div class="wb-caption">{html.escape(caption)}</div>'
    names = [name for name, _ in described[0].inputs]
    if len(names) > MAX_COLUMNS:
        caption = f"{caption} ({MAX_COLUMNS} of {len(names)} features shown)".strip()
    names = names[:MAX_COLUMNS]
    risky = any(case.risks for case in described)
    known = any(case.truth for case in described)
    heads = ["", "prediction", *(["true"] if known else []), *(["risk by cause"] if risky else []), *names]
    rows = []
    for case in described:
        cells = [html.escape(case.name)]
        cells.append(f'<b class="{"wb-wrong" if case.wrong else "wb-right"}">{html.escape(case.prediction)}</b>')
        cells += [html.escape(case.truth)] if known else []
        cells += [f'{split_bar(case, output)}<div class="wb-more">{figures(case, " &nbsp; ")}</div>'] if risky else []
        cells += [html.escape(value) for _, value in case.inputs[:MAX_COLUMNS]]
        rows.append(f"<tr tabindex=0>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return (
        f'<div class="wb-wide"><table class="wb-listing"><caption>{html.escape(caption)}</caption>'
        f"<thead><tr>{''.join(map(table_head, heads))}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def render_cases(described: Sequence[Case], caption: str, output: str) -> str:
    """Return cases as cards if they are pictures, and as a table otherwise."""
    return (gallery if any(case.picture for case in described) else listing)(described, caption, output)


def grid(
    wrapped: Any,
    data: Data,
    rows: Tensor | Sequence[int] | None = None,
    by: str = "total",
    *,
    k: int = 12,
    split: Split | None = None,
    caption: str = "",
) -> str:
    """Return the cases of highest risk, or given ones, as HTML: a grid of cards for images, a table otherwise.

    Each case has its prediction, its true value and its risk split by cause, with the numbers on hover. The page needs no script and
    no kernel, and fits light and dark themes.

    Args:
        wrapped: trained wrapped model, or calibrated model.
        data: data set, with names, units and classes.
        rows: row numbers; the k highest if None.
        by: ranking if rows is None: a risk, "confidence" or "error".
        k: number of cases if rows is None.
        split: split that the rows are from; the test rows if None.
        caption: line above the cases.

    Returns:
        HTML with its own style.

    Raises:
        ValueError: if there are no rows, or the model does not measure this risk.

    Example:
        >>> from workbench import data, vote
        >>> diabetes = data.load("diabetes")
        >>> page = grid(vote.Wrapper(3)(torch.nn.Linear(10, 1)), diabetes, by="epistemic", k=4)
        >>> page.count("<tr"), "body mass index (kg/m2)" in page
        (5, True)
    """
    rows_of = data.test if split is None else split
    output = output_of(wrapped)
    if rows is None:
        answers = predict_cases(wrapped, data, rows_of.x)
        chosen = per_row(answers, by, rows_of.y).sort(descending=True, stable=True).indices[:k]
        answers = answers.take(chosen)
    else:
        chosen = torch.as_tensor(rows, dtype=torch.int64)
        answers = predict_cases(wrapped, data, rows_of.x[chosen])
    names = [f"row {row}" for row in chosen.tolist()]
    page = render_cases(cases(data, rows_of.x[chosen], answers, names, rows_of.y[chosen], output), caption, output)
    return f"<style>{STYLE}</style>{page}"


__all__ = [
    "STYLE",
    "Case",
    "card",
    "cases",
    "class_and_share",
    "gallery",
    "grid",
    "isolated",
    "listing",
    "render_cases",
    "split_bar",
    "table_head",
]
