"""Warnings about a wrong or missing `output=`, detected from the values of outputs or from the loss."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...engine.effects.random import values_unavailable
from ...engine.tree import flatten, is_float, names
from ..single_warnings import warn_once
from .class_scores import Binary, Classes, Logits
from .options import has_classes, meaning_of
from .resolution import resolve

# magnitudes between which risks are accurate in float32; below the first, squares of standard deviations 1000 times smaller lose precision
MIN_MAGNITUDE, MAX_MAGNITUDE = 1e-17, 1e18
MIN_NUMEL = 16  # number of elements per branch below which values are not judged
# the meaning that losses of torch assume for the prediction
_OF_CRITERION: tuple[tuple[Classes, tuple[Any, ...]], ...] = (
    (Logits(), (F.cross_entropy, nn.CrossEntropyLoss)),
    (Binary(), (F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss)),
    (Binary(logits=False), (F.binary_cross_entropy, nn.BCELoss)),
)
# the same for functions that a custom criterion may call
_OF_FUNCTION: tuple[tuple[Classes, tuple[Any, ...]], ...] = (
    (Logits(), (F.cross_entropy, F.log_softmax, F.softmax, F.nll_loss, torch.log_softmax, torch.softmax)),
    (Logits(), (Tensor.log_softmax, Tensor.softmax)),
    (Binary(), (F.binary_cross_entropy_with_logits,)),
    (Binary(logits=False), (F.binary_cross_entropy,)),
)
# operations that return the same values in another layout; "__get__" stands for attributes such as mT
_LAYOUT_OPS = {
    "view",
    "reshape",
    "flatten",
    "squeeze",
    "unsqueeze",
    "permute",
    "transpose",
    "movedim",
    "t",
    "float",
    "double",
    "to",
}
_LAYOUT_OPS |= {"contiguous", "clone", "__getitem__", "__get__"}
_DESCRIPTIONS = {
    Logits(): "scores of classes",
    Binary(): "scores of a yes or no, or of several labels",
    Binary(logits=False): "probabilities of a yes or no, or of several labels",
}
_OPTIONS = {Logits(): '"logits"', Binary(): '"binary"', Binary(logits=False): "Binary(logits=False)"}


def _should_check(wrapped: Any, key: str, leaf: Tensor, depth: int) -> bool:
    """Return whether to check the values of a leaf: once per key, and only on the CPU, since elsewhere it would synchronize."""
    warned = wrapped._workbench.warned
    # the check must not become part of a traced program
    if key in warned or leaf.device.type != "cpu" or values_unavailable() or torch.jit.is_tracing():
        return False
    if leaf.shape[depth:].numel() < MIN_NUMEL:
        return False
    warned.add(key)
    return True


def warn_of_doubts(wrapped: Any, meaning: Classes, scores: Tensor, depth: int) -> None:
    """Warn once about scores that look like something else; tensors have `depth` leading dimensions of branches."""
    if _should_check(wrapped, f"looked at {meaning.short}", scores, depth) and (
        doubt := meaning.doubt(scores.detach())
    ):
        warn_once(wrapped, "doubt", doubt)


def warn_of_whole_numbers(wrapped: Any, leaf: Tensor, depth: int) -> None:
    """Warn once about whole numbers that differ between branches: decisions (classes, thresholds), whose mean and spread say little."""
    if not depth or leaf.is_complex() or leaf.requires_grad:  # a decision has no gradient
        return
    if not _should_check(wrapped, "looked at values", leaf, depth):
        return
    leaf = leaf.detach()
    first = leaf[(0,) * depth]
    if bool((leaf == first).all()) or not bool((leaf == leaf.round()).all()):
        return
    # all floating-point numbers of this magnitude are integers
    if is_float(leaf) and float(leaf.abs().amax()) * torch.finfo(leaf.dtype).eps >= 0.5:
        return
    warn_once(
        wrapped,
        "whole numbers",
        "the model gives whole numbers that differ from branch to branch, such as from argmax, a threshold or rounding: prediction and risk "
        'are their mean and spread. Return the scores, declare them (output="logits", output="binary"), and decide outside the wrapped model',
    )


def warn_of_range(wrapped: Any, leaf: Tensor, depth: int) -> None:
    """Warn once about numbers whose squares, and so variances, underflow (below 1e-19) or overflow (above 1e19) in float32."""
    if not depth or leaf.dtype != torch.float32 or not _should_check(wrapped, "looked at range", leaf, depth):
        return
    largest = float(leaf.detach().abs().amax())
    if math.isfinite(largest) and (0 < largest < MIN_MAGNITUDE or largest > MAX_MAGNITUDE):
        warn_once(
            wrapped,
            "range",
            f"the model gives numbers up to {largest:.3g}, whose squares float32 can't hold, so that risks become "
            f"{'0 or inaccurate' if largest < 1 else 'infinite'}: return other units (1 for {largest:.0e}), or use wrapped.double()",
        )


def warn_unsaid(wrapped: Any, criterion: Any, y: Any, leaves: Sequence[Any], depth: int = 0) -> None:
    """Warn once if the criterion or the targets imply class scores, and `output=` is missing or contradicts that.

    Args:
        wrapped: the wrapped object.
        criterion: criterion of the training, or None.
        y: targets.
        leaves: output leaves; tensors have `depth` leading dimensions of branches.
        depth: number of leading dimensions.
    """
    record = wrapped._workbench
    if not isinstance(y, Tensor) or all(method.own_pass for method in record.methods):
        return
    implied = _implied_meaning(criterion)
    if record.output is not None:
        if implied is not None:
            _warn_of_contradiction(
                wrapped, getattr(criterion, "__name__", type(criterion).__name__), meaning_of(record.output), implied
            )
        return
    _warn_of_missing_meaning(wrapped, implied, y, leaves, depth)


def listening(wrapped: Any, criterion: Any, y: Any) -> Any:
    """Return the criterion; a custom one is instrumented for one batch, to warn if it treats outputs differently than declared.

    Args:
        wrapped: the wrapped object.
        criterion: `criterion(prediction, target)`, or None.
        y: targets.
    """
    record = wrapped._workbench
    if (
        criterion is None
        or _implied_meaning(criterion) is not None
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()
    ):
        return criterion
    name = getattr(criterion, "__qualname__", type(criterion).__qualname__)
    if f"heard {name}" in record.warned or all(method.own_pass for method in record.methods):
        return criterion
    record.warned.add(f"heard {name}")

    def instrumented(prediction: Any, target: Any) -> Any:
        with _CallRecorder(prediction, target) as recorder:
            loss = criterion(prediction, target)
        if recorder.pairs:
            warn_once(wrapped, f"pairs {name}", f"{name} {recorder.pairs}")
        if recorder.unbounded:
            raise ValueError(f"criterion: {name} {recorder.unbounded}")
        leaves, paths = flatten(prediction)[0], names(prediction)
        for place, function, implied in recorder.calls:
            if record.output is None:
                _warn_of_missing_meaning(wrapped, implied, y, leaves)
            elif isinstance(record.output, Mapping):
                with contextlib.suppress(ValueError):  # raised again when the model is called
                    declared = resolve(record.output, lambda: paths, leaves, 0)[place]
                    _warn_of_contradiction(wrapped, f"{function}, in {name},", declared, implied, paths[place])
            else:
                _warn_of_contradiction(wrapped, f"{function}, in {name},", meaning_of(record.output), implied)
        return loss

    return instrumented


class _CallRecorder(TorchFunctionMode):
    """Records which functions of `_OF_FUNCTION` are called with which leaf of a prediction, also after changes of layout.

    Args:
        prediction: tree of tensors.
        target: target tensor; anything else is ignored.
    """

    def __init__(self, prediction: Any, target: Any) -> None:
        super().__init__()
        # messages if a column was broadcast against a row, and if scores were taken for logarithms of probabilities
        self._target, self.pairs, self.unbounded = target, "", ""
        leaves = enumerate(flatten(prediction)[0])
        self._places = {id(leaf): (place, leaf) for place, leaf in leaves if isinstance(leaf, Tensor)}
        # (position of the leaf, name of the function, meaning that it implies)
        self.calls: list[tuple[int, str, Classes]] = []

    def __torch_function__(self, function: Any, kinds: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out, first = function(*args, **(kwargs or {})), args[0] if args else (kwargs or {}).get("input")
        if len(args) == 2 and not self.pairs and any(arg is self._target for arg in args):
            self._check_broadcast(args, out)
        place = self._places.get(id(first), (None,))[0]
        if place is not None:
            name = getattr(function, "__name__", "")
            implied = next((m for m, functions in _OF_FUNCTION if any(function is other for other in functions)), None)
            if implied is not None:
                self.calls.append((place, name, implied))
                if function is F.nll_loss and isinstance(first, Tensor):
                    self._check_logarithms(first)
            elif name in _LAYOUT_OPS and is_float(out):
                self._places[id(out)] = place, out
        return out

    def _check_broadcast(self, args: tuple, out: Any) -> None:
        """Detect a prediction and target [n, 1] and [n] that were broadcast to all pairs of rows [n, n]."""
        other = args[0] if args[1] is self._target else args[1]
        if id(other) not in self._places or not all(isinstance(t, Tensor) for t in (out, self._target)):
            return
        column, row = sorted((other, self._target), key=lambda t: -t.dim())
        rows = len(row) if row.dim() == 1 else 0
        if rows > 1 and list(column.shape) == [rows, 1] and list(out.shape) == [rows, rows]:
            self.pairs = (
                f"makes {list(out.shape)} of a prediction {list(other.shape)} and a target {list(self._target.shape)}: every row is compared "
                "with the targets of all rows, which trains the mean of all rows. Give y as "
                + ("a column, y[:, None]" if other is column else "the prediction is, y[:, 0]")
            )

    def _check_logarithms(self, scores: Tensor) -> None:
        """Detect scores [rows, classes, ...] that are neither logarithms of probabilities nor probabilities."""
        scores = scores.detach()
        if scores.dim() < 2 or not scores.numel() or values_unavailable():
            return
        is_log = bool((scores.logsumexp(1).abs() < 1e-2).all())
        if not is_log and not (bool((scores >= 0).all()) and bool(((scores.sum(1) - 1).abs() < 1e-2).all())):
            self.unbounded = (
                "takes what the model gives for logarithms of probabilities, and it gives scores, so that the loss falls without end as they "
                "grow: use nn.CrossEntropyLoss(), leave criterion out, or let the model end in nn.LogSoftmax(1)"
            )


def _implied_meaning(criterion: Any) -> Classes | None:
    """Return the meaning that a loss of torch assumes for the prediction; None for other criteria."""
    return next(
        (m for m, kinds in _OF_CRITERION if any(criterion is kind or type(criterion) is kind for kind in kinds)), None
    )


def _warn_of_contradiction(wrapped: Any, name: str, declared: Any, implied: Classes, path: str = "") -> None:
    if not isinstance(declared, Classes) or _agrees(declared, implied):
        return
    option = f"{{{path!r}: {_OPTIONS[implied]}, ...}}" if path else _OPTIONS[implied]
    warn_once(
        wrapped,
        "contradicted",
        f"{name} takes what the model gives for {_DESCRIPTIONS[implied]}, but prediction and risk are computed by "
        f"output={wrapped._workbench.output!r}. One of them is wrong: for {_DESCRIPTIONS[implied]} wrap with output={option}, or train without "
        "criterion=, by the loss of the declared output",
    )


def _warn_of_missing_meaning(
    wrapped: Any, implied: Classes | None, y: Any, leaves: Sequence[Any], depth: int = 0
) -> None:
    if not isinstance(y, Tensor):
        return
    binary = isinstance(implied, Binary)
    if not binary and _scores_of(y, leaves, depth) is None:
        return
    kind, option = ("yes or no", "binary") if binary else ("class numbers", "logits")
    warn_once(
        wrapped,
        "unsaid",
        f"the targets are {kind}, but the wrapper has no output=: prediction and risk are the mean of the scores and their spread, not "
        f'probabilities and entropies. Wrap with output="{option}" (see workbench.outputs for maps, probabilities and several outputs), or use '
        'output="values" if this is intended',
    )


def _scores_of(y: Tensor, leaves: Sequence[Any], depth: int) -> Tensor | None:
    """Return the output with a number for each class, if targets have the dtype and shape of class numbers."""
    scores = [leaf for leaf in leaves if is_float(leaf) and leaf.dim() > depth]
    if len(scores) != 1 or y.is_floating_point() or scores[0].dim() - depth != y.dim() + 1:
        return None
    return scores[0] if scores[0].dim() > depth + 1 and scores[0].shape[depth + 1] > 1 else None


def refuse_class_numbers(wrapped: Any, pair: Any, y: Any, leaves: Sequence[Any], depth: int) -> None:
    """Raise ValueError if the targets of risk heads of values are class numbers.

    Args:
        wrapped: the wrapped object.
        pair: the method of the risk heads, None if there is none.
        y: targets.
        leaves: output leaves; tensors have `depth` leading dimensions of branches.
        depth: number of leading dimensions.
    """
    distribution = getattr(pair, "distribution", None)
    # others than families of values, such as LogitNormal, take class numbers
    if getattr(distribution, "location_scale", False):
        refuse_class_numbers_for_values(
            wrapped, f"the risk heads of {pair.name} take", f"values, of {distribution}", y, leaves, depth
        )


def refuse_class_numbers_for_values(
    wrapped: Any, takes: str, values: str, y: Any, leaves: Sequence[Any], depth: int = 0
) -> None:
    """Raise ValueError if targets are class numbers, but an output with a score for each class is taken for values.

    Args:
        wrapped, y, leaves, depth: as for `refuse_class_numbers`.
        takes: what takes the output for values, for the message.
        values: the values that it is taken for.
    """
    if not isinstance(y, Tensor) or has_classes(wrapped._workbench.output):
        return
    scores = _scores_of(y, leaves, depth)
    if scores is None:
        return
    labels, outputs = (", ".join(["n", *map(str, shape)]) for shape in (y.shape[1:], scores.shape[depth + 1 :]))
    option = '"logits"' if y.dim() == 1 else "Logits(dim=1)"
    raise ValueError(
        f"y: the targets are class numbers [{labels}], but {takes} the outputs [{outputs}] for {values}: wrap with output={option} (see "
        "workbench.outputs for probabilities and tokens)"
    )


def _agrees(declared: Classes, implied: Classes) -> bool:
    return declared == implied if isinstance(implied, Binary) else type(declared) is type(implied)


__all__ = [
    "listening",
    "refuse_class_numbers",
    "refuse_class_numbers_for_values",
    "warn_of_doubts",
    "warn_of_whole_numbers",
    "warn_unsaid",
]
