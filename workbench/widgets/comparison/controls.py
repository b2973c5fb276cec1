"""Widgets of a comparison and their layout; the actions of the buttons are in `buttons`."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from workbench.errors import require

from ..common import cases
from ..common.cases import description_options
from ..common.pictures import STYLE
from .forms import CandidateForm
from .settings import PLAIN, Candidate, summary, wrapper_classes
from .trials import Training

#: CSS of a comparison, live and static; colours are JupyterLab's, with fallbacks for plain pages.
CSS = """
.wb-comparison{max-width:100%;color:var(--jp-ui-font-color1,currentColor)}
.wb-comparison .widget-html-content{line-height:1.45}
.wb-controls{display:grid!important;grid-template-columns:repeat(auto-fit,minmax(250px,1fr));gap:6px 22px;align-items:flex-start}
.wb-controls>*{min-width:0;overflow:visible}
.wb-section{font-weight:600;margin:0;font-size:var(--jp-ui-font-size1,13px)}
.wb-check{width:auto!important;min-width:0;height:auto!important;min-height:24px;align-items:center;margin:0 14px 0 2px}
.wb-check .widget-label-basic{display:flex;align-items:baseline;white-space:normal;overflow-wrap:anywhere;overflow:visible;line-height:1.35}
.wb-checks,.wb-compose,.wb-buttons{flex-flow:row wrap!important;align-items:center;overflow:visible}
.wb-metrics,.wb-metrics .widget-html-content,.wb-panel .widget-html-content,.wb-matrix-picture .widget-html-content{min-width:0;max-width:100%}
.wb-comparison p{white-space:normal}
.wb-compose .widget-toggle-button,.wb-compose .widget-button{width:auto;padding:0 8px;margin:1px}
.wb-remove{width:26px!important;padding:0!important;margin:0 10px 0 -12px;background:none}
.wb-help{margin:0;max-width:44em;font-size:var(--jp-ui-font-size0,11px);line-height:1.35;color:var(--jp-ui-font-color2,currentColor)}
.wb-status .widget-html-content{line-height:1.4}
.wb-status b{font-weight:600}
.wb-panels{display:grid!important;grid-template-columns:repeat(auto-fill,minmax(min(100%,390px),1fr));gap:14px;overflow:visible}
.wb-panel{min-width:0}
.wb-comparison .wb-panel h4{overflow-wrap:anywhere;margin:4px 0 0;font-size:14px;font-weight:600}
.wb-comparison .wb-panel code{font-size:11px;padding:0;
background:none;color:var(--jp-ui-font-color2,currentColor);white-space:normal;overflow-wrap:anywhere}
.wb-comparison .wb-panel p{margin:0;font-size:12px;color:var(--jp-ui-font-color2,currentColor)}
.wb-panel details summary{cursor:pointer;font-size:12px}
.wb-scroll{overflow-x:auto}
.wb-table{border-collapse:collapse;font-size:13px;margin:4px 0;border:none}
.wb-comparison .wb-table th,.wb-comparison .wb-table td{padding:3px 10px;text-align:right;border:none;
white-space:nowrap;font-variant-numeric:tabular-nums}
.wb-comparison .wb-table thead th{border-bottom:1px solid var(--jp-border-color1,#999);
white-space:normal;vertical-align:bottom;font-weight:600}
.wb-comparison .wb-table th[scope=row],.wb-comparison .wb-table thead th:first-child{text-align:left}
.wb-comparison .wb-table th[scope=row]{white-space:normal;overflow-wrap:anywhere;min-width:7em}
.wb-table small{font-weight:normal;color:var(--jp-ui-font-color2,currentColor)}
.wb-table td.wb-best{background:color-mix(in srgb,#0072B2 18%,transparent)}
.wb-table tr.wb-outdated th,.wb-table tr.wb-outdated td{color:var(--jp-ui-font-color2,GrayText);font-style:italic;font-weight:normal}
.wb-panel.wb-outdated{filter:grayscale(1);flex-direction:column}
.wb-panel.wb-outdated::before{content:"Not trained with the current settings: see the table.";font-size:12px;font-style:italic}
.wb-comparison .wb-metrics p{margin:2px 0;font-size:12px;color:var(--jp-ui-font-color2,currentColor);max-width:70em}
.wb-comparison .jupyter-widget-Collapse-header{color:var(--jp-ui-font-color1,inherit)}
.wb-choice>.widget-dropdown{max-width:100%}
.wb-comparison .wb-code pre{margin:0;font-size:12px;line-height:1.45;white-space:pre-wrap;overflow-wrap:anywhere;color:inherit;background:none}
.wb-code,.wb-choice-note{min-width:0;max-width:100%}
.wb-error{color:var(--jp-error-color1,#b3261e)}
.wb-errors pre{font-size:11px;white-space:pre-wrap;overflow-wrap:anywhere;max-height:22em;overflow:auto}
"""
MAX_REPEATS = 100
_STYLE = {"description_width": "7rem"}
_AUTO = {"width": "auto"}


class Row:
    """The widgets of one candidate: checkbox, settings and panel."""

    def __init__(
        self,
        candidate: Candidate,
        ticked: bool,
        task: str,
        added: bool = False,
        on_change: Callable[[], Any] = lambda: None,
    ) -> None:
        w = require("ipywidgets")
        self._on_change = on_change
        self.name, self._candidate, self._task = candidate.name, candidate, task
        self._form: CandidateForm | None = None
        about = " Also: ".join(summary(part.cls) for part in candidate.parts) or "The plain model, as a baseline."
        self.tick = w.Checkbox(
            ticked or not candidate.parts,
            **description_options(self.name),
            indent=False,
            disabled=not candidate.parts,
            tooltip=about,
            layout=_AUTO,
        ).add_class("wb-check")
        self.tick.observe(lambda _: on_change(), "value")
        self.remove = None
        if added:
            self.remove = w.Button(icon="times", tooltip=f"Remove {self.name} from the list").add_class("wb-remove")
        together = [widget for widget in (self.tick, self.remove) if widget is not None]
        self.box = w.HBox(together, layout={"flex": "none", "overflow": "visible", "max_width": "100%"})
        self.panel = w.HTML(layout={"display": "none"}).add_class("wb-panel")

    @property
    def form(self) -> CandidateForm:
        """The form with its settings, made on first access, since making all forms takes a while."""
        if self._form is None:
            self._form = CandidateForm(self._candidate.parts, self._task, self._on_change)
        return self._form

    def candidate(self) -> Candidate:
        """Return the candidate with the settings as entered."""
        return self._candidate if self._form is None else Candidate(self.name, self._form.parts())


class Controls:
    """All widgets of a comparison.

    Args:
        task: "regression" or "classification".
        training: initial settings of the training.
        about: line about model and data, as HTML.
        repeats: initial number of seeds and splits each model is trained on.
        several_splits: whether the data have several splits.

    Attributes:
        root: widget to display.
        train, stop: buttons.
        epochs, lr, weight_decay, seed: settings of the training.
        seeds, splits: number of seeds and splits each model is trained on.
        bar, status, errors, metrics, panels, matrix: output; `matrix` is inside the accordion `matrix_fold`.
        compose: a toggle button for each wrapper, by name; `add` adds the pressed ones as one candidate.
    """

    def __init__(
        self, task: str, training: Training, about: str, repeats: tuple[int, int] = (1, 1), several_splits: bool = True
    ) -> None:
        w = require("ipywidgets")
        self.task = task
        self.rows: dict[str, Row] = {}
        narrow, fitted = {"width": "96px", "flex": "none"}, {"width": "auto", "flex": "none"}
        self.train = _button("Train", "play", "Train all ticked models, one after another", "wb-train", narrow)
        self.train.button_style = "primary"
        self.stop = _button("Stop", "stop", "Stop training at once; trained models are kept", "wb-stop", narrow)
        self.stop.disabled = True
        numbers = _training_numbers(training, repeats, several_splits)
        self.epochs, self.lr, self.weight_decay, self.seed, self.seeds, self.splits = numbers
        self.bar = w.FloatProgress(
            0.0, min=0.0, max=1.0, layout={"width": "260px"}, tooltip="Progress of the training"
        ).add_class("wb-progress")
        self.status = w.HTML().add_class("wb-status")
        self.errors = w.VBox([]).add_class("wb-errors")
        self.metrics = w.HTML().add_class("wb-metrics")
        self.panels = w.HBox([]).add_class("wb-panels")
        self.compose = {
            name: w.ToggleButton(description=name, tooltip=summary(cls)) for name, cls in wrapper_classes().items()
        }
        self.add = _button("Add", "plus", "Add one model with all pressed wrappers", "wb-add")
        self.path = w.Text(
            "my_comparison.ipynb",  # unlikely to be the name of the notebook itself
            tooltip="Notebook file to write",
            layout={"width": "180px"},
        ).add_class("wb-path")
        repeats_it = "Write a notebook that repeats this comparison, with parameters"
        self.export = _button("Export", "file", repeats_it, "wb-export", narrow)
        self.pick_run = w.Dropdown(
            options=[], layout={"width": "400px", "max_width": "100%"}, tooltip="Run to delete"
        ).add_class("wb-run")
        forgets = "Delete this run from the table and the session file"
        self.delete = _button("Delete run", "trash", forgets, "wb-delete", fitted)
        self.undo = _button("Undo", "undo", "Restore the runs deleted last", "wb-undo", fitted)
        self.runs = w.HBox([self.pick_run, self.delete, self.undo], layout={"display": "none"}).add_class("wb-buttons")
        self.matrix = w.HTML().add_class("wb-matrix-picture")
        self.matrix_fold = w.Accordion(
            [self.matrix], titles=["All models in one matrix"], selected_index=None, layout={"display": "none"}
        ).add_class("wb-matrix")
        self._checks = w.HBox([]).add_class("wb-checks")
        self._pick = w.Dropdown(options=[], layout=_AUTO, tooltip="Model whose settings are shown").add_class("wb-pick")
        self._settings = w.VBox([], layout={"min_height": "150px"}).add_class("wb-settings")
        self._pick.observe(lambda _: self._show_settings(), "value")
        self.style = w.HTML(f"<style>{STYLE}{cases.STYLE}{CSS}</style>", layout={"height": "0px", "margin": "0px"})
        outputs = (self.errors, self.metrics, self.runs, self.panels, self.matrix_fold)
        progress = w.HBox([self.bar, self.status]).add_class("wb-buttons")
        self.root = w.VBox([self.style, self._inputs(about, numbers), progress, *outputs]).add_class("wb-comparison")

    def _inputs(self, about: str, numbers: Sequence[Any]) -> Any:
        """Return what users press and enter, in three columns: models, settings of one of them, training."""
        w = require("ipywidgets")
        compose = w.HBox([w.HTML("combine:"), *self.compose.values(), self.add]).add_class("wb-compose")
        which = [_section("Models"), self._checks, compose, w.HTML(f'<p class="wb-help">{about}</p>')]
        settings = [_section("Settings of"), self._pick, self._settings]
        buttons = [w.HBox(row).add_class("wb-buttons") for row in ([self.train, self.stop], [self.export, self.path])]
        training = [_section("Training"), *numbers, *buttons]
        columns = [
            w.VBox(column, layout={"flex": flex})
            for column, flex in ((which, "2 1 330px"), (settings, "2 1 300px"), (training, "1 1 230px"))
        ]
        return w.HBox(columns).add_class("wb-controls")

    def put(self, row: Row, on_remove: Callable[[Row], Any] | None = None) -> None:
        """Add a candidate to the list."""
        self.rows[row.name] = row
        if row.remove is not None and on_remove is not None:
            row.remove.on_click(lambda _: on_remove(row))
        self._arrange([*self.rows][min(1, len(self.rows) - 1)])

    def drop(self, row: Row) -> None:
        """Remove a candidate from the list."""
        del self.rows[row.name]
        self._arrange(PLAIN)

    def _arrange(self, shown: str) -> None:
        rows = list(self.rows.values())
        self._checks.children = [row.box for row in rows]
        self._pick.options = [row.name for row in rows]
        self._pick.value = shown
        self.panels.children = [row.panel for row in rows]

    def show_settings(self, name: str) -> None:
        """Show the settings of a candidate."""
        self._pick.value = name
        self._show_settings()

    def _show_settings(self) -> None:
        row = self.rows.get(self._pick.value)
        self._settings.children = [] if row is None else [row.form.box]

    def pressed(self) -> list[str]:
        """Return the names of the pressed wrappers, and release their buttons."""
        names = [name for name, button in self.compose.items() if button.value]
        for button in self.compose.values():
            button.value = False
        return names

    def show_errors(self, errors: dict[str, tuple[str, str]]) -> None:
        """Show failures by name: a message each, with the traceback folded away."""
        w = require("ipywidgets")
        children: list[Any] = []
        for name, (message, traceback) in errors.items():
            children.append(
                w.HTML(f'<div class="wb-error" role="alert"><b>{html.escape(name)}</b>: {html.escape(message)}</div>')
            )
            if traceback:
                inside = w.HTML(f"<pre>{html.escape(traceback)}</pre>")
                children.append(
                    w.Accordion([inside], titles=["Traceback"], selected_index=None).add_class("wb-traceback")
                )
        self.errors.children = children

    def training(self, first: Training) -> Training:
        """Return the settings of the training as entered; those without a control are taken from `first`."""
        entered = {name: getattr(self, name).value for name in ("epochs", "lr", "weight_decay", "seed")}
        return replace(first, **entered)

    def set_status(self, text: str) -> None:
        """Set the status line, as HTML."""
        self.status.value = f'<span role="status">{text}</span>'


def _section(title: str) -> Any:
    w = require("ipywidgets")
    return w.HTML(f'<p class="wb-section">{title}</p>')


def _button(text: str, icon: str, tooltip: str, css: str, layout: dict[str, str] | None = None) -> Any:
    w = require("ipywidgets")
    return w.Button(description=text, icon=icon, tooltip=tooltip, layout=layout or {}).add_class(css)


def _training_numbers(training: Training, repeats: tuple[int, int], several_splits: bool) -> list[Any]:
    """Return number fields for epochs, learning rate, weight decay, seed, number of seeds and number of splits."""
    w = require("ipywidgets")

    def field(kind: Any, css: str, name: str, value: float, least: float, most: float, tooltip: str) -> Any:
        described = {"description": name, "tooltip": tooltip, "style": _STYLE, "layout": {"width": "210px"}}
        return kind(value, min=least, max=most, **described).add_class(css)

    rate = "Peak learning rate of Adam; it rises at first, then falls to 0"
    decay = "Weight decay, decoupled from the gradient as in AdamW"
    seed = (
        "Seed of initial weights (if a function makes the model), validation rows, order of rows and all random draws"
    )
    seeds = "Number of seeds each model is trained with, from the seed above; the table shows mean and standard error"
    splits = (
        "Number of data splits each model is trained on; the table marks what is better than plain beyond noise"
        if several_splits
        else "These data have one split; for several, give the name of a data set, or inputs and targets"
    )
    whole, real = w.BoundedIntText, w.BoundedFloatText
    numbers = [
        field(whole, "wb-epochs", "epochs", training.epochs, 1, 10**6, "Passes over the training rows"),
        field(real, "wb-lr", "learning rate", training.lr, 1e-9, 1e3, rate),
        field(real, "wb-decay", "weight decay", training.weight_decay, 0, 1e3, decay),
        field(whole, "wb-seed", "seed", training.seed, 0, 2**31 - 1, seed),
        field(whole, "wb-seeds", "seeds", repeats[0], 1, MAX_REPEATS, seeds),
        field(whole, "wb-splits", "splits", repeats[1], 1, MAX_REPEATS, splits),
    ]
    numbers[-1].disabled = not several_splits
    return numbers
