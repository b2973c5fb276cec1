"""Inference of how labels correspond to the scores of a model that computes its own loss, as models of transformers do.

A decoder compares the scores at one position with the label of the next position, an encoder with that of the same position, and no name
tells which; a wrong guess would silently train and calibrate on wrong targets. So the model computes its loss for a few rows, with their own
labels and with random ones, and exactly one of the losses known here must agree each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...engine.clone import eager
from ...engine.effects.private_random import own_random
from ...engine.tree import flatten, is_float, map_tensors, names
from ..function import Function
from ..outputs.class_scores import Classes, Logits, Probs, at_least_float32
from ..outputs.meanings import IGNORED, Meaning, Values
from ..outputs.resolution import resolve
from ..ownership import table_of
from ..runtime import plain_clone
from ..saving.extraction import extract
from .call_arguments import as_arguments
from .dict_rows import LABELS
from .label_losses import CLASSES, KINDS, Kind
from .rows import describe, first_weight, place
from .target_forms import with_class_numbers

DECODER = "decoder_input_ids"
MASK = "attention_mask"
ROWS = 4  # number of rows used
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
    """Conversion of a batch with labels to inputs and targets.

    Args:
        kind: the loss that the model computes from labels.
        decoder: function that makes decoder inputs from labels, as the model does internally; None if it does not.
    """

    kind: Kind
    decoder: Callable[[Tensor], Tensor] | None = None

    def pair(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor]:
        """Return the inputs of a batch of tensors, and its targets aligned with the scores."""
        labels = with_class_numbers(batch[LABELS])
        x = without_labels(batch)
        if self.decoder is not None:
            x[DECODER] = self.decoder(labels)
        return x, self.kind.target(labels)


def without_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs in a batch."""
    return {name: value for name, value in batch.items() if name != LABELS}


def decoder_of(model: Any, batch: Mapping[str, Any]) -> Callable[[Tensor], Tensor] | None:
    """Return the model's function that makes decoder inputs from labels; None if it has none, or the batch contains decoder inputs."""
    prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    has_inputs = DECODER in batch or "decoder_inputs_embeds" in batch
    return None if has_inputs or batch[LABELS].dim() != 2 else prepare


def refuse_others(batch: Mapping[str, Any]) -> None:
    """Raise ValueError if a batch has targets other than labels."""
    if others := [name for name in OTHERS if name in batch]:
        raise ValueError(
            f"data: the batches have targets in {', '.join(others)}, but only one tensor {LABELS} is supported in dicts. {_REMEDY}"
        )


def pairing_of(wrapped: Any, batch: Mapping[str, Any]) -> Pairing:
    """Infer how labels correspond to the scores of a wrapped model from the loss that the plain model computes.

    A copy of the plain model with the same parameters runs in evaluation mode; neither the model nor the random state changes.

    Args:
        wrapped: the wrapped model.
        batch: tensors [rows, ...] by name, including "labels".

    Raises:
        ValueError: if the model computes no loss from labels, or one that is not among `KINDS`, or several of these fit.
    """
    wrapped = eager(wrapped)
    model = getattr(type(wrapped), "_plain_class", type(wrapped)).__name__
    like = first_weight(wrapped)
    labels = batch[LABELS]
    if not isinstance(labels, Tensor):
        raise ValueError(f"data: {LABELS} of a batch must be a tensor [rows, ...], not {describe(labels)}. {_REMEDY}")
    rows, labels = _few(without_labels(batch), labels.contiguous())
    inputs, labels = place(rows, like.device, like.dtype), place(with_class_numbers(labels), like.device, like.dtype)
    if isinstance(wrapped, Function) or as_arguments(wrapped, {**inputs, LABELS: labels})[0]:
        raise ValueError(
            f"data: the batches have {LABELS}, and {model} does not accept {', '.join([*inputs, LABELS])} by name, so it has no loss of its own "
            f"from which to infer how they correspond to its scores. {_REMEDY}"
        )
    with torch.no_grad(), own_random(0, like.device):
        probe = _Probe(wrapped, _with_padding(inputs))
        reasons = []
        for decoder in dict.fromkeys((None, decoder_of(wrapped, batch))):
            try:
                return Pairing(_kind(probe, decoder, labels, model), decoder)
            except _DependOnLabels as error:
                reasons.append(error)
    raise ValueError(f"data: the batches have {LABELS}, and {reasons[-1]}. {_REMEDY}") from reasons[-1].__cause__


