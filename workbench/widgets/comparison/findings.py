"""The findings of a comparison: which runs there are, which of them can be compared, and what they say."""

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
from .trials import MAX_JUDGED, Trained, Training, panel

if TYPE_CHECKING:
    import pandas as pd

AGAIN = "trained again since, with the same settings"


@dataclass(frozen=True)
class Entered:
    """What is set now: the ticked candidates, the training, and on how many seeds and splits each is trained."""

    ticked: list[Candidate]
    training: Training
    seeds: int = 1
    splits: int = 1

    def places(self, first_split: int) -> list[Place]:
        """Split and seed of each training of a candidate, the one that pictures are of first."""
        seed = self.training.seed
        return [(first_split + i, seed + j) for i in range(self.splits) for j in range(self.seeds)]

    def same(self, other: Entered) -> bool:
        """Whether another one asks for the same trainings."""
        numbers = (self.training, self.seeds, self.splits) == (other.training, other.seeds, other.splits)
        return numbers and len(self.ticked) == len(other.ticked) and all(map(Candidate.same, self.ticked, other.ticked))


@dataclass(eq=False)
class Findings:
    """What has been trained, what failed, and what runs now; no widgets.

    Args:
        splits: the data set, split by split.
        names: of the candidates, in the order in which they are shown.
        entered: what is set now.
        model: what is wrapped.
        batch: the jobs of the present training, or of the last one, by name.
        runs: every training, in order.
        deleted: the runs that were deleted at one time, the last ones last.
        failed: exception and traceback, by the name of the job.
        batch_of: what was entered when the batch began.
        before: ids of the runs that were there when the batch began.
        origins: what the model started at when it was looked at last, see `origin`.
        versions: of the data, as they are trained on.
    """

    splits: Splits
    names: list[str]
    entered: Callable[[], Entered]
    model: Model
    batch: dict[str, Job] = field(default_factory=dict)
    runs: list[Trained] = field(default_factory=list)
    deleted: list[list[Trained]] = field(default_factory=list)
    failed: dict[str, tuple[BaseException, str]] = field(default_factory=dict)
    batch_of: Entered | None = None
    before: frozenset[str] = frozenset()
    origins: dict[Place, str] = field(default_factory=dict)
    versions: tuple[int, ...] = ()
    _scales: tuple[tuple[str, ...], Scales] | None = None

    @property
    def data(self) -> Data:
        """The data set, of the split that pictures are of."""
        return self.splits.base

    @property
    def jobs(self) -> list[Job]:
        """The jobs of the batch; a copy, since another thread may add to it."""
        return list(self.batch.values())

    @property
    def running(self) -> bool:
        """Whether something is trained, or waits for it."""
        return any(not job.ended for job in self.jobs)

    @property
    def places(self) -> list[Place]:
        """Where each candidate is trained by the present settings."""
        return self.entered().places(self.data.split)

    def job_name(self, name: str, place: Place) -> str:
        """The name of the job that trains a candidate there."""
        return f"{name}, split {place[0]}, seed {place[1]}" if over(self.places) else name

    def forget_failures(self, name: str) -> None:
        """Forget what failed in training a candidate."""
        for label in [label for label in self.failed if label == name or label.startswith(f"{name}, split ")]:
            del self.failed[label]

    def reasons(self) -> dict[str, str]:
        """Why each run can't be compared with what is trained by the present settings, by its id; empty if it can."""
        entered, places = self.entered(), self.places
        now = {candidate.name: candidate for candidate in entered.ticked}
        splits, seeds = {split for split, _ in places}, {seed for _, seed in places}
        reasons: dict[str, str] = {}
        for run in list(self.runs):
            seed = run.training.seed
            training = replace(entered.training, seed=seed) if seed in seeds else entered.training
            why = run.differences(now.get(run.name), training, self.origin(run.split, training.seed), self.versions)
            elsewhere = "" if run.split in splits else f"split {run.split}, not {self.data.split}"
            reasons[run.id] = "; ".join(filter(None, (why, elsewhere)))
        return reasons

    def origin(self, split: int, seed: int) -> str | None:
        """What the model starts at, see `origin_of`; None if it is made of the rows of a split that are not here."""
        data = self.splits.get(split) if self.model.reads_rows else self.data
        if data is None:
            return None
        place = data.split, seed
        if place not in self.origins:
            self.origins[place] = origin_of(self.model.on(data).new(seed))
        return self.origins[place]

    def standing(self) -> dict[str, dict[Place, Trained]]:
        """By name and place the last run of the present settings."""
        reasons = self.reasons()
        standing: dict[str, dict[Place, Trained]] = {}
        for run in list(self.runs):
            if not reasons.get(run.id, "new"):
                standing.setdefault(run.name, {})[run.split, run.training.seed] = run
        return standing

    @property
    def trained(self) -> dict[str, Trained]:
        """The run that stands for each name: the one of the present settings on the first split and seed, else the last one there, or at all."""
        standing, first = self.standing(), self.places[0]
        chosen = {run.name: run for run in list(self.runs)}
        chosen |= {run.name: run for run in list(self.runs) if (run.split, run.training.seed) == first}
        return {
            name: standing[name].get(first) or next(iter(standing[name].values())) if name in standing else run
            for name, run in chosen.items()
        }

    @property
    def kept(self) -> list[Trained]:
        """The runs that stand for the names, in order."""
        trained = self.trained
        return [trained[name] for name in list(self.names) if name in trained]

    @property
    def differences(self) -> dict[str, str]:
        """Why each of those that are not of the present settings can't be compared with the others."""
        reasons, standing, counted = self.reasons(), self.standing(), number_of(self.places)
        differences = {}
        for kept in self.kept:
            count = len(standing.get(kept.name, ()))
            missing = f"trained on {count} of {counted}" if 0 < count < len(self.places) else ""
            if why := reasons.get(kept.id) or missing:
                differences[kept.name] = why
        return differences

    def others(self) -> dict[str, Trained]:
        """All other runs, by name and number."""
        known = {run.id for run in self.kept} | {run.id for at in self.standing().values() for run in at.values()}
        return {f"{run.name} #{run.number}": run for run in list(self.runs) if run.id not in known}

    @property
    def present(self) -> list[Trained]:
        """What has been trained with the present settings, on all splits and seeds, in order."""
        differences = self.differences
        return [kept for kept in self.kept if kept.name not in differences]

    @property
    def unchanged(self) -> bool:
        """Whether what is entered is what the batch was begun with."""
        return self.batch_of is not None and self.batch_of.same(self.entered())

    @functools.cached_property
    def view(self) -> PanelData:
        """What the pictures show."""
        return view_of(self.data)

    def _rows(self, outdated: bool = False) -> dict[str, dict[Place, Trained]]:
        """The runs of each row: all of the present settings, or the one that stands for a name."""
        standing, differences = self.standing(), self.differences
        if outdated:
            return {kept.name: {self.places[0]: kept} for kept in self.kept if kept.name in differences}
        return {kept.name: standing[kept.name] for kept in self.present}

    def frame(self, outdated: bool = False) -> pd.DataFrame:
        """The scores of the models of the present settings, or of the others; means over splits and seeds."""
        return _frame(self._rows(outdated))

    def spread_frame(self) -> pd.DataFrame:
        """The standard errors of `frame`."""
        return _frame(self._rows(), spread)

    def paired(self) -> Comparison | None:
        """The paired comparison of what is of the present settings; None with one run for each model."""
        places = self.places
        share = self.splits.test_share() if over(places) == "splits" else 0.0
        return paired(self._rows(), places, share)

    def marked(self) -> dict[str, list[str]]:
        """Of each column the models that are better than the plain one beyond noise; none with one run for each model."""
        comparison = self.paired()
        return {} if comparison is None else beyond_noise(comparison)

    def run_frame(self) -> pd.DataFrame:
        """All runs, one row each: what was trained, when and by what, whether it is of the present settings, and the scores."""
        reasons, standing = self.reasons(), self.standing()
        present = {run.id for at in standing.values() for run in at.values()}
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
                "differs": reasons[run.id] or ("" if run.id in present else AGAIN),
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
        """The scores as HTML; empty if there are none."""
        kept, total = self.kept, len(self.data.test)
        if not kept and not self.runs:
            return ""
        n, places = min(total, MAX_JUDGED), self.places
        rows = f"first {n:,} of {total:,} test rows" if n < total else f"{n:,} test rows"
        lent = self.data.classes is None and any(k.answers is not None and not k.answers.measured for k in kept)
        comparison = self.paired()
        notes = [f"On the {rows} of {self.data.name}. {_said_of(places if self.present else [], comparison)}"]
        if lent:
            notes.append(
                "Where no noise is measured, NLL and intervals assume a constant one: the RMSE on the validation rows."
            )
        differences = self.differences
        if differences:
            reasons = "; ".join(f"{name} ({why})" for name, why in differences.items())
            notes.append(f"Grey, and ranked with no other row, since not of the present settings: {reasons}.")
        status = {k.name: k.status for k in kept}
        others = self.others()
        if others:
            notes.append(f"Earlier runs: {', '.join(others)}; the pointer on a row says how they differ.")
            why = self.reasons()
            differences = {**differences, **{label: why[run.id] or AGAIN for label, run in others.items()}}
            status |= {label: "; ".join(filter(None, (_place(run), run.status))) for label, run in others.items()}
        by_name = {**self._rows(outdated=True), **self._rows()}
        about = {name: _about(list(at.values())) for name, at in by_name.items()}
        about |= {label: _about([run]) for label, run in others.items()}
        about |= {name: f"{about[name]}. Not of the present settings: {why}" for name, why in differences.items()}
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
        """The ends of the colours of each column in the pictures of all models of the present settings."""
        shown = [kept for kept in self.present if kept.answers is not None]
        key = tuple(kept.id for kept in shown)
        if self._scales is None or self._scales[0] != key:
            answers = [kept.answers for kept in shown if kept.answers is not None]
            self._scales = key, shared(self.view, answers)
        return self._scales[1]

    def panel(self, kept: Trained, losses: bool = True) -> str:
        """The panel of a model that could be judged, as HTML."""
        answers = kept.answers
        assert answers is not None
        notes = [f"{kept.status}."] if kept.status else []
        if not answers.measured and self.view.kind == "table":
            notes.append("No noise is measured: a constant one is assumed.")
        if over(self.places):
            notes.append(f"Split {kept.split}, seed {kept.training.seed}.")
        history, scales = kept.history if losses else None, self.scales
        if scales and len(self.present) > 1:
            what = "The axis has" if self.view.kind == "curve" else "Colours of one kind have"
            notes.append(f"{what} one scale for all models.")
        note = " ".join(notes)
        return panel(kept.candidate, self.view, answers, history, note=note, made=kept.made, scales=scales)


