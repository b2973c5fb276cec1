"""`Comparison` never ranks, highlights or exports as current what belongs to other settings."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from workbench import sample, vote
from workbench.widgets import Comparison
from workbench.widgets.common.jobs import Jobs


def rows(n=80, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator)
    return x, x.sum(1, keepdim=True) + 0.1 * torch.randn(n, 1, generator=generator)


def small():
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def trained(model=small, dataset=None, wrappers=("vote", "sample"), **options):
    dataset = rows() if dataset is None else dataset
    return Comparison(model, dataset, list(wrappers), **{"epochs": 2, **options}).start(block=True)


def row_of(comparison, name):
    """The attributes and the cells of a row of the table that is shown."""
    text = comparison.controls.metrics.value
    return re.search(rf'<tr([^>]*)><th scope="row"[^>]*>{re.escape(name)}\b.*?</th>(.*?)</tr>', text).groups()


def assert_outdated(comparison, names, why):
    comparison.controls  # noqa: B018  what is shown is made when it is asked for
    comparison._refresh()
    assert comparison.outdated.index.tolist() == names
    assert not set(names) & set(comparison.results.index)
    for name in names:
        attributes, cells = row_of(comparison, name)
        assert "wb-outdated" in attributes
        assert "wb-best" not in cells
        assert why in comparison.outdated.differs[name]
        assert why in attributes
        assert "wb-outdated" in comparison.controls.rows[name].panel._dom_classes
    for name in comparison.results.index:
        assert row_of(comparison, name)[0] == ""
        assert "wb-outdated" not in comparison.controls.rows[name].panel._dom_classes


@pytest.mark.slow
def test_all_of_the_same_settings_is_ranked():
    assert_outdated(trained(), [], "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("epochs", 1, "epochs 2, not 1"),
        ("lr", 0.002, "learning rate 0.01, not 0.002"),
        ("weight_decay", 0.5, "weight decay 0, not 0.5"),
        ("seed", 7, "seed 0, not 7"),
    ],
)
def test_unticked_models_of_other_settings_are_ranked_with_none(name, value, why):
    comparison = trained()
    comparison.controls.rows["vote"].tick.value = False
    getattr(comparison.controls, name).value = value
    comparison.controls.train.click()
    assert comparison.wait(60)
    assert comparison.results.index.tolist() == ["plain", "sample"]
    assert_outdated(comparison, ["vote"], why)
    assert "not ticked" in comparison.outdated.differs["vote"]


@pytest.mark.slow
def test_a_changed_setting_makes_what_was_done_a_thing_of_the_past():
    comparison = trained()
    controls = comparison.controls
    assert "Done" in controls.status.value
    controls.epochs.value = 3
    assert "Done" not in controls.status.value
    assert "Train starts 3 models: plain, vote, sample" in controls.status.value
    assert controls.bar.value == 0
    assert_outdated(comparison, ["plain", "vote", "sample"], "epochs 2, not 3")
    with pytest.raises(ValueError, match="nothing is trained with the current settings, only plain, vote, sample"):
        comparison.snapshot()
    controls.epochs.value = 2
    assert_outdated(comparison, [], "")
    assert "Done" in controls.status.value


@pytest.mark.slow
def test_a_changed_setting_of_a_wrapper_greys_its_row_alone():
    comparison = trained(wrappers=[vote.Wrapper(2), sample.Wrapper(distribution=sample.Normal(0.1))])
    controls = comparison.controls
    controls.rows["sample"].form  # noqa: B018  its controls are made now, and say the same
    controls.rows["vote"].form.forms[0].controls["n_voters"].value = 4
    assert "Train starts 1 model: vote." in controls.status.value
    assert_outdated(comparison, ["vote"], "trained as vote.Wrapper(n_voters=2)")


@pytest.mark.slow
def test_settings_inside_of_settings_are_watched_too():
    comparison = trained(wrappers=["sample"])
    form = comparison.controls.rows["sample"].form.forms[0]
    form.controls["distribution"].value = sample.Normal
    assert_outdated(comparison, ["sample"], "trained as")
    comparison.start(block=True)
    assert_outdated(comparison, [], "")
    form._inside["distribution"].controls["scale"].value = 0.7
    assert_outdated(comparison, ["sample"], "trained as")


@pytest.mark.slow
def test_what_was_stopped_is_ranked_with_none():
    comparison = trained()
    comparison._findings.trained["vote"].status = "stopped in epoch 1 of 2"
    assert_outdated(comparison, ["vote"], "stopped in epoch 1 of 2")
    comparison.start(block=True)
    assert_outdated(comparison, [], "")


@pytest.mark.slow
def test_a_model_that_was_changed_meanwhile_is_another_model():
    model = small()
    comparison = trained(model)
    comparison.controls.rows["vote"].tick.value = False
    with torch.no_grad():
        model[0].weight.mul_(2)
    comparison.start(block=True)
    assert_outdated(comparison, ["vote"], "the model started at other weights")
    comparison.controls.rows["vote"].tick.value = True
    comparison.start(block=True)
    assert_outdated(comparison, [], "")


@pytest.mark.slow
def test_data_that_were_changed_meanwhile_are_other_data():
    comparison = trained()
    before = comparison.results.rmse
    comparison.controls.rows["vote"].tick.value = False
    comparison.data.train.y.add_(3.0)
    comparison.start(block=True)
    assert comparison.results.rmse["plain"] != before["plain"]
    assert_outdated(comparison, ["vote"], "the data were changed since")
    with pytest.raises(AttributeError):
        comparison.data = rows(seed=1)


@pytest.mark.slow
def test_exports_are_of_the_present_settings(tmp_path, monkeypatch):
    import IPython.display

    pages = []
    monkeypatch.setattr(IPython.display, "display", lambda data, **options: pages.append(data))
    comparison = trained()
    comparison.controls.rows["vote"].tick.value = False
    comparison.controls.epochs.value = 1
    comparison.start(block=True).snapshot()
    assert pages[0]["text/plain"] == f"comparison of plain, sample on {comparison.data.name}"
    assert "Grey rows were not trained with the current settings" in pages[0]["text/html"]
    text = comparison.export(tmp_path / "again.ipynb").read_text()
    assert "epochs = 1" in text
    assert "vote" not in text.replace("workbench", "")


def activated(activation):
    """A model whose first weights are the same whatever it computes with them."""
    return lambda: nn.Sequential(nn.Linear(3, 8), activation(), nn.Linear(8, 1))


class Bent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.outer(self.inner(x).relu())


class Straight(Bent):
    def forward(self, x):
        return self.outer(self.inner(x))


Straight.__qualname__ = Straight.__name__ = "Bent"  # the same class with other code, as after an edit of its cell


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "now"), [(activated(nn.Tanh), activated(nn.ReLU)), (Bent, Straight)], ids=["activation", "code"]
)
def test_runs_of_a_model_that_computes_something_else_are_ranked_with_none(tmp_path, before, now):
    trained(before, wrappers=["vote"], session=tmp_path / "runs")
    comparison = Comparison(now, rows(), ["vote"], epochs=2, session=tmp_path / "runs")
    assert comparison.results.empty
    assert comparison.start(block=True).results.index.tolist() == ["plain", "vote"]
    assert "the code or the settings of the model were different" in comparison.runs.differs[1]
    again = Comparison(before, rows(), ["vote"], epochs=2, session=tmp_path / "runs")
    assert again.results.index.tolist() == ["plain", "vote"]


@pytest.mark.slow
def test_runs_of_files_without_the_structure_of_the_model_are_still_compared():
    comparison = trained()
    for run in comparison._findings.runs:
        run.origin = run.origin.partition(":")[0]
    assert_outdated(comparison, [], "")


@pytest.mark.slow
def test_stop_before_the_first_step_speaks_of_no_earlier_run():
    comparison = trained(epochs=1)
    run = comparison._findings.runs[-1]
    run.status = "stopped in epoch 1 of 1"
    comparison.controls  # noqa: B018
    findings, job = comparison._findings, Jobs().submit(lambda job: None, name="sample", block=True)
    job.status, findings.batch = "stopped", {"sample": job}
    findings.before = frozenset(run.id for run in findings.runs)
    comparison._refresh()
    assert "nothing was trained before Stop" in comparison.controls.status.value
    findings.before = frozenset()
    comparison._refresh()
    assert "sample stopped in epoch 1 of 1 and can be used" in comparison.controls.status.value
