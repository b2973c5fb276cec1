"""How the labels of a batch belong to the scores of a model that computes its own loss, as those of transformers do: found out by computing it.

A decoder compares its scores at one place with the label of the next, an encoder with that of the same place, and no name tells which: a
guess would train and calibrate silently on wrong targets. So a few rows are asked with labels that were given and with others that are
drawn, and what the model says its loss is has to be one of the losses known here, each time, and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...engine.clone import eager
from ...engine.effects.private_random import own_random
from ...engine.tree import flatten, is_float, names, tree_map
from ..function import Function
from ..outputs.class_scores import Classes, Logits, Probs
from ..outputs.meanings import IGNORED, Meaning, Values
from ..outputs.resolution import resolve
from ..ownership import table_of
from ..runtime import plain_clone
from ..saving.state_dict import extract
from .call_arguments import opened
from .dict_rows import LABELS
from .label_losses import CLASSES, KINDS, Kind
from .rows import describe, place, with_class_numbers

DECODER = "decoder_input_ids"
MASK = "attention_mask"
ROWS = 4  # that are asked
OTHERS = (
    "start_positions",
    "end_positions",
    "mc_labels",
    "next_sentence_label",
    "sentence_order_label",
    "class_labels",
    "mask_labels",
)


@dataclass(frozen=True, eq=False)
class Pairing:
    """How a batch with labels becomes inputs and targets.

    Args:
        kind: the loss that the model computes of them.
        decoder: what makes the inputs of its decoder of labels, as the model does it inside; None where it does not.
    """

    kind: Kind
    decoder: Callable[[Tensor], Tensor] | None = None

    def pair(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor]:
        """Inputs, and targets at the places of the scores, of a batch in which all is tensors."""
        labels = with_class_numbers(batch[LABELS])
        x = without_labels(batch)
        if self.decoder is not None:
            x[DECODER] = self.decoder(labels)
        return x, self.kind.target(labels)


def without_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs in a batch."""
    return {name: value for name, value in batch.items() if name != LABELS}


def decoder_of(model: Any, batch: Mapping[str, Any]) -> Callable[[Tensor], Tensor] | None:
    """What may make the inputs of a decoder of the labels of a batch; None if there is none, or the batch has such inputs."""
    prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    has_inputs = DECODER in batch or "decoder_inputs_embeds" in batch
    return None if has_inputs or batch[LABELS].dim() != 2 else prepare


def refuse_others(batch: Mapping[str, Any]) -> None:
    """Raise ValueError if a batch has targets that are not its labels."""
    if others := [name for name in OTHERS if name in batch]:
        raise ValueError(
            f"data: the batches have targets in {', '.join(others)}, and those that are taken from a dict are {LABELS}, one tensor. {_REMEDY}"
        )


def pairing_of(wrapped: Any, batch: Mapping[str, Any]) -> Pairing:
    """How the labels of a batch belong to the scores of a wrapped model, by the loss that the plain model computes of them.

    The plain model is asked in evaluation mode, as a copy with the same parameters; model and random state stay as they are.

    Args:
        wrapped: the wrapped model.
        batch: inputs by name, all of them tensors [rows, ...], and "labels".

    Raises:
        ValueError: if the model does not compute a loss of labels, or one that is none of `KINDS`, or several of them fit.
    """
    wrapped = eager(wrapped)
    model = getattr(type(wrapped), "_plain_class", type(wrapped)).__name__
    like = next((p for p in wrapped.parameters() if p.is_floating_point()), torch.empty(0))
    labels = batch[LABELS]
    if not isinstance(labels, Tensor):
        raise ValueError(
            f"data: {LABELS} of a batch is {describe(labels)}, and a tensor [rows, ...] is needed. {_REMEDY}"
        )
    rows, labels = _few(without_labels(batch), labels.contiguous())
    inputs, labels = place(rows, like.device, like.dtype), place(with_class_numbers(labels), like.device, like.dtype)
    if isinstance(wrapped, Function) or opened(wrapped, {**inputs, LABELS: labels})[0]:
        raise ValueError(
            f"data: the batches have {LABELS}, and {model} does not take {', '.join([*inputs, LABELS])} by name, so that it has no loss of its "
            f"own that would say how they belong to its scores. {_REMEDY}"
        )
    with torch.no_grad(), own_random(0, like.device):
        asked = _Asked(wrapped, _with_padding(inputs))
        reasons = []
        for decoder in dict.fromkeys((None, decoder_of(wrapped, batch))):
            try:
                return Pairing(_kind(asked, decoder, labels, model), decoder)
            except _DependOnLabels as error:
                reasons.append(error)
    raise ValueError(f"data: the batches have {LABELS}, and {reasons[-1]}. {_REMEDY}") from reasons[-1].__cause__


_REMEDY = (
    "Give pairs (inputs, targets) instead, such as ({'input_ids': ids}, targets), where each target stands at the place of the scores that it "
    f"is of, and class number {IGNORED} leaves one out"
)


