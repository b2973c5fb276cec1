"""Descriptions of a model's outputs: name, shape, how each is interpreted, and the line to write if it means something else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.outputs.class_scores import Binary, Logits, Probs
from ..core.outputs.meanings import Detections, Mean, Meaning
from ..core.outputs.resolution import in_code, quoted, resolve
from ..engine.tree import children, flatten, is_float, names, tensors
from ..introspect.source_lines import some_of
from .observed_run import ObservedRun
from .tracers import SQUASHING

SIGMOIDS = ("sigmoid", "expit", "sigmoid_")
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
_PLAIN = bool | int | float | complex | str


@dataclass(frozen=True)
class DescribedOutput:
    """One output of a model.

    Args:
        name: its dotted name, as in output={name: ...}; "" for a single output.
        shape: of a tensor, else None.
        dtype: of a tensor such as "float32", else the name of its class.
        taken_for: how it is interpreted without the option `output`.
        lines: options to write if it means something else, each with a comment.
        meaning: the meaning that its numbers reveal, such as probabilities; None if they leave it open.
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: str
    taken_for: str
    lines: tuple[str, ...] = ()
    meaning: Meaning | None = None

    def kind(self) -> str:
        """Type and shape, such as "float32 [4, 3]"."""
        return self.dtype if self.shape is None else f"{self.dtype} {list(self.shape)}"


def describe_outputs(run: ObservedRun) -> list[DescribedOutput]:
    """Return descriptions of all outputs of a run, in their order; the detections of several images are one output."""
    if detections := _detections(run.output):
        return [detections]
    leaves = flatten(run.output)[0]
    makers = [run.maker(leaf) for leaf in leaves]
    return list(_describe_leaves(run, names(run.output), leaves, makers))


def _describe_leaves(
    run: ObservedRun, dotted_names: list[str], leaves: list[Any], makers: list[str]
) -> Iterator[DescribedOutput]:
    meanings = resolve(None, lambda: dotted_names, leaves, 0)
    states = [_is_state(i, leaf, makers[i]) for i, leaf in enumerate(leaves)]
    for i, (name, leaf, meaning) in enumerate(zip(dotted_names, leaves, meanings, strict=True)):
        if leaf is None:
            continue
        choices = _choices(run, leaf, makers[i])
        lines = [_line(name, chosen, comment) for chosen, comment in choices]
        is_certain = len(choices) == 1 and (makers[i] in SQUASHING or isinstance(choices[0][0], Probs))
        if states[i]:
            lines = [_state_line(name, dotted_names, states)]
        is_tensor = isinstance(leaf, Tensor)
        kind = str(leaf.dtype).removeprefix("torch.") if is_tensor else type(leaf).__name__
        yield DescribedOutput(
            name,
            tuple(leaf.shape) if is_tensor else None,
            kind,
            _interpretation(leaf, meaning),
            tuple(lines),
            choices[0][0] if is_certain else None,
        )


def meaning_of_numbers(described: list[DescribedOutput]) -> Meaning | None:
    """Return the meaning of a single output, if its numbers reveal it."""
    return described[0].meaning if len(described) == 1 else None


def _interpretation(leaf: Any, meaning: Meaning | None) -> str:
    """How an output is interpreted without the option `output`, in words."""
    if meaning is not None:
        is_mean = isinstance(meaning, Mean)
        return "mean, without a risk" if is_mean else "values, with a standard deviation each"
    if isinstance(leaf, Tensor):
        return "whole numbers, without a risk: the majority of the branches"
    if isinstance(leaf, _PLAIN):
        return "the same in all branches, else refused"
    return "the first branch's; passed back unchanged, each branch continues with its own (copied or changed: refused)"


# ---- what else it could be
def _choices(run: ObservedRun, leaf: Any, made_by: str) -> list[tuple[Meaning, str]]:
    """Other meanings than values that an output of this shape could have, each with a comment that says in which case."""
    if not is_float(leaf) or leaf.is_complex() or not leaf.dim() or not leaf.numel():
        return []
    if run.call.n_rows() not in (None, len(leaf)):
        return []
    if distribution := _distribution_of_classes(leaf, made_by):
        return [distribution]
    if made_by in SIGMOIDS:
        return [(Binary(False), f"probabilities of {_yes_or_no(leaf.shape)}")]
    if leaf.shape[1:].numel() == 1 or (leaf.dim() > 2 and leaf.shape[1] == 1):
        return [(Binary(), f"scores of {_yes_or_no(leaf.shape)}")]
    if leaf.dim() == 2:
        return [
            (Logits(), f"scores of {_classes(leaf.shape[1])}"),
            (Binary(), f"scores of {_yes_or_no(leaf.shape)}"),
        ]
    class_dims = _class_dims(run, leaf.shape)
    return [(Logits(dim), f"scores of {_classes(leaf.shape[dim])}{where}") for dim, where in class_dims]


