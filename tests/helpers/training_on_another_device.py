"""Trainings on a simulated device equal those on the CPU; started by `test_other_device.py`."""

from __future__ import annotations

import copy
import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from helpers.device_models import MODELS, WRAPPERS, leaves, mlp, quiet, relu_mlp
from helpers.other_device import DEVICE, answers, close, home, in_order, is_classes, rows, states_close
from helpers.training_models import interrupt_after
from workbench import Progress, calibrate, compose, fit, laplace, load, neo, save, sculpt, vote
from workbench.engine.effects import private_random as private
from workbench.engine.effects.private_random import own_random
from workbench.errors import WorkbenchWarning
from workbench.methods import curvature
from workbench.methods.densities import DENSITIES, discriminator
from workbench.training import checkpoint as checkpoint_module


# ---- training
def both(make: Any, data: Any, **options: Any) -> tuple[Any, Any, Any, Any]:
    """Return two models after the same training, on the CPU and on the device, and their histories."""
    here = make()
    there = copy.deepcopy(here)
    settings = {"epochs": 2, "batch_size": 8, "progress": False, "dtype": torch.float64, **options}
    with quiet():
        history = fit(in_order(here), data, **settings)
        other = fit(in_order(there), data, device=DEVICE, **settings)
    a, b = (torch.tensor(run.frame.drop(columns="seconds").to_numpy()) for run in (history, other))
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8, equal_nan=True)
    states_close(here, there)
    return here, there, history, other


@pytest.mark.parametrize("name", WRAPPERS)
def test_fit(name: str) -> None:
    data = rows(classes=is_classes(name))
    options = {"epochs": 8} if name in ("swag", "snapshot") else {}
    here, there, *_ = both(lambda: WRAPPERS[name](mlp()), data, **options)
    x = data[0].double()
    close(answers(here, x), answers(there, x.to(DEVICE)), atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"folds": 3}, {"patience": 1}], ids=["", "folds", "patience"])
def test_fit_on_the_device_that_the_environment_names(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook written for a CPU uses the device this way: the model is back on the CPU afterwards."""
    made = [compose(vote.Wrapper(6), sculpt.Wrapper(n_layers=1))(mlp())]
    made.append(copy.deepcopy(made[0]))
    devices, results = [], []
    for model, asked in zip(made, ("", DEVICE), strict=True):
        monkeypatch.setenv("WORKBENCH_DEVICE", asked)

        def look(_: Progress, model: Any = model) -> None:
            devices.append(next(model.parameters()).device.type)

        torch.manual_seed(0)
        with quiet():
            history = fit(model, rows(), epochs=2, callback=look, progress=False, dtype=torch.float64, **options)
        assert {p.device.type for p in model.parameters()} == {"cpu"}
        results.append(
            calibrate(model, history).interval(rows()[0].double())
            if "folds" in options
            else answers(model, rows()[0].double())
        )
    assert list(dict.fromkeys(devices)) == ["cpu", DEVICE]
    torch.testing.assert_close(*(list(one) for one in results), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["plain", "vote", "sample", "swag", "snapshot", "laplace", "vote of sculpt, with neo"])
def test_fit_of_images(name: str) -> None:
    options = {"epochs": 8} if name in ("swag", "snapshot") else {}
    both(lambda: WRAPPERS[name](MODELS["cnn"][0]()), rows(shape=(2, 6, 6)), **options)


@pytest.mark.parametrize("options", [
    {"validation": 0}, {"standardize": False}, {"validation": rows(12)}, {"patience": 2, "epochs": 4},
    {"criterion": nn.L1Loss()}, {"seed": 3}, {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.01)},
], ids=str)  # fmt: skip
def test_fit_with_other_settings(options: dict[str, Any]) -> None:
    both(lambda: compose(vote.Wrapper(2), sculpt.Wrapper(n_layers=1))(mlp()), rows(), **options)


def test_fit_from_rows_that_are_there() -> None:
    """The same for Datasets and DataLoaders, whose rows stay where they are."""
    x, y = (part.double() for part in rows())
    here = vote.Wrapper(2)(mlp())
    forms = (
        lambda x, y: (x, y),
        lambda x, y: TensorDataset(x, y),
        lambda x, y: DataLoader(TensorDataset(x, y), batch_size=8, shuffle=False),
    )
    for form in forms:
        a, b = copy.deepcopy(here), copy.deepcopy(here)
        for part, where in ((a, "cpu"), (b, DEVICE)):
            data = form(x.to(where), y.to(where))
            size = {} if isinstance(data, DataLoader) else {"batch_size": 8}
            fit(part, data, device=where, epochs=2, validation=0, progress=False, dtype=torch.float64, **size)
        states_close(a, b)


@pytest.mark.parametrize("name", ["plain", "sample"])
def test_a_training_goes_on_from_its_checkpoint(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own dropout draws its numbers on the device."""
    monkeypatch.setattr(checkpoint_module, "WRITE_INTERVAL", 0.0)
    start = WRAPPERS[name](nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 3)))
    options: dict[str, Any] = {"epochs": 5, "batch_size": 16, "validation": 0.2, "device": DEVICE, "progress": False}
    whole, resumed = copy.deepcopy(start), copy.deepcopy(start)
    fit(whole, rows(), **options)
    interrupt_after(3, monkeypatch)
    with pytest.warns(WorkbenchWarning, match="interrupted after 3 of 5"):
        fit(copy.deepcopy(start), rows(), checkpoint=tmp_path / "state.pt", **options)
    torch.rand(7, device=DEVICE)
    fit(resumed, rows(), checkpoint=tmp_path / "state.pt", **options)
    for (key, a), b in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b), key