_REMEDY = (
    "Give pairs (inputs, targets) instead, such as ({'input_ids': ids}, targets), where targets are aligned with the scores, and class number "
    f"{IGNORED} leaves one out"
)


class _DependOnLabels(Exception):
    """The scores cannot be computed without the labels."""


class _Probe:
    """Copy of the plain model, to be called with and without labels.

    Args:
        wrapped: the wrapped model, which does not change.
        inputs: inputs of a few rows by name.
    """

    def __init__(self, wrapped: Any, inputs: dict[str, Any]) -> None:
        # in the model's own units and without prior, as in the model's own loss
        plain: Any = extract(plain_clone(wrapped)[0], table_of(wrapped), {}, False).eval()
        for module in plain.modules():
            module._buffers.update({name: None if b is None else b.clone() for name, b in module._buffers.items()})
        self.inputs, self.output = inputs, wrapped._workbench.output
        self.plain = plain
        self._call = plain if wrapped._workbench.method == "forward" else getattr(plain, wrapped._workbench.method)
        self.name = ""  # dotted name of the scores

    def answer(self, **more: Any) -> Any:
        """Return the output of the model without labels.

        Raises:
            _DependOnLabels: if the call fails.
        """
        try:
            return self._call(**map_tensors(lambda t: t.clone(), self.inputs), **more)  # which some models write into
        except Exception as error:
            message = str(error).partition("\n")[0]
            raise _DependOnLabels(
                f"the model cannot be called without them ({type(error).__name__}: {message})"
            ) from error

    def scores(self, y: Any) -> tuple[Tensor, Meaning]:
        """Return the single output that can be scores, and its meaning."""
        leaves, paths = flatten(y)[0], names(y)
        meanings = resolve(self.output, lambda: paths, leaves, 0)
        places = [i for i, meaning in enumerate(meanings) if isinstance(meaning, Values | Classes)]
        if len(places) > 1:  # the option output= does not say which
            places = [i for i in places if paths[i].rpartition(".")[2] == "logits"] or places
        if len(places) != 1:
            several = ", ".join(repr(paths[i]) for i in places) or "none"
            raise ValueError(
                f"data: the batches have {LABELS}, and the outputs that they may be targets of are: {several}. Choose one when wrapping, "
                'output={"logits": Logits(dim=-1)}'
            )
        self.name, meaning = paths[places[0]], meanings[places[0]]
        assert meaning is not None
        return leaves[places[0]], meaning

    def loss(self, labels: Tensor, scores: Tensor) -> Tensor:
        """Return the model's own loss for labels.

        Raises:
            _DependOnLabels: if the model computes other scores with labels than the given ones.
        """
        loss, leaves = self._with_loss(labels)
        alike = (leaf for leaf in leaves if is_float(leaf) and leaf.shape == scores.shape)
        if not any(bool(_close(leaf.float(), scores.float(), scores.dtype).all()) for leaf in alike):
            raise _DependOnLabels(
                "the scores of the model differ with them: it also uses them as inputs in a way that is not known here, so that its predictions "
                "without them are different"
            )
        return loss

    def trains_by(
        self, kind: Kind, labels: Tensor, shape: torch.Size, classes_last: Callable[[Tensor], Tensor]
    ) -> bool:
        """Return whether the loss in training mode is of the same kind, given the scores [shape] of the same call."""
        self.plain.train()
        try:
            loss, leaves = self._with_loss(labels)
        except ValueError:  # such as too few rows for batch norm; training raises it again
            return True
        finally:
            self.plain.eval()
        scores = [classes_last(leaf) for leaf in leaves if is_float(leaf) and leaf.shape == shape]
        return any(bool(_close(loss, kind.loss(at_least_float32(y), kind.target(labels)), loss.dtype)) for y in scores)

    def _with_loss(self, labels: Tensor) -> tuple[Tensor, list[Any]]:
        """Return the model's own loss and all its output leaves, for a call with labels."""
        try:
            y = self._call(**map_tensors(lambda t: t.clone(), {**self.inputs, LABELS: labels}))
        except Exception as error:
            raise ValueError(
                f"data: the batches have {LABELS}, and the model fails to compute its loss for labels {list(labels.shape)} "
                f"({type(error).__name__}: {error}). {_REMEDY}"
            ) from error
        leaves, paths = flatten(y)[0], names(y)
        numbers = {path: leaf for path, leaf in zip(paths, leaves, strict=True) if is_float(leaf) and leaf.dim() == 0}
        loss = numbers.get("loss", next(iter(numbers.values())) if len(numbers) == 1 else None)
        if loss is None:
            raise ValueError(
                f"data: the batches have {LABELS}, and with them the model returns {', '.join(paths)}, none of which is its loss. {_REMEDY}"
            )
        return loss, leaves


