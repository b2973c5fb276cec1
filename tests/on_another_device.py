"""Calls and trainings with model and rows on a pretended device give what they give on the CPU; `test_other_device.py` starts it."""

from __future__ import annotations

import copy
import itertools
import pickle
from pathlib import Path
from typing import Any

import pretend_device
import pytest
import torch
from device_models import MODELS, WRAPPERS, mlp, quiet, trained
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from workbench import Progress, Risk, compose, fit, laplace, load, neo, sample, save, sculpt, snapshot, swag, vote
from workbench.engine.private import own_random
from workbench.engine.rescue import Unfused
from workbench.errors import WorkbenchWarning
from workbench.training import checkpoint as checkpoint_module
from workbench.wrappers.densities import DENSITIES

DEVICE = pretend_device.NAME
NOISY = {name for name in WRAPPERS if "sample" in name}


@pytest.fixture(autouse=True)
def the_same_start() -> None:
    torch.manual_seed(0)  # of the CPU and of the device


def home(value: Any) -> Any:
    """With tensors on the CPU, checked to come from the device."""
    if isinstance(value, Tensor):
        assert value.device.type == DEVICE
        return value.cpu()
    if isinstance(value, Risk):
        return value.map(home)
    return [home(item) for item in value] if isinstance(value, tuple | list) else value


def leaves(answer: Any) -> list[Tensor]:
    """Prediction and risks of a call."""
    y, risk = answer
    return [y, *([getattr(risk, name) for name in risk.names()] if isinstance(risk, Risk) else [risk])]


def answers(wrapped: Any, x: Tensor) -> list[Tensor]:
    """The same random numbers each time."""
    torch.manual_seed(1)
    with torch.no_grad(), quiet():
        return leaves(wrapped(x, return_risk=True))


def close(here: Any, there: Any, atol: float = 1e-8) -> None:
    """What the CPU gave, and what the device gave."""
    torch.testing.assert_close(here, home(there), rtol=1e-6, atol=atol)


def states_close(here: nn.Module, there: nn.Module) -> None:
    for (name, a), b in zip(here.state_dict().items(), there.state_dict().values(), strict=True):
        assert name.startswith("settings@") or b.device.type == DEVICE, name
        torch.testing.assert_close(a, b.cpu(), rtol=1e-6, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")


def criterion_of(wrapped: Any) -> nn.Module:
    return nn.MSELoss() if wrapped._workbench.output == "values" else nn.CrossEntropyLoss()


def still(wrapped: Any) -> Any:
    """Without dropout of the model's own; and noise in an order that is the same on all devices."""
    for module in wrapped.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    if "sample" in wrapped.methods:
        wrapped._workbench.strategy = "loop"
    return wrapped


# ---- the device itself
def test_the_device_refuses_what_a_gpu_refuses() -> None:
    x = torch.ones(3)
    y = x.to(DEVICE)
    assert y.device == torch.device(DEVICE, 0)
    for mixed in (lambda: x + y, lambda: y.add_(x), lambda: torch.cat([x, y]), lambda: F.linear(y, x[None])):
        with pytest.raises(RuntimeError, match="same device"):
            mixed()
    assert torch.equal((y + torch.tensor(1.0)).cpu(), x + 1)
    with pytest.raises(TypeError, match="convert"):
        y.numpy()


def test_the_device_counts_waits() -> None:
    x = torch.ones(3)
    y = x.to(DEVICE)
    pretend_device.WAITS.clear()
    y.sum().exp()
    x.to(DEVICE, non_blocking=True)
    assert pretend_device.WAITS == []
    for wait in (y.cpu, y.sum().item, lambda: y[y > 0], lambda: y[torch.tensor([0])], y.nonzero, lambda: x.to(DEVICE)):
        wait()
        assert pretend_device.WAITS, wait
        pretend_device.WAITS.clear()


# ---- calls
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", WRAPPERS)
def test_answers_losses_and_gradients(name: str, model: str) -> None:
    with quiet():
        here, x, y = trained(WRAPPERS[name], model)
    still(here).double()
    there = copy.deepcopy(here).to(DEVICE)
    x, y = x.double(), y.double() if y.is_floating_point() else y
    found: list[Any] = []
    for part, where in ((here, "cpu"), (there, DEVICE)):
        given = answers(part.eval(), x.to(where)) + answers(copy.deepcopy(part), x.to(where))
        part.train().zero_grad()
        torch.manual_seed(1)
        if part.methods == ("neo",):
            loss = part(x.to(where), return_risk=True)[1].mean()
        else:
            loss = part.loss(criterion_of(part), x.to(where), y.to(where))
        loss.backward()
        found.append([*given, loss.detach(), *(p.grad for p in part.parameters() if p.grad is not None)])
    close(*found, atol=1e-7)  # voters' spread of 1e-16
    states_close(here, there)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", WRAPPERS)
def test_warm_calls_and_steps_do_not_wait(name: str, model: str) -> None:
    """With all of the network's dropout, and weights that move between the calls."""
    with quiet():
        wrapped, x, y = trained(WRAPPERS[name], model)
    wrapped.to(DEVICE)
    x, y = x.to(DEVICE), y.to(DEVICE)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4, fused=True)

    def once() -> Tensor:
        for training in (False, True):
            wrapped.train(training)
            for risk in (False, True):
                wrapped(x, return_risk=risk)
        optimizer.zero_grad()
        risky = wrapped.methods == ("neo",)
        loss = wrapped(x, return_risk=True)[1].mean() if risky else wrapped.loss(criterion_of(wrapped), x, y)
        loss.backward()
        optimizer.step()
        return loss

    with quiet():
        once(), once()
        pretend_device.WAITS.clear()
        loss = once()
    assert pretend_device.WAITS == []
    assert loss.isfinite()