def test_a_training_repeats_and_leaves_the_random_numbers_of_the_device_alone() -> None:
    start = compose()(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3)))
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = torch.rand(3, device=DEVICE)
        torch.manual_seed(seed)
        fit(again := copy.deepcopy(start), rows(), epochs=2, device=DEVICE, progress=False)
        assert torch.equal(torch.rand(3, device=DEVICE), expected)
        states.append(again.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    with own_random(5, torch.device(DEVICE)):
        first = torch.rand(2, device=DEVICE)
    with own_random(5, torch.device(DEVICE, 0)):
        assert torch.equal(torch.rand(2, device=DEVICE), first)


@pytest.mark.parametrize("name", ["plain", "vote of sample of sculpt", "snapshot"])
def test_a_training_in_another_thread_draws_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch does not let Python code create generators of such a device
    monkeypatch.setattr(
        private._Private, "__missing__", lambda self, device: self.setdefault(device, generator_of(self))
    )
    start = WRAPPERS[name](MODELS["transformer"][0]())
    options = {"epochs": 6 if name == "snapshot" else 2, "batch_size": 8, "device": DEVICE, "progress": False}

    def generator_of(made: Any) -> torch.Generator:
        return torch.Generator().manual_seed(made.seed)

    def train(wrapped: Any) -> None:
        with quiet():
            fit(wrapped, rows(shape=(5, 4)), **options)

    here, there = copy.deepcopy(start), copy.deepcopy(start)
    train(here)
    thread = threading.Thread(target=train, args=(there,))
    thread.start()
    thread.join()
    for (key, a), b in zip(here.state_dict().items(), there.state_dict().values(), strict=True):
        assert torch.equal(a, b), key
    assert not torch.equal(next(start.parameters()).to(DEVICE), next(there.parameters()))


def test_a_callback_may_predict() -> None:
    seen: list[Any] = []

    def look(progress: Progress) -> None:
        with torch.no_grad():
            place = next(progress.wrapped.parameters())
            seen.append(progress.wrapped(rows()[0].to(place), return_risk=True))

    def train(where: str, callback: Any) -> Any:
        torch.manual_seed(0)
        wrapped = vote.Wrapper(2)(mlp())
        fit(wrapped, rows(), epochs=2, device=where, progress=False, dtype=torch.float64, callback=callback)
        return wrapped

    a, b, c = train("cpu", look), train(DEVICE, look), train(DEVICE, None)
    states_close(a, b)
    assert all(torch.equal(x, y) for x, y in zip(b.parameters(), c.parameters(), strict=True))
    half = len(seen) // 2
    for here, there in zip(seen[:half], seen[half:], strict=True):
        close(leaves(here), leaves(there))


@pytest.mark.parametrize("options", [{}, {"lr": (0.01, 0.02)}, {"folds": torch.arange(40) % 3}], ids=str)
@pytest.mark.parametrize("head", [True, False])
def test_fit_with_folds(options: dict[str, Any], head: bool) -> None:
    parts = [vote.Wrapper(6), *([sculpt.Wrapper(n_layers=1)] if head else [])]
    here, there, history, other = both(lambda: compose(*parts)(mlp()), rows(), **{"folds": 3, **options})
    a, b = history.out_of_fold, other.out_of_fold
    close([*leaves((a.prediction, a.risk)), a.target], [*leaves((b.prediction, b.risk)), b.target])
    assert torch.equal(a.fold, b.fold)
    x = rows()[0].double()
    close(answers(here, x), answers(there, x.to(DEVICE)))


def test_fit_of_classes_with_folds() -> None:
    both(lambda: vote.Wrapper(6, output="logits")(mlp()), rows(classes=True), folds=3)


def test_a_training_with_folds_goes_on_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "WRITE_INTERVAL", 0.0)
    start = vote.Wrapper(6)(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 3)))
    options: dict[str, Any] = {"epochs": 4, "batch_size": 16, "folds": 3, "device": DEVICE, "progress": False}
    whole, resumed = copy.deepcopy(start), copy.deepcopy(start)
    fit(whole, rows(), **options)
    seen = itertools.count()
    with quiet():
        fit(
            copy.deepcopy(start), rows(), checkpoint=tmp_path / "state.pt", callback=lambda _: next(seen) > 4, **options
        )
        fit(resumed, rows(), checkpoint=tmp_path / "state.pt", **options)
    for (key, a), b in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b), key


