"""Which parts of an image, and which tokens of a text, carry the prediction and each risk: cover them, and predict again."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workbench.attributions.one_input import alone, one_input
from workbench.calibration.answers import Answers, log_probabilities
from workbench.calibration.collection import collect
from workbench.calibration.models import check_model, output_of
from workbench.calibration.ranked_rows import row_risk
from workbench.console import progress_bar
from workbench.core.batches.rows import bad_rows


@dataclass(frozen=True, eq=False)
class Occlusion:
    """Effect of covering each place of the inputs; see `occlusion`.

    Args:
        change: by name ("prediction" and each risk), the decrease when the place is covered, float64 [n, height, width] for images and
            [n, tokens] for texts.
        before: prediction and risks for the uncovered inputs by name, each [n].
        window: height and width of the covering window, or its number of tokens.
    """

    change: Mapping[str, Tensor]
    before: Mapping[str, Tensor]
    window: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the prediction and the risks with changes."""
        return tuple(self.change)

    def __repr__(self) -> str:
        shape = list(next(iter(self.change.values())).shape)
        return f"Occlusion({shape} by {' x '.join(map(str, self.window))}: {', '.join(self.names)})"


def occlusion(
    wrapped: nn.Module,
    x: Any,
    *,
    of: int | str | None = None,
    window: int | tuple[int, int] | None = None,
    stride: int | None = None,
    baseline: float | Tensor | None = None,
    batch_size: int = 256,
    seed: int = 0,
    progress: bool = True,
) -> Occlusion:
    """Measure which places of single inputs carry each risk and the prediction: cover one after another, and see how far each falls.

    A window slides over the input (Zeiler and Fergus, Visualizing and understanding convolutional networks, 2014); the value of a place is the
    mean of r(x) - r(x covered) over all windows that cover it. Above 0, the place carries the risk, which falls without it. Below 0, covering
    it raises the risk, for example if the model recognizes the input by it. The cover may itself be unlike the data, so that epistemic and
    vacuitic risk rise for that reason alone: choose a baseline that inputs can have.

    Args:
        wrapped: a trained wrapped model, or a calibrated one. It is evaluated in evaluation mode and never changed.
        x: images [n, height, width] or [n, channels, height, width], or tokens, integers [n, tokens]; or a tuple of positional or dict of
            keyword inputs with one of these among them; the others stay as they are.
        of: which of several inputs is covered, by position or name.
        window: side of the window, or (height, width); None: a seventh of the shorter side, at least two pixels; one token.
        stride: step of the window; None: half a side, at least 1. The last window always ends at the edge, so that every place is covered.
        baseline: value of the cover: a number, or a tensor that broadcasts to a row. None: the mean of each channel over `x`. For tokens,
            required: the number of a token that means nothing, such as that of padding, unknown or mask.
        batch_size: rows evaluated at once.
        seed: seed of random draws, which are the same for each window, so that only the window makes a difference.
        progress: whether to show a progress bar if it takes more than two seconds.

    Returns:
        The changes: of risks in their units, of "prediction" in those of the value, or of the probability of the predicted class. With several
        outputs, a row's risk is their root mean square, and the prediction their mean.

    Raises:
        TypeError: if the model is not wrapped, or x is no tensor.
        ValueError: if x is neither images nor tokens, `of` names none of several inputs, the window does not fit, or tokens come without a
            baseline.

    Example:
        >>> from workbench import vote
        >>> wrapped = vote.Wrapper(3, output="logits")(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
        >>> attribution = occlusion(wrapped, torch.rand(2, 1, 8, 8), window=2)
        >>> attribution.names, attribution.change["epistemic"].shape
        (('prediction', 'aleatoric', 'epistemic', 'total'), torch.Size([2, 8, 8]))
    """
    check_model(wrapped)
    form = output_of(wrapped)
    x, with_others = one_input(x, of, "images or tokens")
    sides, step = _checked(x, window, stride)
    shape = x.shape[-len(sides) :]
    covers = cover(x, baseline)
    answers = collect(wrapped, alone(with_others(x)), targets=False, batch_size=batch_size, seed=seed)
    classes = None if form == "values" else answers.y.argmax(-1)
    before = _numbers(answers, form, classes)
    starts = [_starts(length, side, step) for length, side in zip(shape, sides, strict=True)]
    corners = list(itertools.product(*starts))
    # if the model draws random numbers, windows are evaluated one by one, so that each row gets the same draws
    windows_at_once = 1 if answers.drawn else max(1, batch_size // len(x))
    total = {name: torch.zeros(len(x), *shape, dtype=torch.float64) for name in before}
    counts = torch.zeros(shape, dtype=torch.float64)
    with progress_bar(total=len(corners), desc="occlusion", delay=2, disable=not progress, leave=False) as bar:
        for first in range(0, len(corners), windows_at_once):
            chunk = corners[first : first + windows_at_once]
            windows: list[Any] = [
                (..., *(slice(a, a + side) for a, side in zip(corner, sides, strict=True))) for corner in chunk
            ]
            covered = x.repeat(len(chunk), *[1] * (x.ndim - 1)).unflatten(0, (len(chunk), len(x)))
            for copy, window_slices in zip(covered, windows, strict=True):
                copy[window_slices] = covers[window_slices]
            answers = collect(
                wrapped, alone(with_others(covered.flatten(0, 1))), targets=False, batch_size=batch_size, seed=seed
            )
            predicted = None if classes is None else classes.repeat(len(chunk), *[1] * (classes.ndim - 1))
            for name, value in _numbers(answers, form, predicted).items():
                for after, window_slices in zip(value.view(len(chunk), len(x)), windows, strict=True):
                    total[name][window_slices] += (before[name] - after).view(-1, *[1] * len(sides))
            for window_slices in windows:
                counts[window_slices] += 1
            bar.update(len(chunk))
    return Occlusion({name: value / counts for name, value in total.items()}, before, sides)


def _checked(x: Tensor, window: Any, stride: Any) -> tuple[tuple[int, ...], int]:
    """The sides of the window and its stride, after checking the arguments."""
    tokens = x.ndim == 2 and not x.is_floating_point()
    if not len(x) or not (tokens or 3 <= x.ndim <= 4):
        raise ValueError(
            f"x has shape {list(x.shape)} ({x.dtype}); expected images [n, height, width] or [n, channels, height, width], or tokens, whole "
            "numbers [n, tokens]. Columns of a table: attributions.permutation_importance"
        )
    if len(bad := bad_rows(x)):
        raise ValueError(f"x is NaN or infinite in {len(bad)} of {len(x)} rows, first in row {int(bad[0])}")
    lengths = x.shape[1:] if tokens else x.shape[-2:]
    if window is None:
        window = 1 if tokens else min(max(2, min(lengths) // 7), *lengths)
    sides = tuple(window) if isinstance(window, tuple | list) else (window,) * len(lengths)
    if len(sides) != len(lengths) or not all(_whole(a) and 1 <= a <= b for a, b in zip(sides, lengths, strict=False)):
        raise ValueError(f"window: expected sides from 1 to {list(lengths)}; found {window!r}")
    if stride is None:
        stride = max(1, min(sides) // 2)
    if not _whole(stride) or not 1 <= stride <= min(sides):
        raise ValueError(
            f"stride: expected a whole number from 1 to the window's {min(sides)}, so that every place is covered; found {stride!r}"
        )
    return sides, stride


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def cover(x: Tensor, baseline: float | Tensor | None) -> Tensor:
    """Return the values that cover an input, shaped like a row."""
    if baseline is None:
        if x.ndim == 2:
            raise ValueError(
                "baseline: give the number of a token that means nothing to the model, such as that of padding, unknown or mask"
            )
        mean = x.double().mean((0, -2, -1), keepdim=True)[0]
        covers = mean if x.is_floating_point() else mean.round()
    else:
        covers = torch.as_tensor(baseline, device=x.device)
        if not bool(covers.isfinite().all()):
            raise ValueError("baseline: it is NaN or infinite")
        if not x.is_floating_point() and bool((covers != covers.round()).any()):
            raise ValueError(f"baseline: x holds whole numbers ({x.dtype}), but the baseline does not")
    try:
        return covers.to(x.dtype).expand(x.shape[1:])
    except RuntimeError as error:
        raise ValueError(f"baseline: {list(covers.shape)} does not broadcast to a row {list(x.shape[1:])}") from error


def _starts(length: int, side: int, step: int) -> list[int]:
    """First positions of the windows along an axis; the last window ends at the edge."""
    last = length - side
    return sorted({*range(0, last + 1, step), last})


def _numbers(answers: Answers, form: str, classes: Tensor | None) -> dict[str, Tensor]:
    """One number per row for the prediction and each risk, [n] by name."""
    predicted = answers.y
    if classes is not None:
        predicted = log_probabilities(answers.y, form).exp().gather(-1, classes[..., None])
    numbers = {"prediction": predicted.reshape(len(predicted), -1).double().mean(1).cpu()}
    for name in answers.risk.names():
        numbers[name] = row_risk(answers.y, answers.risk, name, form).double().cpu()
    return numbers


__all__ = ["Occlusion", "cover", "occlusion"]
