"""Actions of the buttons and input fields of a comparison."""

from __future__ import annotations

import html
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from workbench.data import Data

from .controls import Controls, Row
from .findings import Findings
from .settings import Candidate, Part, fitting, numbered, wrapper_classes
from .trials import Trained


class Actions(Protocol):
    """The actions of a comparison that buttons call."""

    @property
    def data(self) -> Data: ...

    @property
    def running(self) -> bool: ...

    def start(self) -> Any: ...

    def stop(self) -> None: ...

    def delete(self, *runs: int) -> None: ...

    def undo(self) -> None: ...

    def export(self, path: Path) -> Path: ...

    def command(self, path: Path) -> str: ...


class Buttons:
    """Connects the widgets to the actions of the comparison.

    Args:
        controls: widgets.
        actions: comparison.
        findings: findings, whose names follow the list of candidates.
        drop: deletes runs.
        refresh: called when an input has changed.
    """

    def __init__(
        self,
        controls: Controls,
        actions: Actions,
        findings: Findings,
        drop: Callable[[list[Trained]], None],
        refresh: Callable[[], None],
    ) -> None:
        self.controls, self._actions, self._findings = controls, actions, findings
        self._drop, self._refresh = drop, refresh
        self._written: set[Path] = set()  # the Export button overwrites only files it has written itself

    def connect(self) -> None:
        """Register the callbacks of all buttons and input fields."""
        c, actions = self.controls, self._actions
        c.train.on_click(self._guarded(lambda: actions.start()))
        c.stop.on_click(lambda _: actions.stop())
        c.add.on_click(self._add)
        c.delete.on_click(self._guarded(lambda: actions.delete(c.pick_run.value)))
        c.undo.on_click(self._guarded(actions.undo))
        c.export.on_click(self._guarded(self._export))
        for setting in (c.epochs, c.lr, c.weight_decay, c.seed, c.seeds, c.splits):
            setting.observe(lambda _: self._refresh(), "value")

    def put(self, candidate: Candidate, ticked: bool, added: bool = False) -> None:
        """Add a candidate to the list."""
        row = Row(candidate, ticked, self._actions.data.task, added, self._refresh)
        self.controls.put(row, self._remove)
        self._findings.names = list(self.controls.rows)

    def _remove(self, row: Row) -> None:
        if self._actions.running:
            self.controls.set_status("<b>Training</b>: stop it before removing a model.")
            return
        self.controls.drop(row)
        self._findings.names = list(self.controls.rows)
        self._findings.forget_failures(row.name)
        self._drop([run for run in self._findings.runs if run.name == row.name])

    def _add(self, _: Any = None) -> None:
        names = self.controls.pressed()
        if not names:
            self.controls.set_status("Press the wrappers to combine, then Add.")
            return
        known = wrapper_classes()
        parts = [fitting(Part(known[name]), self._actions.data.task) for name in names]
        added = Candidate(numbered("+".join(names), set(self.controls.rows)), parts)
        self.put(added, True, added=True)
        self.controls.show_settings(added.name)

    def _guarded(self, action: Callable[[], Any]) -> Callable[[Any], None]:
        """Return a click handler that shows the errors of an action in the status."""

        def clicked(_: Any) -> None:
            try:
                action()
            except Exception as error:
                self.controls.set_status(f'<span class="wb-error">{html.escape(str(error))}</span>')

        return clicked

    def _export(self) -> None:
        path = Path(self.controls.path.value).resolve()
        if path.exists() and path not in self._written:
            raise FileExistsError(f"{path} already exists: give another name, or call export() in a cell to replace it")
        self._written.add(self._actions.export(path).resolve())
        self.controls.set_status(
            f"Wrote {html.escape(str(path))}. For a report, run <code>{html.escape(self._actions.command(path))}</code>"
        )