@pytest.mark.parametrize("name", DENSITIES)
def test_signatures(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discriminator, "_STEPS", 50)  # what "auto" learns, on both devices
    with quiet():
        here, there, *_ = both(lambda: neo.Wrapper(density=name, output="logits")(relu_mlp()), rows(90, classes=True))
    x = 2 * rows(30)[0].double()
    close(answers(here, x), answers(there, x.to(DEVICE)), atol=1e-6)


def test_a_signature_of_a_frozen_model() -> None:
    x = rows()[0]
    here = neo.Wrapper()(mlp().requires_grad_(False))
    there = copy.deepcopy(here).to(DEVICE)
    here.fit(x), there.fit(x.to(DEVICE))
    close(answers(here.eval(), x), answers(there.eval(), x.to(DEVICE)), atol=1e-5)


@pytest.mark.parametrize("wrapper", [laplace.Wrapper(), compose(vote.Wrapper(2), laplace.Wrapper())], ids=repr)
def test_laplace_finds_its_noise(wrapper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curvature, "MAX_STEPS", 100)  # on both devices
    both(lambda: wrapper(mlp()), rows(), epochs=2)


# ---- files
@pytest.mark.parametrize("name", [name for name in WRAPPERS if "," not in name or "neo" in name])
def test_what_is_saved_there_answers_on_the_cpu(name: str, tmp_path: Path) -> None:
    data = rows(classes=is_classes(name))
    torch.manual_seed(0)
    there = in_order(WRAPPERS[name](mlp()))
    epochs = 8 if name in ("swag", "snapshot") else 2
    with quiet():
        fit(there, data, epochs=epochs, batch_size=8, device=DEVICE, progress=False)
    save(there, tmp_path / "model.safetensors")
    torch.save(there.state_dict(), tmp_path / "state.pt")
    loaded, again = in_order(load(tmp_path / "model.safetensors", mlp())), in_order(WRAPPERS[name](mlp()))
    with quiet():
        # creates the tensors for collected weights and units, which the state then fills
        fit(again, data, epochs=epochs, batch_size=8, progress=False)
    again.load_state_dict(torch.load(tmp_path / "state.pt", map_location="cpu", weights_only=True))
    expected = home(answers(there, data[0].to(DEVICE)))
    for part in (loaded, again):
        assert {p.device.type for p in part.parameters()} == {"cpu"}
        torch.testing.assert_close(answers(part.eval(), data[0]), expected, rtol=1e-4, atol=1e-5)
    back = load(tmp_path / "model.safetensors", mlp().to(DEVICE)).eval()
    torch.testing.assert_close(home(answers(in_order(back), data[0].to(DEVICE))), expected, rtol=1e-4, atol=1e-5)