class _DependOnLabels(Exception):
    """The scores cannot be computed without the labels."""


class _Asked:
    """The plain model of a wrapped one, to be asked with labels and without.

    Args:
        wrapped: the wrapped model, which stays as it is.
        inputs: of a few rows, by name.
    """

    def __init__(self, wrapped: Any, inputs: dict[str, Any]) -> None:
        # in the model's own units, without a prior: its loss knows neither
        plain: Any = extract(plain_clone(wrapped)[0], table_of(wrapped), {}, False).eval()
        for module in plain.modules():
            module._buffers.update({name: None if b is None else b.clone() for name, b in module._buffers.items()})
        self.inputs, self.output = inputs, wrapped._workbench.output
        self.plain = plain
        self._call = plain if wrapped._workbench.method == "forward" else getattr(plain, wrapped._workbench.method)
        self.name = ""  # of the scores

    def answer(self, **more: Any) -> Any:
        """What the model gives without labels.

        Raises:
            _DependOnLabels: if it gives nothing then.
        """
        try:
            return self._call(**_own(self.inputs), **more)
        except Exception as error:
            said = str(error).partition("\n")[0]
            raise _DependOnLabels(
                f"the model answers no batch without them ({type(error).__name__}: {said})"
            ) from error

    def scores(self, y: Any) -> tuple[Tensor, Meaning]:
        """The one output with a meaning in what the model gives."""
        leaves, paths = flatten(y)[0], names(y)
        meanings = resolve(self.output, lambda: paths, leaves, 0)
        places = [i for i, meaning in enumerate(meanings) if isinstance(meaning, Values | Classes)]
        if len(places) > 1:  # nobody said which
            places = [i for i in places if paths[i].rpartition(".")[2] == "logits"] or places
        if len(places) != 1:
            several = ", ".join(repr(paths[i]) for i in places) or "none"
            raise ValueError(
                f"data: the batches have {LABELS}, and the outputs that they may be targets of are: {several}. Say which one when wrapping, "
                'output={"logits": Logits(dim=-1)}'
            )
        self.name, meaning = paths[places[0]], meanings[places[0]]
        assert meaning is not None
        return leaves[places[0]], meaning

    def loss(self, labels: Tensor, scores: Tensor) -> Tensor:
        """What the model says its loss is, for labels with which it gives these scores."""
        loss, leaves = self._with_loss(labels)
        alike = (leaf for leaf in leaves if is_float(leaf) and leaf.shape == scores.shape)
        if not any(bool(_close(leaf.float(), scores.float(), scores.dtype).all()) for leaf in alike):
            raise _DependOnLabels(
                "the scores of the model differ with them: it makes inputs of them in a way that is not known here, so that what it predicts "
                "without them is something else"
            )
        return loss

    def trains_by(
        self, kind: Kind, labels: Tensor, shape: torch.Size, classes_last: Callable[[Tensor], Tensor]
    ) -> bool:
        """Whether the loss is the same in training mode, of the scores [shape] of that very call."""
        self.plain.train()
        try:
            loss, leaves = self._with_loss(labels)
        except ValueError:  # such as of one row for batch norm; a training says so
            return True
        finally:
            self.plain.eval()
        scores = [classes_last(leaf) for leaf in leaves if is_float(leaf) and leaf.shape == shape]
        return any(bool(_close(loss, kind.loss(_precise(y), kind.target(labels)), loss.dtype)) for y in scores)

    def _with_loss(self, labels: Tensor) -> tuple[Tensor, list[Any]]:
        """What the model says its loss is, and all that it gives with labels."""
        try:
            y = self._call(**_own(self.inputs), **{LABELS: labels.clone()})
        except Exception as error:
            raise ValueError(
                f"data: the batches have {LABELS}, and of some {list(labels.shape)} the model computes no loss "
                f"({type(error).__name__}: {error}). {_REMEDY}"
            ) from error
        leaves, paths = flatten(y)[0], names(y)
        numbers = {path: leaf for path, leaf in zip(paths, leaves, strict=True) if is_float(leaf) and leaf.dim() == 0}
        loss = numbers.get("loss", next(iter(numbers.values())) if len(numbers) == 1 else None)
        if loss is None:
            raise ValueError(
                f"data: the batches have {LABELS}, and with them the model gives {', '.join(paths)}, none of which is its loss. {_REMEDY}"
            )
        return loss, leaves


