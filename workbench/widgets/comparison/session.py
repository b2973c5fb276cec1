"""The session file of a comparison: all its runs, saved as they end, to be read by another kernel or machine."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from workbench import atomic
from workbench.data import Data
from workbench.training import History

from ..common.predictions import Predictions
from .settings import Candidate
from .trials import Trained, Training

FORMAT = "workbench comparison session 1"


@dataclass(frozen=True)
class Contents:
    """Contents of a session file, not yet checked against data and model.

    Args:
        path: path of the file.
        data: name of the data set.
        digest: digest of its rows.
        model: description of the model; "" in files of earlier versions.
        splits: splits of its runs.
        records: a dict for each run.
        deleted: numbers of the deleted runs, by id.
    """

    path: Path
    data: str
    digest: str
    model: str
    splits: list[int]
    records: list[dict[str, Any]]
    deleted: dict[str, int]

    def __str__(self) -> str:
        count = len([record for record in self.records if record["id"] not in self.deleted])
        of = f" of {self.model}" if self.model else ""
        splits = (
            f", split{'s' if len(self.splits) > 1 else ''} {', '.join(map(str, self.splits))}" if self.splits else ""
        )
        return f"{self.path.name} holds {count} run{'' if count == 1 else 's'}{of} on {self.data}{splits}"


def contents(path: Path) -> Contents | None:
    """Read a session file; return None if it does not exist.

    Raises:
        ValueError: if the file is not a session file.
    """
    if not path.exists():
        return None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}")
        splits = sorted({record["split"] for record in content["runs"]})
        return Contents(
            path,
            content["data"],
            content["digest"],
            content.get("model", ""),
            splits,
            content["runs"],
            dict(content.get("deleted", {})),
        )
    except Exception as error:
        raise ValueError(
            f"session: {path} is no session file of a Comparison ({type(error).__name__}: {error!s:.200}); give the path of one, "
            "or of a new file"
        ) from error


class Session:
    """A file with the runs of a comparison, which several kernels may use at once; without a path nothing is written.

    Runs are identified by their ids. The file also has the ids and numbers of deleted runs, so that another kernel does not write such a run
    back, and no number is used twice.

    Args:
        path: path of the file, which need not exist; None for no file.
        data: data of the runs; a file of other data is refused.
        model: description of the model, for readers of the file.
    """

    def __init__(self, path: Path | None, data: Data, model: str = "") -> None:
        self.path, self.data, self._model = path, data, model
        self._digest = ""
        # keeps models of this kernel, in case another kernel restores a deleted run
        self._seen: dict[str, Trained] = {}
        self._deleted: dict[str, int] = {}  # id -> number

    def read(self, versions: tuple[int, ...]) -> list[Trained]:
        """Return the runs of the file, those of other kernels without weights; none if there is no file.

        Args:
            versions: current versions of the data, assigned to runs on these data.

        Raises:
            ValueError: if the file is not a session file, or one of other data.
        """
        runs = [self._seen.get(record["id"]) or _run(record, versions) for record in self._records()]
        self._seen |= {run.id: run for run in runs}
        return _numbered([run for run in runs if run.id not in self._deleted], self._deleted.values())

    def save(
        self,
        runs: Sequence[Trained],
        versions: tuple[int, ...],
        *,
        deleted: Sequence[Trained] = (),
        restored: Sequence[Trained] = (),
    ) -> list[Trained]:
        """Write all runs atomically, merged with those that another kernel has written meanwhile.

        Args:
            runs: runs of this kernel; those without a number get the next one.
            versions: current versions of the data.
            deleted, restored: runs to delete, or to restore.

        Returns:
            All runs, by number, without those that another kernel has deleted.

        Raises:
            ValueError: as `read`.
        """
        with self._locked():
            others = self.read(versions)
            self._deleted |= {run.id: run.number for run in deleted}
            for run in restored:
                self._deleted.pop(run.id, None)
            by_id = {run.id: run for run in [*others, *runs, *restored] if run.id not in self._deleted}
            merged = _numbered(list(by_id.values()), self._deleted.values())
            self._seen |= by_id
            if self.path is not None:
                self._digest = self._digest or self.data.checksum
                records = [_record(run, run.versions == versions) for run in merged]
                content = {"format": FORMAT, "data": self.data.name, "digest": self._digest, "model": self._model}
                buffer = io.BytesIO()
                torch.save({**content, "runs": records, "deleted": self._deleted}, buffer)
                atomic.write(self.path, buffer.getvalue())
        return merged

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other kernels from reading and writing the file meanwhile."""
        if self.path is None:
            yield
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with atomic.locked(self.path.with_name(f".{self.path.name}.lock")):
            yield

    def _records(self) -> list[dict[str, Any]]:
        """Return the records of the file, and note which runs are deleted."""
        saved = None if self.path is None else contents(self.path)
        if saved is None:
            return []
        self._digest = self._digest or self.data.checksum
        if saved.digest != self._digest:
            raise ValueError(
                f"session: {self.path} holds runs of {saved.data} (digest {saved.digest[:12]}), but the data here are "
                f"{self.data.name} (digest {self._digest[:12]}); give the data of these runs, or another path"
            )
        self._deleted = saved.deleted
        return saved.records


def _numbered(runs: list[Trained], deleted: Iterable[int]) -> list[Trained]:
    """Return the runs by number; those without a number, or with one that is taken, get the next ones."""
    taken = set(deleted)
    last = max([*taken, *(run.number for run in runs)], default=0)
    for run in sorted(runs, key=lambda run: run.number or math.inf):
        if not run.number or run.number in taken:
            last = run.number = last + 1
        taken.add(run.number)
    return sorted(runs, key=lambda run: run.number)


PLAIN_FIELDS = ("name", "status", "scores", "origin", "id", "number", "settings", "made", "began", "split", "software")


def _record(run: Trained, same_data: bool) -> dict[str, Any]:
    answers = run.answers
    return {
        **{name: getattr(run, name) for name in PLAIN_FIELDS},
        "training": asdict(run.training),
        "same_data": same_data,
        "history": (list(run.history.records), run.history.best_epoch, run.history.interrupted),
        "answers": None if answers is None else {f.name: getattr(answers, f.name) for f in fields(Predictions)},
    }


def _run(record: dict[str, Any], versions: tuple[int, ...]) -> Trained:
    answers = record["answers"]
    return Trained(
        candidate=Candidate(record["name"]),
        training=Training(**record["training"]),
        wrapped=None,
        history=History(*record["history"]),
        answers=None if answers is None else Predictions(**answers),
        versions=versions if record["same_data"] else (-1,),
        **{name: record[name] for name in PLAIN_FIELDS},
    )
