"""Keep the state of a training on disk, from which it goes on as if it had never stopped."""

from __future__ import annotations

import functools
import hashlib
import os
import time
import zipfile
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch

from workbench.atomic import replacing
from workbench.core.batches.labelled import kind_of
from workbench.core.batches.rows import Source, TensorRows

EVERY = 5.0  # seconds between two writes, so that short epochs don't wait for the disk


class Checkpoint:
    """One file that is written whole or not at all, and read only by a training with the same settings and data.

    Args:
        path: the file; missing folders are made.
        settings: what must agree for a training to go on, as text by name.

    Attributes:
        runs: by what the training's run can be resumed in each kind of tracker that it was logged to.
    """

    def __init__(self, path: str | os.PathLike[str], settings: Mapping[str, str]) -> None:
        self.path = Path(path)
        self.settings = dict(settings)
        self.runs: dict[str, str] = {}
        self._written = float("-inf")

    def beside(self, ending: str, **settings: str) -> Checkpoint:
        """One of other settings, in a file whose name has this ending; logged to the same runs."""
        other = Checkpoint(f"{self.path}{ending}", self.settings | settings)
        other.runs = self.runs
        return other

    def read(self) -> dict[str, Any] | None:
        """The stored state, None if there is no file yet.

        Raises:
            ValueError: the file is no checkpoint, or one of other settings or data.
        """
        if not self.path.exists():
            return None
        remedy = "give another path, or delete it to start afresh"
        try:
            with zipfile.ZipFile(self.path) as archive:  # torch does not look at the checksums that it writes
                if (damaged := archive.testzip()) is not None:
                    raise ValueError(f"the checksum of {damaged} is another")
            state = torch.load(self.path, map_location="cpu", weights_only=True)
            stored, runs = dict(state["settings"]), dict(state.pop("runs", {}))
        except Exception as error:
            raise ValueError(
                f"checkpoint: {self.path} is no checkpoint of a training, or a damaged one ({error}); {remedy}"
            ) from error
        differing = [
            f"{name}: there {stored.get(name)}, here {self.settings.get(name)}"
            for name in sorted(stored.keys() | self.settings.keys())
            if stored.get(name) != self.settings.get(name)
        ]
        if differing:
            raise ValueError(f"checkpoint: {self.path} is of another training ({'; '.join(differing)}); {remedy}")
        self.runs.update(runs)
        return state

    @contextmanager
    def resuming(self) -> Iterator[None]:
        """Around what takes up the stored state.

        Raises:
            ValueError: it does not fit, or a part of it is missing.
        """
        try:
            yield
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"checkpoint: {self.path} is of another model, or damaged; {error}") from error

    def write(self, state: Mapping[str, Any], force: bool = False) -> None:
        """Store the state, unless the last time was a moment ago and `force` is False."""
        if not force and time.monotonic() - self._written < EVERY:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as unfinished:
            runs = {"runs": self.runs} if self.runs else {}
            torch.save({**state, "settings": self.settings, **runs}, unfinished)
        self._written = time.monotonic()


def describe(value: Any) -> str:
    """A text for a setting that is the same in the next process: no addresses in memory.

    Example:
        >>> describe(functools.partial(torch.nn.functional.huber_loss, delta=2.0))
        'huber_loss(delta=2.0)'
        >>> describe(torch.nn.MSELoss())
        'MSELoss()'
    """
    if isinstance(value, functools.partial):
        arguments = [*map(describe, value.args), *(f"{name}={describe(v)}" for name, v in value.keywords.items())]
        return f"{describe(value.func)}({', '.join(arguments)})"
    if callable(value) and not isinstance(value, torch.nn.Module):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return repr(value)


def checksum(source: Source | None) -> str:
    """What tells one set of rows from another: sha256 of rows in memory, else their kind and number."""
    if not isinstance(source, TensorRows):
        return "none" if source is None else f"{kind_of(source)} of {len(cast(Sized, source))}"
    total = hashlib.sha256()
    for leaf in (*source.inputs, *source.targets):
        total.update(f"{leaf.dtype} {tuple(leaf.shape)}\n".encode())
        total.update(leaf.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()
