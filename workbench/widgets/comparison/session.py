"""The session file of a comparison: all its runs, saved as they come, read again by another kernel or machine."""

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
from workbench.errors import require
from workbench.training import History

from ..common.predictions import Predictions
from .settings import Candidate
from .trials import Trained, Training

FORMAT = "workbench comparison session 1"


@dataclass(frozen=True)
class Contents:
    """What a session file holds, before it is known of what data and model it is used.

    Args:
        path: of the file.
        data: name of the data set.
        digest: of its rows.
        model: in words; empty in files of earlier versions.
        splits: that its runs are of.
        records: a dict for each run.
        deleted: ids and numbers of the runs that were deleted.
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
    """What a session file holds; None if there is no file.

    Raises:
        ValueError: the file is no session.
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
            "or of a file that is not there yet"
        ) from error


class Session:
    """A file that keeps the runs of a comparison, for several kernels at once; without a path nothing is written.

    Runs are told apart by their ids. The file also holds the ids of the runs that were deleted, so that a kernel that still has one of them does
    not write it back, and no number is given twice.

    Args:
        path: the file, which need not be there.
        data: what the runs are of; a file of other data is refused.
        model: what is trained, in words, for who opens the file.
    """

    def __init__(self, path: Path | None, data: Data, model: str = "") -> None:
        self.path, self.data, self._model = path, data, model
        self._digest = ""
        self._seen: dict[str, Trained] = {}  # with the models of this kernel, should another one undo a deletion
        self._deleted: dict[str, int] = {}  # id -> number

    def read(self, versions: tuple[int, ...]) -> list[Trained]:
        """The runs of the file, those of other kernels without weights; none if there is no file.

        Args:
            versions: of the data now, which runs on these data are given.

        Raises:
            ValueError: the file is no session, or one of other data.
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
        """Write all runs, whole or not at all, with those that another kernel has put there meanwhile.

        Args:
            runs: of this kernel; those without a number are given the next one.
            versions: of the data now.
            deleted, restored: runs that are deleted by this, or brought back.

        Returns:
            All runs there are now, by number: without those that another kernel has deleted.

        Raises:
            ValueError: as `read`.
        """
        with self._alone():
            others = self.read(versions)
            self._deleted |= {run.id: run.number for run in deleted}
            for run in restored:
                self._deleted.pop(run.id, None)
            together = {run.id: run for run in [*others, *runs, *restored] if run.id not in self._deleted}
            merged = _numbered(list(together.values()), self._deleted.values())
            self._seen |= together
            if self.path is not None:
                self._digest = self._digest or self.data.checksum
                records = [_record(run, run.versions == versions) for run in merged]
                content = {"format": FORMAT, "data": self.data.name, "digest": self._digest, "model": self._model}
                buffer = io.BytesIO()
                torch.save({**content, "runs": records, "deleted": self._deleted}, buffer)
                atomic.write(self.path, buffer.getvalue())
        return merged

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other kernel reads and writes the file meanwhile."""
        if self.path is None:
            yield
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with require("filelock").FileLock(self.path.with_name(f".{self.path.name}.lock")):
            yield

    def _records(self) -> list[dict[str, Any]]:
        """What the file holds of each run; which ones are deleted is noted."""
        saved = None if self.path is None else contents(self.path)
        if saved is None:
            return []
        self._digest = self._digest or self.data.checksum
        if saved.digest != self._digest:
            raise ValueError(
                f"session: {self.path} holds runs of {saved.data} (digest {saved.digest[:12]}), but the data here are "
                f"{self.data.name} (digest {self._digest[:12]}); give the data that it was made with, or another path"
            )
        self._deleted = saved.deleted
        return saved.records


def _numbered(runs: list[Trained], deleted: Iterable[int]) -> list[Trained]:
    """The runs by number; those without one, and those whose number an earlier one has, are given the next ones."""
    taken = set(deleted)
    last = max([*taken, *(run.number for run in runs)], default=0)
    for run in sorted(runs, key=lambda run: run.number or math.inf):
        if not run.number or run.number in taken:
            last = run.number = last + 1
        taken.add(run.number)
    return sorted(runs, key=lambda run: run.number)


PLAINLY = ("name", "status", "scores", "origin", "id", "number", "settings", "made", "began", "split", "software")


def _record(run: Trained, same_data: bool) -> dict[str, Any]:
    answers = run.answers
    return {
        **{name: getattr(run, name) for name in PLAINLY},
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
        **{name: record[name] for name in PLAINLY},
    )