@pytest.mark.parametrize("strategy", ["vmap", "loop"])
@pytest.mark.parametrize("name", ["vote", "vote last layer", "vote rank-1", "sample", "sample, weights", "swag"])
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_each_strategy(name: str, model: str, strategy: str) -> None:
    with quiet():
        here, x, _ = trained(WRAPPERS[name], model)
    here.eval()._workbench.strategy = strategy
    there = copy.deepcopy(here).to(DEVICE)
    close(answers(here, x), answers(there, x.to(DEVICE)), atol=1e-6)
    states_close(here, there)


def test_dropout_under_two_vmaps_of_which_the_inner_one_draws_the_same_for_all() -> None:
    """torch.native_dropout, which is dropout on a GPU, crashes there."""
    x = torch.ones(50, 20, device=DEVICE)

    def kept(function: Any, outer: Tensor, inner: Tensor) -> Tensor:
        with Unfused():
            return function(x + outer, 0.25, True) + inner

    zeros = torch.zeros(3, device=DEVICE), torch.zeros(2, device=DEVICE)
    for function in (F.dropout, torch.dropout):
        inside = lambda outer: vmap(lambda inner: kept(function, outer, inner), randomness="same")(zeros[1])  # noqa: B023, E731
        found = vmap(inside, randomness="different")(zeros[0]).cpu()
        assert torch.equal(found[:, 0], found[:, 1])
        assert not torch.equal(found[0], found[1])
        torch.testing.assert_close(found.unique(), torch.tensor([0, 4 / 3]))
        assert 0.7 < (found > 0).double().mean() < 0.8