def _kind(probe: _Probe, decoder: Callable[[Tensor], Tensor] | None, labels: Tensor, model: str) -> Kind:
    """Return the only known loss that agrees with the model's own, for the given labels and for random ones."""

    def scores_of(labels: Tensor) -> tuple[Tensor, Meaning]:
        return probe.scores(probe.answer(**({} if decoder is None else {DECODER: decoder(labels)})))

    scores, meaning = scores_of(labels)
    probe.loss(labels, scores)  # raises if the scores depend on labels
    classes_last = meaning.log_scores if isinstance(meaning, Logits | Probs) else lambda y: y
    kinds = [kind for kind in KINDS if kind.fits(classes_last(scores), labels)]
    if not kinds:
        raise ValueError(
            f"data: {LABELS} are {list(labels.shape)}, {'values' if labels.is_floating_point() else 'class numbers'}, and {model} gives scores "
            f"{list(scores.shape)}, which match none of the known losses. {_REMEDY}"
        )
    class_scores = classes_last(scores).float()
    candidates = _candidate_labels(labels, class_scores)
    agree, compared = _agreeing(probe, kinds, candidates, lambda labels: scores_of(labels)[0], classes_last)
    if len(agree) != 1 or (
        kinds[0].meanings == CLASSES[0] and bool((class_scores.amax(-1) == class_scores.amin(-1)).all())
    ):
        what = "cannot be told from" if agree else "is none of"
        if len(agree) == 1:
            what = "is not informative, since all scores are equal:"
        raise ValueError(
            f"data: the batches have {LABELS}, and how they correspond to the scores of {model} cannot be inferred: its own loss of a few rows, "
            f"{compared[0]}, {what}\n" + "\n".join(compared[1:]) + f"\n{_REMEDY}"
        )
    (kind,) = agree
    if not probe.trains_by(kind, candidates[1], scores.shape, classes_last):
        raise ValueError(
            f"data: the batches have {LABELS}, and the loss that {model} computes from them is {kind.words}, but another one in training mode. "
            f"{_REMEDY}"
        )
    if not isinstance(meaning, kind.meanings):
        line = f"{{{probe.name!r}: {kind.line}}}" if probe.name else kind.line
        raise ValueError(
            f"data: the batches have {LABELS}, and the loss that {model} computes from them is {kind.words}, but the scores were declared as "
            f"{type(meaning).__name__} when wrapping: write output={line}, with from workbench.outputs import "
            f"{kind.line.partition('(')[0]}"
        )
    return kind