def _kind(asked: _Asked, decoder: Callable[[Tensor], Tensor] | None, labels: Tensor, model: str) -> Kind:
    """The one loss that the model computes, of labels that are given and of others that are drawn."""

    def scores_of(labels: Tensor) -> tuple[Tensor, Meaning]:
        return asked.scores(asked.answer(**({} if decoder is None else {DECODER: decoder(labels)})))

    scores, meaning = scores_of(labels)
    asked.loss(labels, scores)  # are they the model's scores without labels?
    classes_last = meaning.log_scores if isinstance(meaning, Logits | Probs) else lambda y: y
    kinds = [kind for kind in KINDS if kind.fits(classes_last(scores), labels)]
    if not kinds:
        raise ValueError(
            f"data: {LABELS} are {list(labels.shape)}, {'values' if labels.is_floating_point() else 'class numbers'}, and {model} gives scores "
            f"{list(scores.shape)}, which fit in no way that is known here. {_REMEDY}"
        )
    compared: list[str] = []
    agree = {kind.words: kind for kind in kinds}
    for drawn in (every := _drawn(labels, classes_last(scores).float())):
        rescored = scores_of(drawn)[0]
        of_model = asked.loss(drawn, rescored)
        by_kind = {kind.words: kind.loss(_precise(classes_last(rescored)), kind.target(drawn)) for kind in kinds}
        if not of_model.isfinite() and drawn is labels:
            continue  # such as of labels that are all left out
        compared = [f"    {loss:.7g}  {words}" for words, loss in by_kind.items()]
        agree = {words: kind for words, kind in agree.items() if bool(_close(of_model, by_kind[words], of_model.dtype))}
        if not agree:
            break
    level = classes_last(scores).float()
    if len(agree) != 1 or (kinds[0].meanings == CLASSES[0] and bool((level.amax(-1) == level.amin(-1)).all())):
        what = (
            "cannot be told from"
            if len(agree) > 1
            else "says nothing, since all scores are equal:"
            if agree
            else "is none of"
        )
        raise ValueError(
            f"data: the batches have {LABELS}, and how they belong to the scores of {model} cannot be told: its own loss of a few rows, "
            f"{of_model:.7g}, {what}\n" + "\n".join(compared) + f"\n{_REMEDY}"
        )
    (kind,) = agree.values()
    if not asked.trains_by(kind, every[1], scores.shape, classes_last):
        raise ValueError(
            f"data: the batches have {LABELS}, and the loss that {model} computes of them is {kind.words}, but another one in training mode. "
            f"{_REMEDY}"
        )
    if not isinstance(meaning, kind.meanings):
        line = f"{{{asked.name!r}: {kind.line}}}" if asked.name else kind.line
        raise ValueError(
            f"data: the batches have {LABELS}, and the loss that {model} computes of them is {kind.words}, but the scores were taken for "
            f"{type(meaning).__name__} when wrapping: say output={line}, with from workbench.outputs import "
            f"{kind.line.partition('(')[0]}"
        )
    return kind


def _own(inputs: dict[str, Any]) -> dict[str, Any]:
    """Inputs that a model may write into, as some do into their labels."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, inputs)


def _few(inputs: dict[str, Any], labels: Tensor) -> tuple[dict[str, Any], Tensor]:
    """The first rows, where all inputs have as many."""
    if not labels.dim() or not all(
        isinstance(v, Tensor) and v.dim() and len(v) == len(labels) for v in inputs.values()
    ):
        return inputs, labels
    return {name: value[:ROWS] for name, value in inputs.items()}, labels[:ROWS]


def _with_padding(inputs: dict[str, Any]) -> dict[str, Any]:
    """With one place masked: a loss that leaves out what is masked is another one than that of the labels alone."""
    mask = inputs.get(MASK)
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] < 2 or not bool((mask == 1).all()):
        return inputs
    mask = mask.clone()
    mask[0, -1] = 0
    return {**inputs, MASK: mask}


def _drawn(labels: Tensor, scores: Tensor) -> list[Tensor]:
    """Labels to compute losses of: those that are given, and others of their shape."""
    generator = torch.Generator().manual_seed(0)
    if labels.is_floating_point():
        values = [torch.rand(labels.shape, generator=generator) for _ in range(2)]
        return [labels, *(v.to(labels) for v in (values[0], (values[1] > 0.5).float()))]
    n = labels.numel()
    classes = scores.shape[-1] if scores.shape[:-1] == labels.shape else 2
    numbers = (torch.arange(n) % classes)[torch.randperm(n, generator=generator)].reshape(labels.shape).to(labels)
    drawn = [labels, numbers]
    if scores.shape[:-1] == labels.shape and classes > 1:
        drawn += [scores.argmax(-1), scores.argmin(-1)]
    if labels.dim() > 1 or bool((labels == IGNORED).any()):
        left_out = (
            (torch.arange(n) % 3 == 1)[torch.randperm(n, generator=generator)].reshape(labels.shape).to(labels.device)
        )
        drawn += [y.masked_fill(left_out, IGNORED) for y in drawn[1:2]]
    return drawn


def _precise(scores: Tensor) -> Tensor:
    return scores.to(torch.promote_types(torch.float32, scores.dtype))


def _close(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    tolerance = 1e-5 if torch.finfo(dtype).bits >= 32 else 1e-2
    return (a - b).abs() <= tolerance * (1 + b.abs())


__all__ = ["DECODER", "LABELS", "Pairing", "decoder_of", "pairing_of", "refuse_others", "without_labels"]
