"""Figures of maps: image, truth, prediction and risks of the same pixels, side by side or overlaid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from workbench.errors import require
from workbench.plots._common import COLOURS, Array, Values, array, finite, new_axes, not_negative, risk_label, with_unit
from workbench.plots._images import (
    MAX_CLASSES,
    VOID,
    add_spare_bar,
    class_colours,
    draw_panel,
    holds_class_numbers,
    key_columns,
    pictures_of,
    shades_of,
)
from workbench.plots._texts import break_lines
from workbench.risk import Risk

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KEY_LINE = 0.17  # height in inches of a line of the legend of classes


def maps(
    image: Values,
    prediction: Values,
    truth: Values | None = None,
    risk: Risk | Mapping[str, Values] | Values | None = None,
    *,
    classes: Sequence[str] | None = None,
    void: int | None = None,
    unit: str = "",
    max_rows: int = 4,
    figure: Any = None,
) -> np.ndarray[Any, Any]:
    """Draw image, truth, prediction, error and risks in aligned columns, one row for each image.

    Each column has one scale for all rows. Truth and prediction share a scale, and so do aleatoric, epistemic and total risk, which have the
    same unit: equally dark means equally large.

    Args:
        image: [n, channels, height, width] of 1 or 3 channels, [n, height, width], or one image without the first dimension. Values outside
            0 to 1 (0 to 255 for integers) are rescaled by the range of all images drawn.
        prediction: class numbers (an integer dtype) or values (floating point), [n, height, width], [n, 1, height, width] or of one image. For
            class scores pass `scores.argmax(1)`.
        truth: the same for the targets; pixels that are `void` or NaN are hatched and have no error.
        risk: a `Risk`, a dict of maps by kind, or one map, taken as total risk; NaN is hatched, and a kind with one number per image is left
            out.
        classes: class names, by number.
        void: class number that stands for "no label".
        unit: unit of values and their risks, for the labels; entropies are in nats.
        max_rows: maximum number of images drawn, the first ones.
        figure: an empty matplotlib Figure with constrained layout to draw on; a new one of a fitting size if None.

    Returns:
        Array of the Axes [rows, columns].

    Raises:
        ValueError: for shapes that do not match, class scores, negative risks, an unknown kind, or more than 20 classes.

    Example:
        >>> import torch
        >>> labels = torch.zeros(2, 8, 8, dtype=torch.long)
        >>> axes = maps(torch.ones(2, 3, 8, 8), labels, labels, {"epistemic": torch.ones(2, 8, 8)}, classes=["road", "sky"])
        >>> [ax.get_title() for ax in axes[0]]
        ['image', 'truth', 'prediction', 'error', 'epistemic']
    """
    if max_rows < 1:
        raise ValueError(f"max_rows: expected at least 1, found {max_rows}")
    labels = holds_class_numbers(prediction)
    predicted = _stack(prediction, "prediction")[:max_rows]
    columns: dict[str, Array] = {"image": pictures_of(image, predicted.shape, max_rows)}
    if truth is not None:
        if holds_class_numbers(truth) != labels:
            raise ValueError(
                "truth and prediction: one holds class numbers (integers), the other values; for class scores pass scores.argmax(1)"
            )
        columns["truth"] = _like(_stack(truth, "truth")[:max_rows], predicted, "truth")
        if labels and void is not None:
            columns["truth"] = np.where(columns["truth"] == void, np.nan, columns["truth"])
    columns["prediction"] = predicted
    finite(prediction=predicted)
    if truth is not None:
        difference = np.abs(columns["truth"] - predicted)
        columns["error"] = np.where(np.isnan(difference), np.nan, difference > 0) if labels else difference
    risks = _risks(risk, predicted, max_rows)
    looks = _looks({**columns, **risks}, labels, classes, unit)
    if figure is None:
        height, width = predicted.shape[1:]
        size = 2.1 * (len(columns) + len(risks)), 2.1 * min(max(height / width, 0.4), 2.0) * len(predicted) + 0.9
        if len(unit) > 12:  # labels of two lines
            size = size[0], size[1] + KEY_LINE
        if labels and classes:
            size = size[0], size[1] + KEY_LINE * (-(-len(classes) // key_columns(classes, size[0], 8)) - 1)
        figure = require("matplotlib.pyplot").figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(predicted), len(columns) + len(risks), squeeze=False)
    for j, (name, values) in enumerate({**columns, **risks}.items()):
        axes[0, j].set_title(name, fontsize=12)
        drawn = [draw_panel(ax, row, **looks[name]) for ax, row in zip(axes[:, j], values, strict=True)]
        if name == "image" or (labels and name in ("truth", "prediction", "error")):
            add_spare_bar(figure, drawn[-1], axes[:, j])
        else:
            bar = figure.colorbar(
                drawn[-1], ax=axes[:, j].tolist(), location="bottom", fraction=0.06, pad=0.02, shrink=0.9, format="%g"
            )
            in_nats = "nats" if labels else ""
            bar.set_label(risk_label(name, unit or in_nats) if name in COLOURS else with_unit(name, unit), fontsize=9)
            break_lines(bar.ax.xaxis.label, 0.95 * figure.bbox.width / axes.shape[1])
            bar.ax.tick_params(labelsize=8)
            bar.ax.locator_params(nbins=3)
    if labels:
        _class_legend(figure, columns, looks, classes)
    return axes


def overlay(
    image: Values, risk: Values, ax: Axes | None = None, *, kind: str = "total", unit: str = "", strength: float = 0.85
) -> Axes:
    """Draw the risk of each pixel over a grey image, from transparent at zero risk to the colour of the risk at the highest.

    Args:
        image: [channels, height, width] of 1 or 3 channels, or [height, width].
        risk: [height, width] or [1, height, width], at least 0; NaN is hatched, and infinite risk drawn as the highest finite one.
        ax: Axes to draw on; a new figure if None.
        kind: which risk it is: aleatoric, epistemic, vacuitic or total; for colour and label.
        unit: unit of the risk, for the label.
        strength: opacity of the highest risk, 0 to 1.

    Returns:
        The Axes.

    Raises:
        ValueError: for shapes that do not match, negative risks, no finite risk, or an unknown kind.

    Example:
        >>> import torch
        >>> overlay(torch.ones(3, 8, 8), torch.ones(8, 8), kind="epistemic", unit="nats").get_title()
        'epistemic risk (nats)'
    """
    if not 0 <= strength <= 1:
        raise ValueError(f"strength: expected a number from 0 to 1, found {strength}")
    values = _stack(risk, "risk")
    if len(values) != 1:
        raise ValueError(f"risk: expected one map [height, width], found {list(values.shape)}; pick an image, risk[0]")
    title = risk_label(kind, unit)
    not_negative(risk=values)
    _some_finite(values, "risk")
    grey = pictures_of(image, values.shape, 1)[0].mean(-1)
    ax = new_axes(ax, (4.8, 4.2), linear="xy")
    ax.imshow(grey, cmap="gray", vmin=0, vmax=1)
    top = float(values[np.isfinite(values)].max()) or 1.0
    values = np.minimum(values, top)
    opacity = np.nan_to_num(values[0] / top) * strength
    drawn = draw_panel(ax, values[0], cmap=shades_of(kind, dark=False), vmin=0.0, vmax=top, alpha=opacity)
    bar = ax.figure.colorbar(drawn, ax=ax, fraction=0.046, pad=0.03)
    bar.solids.set_alpha(1)  # type: ignore[union-attr]  # otherwise the alpha of one pixel
    break_lines(ax.set_title(title), ax.get_window_extent().width)
    return ax


def _stack(value: Values, name: str) -> Array:
    """Convert [n, height, width], [n, 1, height, width] or one map to maps [n, height, width]."""
    result = array(value, name)
    if result.ndim == 4 and result.shape[1] == 1:
        result = result[:, 0]
    if result.ndim == 2:
        result = result[None]
    if result.ndim != 3:
        hint = "; for class scores pass scores.argmax(1)" if result.ndim == 4 else ""
        raise ValueError(
            f"{name}: expected [n, height, width] or one map [height, width], found {list(result.shape)}{hint}"
        )
    return result


def _like(values: Array, predicted: Array, name: str) -> Array:
    if values.shape != predicted.shape:
        raise ValueError(f"shapes do not match: {name} {list(values.shape)}, prediction {list(predicted.shape)}")
    return values


def _risks(risk: Any, predicted: Array, max_rows: int) -> dict[str, Array]:
    """Return maps of risk by kind, in the order of `COLOURS`."""
    if risk is None:
        return {}
    named = (
        {n: risk[n] for n in risk.names()}
        if isinstance(risk, Risk)
        else risk
        if isinstance(risk, Mapping)
        else {"total": risk}
    )
    maps_of = {}
    for name in named:
        risk_label(name)
        if isinstance(risk, Risk) and isinstance(named[name], torch.Tensor) and named[name].dim() < 2:
            continue  # one number per image, as vacuitic risk may be
        values = _like(_stack(named[name], f"risk.{name}")[:max_rows], predicted, f"risk.{name}")
        if name != "vacuitic":  # vacuitic risk is standardized, and negative for typical inputs
            not_negative(**{f"risk.{name}": values})
        _some_finite(values, f"risk.{name}")
        maps_of[name] = values
    return {name: maps_of[name] for name in COLOURS if name in maps_of}


def _some_finite(values: Array, name: str) -> None:
    if not np.isfinite(values).any():
        raise ValueError(f"{name}: none of its {values.size} values is a finite number")


def _looks(
    columns: Mapping[str, Array], labels: bool, classes: Sequence[str] | None, unit: str
) -> dict[str, dict[str, Any]]:
    """Return the colour map and limits of each column, as arguments of `imshow`."""
    looks: dict[str, dict[str, Any]] = {"image": {}}
    both = [columns[name] for name in ("truth", "prediction") if name in columns]
    if labels:
        top = max(int(np.nanmax(v)) if np.isfinite(v).any() else 0 for v in both)
        low = min(int(np.nanmin(v)) if np.isfinite(v).any() else 0 for v in both)
        n = max(top + 1, len(classes or ()))
        if low < 0 or n > MAX_CLASSES:
            raise ValueError(
                f"class numbers go from {low} to {top}, and maps draws 0 to {MAX_CLASSES - 1}; "
                f"if {low if low < 0 else top} stands for pixels without a label, give void={low if low < 0 else top}"
            )
        if classes is not None and len(classes) <= top:
            raise ValueError(f"classes: {len(classes)} names, and class number {top} is among the maps")
        shared = {"cmap": class_colours(n), "vmin": -0.5, "vmax": n - 0.5, "interpolation": "nearest"}
        looks |= {"truth": shared, "prediction": shared}
        from matplotlib.colors import ListedColormap

        looks["error"] = {"cmap": ListedColormap(["white", "black"]), "vmin": 0, "vmax": 1, "interpolation": "nearest"}
    else:
        shared = {"cmap": "viridis", **_limits(both)}
        looks |= {"truth": shared, "prediction": shared}
        if "error" in columns:
            looks["error"] = {"cmap": "Greys", **_limits([columns["error"]], bottom=0.0)}
    deviations = [columns[name] for name in ("aleatoric", "epistemic", "total") if name in columns]
    for name in COLOURS:
        if name in columns:
            limits = _limits([columns[name]]) if name == "vacuitic" else _limits(deviations, bottom=0.0)
            looks[name] = {"cmap": shades_of(name), **limits}
    return looks


def _limits(values: Sequence[Array], bottom: float | None = None) -> dict[str, float]:
    """Return the limits of all finite values; infinite ones are drawn as the highest."""
    numbers = np.concatenate([v[np.isfinite(v)] for v in values])
    low = float(numbers.min()) if bottom is None and numbers.size else bottom or 0.0
    high = float(numbers.max()) if numbers.size else 1.0
    return {"vmin": low, "vmax": high if high > low else low + 1.0}


def _class_legend(
    figure: Any, columns: Mapping[str, Array], looks: Mapping[str, Any], classes: Sequence[str] | None
) -> None:
    """Add a legend of the classes drawn, and of the hatching."""
    from matplotlib.patches import Patch

    maps_of = [columns[name] for name in ("truth", "prediction") if name in columns]
    numbers = np.unique(np.concatenate([v[np.isfinite(v)] for v in maps_of])).astype(int)
    palette = looks["prediction"]["cmap"]
    handles = [Patch(color=palette(i), label=classes[i] if classes else f"class {i}") for i in numbers]
    if any(np.isnan(v).any() for v in maps_of):
        handles.append(Patch(facecolor=VOID, edgecolor="white", hatch="////", label="no label"))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=key_columns([str(handle.get_label()) for handle in handles], figure.get_figwidth(), 8),
        fontsize=9,
        frameon=False,
        handlelength=1.2,
    )
