"""Edit a case by hand: the features of a table row, or brightness, rotation, blur, noise and so on of a picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.data import Data
from workbench.data.frames import FrameEncoding
from workbench.errors import require
from workbench.widgets.common.cases import description_options, exact, pixel_range

MAX_SLIDERS = 8  # shown at once


@dataclass(frozen=True)
class Knob:
    """One property of a case that can be edited.

    Args:
        name: name in `edit`.
        label: name with unit.
        low: minimum of its slider.
        high: maximum of its slider.
        step: step of its slider.
        tip: tooltip.
        neutral: value that changes nothing; that of the case if None.
        index: number of the column, for a table.
    """

    name: str
    label: str
    low: float
    high: float
    step: float
    tip: str
    neutral: float | None = None
    index: int = 0


def table_knobs(data: Data) -> dict[str, Knob]:
    """Return a knob for each feature, over its range in the training rows; none for features that are constant there."""
    knobs: dict[str, Knob] = {}
    low, high = data.train.x.aminmax(dim=0)
    for i, column in enumerate(data.features):
        first, last = low[i].item(), high[i].item()
        if not last > first:
            continue
        whole = bool((data.train.x[:, i] == data.train.x[:, i].round()).all())
        step = 1.0 if whole and last - first <= 1000 else nice_step((last - first) / 200)
        tip = f"{column}, from {exact(low[i])} to {exact(high[i])} in the training rows"
        name = column.name if column.name not in knobs else f"{column.name} [{i}]"
        knobs[name] = Knob(name, str(column), first, last, step, tip, None, i)
    return knobs


def other_categories(data: Data) -> dict[int, list[int]]:
    """Return for each column of a one-hot encoded category the columns of the other categories."""
    others: dict[int, list[int]] = {}
    if isinstance(data.encoding, FrameEncoding):
        first = 0
        for part in data.encoding.parts:
            group = range(first, first := first + len(part.columns))
            if part.kind == "category":
                others |= {i: [j for j in group if j != i] for i in group}
    return others


def nice_step(width: float) -> float:
    """Return the largest of 1, 2 and 5 times a power of ten that is at most `width`.

    Example:
        >>> nice_step(0.034)
        0.02
    """
    power = 10.0 ** math.floor(math.log10(width))
    return float(f"{power * next(k for k in (5, 2, 1) if k * power <= width * (1 + 1e-9)):.12g}")


PICTURE_KNOBS = {
    knob.name: knob
    for knob in (
        Knob("noise", "noise", 0, 0.5, 0.01, "standard deviation of added noise, as a share of the range of pixels", 0),
        Knob("brightness", "brightness", -0.5, 0.5, 0.01, "added to all pixels, as a share of their range", 0),
        Knob("contrast", "contrast", 0, 2, 0.02, "factor of the distance of pixels from their mean", 1),
        Knob("rotation", "rotation (°)", -180, 180, 1, "angle, anticlockwise", 0),
        Knob("blur", "blur (pixels)", 0, 4, 0.1, "standard deviation of a Gaussian", 0),
        Knob("erase", "erase (share)", 0, 1, 0.02, "side of a grey square, as a share of the shorter side", 0),
        Knob("across", "erase: across", 0, 1, 0.02, "centre of the square, from left to right", 0.5),
        Knob("down", "erase: down", 0, 1, 0.02, "centre of the square, from top to bottom", 0.5),
    )
}


def altered(x: Tensor, limits: tuple[float, float], changes: Mapping[str, float], seed: int = 0) -> Tensor:
    """Rotate a picture, blur it, change contrast and brightness, add noise and erase a square, in this order.

    Args:
        x: picture [..., height, width]; it is not changed.
        limits: minimum and maximum of a pixel; values outside are clipped.
        changes: values of the knobs noise, brightness, contrast, rotation, blur, erase, across and down.
        seed: seed of the noise, so that it stays the same while its strength changes.

    Returns:
        The picture, of the same shape; without changes it is bitwise equal.

    Example:
        >>> picture = torch.eye(8)[None]
        >>> torch.equal(altered(picture, (0.0, 1.0), {"rotation": 90})[0].round(), torch.eye(8).flip(1))
        True
    """
    values: dict[str, Any] = {name: knob.neutral for name, knob in PICTURE_KNOBS.items()} | dict(changes)
    low, high = limits
    height, width = x.shape[-2:]
    picture = x.detach().cpu().clone().reshape(1, -1, height, width)
    if angle := values["rotation"]:
        picture = _rotated(picture - low, math.radians(angle)) + low  # corners become black
    if sigma := values["blur"]:
        picture = _blurred(picture, sigma)
    if (factor := values["contrast"]) != 1:
        picture = picture.mean() + factor * (picture - picture.mean())
    if light := values["brightness"]:
        picture = picture + light * (high - low)
    if strength := values["noise"]:
        drawn = torch.randn(picture.shape, generator=torch.Generator().manual_seed(seed), dtype=picture.dtype)
        picture = picture + strength * (high - low) * drawn
    if any(values[name] != PICTURE_KNOBS[name].neutral for name in ("rotation", "contrast", "brightness", "noise")):
        picture = picture.clamp(low, high)
    if share := values["erase"]:
        side = max(1, round(share * min(height, width)))
        top, left = (round(values[k] * n - side / 2) for k, n in (("down", height), ("across", width)))
        picture[..., max(top, 0) : max(top + side, 0), max(left, 0) : max(left + side, 0)] = (low + high) / 2
    return picture.reshape(x.shape)


def _rotated(x: Tensor, angle: float) -> Tensor:
    """Rotate anticlockwise about the centre, with bilinear interpolation and 0 outside the picture."""
    height, width = x.shape[-2:]
    cos, sin, ratio = math.cos(angle), math.sin(angle), height / width
    matrix = torch.tensor([[[cos, -sin * ratio, 0.0], [sin / ratio, cos, 0.0]]], dtype=x.dtype)
    grid = F.affine_grid(matrix, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def _blurred(x: Tensor, sigma: float) -> Tensor:
    """Blur with a Gaussian truncated at three standard deviations, repeating the edges."""
    channels, reach = x.shape[1], max(1, math.ceil(3 * sigma))
    weights = torch.exp(-0.5 * (torch.arange(-reach, reach + 1, dtype=x.dtype) / sigma) ** 2)
    weights = (weights / weights.sum()).expand(channels, 1, -1)
    x = F.pad(x, [reach] * 4, mode="replicate")
    x = F.conv2d(x, weights[..., None, :], groups=channels)
    return F.conv2d(x, weights[..., None], groups=channels)


class Editor:
    """A slider and a number box for each knob of a case; without a browser, `set` changes them.

    Browsers round sliders to whole steps; the number box shows the exact value that the model gets.

    Args:
        data: data set of the cases.
        on_change: called without arguments after a change.
    """

    def __init__(self, data: Data, on_change: Callable[[], None]) -> None:
        w = require("ipywidgets")
        self.pictured = len(data.input_shape) > 1
        self.knobs = PICTURE_KNOBS if self.pictured else table_knobs(data)
        self._limits = pixel_range(data.train.x)
        self._on_change = on_change
        self._x = data.train.x[0]
        self._columns = [column.name for column in data.features]
        knob_at = {} if self.pictured else {knob.index: name for name, knob in self.knobs.items()}
        self._others = {  # knobs of the other categories, as a row has exactly one category
            knob_at[i]: [knob_at[j] for j in others if j in knob_at]
            for i, others in ({} if self.pictured else other_categories(data)).items()
            if i in knob_at
        }
        self._sliders: dict[str, Any] = {}
        self._numbers: dict[str, Any] = {}
        self._updating = False
        self.changes: dict[str, float] = {}
        self.active = next(iter(self.knobs), "")  # the knob changed last
        self._box = w.VBox([], layout={"overflow": "hidden"})
        self.choice = w.Dropdown(
            options=list(self.knobs),
            description="feature",
            layout={"width": "auto"},
            style={"description_width": "64px"},
        )
        self.choice.tooltip = "Show the slider of this feature on top"
        self.reset_button = w.Button(
            description="Reset", icon="undo", tooltip="Undo all edits", layout={"width": "90px"}
        ).add_class("wb-reset")
        self._shown = list(self.knobs)[:MAX_SLIDERS]
        self._arrange()
        many = len(self.knobs) > MAX_SLIDERS
        self.widget = w.VBox([*([self.choice] if many else []), self._box, self.reset_button]).add_class("wb-edit")
        self.choice.observe(lambda change: self._choose(change["new"]), "value")
        self.reset_button.on_click(lambda _: self._reset())

    # ---- without a browser
    def load(self, x: Tensor) -> None:
        """Load another case, and set all sliders to its values."""
        self._x = x
        self.restore({})

    def set(self, changes: Mapping[str | int, float]) -> None:
        """Change some of the knobs, and keep the others; `on_change` is not called.

        Args:
            changes: values by name, or for tables by column number.

        Raises:
            KeyError: if there is no such knob.
            ValueError: if a column is constant in the training rows, or a value is not finite.
        """
        named = {}
        for key, value in changes.items():
            number = isinstance(key, int) and not self.pictured
            name = next((knob.name for knob in self.knobs.values() if number and knob.index == key), key)
            if name not in self.knobs:
                self._refuse(key)
            if isinstance(value, str) or not math.isfinite(value):
                raise ValueError(f"{name}: found {value!r}; give a finite number")
            named[str(name)] = float(value)
        for name, value in named.items():
            self._note(name, value, keep=named)
            self.show_slider(name)
            self._place(name)

    def _refuse(self, key: str | int) -> None:
        """Raise an error for what can't be edited, a name or the number of a column."""
        name = self._columns[key] if isinstance(key, int) and 0 <= key < len(self._columns) else key
        known = f"there are {', '.join(self.knobs)}" if self.knobs else "no other feature varies either"
        if name in self._columns and not self.pictured:
            raise ValueError(
                f"{name}: it is constant in the training rows, so that the model has learned nothing about it; edit another feature: {known}"
            )
        raise KeyError(f"there is no {key!r} to edit; {known}")

    def restore(self, changes: Mapping[str, float]) -> None:
        """Replace all changes by these."""
        self.changes = dict(changes)
        for name in self._sliders:
            self._place(name)

    def _reset(self) -> None:
        self.restore({})
        self._on_change()

    def neutral(self, name: str) -> float:
        """Return the value of a knob that changes nothing."""
        knob = self.knobs[name]
        return self._x[knob.index].item() if knob.neutral is None else knob.neutral

    def value(self, name: str) -> float:
        """Return the current value of a knob."""
        return self.changes.get(name, self.neutral(name))

    def text(self, name: str) -> str:
        """Return the current value of a knob as text, exactly as the model gets it."""
        return exact(self._rounded(name, self.value(name)))

    def _rounded(self, name: str, value: float) -> Tensor:
        """Return a value in the dtype of the data."""
        return torch.tensor(value, dtype=torch.float32 if self.pictured else self._x.dtype)

    def applied(self, changes: Mapping[str, float]) -> Tensor:
        """Return the input of the case with these changes."""
        if self.pictured:
            return altered(self._x, self._limits, changes)
        x = self._x.clone()
        for name, value in changes.items():
            x[self.knobs[name].index] = value
        return x

    # ---- sliders
    def show_slider(self, name: str) -> None:
        """Show the slider of a knob, if it is not shown yet."""
        if name not in self._shown:
            changed = [n for n in self._shown if n in self.changes]
            others = [n for n in self._shown if n not in self.changes]
            self._shown = [name, *changed, *others][: max(MAX_SLIDERS, len(changed) + 1)]
            self._arrange()

    def _choose(self, name: str) -> None:
        self.active = name
        self.show_slider(name)

    def _arrange(self) -> None:
        for name in self._shown:
            if name not in self._sliders:
                self._sliders[name] = self._slider(self.knobs[name])
                self._numbers[name] = self._number(self.knobs[name])
                self._place(name)
        self._box.children = [self._row(name) for name in self._shown]

    def _row(self, name: str) -> Any:
        w = require("ipywidgets")
        return w.HBox(
            [self._sliders[name], self._numbers[name]], layout={"flex_flow": "row wrap", "justify_content": "flex-end"}
        )

    def _number(self, knob: Knob) -> Any:
        w = require("ipywidgets")
        number = w.FloatText(
            step=knob.step,
            **description_options(knob.label),  # for screen readers only: the slider shows it
            tooltip=f"{knob.tip}: what the model gets",
            layout={"width": "136px", "flex": "none"},  # wide enough for all digits of a float32
        ).add_class("wb-number")
        number.observe(lambda change, name=knob.name: self._typed(name, change["new"]), "value")
        return number

    def _slider(self, knob: Knob) -> Any:
        w = require("ipywidgets")
        slider = w.FloatSlider(
            value=knob.low,
            min=knob.low,
            max=knob.high,
            step=knob.step,
            **description_options(knob.label),
            readout=False,  # a readout would show the nearest whole step
            tooltip=knob.tip,
            style={"description_width": "min(190px, 45%)"},
            layout={"width": "auto", "flex": "1 1 170px", "min_width": "0"},
        )
        slider.observe(lambda change, name=knob.name: self._moved(name, change["new"]), "value")
        return slider

    def _place(self, name: str) -> None:
        """Set slider and number box to the value of their knob, and widen the slider for a value outside the training range."""
        slider, knob, value = self._sliders[name], self.knobs[name], self.value(name)
        quiet, self._updating = self._updating, True
        try:
            slider.min = min(slider.min, value)
            slider.max = max(slider.max, value)
            slider.value = value
            slider.min, slider.max = min(knob.low, value), max(knob.high, value)
            self._numbers[name].value = float(self.text(name))
        finally:
            self._updating = quiet

    def _moved(self, name: str, value: float) -> None:
        # ignore echoes: a browser rounds values that it is sent to whole steps and sends them back
        near = 0.51 * self.knobs[name].step
        if self._updating or abs(value - self.value(name)) < near:
            return
        self._note(name, self.neutral(name) if abs(value - self.neutral(name)) < near else value)
        self._updating = True
        self._numbers[name].value = float(self.text(name))
        self._updating = False
        self._on_change()

    def _typed(self, name: str, value: float) -> None:
        if self._updating or value == float(self.text(name)):
            return
        if math.isfinite(value):
            self._note(name, value)
        self._place(name)
        self._on_change()

    def _note(self, name: str, value: float, keep: Collection[str] = ()) -> None:
        """Store a value; choosing a category sets the knobs of the others to 0, except those in `keep`."""
        for other in self._others.get(name, ()) if value == 1 else ():
            if other not in keep and self.value(other) != 0:
                self._note(other, 0.0)
                if other in self._sliders:
                    self._place(other)
        self.active = name
        self.changes.pop(name, None)
        if self._rounded(name, value) != self._rounded(name, self.neutral(name)):
            self.changes[name] = value


__all__ = ["Editor", "Knob", "altered", "nice_step", "table_knobs"]
