"""What is known about the rows that a wrapped model was trained on, for its files and its model card."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sized
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

Facts = dict[str, Any]
SHOWN = 12  # columns that a card names
UNKNOWN = "not recorded"


def facts_of(data: Any) -> Facts:
    """What rows say of themselves, without being read; what they do not say is left out.

    Args:
        data: a Dataset, also one of the package datasets, a DataLoader that goes through one, or a dict of columns.

    Returns:
        By what it is: "name", "rows", "columns", "checksum".
    """
    if isinstance(data, DataLoader):
        whole = type(data.sampler) in (SequentialSampler, RandomSampler) and type(data.batch_sampler) is BatchSampler
        return facts_of(data.dataset) if whole else {}
    columns = list(data) if isinstance(data, Mapping) else getattr(data, "column_names", None)
    fingerprint = getattr(data, "_fingerprint", None)
    facts = {
        "name": getattr(getattr(data, "info", None), "dataset_name", None),
        "rows": len(data) if isinstance(data, Sized) and not isinstance(data, Mapping) else None,
        "columns": [*map(str, columns)] if isinstance(columns, list | tuple) else None,
        "checksum": f"fingerprint {fingerprint}" if isinstance(fingerprint, str) else None,
    }
    return {what: fact for what, fact in facts.items() if fact is not None}


def note_training(wrapped: Any, facts: Facts, by: str) -> None:
    """Remember a training; one more by the same on the same rows takes the place of the last.

    Args:
        wrapped: the wrapped model.
        facts: of the rows, as of `facts_of`.
        by: what trained it.
    """
    record, training = wrapped._workbench, {**facts, "by": by}
    *earlier, last = record.trainings or ({},)
    repeated = {what: fact for what, fact in last.items() if what != "date"} == training
    date = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    record.trainings = (*(earlier if repeated else record.trainings), {**training, "date": date})


def note_trainer(wrapped: Any, frame: Any) -> None:
    """Remember the training by the Trainer of transformers that saves a model, which tells the model nothing of its rows.

    Args:
        wrapped: the wrapped model.
        frame: what calls `save_pretrained`.
    """
    trainer: Any = frame.f_locals.get("self")
    if any(cls.__module__ == "transformers.trainer" for cls in type(trainer).__mro__) and trainer.state.global_step:
        note_training(wrapped, facts_of(trainer.train_dataset), "a Trainer of transformers")


def card_section(record: Any) -> str:
    """What a model card says about the data.

    Args:
        record: of the wrapped model.
    """
    lines = [] if record.data is None else [record.data, ""]
    if record.trainings:
        lines += ["| data | rows | columns | checksum | trained by |", "|---|---|---|---|---|"]
    lines += [f"| {' | '.join(_cells(training))} |" for training in record.trainings]
    if not record.trainings:
        lines.append(f"Rows, columns and checksum of the data that it was trained on: {UNKNOWN}.")
    return "\n".join(lines)


def _cells(training: Facts) -> list[str]:
    columns, rows = training.get("columns", [UNKNOWN]), training.get("rows", UNKNOWN)
    more = [f"and {len(columns) - SHOWN} more"] if len(columns) > SHOWN else []
    held_out = f", and {training['validation rows']} to validate on" if "validation rows" in training else ""
    cells = [
        training.get("name", UNKNOWN),
        f"{rows}{held_out}",
        ", ".join([*columns[:SHOWN], *more]),
        training.get("checksum", UNKNOWN),
        f"{training['by']}, {training['date']}",
    ]
    return [" ".join(cell.split()).replace("|", "/") for cell in cells]


__all__ = ["Facts", "card_section", "facts_of", "note_trainer", "note_training"]
