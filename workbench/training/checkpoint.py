"""Checkpoints of a training, from which it resumes as if it had never been interrupted."""

from __future__ import annotations

import os
import tempfile
import time
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from workbench.atomic import replacing
from workbench.errors import WorkbenchWarning
from workbench.introspect.source_lines import user_stacklevel
from workbench.training.described_settings import CODE, WRAPPERS
from workbench.training.function_code import comparable

WRITE_INTERVAL = 5.0  # seconds between two writes, so that short epochs don't wait for the disk


class Checkpoint:
    """A file that is written atomically, and read only by a training with the same settings and data.

    Args:
        path: the file; missing folders are created.
        settings: settings that must agree for a training to resume, as text by name.

    Attributes:
        runs: for each kind of tracker, the identifier by which the logged run can be resumed.
    """

    def __init__(self, path: str | os.PathLike[str], settings: Mapping[str, str]) -> None:
        self.path = Path(path)
        self.settings = dict(settings)
        self.runs: dict[str, str] = {}
        self._written = float("-inf")

    def with_suffix(self, suffix: str, **settings: str) -> Checkpoint:
        """Return a checkpoint with other settings in a file whose name has this suffix; it shares the tracker runs."""
        other = Checkpoint(f"{self.path}{suffix}", self.settings | settings)
        other.runs = self.runs
        return other

    def read(self) -> dict[str, Any] | None:
        """Return the stored state, or None if there is no file yet.

        Raises:
            ValueError: the file is a folder, or no checkpoint, is damaged, is one of other settings or data, or can't be written later.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.path.parent).close()
        except OSError as error:
            raise ValueError(
                f"checkpoint: {self.path} can't be written ({error}); give a path in a folder that can"
            ) from error
        if not self.path.exists():
            return None
        if self.path.is_dir():
            raise ValueError(f"checkpoint: {self.path} is a folder; give the path of a file")
        remedy = "give another path, or delete it to start afresh"
        try:
            with zipfile.ZipFile(self.path) as archive:  # torch does not verify the checksums that it writes
                if (damaged := archive.testzip()) is not None:
                    raise ValueError(f"the checksum of {damaged} does not match")
            state = torch.load(self.path, map_location="cpu", weights_only=True)
            stored, runs = dict(state["settings"]), dict(state.pop("runs", {}))
        except Exception as error:
            raise ValueError(
                f"checkpoint: {self.path} is not a checkpoint of a training, or is damaged ({error}); {remedy}"
            ) from error
        stored.setdefault(WRAPPERS, self.settings.get(WRAPPERS))  # files of earlier versions lack it
        if CODE in self.settings and not comparable(stored.get(CODE, ""), self.settings[CODE]):
            stored[CODE] = self.settings[CODE]
        differing = [
            f"{name}: {stored.get(name)} in the file, {self.settings.get(name)} here"
            for name in sorted(stored.keys() | self.settings.keys())
            if stored.get(name) != self.settings.get(name)
        ]
        if differing:
            raise ValueError(f"checkpoint: {self.path} is of another training ({'; '.join(differing)}); {remedy}")
        self.runs.update(runs)
        return state

    @contextmanager
    def resuming(self) -> Iterator[None]:
        """Report errors while the stored state is being loaded as errors of this file.

        Raises:
            ValueError: the state does not fit, or a part of it is missing.
        """
        try:
            yield
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"checkpoint: {self.path} is of another model, or damaged; {error}") from error

    def write(self, state: Mapping[str, Any], force: bool = False) -> None:
        """Store the state, unless it was stored less than `WRITE_INTERVAL` seconds ago and `force` is False.

        If it can't be stored, a warning says so, and the training goes on: `read` has found the folder to be writable.
        """
        if not force and time.monotonic() - self._written < WRITE_INTERVAL:
            return
        try:
            self._replace(state)
        except OSError as error:
            warnings.warn(
                f"checkpoint: {self.path} can't be written ({error}). The training goes on, and can't be resumed from this point: "
                f"make {self.path.parent.absolute()} a folder with room that can be written, and later epochs are stored",
                WorkbenchWarning,
                stacklevel=user_stacklevel(),
            )
        self._written = time.monotonic()

    def _replace(self, state: Mapping[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as temporary:
            runs = {"runs": self.runs} if self.runs else {}
            try:
                with temporary.open("wb") as file:
                    torch.save({**state, "settings": self.settings, **runs}, file)
            except RuntimeError as error:  # torch hides why the file can't be written, such as a full disk
                if isinstance(reason := error.__context__, OSError):
                    raise reason from None
                raise