def test_a_network_may_make_tensors_on_the_cpu() -> None:
    class Makes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            shift, moved = torch.zeros(4), torch.zeros_like(x)
            shift[1] = 2.0
            moved[:] = x + shift.to(x.device)
            return self.attention(moved, moved, moved)[0]

    wrapped = vote.Wrapper(3)(Makes()).eval().to(DEVICE)
    x = torch.randn(2, 5, 4, device=DEVICE)
    found = answers(wrapped, x)
    assert "vote: rescue" in str(wrapped.explain())
    wrapped._workbench.strategy = "loop"
    torch.testing.assert_close(found, answers(wrapped, x))


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_model_is_wrapped_copied_and_pickled_where_it_is(name: str) -> None:
    there = WRAPPERS[name](mlp().to(DEVICE))
    here = copy.deepcopy(there).cpu()
    for part in (there, copy.deepcopy(there), pickle.loads(pickle.dumps(here)).to(DEVICE)):
        states_close(here, part)


def test_voters_begin_there_as_on_the_cpu() -> None:
    """And what the user draws next is what it would have been."""
    torch.manual_seed(0)
    model, found = mlp(), []
    for where in ("cpu", DEVICE):
        torch.manual_seed(0)
        wrapped = compose(vote.Wrapper(3), sculpt.Wrapper())(copy.deepcopy(model).to(where))
        found.append([*wrapped.parameters(), torch.rand(2, device=where)])
    close(*found)


# ---- training
def both(make: Any, data: Any, **options: Any) -> tuple[Any, Any, Any, Any]:
    """Two models after the same training, on the CPU and on the device, and their histories."""
    here = make()
    there = copy.deepcopy(here)
    settings = {"epochs": 4, "batch_size": 8, "progress": False, "dtype": torch.float64, **options}
    with quiet():
        history = fit(still(here), data, **settings)
        other = fit(still(there), data, device=DEVICE, **settings)
    a, b = (torch.tensor(found.frame.drop(columns="seconds").to_numpy()) for found in (history, other))
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8, equal_nan=True)
    states_close(here, there)
    return here, there, history, other


def rows(n: int = 40, shape: tuple[int, ...] = (4,), classes: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, *shape, generator=generator)
    return x, torch.arange(n) % 3 if classes else 3 + 2 * torch.randn(n, 3, generator=generator)


def is_classes(name: str) -> bool:
    return WRAPPERS[name](mlp())._workbench.output != "values"


@pytest.mark.parametrize("name", WRAPPERS)
def test_fit(name: str) -> None:
    data = rows(classes=is_classes(name))
    options = {"epochs": 8} if name in ("swag", "snapshot") else {}
    here, there, *_ = both(lambda: WRAPPERS[name](mlp()), data, **options)
    x = data[0].double()
    close(answers(here, x), answers(there, x.to(DEVICE)), atol=1e-6)


@pytest.mark.parametrize("name", ["plain", "vote", "sample", "swag", "snapshot", "laplace", "vote of sculpt, with neo"])
def test_fit_of_images(name: str) -> None:
    options = {"epochs": 8} if name in ("swag", "snapshot") else {}
    both(lambda: WRAPPERS[name](MODELS["cnn"][0]()), rows(shape=(2, 6, 6)), **options)


@pytest.mark.parametrize("options", [
    {"validation": 0}, {"standardize": False}, {"validation": rows(12)}, {"patience": 2},
    {"criterion": nn.L1Loss()}, {"seed": 3}, {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.01)},
], ids=str)  # fmt: skip
def test_fit_with_other_settings(options: dict[str, Any]) -> None:
    both(lambda: compose(vote.Wrapper(2), sculpt.Wrapper(n_layers=1))(mlp()), rows(), **options)


def test_fit_from_rows_that_are_there() -> None:
    """And from Datasets and DataLoaders, whose rows stay where they are."""
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
    """With the model's own dropout, whose numbers come from the device."""
    monkeypatch.setattr(checkpoint_module, "EVERY", 0.0)
    start = WRAPPERS[name](nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 3)))
    options: dict[str, Any] = {"epochs": 5, "batch_size": 16, "validation": 0.2, "device": DEVICE, "progress": False}
    whole, resumed = copy.deepcopy(start), copy.deepcopy(start)
    fit(whole, rows(), **options)
    written, write = itertools.count(1), checkpoint_module.Checkpoint.write

    def stop(self: Any, state: Any, force: bool = False) -> None:
        write(self, state, force)
        if next(written) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_module.Checkpoint, "write", stop)
    with pytest.warns(WorkbenchWarning, match="interrupted after 3 of 5"):
        fit(copy.deepcopy(start), rows(), checkpoint=tmp_path / "state.pt", **options)
    torch.rand(7, device=DEVICE)
    fit(resumed, rows(), checkpoint=tmp_path / "state.pt", **options)
    for (key, a), b in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b), key


