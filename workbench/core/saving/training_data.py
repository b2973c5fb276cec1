"""Facts about the training data of a wrapped model, for its files and its model card."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sized
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

Facts = dict[str, Any]
MAX_COLUMNS = 12  # number of columns listed in a card
UNKNOWN = "not recorded"


def facts_of(data: Any) -> Facts:
    """Collect facts about rows without reading them; unknown facts are left out.

    Args:
        data: a torch or Hugging Face dataset, a DataLoader over the whole of one, or a dict of columns.

    Returns:
        Dict with any of the keys "name", "rows", "columns", "checksum".
    """
    if isinstance(data, DataLoader):
        is_complete = (
            type(data.sampler) in (SequentialSampler, RandomSampler) and type(data.batch_sampler) is BatchSampler
        )
        return facts_of(data.dataset) if is_complete else {}
    columns = list(data) if isinstance(data, Mapping) else getattr(data, "column_names", None)
    fingerprint = getattr(data, "_fingerprint", None)
    facts = {
        "name": getattr(getattr(data, "info", None), "dataset_name", None),
        "rows": len(data) if isinstance(data, Sized) and not isinstance(data, Mapping) else None,
        "columns": [*map(str, columns)] if isinstance(columns, list | tuple) else None,
        "checksum": f"fingerprint {fingerprint}" if isinstance(fingerprint, str) else None,
    }
    return {key: fact for key, fact in facts.items() if fact is not None}


def note_training(wrapped: Any, facts: Facts, by: str) -> None:
    """Record a training; a repeated training on the same rows replaces the last record.

    Args:
        wrapped: the wrapped model.
        facts: facts about the rows, as from `facts_of`.
        by: name of what trained the model.
    """
    record, training = wrapped._workbench, {**facts, "by": by}
    *earlier, last = record.trainings or ({},)
    repeated = {key: fact for key, fact in last.items() if key != "date"} == training
    date = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    record.trainings = (*(earlier if repeated else record.trainings), {**training, "date": date})


def note_trainer(wrapped: Any, frame: Any) -> None:
    """Record the training by a transformers Trainer that saves a model; the rows are found through the Trainer in the calling frame.

    Args:
        wrapped: the wrapped model.
        frame: stack frame of the caller of `save_pretrained`.
    """
    trainer: Any = frame.f_locals.get("self")
    if any(cls.__module__ == "transformers.trainer" for cls in type(trainer).__mro__) and trainer.state.global_step:
        note_training(wrapped, facts_of(trainer.train_dataset), "a Trainer of transformers")


def card_section(record: Any) -> str:
    """Return the section of a model card about the data.

    Args:
        record: record of the wrapped model.
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
    more = [f"and {len(columns) - MAX_COLUMNS} more"] if len(columns) > MAX_COLUMNS else []
    held_out = f", and {training['validation rows']} to validate on" if "validation rows" in training else ""
    cells = [
        training.get("name", UNKNOWN),
        f"{rows}{held_out}",
        ", ".join([*columns[:MAX_COLUMNS], *more]),
        training.get("checksum", UNKNOWN),
        f"{training['by']}, {training['date']}",
    ]
    return [" ".join(cell.split()).replace("|", "/") for cell in cells]


__all__ = ["Facts", "card_section", "facts_of", "note_trainer", "note_training"]
