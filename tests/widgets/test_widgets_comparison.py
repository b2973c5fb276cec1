"""`Comparison` without a browser: operated through its widgets, and headless."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from helpers.widget_cases import draw, rows, small
from sklearn.metrics import roc_auc_score
from torch import nn

from workbench import data, is_wrapped, neo, vote
from workbench.widgets import Comparison
from workbench.widgets.comparison.panels import kind_of
from workbench.widgets.comparison.scores import passes


def made(wrappers=("sculpt", "vote"), model=small, dataset=None, **options):
    return Comparison(model, dataset if dataset is not None else rows(), list(wrappers), **{"epochs": 2, **options})


def ended(comparison, seconds=60):
    assert comparison.wait(seconds)
    return comparison


@pytest.fixture(scope="module")
def trained():
    return made(("sculpt", "vote", "vote+sculpt+neo")).start(block=True)


# ---- headless
@pytest.mark.slow
def test_results_are_those_of_the_models(trained):
    frame, test = trained.results, trained.data.test
    assert frame.index.tolist() == ["plain", "sculpt", "vote", "vote+sculpt+neo"]
    for name, model in trained.models.items():
        assert is_wrapped(model)
        assert not model.training
        with torch.no_grad():
            error = (model(test.x) - test.y).numpy()
        assert frame.rmse[name] == pytest.approx(np.sqrt(np.mean(error**2)), rel=1e-5)
    with torch.no_grad():
        y, sd = trained.models["sculpt"](test.x, return_risk=True)
    z = ((test.y - y) / sd).numpy()
    assert frame.nll["sculpt"] == pytest.approx(
        np.mean(z**2 / 2 + np.log(sd.numpy()) + np.log(2 * np.pi) / 2), rel=1e-5
    )
    assert frame.coverage["sculpt"] == pytest.approx(np.mean(np.abs(z) < 1.6448536))


@pytest.mark.slow
def test_a_model_without_noise_is_lent_that_of_the_validation_rows(trained):
    _, valid = trained.data.validation(0.1, 0)
    test, model = trained.data.test, trained.models["plain"]
    with torch.no_grad():
        noise = (model(valid.x) - valid.y).square().mean().sqrt()
        expected = -torch.distributions.Normal(model(test.x), noise).log_prob(test.y).mean()
    assert trained.results.nll["plain"] == pytest.approx(float(expected), rel=1e-5)
    assert "assume constant noise" in trained.controls.metrics.value


def test_costs_are_counted(trained):
    frame = trained.results
    n_parameters = sum(p.numel() for p in small().parameters())
    assert frame.parameters_added.to_dict()["plain"] == 0
    assert frame.parameters_added["vote"] == 2 * n_parameters
    assert frame.parameters_added["sculpt"] == n_parameters
    assert (frame.seconds > 0).all()
    assert frame.passes["plain"] == 1
    assert frame.passes["vote+sculpt+neo"] > 1


def test_a_busy_moment_of_the_machine_does_not_count_as_cost():
    class Interrupted(nn.Linear):
        began = 0.0

        def forward(self, x):
            Interrupted.began = Interrupted.began or time.perf_counter()
            if time.perf_counter() < Interrupted.began + 0.28:
                time.sleep(0.02)
            return super().forward(x)

    plain = Interrupted(3, 1)
    # otherwise a prediction takes well below a millisecond, and one of two busy voters forty
    assert passes(vote.Wrapper(2)(plain), plain, draw(64, 3)) < 60


def test_nothing_is_marked_on_one_split_and_seed(trained):
    text = trained.controls.metrics.value
    assert "wb-best" not in text
    assert "One split, one seed: no ranking beyond this split." in text
    assert trained.standard_errors.isna().to_numpy().all()


@pytest.mark.slow
def test_the_models_given_are_not_changed():
    model = small()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    mode, state = model.training, torch.get_rng_state()
    made(model=model).start(block=True)
    assert model.training is mode
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
def test_background_and_blocking_give_the_same_numbers(trained, monkeypatch):
    from workbench.widgets.comparison import trials

    monkeypatch.setattr(trials, "FIRST_LIVE", 0.0)  # every epoch is drawn, as far as the time allows
    other = made(("sculpt", "vote", "vote+sculpt+neo"))
    other._repr_mimebundle_()
    drawn = []
    other.controls.rows["sculpt"].panel.observe(lambda change: drawn.append(change["new"]), "value")
    other.controls.train.click()
    assert other.running
    torch.rand(3)  # another cell draws
    ended(other)
    metrics = [name for name in trained.results if name not in ("seconds", "passes")]
    assert other.results[metrics].equals(trained.results[metrics])
    assert len(drawn) >= 2  # live, and at the end
    assert not other.errors


@pytest.mark.slow
def test_the_seed_counts_and_repeats():
    one, two, three = (made(("vote",), seed=seed).start(block=True).results.rmse["vote"] for seed in (1, 1, 2))
    assert one == two != three


@pytest.mark.slow
def test_class_outputs():
    moons = data.load("moons", n_train=200, n_test=80)
    comparison = made(("sample", "vote+neo", "sculpt"), lambda: small(2, 2), moons).start(block=True)
    frame, test = comparison.results, moons.test
    assert not comparison.errors
    with torch.no_grad():
        scores = comparison.models["plain"](test.x)
    wrong = (scores.argmax(1) != test.y).numpy()
    assert frame.accuracy["plain"] == pytest.approx(1 - wrong.mean())
    entropy = torch.distributions.Categorical(logits=scores).entropy().numpy()
    assert frame.error_auroc["plain"] == pytest.approx(roc_auc_score(wrong, entropy))
    assert comparison.models["vote+neo"](test.x, return_risk=True)[1].names() == (
        "aleatoric",
        "epistemic",
        "vacuitic",
        "total",
    )


@pytest.mark.slow
def test_a_softmax_at_the_end_is_seen():
    moons = data.load("moons", n_train=100, n_test=40)
    comparison = Comparison(nn.Sequential(small(2, 2), nn.Softmax(-1)), moons, ["vote"], epochs=1).start(block=True)
    assert comparison.models["vote"]._workbench.output == "probs"
    assert 0 <= comparison.results.accuracy["vote"] <= 1


@pytest.mark.slow
def test_outside_the_data_counts_where_regions_are_known():
    sine_gap = data.load("sine-gap", n_train=200, n_test=90)
    comparison = made(("neo",), lambda: small(1), sine_gap).start(block=True)
    inside = sine_gap.test.regions["data"].numpy()
    with torch.no_grad():
        risk = comparison.models["neo"](sine_gap.test.x, return_risk=True)[1].numpy()
    assert comparison.results.outside_auroc["neo"] == pytest.approx(roc_auc_score(~inside, risk))
    assert np.isnan(comparison.results.outside_auroc["plain"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "model", "kind"),
    [
        (data.load("cubic", n_train=80, n_test=40), lambda: small(1), "curve"),
        (data.load("moons", n_train=80, n_test=40), lambda: small(2, 2), "plane"),
        (rows(), small, "table"),
        ((draw(60, 5), torch.arange(60) % 3), lambda: small(5, 3), "table"),
        ((draw(60, 1, 8, 8), torch.arange(60) % 2), lambda: nn.Sequential(nn.Flatten(), small(64, 2)), "images"),
        ((draw(60, 2), draw(60, 1, seed=2)), lambda: small(2), "plane"),
        ((draw(60, 6, 4), draw(60)), lambda: nn.Sequential(nn.Flatten(), small(24)), "table"),
    ],
    ids=["curve", "plane", "table", "classes", "images", "plane of values", "sequences"],
)
def test_every_kind_of_data_has_its_picture(dataset, model, kind, monkeypatch):
    import IPython.display

    shown = []
    monkeypatch.setattr(IPython.display, "display", lambda data, **options: shown.append(data))
    comparison = Comparison(model, dataset, ["vote+neo"], epochs=1).start(block=True)
    comparison._repr_mimebundle_()
    assert kind_of(comparison.data) == kind
    assert not comparison.errors
    for row in comparison.controls.rows.values():
        assert row.panel.layout.display is None
        assert "no picture" not in row.panel.value
        assert "<img" in row.panel.value if kind == "images" else "<svg" in row.panel.value
    comparison.snapshot()
    assert len(shown) == 1
    assert set(shown[0]) == {"text/html", "image/png", "text/plain"}
    assert "<script" not in shown[0]["text/html"]
    assert sum(map(len, shown[0].values())) < 400_000


@pytest.mark.slow
def test_large_data_are_sampled_for_the_picture_and_it_says_so():
    x, y = rows(9000, 3)
    comparison = made((), dataset=(x, y), epochs=1).start(block=True)
    assert "1,500 of 1,800 test rows, drawn at random" in comparison.controls.metrics.value
    assert len(comparison._findings.view.x) == 1500


# ---- widgets
@pytest.mark.slow
def test_rows_of_the_package_are_offered_and_can_be_ticked():
    comparison = Comparison(small, rows(), epochs=1)
    offered = comparison.controls.rows
    assert set(offered) >= {"plain", "laplace", "neo", "sample", "sculpt", "snapshot", "swag", "vote"}
    assert [name for name, row in offered.items() if row.tick.value] == ["plain", "sculpt", "vote", "vote+sculpt+neo"]
    for row in offered.values():
        row.tick.value = row.name in ("plain", "laplace")
    comparison.controls.train.click()
    assert ended(comparison).results.index.tolist() == ["plain", "laplace"]
    assert "Done" in comparison.controls.status.value
    assert comparison.controls.bar.value == 1


@pytest.mark.slow
def test_settings_that_are_entered_count_and_only_what_changed_is_trained_again():
    comparison = made(("vote", "sculpt")).start(block=True)
    kept = comparison.models
    row = comparison.controls.rows["vote"]
    row.form.forms[0].controls["n_voters"].value = 4
    comparison.controls.train.click()
    ended(comparison)
    assert len(comparison.models["vote"].voters()) == 4
    assert comparison.models["sculpt"] is kept["sculpt"]
    comparison.controls.train.click()
    assert "already trained with these settings" in comparison.controls.status.value
    comparison.controls.epochs.value = 3
    comparison.controls.train.click()
    ended(comparison)
    assert comparison.models["sculpt"] is not kept["sculpt"]
    assert len(comparison.histories["sculpt"].records) == 3


@pytest.mark.slow
def test_wrappers_are_composed_and_removed():
    comparison = made(("vote",))
    controls = comparison.controls
    controls.add.click()
    assert "Press the wrappers to combine" in controls.status.value
    controls.compose["vote"].value = controls.compose["neo"].value = True
    controls.add.click()
    assert list(controls.rows) == ["plain", "vote", "neo+vote"]
    assert not controls.compose["vote"].value
    controls.compose["vote"].value = True
    controls.add.click()
    assert "vote 2" in controls.rows
    controls.train.click()
    ended(comparison)
    assert comparison.models["neo+vote"].methods == ("vote", "neo")
    controls.rows["vote 2"].remove.click()
    assert "vote 2" not in controls.rows
    assert "vote 2" not in comparison.results.index


@pytest.mark.slow
def test_stop_keeps_what_is_trained():
    comparison = made(("vote", "sculpt"), epochs=100_000)
    comparison.controls.train.click()
    deadline = time.monotonic() + 30
    while "epoch" not in comparison.controls.status.value and time.monotonic() < deadline:
        time.sleep(0.01)
    assert comparison.controls.train.disabled
    assert not comparison.controls.stop.disabled
    with pytest.raises(RuntimeError, match="training already"):
        comparison.start()
    comparison.controls.stop.click()
    assert comparison.controls.stop.disabled
    ended(comparison)
    assert list(comparison.models) == ["plain"]
    assert np.isfinite(comparison.outdated.rmse["plain"])
    assert comparison.results.empty  # what was stopped is compared with nothing
    assert "stopped in epoch" in comparison.controls.metrics.value
    assert "Stopped" in comparison.controls.status.value
    assert not comparison.controls.train.disabled
    comparison.controls.epochs.value = 1
    comparison.controls.train.click()
    assert ended(comparison).results.index.tolist() == ["plain", "vote", "sculpt"]
    assert "plain #1 <small>split 0, seed 0; stopped" in comparison.controls.metrics.value  # an earlier run


@pytest.mark.slow
def test_the_table_is_there_before_the_status_announces_it():
    comparison = made(["sculpt"])
    controls, seen = comparison.controls, []
    controls.status.observe(lambda _: seen.append((controls.status.value, controls.metrics.value)), "value")
    comparison.start(block=True)
    assert "plain" in next(table for status, table in seen if "1 of 1 trained" in status)


def test_stop_before_the_first_step_keeps_nothing():
    gate = threading.Event()

    def slow():
        if threading.current_thread() is not threading.main_thread():
            gate.wait(30)
        return small()

    comparison = made(("vote",), slow)
    comparison.start()
    comparison.stop()
    gate.set()
    ended(comparison)
    assert comparison.models == {}
    assert "nothing was trained before Stop" in comparison.controls.status.value
    assert not comparison.controls.train.disabled


class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(3, 1), 0

    def forward(self, x):
        if self.training:
            raise RuntimeError("this <layer> broke")
        return self.layer(x)


def test_a_model_that_fails_in_training_is_shown_and_the_rest_goes_on():
    comparison = made((), Breaks)
    comparison.controls.train.click()
    ended(comparison)
    message, traceback = comparison.controls.errors.children
    assert "this &lt;layer&gt; broke" in message.value
    assert 'role="alert"' in message.value
    assert traceback.selected_index is None
    assert "Traceback (most recent call last)" in traceback.children[0].value
    assert "failed: plain" in comparison.controls.status.value
    assert isinstance(comparison.errors["plain"], RuntimeError)
    with pytest.raises(RuntimeError, match="broke"):
        comparison.start(block=True)


@pytest.mark.slow
def test_a_wrapper_that_refuses_leaves_the_others_alone():
    comparison = Comparison(small, rows(), {"odd": neo.Wrapper(layers="nowhere"), "vote": vote.Wrapper()}, epochs=1)
    comparison.controls.train.click()
    ended(comparison)
    assert comparison.results.index.tolist() == ["plain", "vote"]
    assert "no module &#x27;nowhere&#x27;" in comparison.controls.errors.children[0].value
    comparison.controls.rows["odd"].form.forms[0].controls["layers"].value = "0"
    comparison.controls.train.click()
    ended(comparison)
    assert "odd" in comparison.results.index
    assert comparison.controls.errors.children == ()


def test_settings_that_cannot_be_are_refused_before_anything_trains():
    comparison = made(("vote",))
    comparison.controls.rows["vote"].form.forms[0].controls["alpha"].value = -1.0
    comparison.controls.train.click()
    assert "alpha must not be negative" in comparison.controls.status.value
    assert not comparison.running
    assert comparison.results.empty


def test_nan_among_the_rows_is_said():
    x, y = rows()
    x[5, 1] = float("nan")
    with pytest.raises(ValueError, match="NaN or infinite numbers in 1 of 80 rows, first in row 5"):
        made(("vote",), dataset=(x, y))


def test_it_shows_itself_and_every_control_has_a_tooltip():
    import ipywidgets as w

    comparison = made()
    bundle = comparison._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert bundle["text/plain"] == "Comparison of plain, sculpt, vote on your data"
    entries = [child for child in walk(comparison.controls.root) if isinstance(child, w.ValueWidget | w.Button)]
    controls = [c for c in entries if not isinstance(c, w.HTML)]
    assert len(controls) > 20
    assert [c for c in controls if not c.tooltip] == []


def walk(widget):
    yield widget
    for child in getattr(widget, "children", ()):
        yield from walk(child)
