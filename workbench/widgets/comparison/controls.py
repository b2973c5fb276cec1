"""Widgets of a comparison and their layout; the actions of the buttons are in `buttons`."""

from __future__ import annotations

import html
from collections.abc import Callable
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
.wb-check{width:auto!important;margin:0 14px 0 2px}
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
.wb-comparison .wb-panel h4{margin:4px 0 0;font-size:14px;font-weight:600}
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
        self.train = w.Button(
            description="Train",
            icon="play",
            button_style="primary",
            tooltip="Train all ticked models, one after another",
            layout={"width": "96px", "flex": "none"},
        ).add_class("wb-train")
        self.stop = w.Button(
            description="Stop",
            icon="stop",
            disabled=True,
            tooltip="Stop training at once; trained models are kept",
            layout={"width": "96px", "flex": "none"},
        ).add_class("wb-stop")
        options = {"style": _STYLE, "layout": {"width": "210px"}}
        self.epochs = w.BoundedIntText(
            training.epochs, min=1, max=10**6, description="epochs", tooltip="Passes over the training rows", **options
        ).add_class("wb-epochs")
        self.lr = w.BoundedFloatText(
            training.lr,
            min=1e-9,
            max=1e3,
            description="learning rate",
            tooltip="Peak learning rate of Adam; it rises at first, then falls to 0",
            **options,
        ).add_class("wb-lr")
        self.weight_decay = w.BoundedFloatText(
            training.weight_decay,
            min=0,
            max=1e3,
            description="weight decay",
            tooltip="Weight decay, decoupled from the gradient as in AdamW",
            **options,
        ).add_class("wb-decay")
        self.seed = w.BoundedIntText(
            training.seed,
            min=0,
            max=2**31 - 1,
            description="seed",
            tooltip="Seed of initial weights (if a function makes the model), validation rows, order of rows and all random draws",
            **options,
        ).add_class("wb-seed")
        self.seeds = w.BoundedIntText(
            repeats[0],
            min=1,
            max=MAX_REPEATS,
            description="seeds",
            tooltip="Number of seeds each model is trained with, from the seed above; the table shows mean and standard error",
            **options,
        ).add_class("wb-seeds")
        self.splits = w.BoundedIntText(
            repeats[1],
            min=1,
            max=MAX_REPEATS,
            description="splits",
            disabled=not several_splits,
            tooltip="Number of data splits each model is trained on; the table marks what is better than plain beyond noise"
            if several_splits
            else "These data have one split; for several, give the name of a data set, or inputs and targets",
            **options,
        ).add_class("wb-splits")
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
        self.add = w.Button(
            description="Add", icon="plus", tooltip="Add one model with all pressed wrappers"
        ).add_class("wb-add")
        self.path = w.Text(
            "my_comparison.ipynb",  # unlikely to be the name of the notebook itself
            tooltip="Notebook file to write",
            layout={"width": "180px"},
        ).add_class("wb-path")
        self.export = w.Button(
            description="Export",
            icon="file",
            tooltip="Write a notebook that repeats this comparison, with parameters",
            layout={"width": "96px", "flex": "none"},
        ).add_class("wb-export")
        self.pick_run = w.Dropdown(
            options=[], layout={"width": "400px", "max_width": "100%"}, tooltip="Run to delete"
        ).add_class("wb-run")
        button = {"layout": {"width": "auto", "flex": "none"}}
        self.delete = w.Button(
            description="Delete run",
            icon="trash",
            tooltip="Delete this run from the table and the session file",
            **button,
        ).add_class("wb-delete")
        self.undo = w.Button(
            description="Undo", icon="undo", tooltip="Restore the runs deleted last", **button
        ).add_class("wb-undo")
        self.runs = w.HBox([self.pick_run, self.delete, self.undo], layout={"display": "none"}).add_class("wb-buttons")
        self.matrix = w.HTML().add_class("wb-matrix-picture")
        self.matrix_fold = w.Accordion(
            [self.matrix], titles=["All models in one matrix"], selected_index=None, layout={"display": "none"}
        ).add_class("wb-matrix")
        self._checks = w.HBox([]).add_class("wb-checks")
        self._pick = w.Dropdown(options=[], layout=_AUTO, tooltip="Model whose settings are shown").add_class("wb-pick")
        self._settings = w.VBox([], layout={"min_height": "150px"}).add_class("wb-settings")
        self._pick.observe(lambda _: self._show_settings(), "value")
        compose = w.HBox([w.HTML("combine:"), *self.compose.values(), self.add]).add_class("wb-compose")
        which = w.VBox(
            [_section("Models"), self._checks, compose, w.HTML(f'<p class="wb-help">{about}</p>')],
            layout={"flex": "2 1 330px"},
        )
        settings = w.VBox([_section("Settings of"), self._pick, self._settings], layout={"flex": "2 1 300px"})
        training_box = w.VBox(
            [
                _section("Training"),
                self.epochs,
                self.lr,
                self.weight_decay,
                self.seed,
                self.seeds,
                self.splits,
                w.HBox([self.train, self.stop]).add_class("wb-buttons"),
                w.HBox([self.export, self.path]).add_class("wb-buttons"),
            ],
            layout={"flex": "1 1 230px"},
        )
        controls = w.HBox([which, settings, training_box]).add_class("wb-controls")
        progress = w.HBox([self.bar, self.status]).add_class("wb-buttons")
        page = f"<style>{STYLE}{cases.STYLE}{CSS}</style>"
        self.style = w.HTML(page, layout={"height": "0px", "margin": "0px"})
        self.root = w.VBox(
            [
                self.style,
                controls,
                progress,
                self.errors,
                self.metrics,
                self.runs,
                self.panels,
                self.matrix_fold,
            ]
        ).add_class("wb-comparison")

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