def _agreeing(
    probe: _Probe,
    kinds: list[Kind],
    candidates: list[Tensor],
    scores_of: Callable[[Tensor], Tensor],
    classes_last: Callable[[Tensor], Tensor],
) -> tuple[list[Kind], list[str]]:
    """Return the kinds whose loss is the model's own for all candidates, of which the first are the labels of the batch.

    The texts next to them are the last losses compared: the model's own, and that of each kind.
    """
    texts: list[str] = []
    agree = {kind.words: kind for kind in kinds}
    for candidate in candidates:
        scores = scores_of(candidate)
        try:
            model_loss = probe.loss(candidate, scores)
        except ValueError:
            if candidate is candidates[-1] and candidate.is_floating_point():
                continue  # the loss refuses labels above 1
            raise
        class_scores = at_least_float32(classes_last(scores))
        by_kind = {kind.words: kind.loss(class_scores, kind.target(candidate)) for kind in kinds}
        if not model_loss.isfinite() and candidate is candidates[0]:
            continue  # such as if all labels are left out
        texts = [f"{model_loss:.7g}", *(f"    {loss:.7g}  {words}" for words, loss in by_kind.items())]
        agree = {
            words: kind for words, kind in agree.items() if bool(_close(model_loss, by_kind[words], model_loss.dtype))
        }
        if not agree:
            break
    return list(agree.values()), texts


def _few(inputs: dict[str, Any], labels: Tensor) -> tuple[dict[str, Any], Tensor]:
    """Return the first `ROWS` rows; everything if inputs differ in length."""
    if not labels.dim() or not all(
        isinstance(v, Tensor) and v.dim() and len(v) == len(labels) for v in inputs.values()
    ):
        return inputs, labels
    return {name: value[:ROWS] for name, value in inputs.items()}, labels[:ROWS]


def _with_padding(inputs: dict[str, Any]) -> dict[str, Any]:
    """Mask one position, to distinguish losses that leave out masked positions from those of labels alone."""
    mask = inputs.get(MASK)
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] < 2 or not bool((mask == 1).all()):
        return inputs
    mask = mask.clone()
    mask[0, -1] = 0
    return {**inputs, MASK: mask}


def _candidate_labels(labels: Tensor, scores: Tensor) -> list[Tensor]:
    """Return labels for which to compare losses: the given ones, and others of the same shape."""
    generator = torch.Generator().manual_seed(0)
    if labels.is_floating_point():
        values = [torch.rand(labels.shape, generator=generator) for _ in range(2)]
        # large ones, since all losses of labels up to 1 are about log 2 where scores are near 0, as those of new layers
        return [labels, *(v.to(labels) for v in (values[0], (values[1] > 0.5).float(), 1000 * values[1]))]
    n = labels.numel()
    classes = scores.shape[-1] if scores.shape[:-1] == labels.shape else 2
    numbers = (torch.arange(n) % classes)[torch.randperm(n, generator=generator)].reshape(labels.shape).to(labels)
    candidates = [labels, numbers]
    if scores.shape[:-1] == labels.shape and classes > 1:
        candidates += [scores.argmax(-1), scores.argmin(-1)]
    if labels.dim() > 1 or bool((labels == IGNORED).any()):
        left_out = (
            (torch.arange(n) % 3 == 1)[torch.randperm(n, generator=generator)].reshape(labels.shape).to(labels.device)
        )
        candidates += [y.masked_fill(left_out, IGNORED) for y in candidates[1:2]]
    return candidates


def _close(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    tolerance = 1e-5 if torch.finfo(dtype).bits >= 32 else 1e-2
    return (a - b).abs() <= tolerance * (1 + b.abs())


__all__ = ["DECODER", "LABELS", "Pairing", "decoder_of", "pairing_of", "refuse_others", "without_labels"]