def _said_of(places: list[Place], comparison: Comparison | None) -> str:
    """What the numbers are means of, and what is marked."""
    if not places:
        return "One training each."
    if not over(places):
        return "One split, one seed: no ranking beyond this split."
    marked = "" if comparison is None else f" Marked is what is better than {comparison.reference} beyond noise."
    return f"Mean ± standard error over {in_words(places)}.{marked}"


def _place(run: Trained) -> str:
    return f"split {run.split}, seed {run.training.seed}"


def _about(runs: list[Trained]) -> str:
    """What was trained where and when, for a tooltip."""
    places = "; ".join(dict.fromkeys(map(_place, runs)))
    began = f", trained {runs[0].began[:16].replace('T', ' ')} UTC" if len(runs) == 1 and runs[0].began else ""
    return f"{runs[0].made or 'the model as it is'}; {places}{began}"


def _mean(runs: Mapping[Place, Trained], metric: str) -> float:
    numbers = values(runs, metric)
    return sum(numbers) / len(numbers)


def _frame(
    runs: Mapping[str, Mapping[Place, Trained]], number: Callable[[Mapping[Place, Trained], str], float] = _mean
) -> pd.DataFrame:
    """One number of the runs for each label and metric: the mean, NaN where a run has none."""
    require("pandas")
    import pandas as pd

    rows = {
        label: {metric: number(at, metric) for metric in dict.fromkeys(m for run in at.values() for m in run.scores)}
        for label, at in runs.items()
    }
    frame = pd.DataFrame.from_dict(rows, orient="index", dtype=float)
    frame.index.name = "model"
    return frame[ordered(map(str, frame))]
