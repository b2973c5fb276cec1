"""Check the arguments of a comparison, before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from workbench.core.wrapper import Wrapper
from workbench.data import Data

from ..common.inputs import Model, check_fits
from ..common.positions import comparable_data, refuse_one_class
from .controls import MAX_REPEATS
from .settings import PLAIN, Candidate, Part, candidates, fitting, wrapper_classes
from .trials import Training, check_training

# ticked by default, by task
DEFAULTS = {"regression": ("sculpt", "vote", "vote+sculpt+neo"), "classification": ("sample", "vote", "vote+neo")}
DEFAULTS |= {"labels": DEFAULTS["classification"]}
OUTPUTS = ("values", "logits", "probs", "binary")


@dataclass(frozen=True)
class Request:
    """The arguments of `Comparison` other than model and data.

    Raises:
        TypeError, ValueError: if a setting is out of range, or there is no such wrapper.
    """

    wrappers: dict[str, Wrapper] | Sequence[Wrapper | str] | None
    training: Training
    split: int
    seeds: int
    splits: int
    output: str | None
    session: Path | None

    def __post_init__(self) -> None:
        check_training(self.training)
        for name, count in (("seeds", self.seeds), ("splits", self.splits)):
            if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_REPEATS:
                raise ValueError(f"{name} must be a whole number from 1 to {MAX_REPEATS}; found {count!r}")
        if self.output is not None and self.output not in OUTPUTS:
            raise ValueError(f'output must be "values", "logits", "probs" or "binary", not {self.output!r}')
        if self.wrappers is not None:
            candidates(self.wrappers)


@dataclass(frozen=True)
class Prepared:
    """A model, data and candidates that have been checked to fit together.

    Args:
        model: model to wrap.
        plain: one instance of it.
        data: data as they are compared.
        source: data as given by the user.
        output: what the model gives.
        rows: candidates, whether each is ticked, and whether it can be removed.
    """

    model: Model
    plain: nn.Module
    data: Data
    source: Any
    output: Any
    rows: list[tuple[Candidate, bool, bool]]


def prepared(model: Any, source: Any, request: Request) -> Prepared:
    """Check that model, data and the other arguments fit together.

    Raises:
        TypeError, ValueError: as `Comparison`.
    """
    Model(model)
    data = comparable_data(source, request.split)
    to_wrap, task, output = Model(model, data), data.task, request.output
    refuse_one_class(data)
    chosen = candidates(DEFAULTS[task] if request.wrappers is None else request.wrappers)
    chosen = [Candidate(c.name, [fitting(part, task) for part in c.parts]) for c in chosen if c.parts]
    for candidate in chosen:
        if candidate.name == PLAIN:
            raise ValueError(f"wrappers: {PLAIN!r} is the baseline; give {candidate.build()!r} another name")
        candidate.build()
    plain = to_wrap.new(request.training.seed)
    meaning = check_fits(plain, data)
    if task == "labels":
        fits = output == "binary"
    else:
        fits = (output == "values") == (meaning == "values") if isinstance(meaning, str) else output == "logits"
    if output is not None and (not fits or (output == "binary") != (task == "labels")):
        raise ValueError(f"output={output!r} does not fit {task} data")
    output = (output or meaning) if isinstance(meaning, str) or task == "labels" else meaning
    rows = [(Candidate(PLAIN), True, False), *((c, True, len(c.parts) > 1) for c in chosen)]
    for name, cls in wrapper_classes().items() if request.wrappers is None else ():
        if name not in {candidate.name for candidate, _, _ in rows}:
            rows.append((Candidate(name, [fitting(Part(cls), task)]), False, False))
    return Prepared(to_wrap, plain, data, source, output, rows)
