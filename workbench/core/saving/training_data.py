"""Facts about the data that a wrapped model was trained, fitted and calibrated on, for its files and its model card."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence, Sized
from typing import Any

from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

Facts = dict[str, Any]
MAX_COLUMNS = 12  # number of columns listed in a card
UNKNOWN = "not recorded"
FIT = "wrapped.fit"


def facts_of(data: Any) -> Facts:
    """Collect facts about rows without reading them; unknown facts are left out.

    Args:
        data: a torch or Hugging Face dataset, a DataLoader over the whole of one, a Data or a Split, a tensor, a pair of tensors, a list of
            batches, or a dict of columns.

    Returns:
        Dict with any of the keys "name", "rows", "columns", "checksum".
    """
    if isinstance(data, DataLoader):
        is_complete = (
            type(data.sampler) in (SequentialSampler, RandomSampler) and type(data.batch_sampler) is BatchSampler
        )
        if not is_complete:
            return {}
        rows = {"rows": len(data.dataset)} if isinstance(data.dataset, Sized) else {}
        return {**facts_of(data.dataset), **rows}
    columns = list(data) if isinstance(data, Mapping) else getattr(data, "column_names", None)
    fingerprint = getattr(data, "_fingerprint", None)
    facts = {
        "name": getattr(getattr(data, "info", None), "dataset_name", None),
        "rows": _rows_of(data),
        "columns": [*map(str, columns)] if isinstance(columns, list | tuple) else None,
        "checksum": f"fingerprint {fingerprint}" if isinstance(fingerprint, str) else None,
    }
    origin = getattr(data, "origin", None)
    return {
        **(dict(origin) if isinstance(origin, Mapping) else {}),
        **{key: fact for key, fact in facts.items() if fact is not None},
    }


def _rows_of(data: Any) -> int | None:
    if isinstance(data, list):  # of batches
        counts = [_rows_of(batch) for batch in data]
        return None if None in counts else sum(count for count in counts if count is not None)
    if isinstance(data, Mapping | tuple):
        counts = [_rows_of(part) for part in (data.values() if isinstance(data, Mapping) else data)]
        return next((count for count in counts if count is not None), None)
    if isinstance(data, Tensor):
        return len(data) if data.dim() else None
    return len(data) if isinstance(data, Sized) and not isinstance(data, str | bytes) else None


def today() -> str:
    return f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"


def note_training(wrapped: Any, facts: Facts, by: str) -> None:
    """Record a training; a repeated training on the same rows replaces the last record, and what was fitted before is void.

    Args:
        wrapped: the wrapped model.
        facts: facts about the rows, as from `facts_of`.
        by: name of what trained the model.
    """
    record, training = wrapped._workbench, {**facts, "by": by}
    *earlier, last = [entry for entry in record.trainings if not entry["by"].startswith(FIT)] or ({},)
    repeated = {key: fact for key, fact in last.items() if key != "date"} == training
    record.trainings = (*earlier, *([last] if last and not repeated else []), {**training, "date": today()})


def note_fit(wrapped: Any, data: Any) -> None:
    """Record the data of `wrapped.fit`, in place of those of an earlier call.

    Args:
        wrapped: the wrapped model.
        data: the data that the user passed. Those with `of_training` come from a training, which is recorded itself.
    """
    if getattr(data, "of_training", False):
        return
    record = wrapped._workbench
    names = " and ".join(method.name for method in record.methods if method.needs_fit)
    earlier = [entry for entry in record.trainings if not entry["by"].startswith(FIT)]
    record.trainings = (*earlier, {**facts_of(data), "by": f"{FIT} of {names}", "date": today()})


def note_trainer(wrapped: Any, frame: Any) -> None:
    """Record the training by a transformers Trainer that saves a model; the rows are found through the Trainer in the calling frame.

    Args:
        wrapped: the wrapped model.
        frame: stack frame of the caller of `save_pretrained`.
    """
    trainer: Any = frame.f_locals.get("self")
    if any(cls.__module__ == "transformers.trainer" for cls in type(trainer).__mro__) and trainer.state.global_step:
        note_training(wrapped, facts_of(trainer.train_dataset), "a Trainer of transformers")


def card_section(record: Any, around: Sequence[Mapping[str, Any]]) -> str:
    """Return the section of a model card about the data.

    Args:
        record: record of the wrapped model.
        around: descriptions of the modules around it, such as calibrations, the outermost first.
    """
    lines = [] if record.data is None else [record.data, ""]
    calibrations = [
        {"date": UNKNOWN, **(entry.get("data") or {}), "by": f"`{entry['class']}`"} for entry in reversed(around)
    ]
    used = [*record.trainings, *calibrations]
    if all(entry["by"].startswith(FIT) for entry in record.trainings):
        lines += [f"Rows, columns and checksum of the data that it was trained on: {UNKNOWN}.", *([""] if used else [])]
    if used:
        lines += ["| data | rows | columns | checksum | used by |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(_cells(entry))} |" for entry in used)])


def _cells(entry: Facts) -> list[str]:
    columns, rows = entry.get("columns", [UNKNOWN]), entry.get("rows", UNKNOWN)
    more = [f"and {len(columns) - MAX_COLUMNS} more"] if len(columns) > MAX_COLUMNS else []
    held_out = f", and {entry['validation rows']} to validate on" if "validation rows" in entry else ""
    cells = [
        entry.get("name", UNKNOWN),
        f"{rows}{held_out}",
        ", ".join([*columns[:MAX_COLUMNS], *more]),
        entry.get("checksum", UNKNOWN),
        f"{entry['by']}, {entry['date']}",
    ]
    return [" ".join(cell.split()).replace("|", "/") for cell in cells]


__all__ = ["Facts", "card_section", "facts_of", "note_fit", "note_trainer", "note_training", "today"]
