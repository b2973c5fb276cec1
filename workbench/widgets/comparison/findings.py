"""Findings of a comparison: its runs, which of them can be compared, and their scores.

A run is one training of a candidate at one place, that is, split and seed. It is current if it was trained with the settings entered
now. In the table, each candidate is represented by one run, or by the means of its current runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from workbench.data import Data
from workbench.errors import require
from workbench.experiments.paired import Comparison, stated_test

from ..common.inputs import Model
from ..common.jobs import Job
from .origin import origin_of
from .panels import PanelData, view_of
from .repeats import Place, Splits, beyond_noise, in_words, number_of, over, paired, spread, values
from .scales import Scales, shared
from .scores import ordered, table
from .settings import Candidate
from .trials import MAX_TEST_ROWS, Trained, Training, panel

if TYPE_CHECKING:
    import pandas as pd

REPEATED = "trained again since, with the same settings"


@dataclass(frozen=True)
class Settings:
    """Current settings: ticked candidates, training, and the number of seeds and splits each is trained on."""

    ticked: list[Candidate]
    training: Training
    seeds: int = 1
    splits: int = 1

    def places(self, first_split: int) -> list[Place]:
        """Return split and seed of each training of a candidate; pictures show the first."""
        seed = self.training.seed
        return [(first_split + i, seed + j) for i in range(self.splits) for j in range(self.seeds)]

    def same(self, other: Settings) -> bool:
        """Return whether other settings ask for the same trainings."""
        numbers = (self.training, self.seeds, self.splits) == (other.training, other.seeds, other.splits)
        return numbers and len(self.ticked) == len(other.ticked) and all(map(Candidate.same, self.ticked, other.ticked))


@dataclass(eq=False)
class Findings:
    """Runs, failures and jobs of a comparison; no widgets.

    Args:
        splits: data set, split by split.
        names: names of the candidates, in display order.
        settings: returns the current settings.
        model: model to wrap.
        batch: jobs of the current or last training, by name.
        runs: all runs, in order.
        deleted: groups of runs that were deleted together, the last ones last.
        failed: exception and traceback, by job name.
        batch_of: settings when the batch began.
        before: ids of the runs that existed when the batch began.
        origins: digests of the initial model by place, when last computed; see `origin`.
        versions: versions of the data that are trained on.
    """

    splits: Splits
    names: list[str]
    settings: Callable[[], Settings]
    model: Model
    batch: dict[str, Job] = field(default_factory=dict)
    runs: list[Trained] = field(default_factory=list)
    deleted: list[list[Trained]] = field(default_factory=list)
    failed: dict[str, tuple[BaseException, str]] = field(default_factory=dict)
    batch_of: Settings | None = None
    before: frozenset[str] = frozenset()
    origins: dict[Place, str] = field(default_factory=dict)
    versions: tuple[int, ...] = ()
    _scales: tuple[tuple[str, ...], Scales] | None = None

    @property
    def data(self) -> Data:
        """The data set, in the split that pictures show."""
        return self.splits.base

    @property
    def jobs(self) -> list[Job]:
        """The jobs of the batch, as a copy, since another thread may add to it."""
        return list(self.batch.values())

    @property
    def running(self) -> bool:
        """Whether anything is training or queued."""
        return any(not job.ended for job in self.jobs)

    @property
    def places(self) -> list[Place]:
        """The places, split and seed, on which the current settings train each candidate."""
        return self.settings().places(self.data.split)

    def job_name(self, name: str, place: Place) -> str:
        """Return the name of the job that trains a candidate at a place."""
        return f"{name}, split {place[0]}, seed {place[1]}" if over(self.places) else name

    def forget_failures(self, name: str) -> None:
        """Forget the failures of a candidate."""
        for label in [label for label in self.failed if label == name or label.startswith(f"{name}, split ")]:
            del self.failed[label]

    def reasons(self) -> dict[str, str]:
        """Return by run id why a run is not current; "" if it is."""
        settings, places = self.settings(), self.places
        now = {candidate.name: candidate for candidate in settings.ticked}
        splits, seeds = {split for split, _ in places}, {seed for _, seed in places}
        reasons: dict[str, str] = {}
        for run in list(self.runs):
            seed = run.training.seed
            training = replace(settings.training, seed=seed) if seed in seeds else settings.training
            why = run.differences(now.get(run.name), training, self.origin(run.split, training.seed), self.versions)
            elsewhere = "" if run.split in splits else f"split {run.split}, not {self.data.split}"
            reasons[run.id] = "; ".join(filter(None, (why, elsewhere)))
        return reasons

    def origin(self, split: int, seed: int) -> str | None:
        """Return the digest of the initial model, see `origin_of`; None if it depends on the rows of a split that is not loaded."""
        data = self.splits.get(split) if self.model.reads_rows else self.data
        if data is None:
            return None
        place = data.split, seed
        if place not in self.origins:
            self.origins[place] = origin_of(self.model.on(data).new(seed))
        return self.origins[place]

    def current_runs(self) -> dict[str, dict[Place, Trained]]:
        """Return the last current run of each candidate at each place."""
        reasons = self.reasons()
        current_runs: dict[str, dict[Place, Trained]] = {}
        for run in list(self.runs):
            if not reasons.get(run.id, "new"):
                current_runs.setdefault(run.name, {})[run.split, run.training.seed] = run
        return current_runs

    @property
    def trained(self) -> dict[str, Trained]:
        """The run that represents each candidate: a current one, at the first place if possible; else the last one at that place, or at all."""
        current_runs, first = self.current_runs(), self.places[0]
        chosen = {run.name: run for run in list(self.runs)}
        chosen |= {run.name: run for run in list(self.runs) if (run.split, run.training.seed) == first}
        return {
            name: current_runs[name].get(first) or next(iter(current_runs[name].values()))
            if name in current_runs
            else run
            for name, run in chosen.items()
        }

    @property
    def kept(self) -> list[Trained]:
        """The runs that represent the candidates, in display order."""
        trained = self.trained
        return [trained[name] for name in list(self.names) if name in trained]

    @property
    def differences(self) -> dict[str, str]:
        """By name, why a candidate can't be compared with the current ones."""
        reasons, current_runs, counted = self.reasons(), self.current_runs(), number_of(self.places)
        differences = {}
        for kept in self.kept:
            count = len(current_runs.get(kept.name, ()))
            missing = f"trained on {count} of {counted}" if 0 < count < len(self.places) else ""
            if why := reasons.get(kept.id) or missing:
                differences[kept.name] = why
        return differences

    def others(self) -> dict[str, Trained]:
        """Return the runs that are not in the means or rows of the candidates, labelled by name and number."""
        known = {run.id for run in self.kept} | {run.id for at in self.current_runs().values() for run in at.values()}
        return {f"{run.name} #{run.number}": run for run in list(self.runs) if run.id not in known}

    @property
    def present(self) -> list[Trained]:
        """The candidates trained with the current settings on all splits and seeds, in display order."""
        differences = self.differences
        return [kept for kept in self.kept if kept.name not in differences]

    @property
    def unchanged(self) -> bool:
        """Whether the settings are those with which the batch began."""
        return self.batch_of is not None and self.batch_of.same(self.settings())

    @functools.cached_property
    def view(self) -> PanelData:
        """Inputs of the pictures."""
        return view_of(self.data)

    def _rows(self, outdated: bool = False) -> dict[str, dict[Place, Trained]]:
        """Return the runs of each table row: all current ones, or for outdated candidates the one that represents them."""
        current_runs, differences = self.current_runs(), self.differences
        if outdated:
            return {kept.name: {self.places[0]: kept} for kept in self.kept if kept.name in differences}
        return {kept.name: current_runs[kept.name] for kept in self.present}

    def frame(self, outdated: bool = False) -> pd.DataFrame:
        """Return the scores of current, or else of outdated, candidates; means over splits and seeds."""
        return _frame(self._rows(outdated))

    def spread_frame(self) -> pd.DataFrame:
        """Return the standard errors of `frame`."""
        return _frame(self._rows(), spread)

    def paired(self) -> Comparison | None:
        """Return the paired comparison of current candidates; None with one run per model."""
        places = self.places
        share = self.splits.test_share() if over(places) == "splits" else 0.0
        return paired(self._rows(), places, share)

    def marked(self) -> dict[str, list[str]]:
        """Return by column the models that are better than the plain one beyond noise; none with one run per model."""
        comparison = self.paired()
        return {} if comparison is None else beyond_noise(comparison)

    def run_frame(self) -> pd.DataFrame:
        """Return a row for each run: settings, place, time, software, how it differs from the current settings, and scores."""
        reasons, current_runs = self.reasons(), self.current_runs()
        present = {run.id for at in current_runs.values() for run in at.values()}
        runs = {str(run.number): run for run in list(self.runs)}
        about = [
            {
                "model": run.name,
                "settings": run.settings,
                **asdict(run.training),
                "split": run.split,
                "began": run.began,
                **run.software,
                "status": run.status,
                "differs": reasons[run.id] or ("" if run.id in present else REPEATED),
            }
            for run in runs.values()
        ]
        scores = _frame({label: {(0, 0): run} for label, run in runs.items()})
        scores.index = scores.index.astype(int)
        scores.index.name = "run"
        for place, name in enumerate(about[0] if about else ()):
            scores.insert(place, name, [row.get(name) for row in about])
        return scores

    def table(self) -> str:
        """Return the scores as an HTML table with notes; "" if there are no runs."""
        kept, total = self.kept, len(self.data.test)
        if not kept and not self.runs:
            return ""
        n, places = min(total, MAX_TEST_ROWS), self.places
        rows = f"first {n:,} of {total:,} test rows" if n < total else f"{n:,} test rows"
        assumed = self.data.classes is None and any(k.answers is not None and not k.answers.measured for k in kept)
        comparison = self.paired()
        notes = [f"On the {rows} of {self.data.name}. {_note_on_repeats(places if self.present else [], comparison)}"]
        if assumed:
            notes.append(
                "Without measured noise, NLL and intervals assume constant noise: the RMSE on the validation rows."
            )
        differences = self.differences
        if differences:
            reasons = "; ".join(f"{name} ({why})" for name, why in differences.items())
            notes.append(f"Grey rows were not trained with the current settings and are not compared: {reasons}.")
        status = {k.name: k.status for k in kept}
        others = self.others()
        if others:
            notes.append(f"Earlier runs: {', '.join(others)}; hover over a row to see how it differs.")
            why = self.reasons()
            differences = {**differences, **{label: why[run.id] or REPEATED for label, run in others.items()}}
            status |= {label: "; ".join(filter(None, (_place(run), run.status))) for label, run in others.items()}
        by_name = {**self._rows(outdated=True), **self._rows()}
        about = {name: _row_tooltip(list(at.values())) for name, at in by_name.items()}
        about |= {label: _row_tooltip([run]) for label, run in others.items()}
        about |= {name: f"{about[name]}. Differs from the current settings: {why}" for name, why in differences.items()}
        together = {k.name: by_name[k.name] for k in kept}
        frame = _frame({**together, **{label: {places[0]: run} for label, run in others.items()}})
        return table(
            frame,
            self.data.target.unit,
            status,
            [*notes, self.view.note],
            differences,
            spreads=self.spread_frame() if over(places) else None,
            marked=self.marked(),
            test="" if comparison is None else stated_test(comparison),
            about=about,
        )

    @property
    def scales(self) -> Scales:
        """Limits of the colours or axis of each column, shared by the pictures of all current models."""
        shown = [kept for kept in self.present if kept.answers is not None]
        key = tuple(kept.id for kept in shown)
        if self._scales is None or self._scales[0] != key:
            answers = [kept.answers for kept in shown if kept.answers is not None]
            self._scales = key, shared(self.view, answers)
        return self._scales[1]

    def panel(self, kept: Trained, losses: bool = True) -> str:
        """Return the panel of a model that was evaluated, as HTML."""
        answers = kept.answers
        assert answers is not None
        notes = [f"{kept.status}."] if kept.status else []
        if not answers.measured and self.view.kind == "table":
            notes.append("Noise is not measured; it is assumed to be constant.")
        if over(self.places):
            notes.append(f"Split {kept.split}, seed {kept.training.seed}.")
        history, scales = kept.history if losses else None, self.scales
        if scales and len(self.present) > 1:
            what = "The axis is" if self.view.kind == "curve" else "Colours of one kind are"
            notes.append(f"{what} the same for all models.")
        note = " ".join(notes)
        return panel(kept.candidate, self.view, answers, history, note=note, made=kept.made, scales=scales)


