"""Tools applied to a trained model, on a simulated device as on the CPU; started by `test_other_device.py`."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pytest
import torch
from torch import Tensor, nn

from helpers.calibration_models import answers_of, known, labelled, regression, scores
from helpers.device_models import mlp, quiet
from helpers.metric_cases import CASES, VOTERS_FIRST, VotersFirst
from helpers.other_device import DEVICE, Formula, close, rows
from helpers.widget_cases import beams, pictures
from workbench import (  # fmt: skip
    calibrate,
    compose,
    diagnose,
    fit,
    metrics,
    neo,
    plots,
    sample,
    sculpt,
    selective,
    top_uncertain,
    vote,
)
from workbench.experiments import sweep
from workbench.widgets import Comparison, Explorer

# ---- calibration
CALIBRATED: dict[str, Any] = {
    "temperature": (lambda: scores(output="logits"), labelled(30, 2.0), {}),
    "variance": (lambda: known(outputs=2), regression(30, outputs=2)[:2], {"method": "variance", "per_output": True}),
    "isotonic": (lambda: known(outputs=2), regression(30, outputs=2)[:2], {"method": "isotonic"}),
    "conformal": (lambda: known(outputs=2), regression(30, outputs=2)[:2], {"method": "conformal"}),
    "cqr": (lambda: known(outputs=2), regression(30, outputs=2)[:2], {"method": "conformal", "score": "cqr", "joint": True}),
    "aps": (lambda: scores(output="logits"), labelled(30, 2.0), {"method": "conformal", "score": "aps", "randomized": False}),
    "raps": (lambda: scores(output="logits"), labelled(30, 2.0), {"method": "conformal", "score": "raps"}),
    "lac": (lambda: scores(output="logits"), labelled(30, 2.0), {"method": "conformal", "score": "lac"}),
}  # fmt: skip


def answered(calibrated: Any, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)  # for randomized sets
    return answers_of(calibrated, x)


@pytest.mark.parametrize("at", ["cpu", DEVICE])
@pytest.mark.parametrize("name", CALIBRATED)
def test_calibrated_models(name: str, at: str, tmp_path: Path) -> None:
    """The rows are on the CPU or on the device."""
    make, (x, y), options = CALIBRATED[name]
    model = make()
    here = calibrate(model, (x, y), **options)
    there = calibrate(copy.deepcopy(model).to(DEVICE), (x.to(at), y.to(at)), **options)
    expected = answered(here, x)
    close(expected, answered(there, x.to(DEVICE)))
    close(expected, answered(copy.deepcopy(here).to(DEVICE), x.to(DEVICE)))
    close(expected, answered(copy.deepcopy(there), x.to(DEVICE)))
    torch.testing.assert_close(answered(pickle.loads(pickle.dumps(there.cpu())), x), expected)


def test_intervals_of_a_cross_fitted_model() -> None:
    x = rows()[0].double()
    intervals = []
    for where in ("cpu", DEVICE):
        torch.manual_seed(0)
        model = compose(vote.Wrapper(6), sculpt.Wrapper(n_layers=1))(mlp())
        with quiet():
            history = fit(model, rows(), folds=3, epochs=2, device=where, dtype=torch.float64, progress=False)
        intervals.append(calibrate(model, history).interval(x.to(where), coverage=0.8))
    close(*(list(pair) for pair in intervals), atol=1e-6)


def test_selective_predictions() -> None:
    x, y, *_ = regression(40)
    for by, how in (("total", {"coverage": 0.5}), ("aleatoric", {"risk": 4.0, "confidence": 0.8, "max_error": 9.0})):
        here, there = (selective(known().to(where), (x.to(where), y.to(where)), by) for where in ("cpu", DEVICE))
        close([here.risk, here.error, *here.curve], [there.risk, there.error, *there.curve])
        a, b = here.predictor(**how), there.predictor(**how)
        close(list(a(x)), list(b(x.to(DEVICE))))
        assert repr(here) == repr(there)
        close(list(top_uncertain(known(), x, 5, by)), list(top_uncertain(known().to(DEVICE), x, 5, by)))
    logits, labels = labelled(40, 2.0)
    here, there = (selective(scores(output="logits").to(w), (logits, labels), "confidence") for w in ("cpu", DEVICE))
    close(here.curve.error, there.curve.error)


# ---- metrics and pictures
@pytest.mark.parametrize("name", CASES)
def test_metrics(name: str) -> None:
    new, function, arguments = CASES[name]
    on_device = [argument.to(DEVICE) for argument in arguments]
    expected = function(*arguments)
    close(expected, function(*on_device))
    metric = new().to(DEVICE)
    target = VotersFirst(metric) if name in VOTERS_FIRST else metric
    for part in (slice(0, 15), slice(15, 40)):
        target.update(*(argument[part] for argument in on_device))
    close(expected, metric.compute())


def test_curves() -> None:
    values = [argument.to(DEVICE) for argument in CASES["NLL"][2]]
    for curves in (
        metrics.coverage_curve(*values),
        metrics.reliability_curve(*(a.to(DEVICE) for a in CASES["ECE"][2])),
        metrics.risk_coverage_curve(values[1], values[2].abs()),
        metrics.sparsification_curve(values[1], values[2].abs()),
    ):
        assert {curve.device.type for curve in curves if isinstance(curve, Tensor)} <= {DEVICE}


def test_pictures() -> None:
    wrapped = compose(vote.Wrapper(3), sculpt.Wrapper(), neo.Wrapper())(
        nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
    )
    x = torch.linspace(0, 1, 60)[:, None]
    with quiet():
        history = fit(wrapped, (x, x.square()), epochs=3, device=DEVICE, progress=False)
    x = x.to(DEVICE)
    with torch.no_grad():
        y, risk = wrapped(x, return_risk=True)
    plots.bands(x, y, risk.aleatoric, risk.epistemic, risk.vacuitic, observed=(x, y))
    plots.coverage(y, risk.total, x)
    plots.risk_against_error(risk.total, (y - x).abs())
    plots.predicted_against_true(y, x)
    plots.risk_coverage(risk.total, (y - x).abs())
    plots.sparsification(risk, (y - x).abs())
    plots.targets(torch.cat([y, y], 1), torch.cat([x, x], 1), torch.cat([risk.total, risk.total], 1))
    plots.risk_split(risk.aleatoric[:5], risk.epistemic[:5])
    plots.history(history.frame)
    plots.roc(risk.vacuitic, risk.vacuitic + 1)
    plots.ood_histogram(risk.vacuitic, risk.vacuitic + 1)
    plots.reliability(*(a.to(DEVICE) for a in CASES["ECE"][2]))
    plt.close("all")


# ---- tools
def test_what_a_wrapped_model_tells() -> None:
    torch.manual_seed(0)
    wrapped = compose(vote.Wrapper(3), sculpt.Wrapper(n_layers=1))(mlp()).to(DEVICE).eval()
    x = rows()[0].to(DEVICE)
    y = wrapped(x)
    torch.testing.assert_close(torch.stack([voter.to(DEVICE)(x) for voter in wrapped.voters()]).mean(0), y)
    wrapped.set_risk_parameters({name: 2 * value.cpu() for name, value in wrapped.named_risk_parameters()})
    wrapped(x, return_risk=True)
    assert DEVICE in str(wrapped.explain())


def test_diagnosis() -> None:
    here = diagnose(mlp(), torch.randn(4, 4))
    there = diagnose(mlp().to(DEVICE), torch.randn(4, 4, device=DEVICE))
    assert here.verdicts == there.verdicts
    assert [finding.kind for finding in here.findings] == [finding.kind for finding in there.findings]


@pytest.mark.parametrize("wrapper", ["plain", "vote + sculpt", "sample", "neo"])
def test_a_cell_of_a_grid(wrapper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample.Bernoulli, "apply", Formula.apply)
    options: dict[str, Any] = {
        "model": "mlp(width=5)",
        "wrapper": wrapper,
        "data": "diabetes",
        "seed": 0,
        "epochs": 2,
        "rows": 60,
    }
    here, there = (sweep.run(**options, fit_device=where) for where in ("cpu", DEVICE))
    for name, value in here.items():
        if not any(word in name for word in ("seconds", "memory")):
            close_enough = value if isinstance(value, str | None) else pytest.approx(value, rel=1e-3, nan_ok=True)
            assert there[name] == close_enough, name


@pytest.mark.parametrize("data", [beams(), pictures()], ids=["numbers", "pictures"])
def test_the_explorer(data: Any) -> None:
    torch.manual_seed(0)
    inputs = data.train.x[0].numel()
    network = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, data.n_outputs))
    output = "values" if data.task == "regression" else "logits"
    here = compose(vote.Wrapper(3, output=output), neo.Wrapper())(network)
    with quiet():
        fit(here, data, epochs=2, progress=False)
    a, b = (Explorer(model, data) for model in (here, copy.deepcopy(here).to(DEVICE)))
    torch.testing.assert_close(a.values, b.values, rtol=1e-4, atol=1e-5)
    for explorer in (a, b):
        explorer.step()
    assert a.row == b.row


def test_the_comparison() -> None:
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    frames = []
    for where in ("cpu", DEVICE):
        network = lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))  # noqa: E731
        made = Comparison(network, (x, x.sum(1, keepdim=True)), ["vote", "sculpt", "neo"], epochs=2, device=where)
        frames.append(made.start(block=True).results)
    torch.testing.assert_close(*(torch.tensor(frame[["rmse"]].to_numpy()) for frame in frames), rtol=1e-3, atol=1e-4)
