"""Tracker for TensorBoard, with a folder of event files for each run."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.errors import require

MAX_LENGTH = 100  # characters of a folder's name


class TensorBoard:
    """Logs to event files, which ``tensorboard --logdir FOLDER`` shows.

    Args:
        folder: parent of the folders of the runs, which are named by the run's name and the time.

    Raises:
        ModuleNotFoundError: if tensorboard is not installed.
    """

    def __init__(self, folder: str | Path = "runs") -> None:
        require("tensorboard", "trackers")
        self.folder = Path(folder)
        self._writer: Any = None

    def begin(self, name: str, settings: Mapping[str, Any], group: str = "", resume: str | None = None) -> str | None:
        """Begin a run, see `Tracker`; a resumed run gets another file in its folder."""
        resumes = resume is not None and Path(resume).is_dir()
        folder = Path(str(resume)) if resumes else _new_folder(self.folder / _file_name(group), _file_name(name))
        if resumes:
            _wait_for_later_name(folder)
        writer = require("torch.utils.tensorboard").SummaryWriter(str(folder))
        self._writer, self._settings, self._seen = writer, dict(settings), dict[str, None]()
        self._step = 0
        rows = "".join(
            f"|{key}|{' '.join(str(value).split()).replace('|', '&#124;')}|\n" for key, value in settings.items()
        )
        writer.add_text("settings", f"|setting|value|\n|---|---|\n{rows}")
        writer.flush()
        return str(folder.resolve())

    def log(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Log numbers, see `Tracker`."""
        self._step = self._step if step is None else step
        for name, value in values.items():
            self._seen[name] = None
            self._writer.add_scalar(name, value, self._step)
        self._writer.flush()  # so that values are shown during the run

    def end(self, status: str) -> None:
        """End the run, see `Tracker`, and add its settings and numbers as a row of the HPARAMS page."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            hparams = require("torch.utils.tensorboard.summary").hparams
            plain = {name: v if isinstance(v, bool | int | float) else str(v) for name, v in self._settings.items()}
            for summary in hparams(plain, self._seen):
                writer.file_writer.add_summary(summary)
            writer.add_text("status", status)
        finally:
            writer.close()


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.=+]+", "-", text).strip("-.")[:MAX_LENGTH]


def _wait_for_later_name(folder: Path) -> None:
    """Wait until a new event file sorts last: files are read in the order of their names, which contain the second and then a number."""
    if any(int(file.name.split(".")[3]) == int(time.time()) for file in folder.glob("events.out.tfevents.*")):
        time.sleep(1 - time.time() % 1)


def _new_folder(parent: Path, name: str) -> Path:
    """Create a folder that no other run uses, even if two runs begin in the same second."""
    stem = f"{name}_{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1, 10**6):
        folder = parent / (stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(f"{parent} holds a million runs of this second")


__all__ = ["TensorBoard"]