def _note_on_repeats(places: list[Place], comparison: Comparison | None) -> str:
    """Return the note on what the numbers are means of, and what is marked."""
    if not places:
        return "One run each."
    if not over(places):
        return "One split, one seed: no ranking beyond this split."
    marked = "" if comparison is None else f" Marked scores are better than {comparison.reference} beyond noise."
    return f"Mean ± standard error over {in_words(places)}.{marked}"


def _place(run: Trained) -> str:
    return f"split {run.split}, seed {run.training.seed}"


def _row_tooltip(runs: list[Trained]) -> str:
    """Return what was trained where and when, for the tooltip of a row."""
    places = "; ".join(dict.fromkeys(map(_place, runs)))
    began = f", trained {runs[0].began[:16].replace('T', ' ')} UTC" if len(runs) == 1 and runs[0].began else ""
    return f"{runs[0].made or 'the plain model'}; {places}{began}"


def _mean(runs: Mapping[Place, Trained], metric: str) -> float:
    numbers = values(runs, metric)
    return sum(numbers) / len(numbers)


def _frame(
    runs: Mapping[str, Mapping[Place, Trained]], statistic: Callable[[Mapping[Place, Trained], str], float] = _mean
) -> pd.DataFrame:
    """Return a table of one number per label and metric, the mean by default; NaN where a run has none."""
    require("pandas")
    import pandas as pd

    rows = {
        label: {metric: statistic(at, metric) for metric in dict.fromkeys(m for run in at.values() for m in run.scores)}
        for label, at in runs.items()
    }
    frame = pd.DataFrame.from_dict(rows, orient="index", dtype=float)
    frame.index.name = "model"
    return frame[ordered(map(str, frame))]