def _distribution_of_classes(leaf: Tensor, made_by: str) -> tuple[Meaning, str] | None:
    """(Log-)probabilities that sum to one over the classes, with the comment; None if the numbers do not."""
    is_log = made_by == "log_softmax"
    kind, what = (Logits, "log-probabilities") if is_log else (Probs, "probabilities")
    for dim in (1, -1) if leaf.dim() > 1 else ():
        if leaf.shape[dim] > 1 and sums_to_one(leaf.exp() if is_log else leaf, dim):
            return kind(None if leaf.dim() == 2 else dim), f"{what} of {_classes(leaf.shape[dim])}"
    return None


def _yes_or_no(shape: torch.Size) -> str:
    """What an output of yes or no of this shape decides."""
    if shape[1:].numel() == 1:
        return "a yes or no"
    return f"{shape[1]} labels, each a yes or no" if len(shape) == 2 else "a yes or no in each place"


def _class_dims(run: ObservedRun, shape: torch.Size) -> Iterator[tuple[int, str]]:
    """Dimensions that could be those of classes, for outputs of three or more dimensions, each with words for the comment."""
    shapes = {leaf.shape for leaf in tensors((run.call.args, run.call.kwargs))}
    is_sequence = shape[:-1] in shapes  # one number per token in, scores per token out
    if not is_sequence:
        yield 1, " in each pixel" if len(shape) == 4 else " in each place"
    if (is_sequence or len(shape) == 3) and shape[-1] > 1:
        yield -1, " for each token"


def squashed_remedy(name: str, leaf: Tensor, made_by: str) -> str:
    """Return the remedy for an output that is squashed to probabilities."""
    dim = next((dim for dim in (1, -1) if leaf.dim() > 2 and sums_to_one(leaf, dim)), None)
    if made_by == "log_softmax":
        dim = next((dim for dim in (1, -1) if leaf.dim() > 2 and sums_to_one(leaf.exp(), dim)), None)
        return f"wrap with {_option(name, Logits(dim))}, for which log-probabilities are as good"
    before, after = (Binary(), Binary(False)) if made_by in SIGMOIDS else (Logits(dim), Probs(dim))
    return f"return logits and wrap with {_option(name, before)}, or keep it and wrap with {_option(name, after)}"


def sums_to_one(leaf: Tensor, dim: int) -> bool:
    """Return whether the numbers along a dimension are non-negative and sum to one, as probabilities do."""
    total = leaf.detach().sum(dim)
    return bool((leaf >= 0).all()) and torch.allclose(total, torch.ones_like(total), atol=1e-3)


def _classes(n: int) -> str:
    return f"{n} classes"


def _line(name: str, meaning: Meaning, comment: str) -> str:
    return f"{_option(name, meaning)}  # {comment}"


def write(meaning: Meaning) -> str:
    """Return a meaning as it is written in the option `output`."""
    return in_code(meaning) if meaning != Detections() else "Detections()"


def _option(name: str, meaning: Meaning) -> str:
    """The option for one output."""
    written = write(meaning)
    if name and name.rpartition(".")[2] != written.strip('"'):  # "logits" finds an output of this name
        written = f"{{{quoted(name)}: {written}}}"
    return f"output={written}"


# ---- state that the caller passes on
def _is_state(i: int, leaf: Any, made_by: str) -> bool:
    """Whether an output may be a state that the caller passes to the next call: a cache, or the last state of a recurrent layer."""
    if isinstance(leaf, Tensor):
        return i > 0 and made_by in _RECURRENT
    return leaf is not None and not isinstance(leaf, _PLAIN)


def _state_line(name: str, dotted_names: list[str], states: list[bool]) -> str:
    first = name.partition(".")[0]
    siblings = [states[i] for i, other in enumerate(dotted_names) if other.partition(".")[0] == first]
    return f"state={quoted(first if all(siblings) else name)}  # if the caller passes it to the next call"


# ---- detections
def _detections(output: Any) -> DescribedOutput | None:
    """A description of boxes, scores and labels, for one image or a list of images; None for other outputs."""
    images = output if isinstance(output, list | tuple) and output else [output]
    for image in images:
        parts = {name.strip("[].'\"") for name, _ in children(image) or ()}
        if not {"boxes", "scores"} <= parts:
            return None
    names_of_image = {name.strip("[].'\"") for name, _ in children(images[0]) or ()}
    meaning = Detections() if "labels" in names_of_image else Detections(labels=None)
    counts = some_of((len(tensors(image)[0]) for image in images), 4)
    return DescribedOutput(
        "",
        None,
        f"boxes of {len(images)} {'image' if len(images) == 1 else 'images'} ({counts})",
        "values, refused where the model selects boxes",
        (_line("", meaning, "boxes are matched over the branches"),),
        meaning,
    )
