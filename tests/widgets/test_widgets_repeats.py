"""`Comparison` on several seeds and splits: means, standard errors, and marks only beyond noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from workbench.data import Data
from workbench.widgets import Comparison
from workbench.widgets.comparison.repeats import Splits, beyond_noise, paired
from workbench.widgets.comparison.settings import Candidate
from workbench.widgets.comparison.trials import Trained, Training


def rows(n=60):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=generator)
    return x, x.sum(1, keepdim=True) + 0.1 * torch.randn(n, 1, generator=generator)


def small():
    return nn.Linear(3, 1)


def made(**options):
    return Comparison(small, rows(), ["vote"], **{"epochs": 1, **options})


@pytest.fixture(scope="module")
def trained():
    return made(splits=3).start(block=True)


def run(name, score, split, seed=0):
    training = Training(1, 0.1, 0.0, None, seed, None)
    made = Trained(name, Candidate(name), training, None, None, scores={"rmse": score}, settings="x", made="x")
    made.split = split
    return made


def runs_of(**scores):
    places = [(split, 0) for split in range(5)]
    runs = {
        name: {place: run(name, v, *place) for place, v in zip(places, s, strict=True)} for name, s in scores.items()
    }
    return runs, places


PLAIN = [1.0, 1.2, 1.1, 1.3, 0.9]
BETTER = [0.9, 1.12, 0.98, 1.22, 0.81]  # on each split, by about as much
NOISY = [0.6, 1.25, 0.8, 1.35, 0.7]  # the best mean, and not beyond noise


def test_marked_is_what_a_paired_t_test_with_holms_correction_finds():
    runs, places = runs_of(plain=PLAIN, better=BETTER, noisy=NOISY)
    p = {name: stats.ttest_rel(values, PLAIN).pvalue for name, values in (("better", BETTER), ("noisy", NOISY))}
    assert 2 * p["better"] < 0.05 < p["noisy"]
    assert beyond_noise(paired(runs, places, 0.0)) == {"rmse": ["better"]}


def test_splits_that_share_rows_are_corrected():
    runs, places = runs_of(
        plain=PLAIN, better=[v - d for v, d in zip(PLAIN, [0.1, 0.02, 0.12, 0.03, 0.09], strict=True)]
    )
    difference = np.array([0.1, 0.02, 0.12, 0.03, 0.09])
    share = 0.8
    t = difference.mean() / (difference.std(ddof=1) * np.sqrt(1 / 5 + share))
    corrected = 2 * stats.t.sf(t, 4)
    assert stats.ttest_1samp(difference, 0).pvalue < 0.05 < corrected
    assert beyond_noise(paired(runs, places, 0.0)) == {"rmse": ["better"]}
    assert beyond_noise(paired(runs, places, share)) == {}


def test_seeds_are_averaged_within_each_split():
    scores = {"plain": {(s, k): run("plain", s + k, s, k) for s in range(3) for k in range(2)}}
    scores["vote"] = {place: run("vote", 2.0, *place) for place in scores["plain"]}
    comparison = paired(scores, list(scores["plain"]), 0.0)
    assert comparison.scores["plain"]["rmse"] == [0.5, 1.5, 2.5]
    assert comparison.over == "splits"


@pytest.mark.slow
def test_the_table_has_means_and_standard_errors_of_each_split_trained_alone(trained):
    alone = [made(split=split).start(block=True).results.rmse.to_numpy() for split in range(3)]
    assert trained.results.rmse.to_numpy() == pytest.approx(np.mean(alone, 0))
    assert trained.standard_errors.rmse.to_numpy() == pytest.approx(stats.sem(alone, 0))
    assert trained.runs.split.tolist() == [0, 0, 1, 1, 2, 2]
    text = trained.controls.metrics.value
    assert "Mean ± standard error over 3 splits." in text
    assert "paired t-test against plain over 3 splits at 95 %" in text
    assert "Nadeau and Bengio" in text  # a pair is split anew: the splits share rows
    assert trained._findings.splits.test_share() == pytest.approx(12 / (48 * 0.9))


@pytest.mark.slow
def test_runs_of_other_settings_are_in_no_mean(trained):
    comparison = made(seeds=2).start(block=True)
    assert comparison.runs.seed.tolist() == [0, 0, 1, 1]
    both = comparison.results.rmse
    comparison.controls.seeds.value = 3
    assert comparison.results.empty
    assert comparison.outdated.differs.tolist() == ["trained on 2 of 3 seeds"] * 2
    comparison.start(block=True)
    runs = comparison.runs
    assert runs.seed.tolist() == [0, 0, 1, 1, 2, 2]  # only what was missing
    means = runs.groupby("model").rmse.mean()
    assert comparison.results.rmse.to_dict() == pytest.approx(means.to_dict())
    assert "seeds of one split say nothing of other splits" in comparison.controls.metrics.value
    comparison.controls.epochs.value = 2
    assert comparison.results.empty
    comparison.controls.epochs.value, comparison.controls.seeds.value = 1, 2
    assert comparison.results.rmse.to_dict() == both.to_dict()


def test_what_can_not_be_split_is_refused():
    x, y = rows()
    dataset = Data.from_arrays(x, y)
    with pytest.raises(ValueError, match=r"splits=2: the data were given as one split .* or seeds=2"):
        Comparison(small, dataset, ["vote"], splits=2)
    assert Comparison(small, dataset, ["vote"]).controls.splits.disabled
    for name in ("seeds", "splits"):
        with pytest.raises(ValueError, match=f"{name} must be a whole number from 1"):
            made(**{name: 0})


def test_rows_that_were_changed_meanwhile_make_no_other_splits():
    x, y = rows()
    comparison = Comparison(small, (x, y), ["vote"], epochs=1)
    x.mul_(2)
    comparison.controls.splits.value = 2
    with pytest.raises(ValueError, match="were changed since this comparison was made"):
        comparison.start(block=True)


def test_toys_that_are_drawn_anew_share_no_rows():
    from workbench.data import load

    splits = Splits("cubic", load("cubic"))
    splits.prepare(2)
    assert splits.test_share() == 0.0


@pytest.mark.slow
def test_the_saved_output_follows_the_table_and_is_hidden_by_the_widget(monkeypatch):
    import IPython
    import IPython.display

    sent = []
    monkeypatch.setattr(IPython, "get_ipython", lambda: "a shell")
    monkeypatch.setattr(IPython.display, "display", lambda data, **options: sent.append((data["text/html"], options)))
    comparison = made()
    comparison._repr_mimebundle_()
    assert "<table" not in sent[0][0]
    comparison.start(block=True)
    (page, options), first = sent[-1], sent[0][1]
    assert (first["update"], options["update"]) == (False, True)
    assert first["display_id"] == options["display_id"]
    assert "no ranking beyond this split" in page
    assert "<svg" in page
    assert "<script" not in page
    assert len(page) < 500_000
    hidden = f".{options['display_id']}{{display:none!important}}"
    assert hidden in comparison.controls.style.value
    assert hidden not in page
    comparison.snapshot()
    assert "<table" not in sent[-1][0]  # shown by the snapshot


@pytest.mark.slow
def test_a_page_that_would_be_too_large_has_no_pictures_with_hover(monkeypatch, trained):
    from workbench.widgets.comparison import saved
    from workbench.widgets.comparison.figure import overview

    whole = saved.saved_page(trained._findings)
    monkeypatch.setattr(saved, "MAX_BYTES", len(whole) - 1)
    drawn: list[object] = []
    monkeypatch.setattr(saved, "overview", lambda *args: drawn.append(args) or overview(*args))
    page = saved.saved_page(trained._findings)
    assert len(drawn) == 1  # the picture is that of the page that was too large
    assert len(page) < len(whole)
    assert "<svg" not in page
    assert 'class="wb-only"' in page


@pytest.mark.slow
def test_after_a_change_of_settings_pictures_are_of_the_runs_in_the_table():
    comparison = made(seeds=2).start(block=True)
    comparison._repr_mimebundle_()
    row = comparison.controls.rows["vote"]
    assert "Split 0, seed 0." in row.panel.value
    comparison.controls.epochs.value = 2
    shown = comparison.controls.metrics.value
    assert "One run each." in shown
    assert "Mean ±" not in shown
    assert comparison._findings.trained["vote"].training.seed == 0
    assert "Split 0, seed 0." in row.panel.value
    comparison.controls.epochs.value, comparison.controls.seed.value, comparison.controls.seeds.value = 1, 1, 1
    assert comparison.results.index.tolist() == ["plain", "vote"]
    assert comparison._findings.trained["vote"].training.seed == 1
    rmse = comparison.results.rmse["vote"]
    assert f"RMSE {rmse:.3g} " in row.panel.value


@pytest.mark.slow
def test_a_model_of_training_rows_is_made_anew_on_each_split(tmp_path):
    def made():
        return Comparison("tabular(width=4)", rows(), ["vote"], epochs=1, splits=2, session=tmp_path / "a.session")

    comparison = made().start(block=True)
    runs, splits = comparison._findings.runs, comparison._splits
    assert [run.split for run in runs] == [0, 0, 1, 1]
    for run in runs:
        seen = splits[run.split].train.x.double()
        assert torch.allclose(run.wrapped[0].mean.double().flatten(), seen.mean(0), atol=1e-6)
    assert len({run.origin for run in runs}) == 2
    assert comparison.outdated.empty
    assert len(comparison.start(block=True).runs) == 4  # nothing is trained twice
    again = made()
    assert again.outdated.empty
    assert again.results.rmse.to_dict() == comparison.results.rmse.to_dict()