def test_a_training_repeats_and_leaves_the_random_numbers_of_the_device_alone() -> None:
    start = compose()(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3)))
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = torch.rand(3, device=DEVICE)
        torch.manual_seed(seed)
        fit(again := copy.deepcopy(start), rows(), epochs=2, device=DEVICE, progress=False)
        assert torch.equal(torch.rand(3, device=DEVICE), expected)
        found.append(again.state_dict())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    with own_random(5, torch.device(DEVICE)):
        first = torch.rand(2, device=DEVICE)
    with own_random(5, torch.device(DEVICE, 0)):
        assert torch.equal(torch.rand(2, device=DEVICE), first)


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
    monkeypatch.setattr(checkpoint_module, "EVERY", 0.0)
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
def test_signatures(name: str) -> None:
    with quiet():
        here, there, *_ = both(lambda: neo.Wrapper(density=name, output="logits")(mlp()), rows(90, classes=True))
    x = 2 * rows(30)[0].double()
    close(answers(here, x), answers(there, x.to(DEVICE)), atol=1e-6)


def test_a_signature_of_a_frozen_model() -> None:
    x = rows()[0]
    here = neo.Wrapper()(mlp().requires_grad_(False))
    there = copy.deepcopy(here).to(DEVICE)
    here.fit(x), there.fit(x.to(DEVICE))
    close(answers(here.eval(), x), answers(there.eval(), x.to(DEVICE)), atol=1e-5)


@pytest.mark.parametrize("wrapper", [
    laplace.Wrapper(noise=0.1), laplace.Wrapper(), swag.Wrapper(n_samples=3, rank=3), snapshot.Wrapper(3),
    compose(vote.Wrapper(2), laplace.Wrapper()), sample.Wrapper(3, trainable=True),
], ids=repr)  # fmt: skip
def test_what_is_gathered_in_training(wrapper: Any) -> None:
    both(lambda: wrapper(mlp()), rows(), epochs=8)


# ---- files
@pytest.mark.parametrize("name", WRAPPERS)
def test_what_is_saved_there_answers_on_the_cpu(name: str, tmp_path: Path) -> None:
    data = rows(classes=is_classes(name))
    torch.manual_seed(0)
    there = still(WRAPPERS[name](mlp()))
    epochs = 8 if name in ("swag", "snapshot") else 2
    with quiet():
        fit(there, data, epochs=epochs, batch_size=8, device=DEVICE, progress=False)
    save(there, tmp_path / "model.safetensors")
    torch.save(there.state_dict(), tmp_path / "state.pt")
    loaded, again = still(load(tmp_path / "model.safetensors", mlp())), still(WRAPPERS[name](mlp()))
    with quiet():
        fit(
            again, data, epochs=epochs, batch_size=8, progress=False
        )  # what is gathered and units are there to be filled
    again.load_state_dict(torch.load(tmp_path / "state.pt", map_location="cpu", weights_only=True))
    expected = home(answers(there, data[0].to(DEVICE)))
    for part in (loaded, again):
        assert {p.device.type for p in part.parameters()} == {"cpu"}
        torch.testing.assert_close(answers(part.eval(), data[0]), expected, rtol=1e-4, atol=1e-5)
    back = load(tmp_path / "model.safetensors", mlp().to(DEVICE)).eval()
    torch.testing.assert_close(home(answers(still(back), data[0].to(DEVICE))), expected, rtol=1e-4, atol=1e-5)
