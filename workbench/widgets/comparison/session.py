"""The session file of a comparison: all its runs, saved as they come, read again by another kernel or machine."""

from __future__ import annotations

import io
from dataclasses import asdict, fields
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


class Session:
    """A file that keeps the runs of a comparison; without a path nothing is written.

    Args:
        path: the file, which need not be there.
        data: what the runs are of; a file of other data is refused.
    """

    def __init__(self, path: Path | None, data: Data) -> None:
        self.path, self.data = path, data
        self._digest = ""
        self._known: set[str] = set()

    def read(self, versions: tuple[int, ...]) -> list[Trained]:
        """The runs of the file that this object has not seen yet, without weights; none if there is no file.

        Args:
            versions: of the data now, which runs on these data are given.

        Raises:
            ValueError: the file is no session, or one of other data.
        """
        if self.path is None or not self.path.exists():
            return []
        try:
            content = torch.load(self.path, map_location="cpu", weights_only=True)
            if content["format"] != FORMAT:
                raise ValueError(f"format {content['format']!r}")
        except Exception as error:
            raise ValueError(
                f"session: {self.path} is no session file of a Comparison ({type(error).__name__}: {error!s:.200}); give the path of one, "
                "or of a file that is not there yet"
            ) from error
        self._digest = self._digest or self.data.checksum
        if content["digest"] != self._digest:
            raise ValueError(
                f"session: {self.path} holds runs of {content['data']} (digest {content['digest'][:12]}), but the data here are "
                f"{self.data.name} (digest {self._digest[:12]}); give the data that it was made with, or another path"
            )
        new = [_run(record, versions) for record in content["runs"] if record["id"] not in self._known]
        self._known |= {run.id for run in new}
        return new

    def save(self, runs: list[Trained], versions: tuple[int, ...]) -> None:
        """Write all runs, whole or not at all."""
        self._known |= {run.id for run in runs}
        if self.path is None:
            return
        self._digest = self._digest or self.data.checksum
        records = [_record(run, run.versions == versions) for run in runs]
        buffer = io.BytesIO()
        torch.save({"format": FORMAT, "data": self.data.name, "digest": self._digest, "runs": records}, buffer)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(self.path, buffer.getvalue())


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
