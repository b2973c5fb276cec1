"""Slips in what an output is said to mean, which its numbers or the loss that it is trained with give away."""

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
from ..batches.dealing import tell
from .class_scores import Binary, Classes, Logits
from .options import meaning_of
from .resolution import resolve

# numbers; squares of spreads a thousandth as large as the first begin to round in float32
FINEST, GREATEST = 1e-17, 1e18
LOOKS_AT = 16  # numbers of each branch, at least, for what they are to be told by their values
# what the losses of torch take a prediction for
_WANTS: tuple[tuple[Classes, tuple[Any, ...]], ...] = (
    (Logits(), (F.cross_entropy, nn.CrossEntropyLoss)),
    (Binary(), (F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss)),
    (Binary(logits=False), (F.binary_cross_entropy, nn.BCELoss)),
)
# the same of what a criterion of one's own may call
_CALLS: tuple[tuple[Classes, tuple[Any, ...]], ...] = (
    (Logits(), (F.cross_entropy, F.log_softmax, F.softmax, F.nll_loss, torch.log_softmax, torch.softmax)),
    (Logits(), (Tensor.log_softmax, Tensor.softmax)),
    (Binary(), (F.binary_cross_entropy_with_logits,)),
    (Binary(logits=False), (F.binary_cross_entropy,)),
)
# what gives the same numbers in another form; "__get__" is that of attributes such as mT
_FORMS = {
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
_FORMS |= {"contiguous", "clone", "__getitem__", "__get__"}
_TAKEN = {
    Logits(): "scores of classes",
    Binary(): "scores of a yes or no, or of several labels",
    Binary(logits=False): "probabilities of a yes or no, or of several labels",
}
_LINES = {Logits(): '"logits"', Binary(): '"binary"', Binary(logits=False): "Binary(logits=False)"}


def _can_look(wrapped: Any, key: str, leaf: Tensor, depth: int) -> bool:
    """Whether to look at the numbers, which is done once: on the CPU only, since elsewhere it would make every call wait."""
    warned = wrapped._workbench.told
    # a trace would keep the look
    if key in warned or leaf.device.type != "cpu" or values_unavailable() or torch.jit.is_tracing():
        return False
    if leaf.shape[depth:].numel() < LOOKS_AT:
        return False
    warned.add(key)
    return True


def tell_doubts(wrapped: Any, meaning: Classes, scores: Tensor, depth: int) -> None:
    """Warn once of scores that look like something else; tensors have `depth` dimensions of branches in front."""
    if _can_look(wrapped, f"looked at {meaning.short}", scores, depth) and (doubt := meaning.doubt(scores.detach())):
        tell(wrapped, "doubt", doubt)


def tell_whole_numbers(wrapped: Any, leaf: Tensor, depth: int) -> None:
    """Whole numbers that the branches compute are decisions (classes, thresholds, rounding), whose mean and spread say little."""
    if not depth or leaf.is_complex() or leaf.requires_grad:  # a decision has no gradient
        return
    if not _can_look(wrapped, "looked at values", leaf, depth):
        return
    leaf = leaf.detach()
    first = leaf[(0,) * depth]
    if bool((leaf == first).all()) or not bool((leaf == leaf.round()).all()):
        return
    # numbers that large are all whole
    if is_float(leaf) and float(leaf.abs().amax()) * torch.finfo(leaf.dtype).eps >= 0.5:
        return
    tell(
        wrapped,
        "whole numbers",
        "the model gives whole numbers that differ from branch to branch, as argmax, a threshold or rounding gives them: prediction and risk "
        'are their mean and spread. Return the scores, say what they are (output="logits", output="binary"), and decide outside the wrapped '
        "model",
    )


def tell_range(wrapped: Any, leaf: Tensor, depth: int) -> None:
    """Squares of numbers below 1e-19 are 0 in float32, and above 1e19 infinite, and so would be risks."""
    if not depth or leaf.dtype != torch.float32 or not _can_look(wrapped, "looked at range", leaf, depth):
        return
    largest = float(leaf.detach().abs().amax())
    if math.isfinite(largest) and (0 < largest < FINEST or largest > GREATEST):
        tell(
            wrapped,
            "range",
            f"the model gives numbers up to {largest:.3g}, whose squares float32 can't hold, so that risks come out as "
            f"{'0 or coarse' if largest < 1 else 'infinite'}: return other units (1 for {largest:.0e}), or take wrapped.double()",
        )


def warn_unsaid(wrapped: Any, criterion: Any, y: Any, leaves: Sequence[Any], depth: int = 0) -> None:
    """Warn once where scores are trained or judged as those of classes, and nobody said that they are, or said something else.

    Args:
        wrapped: the object.
        criterion: what it is trained with, if it is.
        y: targets.
        leaves: of the output; tensors have so many dimensions of branches in front.
        depth: that number.
    """
    record = wrapped._workbench
    if not isinstance(y, Tensor) or all(method.own_pass for method in record.methods):
        return
    wants = _wanted(criterion)
    if record.output is not None:
        if wants is not None:
            _tell_contradiction(
                wrapped, getattr(criterion, "__name__", type(criterion).__name__), meaning_of(record.output), wants
            )
        return
    _tell_unsaid(wrapped, wants, y, leaves, depth)


def listening(wrapped: Any, criterion: Any, y: Any) -> Any:
    """The criterion; one of the user's own in a form that warns of what it computes with what the model gives, for one batch.

    Args:
        wrapped: the object.
        criterion: `criterion(prediction, target)`, or None.
        y: targets.
    """
    record = wrapped._workbench
    if criterion is None or _wanted(criterion) is not None or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return criterion
    name = getattr(criterion, "__qualname__", type(criterion).__qualname__)
    if f"heard {name}" in record.told or all(method.own_pass for method in record.methods):
        return criterion
    record.told.add(f"heard {name}")

    def heard(prediction: Any, target: Any) -> Any:
        with _Listening(prediction, target) as calls:
            loss = criterion(prediction, target)
        if calls.pairs:
            tell(wrapped, f"pairs {name}", f"{name} {calls.pairs}")
        leaves, paths = flatten(prediction)[0], names(prediction)
        for place, function, wants in calls.heard:
            if record.output is None:
                _tell_unsaid(wrapped, wants, y, leaves)
            elif isinstance(record.output, Mapping):
                with contextlib.suppress(ValueError):  # told where the model is asked
                    said = resolve(record.output, lambda: paths, leaves, 0)[place]
                    _tell_contradiction(wrapped, f"{function}, in {name},", said, wants, paths[place])
            else:
                _tell_contradiction(wrapped, f"{function}, in {name},", meaning_of(record.output), wants)
        return loss

    return heard


class _Listening(TorchFunctionMode):
    """Notes which functions of `_CALLS` are given which leaf of a prediction, whatever the form of that.

    Args:
        prediction: a tree.
        target: a tensor, or else it is not looked at.
    """

    def __init__(self, prediction: Any, target: Any = None) -> None:
        super().__init__()
        self._target, self.pairs = target, ""  # the latter says what it met
        leaves = enumerate(flatten(prediction)[0])
        self._places = {id(leaf): (place, leaf) for place, leaf in leaves if isinstance(leaf, Tensor)}
        # (place of the leaf, name of the function, what it takes that for)
        self.heard: list[tuple[int, str, Classes]] = []

    def __torch_function__(self, function: Any, kinds: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out, first = function(*args, **(kwargs or {})), args[0] if args else (kwargs or {}).get("input")
        if len(args) == 2 and not self.pairs and any(arg is self._target for arg in args):
            self._hear_pairs(args, out)
        place = self._places.get(id(first), (None,))[0]
        if place is not None:
            name = getattr(function, "__name__", "")
            wants = next((m for m, functions in _CALLS if any(function is other for other in functions)), None)
            if wants is not None:
                self.heard.append((place, name, wants))
            elif name in _FORMS and is_float(out):
                self._places[id(out)] = place, out
        return out

    def _hear_pairs(self, args: tuple, out: Any) -> None:
        """Whether a column [n, 1] and a row [n] met, which makes a number of every two rows [n, n] where one of each was meant."""
        other = args[0] if args[1] is self._target else args[1]
        if id(other) not in self._places or not all(isinstance(t, Tensor) for t in (out, self._target)):
            return
        column, row = sorted((other, self._target), key=lambda t: -t.dim())
        rows = len(row) if row.dim() == 1 else 0
        if rows > 1 and list(column.shape) == [rows, 1] and list(out.shape) == [rows, rows]:
            self.pairs = (
                f"makes {list(out.shape)} of a prediction {list(other.shape)} and a target {list(self._target.shape)}: every row is compared "
                "with the targets of all others, which trains the mean of all rows. Give y as "
                + ("a column, y[:, None]" if other is column else "the prediction is, y[:, 0]")
            )


def _wanted(criterion: Any) -> Classes | None:
    """What a loss of torch takes a prediction for."""
    return next((m for m, kinds in _WANTS if any(criterion is kind or type(criterion) is kind for kind in kinds)), None)


def _tell_contradiction(wrapped: Any, name: str, said: Any, wants: Classes, path: str = "") -> None:
    if not isinstance(said, Classes) or _agrees(said, wants):
        return
    line = f"{{{path!r}: {_LINES[wants]}, ...}}" if path else _LINES[wants]
    tell(
        wrapped,
        "contradicted",
        f"{name} takes what the model gives for {_TAKEN[wants]}, and the wrapper was told output={wrapped._workbench.output!r}, by which "
        f"prediction and risk are computed. One of them is wrong: for {_TAKEN[wants]} wrap with output={line}, or train without "
        "criterion=, by what the output was said to mean",
    )


def _tell_unsaid(wrapped: Any, wants: Classes | None, y: Any, leaves: Sequence[Any], depth: int = 0) -> None:
    if not isinstance(y, Tensor):
        return
    scores = [leaf for leaf in leaves if is_float(leaf) and leaf.dim() > depth]
    binary = isinstance(wants, Binary)
    classes = len(scores) == 1 and not y.is_floating_point() and scores[0].dim() - depth == y.dim() + 1
    classes = classes and scores[0].dim() > depth + 1 and scores[0].shape[depth + 1] > 1
    if not binary and not classes:
        return
    what, line = ("yes or no", "binary") if binary else ("class numbers", "logits")
    tell(
        wrapped,
        "unsaid",
        f"the targets are {what}, and the wrapper was not told so: prediction and risk are the mean of the scores and their spread, no "
        f'probabilities and entropies. Wrap with output="{line}" (workbench.outputs has maps, probabilities and several outputs), or say '
        'output="values" if this is meant',
    )


def _agrees(said: Classes, wants: Classes) -> bool:
    return said == wants if isinstance(wants, Binary) else type(said) is type(wants)


__all__ = ["listening", "tell_doubts", "tell_whole_numbers", "warn_unsaid"]
